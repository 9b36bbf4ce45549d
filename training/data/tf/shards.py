"""Records of a dataset by number in pure TensorFlow ops: what `training.data.loading.shards` and
`training.data.formats.recipe` read, for a `tf.data` pipeline that runs on the hosts of a slice, where no Python of ours
is.

Bytes come through TensorFlow's own file systems (local, gs://): a range of a shard is a FixedLengthRecordDataset of one
record with the rest of the file as header and footer. Every record's framing, tags and CRC are checked, as in the other
readers, and a bad one is treated alike (`on_corrupt`).

What these readers can't do: pin an object's generation (a shard that is replaced by one of the same size, with good
CRCs, is not noticed after the start), and keep blocks on a disk. The recipe's layout has no fixed record size, so the
shards are read through once, by the process that builds the pipeline.

CRC-32C without an op for it: the CRC of a message is linear in its bits, so it is the exclusive-or over all bytes of a
number that depends on the byte and its distance from the end, and of a number that depends on the length.
(https://www.rfc-editor.org/rfc/rfc3720#appendix-B.4 has the polynomial.)
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import google_crc32c
import numpy as np
import numpy.typing as npt
import tensorflow as tf

from training import storage
from training.data.formats import example, tfrecord
from training.data.formats import records as form
from training.data.formats.dataset import Dataset, Shard
from training.data.formats.recipe import RecipeShards
from training.data.loading.shards import FixedShards, OnCorrupt
from training.errors import BadInput

Columns = dict[str, Any]  # feature -> (n, count); and "replaced": (n,) bool, a bad record for which another stands
REPLACED = "replaced"
_POLYNOMIAL = 0x82F63B78  # Castagnoli's, reflected
_ENTRY = 256


@dataclass(frozen=True)
class Part:
    """Records 0 .. records-1 of one length. `read(first, last)` takes int64 scalars, not more than a block apart: a bad
    record's replacement comes from those that are read together."""

    records: int
    record_bytes: int
    unit: int
    length: int
    columns: Mapping[str, tuple[int, Any]]  # numbers a record, and their type
    read: Callable[[Any, Any], Columns]

    def nothing(self) -> Columns:
        """What reading no record gives."""
        empty = {name: tf.zeros((0, count), dtype) for name, (count, dtype) in self.columns.items()}
        return {**empty, REPLACED: tf.zeros((0,), tf.bool)}


def open_part(dataset: Dataset, *, vocabulary: int, on_corrupt: OnCorrupt, length: int | None = None) -> Part:
    """The records of `dataset` with rows of `length` tokens (default: its sequence length). Raises BadInput where a
    shard is not as listed."""
    if dataset.manifest.layout == "recipe":
        return _recipe(dataset, vocabulary, on_corrupt)
    return _fixed(dataset, vocabulary, on_corrupt, length or dataset.sequence_length)


@contextmanager
def explained() -> Iterator[None]:
    """Errors of the ops in this module, wherever they ran, as ours. Raises BadInput, StorageError."""
    try:
        yield
    except tf.errors.OpError as error:
        found = re.search(r"<bad record>(.*?)\|(-?\d+)\|(-?\d+)\|(.*?)</bad record>", error.message or "", re.DOTALL)
        if found:
            raise tfrecord.Corrupt(found[1], int(found[2]), int(found[3]), found[4]) from None
        if isinstance(error, tf.errors.NotFoundError):
            raise BadInput(f"a shard is missing: {error.message}") from None
        if "<bad shard>" in (error.message or ""):
            raise BadInput(re.sub(r"(?s).*<bad shard>(.*?)</bad shard>.*", r"\1", error.message)) from None
        raise storage.StorageError(f"TensorFlow could not read the dataset: {error.message}") from None


# --- bytes


class _Places:
    """Where records stand: shards in order, each with its first record, as constants."""

    def __init__(self, dataset: Dataset, shards: Sequence[Shard]) -> None:
        self.urls = tf.constant([storage.join(dataset.url, shard.name) for shard in shards])
        self.sizes = tf.constant([shard.bytes for shard in shards], tf.int64)
        self.counts = tf.constant([shard.records for shard in shards], tf.int64)
        self.starts = tf.constant(np.cumsum([0, *(shard.records for shard in shards)])[:-1], tf.int64)

    def shard_of(self, record: Any) -> Any:
        return tf.searchsorted(self.starts, record[None], side="right", out_type=tf.int64)[0] - 1

    def pieces(self, first: Any, last: Any, read: Callable[[Any, Any, Any], Any]) -> Any:
        """read(shard, first and last record in it) for each shard that holds some of [first, last), joined: a string"""

        def piece(shard: Any) -> Any:
            start = self.starts[shard]
            return read(shard, tf.maximum(first - start, 0), tf.minimum(last - start, self.counts[shard]))

        return _appended(self.shard_of(first), self.shard_of(last - 1) + 1, piece)

    def bytes(self, shard: Any, start: Any, end: Any) -> Any:
        """Bytes [start, end) of a shard: a string. The size that the file must have is part of the question."""
        size = self.sizes[shard]
        one = tf.data.FixedLengthRecordDataset(
            self.urls[shard], end - start, header_bytes=start, footer_bytes=size - end, buffer_size=end - start
        )
        return one.with_options(_SMALL).get_single_element()


