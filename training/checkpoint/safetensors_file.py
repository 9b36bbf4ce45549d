"""The safetensors file layout (https://github.com/huggingface/safetensors#format), written and read without a copy.

A file is 8 bytes with the length of the header (little-endian), the header as JSON, then the bytes of the tensors. The
safetensors package takes whole arrays and returns whole bytes; here a snapshot is copied straight into the bytes of the
file, and a file is read by ranges. Only the header is checked here; callers verify the checksum of the tensors.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any


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


def plan_file(
    tensors: Sequence[tuple[str, TensorSpec]], metadata: Mapping[str, str] | None = None
) -> tuple[bytes, dict[str, slice], int]:
    """Returns a file's header bytes (up to its first tensor), the byte range of each tensor, and the file's size."""
    header: dict[str, dict[str, Any]] = {}
    offset = 0
    for name, spec in tensors:
        header[name] = {"dtype": spec.dtype, "shape": list(spec.shape), "data_offsets": [offset, offset + spec.size]}
        offset += spec.size
    text = json.dumps(
        {"__metadata__": dict(metadata), **header} if metadata else header, separators=(",", ":")
    ).encode()
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
    """Returns the tensors of a file, as views of `data`. Raises Damaged when it is not a safetensors file."""
    view = memoryview(data)
    return {name: (spec, view[place]) for name, (spec, place) in parse_header(view, len(view)).items()}


def header_end(data: bytes | memoryview) -> int:
    """Returns how many bytes precede the first tensor, from the first 8 bytes of a file."""
    return 8 + int.from_bytes(data[:8], "little")


def parse_header(head: bytes | memoryview, size: int) -> dict[str, tuple[TensorSpec, slice]]:
    """Returns specification and byte range of each tensor in a file of `size` bytes. `head` holds the file's first
    bytes, at least up to its first tensor. Raises Damaged when they are not a safetensors header, or a tensor lies
    outside of the file."""
    try:
        start = header_end(head)
        header = json.loads(bytes(head[8:start]))
        header.pop("__metadata__", None)
        tensors = {}
        for name, entry in header.items():
            begin, end = entry["data_offsets"]
            if type(begin) is not int or type(end) is not int or not 0 <= begin <= end <= size - start:
                raise Damaged(f"tensor {name} lies outside its part")
            spec = TensorSpec(entry["dtype"], tuple(entry["shape"]), end - begin)
            tensors[name] = (spec, slice(start + begin, start + end))
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise Damaged(f"not a safetensors file ({error})") from None
    return tensors
