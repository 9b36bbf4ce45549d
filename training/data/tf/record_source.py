"""`training.data.loading.record_source` in TensorFlow operations: records of a dataset by number, for a `tf.data`
pipeline that runs on the hosts of a slice, without Python.

Bytes come through TensorFlow's own file systems (local, gs://): a range of a shard is a FixedLengthRecordDataset of one
record, with the rest of the file as header and footer. Every record's framing, tags and CRC are checked as in the numpy
readers, and `on_corrupt` applies as there.

Not possible here: to pin an object's generation (a shard that is replaced after the start by one of the same size with
good CRCs is not noticed).

TensorFlow has no operation for CRC-32C. The CRC of a message is linear in its bits (`Crc32c`): it is the exclusive-or,
over all bytes, of a number that depends on the byte and its distance from the end, and of a number that depends on the
length only (https://www.rfc-editor.org/rfc/rfc3720#appendix-B.4 has the polynomial).
"""

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
from training.data.formats import example_codec, fixed_records, tfrecord
from training.data.formats.dataset import Dataset, Shard
from training.data.formats.tfrecord import MASK_DELTA
from training.data.loading.record_source import NO_GOOD_RECORD, REPLACED, FixedShards, OnCorrupt, RecipeShards
from training.errors import BadInput

Columns = dict[str, Any]  # feature -> (n, count); and REPLACED: (n,) bool
# (first, last), int64 scalars at most a block apart -> (feature -> (n, count), good (n,)) of the records [first, last).
Load = Callable[[Any, Any], tuple[dict[str, Any], Any]]
Offset = Callable[[Any, Any], Any]  # (shard, number of a record in it) -> the record's first byte there


@dataclass(frozen=True)
class TensorRecordSource:
    """Records 0 .. records-1 of one row length."""

    records: int
    record_bytes: int  # as in the numpy `RecordSource`
    length: int  # tokens of a row
    columns: Mapping[str, tuple[int, Any]]  # feature -> (numbers per record, their dtype)
    # (first, last), int64 scalars at most a block apart -> columns of the records [first, last). The replacement of a
    # bad record comes from those that are read together, as far as one of them is good.
    read: Callable[[Any, Any], Columns]

    def empty(self) -> Columns:
        """Returns columns with no record."""
        columns = {name: tf.zeros((0, count), dtype) for name, (count, dtype) in self.columns.items()}
        return {**columns, REPLACED: tf.zeros((0,), tf.bool)}


# Messages of TensorFlow's file systems for an access that failed before it concerned a file.
_STORAGE_ACCESS = re.compile(r"Error executing an HTTP request|libcurl|bearer token")


@contextmanager
def translate_errors(dataset: Dataset) -> Iterator[None]:
    """Translates TensorFlow's errors in the block: Corrupt for a damaged record; BadInput for a missing shard or a
    record that does not fit (padding, unknown ids); StorageError for others that name a shard of `dataset`, such as
    another size, or an access to storage. Others, as of a step that runs meanwhile, pass unchanged."""
    try:
        yield
    except tf.errors.OpError as error:
        message = error.message or ""
        record = re.search(r"<bad record>(.*?)\|(-?\d+)\|(-?\d+)\|(.*?)\|(.*?)</bad record>", message, re.DOTALL)
        if record:
            irreplaceable = NO_GOOD_RECORD if record[5] == "skip" else None
            raise tfrecord.Corrupt(record[1], int(record[2]), int(record[3]), record[4], irreplaceable) from None
        if "<bad shard>" in message:
            raise BadInput(re.sub(r"(?s).*<bad shard>(.*?)</bad shard>.*", r"\1", message)) from None
        names_shard = any(dataset.shard_url(shard) in message for shard in dataset.shards)
        if names_shard and isinstance(error, tf.errors.NotFoundError):
            raise BadInput(f"a shard is missing: {message}") from None
        if names_shard or _STORAGE_ACCESS.search(message):
            raise storage.StorageError(f"TensorFlow could not read the dataset: {message}") from None
        raise


