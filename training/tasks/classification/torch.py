"""Classification in torch: the loss and the confusion matrix over this host's rows."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from training.tasks.torch_sums import cross_entropy_sums, smoothing


def sums(network: Any, batch: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
    """Returns (3,): weighted loss, weights, weighted hits (training.batch.SUMS), over this host's rows; and (labels,
    labels): the weights of the rows of each class (first axis) that were taken for each class (second axis)."""
    logits = network(
        input_ids=batch["input_ids"].long(), attention_mask=batch["attention_mask"].long()
    ).logits.float()  # (rows, labels)
    labels, weights = batch["labels"].long(), batch["weights"]  # (rows,)
    classes = torch.arange(logits.shape[-1], device=logits.device)
    true = (labels.unsqueeze(1) == classes).float() * weights.unsqueeze(1)  # (rows, labels)
    predicted = (logits.argmax(-1).unsqueeze(1) == classes).float()  # (rows, labels)
    # Not a matrix product: in bf16 that would round the counts.
    confusion = (true.unsqueeze(2) * predicted.unsqueeze(1)).sum(0)  # (labels, labels)
    return cross_entropy_sums(logits, labels, weights, smoothing(network)), confusion
