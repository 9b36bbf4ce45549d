"""The placement of a run's state on the devices: one function, which the step, checkpoints, export and preflight read.

A mesh has the axes "data" and "fsdp", in the order of the devices: neighbours are along "fsdp". The rows of a batch are
split over all devices. A matrix of the state is split over "fsdp", and each device of "data" holds a copy.
"""

from collections.abc import Mapping

from training.checkpoint.tensors import HeldSlice, Slice
from training.optim import STACKED

ROWS, FSDP = "rows", "fsdp"
PACKED = "/vectors of "  # in the name of a buffer with a vector of the state in each row
Axes = tuple[str | None, ...]  # for each axis of an array: what it is split over, ROWS (all devices) or FSDP, or None
MeshShape = Mapping[str, int]  # axis -> number of devices along it


def mesh_shape(devices: int, fsdp: int) -> dict[str, int]:
    """Returns the sizes of a mesh's axes, "data" and "fsdp". `fsdp` divides `devices`."""
    return {"data": devices // fsdp, FSDP: fsdp}


def rows_first(dimensions: int) -> Axes:
    """Returns the axes of an array that is split by its first dimension alone, over all devices."""
    return (ROWS, *[None] * (dimensions - 1))


def place(name: str, shape: tuple[int, ...], mesh: MeshShape) -> Axes:
    """Returns FSDP or None for each axis of a tensor of the state. If "fsdp" is above 1, a tensor of several axes is
    split along the longest that "fsdp" divides, the first of equal ones; vectors and packed buffers are never split.
    `name`: in a checkpoint, `model/<parameter>` or `<optimizer's tensor>/<parameter>`, or that of a packed buffer, or
    of stacked parameters (STACKED), whose first axis counts them and is not split; `shape`: of the whole tensor."""
    if STACKED in name:
        return (None, *place(name.replace(STACKED, "."), shape[1:], mesh))
    axes: list[str | None] = [None] * len(shape)
    divisible = [axis for axis, length in enumerate(shape) if length % mesh[FSDP] == 0]
    if mesh[FSDP] > 1 and len(shape) > 1 and PACKED not in name and divisible:
        axes[max(divisible, key=lambda axis: shape[axis])] = FSDP
    return tuple(axes)


def slices(name: str, shape: tuple[int, ...], mesh: MeshShape, hosts: int) -> list[HeldSlice]:
    """Returns the slices of a split tensor in the order of "fsdp", with the hosts whose devices hold each; [] if every
    device holds all of the tensor."""
    axes = place(name, shape, mesh)
    if not any(axes):
        return []
    axis, count = axes.index(FSDP), mesh[FSDP]
    length, devices_of_host = shape[axis] // count, mesh["data"] * count // hosts
    held = []
    for index in range(count):
        offsets, sizes = [0] * len(shape), list(shape)
        offsets[axis], sizes[axis] = index * length, length
        holders = {device // devices_of_host for device in range(index, mesh["data"] * count, count)}
        held.append(HeldSlice(Slice(tuple(offsets), tuple(sizes)), tuple(sorted(holders))))
    return held


def bytes_on_device(name: str, shape: tuple[int, ...], mesh: MeshShape) -> int:
    """Returns the bytes that an fp32 tensor of the state takes on each device: a share if `place` splits it (without
    padding), else all. `name`, `shape` (of the whole tensor): as there."""
    size = 4
    for length, axis in zip(shape, place(name, shape, mesh), strict=True):
        size *= length // mesh[axis] if axis else length
    return size
