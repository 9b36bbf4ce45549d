"""The TFRecord format: encodes frames, decodes them, and reports where a shard is damaged.

A shard is a sequence of frames (tensorflow/core/lib/io/record_writer.h), little-endian:

    uint64 length | uint32 masked CRC-32C of those 8 bytes | `length` bytes of data | uint32 masked CRC-32C of the data

Pure functions over bytes. Every CRC is checked; a wrong one raises `Corrupt` with the record's number and byte offset.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Iterator
from typing import Any

import google_crc32c

from training.errors import BadInput

HEADER = 12  # bytes before the data: length and its CRC
FOOTER = 4  # bytes after the data: its CRC
MASK_DELTA = 0xA282EAD8


class Corrupt(BadInput):
    """A shard is damaged. `record` is the number of the record in the shard, `offset` its first byte there.
    `irreplaceable` says why `data.on_corrupt: skip` does not help; None: it would."""

    def __init__(self, shard: str, record: int, offset: int, reason: str, irreplaceable: str | None = None) -> None:
        self.shard, self.record, self.offset, self.reason = shard, record, offset, reason
        advice = "Write the shard again (tpu-train shards --overwrite)"
        if irreplaceable is None:
            advice += ", or set data.on_corrupt to skip to train without such records"
        else:
            advice += f": data.on_corrupt: skip does not help, because {irreplaceable}"
        super().__init__(f"{shard}: record {record} at byte {offset}: {reason}. {advice}")

    def without_replacement(self, irreplaceable: str) -> Corrupt:
        """Returns the same error, with the reason `irreplaceable` why `data.on_corrupt: skip` does not help."""
        return Corrupt(self.shard, self.record, self.offset, self.reason, irreplaceable)


def mask(crc: Any) -> Any:
    """Returns a CRC, an integer or an array of uint32, as TFRecord stores it: rotated right by 15 bits, plus a constant
    (tensorflow/core/lib/hash/crc32c.h)."""
    return (((crc >> 15) | (crc << 17)) + MASK_DELTA) & 0xFFFFFFFF


def header(length: int) -> bytes:
    """Returns the 12 bytes before a record of this length."""
    size = struct.pack("<Q", length)
    return size + struct.pack("<I", mask(google_crc32c.value(size)))


def frame(data: bytes) -> bytes:
    """Returns one record with its framing."""
    return header(len(data)) + data + struct.pack("<I", mask(google_crc32c.value(data)))


def join(records: Iterable[bytes]) -> bytes:
    """Returns the bytes of a shard with these records."""
    return b"".join(map(frame, records))


def walk(data: bytes, shard: str, *, first: int = 0, offset: int = 0) -> Iterator[tuple[int, bytes]]:
    """Yields (byte offset of the frame, payload) of every record of `data`, which starts at byte `offset` of the shard
    with record number `first`. Raises Corrupt, which names `shard`, at the first bad header or payload."""
    position, number = 0, first
    while position < len(data):
        end = _end(data, position, shard, number, offset)
        payload = data[position + HEADER : end - FOOTER]
        if mask(google_crc32c.value(payload)) != struct.unpack_from("<I", data, end - FOOTER)[0]:
            raise Corrupt(shard, number, offset + position, "its checksum (CRC-32C) does not match")
        yield offset + position, payload
        position, number = end, number + 1


def index(data: bytes, shard: str) -> list[int]:
    """Returns the offsets of all frames of a whole shard, and last its size. Checks headers only. Raises Corrupt."""
    offsets = [0]
    while offsets[-1] < len(data):
        offsets.append(_end(data, offsets[-1], shard, len(offsets) - 1, 0))
    return offsets


def _end(data: bytes, position: int, shard: str, number: int, offset: int) -> int:
    """Returns the end of the frame at `position` of `data`, which starts at byte `offset` of the shard. Raises Corrupt,
    for record `number`, when the frame is cut or its header's CRC is wrong."""
    size = data[position : position + HEADER]
    if len(size) < HEADER:
        raise Corrupt(
            shard, number, offset + position, f"the shard ends inside this record's header, after {len(size)} bytes"
        )
    length, crc = struct.unpack("<QI", size)
    if mask(google_crc32c.value(size[:8])) != crc:
        raise Corrupt(shard, number, offset + position, "the checksum (CRC-32C) of its length does not match")
    end = position + HEADER + int(length) + FOOTER
    if end > len(data):
        missing = end - len(data)
        raise Corrupt(
            shard, number, offset + position, f"the shard ends inside this record, {missing} bytes are missing"
        )
    return end
