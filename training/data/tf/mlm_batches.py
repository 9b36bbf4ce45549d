"""`training.data.loading.mlm_batches` in TensorFlow operations: the same integers as a `tf.data` dataset, so a run's
batches do not depend on the backend.

For `tf.distribute`: a dataset made in `strategy.distribute_datasets_from_function` for host `context.input_pipeline_id`
of `context.num_input_pipelines` runs on that host, which reads its own rows; no record passes through host 0.

Elements are dictionaries with this host's rows: the fields of `MlmBatch`, and `replaced` (rows,) bool, which marks
replaced records. `record_source.translate_errors` translates errors of the operations.
"""

from typing import Any

import tensorflow as tf

from training.data.formats.dataset import Dataset
from training.data.loading.mlm_batches import EVALUATION_EPOCH
from training.data.loading.record_source import REPLACED, HostSlice
from training.data.sampling.masking import Masking, SpecialTokens
from training.data.sampling.order import training_order
from training.data.tf.fixed_shards import open_source
from training.data.tf.masking import mask
from training.data.tf.reader import evaluation_batches, training_batches
from training.data.tf.record_source import Columns, TensorRecordSource


def mlm_batches(dataset: Dataset, host_slice: HostSlice, masking: Masking, seed: int, start: int = 0) -> Any:
    """Returns an endless tf.data dataset of this host's rows of the global batches from number `start` on, masked anew
    in each epoch. Raises BadInput unless rows are packed and hosts can share a batch evenly."""
    source = _open_source(dataset, host_slice)
    order = training_order(source.records, source.record_bytes, seed=seed, batch=host_slice.global_batch_size)
    batches = training_batches(source, order, host_slice, start)

    def mask_batch(batch: Columns) -> Columns:
        return _mask_columns(batch, batch["epoch"], seed, masking, host_slice.tokenizer)

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
    """Opens the source. Raises BadInput unless rows are packed and hosts can share a batch evenly."""
    dataset.require(rows="packed")
    host_slice.rows()  # raises for an indivisible batch before any shard is read
    return open_source(dataset, vocabulary=host_slice.tokenizer.vocabulary, on_corrupt=host_slice.on_corrupt)


def _mask_columns(batch: Columns, epoch: Any, seed: int, masking: Masking, tokens: SpecialTokens) -> Columns:
    """Returns the fields of an `MlmBatch`. epoch: one for all rows, or (rows,)."""
    input_ids, positions, labels, weights = mask(
        tf.cast(batch["input_ids"], tf.int32), epoch, batch["records"], seed=seed, masking=masking, tokens=tokens
    )
    return {
        "input_ids": input_ids,
        "positions": positions,
        "labels": labels,
        "weights": weights,
        "records": batch["records"],
        REPLACED: batch[REPLACED],
    }
