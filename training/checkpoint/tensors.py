"""Tensors in the files of a checkpoint: the safetensors layout, and slices. Pure functions.

A file (https://github.com/huggingface/safetensors#format) is 8 bytes with the length of the header (little-endian), the
header as JSON, then the bytes of the tensors. The safetensors package takes whole arrays and returns whole bytes; here
a snapshot is copied straight into the bytes of the file, and a file is read by ranges. Only the header is checked here;
callers verify the checksum of the tensors.

A checkpoint stores each tensor as one or more slices, boxes in its global shape, which may be in different files.
Together they must hold every element exactly once.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import numpy as np


class Damaged(Exception):
    """A checkpoint, or a part of one, differs from what was committed; the message says how."""


class NotFinite(Damaged):
    """A checkpoint is as it was committed, but a tensor in it has a NaN or an infinity."""


@dataclass(frozen=True)
class TensorSpec:
    """A tensor's dtype (safetensors' name: F32, BF16, I64), shape, and size in bytes."""

    dtype: str
    shape: tuple[int, ...]
    size: int

    def cut(self, box: Slice) -> TensorSpec:
        """Returns the specification of a slice of such a tensor."""
        return TensorSpec(self.dtype, box.sizes, self.size * box.elements // max(1, math.prod(self.shape)))


def plan_file(
    tensors: Sequence[tuple[str, TensorSpec]], metadata: Mapping[str, str] | None = None
) -> tuple[bytes, dict[str, slice], int]:
    """Returns a file's header bytes (up to its first tensor), the byte range of each tensor, and the file's size. The
    same tensors give the same bytes for ever: checkpoints are read by the ranges that their manifests imply."""
    header: dict[str, dict[str, Any]] = {}
    offset = 0
    for name, spec in tensors:
        header[name] = {"dtype": spec.dtype, "shape": list(spec.shape), "data_offsets": [offset, offset + spec.size]}
        offset += spec.size
    content = {"__metadata__": dict(metadata), **header} if metadata else header
    text = json.dumps(content, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    start = 8 + len(text)
    ranges = {name: slice(*(start + offset for offset in entry["data_offsets"])) for name, entry in header.items()}
    return len(text).to_bytes(8, "little") + text, ranges, start + offset


def encode(
    tensors: Sequence[tuple[str, TensorSpec]],
    metadata: Mapping[str, str] | None = None,
    allocate: Callable[[int], memoryview] = lambda size: memoryview(bytearray(size)),
) -> tuple[memoryview, dict[str, memoryview]]:
    """Allocates a file's bytes, and writes the header into them. Returns them, and the view of each tensor to fill."""
    head, ranges, size = plan_file(tensors, metadata)
    data = allocate(size)
    data[: len(head)] = head
    return data, {name: data[place] for name, place in ranges.items()}


def decode(data: bytes | memoryview) -> dict[str, tuple[TensorSpec, memoryview]]:
    """Returns the tensors of a safetensors file, as views of `data`. Raises Damaged if its header can't be read or a
    tensor lies outside of it; does not compare sizes with dtypes and shapes."""
    view = memoryview(data)
    tensors = {}
    try:
        start = 8 + int.from_bytes(view[:8], "little")
        header = json.loads(bytes(view[8:start]))
        header.pop("__metadata__", None)
        for name, entry in header.items():
            begin, end = entry["data_offsets"]
            if type(begin) is not int or type(end) is not int or not 0 <= begin <= end <= len(view) - start:
                raise Damaged(f"tensor {name} lies outside its part")
            spec = TensorSpec(entry["dtype"], tuple(entry["shape"]), end - begin)
            tensors[name] = (spec, view[start + begin : start + end])
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise Damaged(f"not a safetensors file ({error})") from None
    return tensors


