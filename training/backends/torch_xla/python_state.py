"""Finds values of Python that a traced step changes: a cached step is not traced, and would not change them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import suppress
from functools import partial
from types import CellType, FunctionType, MethodType, ModuleType
from typing import Any

from torch import Tensor

_PLAIN = (bool, int, float, complex, str, bytes, type(None))


def read_plain_values(*roots: object) -> list[Any]:
    """Returns the numbers, texts and None that are reachable from objects through attributes, containers, closures and
    the places of iterators, in an order that repeats. Leaves out tensors, sets, generators, classes and globals."""
    found: list[Any] = []
    seen: dict[int, object] = {}  # keeps what was made on the way, so that its id stays its own
    left: list[Any] = list(roots)
    while left:
        value = left.pop()
        if isinstance(value, _PLAIN):
            found.append(value)
        elif id(value) not in seen and not isinstance(value, (Tensor, type, ModuleType)):
            seen[id(value)] = value
            left += getattr(value, "__dict__", {}).values()
            with suppress(TypeError, ValueError):  # a generator's place, and an empty cell, can't be read
                left += _parts(value)
    return found


def _parts(value: Any) -> list[Any]:
    """Returns what a container, function, method, partial or iterator holds beside its attributes; else []."""
    if isinstance(value, Mapping):
        return [*value, *value.values()]
    if isinstance(value, FunctionType):
        return [*(value.__closure__ or ())]
    if isinstance(value, CellType):
        return [value.cell_contents]
    if isinstance(value, MethodType):
        return [value.__self__, value.__func__]
    if isinstance(value, partial):
        return [value.func, value.args, value.keywords]
    if isinstance(value, Iterator):
        return [*value.__reduce__()[1:]]
    return [*value] if isinstance(value, (list, tuple)) else []
