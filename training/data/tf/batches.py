"""`training.data.loading` in TensorFlow operations: this host's rows in the order of the steps, the same numbers, as
`tf.data` datasets, so that a run's batches do not depend on the backend.

For `tf.distribute`: a dataset made in `strategy.distribute_datasets_from_function` for host `context.input_pipeline_id`
of `context.num_input_pipelines` runs on that host, which reads its own rows; no record passes through host 0.

Elements are dictionaries with this host's rows: the fields of `MlmBatch`, `LabelledBatch` or `PairBatch`, and
`replaced` (rows,) bool, which marks replaced records. `record_source.translate_errors` translates errors of the
operations.

Reads a window of this host's rows at a time, and the next one ahead: about 3 * order.WINDOW_BLOCKS *
order.BLOCK_BYTES = 200 MB over the number of hosts, at most twice as much. Blocks are permuted once an epoch.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import tensorflow as tf

from training.data.formats.dataset import IGNORED, LABEL, TYPES, Dataset, Rows
from training.data.loading.batches import EVALUATION_EPOCH, fillers, label_dtype
from training.data.loading.record_source import REPLACED, HostSlice
from training.data.sampling.masking import Masking, SpecialTokens
from training.data.sampling.order import (
    Order,
    batches_before,
    epoch_of_step,
    evaluation_order,
    group_lengths,
    locate,
    training_order,
)
from training.data.sampling.random_bits import bucket_seed
from training.data.tf.record_source import Columns, TensorRecordSource, open_source
from training.data.tf.sampling import ENDLESS, block_permutation, buckets_of_steps, mask, rows_of_window

CONCURRENT_BLOCKS = 16  # blocks read at a time


def training_batches(source: TensorRecordSource, order: Order, host_slice: HostSlice, start: int) -> Any:
    """Returns an endless tf.data dataset of this host's rows of the global batches from number `start` on. An element
    has the source's columns, `records` and `epoch`, (rows, ...) each. Raises BadInput if hosts can't share a batch."""
    first, last = host_slice.rows()
    batch_size = host_slice.global_batch_size
    rows = _read_rows(source, order, batch_size, first, last, start * batch_size)
    return rows.rebatch(last - first, drop_remainder=True)


def evaluation_batches(source: TensorRecordSource, host_slice: HostSlice) -> Any:
    """Returns a tf.data dataset of this host's rows of one pass in record order, with elements as of
    `training_batches`. Filler rows (record -1, padding as ids, else 0) complete the last batch, on each host."""
    (first, last), batch_size = host_slice.rows(), host_slice.global_batch_size
    order = evaluation_order(source.records, source.record_bytes)
    rows = _read_rows(source, order, batch_size, first, last, 0, epochs=1)
    remainder = source.records % batch_size
    present = min(max(remainder - first, 0), last - first) if remainder else last - first  # rows in the last batch
    fillers = {"records": -1, "input_ids": host_slice.tokenizer.pad}
    filler = {
        name: np.full((last - first - present, *spec.shape[1:]), fillers.get(name, 0), spec.dtype.as_numpy_dtype)
        for name, spec in rows.element_spec.items()
    }
    return rows.concatenate(tf.data.Dataset.from_tensors(filler)).rebatch(last - first, drop_remainder=True)


def _read_rows(
    source: TensorRecordSource, order: Order, batch: int, first: int, last: int, start: int, epochs: int = ENDLESS
) -> Any:
    """Returns a tf.data dataset of rows [first, last) of each batch, from row `start` of the order to the end of epoch
    `epochs` - 1. An element has the rows of one window: columns, `records` (numbers) and `epoch`. Windows without
    such rows are left out. Reads one element ahead."""
    first_epoch, first_window, _ = locate(order, start)

    def windows_of(epoch: Any) -> Any:
        permuted = block_permutation(order, epoch)

        def select(number: Any) -> Any:
            return epoch, rows_of_window(order, permuted, batch, epoch, number, first, last, start)

        begin = tf.where(epoch == first_epoch, tf.constant(first_window, tf.int64), 0)
        return tf.data.Dataset.range(begin, order.windows).map(select)

    def read_block(number: Any) -> Columns:
        begin = number * order.block
        columns = source.read(begin, tf.minimum(begin + order.block, order.records))
        missing = order.block - tf.size(columns[REPLACED], tf.int64)  # the last block may be shorter
        return {
            name: tf.ensure_shape(
                tf.pad(values, [[0, missing], *[[0, 0]] * (values.shape.rank - 1)]), (order.block, *values.shape[1:])
            )
            for name, values in columns.items()
        }

    def read(epoch: Any, records: Any) -> Columns:
        blocks, slot = tf.unique(records // order.block, tf.int64)  # (blocks,), (n,)
        columns = tf.data.Dataset.from_tensor_slices(blocks).map(
            read_block, num_parallel_calls=CONCURRENT_BLOCKS, deterministic=True
        )
        columns = columns.batch(tf.size(blocks, tf.int64)).get_single_element()  # (blocks, block, ...) each
        location = slot * order.block + records % order.block  # (n,)
        rows = {
            name: tf.gather(tf.reshape(values, (-1, *values.shape[2:])), location) for name, values in columns.items()
        }
        return {**rows, "records": records, "epoch": tf.fill(tf.shape(records), epoch)}

    selected = tf.data.Dataset.range(first_epoch, epochs).flat_map(windows_of)
    return selected.filter(lambda _, records: tf.size(records) > 0).map(read).prefetch(1)


def mlm_batches(dataset: Dataset, host_slice: HostSlice, masking: Masking, seed: int, start: int = 0) -> Any:
    """Returns an endless tf.data dataset of this host's rows of the global batches from number `start` on, masked anew
    in each epoch. Raises BadInput unless rows are packed, hosts can share a batch evenly and shards are the manifest's;
    StorageError. Reading raises TensorFlow's errors, for `translate_errors`."""
    source = _open_source(dataset, host_slice)
    order = training_order(source.records, source.record_bytes, seed=seed, batch=host_slice.global_batch_size)
    mask_batch = partial(_mask_columns, epoch=None, seed=seed, masking=masking, tokens=host_slice.tokenizer)
    batches = training_batches(source, order, host_slice, start)
    return batches.map(mask_batch, num_parallel_calls=2, deterministic=True)


