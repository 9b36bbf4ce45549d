"""Classification in TensorFlow: the loss and the confusion matrix over a replica's rows."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import tensorflow as tf

from training.tasks.tf_sums import cross_entropy_sums


def sums(network: Any, batch: Mapping[str, Any], training: bool) -> tuple[Any, Any]:
    """Returns (3,): weighted loss, weights, weighted hits (training.batch.SUMS), over these rows; and (labels, labels):
    the weights of the rows of each class (first axis) that were taken for each class (second axis)."""
    logits = network(
        input_ids=batch["input_ids"], attention_mask=batch["attention_mask"], training=training
    ).logits  # (rows, labels)
    labels, weights = batch["labels"], batch["weights"]  # (rows,)
    classes = logits.shape[-1]
    true = tf.one_hot(labels, classes) * weights[:, None]  # (rows, labels)
    predicted = tf.one_hot(tf.argmax(logits, -1), classes)  # (rows, labels)
    confusion = tf.reduce_sum(true[:, :, None] * predicted[:, None, :], 0)  # (labels, labels)
    return cross_entropy_sums(logits, labels, weights), confusion
