"""Types of single values: names, zones, labels and variables, each with the message for an invalid value."""

import re
from collections.abc import Iterable
from typing import Annotated, TypeVar

from pydantic import AfterValidator

from training.accelerators import accelerator

IMAGE_BY_DIGEST = r"^[^@\s]+@sha256:[0-9a-f]{64}$"

_LABEL = re.compile(r"[a-z0-9_-]{0,63}")
T = TypeVar("T", bound=Iterable[str])


def _matches(pattern: str, problem: str) -> AfterValidator:
    """Returns a validator that raises ValueError ("VALUE problem") unless the pattern matches the whole value."""

    def check(value: str) -> str:
        if not re.fullmatch(pattern, value):
            raise ValueError(f"{value!r} {problem}")
        return value

    return AfterValidator(check)


def _known_accelerator(value: str) -> str:
    """Returns the type unchanged. Raises UnknownAccelerator if there is none of that name."""
    accelerator(value)  # UnknownAccelerator is a ValueError: pydantic reports it with its place
    return value


def _labels(value: dict[str, str]) -> dict[str, str]:
    """Returns the labels unchanged. Raises ValueError for a key or a value that Google refuses, and for a key that
    begins with tpu-launch, which the launcher itself gives."""
    for key, text in value.items():
        if not _LABEL.fullmatch(key) or not key or not _LABEL.fullmatch(text):
            raise ValueError(f"label {key}={text}: lower-case letters, digits, '_' and '-' only, 63 characters at most")
        if key.startswith("tpu-launch"):
            raise ValueError(f"label {key}: tpu-launch gives these labels itself, and deletes slices by them")
    return value


def _variables(names: T) -> T:
    """Returns the names unchanged. Raises ValueError for one that no environment variable can have."""
    for name in names:
        if not re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]*", name):
            raise ValueError(f"{name!r} is not the name of an environment variable")
    return names


def _one_line(value: str) -> str:
    """Returns the value unchanged. Raises ValueError, which does not show the value, for a line break or NUL."""
    if "\n" in value or "\0" in value:
        raise ValueError("the value may not contain a line break")
    return value


Name = Annotated[
    str,
    _matches(
        r"[a-z]([-a-z0-9]{0,48}[a-z0-9])?",
        "must be a lower-case letter, then letters, digits or hyphens, 50 characters at most",
    ),
]
AcceleratorType = Annotated[str, AfterValidator(_known_accelerator)]
Labels = Annotated[dict[str, str], AfterValidator(_labels)]
VariableNames = Annotated[list[str], AfterValidator(_variables)]
Environment = Annotated[dict[str, Annotated[str, AfterValidator(_one_line)]], AfterValidator(_variables)]
SecretKey = Annotated[
    str,
    _matches(
        r"[a-z0-9]([-a-z0-9.]*[a-z0-9])?/[-._a-zA-Z0-9]+",
        "must be SECRET/KEY, the names of a Kubernetes Secret and of a key in it",
    ),
]
ClusterSecrets = Annotated[dict[str, SecretKey], AfterValidator(_variables)]
Zone = Annotated[str, _matches(r"[a-z]+-[a-z]+[0-9]+-[a-z0-9]+", "is not the name of a zone, like us-central2-b")]
