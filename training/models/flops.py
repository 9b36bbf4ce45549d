"""The floating-point operations of a training step, from the model's sizes alone: for MFU (model FLOPs utilization),
the share of the devices' peak that the model itself uses.

Matrix products are counted, forward once and backward twice, as in appendix B of the PaLM paper
(https://arxiv.org/abs/2204.02311). Recomputed activations are not counted: the model does not need them.
"""

from collections.abc import Mapping
from typing import Any

from training.accelerators import UnknownAccelerator, accelerator
from training.batch import Arrays

SIZES = ("hidden_size", "num_hidden_layers", "intermediate_size", "vocab_size")

# Decoders whose feed-forward block has a gate, a third matrix, by model_type.
_GATED = (
    "llama", "mistral", "qwen2", "qwen3", "gemma", "gemma2", "gemma3_text", "phi3", "olmo2", "granite", "smollm3",
)  # fmt: skip


def decoder_flops(config: Mapping[str, Any], length: int) -> float:
    """Returns the FLOPs, forward and backward, of one row for a decoder with grouped attention and gated layers; 0 for
    a family not in `_GATED`, or if one of `SIZES` is no int. Attention counts as over the whole row, as PaLM's appendix
    does."""
    if config.get("model_type") not in _GATED or any(type(config.get(name)) is not int for name in SIZES):
        return 0.0
    width, layers, inner, vocabulary = (int(config[name]) for name in SIZES)
    heads = int(config.get("num_attention_heads", 1))
    size = config.get("head_dim") or width // heads
    queries, keys = heads * size, (config.get("num_key_value_heads") or heads) * size
    token = 2 * (width * (2 * queries + 2 * keys) + 3 * width * inner) + 4 * length * queries
    return 3.0 * length * (layers * token + 2 * width * vocabulary)


def flops_per_row(config: Mapping[str, Any], length: int, predictions: int | None) -> float:
    """Returns the FLOPs of training on one row, with layers as BERT's, whatever the family; 0 for ModernBERT, or if one
    of `SIZES` is no int. `predictions`: places of a masked-LM head; None for a classifier."""
    if config.get("model_type") == "modernbert" or any(type(config.get(name)) is not int for name in SIZES):
        return 0.0
    width, layers, inner, vocabulary = (int(config[name]) for name in SIZES)
    projections = 4 * width * width + 2 * width * inner  # query, key, value, output; the two inner layers
    token = 2 * projections + 4 * length * width  # and attention
    if predictions is None:
        head = 2 * width * width + 2 * width * len(config.get("id2label", ()))
    else:
        head = predictions * (2 * width * width + 2 * width * vocabulary)
    return 3.0 * (layers * length * token + head)


class WorkCounter:
    """Counts the tokens and FLOPs of training over all hosts."""

    def __init__(self, config: Mapping[str, Any], hosts: int) -> None:
        """`config`: values of the model's config.json. `hosts`: number of hosts, each with as many rows as this."""
        self._config, self._hosts = config, hosts
        self.tokens = 0  # places in the batches, padding included
        self.flops = 0.0

    def add(self, batch: Arrays) -> None:
        """Adds the tokens and FLOPs of one step on all hosts. `batch`: this host's rows, as many as other hosts'."""
        rows, length = batch["input_ids"].shape
        predictions = batch["positions"].shape[1] if "positions" in batch else None
        is_decoder = "position_ids" in batch
        flops = decoder_flops(self._config, length) if is_decoder else flops_per_row(self._config, length, predictions)
        self.tokens += rows * length * self._hosts
        self.flops += rows * flops * self._hosts


def peak_flops(accelerator_type: str | None, device_kind: str) -> float | None:
    """Returns the bf16 FLOP/s of all chips of a slice; None if `device_kind` is not "TPU" or the slice is unknown."""
    if device_kind != "TPU" or accelerator_type is None:
        return None
    try:
        target = accelerator(accelerator_type)
    except UnknownAccelerator:
        return None
    return target.chips * target.generation.bf16_flops_per_chip


def mfu(flops: float, seconds: float, peak: float | None) -> float | None:
    """Returns the share of `peak`, in FLOP/s, that `flops` in `seconds` are, 0 to 1; None if one is unknown or 0."""
    return round(flops / seconds / peak, 4) if peak and flops and seconds > 0 else None
