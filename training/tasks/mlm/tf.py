"""Masked language modelling in TensorFlow: the loss over a replica's rows, and batches as a tf.data dataset."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import tensorflow as tf

from training.config import TrainerConfig
from training.data.loading.record_source import HostSlice
from training.data.tf.mlm_batches import mlm_batches, mlm_evaluation
from training.tasks.mlm.task import masking_of
from training.tasks.task import Data
from training.tasks.tf_sums import cross_entropy_sums


def sums(network: Any, batch: Mapping[str, Any], training: bool) -> tuple[Any, None]:
    """(3,): weighted loss, weights, weighted hits (training.batch.SUMS), over these rows. The head is computed at the
    masked positions only."""
    ids = batch["input_ids"]  # (rows, sequence)
    body = getattr(network, network.base_model_prefix)
    hidden = body(input_ids=ids, attention_mask=tf.ones_like(ids), training=training)[0]  # (rows, sequence, width)
    head = network.mlm if hasattr(network, "mlm") else network.lm_head
    logits = head(tf.gather(hidden, batch["positions"], batch_dims=1))  # (rows, predictions, vocabulary)
    labels = tf.reshape(tf.maximum(batch["labels"], 0), [-1])  # (rows * predictions,)
    weights = tf.reshape(batch["weights"], [-1])  # (rows * predictions,)
    return cross_entropy_sums(tf.reshape(logits, [-1, logits.shape[-1]]), labels, weights), None


def host_rows(config: TrainerConfig, how: HostSlice, data: Data, start: int) -> Any:
    """One host's rows of global batch `start`, `start` + 1, ... as a tf.data dataset. Raises BadInput."""
    return mlm_batches(data.train, how, masking_of(config), config.seed, start)


def evaluation_rows(config: TrainerConfig, how: HostSlice, data: Data) -> Any:
    """One host's rows of the evaluation set as a tf.data dataset. Raises BadInput."""
    assert data.evaluation is not None
    return mlm_evaluation(data.evaluation, how, masking_of(config))
