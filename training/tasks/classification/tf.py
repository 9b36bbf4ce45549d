"""Classification in TensorFlow: the loss and the confusion matrix over a replica's rows, and batches as a tf.data
dataset."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import tensorflow as tf

from training.config import TrainerConfig
from training.data.loading.record_source import HostSlice
from training.data.tf.labelled_batches import labelled_batches, labelled_evaluation
from training.tasks.task import Data
from training.tasks.tf_sums import cross_entropy_sums


def sums(network: Any, batch: Mapping[str, Any], training: bool) -> tuple[Any, Any]:
    """(3,): weighted loss, weights, weighted hits (training.batch.SUMS), over these rows; and (labels, labels): weights
    of the rows of each class (first axis) that were taken for each (second axis)."""
    logits = network(
        input_ids=batch["input_ids"], attention_mask=batch["attention_mask"], training=training
    ).logits  # (rows, labels)
    labels, weights = batch["labels"], batch["weights"]  # (rows,)
    classes = logits.shape[-1]
    true = tf.one_hot(labels, classes) * weights[:, None]  # (rows, labels)
    predicted = tf.one_hot(tf.argmax(logits, -1), classes)  # (rows, labels)
    confusion = tf.reduce_sum(true[:, :, None] * predicted[:, None, :], 0)  # (labels, labels)
    return cross_entropy_sums(logits, labels, weights), confusion


def host_rows(config: TrainerConfig, how: HostSlice, data: Data, start: int) -> Any:
    """One host's rows of global batch `start`, `start` + 1, ... as a tf.data dataset. Raises BadInput."""
    return labelled_batches(data.train, how, config.seed, start)


def evaluation_rows(config: TrainerConfig, how: HostSlice, data: Data) -> Any:
    """One host's rows of the evaluation set as a tf.data dataset. Raises BadInput."""
    assert data.evaluation is not None
    return labelled_evaluation(data.evaluation, how)
