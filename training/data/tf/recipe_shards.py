"""`training.data.loading.recipe_shards` in TensorFlow operations: records of the public recipe's layout.

Records vary in size, so the process that builds the pipelines of all hosts reads each shard once to find where its
records start.
"""

from typing import Any

import numpy as np
import tensorflow as tf

from training.data.formats import example_codec, tfrecord
from training.data.formats.dataset import Dataset
from training.data.loading.recipe_shards import RecipeShards
from training.data.loading.record_source import OnCorrupt
from training.data.tf.crc32c import Crc32c, read_numbers
from training.data.tf.record_source import Columns, ShardIndex, TensorRecordSource, describe_record, replace_bad_records


def recipe_shards(dataset: Dataset, *, vocabulary: int, on_corrupt: OnCorrupt) -> TensorRecordSource:
    """Returns the source for a dataset in the public recipe's layout; reads all of its shards, to find the records.
    Options as for `RecipeShards`. Raises BadInput, StorageError."""
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

    def describe(record: Any) -> Any:
        return describe_record(index, record, lambda _, __: offsets[offset_index(record[None])[0]], on_corrupt)

    read = replace_bad_records(load, source.records, on_corrupt, describe)
    return TensorRecordSource(source.records, source.record_bytes, length, {"input_ids": (length, tf.int32)}, read)
