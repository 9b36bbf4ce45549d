"""Fixed-size records: between numpy arrays and the bytes of a shard, a whole block at once.

A `Layout` knows where each feature's numbers stand in every record of a shard (see `training.data.formats.dataset`). A
block of n records is then one (n, size) matrix of bytes: framing, Example tags and lengths are the same in every row,
and only the numbers and the CRC of each row differ.
"""

from __future__ import annotations

import zlib
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import google_crc32c
import numpy as np
import numpy.typing as npt

from training.data.formats import example, tfrecord
from training.data.formats.dataset import Feature

_GZIP = 16 + zlib.MAX_WBITS
_LEVEL = 6


@dataclass(frozen=True)
class Column:
    """One feature: where its bytes start in a record, and what they mean."""

    name: str
    start: int
    count: int
    dtype: np.dtype[np.generic]

    @property
    def stop(self) -> int:
        return self.start + self.count * self.dtype.itemsize


@dataclass(frozen=True)
class Layout:
    """`size` bytes a record with its framing; `template` is a record whose numbers are 0 and whose CRC is left out.

    Columns are in the order of their bytes."""

    size: int
    template: bytes
    columns: tuple[Column, ...]


def layout(features: Mapping[str, Feature], length: int) -> Layout:
    """The layout of records with `length` tokens."""
    counts = {name: length if feature.shape else 1 for name, feature in sorted(features.items())}
    dtypes = {name: np.dtype(features[name].dtype).newbyteorder("<") for name in counts}
    zero = example.encode({name: bytes(count * dtypes[name].itemsize) for name, count in counts.items()})
    columns = []
    for name, count in counts.items():
        # Where a feature's bytes stand: encode it with ones and see where they went.
        ones = {each: (b"\1" if each == name else b"\0") * (counts[each] * dtypes[each].itemsize) for each in counts}
        marked = np.frombuffer(example.encode(ones), np.uint8) != np.frombuffer(zero, np.uint8)
        columns.append(Column(name, tfrecord.HEADER + int(np.argmax(marked)), count, dtypes[name]))
    return Layout(tfrecord.HEADER + len(zero) + tfrecord.FOOTER, tfrecord.header(len(zero)) + zero, tuple(columns))


def encode(form: Layout, values: Mapping[str, npt.NDArray[np.generic]]) -> bytes:
    """Records as they stand in a shard. values: feature -> (n, length) or (n,)"""
    count = len(next(iter(values.values())))
    rows = np.empty((count, form.size), np.uint8)  # (n, size)
    rows[:, : -tfrecord.FOOTER] = np.frombuffer(form.template, np.uint8)
    for column in form.columns:
        numbers = (
            np.ascontiguousarray(values[column.name])
            .astype(column.dtype, casting="same_kind")
            .reshape(count, column.count)
        )
        rows[:, column.start : column.stop] = numbers.view(np.uint8).reshape(count, column.stop - column.start)
    rows[:, -tfrecord.FOOTER :] = (
        _masked(_crcs(form, rows.tobytes())).astype("<u4").view(np.uint8).reshape(count, tfrecord.FOOTER)
    )
    return rows.tobytes()


def broken(form: Layout, data: bytes) -> list[int]:
    """Numbers of the records of a block whose framing, tags or CRC are not as they must be. data: n * size bytes"""
    rows = np.frombuffer(data, np.uint8).reshape(-1, form.size)
    stored = np.ascontiguousarray(rows[:, -tfrecord.FOOTER :]).view("<u4")[:, 0]
    bad = stored != _masked(_crcs(form, data))
    # The CRC covers tags and numbers. Header and tags must also be the layout's own, or the numbers would be read from
    # the wrong place.
    template, start = np.frombuffer(form.template, np.uint8), 0
    for column in form.columns:
        bad |= (rows[:, start : column.start] != template[start : column.start]).any(axis=1)
        start = column.stop
    return [int(each) for each in np.flatnonzero(bad)]


def column(form: Layout, data: bytes, name: str) -> npt.NDArray[np.generic]:
    """A feature of all records of a block, as a view of its bytes: (n, count)"""
    chosen = next(each for each in form.columns if each.name == name)
    rows = np.frombuffer(data, np.uint8).reshape(-1, form.size)
    part = np.ascontiguousarray(rows[:, chosen.start : chosen.stop])
    return part.view(chosen.dtype).reshape(len(rows), chosen.count)


def compress(form: Layout, data: bytes, unit: int) -> list[bytes]:
    """The gzip members of a shard, `unit` records in each; written without a time, so equal records are equal bytes."""

    def member(start: int) -> bytes:
        packer = zlib.compressobj(_LEVEL, zlib.DEFLATED, _GZIP)
        return packer.compress(data[start : start + unit * form.size]) + packer.flush()

    with ThreadPoolExecutor() as threads:  # zlib works outside Python's lock
        return list(threads.map(member, range(0, len(data), unit * form.size)))


def expand(member: bytes, size: int) -> bytes:
    """The `size` bytes of a gzip member; zeros, whose CRC is wrong in every record, where it is damaged."""
    unpacker = zlib.decompressobj(_GZIP)
    try:
        data = unpacker.decompress(member, size + 1)
    except zlib.error:
        return bytes(size)
    whole = unpacker.eof and not unpacker.unused_data and len(data) == size
    return data if whole else bytes(size)


def _crcs(form: Layout, data: bytes) -> npt.NDArray[np.uint32]:
    value, start, stop = google_crc32c.value, tfrecord.HEADER, form.size - tfrecord.FOOTER
    return np.array([value(data[at + start : at + stop]) for at in range(0, len(data), form.size)], np.uint32)


def _masked(crcs: npt.NDArray[np.uint32]) -> npt.NDArray[np.uint32]:
    return ((crcs >> np.uint32(15)) | (crcs << np.uint32(17))) + np.uint32(0xA282EAD8)


def feature_dtype(vocabulary: int) -> str:
    """The narrowest width that TensorFlow's decode_raw reads and that holds every id."""
    return "uint16" if vocabulary <= 1 << 16 else "int32"
