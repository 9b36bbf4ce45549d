"""`training.data.loading.fixed_shards` in TensorFlow operations: records of the compact layout."""

from typing import Any

import numpy as np
import tensorflow as tf

from training.data.formats import fixed_records, tfrecord
from training.data.formats.dataset import Dataset
from training.data.loading.fixed_shards import FixedShards
from training.data.loading.record_source import OnCorrupt
from training.data.tf.crc32c import Crc32c
from training.data.tf.recipe_shards import recipe_shards
from training.data.tf.record_source import Columns, ShardIndex, TensorRecordSource, describe_record, replace_bad_records


def open_source(
    dataset: Dataset, *, vocabulary: int, on_corrupt: OnCorrupt, length: int | None = None
) -> TensorRecordSource:
    """Returns the source for a dataset of either layout, as the numpy `open_source`. Raises BadInput."""
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

    replace = replace_bad_records(
        load,
        source.records,
        on_corrupt,
        lambda record: describe_record(index, record, lambda _, number: number * size, on_corrupt),
    )

    def read(first: Any, last: Any) -> Columns:
        columns = replace(first, last)
        _check_ids(columns["input_ids"], vocabulary, index.urls[index.shard_of(first)])
        return columns

    return TensorRecordSource(source.records, size, length, columns_of, read)


def _check_ids(input_ids: Any, vocabulary: int, url: Any) -> None:
    """Fails the pipeline for an id outside the tokenizer's vocabulary. input_ids: (n, length)."""
    ids = tf.cast(input_ids, tf.int32)
    valid = tf.reduce_all((ids >= 0) & (ids < vocabulary))
    text = (
        f" has a token id that the tokenizer, which has {vocabulary}, does not have: write the shards again with this "
        "tokenizer"
    )
    tf.debugging.Assert(valid, [tf.strings.join(["<bad shard>", url, text, "</bad shard>"])])
