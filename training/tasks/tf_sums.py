"""Sums that the TensorFlow halves of several tasks share."""

from collections.abc import Mapping
from typing import Any

import tensorflow as tf


def logits_of(network: Any, batch: Mapping[str, Any], training: bool) -> Any:
    """Returns the logits of a network with a classifier's head, (rows, labels) or (rows, tokens, labels)."""
    rows = {name: batch[name] for name in ("input_ids", "attention_mask")}
    if "token_type_ids" in batch and network.config.type_vocab_size > 1:  # of two texts
        rows["token_type_ids"] = batch["token_type_ids"]
    return network(**rows, training=training).logits


def classification_sums(logits: Any, labels: Any, weights: Any) -> tuple[Any, Any]:
    """Returns the sums of `cross_entropy_sums` and the confusion matrix of weights, (true class, predicted class).
    Arguments as for `cross_entropy_sums`."""
    classes = logits.shape[-1]
    true = tf.one_hot(labels, classes) * weights[:, None]  # (predictions, classes)
    predicted = tf.one_hot(tf.argmax(logits, -1), classes)  # (predictions, classes)
    confusion = tf.reduce_sum(true[:, :, None] * predicted[:, None, :], 0)  # (classes, classes)
    return cross_entropy_sums(logits, labels, weights), confusion


def cross_entropy_sums(logits: Any, labels: Any, weights: Any) -> Any:
    """Returns (3,) over all predictions: weighted cross-entropy, weights, weighted hits (training.batch.SUMS).

    Args:
        logits: (predictions, classes).
        labels: (predictions,) int32.
        weights: (predictions,) float32.
    """
    logits = tf.cast(logits, tf.float32)
    losses = tf.nn.sparse_softmax_cross_entropy_with_logits(labels, logits)
    hits = tf.cast(tf.argmax(logits, -1, output_type=labels.dtype) == labels, tf.float32)
    return tf.stack([tf.reduce_sum(losses * weights), tf.reduce_sum(weights), tf.reduce_sum(hits * weights)])
