"""What may not stand in a run's file: values that look like secrets, where they would stay visible.

Only a file that is loaded is checked: a run that was started with such a value can still be watched and stopped.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping

from training.yaml_file import ConfigError, Document

_SECRET_NAME = re.compile(
    r"(TOKEN|CREDENTIALS?|API_?KEY|PASSPHRASE|PWD)$"
    r"|PASSWORD|PASSWD|(^|_)SECRETS?(_|$)"
    r"|(^|_)(ACCESS|ACCOUNT|AUTH|DEPLOY|ENCRYPTION|MASTER|PRIVATE|SERVICE|SIGNING|SSH|STORAGE)_([A-Z0-9]+_)*KEY"
    r"(_(BASE64|B64|JSON|PEM))?$",
    re.IGNORECASE,
)
_NO_SECRET = re.compile(r"_(ID|NAME|FILE|PATH|DIR)$|^(OLD)?PWD$", re.IGNORECASE)
_CREDENTIALS_IN_VALUE = re.compile(r"://[^/\s:@]+:[^/\s@]+@|://[^/\s:@]{20,}@|PRIVATE KEY-----")

# Place in the file -> why a secret does not belong there, and what to do.
_VISIBLE = {
    ("run", "environment"): "values here are visible in files and to `docker inspect`: name it in run.secrets instead",
    ("image", "build_args"): (
        "build arguments stay visible in the image, in its log and in `tpu-launch plan`: build the image with a build "
        "secret yourself, and name it in image.reference"
    ),
}


def refuse(document: Document) -> None:
    """Raises ConfigError, with the line, for the first variable that looks like a secret. Shows no value."""
    for place, reason in _VISIBLE.items():
        for name, value in _variables(document, place):
            if is_secret(name, value):
                raise ConfigError(
                    f"{document.place((*place, name))}: {'.'.join(place)}: {name} looks like a secret, and {reason}"
                )


def is_secret(name: str, value: str) -> bool:
    """Whether a variable's name says that its value is a secret, or the value holds a password, a token in a URL or a
    private key."""
    if _CREDENTIALS_IN_VALUE.search(value):
        return True
    if name.upper().endswith("CREDENTIALS") and re.fullmatch(r"/[\w./-]+\.\w+", value):
        return False  # where the credentials are
    return _SECRET_NAME.search(name) is not None and not _NO_SECRET.search(name)


def _variables(document: Document, place: tuple[str, str]) -> Iterator[tuple[str, str]]:
    section = document.value.get(place[0])
    variables = section.get(place[1]) if isinstance(section, Mapping) else None
    for name, value in (variables or {}).items():
        yield str(name), str(value)
