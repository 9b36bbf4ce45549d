"""Regression in TensorFlow: the squared error and an evaluation's totals over a replica's rows, and batches as a
tf.data dataset."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import tensorflow as tf

from training.config import TrainerConfig
from training.data.loading.record_source import HostSlice
from training.data.tf.labelled_batches import labelled_batches, labelled_evaluation
from training.tasks.task import Data


def sums(network: Any, batch: Mapping[str, Any], training: bool) -> tuple[Any, Any]:
    """(3,): squared errors, weights, 0 (training.batch.SUMS), over these rows; and (6,): the totals of
    training.tasks.regression.task.COUNTS."""
    logits = network(
        input_ids=batch["input_ids"], attention_mask=batch["attention_mask"], training=training
    ).logits  # (rows, 1)
    predictions = tf.cast(logits, tf.float32)[:, 0]  # (rows,)
    labels, weights = batch["labels"], batch["weights"]  # (rows,)
    errors = predictions - labels
    report = tf.stack([tf.reduce_sum(tf.square(errors) * weights), tf.reduce_sum(weights), 0.0])
    values = [
        tf.abs(errors), predictions, labels, tf.square(predictions), tf.square(labels), predictions * labels,
    ]  # fmt: skip
    return report, tf.stack([tf.reduce_sum(value * weights) for value in values])


def host_rows(config: TrainerConfig, how: HostSlice, data: Data, start: int) -> Any:
    """One host's rows of global batch `start`, `start` + 1, ... as a tf.data dataset. Raises BadInput."""
    return labelled_batches(data.train, how, config.seed, start)


def evaluation_rows(config: TrainerConfig, how: HostSlice, data: Data) -> Any:
    """One host's rows of the evaluation set as a tf.data dataset. Raises BadInput."""
    assert data.evaluation is not None
    return labelled_evaluation(data.evaluation, how)
