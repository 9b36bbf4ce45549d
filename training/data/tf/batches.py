"""Batches for training and evaluation as `tf.data` datasets of pure TensorFlow ops: the same integers as
`training.data.loading.mlm` and `training.data.loading.classification` give, so a run's batches do not depend on the
backend.

For `tf.distribute`: a dataset made in `strategy.distribute_datasets_from_function` for host `context.input_pipeline_id`
of `context.num_input_pipelines` runs on that host, which then reads its own rows itself; no record passes the host that
drives the program.

Elements are dictionaries with this host's rows of global batch `start`, `start` + 1, ...: what the fields of MlmBatch
and ClassificationBatch are, and `replaced` (rows,) bool, records that are bad and for which another stands. Errors of
the ops become ours inside `shards_tensorflow.explained`.

A window of this host's rows is read at once, and one more ahead of it: about 3 * order.WINDOW_BLOCKS *
order.BLOCK_BYTES = 200 MB over the number of hosts.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import tensorflow as tf

from training.data.formats.dataset import Dataset
from training.data.loading.classification import batches_before, epoch_of_step, groups_of_lengths
from training.data.loading.host_slice import Reading
from training.data.loading.mlm import EVALUATION_EPOCH
from training.data.sampling.masking import Masking, SpecialTokens
from training.data.sampling.order import Order, Sequential, Shuffled, geometry
from training.data.tf.masking import mask
from training.data.tf.order import rows_of_window, window_of_place
from training.data.tf.random_bits import in_order, stream
from training.data.tf.shards import REPLACED, Columns, Part, open_part

READS = 16  # blocks read at a time
_ENDLESS = 2**62


def mlm(dataset: Dataset, how: Reading, masking: Masking, seed: int, start: int = 0) -> Any:
    """Endless training batches. Raises BadInput."""
    mine = how.rows(dataset, "mlm")
    part = _part(dataset, how)
    order = Shuffled(geometry(part.records, part.record_bytes, part.unit), seed, how.global_batch_size)
    rows = _batches(part, order, how, mine, start)

    def masked(batch: Columns) -> Columns:
        return _masked(batch, batch["epoch"], seed, masking, how.tokenizer)

    return rows.map(masked, num_parallel_calls=2, deterministic=True)


def mlm_evaluation(dataset: Dataset, how: Reading, masking: Masking, seed: int = 0) -> Any:
    """All records once, in record order, as `batches.evaluation`."""
    mine = how.rows(dataset, "mlm")
    rows = _all_rows(_part(dataset, how), how, mine)

    def masked(batch: Columns) -> Columns:
        found = _masked(batch, EVALUATION_EPOCH, seed, masking, how.tokenizer)
        real = (batch["records"] >= 0)[:, None]
        found["input_ids"] = tf.where(real, found["input_ids"], how.tokenizer.pad)
        for name in ("positions", "labels", "weights"):
            found[name] = tf.where(real, found[name], tf.zeros_like(found[name]))
        return found

    return rows.map(masked, num_parallel_calls=2, deterministic=True)


def classification(dataset: Dataset, how: Reading, seed: int, start: int = 0) -> Any:
    """Endless training batches; their length is that of the batch's bucket. Raises BadInput."""
    mine, batch = how.rows(dataset, "classification"), how.global_batch_size
    parts = _buckets(dataset, how)
    records = tuple(part.records for part in parts)
    epoch, place = epoch_of_step(records, batch, start)
    buckets = []
    for bucket, (part, before) in enumerate(zip(parts, np.cumsum([0, *records]), strict=False)):
        number = batches_before(records, batch, seed, epoch, place, bucket)  # of the batch that comes first
        order = Shuffled(geometry(part.records, part.record_bytes), seed + part.length, batch)
        buckets.append(_batches(part, order, how, mine, number).map(_labelled(int(before), how.tokenizer.pad)))
    return tf.data.Dataset.choose_from_datasets(
        buckets, _choices(records, batch, seed, epoch, place), stop_on_empty_dataset=True
    )


def classification_evaluation(dataset: Dataset, how: Reading) -> Any:
    """All records once, bucket by bucket, as `classification.evaluation`."""
    mine = how.rows(dataset, "classification")
    found, before = None, 0
    for part in _buckets(dataset, how):
        rows = _all_rows(part, how, mine).map(_labelled(before, how.tokenizer.pad))
        found = rows if found is None else found.concatenate(rows)
        before += part.records
    return found


# --- rows


def _part(dataset: Dataset, how: Reading, length: int | None = None) -> Part:
    return open_part(dataset, vocabulary=how.tokenizer.vocabulary, on_corrupt=how.on_corrupt, length=length)


def _batches(part: Part, order: Order, how: Reading, mine: tuple[int, int], start: int) -> Any:
    """Rows `mine` of batch `start`, `start` + 1, ..."""
    first, last = mine
    return _rows(part, order, how.global_batch_size, first, last, start * how.global_batch_size).rebatch(
        last - first, drop_remainder=True
    )


