"""Classification in torch, of texts or of their words: the loss and the confusion matrix over the given rows."""

from typing import Any

from torch import Tensor

from training.tasks.torch_sums import classification_sums, logits_of


def sums(network: Any, batch: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
    """Returns (3,): weighted loss, weights, weighted hits (training.batch.SUMS), over the given rows, or tokens; and
    the confusion matrix of weights, (true class, predicted class)."""
    logits, labels = logits_of(network, batch), batch["labels"].long()
    if logits.ndim > 2:  # (rows, tokens, labels)
        logits, labels = logits.flatten(0, 1), labels.clamp(min=0).flatten()
    return classification_sums(network, logits, labels, batch["weights"].flatten())
