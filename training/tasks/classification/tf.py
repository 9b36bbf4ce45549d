"""Classification in TensorFlow, of texts or of their words: the loss and the confusion matrix over a replica's rows."""

from collections.abc import Mapping
from typing import Any

import tensorflow as tf

from training.tasks.tf_sums import classification_sums, logits_of


def sums(network: Any, batch: Mapping[str, Any], training: bool) -> tuple[Any, Any]:
    """Returns (3,): weighted loss, weights, weighted hits (training.batch.SUMS), over these rows, or tokens; and the
    confusion matrix of weights, (true class, predicted class)."""
    logits, labels = logits_of(network, batch, training), batch["labels"]
    if logits.shape.rank > 2:  # (rows, tokens, labels)
        logits, labels = tf.reshape(logits, [-1, logits.shape[-1]]), tf.reshape(tf.maximum(labels, 0), [-1])
    return classification_sums(logits, labels, tf.reshape(batch["weights"], [-1]))