def _rows(part: Part, order: Order, batch: int, first: int, last: int, start: int, windows: int = _ENDLESS) -> Any:
    """Rows [first, last) of the batches from place `start` on, window by window: columns, `records` and `epoch`, (n,
    ...) each."""
    shape = order.geometry

    def chosen(window: Any) -> Any:
        epoch, number = window // shape.windows, window % shape.windows
        return epoch, rows_of_window(order, batch, epoch, number, first, last, start)

    def read(epoch: Any, records: Any) -> Columns:
        blocks, slot = tf.unique(records // shape.block, tf.int64)

        def block(number: Any) -> Columns:
            begin = number * shape.block
            columns = part.read(begin, tf.minimum(begin + shape.block, shape.records))
            short = shape.block - tf.size(columns[REPLACED], tf.int64)
            return {
                name: tf.ensure_shape(
                    tf.pad(values, [[0, short], *[[0, 0]] * (values.shape.rank - 1)]), (shape.block, *values.shape[1:])
                )
                for name, values in columns.items()
            }

        found = tf.data.Dataset.from_tensor_slices(blocks).map(block, num_parallel_calls=READS, deterministic=True)
        found = found.batch(tf.size(blocks, tf.int64)).get_single_element()  # (blocks, block, ...)
        location = slot * shape.block + records % shape.block
        columns = {
            name: tf.gather(tf.reshape(values, (-1, *values.shape[2:])), location) for name, values in found.items()
        }
        return {**columns, "records": records, "epoch": tf.fill(tf.shape(records), epoch)}

    numbers = tf.data.Dataset.range(window_of_place(shape, start), windows)
    some = numbers.map(chosen).filter(lambda _, records: tf.size(records) > 0)
    return some.map(read).prefetch(1)


def _all_rows(part: Part, how: Reading, mine: tuple[int, int]) -> Any:
    """Rows `mine` of the batches of one pass in record order, as batches; the last is filled up with rows of record
    -1."""
    (first, last), batch = mine, how.global_batch_size
    order = Sequential(geometry(part.records, part.record_bytes, part.unit))
    rows = _rows(part, order, batch, first, last, 0, order.geometry.windows)
    there = min(max(part.records % batch - first, 0), last - first) if part.records % batch else last - first
    filler = {
        name: np.full(
            (last - first - there, *spec.shape[1:]),
            {"records": -1, "input_ids": how.tokenizer.pad}.get(name, 0),
            spec.dtype.as_numpy_dtype,
        )
        for name, spec in rows.element_spec.items()
    }
    return rows.concatenate(tf.data.Dataset.from_tensors(filler)).rebatch(last - first, drop_remainder=True)


def _masked(batch: Columns, epoch: Any, seed: int, masking: Masking, tokenizer: SpecialTokens) -> Columns:
    input_ids, positions, labels, weights = mask(
        tf.cast(batch["input_ids"], tf.int32), epoch, batch["records"], seed=seed, masking=masking, tokens=tokenizer
    )
    return {
        "input_ids": input_ids,
        "positions": positions,
        "labels": labels,
        "weights": weights,
        "records": batch["records"],
        REPLACED: batch[REPLACED],
    }


def _labelled(before: int, pad: int) -> Any:
    """Rows of a bucket that has `before` records before it, as a ClassificationBatch's fields."""

    def convert(batch: Columns) -> Columns:
        ids, real = tf.cast(batch["input_ids"], tf.int32), batch["records"] >= 0
        attention = tf.cast(ids != pad, tf.int32)
        # One token of attention in a row that only fills up, as in training.data.loading.classification.
        attention = tf.where(
            real[:, None], attention, tf.one_hot(tf.zeros_like(batch["records"]), ids.shape[1], dtype=tf.int32)
        )
        return {
            "input_ids": ids,
            "attention_mask": attention,
            "labels": tf.cast(batch["label"][:, 0], tf.int32),
            "weights": tf.cast(real, tf.float32),
            "records": tf.where(real, batch["records"] + before, -1),
            REPLACED: batch[REPLACED],
        }

    return convert


# --- buckets


def _buckets(dataset: Dataset, how: Reading) -> list[Part]:
    return [
        _joined([_part(dataset, how, length) for length in group], how.tokenizer.pad)
        for group in groups_of_lengths(dataset, how.global_batch_size)
    ]


def _joined(parts: Sequence[Part], pad: int) -> Part:
    """Several buckets as one: the shorter ones first, their rows padded to the longest's length."""
    if len(parts) == 1:
        return parts[0]
    longest, starts = parts[-1].length, np.cumsum([0, *(part.records for part in parts)])

    def read(first: Any, last: Any) -> Columns:
        found = []
        for part, start in zip(parts, starts, strict=False):
            low, high = tf.maximum(first - start, 0), tf.minimum(last - start, part.records)

            def some(part: Part = part, low: Any = low, high: Any = high) -> Columns:
                columns = part.read(low, high)
                missing = [[0, 0], [0, longest - part.length]]
                columns["input_ids"] = tf.pad(
                    columns["input_ids"], missing, constant_values=tf.cast(pad, columns["input_ids"].dtype)
                )
                return columns

            found.append(tf.cond(low < high, some, parts[-1].nothing))
        return {name: tf.concat([each[name] for each in found], axis=0) for name in found[0]}

    return replace(parts[-1], records=int(starts[-1]), unit=0, read=read)


def _choices(records: tuple[int, ...], batch: int, seed: int, epoch: int, place: int) -> Any:
    """The bucket of each step from `place` of `epoch` on, as `classification.schedule` chooses it."""
    numbers = tf.constant(records, tf.int64)

    def order(epoch: Any) -> Any:
        counts = (epoch + 1) * numbers // batch - epoch * numbers // batch
        steps = tf.repeat(tf.range(len(records), dtype=tf.int64), counts)
        shuffled = tf.argsort(in_order(stream(seed, "buckets", epoch, tf.size(steps, tf.int64))), stable=True)
        return tf.data.Dataset.from_tensor_slices(tf.gather(steps, shuffled))

    return tf.data.Dataset.range(epoch, _ENDLESS).flat_map(order).skip(place)
