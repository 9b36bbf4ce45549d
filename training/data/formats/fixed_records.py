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
class Column:
    """One feature: the byte where its numbers start in a record, their count and dtype."""

    name: str
    start: int
    count: int
    dtype: np.dtype[np.generic]

    @property
    def stop(self) -> int:
        """The byte after the last number."""
        return self.start + self.count * self.dtype.itemsize


@dataclass(frozen=True)
class RecordLayout:
    """The bytes of a record."""

    size: int  # bytes of a record with its framing
    template: bytes  # a record whose numbers are all 0, without its final CRC
    columns: tuple[Column, ...]  # the features in the order of their bytes


def record_layout(features: Mapping[str, Feature], length: int) -> RecordLayout:
    """Returns the layout of records with `length` tokens, framing included; features in the order of their names."""
    counts = {name: feature.count(length) for name, feature in sorted(features.items())}
    dtypes = {name: np.dtype(features[name].dtype).newbyteorder("<") for name in counts}
    sizes = {name: counts[name] * dtypes[name].itemsize for name in counts}  # bytes
    zeros = example_codec.encode({name: bytes(size) for name, size in sizes.items()})
    columns = []
    for name, count in counts.items():
        # Locate a feature's bytes: encode it with ones and compare with the encoded zeros.
        marked = {other: (b"\1" if other == name else b"\0") * size for other, size in sizes.items()}
        different = np.frombuffer(example_codec.encode(marked), np.uint8) != np.frombuffer(zeros, np.uint8)
        columns.append(Column(name, tfrecord.HEADER + int(np.argmax(different)), count, dtypes[name]))
    size = tfrecord.HEADER + len(zeros) + tfrecord.FOOTER
    return RecordLayout(size, tfrecord.header(len(zeros)) + zeros, tuple(columns))


def encode_records(layout: RecordLayout, values: Mapping[str, npt.NDArray[np.generic]]) -> bytes:
    """Encodes rows as records of a shard. values: feature -> (n, count), or (n,) for one number per record; raises
    TypeError for another kind of number than the layout's (int64 for uint16), and wraps those too large."""
    count = len(next(iter(values.values())))
    rows = np.empty((count, layout.size), np.uint8)  # (n, size)
    rows[:, : -tfrecord.FOOTER] = np.frombuffer(layout.template, np.uint8)
    for column in layout.columns:
        numbers = (
            np.ascontiguousarray(values[column.name])
            .astype(column.dtype, casting="same_kind")
            .reshape(count, column.count)
        )  # (n, count)
        rows[:, column.start : column.stop] = numbers.view(np.uint8).reshape(count, column.stop - column.start)
    crcs = _mask(_record_crcs(layout, rows.tobytes())).astype("<u4")  # (n,)
    rows[:, -tfrecord.FOOTER :] = crcs.view(np.uint8).reshape(count, tfrecord.FOOTER)
    return rows.tobytes()


def find_broken(layout: RecordLayout, data: bytes) -> list[int]:
    """Returns the numbers, from 0, of the records of `data`, n * size bytes, whose framing, tags or CRC are wrong."""
    rows = np.frombuffer(data, np.uint8).reshape(-1, layout.size)  # (n, size)
    stored = np.ascontiguousarray(rows[:, -tfrecord.FOOTER :]).view("<u4")[:, 0]  # (n,)
    broken = stored != _mask(_record_crcs(layout, data))  # (n,)
    # The CRC covers tags and numbers. Compare header and tags with the layout too: records of another layout have a
    # good CRC and their numbers elsewhere.
    template, start = np.frombuffer(layout.template, np.uint8), 0
    for column in layout.columns:
        broken |= (rows[:, start : column.start] != template[start : column.start]).any(axis=1)
        start = column.stop
    return [int(row) for row in np.flatnonzero(broken)]


def read_column(layout: RecordLayout, data: bytes, name: str) -> npt.NDArray[np.generic]:
    """Returns one feature of all records of `data`, n * size bytes: (n, count), little-endian."""
    column = next(column for column in layout.columns if column.name == name)
    rows = np.frombuffer(data, np.uint8).reshape(-1, layout.size)  # (n, size)
    numbers = np.ascontiguousarray(rows[:, column.start : column.stop])  # (n, count * itemsize)
    return numbers.view(column.dtype).reshape(len(rows), column.count)


def id_dtype(vocabulary: int) -> Dtype:
    """Returns the narrowest dtype that holds every token id and that TensorFlow's decode_raw reads."""
    return "uint16" if vocabulary <= 1 << 16 else "int32"


def _record_crcs(layout: RecordLayout, data: bytes) -> npt.NDArray[np.uint32]:
    """Returns the CRC-32C of each record's payload, not masked. (n,)"""
    crc32c, start, stop = google_crc32c.value, tfrecord.HEADER, layout.size - tfrecord.FOOTER
    offsets = range(0, len(data), layout.size)
    return np.array([crc32c(data[offset + start : offset + stop]) for offset in offsets], np.uint32)


def _mask(crcs: npt.NDArray[np.uint32]) -> npt.NDArray[np.uint32]:
    """Applies `tfrecord.mask` to an array."""
    return ((crcs >> np.uint32(15)) | (crcs << np.uint32(17))) + np.uint32(tfrecord.MASK_DELTA)
