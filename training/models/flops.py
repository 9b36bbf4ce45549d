"""What a training step costs in floating-point operations, from the model's sizes alone: for MFU, the share of the
devices' peak that the model itself uses.

Counted are matrix products, forward once and backward twice, as in appendix B of the PaLM paper
(https://arxiv.org/abs/2204.02311). Recomputed activations are not counted: they are a cost, not a use.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from training.accelerators import UnknownAccelerator, accelerator
from training.backends.protocol import Arrays

SIZES = ("hidden_size", "num_hidden_layers", "intermediate_size", "vocab_size")


def flops_per_row(config: Mapping[str, Any], length: int, predictions: int | None) -> float:
    """FLOPs of training on one row of `length` tokens: an encoder as config.json describes it, with a masked-LM head at
    `predictions` places, or with a classifier's head. 0 for a family that names its sizes otherwise."""
    if any(name not in config for name in SIZES):
        return 0.0
    width, layers, inner, vocabulary = (int(config[name]) for name in SIZES)
    token = (
        2 * (4 * width * width + 2 * width * inner) + 4 * length * width
    )  # query, key, value, output; the two inner layers; attention
    if predictions is None:
        head = 2 * width * width + 2 * width * len(config.get("id2label", ()))
    else:
        head = predictions * (2 * width * width + 2 * width * vocabulary)
    return 3.0 * (layers * length * token + head)


class WorkCounter:
    """What was trained so far, over all hosts."""

    def __init__(self, config: Mapping[str, Any], hosts: int) -> None:
        self._config, self._hosts = config, hosts
        self.tokens = 0  # places in the batches, padding included
        self.flops = 0.0

    def add(self, batch: Arrays) -> None:
        """This host's rows of one step; other hosts have as many of the same length."""
        rows, length = batch["input_ids"].shape
        predictions = batch["positions"].shape[1] if "positions" in batch else None
        self.tokens += rows * length * self._hosts
        self.flops += rows * flops_per_row(self._config, length, predictions) * self._hosts


def peak_flops(accelerator_type: str | None, device_kind: str) -> float | None:
    """FLOP/s of all devices in bf16; None where nobody knows, which includes every CPU."""
    if device_kind != "TPU" or accelerator_type is None:
        return None
    try:
        found = accelerator(accelerator_type)
    except UnknownAccelerator:
        return None
    return found.chips * found.generation.bf16_flops_per_chip


def mfu(flops: float, seconds: float, peak_flops: float | None) -> float | None:
    """The share of the peak, between 0 and 1; None without a known peak or model."""
    return round(flops / seconds / peak_flops, 4) if peak_flops and flops and seconds > 0 else None
