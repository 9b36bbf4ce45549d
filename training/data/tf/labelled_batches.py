"""`training.data.loading.labelled_batches` in TensorFlow operations: the same numbers as a `tf.data` dataset.

Elements are dictionaries with this host's rows: the fields of `LabelledBatch` or `PairBatch`, and `replaced` (rows,)
bool, which marks replaced records. See `training.data.tf.mlm_batches` for `tf.distribute` and errors.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import tensorflow as tf

from training.data.formats.dataset import IGNORED, LABEL, TYPES, Dataset, Rows
from training.data.loading.labelled_batches import fillers, label_dtype
from training.data.loading.record_source import REPLACED, HostSlice
from training.data.sampling.bucket_schedule import batches_before, epoch_of_step, group_lengths
from training.data.sampling.order import training_order
from training.data.sampling.random_bits import bucket_seed
from training.data.tf.fixed_shards import open_source
from training.data.tf.order import buckets_of_steps
from training.data.tf.reader import evaluation_batches, training_batches
from training.data.tf.record_source import Columns, TensorRecordSource


def labelled_batches(dataset: Dataset, host_slice: HostSlice, seed: int, start: int = 0) -> Any:
    """Returns an endless tf.data dataset of this host's rows of the global batches from number `start` on; each batch
    has rows of one length bucket. Raises BadInput without labels, or if hosts can't share a batch evenly."""
    sources, batch_size = _open_buckets(dataset, host_slice), host_slice.global_batch_size
    records = tuple(source.records for source in sources)
    epoch, index = epoch_of_step(records, batch_size, start)
    buckets = []
    for bucket, (source, bucket_start) in enumerate(zip(sources, np.cumsum([0, *records]), strict=False)):
        bucket_batches = batches_before(records, batch_size, seed, epoch, index, bucket)
        order = training_order(
            source.records, source.record_bytes, seed=bucket_seed(seed, source.length), batch=batch_size
        )
        batches = training_batches(source, order, host_slice, bucket_batches)
        buckets.append(batches.map(_converter(int(bucket_start), host_slice.tokenizer.pad, dataset.manifest.rows)))
    choices = buckets_of_steps(records, batch_size, seed, epoch, index)
    return tf.data.Dataset.choose_from_datasets(buckets, choices, stop_on_empty_dataset=True)


def labelled_evaluation(dataset: Dataset, host_slice: HostSlice) -> Any:
    """Returns a tf.data dataset of this host's rows of all records once, bucket by bucket. Raises BadInput."""
    joined, bucket_start = None, 0
    for source in _open_buckets(dataset, host_slice):
        convert = _converter(bucket_start, host_slice.tokenizer.pad, dataset.manifest.rows)
        batches = evaluation_batches(source, host_slice).map(convert)
        joined = batches if joined is None else joined.concatenate(batches)
        bucket_start += source.records
    return joined


def _converter(bucket_start: int, pad: int, rows: Rows) -> Callable[[Columns], Columns]:
    """Returns a function from columns of a bucket's rows to the fields of a `LabelledBatch`. A filler row (record -1)
    has weight 0 and attends to one token. `bucket_start` is added to record numbers, which the bucket counts from 0."""

    def convert(batch: Columns) -> Columns:
        ids, real = tf.cast(batch["input_ids"], tf.int32), batch["records"] >= 0  # (rows, length), (rows,)
        attention = tf.cast(ids != pad, tf.int32)  # (rows, length)
        # Filler rows attend to one token, as in training.data.loading.labelled_batches.
        first_only = tf.one_hot(tf.zeros_like(batch["records"]), ids.shape[1], dtype=tf.int32)
        labels, weights = batch[LABEL], tf.cast(real, tf.float32)  # (rows, numbers), (rows,)
        if rows == "token-labelled":
            weights = tf.where(real[:, None], tf.cast(labels != IGNORED, tf.float32), 0.0)  # (rows, length)
        elif rows != "set-labelled":
            labels = labels[:, 0]
        return {
            "input_ids": ids,
            "attention_mask": tf.where(real[:, None], attention, first_only),
            "labels": tf.cast(labels, label_dtype(np.dtype(labels.dtype.as_numpy_dtype))),
            "weights": weights,
            "records": tf.where(real, batch["records"] + bucket_start, -1),
            REPLACED: batch[REPLACED],
            **({TYPES: tf.cast(batch[TYPES], tf.int32)} if TYPES in batch else {}),
        }

    return convert


def _open_buckets(dataset: Dataset, host_slice: HostSlice) -> list[TensorRecordSource]:
    """Opens the length buckets, in ascending order. Raises BadInput without labels, or if hosts can't share a batch."""
    dataset.require_labels()
    host_slice.rows()  # raises for an indivisible batch before any shard is listed

    def open_length(length: int) -> TensorRecordSource:
        tokens = host_slice.tokenizer
        return open_source(dataset, vocabulary=tokens.vocabulary, on_corrupt=host_slice.on_corrupt, length=length)

    return [
        _join_lengths([open_length(length) for length in lengths], fillers(dataset, host_slice.tokenizer.pad))
        for lengths in group_lengths(dataset.records_of_length, host_slice.global_batch_size)
    ]


def _join_lengths(sources: Sequence[TensorRecordSource], fillers: Mapping[str, int]) -> TensorRecordSource:
    """Joins sources as `JoinedLengths`: shorter rows first, all padded to the longest length."""
    if len(sources) == 1:
        return sources[0]
    longest, starts = sources[-1].length, np.cumsum([0, *(source.records for source in sources)])

    def read_padded(source: TensorRecordSource, low: Any, high: Any) -> Columns:
        columns = source.read(low, high)
        padding = [[0, 0], [0, longest - source.length]]
        padded = {
            name: tf.pad(columns[name], padding, constant_values=tf.cast(filler, columns[name].dtype))
            for name, filler in fillers.items()
        }
        return {**columns, **padded}

    def read(first: Any, last: Any) -> Columns:
        pieces = []
        for source, start in zip(sources, starts, strict=False):
            low, high = tf.maximum(first - start, 0), tf.minimum(last - start, source.records)

            def piece(source: TensorRecordSource = source, low: Any = low, high: Any = high) -> Columns:
                return read_padded(source, low, high)

            pieces.append(tf.cond(low < high, piece, sources[-1].empty))
        return {name: tf.concat([columns[name] for columns in pieces], axis=0) for name in pieces[0]}

    return replace(sources[-1], records=int(starts[-1]), read=read)
