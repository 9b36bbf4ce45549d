"""`training.data.loading.record_source` in TensorFlow operations: records of a dataset by number, for a `tf.data`
pipeline that runs on the hosts of a slice, without Python.

Bytes come through TensorFlow's own file systems (local, gs://): a range of a shard is a FixedLengthRecordDataset of one
record, with the rest of the file as header and footer. Every record's framing, tags and CRC are checked as in the numpy
readers, and `on_corrupt` applies as there.

Not possible here: to pin an object's generation (a shard that is replaced after the start by one of the same size with
good CRCs is not noticed).
"""

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import tensorflow as tf

from training import storage
from training.data.formats import tfrecord
from training.data.formats.dataset import Dataset, Shard
from training.data.loading.record_source import NO_GOOD_RECORD, REPLACED, OnCorrupt
from training.errors import BadInput

Columns = dict[str, Any]  # feature -> (n, count); and REPLACED: (n,) bool
# (first, last), int64 scalars at most a block apart -> (feature -> (n, count), good (n,)) of the records [first, last).
Load = Callable[[Any, Any], tuple[dict[str, Any], Any]]


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
    """Translates TensorFlow's errors that name a shard or an access to storage: BadInput for a missing or damaged
    shard (Corrupt for a record), else StorageError. Others, as of a step that runs meanwhile, pass unchanged."""
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
        """Returns the joined strings read(shard, first, last record in it) of the shards that hold [first, last)."""

        def read_piece(shard: Any) -> Any:
            start = self.starts[shard]
            return read(shard, tf.maximum(first - start, 0), tf.minimum(last - start, self.counts[shard]))

        return join_strings(self.shard_of(first), self.shard_of(last - 1) + 1, read_piece)

    def read_bytes(self, shard: Any, start: Any, end: Any) -> Any:
        """Returns bytes [start, end) of shard number `shard`, a string tensor. Fails if its file has another size than
        in the manifest."""
        size = self.sizes[shard]
        dataset = tf.data.FixedLengthRecordDataset(
            self.urls[shard], end - start, header_bytes=start, footer_bytes=size - end, buffer_size=end - start
        )
        options = tf.data.Options()  # without optimization, which would take a hundred times as long
        options.autotune.enabled = False
        options.experimental_optimization.apply_default_optimizations = False
        return dataset.with_options(options).get_single_element()


def join_strings(first: Any, last: Any, piece: Callable[[Any], Any]) -> Any:
    """Returns piece(first) + ... + piece(last - 1), strings."""
    _, joined = tf.while_loop(
        lambda number, _: number < last,
        lambda number, before: (number + 1, before + piece(number)),
        (first + 1, piece(first)),
        parallel_iterations=1,
    )
    return joined


def replace_bad_records(
    load: Load, records: int, on_corrupt: OnCorrupt, describe: Callable[[Any], Any]
) -> Callable[[Any, Any], Columns]:
    """Returns a function from (first, last) to the columns of these records, as the numpy `read_replacing`.

    Args:
        load: loads records of the source.
        records: number of records in the source.
        on_corrupt: "stop": the pipeline fails at the first bad record; "skip": only if no record is good.
        describe: record -> the message from which `translate_errors` makes a Corrupt.
    """

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
        text = tf.cond(usable, lambda: tf.constant(""), lambda: describe(first_bad))
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


def describe_record(index: ShardIndex, record: Any, offset: Callable[[Any, Any], Any], on_corrupt: OnCorrupt) -> Any:
    """Returns the message for a bad record that `translate_errors` parses. offset: (shard, number in it) -> byte."""
    shard = index.shard_of(record)
    number = record - index.starts[shard]
    reason = "its checksum (CRC-32C) does not match, or it is not what this dataset's records are"
    numbers = [tf.strings.as_string(number), tf.strings.as_string(offset(shard, number))]
    return tf.strings.join(
        ["<bad record>", index.urls[shard], "|", numbers[0], "|", numbers[1], f"|{reason}|{on_corrupt}</bad record>"]
    )