def _appended(first: Any, last: Any, piece: Callable[[Any], Any]) -> Any:
    """piece(first) + ... + piece(last - 1): strings"""
    _, whole = tf.while_loop(
        lambda number, _: number < last,
        lambda number, before: (number + 1, before + piece(number)),
        (first + 1, piece(first)),
        parallel_iterations=1,
    )
    return whole


def _small() -> Any:
    """For datasets of one element: optimising such a graph takes a hundred times longer than running it."""
    options = tf.data.Options()
    options.autotune.enabled = False
    options.experimental_optimization.apply_default_optimizations = False
    return options


_SMALL = _small()


# --- the two layouts


def _fixed(dataset: Dataset, vocabulary: int, on_corrupt: OnCorrupt, length: int) -> Part:
    source = FixedShards(
        dataset, length=length, vocabulary=vocabulary, on_corrupt=on_corrupt
    )  # checks what stands there
    shards = [shard for shard in dataset.shards if shard.length == length and shard.records]
    places, layout, unit = _Places(dataset, shards), form.layout(dataset.manifest.features, length), source.unit
    size = layout.size
    stored, offset = _members(places, shards, size, unit) if unit else _frames(places, size)
    crcs = _Crc(size - tfrecord.OVERHEAD)
    numbers = {place for column in layout.columns for place in range(column.start, column.stop)}
    fixed = [place for place in range(size - tfrecord.FOOTER) if place not in numbers]
    template = tf.constant(np.frombuffer(layout.template, np.uint8)[fixed])
    columns_of = {each.name: (each.count, tf.as_dtype(each.dtype.newbyteorder("="))) for each in layout.columns}

    def read(first: Any, last: Any) -> Columns:
        raw = tf.reshape(tf.io.decode_raw(places.pieces(first, last, stored), tf.uint8), (-1, size))  # (n, size)
        found = tf.bitcast(raw[:, -tfrecord.FOOTER :], tf.uint32)
        good = (crcs(raw[:, tfrecord.HEADER : -tfrecord.FOOTER][:, ::-1]) == found) & tf.reduce_all(
            tf.gather(raw, fixed, axis=1) == template, axis=1
        )
        columns: Columns = {}
        for column in layout.columns:
            values = tf.reshape(raw[:, column.start : column.stop], (-1, column.count, column.dtype.itemsize))
            columns[column.name] = tf.bitcast(values, columns_of[column.name][1])
        columns = _without_bad(columns, good, on_corrupt, lambda row: _where(places, first + row, offset))
        ids = tf.cast(columns["input_ids"], tf.int32)
        fits = tf.reduce_all((ids >= 0) & (ids < vocabulary))
        url = places.urls[places.shard_of(first)]
        text = f" has a token id that the tokenizer, which has {vocabulary}, does not have: write the shards again with this tokenizer"
        tf.debugging.Assert(fits, [tf.strings.join(["<bad shard>", url, text, "</bad shard>"])])
        return columns

    return Part(source.records, size, unit, length, columns_of, read)


# How records of a shard are read, (shard, first, last) -> string, and (shard, record) -> the byte at which a bad one is
# said to be.
Stored = tuple[Callable[[Any, Any, Any], Any], Callable[[Any, Any], Any]]


def _frames(places: _Places, size: int) -> Stored:
    """Records one after the other."""
    return lambda shard, first, last: places.bytes(shard, first * size, last * size), lambda _, number: number * size


