"""Types of single values: names, zones, labels and variables, each with the message for an invalid value."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Annotated

from pydantic import AfterValidator

from training.accelerators import accelerator

IMAGE_BY_DIGEST = r"^[^@\s]+@sha256:[0-9a-f]{64}$"

_LABEL = re.compile(r"[a-z0-9_-]{0,63}")
_SECRET_KEY = re.compile(r"[a-z0-9]([-a-z0-9.]*[a-z0-9])?/[-._a-zA-Z0-9]+")


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


def _require_variables(names: Iterable[str]) -> None:
    """Raises ValueError for a name that no environment variable can have."""
    for name in names:
        if not re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]*", name):
            raise ValueError(f"{name!r} is not the name of an environment variable")


def _variable_names(value: list[str]) -> list[str]:
    """Returns the names unchanged. Raises ValueError for one that no environment variable can have."""
    _require_variables(value)
    return value


def _environment(value: dict[str, str]) -> dict[str, str]:
    """Returns the variables unchanged. Raises ValueError for an invalid name, or a value with a line break or NUL."""
    _require_variables(value)
    for key, text in value.items():
        if "\n" in text or "\0" in text:
            raise ValueError(f"the value of {key} may not contain a line break")
    return value


def _secrets(value: dict[str, str]) -> dict[str, str]:
    """Returns variable name -> SECRET/KEY unchanged. Raises ValueError for an invalid name or another form of value."""
    _require_variables(value)
    for key, source in value.items():
        if not _SECRET_KEY.fullmatch(source):
            raise ValueError(
                f"{key}: {source!r} must be SECRET/KEY, the names of a Kubernetes Secret and of a key in it"
            )
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
VariableNames = Annotated[list[str], AfterValidator(_variable_names)]
Environment = Annotated[dict[str, str], AfterValidator(_environment)]
ClusterSecrets = Annotated[dict[str, str], AfterValidator(_secrets)]
Zone = Annotated[str, _matches(r"[a-z]+-[a-z]+[0-9]+-[a-z0-9]+", "is not the name of a zone, like us-central2-b")]
