"""Masked language modelling in TensorFlow: the loss over a replica's rows."""

from collections.abc import Mapping
from typing import Any

import tensorflow as tf

from training.tasks.tf_sums import cross_entropy_sums


def sums(network: Any, batch: Mapping[str, Any], training: bool) -> tuple[Any, None]:
    """Returns (3,): weighted loss, weights, weighted hits (training.batch.SUMS), over these rows. The head is computed
    at the masked positions only."""
    ids = batch["input_ids"]  # (rows, sequence)
    body = getattr(network, network.base_model_prefix)
    hidden = body(input_ids=ids, attention_mask=tf.ones_like(ids), training=training)[0]  # (rows, sequence, width)
    head = network.mlm if hasattr(network, "mlm") else network.lm_head
    logits = head(tf.gather(hidden, batch["positions"], batch_dims=1))  # (rows, predictions, vocabulary)
    labels = tf.reshape(tf.maximum(batch["labels"], 0), [-1])  # (rows * predictions,)
    weights = tf.reshape(batch["weights"], [-1])  # (rows * predictions,)
    return cross_entropy_sums(tf.reshape(logits, [-1, logits.shape[-1]]), labels, weights), None
