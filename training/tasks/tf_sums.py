"""Sums that the TensorFlow halves of several tasks share."""

from __future__ import annotations

from typing import Any

import tensorflow as tf


def cross_entropy_sums(logits: Any, labels: Any, weights: Any) -> Any:
    """Returns the sums of predictions among classes, (3,): in the order of training.batch.SUMS.

    Args:
        logits: (predictions, classes).
        labels: (predictions,) int32.
        weights: (predictions,) float32.
    """
    logits = tf.cast(logits, tf.float32)
    losses = tf.nn.sparse_softmax_cross_entropy_with_logits(labels, logits)
    hits = tf.cast(tf.argmax(logits, -1, output_type=labels.dtype) == labels, tf.float32)
    return tf.stack([tf.reduce_sum(losses * weights), tf.reduce_sum(weights), tf.reduce_sum(hits * weights)])
