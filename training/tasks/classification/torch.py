"""Classification in torch: the loss and the confusion matrix over this host's rows."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from training.tasks.torch_sums import classification_sums, logits_of


def sums(network: Any, batch: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
    """Returns (3,): weighted loss, weights, weighted hits (training.batch.SUMS), over this host's rows; and (labels,
    labels): the weights of the rows of each class (first axis) that were taken for each class (second axis)."""
    return classification_sums(network, logits_of(network, batch), batch["labels"].long(), batch["weights"])
