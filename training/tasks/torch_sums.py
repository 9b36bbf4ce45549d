"""Sums that the torch halves of several tasks share."""

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional


def smoothing(network: Any) -> float:
    """Returns train.label_smoothing in training, which the backend leaves in the network; 0 in an evaluation."""
    return float(getattr(network, "label_smoothing", 0.0)) if network.training else 0.0


def logits_of(network: Any, batch: dict[str, Tensor]) -> Tensor:
    """Returns the fp32 logits of a network with a classifier's head, (rows, labels) or (rows, tokens, labels)."""
    rows = {name: batch[name].long() for name in ("input_ids", "attention_mask")}
    if "token_type_ids" in batch and getattr(network.config, "type_vocab_size", 0) > 1:  # of two texts
        rows["token_type_ids"] = batch["token_type_ids"].long()
    return network(**rows).logits.float()


def classification_sums(network: Any, logits: Tensor, labels: Tensor, weights: Tensor) -> tuple[Tensor, Tensor]:
    """Returns the sums of `cross_entropy_sums`, smoothed as `network` says, and the confusion matrix of weights, (true
    class, predicted class). Arguments as for `cross_entropy_sums`."""
    classes = torch.arange(logits.shape[-1], device=logits.device)
    true = (labels.unsqueeze(1) == classes).float() * weights.unsqueeze(1)  # (predictions, classes)
    predicted = (logits.argmax(-1).unsqueeze(1) == classes).float()  # (predictions, classes)
    # Not a matrix product: in bf16 that would round the counts.
    confusion = (true.unsqueeze(2) * predicted.unsqueeze(1)).sum(0)  # (classes, classes)
    return cross_entropy_sums(logits, labels, weights, smoothing(network)), confusion


def cross_entropy_sums(logits: Tensor, labels: Tensor, weights: Tensor, smoothing: float = 0.0) -> Tensor:
    """Returns (3,) over all predictions: weighted cross-entropy, weights, weighted hits (training.batch.SUMS).

    Args:
        logits: (predictions, classes) float32.
        labels: (predictions,) int64.
        weights: (predictions,) float32.
        smoothing: the share of each label that is spread over all classes.
    """
    losses = functional.cross_entropy(logits, labels, reduction="none", label_smoothing=smoothing)
    hits = (first_largest(logits.detach()) == labels).float()
    return torch.stack([(losses * weights).sum(), weights.sum(), (hits * weights).sum()])


def first_largest(logits: Tensor) -> Tensor:
    """Returns `argmax` over the last axis; torch's own takes the TPU compiler 8 s longer."""
    places = torch.arange(logits.shape[-1], dtype=torch.int32, device=logits.device)
    return torch.where(logits == logits.amax(-1, keepdim=True), places, torch.full_like(places, logits.shape[-1])).amin(
        -1
    )
