"""Any number of labels for each text, in TensorFlow: the loss and an evaluation's totals over a replica's rows."""

from collections.abc import Mapping
from typing import Any

import tensorflow as tf

from training.tasks.tf_sums import logits_of


def sums(network: Any, batch: Mapping[str, Any], training: bool) -> tuple[Any, Any]:
    """Returns (3,): weighted loss, weights, weighted hits (training.batch.SUMS), over these rows and labels; and (3,):
    the totals of training.tasks.multi_label.task.COUNTS."""
    logits = tf.cast(logits_of(network, batch, training), tf.float32)  # (rows, labels)
    labels, weights = tf.cast(batch["labels"], tf.float32), batch["weights"][:, None]  # (rows, labels), (rows, 1)
    losses = tf.nn.sigmoid_cross_entropy_with_logits(labels, logits)
    predicted = tf.cast(logits > 0, tf.float32)
    hits = tf.cast(predicted == labels, tf.float32)
    values = [losses, tf.ones_like(labels), hits, predicted * labels, labels, predicted]
    totals = [tf.reduce_sum(value * weights) for value in values]
    return tf.stack(totals[:3]), tf.stack(totals[3:])
