"""Regression in TensorFlow: the squared error and an evaluation's totals over a replica's rows."""

from collections.abc import Mapping
from typing import Any

import tensorflow as tf

from training.tasks.tf_sums import logits_of


def sums(network: Any, batch: Mapping[str, Any], training: bool) -> tuple[Any, Any]:
    """Returns (3,): squared errors, weights, 0 (training.batch.SUMS), over these rows; and (6,): the totals of
    training.tasks.regression.task.COUNTS."""
    predictions = tf.cast(logits_of(network, batch, training), tf.float32)[:, 0]  # (rows,)
    labels, weights = batch["labels"], batch["weights"]  # (rows,)
    errors = predictions - labels
    report = tf.stack([tf.reduce_sum(tf.square(errors) * weights), tf.reduce_sum(weights), 0.0])
    values = [
        tf.abs(errors), predictions, labels, tf.square(predictions), tf.square(labels), predictions * labels,
    ]  # fmt: skip
    return report, tf.stack([tf.reduce_sum(value * weights) for value in values])