def _members(places: _Places, shards: Sequence[Shard], size: int, unit: int) -> Stored:
    """Shards of gzip members, `unit` records in each. A damaged member is read as zeros, whose CRC is wrong."""
    offsets = tf.constant(np.concatenate([np.cumsum([0, *shard.members]) for shard in shards]), tf.int64)
    begins = tf.constant(np.cumsum([0, *(len(shard.members) + 1 for shard in shards)])[:-1], tf.int64)

    def stored(shard: Any, first: Any, last: Any) -> Any:
        begin, stop = first // unit, -(-last // unit)
        at = tf.gather(offsets, begins[shard] + tf.range(begin, stop + 1))  # (members + 1,)
        packed = tf.strings.substr(
            places.bytes(shard, at[0], at[-1]), tf.cast(at[:-1] - at[0], tf.int32), tf.cast(at[1:] - at[:-1], tf.int32)
        )
        counts = tf.minimum(places.counts[shard] - tf.range(begin, stop) * unit, unit)

        def expand(number: Any) -> Any:
            count = counts[number]
            data = (
                tf.data.Dataset.from_tensors(packed[number])
                .map(lambda each: tf.io.decode_compressed(each, "GZIP"))
                .ignore_errors()
            )
            zeros = tf.strings.reduce_join(tf.fill([count * size], b"\0"))
            data = data.filter(lambda each: tf.strings.length(each) == tf.cast(count * size, tf.int32))
            return (
                data.concatenate(tf.data.Dataset.from_tensors(zeros)).take(1).with_options(_SMALL).get_single_element()
            )

        whole = _appended(tf.constant(0, tf.int64), stop - begin, expand)
        return tf.strings.substr(
            whole, tf.cast((first - begin * unit) * size, tf.int32), tf.cast((last - first) * size, tf.int32)
        )

    return stored, lambda shard, number: offsets[begins[shard] + number // unit]


def _recipe(dataset: Dataset, vocabulary: int, on_corrupt: OnCorrupt) -> Part:
    source = RecipeShards(dataset, vocabulary=vocabulary, on_corrupt=on_corrupt)
    shards, length = [shard for shard in dataset.shards if shard.records], dataset.sequence_length
    places, known = _Places(dataset, shards), [source.offsets(shard) for shard in shards]
    offsets = tf.constant(np.concatenate(known), tf.int64)
    begins = tf.constant(np.cumsum([0, *(len(each) for each in known)])[:-1], tf.int64)
    widest = max(int(np.diff(each).max()) for each in known) - tfrecord.OVERHEAD
    crcs = _Crc(max(8, widest))
    stand_in = example.encode({"input_ids": [0] * length})

    def stored(shard: Any, first: Any, last: Any) -> Any:
        return places.bytes(shard, offsets[begins[shard] + first], offsets[begins[shard] + last])

    def place(record: Any) -> Any:
        shard = tf.searchsorted(places.starts, record, side="right", out_type=tf.int64) - 1
        return tf.gather(begins, shard) + record - tf.gather(places.starts, shard)

    def read(first: Any, last: Any) -> Columns:
        data = places.pieces(first, last, stored)
        at = place(tf.range(first, last))
        sizes = tf.gather(offsets, at + 1) - tf.gather(offsets, at)  # (n,) with framing
        start = tf.cumsum(sizes, exclusive=True) + tfrecord.HEADER
        lengths, flat = sizes - tfrecord.OVERHEAD, tf.io.decode_raw(data, tf.uint8)
        header = _number(flat, start - tfrecord.HEADER, 8)
        good = (header == tf.cast(lengths, tf.uint64)) & crcs.match(
            flat, start - tfrecord.HEADER, 8 * tf.ones_like(lengths)
        )
        good &= crcs.match(flat, start, lengths)
        payloads = tf.strings.substr(data, tf.cast(start, tf.int32), tf.cast(lengths, tf.int32))
        parsed = tf.io.parse_example(tf.where(good, payloads, stand_in), {"input_ids": tf.io.RaggedFeature(tf.int64)})[
            "input_ids"
        ]
        ids = parsed.to_tensor(0, shape=(None, length))
        good &= (parsed.row_lengths() == length) & tf.reduce_all((ids >= 0) & (ids < vocabulary), axis=1)
        columns = {"input_ids": tf.cast(ids, tf.int32)}
        return _without_bad(
            columns, good, on_corrupt, lambda row: _where(places, first + row, lambda _, __: offsets[at[row]])
        )

    return Part(source.records, source.record_bytes, 0, length, {"input_ids": (length, tf.int32)}, read)


# --- bad records


def _without_bad(columns: Columns, good: Any, on_corrupt: OnCorrupt, where: Callable[[Any], Any]) -> Columns:
    """The columns with the next good row in the place of each bad one; stops the pipeline where that is not wanted, or
    where there is none."""
    bad = tf.argmin(tf.cast(good, tf.int32), output_type=tf.int64)
    acceptable = tf.reduce_all(good) if on_corrupt == "stop" else tf.reduce_any(good)
    text = tf.cond(acceptable, lambda: tf.constant(""), lambda: where(bad))
    tf.debugging.Assert(acceptable, [text])
    if on_corrupt == "stop":
        return {**columns, REPLACED: ~good}
    candidates = tf.where(good)[:, 0]
    following = tf.searchsorted(candidates, tf.range(tf.size(good, tf.int64)), side="left", out_type=tf.int64)
    taken = tf.gather(candidates, following % tf.size(candidates, tf.int64))
    return {**{name: tf.gather(values, taken) for name, values in columns.items()}, REPLACED: ~good}


def _where(places: _Places, record: Any, offset: Callable[[Any, Any], Any]) -> Any:
    """What `explained` makes a Corrupt of."""
    shard = places.shard_of(record)
    number = record - places.starts[shard]
    what = "its checksum (CRC-32C) does not match, or it is not what this dataset's records are"
    numbers = [tf.strings.as_string(number), tf.strings.as_string(offset(shard, number))]
    return tf.strings.join(
        ["<bad record>", places.urls[shard], "|", numbers[0], "|", numbers[1], f"|{what}</bad record>"]
    )


# --- CRC-32C


class _Crc:
    """Masked CRCs, as TFRecord stores them, of messages of up to `longest` bytes."""

    def __init__(self, longest: int) -> None:
        self._longest = longest
        table = np.append(
            _table(longest).reshape(-1), np.uint32(0)
        )  # (longest * 256 + 1,), the last for what is no byte of a message
        self._table = tf.constant(table)
        self._none = len(table) - 1
        self._of_zeros = tf.constant(_of_zeros(longest))

    def __call__(self, backwards: Any) -> Any:
        """Of messages that are all `longest` bytes, from the last byte to the first. (n, longest) uint8 -> (n,)
        uint32"""
        index = tf.cast(backwards, tf.int32) + _ENTRY * tf.range(self._longest)
        return _masked(_xor(self._of_zeros[-1], self._folded(index)))

    def match(self, flat: Any, start: Any, lengths: Any) -> Any:
        """Whether the messages flat[start : start + length] are followed by their CRC. flat: (bytes,) uint8; start,
        lengths: (n,)"""
        back = tf.range(self._longest, dtype=tf.int64)
        place = (start + lengths)[:, None] - 1 - back  # (n, longest)
        there = back < lengths[:, None]
        index = tf.cast(tf.gather(flat, tf.where(there, place, 0)), tf.int32) + tf.cast(_ENTRY * back, tf.int32)
        found = _masked(_xor(tf.gather(self._of_zeros, lengths), self._folded(tf.where(there, index, self._none))))
        return tf.cast(found, tf.uint64) == _number(flat, start + lengths, 4)

    def _folded(self, index: Any) -> Any:
        """The exclusive-or of the table's entries along a row."""
        width = 1 << max(0, (self._longest - 1).bit_length())
        values = tf.gather(self._table, tf.pad(index, [[0, 0], [0, width - self._longest]], constant_values=self._none))
        while width > 1:
            width //= 2
            values = _xor(values[:, :width], values[:, width:])
        return values[:, 0]


def _table(longest: int) -> npt.NDArray[np.uint32]:
    """Entry [d, b]: the CRC register after byte b and d zero bytes, begun at 0. (longest, 256)"""
    one = np.arange(_ENTRY, dtype=np.uint32)
    for _ in range(8):
        one = (one >> np.uint32(1)) ^ np.where(one & 1, np.uint32(_POLYNOMIAL), np.uint32(0))
    table = np.empty((longest, _ENTRY), np.uint32)
    value = one
    for distance in range(longest):
        table[distance] = value
        value = one[value & np.uint32(255)] ^ (value >> np.uint32(8))
    return table


def _of_zeros(longest: int) -> npt.NDArray[np.uint32]:
    """CRC-32C of 0, 1, ..., `longest` zero bytes. (longest + 1,)"""
    return np.array([google_crc32c.value(bytes(length)) for length in range(longest + 1)], np.uint32)


def _masked(crc: Any) -> Any:
    """As tfrecord.mask. uint32"""
    rotated = tf.bitwise.bitwise_or(
        tf.bitwise.right_shift(crc, tf.constant(15, tf.uint32)), tf.bitwise.left_shift(crc, tf.constant(17, tf.uint32))
    )
    return rotated + tf.constant(0xA282EAD8, tf.uint32)


def _xor(one: Any, other: Any) -> Any:
    return tf.bitwise.bitwise_xor(one, other)


def _number(flat: Any, start: Any, size: int) -> Any:
    """Little-endian numbers of `size` bytes at `start` (n,) of flat (bytes,) uint8. (n,) uint64"""
    values = tf.cast(tf.gather(flat, start[:, None] + tf.range(size, dtype=tf.int64)), tf.uint64)
    shifts = tf.cast(8 * tf.range(size), tf.uint64)
    return tf.bitcast(tf.reduce_sum(tf.bitcast(tf.bitwise.left_shift(values, shifts), tf.int64), axis=1), tf.uint64)
