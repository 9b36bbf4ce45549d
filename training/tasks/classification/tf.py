"""Classification in TensorFlow: the loss and the confusion matrix over a replica's rows."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from training.tasks.tf_sums import classification_sums, logits_of


def sums(network: Any, batch: Mapping[str, Any], training: bool) -> tuple[Any, Any]:
    """Returns (3,): weighted loss, weights, weighted hits (training.batch.SUMS), over these rows; and (labels, labels):
    the weights of the rows of each class (first axis) that were taken for each class (second axis)."""
    return classification_sums(logits_of(network, batch, training), batch["labels"], batch["weights"])
