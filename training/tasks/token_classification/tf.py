"""Classification of words in TensorFlow: the loss and the confusion matrix over a replica's rows."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import tensorflow as tf

from training.tasks.tf_sums import classification_sums, logits_of


def sums(network: Any, batch: Mapping[str, Any], training: bool) -> tuple[Any, Any]:
    """Returns what training.tasks.classification.tf.sums does, over tokens in place of rows."""
    logits = logits_of(network, batch, training)  # (rows, tokens, labels)
    labels, weights = tf.reshape(tf.maximum(batch["labels"], 0), [-1]), tf.reshape(batch["weights"], [-1])
    return classification_sums(tf.reshape(logits, [-1, logits.shape[-1]]), labels, weights)
