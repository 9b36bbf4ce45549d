"""Sums that the torch halves of several tasks share."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional


def cross_entropy_sums(logits: Tensor, labels: Tensor, weights: Tensor) -> Tensor:
    """The sums of a prediction among classes.

    Args:
        logits: (predictions, classes) float32.
        labels: (predictions,) int64.
        weights: (predictions,) float32.

    Returns:
        (3,): in the order of training.batch.SUMS.
    """
    losses = functional.cross_entropy(logits, labels, reduction="none")
    hits = (first_largest(logits.detach()) == labels).float()
    return torch.stack([(losses * weights).sum(), weights.sum(), (hits * weights).sum()])


def first_largest(logits: Tensor) -> Tensor:
    """`argmax` over the last axis, which the TPU compiler takes 8 s longer for: it keeps value and place together."""
    places = torch.arange(logits.shape[-1], dtype=torch.int32, device=logits.device)
    return torch.where(logits == logits.amax(-1, keepdim=True), places, torch.full_like(places, logits.shape[-1])).amin(
        -1
    )
