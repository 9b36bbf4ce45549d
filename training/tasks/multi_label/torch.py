"""Any number of labels for each text, in torch: the loss and an evaluation's totals over the given rows."""

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from training.tasks.torch_sums import logits_of


def sums(network: Any, batch: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
    """Returns (3,): weighted loss, weights, weighted hits (training.batch.SUMS), over the given rows and labels; and
    (3,): the totals of training.tasks.multi_label.task.COUNTS."""
    logits, labels = logits_of(network, batch), batch["labels"].float()  # (rows, labels) each
    weights = batch["weights"].unsqueeze(1).expand_as(labels)  # (rows, labels)
    losses = functional.binary_cross_entropy_with_logits(logits, labels, reduction="none")
    predicted = (logits > 0).float()
    values = [losses, torch.ones_like(labels), (predicted == labels).float(), predicted * labels, labels, predicted]
    totals = [(value * weights).sum() for value in values]
    return torch.stack(totals[:3]), torch.stack(totals[3:])