class ShardIndex:
    """URL, size, number of records and first record of each shard of a source, as constants."""

    def __init__(self, dataset: Dataset, shards: Sequence[Shard]) -> None:
        self.urls = tf.constant([dataset.shard_url(shard) for shard in shards])
        self.sizes = tf.constant([shard.bytes for shard in shards], tf.int64)
        self.counts = tf.constant([shard.records for shard in shards], tf.int64)
        self.starts = tf.constant(np.cumsum([0, *(shard.records for shard in shards)])[:-1], tf.int64)

    def shard_of(self, record: Any) -> Any:
        """Returns the number of a record's shard. record: int64 scalar."""
        return tf.searchsorted(self.starts, record[None], side="right", out_type=tf.int64)[0] - 1

    def join_pieces(self, first: Any, last: Any, read: Callable[[Any, Any, Any], Any]) -> Any:
        """Joins the strings read(shard, first, last in it) of each shard that holds some of records [first, last)."""

        def read_piece(shard: Any) -> Any:
            start = self.starts[shard]
            return read(shard, tf.maximum(first - start, 0), tf.minimum(last - start, self.counts[shard]))

        begin, end = self.shard_of(first), self.shard_of(last - 1) + 1
        _, joined = tf.while_loop(
            lambda shard, _: shard < end,
            lambda shard, before: (shard + 1, before + read_piece(shard)),
            (begin + 1, read_piece(begin)),
            parallel_iterations=1,
        )
        return joined

    def read_bytes(self, shard: Any, start: Any, end: Any) -> Any:
        """Returns bytes [start, end) of shard number `shard`, a string. Fails if its size is not the manifest's."""
        size = self.sizes[shard]
        dataset = tf.data.FixedLengthRecordDataset(
            self.urls[shard], end - start, header_bytes=start, footer_bytes=size - end, buffer_size=end - start
        )
        options = tf.data.Options()  # without optimization, which would take a hundred times as long
        options.autotune.enabled = False
        options.experimental_optimization.apply_default_optimizations = False
        return dataset.with_options(options).get_single_element()


def replace_bad_records(
    index: ShardIndex, load: Load, records: int, on_corrupt: OnCorrupt, offset: Offset
) -> Callable[[Any, Any], Columns]:
    """Returns a function from (first, last) to these records' columns, as the numpy `read_replacing`. The pipeline
    fails at the first bad record or, if `on_corrupt` is "skip", only if all of the source's `records` are bad."""

    def read(first: Any, last: Any) -> Columns:
        columns, good = load(first, last)
        size = tf.size(good, tf.int64)
        replaced = ~good
        if on_corrupt == "skip":
            columns, good = tf.cond(
                tf.reduce_any(good), lambda: (columns, good), lambda: _next_good_block(load, records, first, last)
            )
        usable = tf.reduce_all(good) if on_corrupt == "stop" else tf.reduce_any(good)
        first_bad = first + tf.argmax(tf.cast(replaced, tf.int32), output_type=tf.int64)
        text = tf.cond(usable, lambda: tf.constant(""), lambda: _describe_record(index, first_bad, offset, on_corrupt))
        with tf.control_dependencies([tf.debugging.Assert(usable, [text])]):
            good = tf.identity(good)
        if on_corrupt == "stop":
            return {**columns, REPLACED: replaced}
        candidates = tf.where(good)[:, 0]  # (good rows,)
        wanted = tf.range(size) % tf.size(good, tf.int64)  # (n,) rows of `columns`
        following = tf.searchsorted(candidates, wanted, side="left", out_type=tf.int64)
        taken = tf.gather(candidates, following % tf.size(candidates, tf.int64))  # (n,)
        return {**{name: tf.gather(values, taken) for name, values in columns.items()}, REPLACED: replaced}

    return read


def _next_good_block(load: Load, records: int, first: Any, last: Any) -> tuple[dict[str, Any], Any]:
    """Returns (columns, good) of the first block after the records [first, last) that has a good record; of the last
    block tried if none has."""

    def load_after(end: Any) -> tuple[Any, dict[str, Any], Any]:
        begin = end % records
        stop = tf.minimum(begin + last - first, records)
        return (stop, *load(begin, stop))

    def advance(end: Any, tried: Any, _columns: Any, _good: Any) -> tuple[Any, Any, dict[str, Any], Any]:
        stop, columns, good = load_after(end)
        return stop, tried + tf.size(good, tf.int64), columns, good

    def is_missing(_end: Any, tried: Any, _columns: Any, good: Any) -> Any:
        return ~tf.reduce_any(good) & (tried < records)

    stop, columns, good = load_after(last)
    start = (stop, last - first + tf.size(good, tf.int64), columns, good)
    shapes = tf.nest.map_structure(lambda value: tf.TensorShape([None, *value.shape[1:]]), (columns, good))
    scalar = tf.TensorShape([])
    *_, columns, good = tf.while_loop(is_missing, advance, start, (scalar, scalar, *shapes), parallel_iterations=1)
    return columns, good


