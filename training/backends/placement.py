"""The placement of a run's state on the devices: one function, which the step, snapshots and preflight read.

A mesh has named axes. Today there is one, "data", over which the rows of a batch are split.
"""

from __future__ import annotations

from collections.abc import Mapping

Axes = tuple[str | None, ...]  # for each axis of an array: the mesh's axis that it is split over, or None


def place(name: str, shape: tuple[int, ...]) -> Axes:
    """Returns how a tensor of the state is split: not at all, so that every device holds all of it. `name`: in a
    checkpoint, `model/<parameter>` or `<optimizer's tensor>/<parameter>`; `shape`: of the whole tensor."""
    return (None,) * len(shape)


def bytes_on_device(name: str, shape: tuple[int, ...], mesh: Mapping[str, int]) -> int:
    """Returns the bytes of an fp32 tensor of the state on each device. `mesh`: axis -> number of devices along it."""
    size = 4
    for length, axis in zip(shape, place(name, shape), strict=True):
        size *= -(-length // mesh[axis]) if axis else length
    return size
