"""Causal language modelling in torch: the loss over this host's rows."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from training.tasks.torch_sums import cross_entropy_sums


def sums(network: Any, batch: dict[str, Tensor]) -> tuple[Tensor, None]:
    """Returns (3,): weighted loss, weights, weighted hits (training.batch.SUMS), over this host's rows.

    Without an attention mask, transformers takes positions that begin again as borders of documents, and adds them to
    the causal mask; `check_borders` of training.models.torch.network proves it for a network."""
    logits = network(
        input_ids=batch["input_ids"].long(), position_ids=batch["position_ids"].long(), use_cache=False
    ).logits  # (rows, sequence, vocabulary)
    labels, weights = batch["labels"].long().flatten(), batch["weights"].flatten()
    return cross_entropy_sums(logits.float().flatten(0, 1), labels, weights), None
