"""TFRecord framing, and where a shard is broken.

A shard is a sequence of frames and nothing else (tensorflow/core/lib/io/record_writer.h):

    uint64 length | uint32 masked crc32c of those 8 bytes | length bytes of data | uint32 masked crc32c of the data
    (little-endian)

Pure functions over bytes. Every CRC is checked; a bad one is a `Corrupt` with the record's number and byte offset.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Iterator

import google_crc32c

from training.errors import BadInput

HEADER = 12
FOOTER = 4
OVERHEAD = HEADER + FOOTER
_DELTA = 0xA282EAD8


class Corrupt(BadInput):
    """A shard's bytes are not what was written. `record` is counted from 0 in the shard, `offset` in bytes."""

    def __init__(self, shard: str, record: int, offset: int, what: str) -> None:
        self.shard, self.record, self.offset, self.what = shard, record, offset, what
        super().__init__(
            f"{shard}: record {record} at byte {offset}: {what}. Write the shard again (tpu-train shards --overwrite), "
            "or set data.on_corrupt to skip to train without such records"
        )


def mask(crc: int) -> int:
    """TFRecord stores CRCs rotated right by 15 bits plus a constant (tensorflow/core/lib/hash/crc32c.h)."""
    return (((crc >> 15) | (crc << 17)) + _DELTA) & 0xFFFFFFFF


def unmask(masked: int) -> int:
    """The inverse of `mask`."""
    rotated = (masked - _DELTA) & 0xFFFFFFFF
    return ((rotated >> 17) | (rotated << 15)) & 0xFFFFFFFF


def header(length: int) -> bytes:
    """The 12 bytes before a record of this length."""
    size = struct.pack("<Q", length)
    return size + struct.pack("<I", mask(google_crc32c.value(size)))


def frame(data: bytes) -> bytes:
    """One record as it stands in a shard."""
    return header(len(data)) + data + struct.pack("<I", mask(google_crc32c.value(data)))


def join(records: Iterable[bytes]) -> bytes:
    """A whole shard."""
    return b"".join(map(frame, records))


def walk(data: bytes, shard: str, *, first: int = 0, offset: int = 0) -> Iterator[tuple[int, bytes]]:
    """(byte offset of the frame, data) of every record of `data`, checked; `first` and `offset` are the number and
    place of the first one.

    Raises Corrupt. After a broken header nothing more can be found; after a broken record the walk could go on, see
    `index`."""
    position, number = 0, first
    while position < len(data):
        length = _length(data, position, shard, number, offset)
        end = position + HEADER + length + FOOTER
        if end > len(data):
            missing = end - len(data)
            raise Corrupt(
                shard, number, offset + position, f"the shard ends inside this record, {missing} bytes are missing"
            )
        payload = data[position + HEADER : end - FOOTER]
        if mask(google_crc32c.value(payload)) != struct.unpack_from("<I", data, end - FOOTER)[0]:
            raise Corrupt(shard, number, offset + position, "its checksum (CRC-32C) does not match")
        yield offset + position, payload
        position, number = end, number + 1


def index(data: bytes, shard: str) -> list[int]:
    """Offsets of all frames of a whole shard and, last, its size; checks the headers only. Raises Corrupt."""
    offsets, position = [0], 0
    while position < len(data):
        position += HEADER + _length(data, position, shard, len(offsets) - 1, 0) + FOOTER
        if position > len(data):
            raise Corrupt(
                shard,
                len(offsets) - 1,
                offsets[-1],
                f"the shard ends inside this record, {position - len(data)} bytes are missing",
            )
        offsets.append(position)
    return offsets


def _length(data: bytes, position: int, shard: str, number: int, offset: int) -> int:
    size = data[position : position + HEADER]
    if len(size) < HEADER:
        raise Corrupt(
            shard, number, offset + position, f"the shard ends inside this record's header, after {len(size)} bytes"
        )
    length, crc = struct.unpack("<QI", size)
    if mask(google_crc32c.value(size[:8])) != crc:
        raise Corrupt(shard, number, offset + position, "the checksum (CRC-32C) of its length does not match")
    return int(length)
