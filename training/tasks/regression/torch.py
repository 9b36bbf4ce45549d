"""Regression in torch: the squared error and an evaluation's totals over the given rows."""

from typing import Any

import torch
from torch import Tensor

from training.tasks.torch_sums import logits_of


def sums(network: Any, batch: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
    """Returns (3,): squared errors, weights, 0 (training.batch.SUMS), over the given rows; and (6,): the totals of
    training.tasks.regression.task.COUNTS."""
    predictions = logits_of(network, batch)[:, 0]  # (rows,)
    labels, weights = batch["labels"], batch["weights"]  # (rows,)
    errors = predictions - labels
    report = torch.stack([(errors.square() * weights).sum(), weights.sum(), torch.zeros_like(weights[0])])
    values = [
        errors.abs(), predictions, labels, predictions.square(), labels.square(), predictions * labels,
    ]  # fmt: skip
    return report, torch.stack([(value * weights).sum() for value in values])
