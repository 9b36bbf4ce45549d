"""`run --env-file FILE`: lines of NAME=VALUE for the command on every host. They travel as secrets do: no argument, no
file and no log shows a value.

Empty lines and lines that begin with # are passed over, a leading `export ` too; a value in quotes loses them, and
nothing is expanded.
"""

from __future__ import annotations

import re
from pathlib import Path

from launcher.errors import BadInput

_LINE = re.compile(r"(?:export\s+)?([A-Za-z_][A-Za-z0-9_]*)=(.*)", re.DOTALL)


def read(path: Path) -> dict[str, str]:
    """The variables of the file. Raises BadInput naming file:line."""
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise BadInput(f"--env-file {path}: can't be read: {error}") from None
    values = {}
    for number, line in enumerate(lines, 1):
        text = line.strip()
        if not text or text.startswith("#"):
            continue
        match = _LINE.fullmatch(text)
        if match is None:
            raise BadInput(f"{path}:{number}: must be NAME=VALUE")  # the line itself may be a secret
        value = match[2]
        if len(value) >= 2 and value[0] == value[-1] and value[0] in "'\"":
            value = value[1:-1]
        values[match[1]] = value
    return values
