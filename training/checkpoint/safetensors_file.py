"""The safetensors file layout (https://github.com/huggingface/safetensors#format), written and read without a copy.

A file is 8 bytes with the length of the header (little-endian), the header as JSON, then the bytes of the tensors. The
safetensors package takes whole arrays and returns whole bytes; here a snapshot is copied straight into the bytes of the
file, and a file is read by ranges. Only the header can be malformed; whoever reads the tensors verifies their checksum.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any


class Damaged(Exception):
    """A checkpoint, or a part of one, is not what was committed. The message says what differs."""


class NotFinite(Damaged):
    """A checkpoint is what was committed, and a tensor in it has a NaN or an infinity."""


@dataclass(frozen=True)
class TensorSpec:
    """What a tensor's bytes mean: dtype (safetensors' name: F32, BF16, I64), shape, and size in bytes."""

    dtype: str
    shape: tuple[int, ...]
    size: int


def plan_file(
    tensors: Sequence[tuple[str, TensorSpec]], metadata: Mapping[str, str] | None = None
) -> tuple[bytes, dict[str, slice], int]:
    """Plans a file.

    Returns:
        The first bytes of the file (up to its first tensor), the byte range of each tensor, and the size of the file.
    """
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
    """Allocates a file whose tensors are still to be filled in.

    Returns:
        The bytes of the file, and for each tensor the view of them where its bytes go.
    """
    head, ranges, size = plan_file(tensors, metadata)
    data = allocate(size)
    data[: len(head)] = head
    return data, {name: data[place] for name, place in ranges.items()}


def decode(data: bytes | memoryview) -> dict[str, tuple[TensorSpec, memoryview]]:
    """Returns the tensors of a file, as views of `data`. Raises Damaged when it is not a safetensors file."""
    view = memoryview(data)
    return {name: (spec, view[place]) for name, (spec, place) in parse_header(view, len(view)).items()}


def header_end(data: bytes | memoryview) -> int:
    """Returns, from the first 8 bytes of a file, how many bytes precede its first tensor."""
    return 8 + int.from_bytes(data[:8], "little")


def parse_header(head: bytes | memoryview, size: int) -> dict[str, tuple[TensorSpec, slice]]:
    """Returns specification and byte range of each tensor in a file.

    Args:
        head: The file's first bytes, at least up to its first tensor.
        size: Bytes of the whole file.

    Raises:
        Damaged: It is not a safetensors file, or a tensor lies outside of it.
    """
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