def _describe_record(index: ShardIndex, record: Any, offset: Offset, on_corrupt: OnCorrupt) -> Any:
    """Returns the message for a bad record, from which `translate_errors` makes a Corrupt."""
    shard = index.shard_of(record)
    number = record - index.starts[shard]
    reason = "its checksum (CRC-32C) does not match, or it is not what this dataset's records are"
    numbers = [tf.strings.as_string(number), tf.strings.as_string(offset(shard, number))]
    return tf.strings.join(
        ["<bad record>", index.urls[shard], "|", numbers[0], "|", numbers[1], f"|{reason}|{on_corrupt}</bad record>"]
    )


def open_source(
    dataset: Dataset, *, vocabulary: int, on_corrupt: OnCorrupt, length: int | None = None
) -> TensorRecordSource:
    """Returns the source for a dataset of either layout; in the recipe's, reads all shards now. `length`: of the rows,
    the longest if None; reading fails at an id from `vocabulary` on. Raises BadInput for a missing shard or one that is
    not the manifest's, and StorageError."""
    if dataset.manifest.layout == "recipe":
        return recipe_shards(dataset, vocabulary=vocabulary, on_corrupt=on_corrupt)
    length = length or dataset.sequence_length
    return fixed_shards(dataset, length=length, vocabulary=vocabulary, on_corrupt=on_corrupt)


def fixed_shards(dataset: Dataset, *, length: int, vocabulary: int, on_corrupt: OnCorrupt) -> TensorRecordSource:
    """Returns the source of a dataset's rows of `length` tokens. Options and errors are those of `FixedShards`; reading
    a row with an id outside the vocabulary fails."""
    source = FixedShards(dataset, length=length, vocabulary=vocabulary, on_corrupt=on_corrupt)  # checks every shard
    shards = [shard for shard in dataset.shards if shard.length == length and shard.records]
    index, layout = ShardIndex(dataset, shards), fixed_records.record_layout(dataset.manifest.features, length)
    size = layout.size
    crcs = Crc32c(size - tfrecord.OVERHEAD)
    numbers = {place for column in layout.columns for place in range(column.start, column.stop)}
    fixed = [place for place in range(size - tfrecord.FOOTER) if place not in numbers]  # bytes equal in all records
    template = tf.constant(np.frombuffer(layout.template, np.uint8)[fixed])  # (fixed,)
    columns_of = {column.name: (column.count, tf.as_dtype(column.dtype.newbyteorder("="))) for column in layout.columns}

    def stored(shard: Any, first: Any, last: Any) -> Any:
        return index.read_bytes(shard, first * size, last * size)

    def load(first: Any, last: Any) -> tuple[Columns, Any]:
        """Returns the columns of records [first, last), and which of them are intact: (n,) bool."""
        data = index.join_pieces(first, last, stored)
        raw = tf.reshape(tf.io.decode_raw(data, tf.uint8), (-1, size))  # (n, size)
        payloads, stored_crcs = raw[:, tfrecord.HEADER : -tfrecord.FOOTER], raw[:, -tfrecord.FOOTER :]
        good = crcs.of_equal_lengths(payloads[:, ::-1]) == tf.bitcast(stored_crcs, tf.uint32)  # (n,)
        good &= tf.reduce_all(tf.gather(raw, fixed, axis=1) == template, axis=1)
        columns: Columns = {}
        for column in layout.columns:
            values = tf.reshape(raw[:, column.start : column.stop], (-1, column.count, column.dtype.itemsize))
            numbers = tf.bitcast(values, columns_of[column.name][1])  # of bytes, it keeps the last axis
            columns[column.name] = tf.reshape(numbers, (-1, column.count))
        return columns, good

    replace = replace_bad_records(index, load, source.records, on_corrupt, lambda _, number: number * size)

    def read(first: Any, last: Any) -> Columns:
        columns = replace(first, last)
        _check_ids(columns["input_ids"], vocabulary, index.urls[index.shard_of(first)])
        return columns

    return TensorRecordSource(source.records, size, length, columns_of, read)


def _check_ids(input_ids: Any, vocabulary: int, url: Any) -> None:
    """Fails the pipeline, naming `url`, for an id outside the tokenizer's vocabulary. input_ids: (n, length)."""
    ids = tf.cast(input_ids, tf.int32)
    valid = tf.reduce_all((ids >= 0) & (ids < vocabulary))
    text = (
        f" has a token id that the tokenizer, which has {vocabulary}, does not have: write the shards again with this "
        "tokenizer"
    )
    tf.debugging.Assert(valid, [tf.strings.join(["<bad shard>", url, text, "</bad shard>"])])