@dataclass(frozen=True)
class Slice:
    """A box: along each axis, the elements from `offsets` on, `sizes` of them."""

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]

    @property
    def elements(self) -> int:
        return math.prod(self.sizes)

    @property
    def ends(self) -> tuple[int, ...]:
        """Returns the first index after the box, along each axis."""
        return tuple(offset + size for offset, size in zip(self.offsets, self.sizes, strict=True))

    def covers(self, shape: tuple[int, ...]) -> bool:
        """Returns whether the box is a whole tensor of this shape."""
        return self.sizes == shape and not any(self.offsets)

    def overlaps(self, other: Slice) -> bool:
        """Returns whether an element is in both boxes; neither may be empty."""
        sides = zip(self.offsets, self.ends, other.offsets, other.ends, strict=True)
        return all(start < other_end and other_start < end for start, end, other_start, other_end in sides)

    def __str__(self) -> str:
        """Formats the box like an array index: `[0:2,4:8]`."""
        return "[" + ",".join(f"{start}:{end}" for start, end in zip(self.offsets, self.ends, strict=True)) + "]"


@dataclass(frozen=True)
class HeldSlice:
    """A slice of the state, and the hosts whose devices hold it."""

    box: Slice
    hosts: tuple[int, ...]


# The slices of the tensors that are split over the devices, by name. Every host holds all of the other tensors.
StateSlices = Mapping[str, Sequence[HeldSlice]]
NOT_SPLIT: StateSlices = MappingProxyType({})


def whole(shape: tuple[int, ...]) -> Slice:
    """Returns the slice that is a whole tensor of this shape."""
    return Slice((0,) * len(shape), shape)


def load_whole(_name: str, spec: TensorSpec) -> Slice:
    """Returns the whole tensor as the slice to load, for backends whose hosts load all of each tensor."""
    return whole(spec.shape)


def key_in_part(name: str, box: Slice, shape: tuple[int, ...]) -> str:
    """Returns the name of a slice in its safetensors file: the tensor's own name when the slice is whole."""
    return name if box.covers(shape) else f"{name}{box}"


def partition_error(shape: tuple[int, ...], boxes: Sequence[Slice]) -> str | None:
    """Explains why `boxes` do not hold every element of a tensor of `shape` exactly once; None when they do."""
    for box in boxes:
        if len(box.offsets) != len(shape) or len(box.sizes) != len(shape):
            return f"slice {box} has {len(box.sizes)} axes, the tensor {len(shape)}"
        if any(
            offset < 0 or size < 0 or offset + size > length
            for offset, size, length in zip(box.offsets, box.sizes, shape, strict=True)
        ):
            return f"slice {box} is out of the range of shape {list(shape)}"
    overlap = _find_overlap([box for box in boxes if box.elements])
    if overlap:
        return f"slices {overlap[0]} and {overlap[1]} overlap"
    held, elements = sum(box.elements for box in boxes), math.prod(shape)
    if held != elements:
        return f"its slices leave a gap: they hold {held} of {elements} elements"
    return None


def _find_overlap(boxes: Sequence[Slice]) -> tuple[Slice, Slice] | None:
    """Returns two `boxes` (none empty) that overlap, or None. Compares those that meet on the axis with most cuts."""
    if len(boxes) < 2:
        return None
    axes = range(len(boxes[0].offsets))
    if not axes:
        return boxes[0], boxes[1]  # a scalar has one element
    axis = max(axes, key=lambda number: len({box.offsets[number] for box in boxes}))
    open_boxes: list[Slice] = []
    for box in sorted(boxes, key=lambda box: box.offsets[axis]):
        open_boxes = [earlier for earlier in open_boxes if earlier.ends[axis] > box.offsets[axis]]
        for earlier in open_boxes:
            if earlier.overlaps(box):
                return earlier, box
        open_boxes.append(box)
    return None


def copy_into(target: memoryview, held: Slice, data: memoryview, box: Slice) -> int:
    """Copies the elements of `box` (its bytes are `data`) that are in `held` too to their places in `target`, the bytes
    of `held`; both in C order. Returns their number."""
    starts, ends = map(max, held.offsets, box.offsets), map(min, held.ends, box.ends)
    spans = [slice(start, max(start, end)) for start, end in zip(starts, ends, strict=True)]
    count = math.prod(span.stop - span.start for span in spans)
    if count:
        width = len(data) // box.elements  # bytes of an element
        into, source = (
            np.frombuffer(view, np.uint8).reshape(*own.sizes, width)[
                tuple(slice(span.start - at, span.stop - at) for span, at in zip(spans, own.offsets, strict=True))
            ]
            for view, own in ((target, held), (data, box))
        )
        into[...] = source
    return count
