"""Masked language modelling in torch: the loss over the given rows."""

from typing import Any

import torch
from torch import Tensor

from training.models.torch.network import apply_head
from training.tasks.torch_sums import cross_entropy_sums, smoothing


def sums(network: Any, batch: dict[str, Tensor]) -> tuple[Tensor, None]:
    """Returns (3,): weighted loss, weights, weighted hits (training.batch.SUMS), over the given rows. The head is
    computed at the masked positions only."""
    ids = batch["input_ids"].long()  # (rows, sequence)
    # Rows have no padding. Without any mask the model would look for some, which costs a device-to-host round trip each
    # step.
    whole = getattr(network, "applies_whole_head", False)
    encoder = network if whole else network.base_model
    hidden = encoder(input_ids=ids, attention_mask=torch.ones_like(ids))[0]  # (rows, sequence, width), or logits
    # As a matrix product, which is exact: backwards, a gather is a scatter into the global batch, added up over all
    # devices.
    chosen = batch["positions"].unsqueeze(-1) == torch.arange(hidden.shape[1], dtype=torch.int32, device=hidden.device)
    hidden = torch.bmm(chosen.to(hidden.dtype), hidden)  # (rows, predictions, sequence) times (rows, sequence, width)
    logits = (
        (hidden if whole else apply_head(network, hidden)).float().flatten(0, 1)
    )  # (rows * predictions, vocabulary)
    labels = batch["labels"].long().flatten().clamp(min=0)  # (rows * predictions,)
    weights = batch["weights"].flatten()
    return cross_entropy_sums(logits, labels, weights, smoothing(network)), None
