"""The sums of each task in TensorFlow: `sums(network, batch, training)` of the registry.

Sums are (3,): weighted loss, weights, weighted hits (training.batch.SUMS), over a replica's rows; and further counts
for an evaluation, or None.
"""

from collections.abc import Mapping
from typing import Any

import tensorflow as tf


def masked_lm(network: Any, batch: Mapping[str, Any], training: bool) -> tuple[Any, None]:
    """Returns (3,), sums of loss, weights and hits at masked positions, where alone the head is computed; and None."""
    ids = batch["input_ids"]  # (rows, sequence)
    body = getattr(network, network.base_model_prefix)
    hidden = body(input_ids=ids, attention_mask=tf.ones_like(ids), training=training)[0]  # (rows, sequence, width)
    head = network.mlm if hasattr(network, "mlm") else network.lm_head
    logits = head(tf.gather(hidden, batch["positions"], batch_dims=1))  # (rows, predictions, vocabulary)
    labels = tf.reshape(tf.maximum(batch["labels"], 0), [-1])  # (rows * predictions,)
    weights = tf.reshape(batch["weights"], [-1])  # (rows * predictions,)
    return cross_entropy_sums(tf.reshape(logits, [-1, logits.shape[-1]]), labels, weights), None


def classification(network: Any, batch: Mapping[str, Any], training: bool) -> tuple[Any, Any]:
    """Returns (3,), sums of loss, weights and hits (training.batch.SUMS) over rows or tokens; and the confusion matrix
    of weights, (true class, predicted class)."""
    logits, labels = logits_of(network, batch, training), batch["labels"]
    if logits.shape.rank > 2:  # (rows, tokens, labels)
        logits, labels = tf.reshape(logits, [-1, logits.shape[-1]]), tf.reshape(tf.maximum(labels, 0), [-1])
    weights, classes = tf.reshape(batch["weights"], [-1]), logits.shape[-1]
    true = tf.one_hot(labels, classes) * weights[:, None]  # (predictions, classes)
    predicted = tf.one_hot(tf.argmax(logits, -1), classes)  # (predictions, classes)
    confusion = tf.reduce_sum(true[:, :, None] * predicted[:, None, :], 0)  # (classes, classes)
    return cross_entropy_sums(logits, labels, weights), confusion


def multi_label(network: Any, batch: Mapping[str, Any], training: bool) -> tuple[Any, Any]:
    """Returns (3,), sums of loss, weights, hits over rows and labels; and (3,), the totals of
    tasks.labels.MultiLabel."""
    logits = tf.cast(logits_of(network, batch, training), tf.float32)  # (rows, labels)
    labels, weights = tf.cast(batch["labels"], tf.float32), batch["weights"][:, None]  # (rows, labels), (rows, 1)
    losses = tf.nn.sigmoid_cross_entropy_with_logits(labels, logits)
    predicted = tf.cast(logits > 0, tf.float32)
    hits = tf.cast(predicted == labels, tf.float32)
    values = [losses, tf.ones_like(labels), hits, predicted * labels, labels, predicted]
    totals = [tf.reduce_sum(value * weights) for value in values]
    return tf.stack(totals[:3]), tf.stack(totals[3:])


def regression(network: Any, batch: Mapping[str, Any], training: bool) -> tuple[Any, Any]:
    """Returns (3,): squared errors, weights, 0; and (6,), the totals of training.tasks.labels.Regression."""
    predictions = tf.cast(logits_of(network, batch, training), tf.float32)[:, 0]  # (rows,)
    labels, weights = batch["labels"], batch["weights"]  # (rows,)
    errors = predictions - labels
    report = tf.stack([tf.reduce_sum(tf.square(errors) * weights), tf.reduce_sum(weights), 0.0])
    values = [
        tf.abs(errors), predictions, labels, tf.square(predictions), tf.square(labels), predictions * labels,
    ]  # fmt: skip
    return report, tf.stack([tf.reduce_sum(value * weights) for value in values])


def logits_of(network: Any, batch: Mapping[str, Any], training: bool) -> Any:
    """Returns the logits of a network with a classifier's head, (rows, labels) or (rows, tokens, labels)."""
    rows = {name: batch[name] for name in ("input_ids", "attention_mask")}
    if "token_type_ids" in batch and network.config.type_vocab_size > 1:  # of two texts
        rows["token_type_ids"] = batch["token_type_ids"]
    return network(**rows, training=training).logits


def cross_entropy_sums(logits: Any, labels: Any, weights: Any) -> Any:
    """Returns (3,) over all predictions: weighted cross-entropy, weights, weighted hits (training.batch.SUMS). logits:
    (predictions, classes); labels: (predictions,) int32; weights: (predictions,) float32."""
    logits = tf.cast(logits, tf.float32)
    losses = tf.nn.sparse_softmax_cross_entropy_with_logits(labels, logits)
    hits = tf.cast(tf.argmax(logits, -1, output_type=labels.dtype) == labels, tf.float32)
    return tf.stack([tf.reduce_sum(losses * weights), tf.reduce_sum(weights), tf.reduce_sum(hits * weights)])
