"""`run --env-file FILE`: NAME=VALUE lines for the command on every host. Values travel as secrets do.

python-dotenv parses the lines: comments, `export `, quotes. Variables are not expanded, and this process's environment
is not changed: PATH in such a file is for the command alone.
"""

import io
import re
from dataclasses import dataclass, field
from pathlib import Path

from dotenv.parser import parse_stream

from launcher.errors import BadInput

_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")


@dataclass(frozen=True)
class EnvFile:
    """The variables of an env file."""

    path: Path
    values: dict[str, str] = field(repr=False)


def read(path: Path) -> EnvFile:
    """Returns the variables of the file. Raises BadInput, with file:line and no value, if the file can't be read, or a
    line is not NAME=VALUE."""
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise BadInput(f"--env-file {path}: can't be read: {error}") from None
    return parse(text, path)


def parse(text: str, path: Path) -> EnvFile:
    """Returns the variables in a file's text, as `read` does; `path` is for messages."""
    values = {}
    for binding in parse_stream(io.StringIO(text)):
        if binding.key is None and not binding.error:
            continue  # a comment, or nothing
        if binding.key is None or binding.value is None or not _NAME.fullmatch(binding.key):
            text_before = binding.original.string[: -len(binding.original.string.lstrip())]
            raise BadInput(f"{path}:{binding.original.line + text_before.count(chr(10))}: must be NAME=VALUE")
        if "\0" in binding.value:
            raise BadInput(f"{path}: the value of {binding.key} holds a NUL byte, which no variable can")
        values[binding.key] = binding.value
    return EnvFile(path, values)
