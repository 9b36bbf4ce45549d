"""Classification of words in torch: the loss and the confusion matrix over this host's rows."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from training.tasks.torch_sums import classification_sums, logits_of


def sums(network: Any, batch: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
    """Returns what training.tasks.classification.torch.sums does, over tokens in place of rows."""
    logits = logits_of(network, batch).flatten(0, 1)  # (rows x tokens, labels)
    labels, weights = batch["labels"].long().clamp(min=0).flatten(), batch["weights"].flatten()
    return classification_sums(network, logits, labels, weights)
