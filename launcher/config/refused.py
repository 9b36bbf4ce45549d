"""Refuses values of a run's file whose types are right: secrets that would stay visible, empty texts, and texts that
would fail only later."""

import re
from collections.abc import Iterator, Mapping
from typing import Any

from training.config import IGNORED_SECTIONS as LAUNCHER_SECTIONS
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

# Key -> why a secret does not belong there, and what to do instead.
_VISIBLE = {
    ("run", "environment"): "values here are visible in files and to `docker inspect`: name it in run.secrets instead",
    ("image", "build_args"): (
        "build arguments stay visible in the image, in its log and in `tpu-launch plan`: build the image with a build "
        "secret yourself, and name it in image.reference"
    ),
}


_NAME = r"[a-z0-9]+([._-]+[a-z0-9]+)*"
# Key -> the pattern of its text, and what to write instead.
_FORMS = {
    ("image", "repository"): (
        rf"([a-zA-Z0-9.-]+(:[0-9]+)?/)?{_NAME}(/{_NAME})*",
        "must be a repository's name in lower-case letters, without https://, tag or digest, like "
        "us-central2-docker.pkg.dev/my-project/images/bert",
    ),
    ("gke", "gcsfuse", "bucket"): (r"[a-z0-9][a-z0-9._-]+[a-z0-9]", "must be a bucket's name, without gs://"),
    ("run", "shm_size"): (r"0*[1-9].*", "must be more than 0"),
}
_MAPS = frozenset([*_VISIBLE, ("slice", "labels"), ("gke", "secrets"), ("gke", "node_selector")])
_MAY_BE_EMPTY = frozenset([("gke", "gcsfuse", "options")])

Key = tuple[str, ...]


def refuse(document: Document) -> None:
    """Raises ConfigError with file:line for the first refused value. The message shows no secret."""
    for place, reason in _VISIBLE.items():
        for name, value in _variables(document, place):
            if is_secret(name, value):
                raise ConfigError(
                    f"{document.place((*place, name))}: {'.'.join(place)}: {name} looks like a secret, and {reason}"
                )
    for section in LAUNCHER_SECTIONS:
        for key, value in _texts((section,), document.value.get(section)):
            problem = _problem(key, value)
            if problem:
                raise ConfigError(f"{document.place(key)}: {'.'.join(key)}: {value!r} {problem}")


def _problem(key: Key, value: str) -> str:
    """Returns the problem of a text (empty, or not of the key's form); "" without a problem."""
    if not value.strip() and key not in _MAY_BE_EMPTY:
        return "is empty: write a value, or leave out the key"
    pattern, message = _FORMS.get(key, ("", ""))
    return message if pattern and not re.fullmatch(pattern, value) else ""


def _texts(key: Key, value: Any) -> Iterator[tuple[Key, str]]:
    """Yields a section's texts, inner sections' too, with their keys; none in lists and in maps with keys of users."""
    if isinstance(value, str):
        yield key, value
    elif isinstance(value, Mapping) and key not in _MAPS:
        for name, inner in value.items():
            yield from _texts((*key, str(name)), inner)


def is_secret(name: str, value: str) -> bool:
    """Returns whether a variable is named like a secret (and not like a file's or an id's name), or its value holds a
    password, a token in a URL or a private key."""
    if _CREDENTIALS_IN_VALUE.search(value):
        return True
    if name.upper().endswith("CREDENTIALS") and re.fullmatch(r"/[\w./-]+\.\w+", value):
        return False  # the path of a credentials file
    return _SECRET_NAME.search(name) is not None and not _NO_SECRET.search(name)


def _variables(document: Document, place: tuple[str, str]) -> Iterator[tuple[str, str]]:
    """Yields the names and values of the map at a place of the file, such as run.environment; nothing without one."""
    section = document.value.get(place[0])
    variables = section.get(place[1]) if isinstance(section, Mapping) else None
    for name, value in (variables or {}).items():
        yield str(name), str(value)
