"""Causal language modelling in torch: the loss over this host's rows."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from training.models.torch.attention import recompute
from training.tasks.torch_sums import cross_entropy_sums, smoothing

# Logits of a row, from which on a plain head is computed in pieces of half as many, and again in the backward pass:
# half a GiB in fp32, which is kept otherwise, with its gradient.
_WHOLE_LOGITS = 1 << 27


def sums(network: Any, batch: dict[str, Tensor]) -> tuple[Tensor, None]:
    """Returns (3,): weighted loss, weights, weighted hits (training.batch.SUMS), over this host's rows.

    Computes large logits in pieces of a row, which the backward pass computes again.

    Without an attention mask, transformers takes positions that begin again as borders of documents, and adds them to
    the causal mask; `check_borders` of training.models.torch.network proves it for a network."""
    rows = {
        "input_ids": batch["input_ids"].long(), "position_ids": batch["position_ids"].long(), "use_cache": False,
    }  # fmt: skip
    labels, weights = batch["labels"].long(), batch["weights"]  # (rows, sequence) each
    piece = _WHOLE_LOGITS // 2 // network.config.vocab_size  # tokens of a row
    if not hasattr(network, "head_barrier") or labels.shape[1] * network.config.vocab_size < _WHOLE_LOGITS:
        return _sums_of(network(**rows).logits, labels, weights, smoothing(network)), None

    def head_sums(hidden: Tensor, labels: Tensor, weights: Tensor) -> Tensor:
        return _sums_of(network.lm_head(hidden), labels, weights, smoothing(network))

    hidden = network.base_model(**rows)[0]  # (rows, sequence, width)
    trained = tuple(parameter for parameter in network.lm_head.parameters() if parameter.requires_grad)
    total = torch.zeros(3, device=hidden.device)
    for parts in zip(*(tensor.split(piece, 1) for tensor in (hidden, labels, weights)), strict=True):
        total = total + recompute(head_sums, parts, network.head_barrier, trained)
    return total, None


def _sums_of(logits: Tensor, labels: Tensor, weights: Tensor, smoothing: float) -> Tensor:
    """Returns the sums over rows: logits (rows, sequence, vocabulary), labels and weights (rows, sequence)."""
    return cross_entropy_sums(logits.float().flatten(0, 1), labels.flatten(), weights.flatten(), smoothing)