def mlm_evaluation(dataset: Dataset, host_slice: HostSlice, masking: Masking, seed: int = 0) -> Any:
    """Returns a tf.data dataset of this host's rows of all records once, in record order, always masked in the same
    way. Filler rows of the last batch have weight 0. Raises as `mlm_batches`."""
    batches = evaluation_batches(_open_source(dataset, host_slice), host_slice)

    def mask_batch(batch: Columns) -> Columns:
        masked = _mask_columns(batch, EVALUATION_EPOCH, seed, masking, host_slice.tokenizer)
        real = (batch["records"] >= 0)[:, None]  # (rows, 1)
        masked["input_ids"] = tf.where(real, masked["input_ids"], host_slice.tokenizer.pad)
        for name in ("positions", "labels", "weights"):
            masked[name] = tf.where(real, masked[name], tf.zeros_like(masked[name]))
        return masked

    return batches.map(mask_batch, num_parallel_calls=2, deterministic=True)


def _open_source(dataset: Dataset, host_slice: HostSlice) -> TensorRecordSource:
    """Opens the source, as `open_source`. Raises BadInput also if rows are not packed, or hosts can't share a batch."""
    dataset.require(rows="packed")
    host_slice.rows()  # raises for an indivisible batch before any shard is read
    return open_source(dataset, vocabulary=host_slice.tokenizer.vocabulary, on_corrupt=host_slice.on_corrupt)


def _mask_columns(batch: Columns, epoch: int | None, seed: int, masking: Masking, tokens: SpecialTokens) -> Columns:
    """Returns the fields of an `MlmBatch`, masked as in `epoch`; None: each row as in its own, the column `epoch`."""
    ids, records = tf.cast(batch["input_ids"], tf.int32), batch["records"]
    epochs = batch["epoch"] if epoch is None else epoch
    masked = mask(ids, epochs, records, seed=seed, masking=masking, tokens=tokens)
    return {**masked, "records": records, REPLACED: batch[REPLACED]}


def labelled_batches(dataset: Dataset, host_slice: HostSlice, seed: int, start: int = 0) -> Any:
    """Returns an endless tf.data dataset of this host's rows of the global batches from number `start` on; each batch
    has rows of one length bucket. Raises BadInput without labels, or if hosts can't share a batch evenly, or shards are
    not the manifest's; StorageError. Reading raises TensorFlow's errors, for `translate_errors`."""
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
    """Returns a tf.data dataset of this host's rows of all records once, bucket by bucket; rows of weight 0 fill the
    last batch of each. Raises as `labelled_batches`, also when it is read."""
    joined, bucket_start = None, 0
    for source in _open_buckets(dataset, host_slice):
        convert = _converter(bucket_start, host_slice.tokenizer.pad, dataset.manifest.rows)
        batches = evaluation_batches(source, host_slice).map(convert)
        joined = batches if joined is None else joined.concatenate(batches)
        bucket_start += source.records
    return joined


def _converter(bucket_start: int, pad: int, rows: Rows) -> Callable[[Columns], Columns]:
    """Returns a function from columns of a bucket's rows to the fields of a `LabelledBatch` or `PairBatch`. Filler rows
    (record -1) have weight 0 and attend to one token. `bucket_start` is added to records, which count from 0."""

    def convert(batch: Columns) -> Columns:
        ids, real = tf.cast(batch["input_ids"], tf.int32), batch["records"] >= 0  # (rows, length), (rows,)
        attention = tf.cast(ids != pad, tf.int32)  # (rows, length)
        # Filler rows attend to one token, as in training.data.loading.batches.
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
    """Opens the length buckets, ascending. Raises as `open_source`, and BadInput without labels or for a global batch
    size that hosts can't share."""
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