def recipe_shards(dataset: Dataset, *, vocabulary: int, on_corrupt: OnCorrupt) -> TensorRecordSource:
    """Returns the source for a dataset in the public recipe's layout; reads all of its shards now, to find the records.
    Options as for `RecipeShards`, but `vocabulary` is required. Raises BadInput, StorageError."""
    source = RecipeShards(dataset, vocabulary=vocabulary, on_corrupt=on_corrupt)
    shards, length = [shard for shard in dataset.shards if shard.records], dataset.sequence_length
    index, offsets_of = ShardIndex(dataset, shards), [source.offsets(shard) for shard in shards]
    offsets = tf.constant(np.concatenate(offsets_of), tf.int64)  # of all shards, one after the other
    begins = tf.constant(np.cumsum([0, *map(len, offsets_of)])[:-1], tf.int64)  # of each shard in `offsets`
    crcs = Crc32c(max(8, max(int(np.diff(shard_offsets).max()) for shard_offsets in offsets_of) - tfrecord.OVERHEAD))
    placeholder = example_codec.encode({"input_ids": [0] * length})

    def stored(shard: Any, first: Any, last: Any) -> Any:
        return index.read_bytes(shard, offsets[begins[shard] + first], offsets[begins[shard] + last])

    def offset_index(record: Any) -> Any:
        shard = tf.searchsorted(index.starts, record, side="right", out_type=tf.int64) - 1
        return tf.gather(begins, shard) + record - tf.gather(index.starts, shard)

    def load(first: Any, last: Any) -> tuple[Columns, Any]:
        """Returns the ids of records [first, last), and which are intact, (n,) bool. Fails if one does not fit."""
        data = index.join_pieces(first, last, stored)
        places = offset_index(tf.range(first, last))  # (n,)
        sizes = tf.gather(offsets, places + 1) - tf.gather(offsets, places)  # (n,) with framing
        start = tf.cumsum(sizes, exclusive=True) + tfrecord.HEADER  # (n,) of the payloads
        lengths, flat = sizes - tfrecord.OVERHEAD, tf.io.decode_raw(data, tf.uint8)  # (n,), (bytes,)
        header = start - tfrecord.HEADER
        good = read_numbers(flat, header, 8) == tf.cast(lengths, tf.uint64)  # (n,)
        good &= crcs.match(flat, header, 8 * tf.ones_like(lengths))
        good &= crcs.match(flat, start, lengths)
        payloads = tf.strings.substr(data, tf.cast(start, tf.int32), tf.cast(lengths, tf.int32))
        examples = tf.where(good, payloads, placeholder)  # (n,) strings that can be parsed
        names = ("input_ids", "attention_mask")
        parsed = tf.io.parse_example(examples, {name: tf.io.RaggedFeature(tf.int64) for name in names})
        ids, attended = (parsed[name].to_tensor(1, shape=(None, length)) for name in names)  # (n, length) each
        # Refuse intact records that are not this dataset's. A record may have no attention_mask.
        valid = (parsed["input_ids"].row_lengths() == length) & tf.reduce_all((ids >= 0) & (ids < vocabulary), axis=1)
        valid &= (parsed["attention_mask"].row_lengths() <= length) & tf.reduce_all(attended == 1, axis=1)  # (n,)
        refused = good & ~valid  # (n,)
        text = tf.cond(tf.reduce_any(refused), lambda: describe_refused(first + tf.argmax(refused)), lambda: "")
        with tf.control_dependencies([tf.debugging.Assert(~tf.reduce_any(refused), [text])]):
            ids = tf.identity(ids)
        return {"input_ids": tf.cast(ids, tf.int32)}, good

    def describe_refused(record: Any) -> Any:
        shard = index.shard_of(record)
        number = tf.strings.as_string(record - index.starts[shard])
        reasons = (
            f" has padding (its attention_mask is not all 1), or not {length} ids of a tokenizer of {vocabulary}: give "
            "the tokenizer that the shards were made with, or write them again with full rows"
        )
        return tf.strings.join(["<bad shard>", index.urls[shard], ": record ", number, reasons, "</bad shard>"])

    def offset(shard: Any, number: Any) -> Any:
        return offsets[begins[shard] + number]

    read = replace_bad_records(index, load, source.records, on_corrupt, offset)
    return TensorRecordSource(source.records, source.record_bytes, length, {"input_ids": (length, tf.int32)}, read)


