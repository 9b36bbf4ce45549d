"""Converts between numpy arrays and the fixed-size records of a shard, a whole block of records at once.

A `RecordLayout` locates each feature's numbers in every record of a shard (the format is documented in
`training.data.formats.dataset`). A block of n records is an (n, size) matrix of bytes: framing, Example tags and
lengths are the same in every row; only the numbers and the CRC differ. Pure functions over bytes.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import google_crc32c
import numpy as np
import numpy.typing as npt

from training.data.formats import example_codec, tfrecord
from training.data.formats.dataset import Dtype, Feature


@dataclass(frozen=True)
class RecordLayout:
    """The bytes of a record."""

    template: bytes  # a record with its framing, whose numbers and final CRC are all 0
    dtype: np.dtype[np.void]  # of a record: each feature's numbers, (count,), little-endian, and where they are

    @property
    def size(self) -> int:  # bytes of a record with its framing
        return len(self.template)


def record_layout(features: Mapping[str, Feature], length: int) -> RecordLayout:
    """Returns the layout of records with `length` tokens, framing included; features in the order of their names."""
    formats = {
        name: np.dtype((np.dtype(feature.dtype).newbyteorder("<"), (feature.count(length),)))
        for name, feature in sorted(features.items())
    }
    zeros, ones = (
        example_codec.encode({name: byte * numbers.itemsize for name, numbers in formats.items()})
        for byte in (b"\0", b"\1")
    )
    template = tfrecord.header(len(zeros)) + zeros + bytes(tfrecord.FOOTER)
    # Numbers are the bytes in which both differ. Tags are between the features.
    is_number = np.frombuffer(zeros, np.uint8) != np.frombuffer(ones, np.uint8)
    offsets = tfrecord.HEADER + np.flatnonzero(np.diff(is_number.astype(np.int8), prepend=0) == 1)
    dtype = np.dtype(
        {
            "names": list(formats),
            "formats": list(formats.values()),
            "offsets": offsets.tolist(),
            "itemsize": len(template),
        }
    )
    return RecordLayout(template, dtype)


def encode_records(layout: RecordLayout, values: Mapping[str, npt.NDArray[np.generic]]) -> bytes:
    """Encodes rows as records of a shard. values: feature -> (n, count), or (n,) for one number per record; raises
    TypeError for another kind of number than the layout's (int64 for uint16), and wraps those too large."""
    count = len(next(iter(values.values())))
    data = bytearray(layout.template * count)
    records = np.frombuffer(data, layout.dtype)  # (n,)
    for name in layout.dtype.names or ():
        numbers = records[name]  # (n, count)
        np.copyto(numbers, np.reshape(values[name], numbers.shape), casting="same_kind")
    _checksums(layout, data)[:] = _record_crcs(layout, data)
    return bytes(data)


def find_broken(layout: RecordLayout, data: bytes) -> list[int]:
    """Returns the numbers, from 0, of the records of `data`, n * size bytes, whose framing, tags or CRC are wrong."""
    broken = _checksums(layout, data) != _record_crcs(layout, data)  # (n,)
    # The CRC covers tags and numbers. Compare header and tags with the layout too: records of another layout have a
    # good CRC and their numbers elsewhere.
    rows, template = np.frombuffer(data, np.uint8).reshape(-1, layout.size), np.frombuffer(layout.template, np.uint8)
    start = 0
    for numbers, offset, *_ in (layout.dtype.fields or {}).values():
        broken |= (rows[:, start:offset] != template[start:offset]).any(axis=1)
        start = offset + numbers.itemsize
    return [int(row) for row in np.flatnonzero(broken)]


def read_column(layout: RecordLayout, data: bytes, name: str) -> npt.NDArray[np.generic]:
    """Returns one feature of all records of `data`, n * size bytes: (n, count), little-endian."""
    numbers: npt.NDArray[np.generic] = np.frombuffer(data, layout.dtype)[name].copy()
    return numbers


def id_dtype(vocabulary: int) -> Dtype:
    """Returns the dtype of token ids: uint16 up to 65,536 ids, else int32 (TensorFlow's decode_raw has no uint32)."""
    return "uint16" if vocabulary <= 1 << 16 else "int32"


def _record_crcs(layout: RecordLayout, data: bytes | bytearray) -> npt.NDArray[np.uint32]:
    """Returns the CRC-32C of each record's payload, masked as it is stored. (n,)"""
    crc32c, start, stop = google_crc32c.value, tfrecord.HEADER, layout.size - tfrecord.FOOTER
    offsets, whole = range(0, len(data), layout.size), bytes(data)
    crcs = np.array([crc32c(whole[offset + start : offset + stop]) for offset in offsets], np.uint32)
    masked: npt.NDArray[np.uint32] = tfrecord.mask(crcs)
    return masked


def _checksums(layout: RecordLayout, data: bytes | bytearray) -> npt.NDArray[np.uint32]:
    """Returns a view of the CRC that each record of `data` ends with. (n,)"""
    return np.frombuffer(data, np.uint8).reshape(-1, layout.size)[:, -tfrecord.FOOTER :].view("<u4")[:, 0]