_POLYNOMIAL = 0x82F63B78  # Castagnoli's, reflected
_BYTE_VALUES = 256


class Crc32c:
    """Masked CRCs, as TFRecord stores them, of messages of up to `longest` bytes."""

    def __init__(self, longest: int) -> None:
        self._longest = longest
        # (longest * 256 + 1,): the last entry is for positions outside of a message.
        table = np.append(_byte_table(longest).reshape(-1), np.uint32(0))
        self._table = tf.constant(table)
        self._no_byte = len(table) - 1
        of_zeros = [google_crc32c.value(bytes(length)) for length in range(longest + 1)]
        self._of_zeros = tf.constant(np.array(of_zeros, np.uint32))  # (longest + 1,)

    def of_equal_lengths(self, reversed_bytes: Any) -> Any:
        """Returns the CRCs, (n,) uint32, of messages (n, longest) uint8, given last byte first."""
        entries = tf.cast(reversed_bytes, tf.int32) + _BYTE_VALUES * tf.range(self._longest)  # (n, longest)
        return _mask(_xor(self._of_zeros[-1], self._fold(entries)))

    def match(self, flat: Any, start: Any, lengths: Any) -> Any:
        """Returns, (n,) bool, whether each message flat[start : start + length] is followed by its CRC. flat: (bytes,)
        uint8; start, lengths: (n,) int64."""
        distance = tf.range(self._longest, dtype=tf.int64)  # (longest,) from the end
        position = (start + lengths)[:, None] - 1 - distance  # (n, longest)
        inside = distance < lengths[:, None]  # (n, longest)
        values = tf.cast(tf.gather(flat, tf.where(inside, position, 0)), tf.int32)
        entries = values + tf.cast(_BYTE_VALUES * distance, tf.int32)
        folded = self._fold(tf.where(inside, entries, self._no_byte))
        crcs = _mask(_xor(tf.gather(self._of_zeros, lengths), folded))  # (n,)
        return tf.cast(crcs, tf.uint64) == read_numbers(flat, start + lengths, 4)

    def _fold(self, entries: Any) -> Any:
        """Returns the exclusive-or of the table's entries along each row. (n, longest) -> (n,)"""
        width = 1 << max(0, (self._longest - 1).bit_length())
        padding = [[0, 0], [0, width - self._longest]]
        values = tf.gather(self._table, tf.pad(entries, padding, constant_values=self._no_byte))  # (n, width)
        while width > 1:
            width //= 2
            values = _xor(values[:, :width], values[:, width:])
        return values[:, 0]


def read_numbers(flat: Any, start: Any, size: int) -> Any:
    """Returns the little-endian numbers, (n,) uint64, of `size` bytes at `start` (n,) of flat (bytes,) uint8."""
    values = tf.cast(tf.gather(flat, start[:, None] + tf.range(size, dtype=tf.int64)), tf.uint64)  # (n, size)
    shifts = tf.cast(8 * tf.range(size), tf.uint64)
    return tf.bitcast(tf.reduce_sum(tf.bitcast(tf.bitwise.left_shift(values, shifts), tf.int64), axis=1), tf.uint64)


def _byte_table(longest: int) -> npt.NDArray[np.uint32]:
    """Returns (longest, 256): entry [d, b] is the CRC register, started at 0, after byte b and d zero bytes."""
    one_byte = np.arange(_BYTE_VALUES, dtype=np.uint32)
    for _ in range(8):
        one_byte = (one_byte >> np.uint32(1)) ^ np.where(one_byte & 1, np.uint32(_POLYNOMIAL), np.uint32(0))
    table = np.empty((longest, _BYTE_VALUES), np.uint32)
    register = one_byte
    for distance in range(longest):
        table[distance] = register
        register = one_byte[register & np.uint32(255)] ^ (register >> np.uint32(8))
    return table


def _mask(crc: Any) -> Any:
    """Applies `tfrecord.mask` to a uint32 tensor."""
    right, left = tf.bitwise.right_shift, tf.bitwise.left_shift
    rotated = tf.bitwise.bitwise_or(right(crc, tf.constant(15, tf.uint32)), left(crc, tf.constant(17, tf.uint32)))
    return rotated + tf.constant(MASK_DELTA, tf.uint32)


def _xor(one: Any, other: Any) -> Any:
    return tf.bitwise.bitwise_xor(one, other)
