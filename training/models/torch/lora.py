"""Trains few parameters: low-rank additions to linear layers (LoRA, https://arxiv.org/abs/2106.09685), with everything
else frozen; or all parameters but some.

Names are those of peft's layout: `<layer>.lora_A.weight`, (rank, inputs), and `<layer>.lora_B.weight`, (outputs, rank),
beside the layer's own `weight` and `bias`.
"""

from __future__ import annotations

from collections.abc import Sequence
from fnmatch import fnmatch
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from training.config import Lora
from training.errors import BadInput
from training.models.hugging_face import is_of_head
from training.models.initial import initial_weight


class LoraLinear(torch.nn.Module):  # type: ignore[misc]  # torch is not here when types are checked
    """Replaces a linear layer, with the same weights under the same names: adds scale * B A x, which begins as 0."""

    def __init__(self, theirs: Any, lora: Lora, name: str, seed: int) -> None:
        """Takes the weights of `theirs`: torch's Linear, or transformers' Conv1D, whose weight is (inputs, outputs).
        `name`, the layer's, and `seed` decide the random values of lora_A."""
        super().__init__()
        self.weight, self.bias = theirs.weight, theirs.bias
        self.is_turned = not isinstance(theirs, torch.nn.Linear)
        outputs, inputs = reversed(self.weight.shape) if self.is_turned else self.weight.shape
        self.lora_A = torch.nn.Linear(inputs, lora.rank, bias=False)
        self.lora_B = torch.nn.Linear(lora.rank, outputs, bias=False)
        self.scale = lora.alpha / lora.rank
        # The variance of peft's kaiming_uniform(a=sqrt(5)).
        first = initial_weight(f"{name}.lora_A.weight", (lora.rank, inputs), seed=seed, deviation=(3 * inputs) ** -0.5)
        with torch.no_grad():
            self.lora_A.weight.copy_(torch.from_numpy(first))
            self.lora_B.weight.zero_()

    def forward(self, values: Tensor) -> Tensor:
        """Returns the layer's result plus the low-rank addition, (..., outputs) from (..., inputs)."""
        weight = self.weight.t() if self.is_turned else self.weight
        result: Tensor = functional.linear(values, weight, self.bias) + self.lora_B(self.lora_A(values)) * self.scale
        return result


def add_lora(network: Any, lora: Lora, seed: int, *, has_fresh_head: bool) -> None:
    """Freezes a network and replaces linear layers, those that `lora.targets` names or all of its base model but the
    pooler, by ones with trained low-rank matrices. With `has_fresh_head`, the head and the pooler stay trained, whole.
    Raises BadInput for a target that no layer has, or whose weight is the embeddings'."""
    from transformers.pytorch_utils import Conv1D

    base = network.base_model_prefix
    linear = {name: module for name, module in network.named_modules() if isinstance(module, torch.nn.Linear | Conv1D)}
    inside = [name for name in linear if not is_of_head(f"{name}.", base)]
    chosen = [name for name in linear if _is_target(name, lora.targets)] if lora.targets else inside
    for target in lora.targets or ():
        if not any(_is_target(name, [target]) for name in linear):
            kinds = sorted({name.rpartition(".")[2] for name in linear})
            raise BadInput(f"lora.targets: the model has no linear layer {target}; it has: {', '.join(kinds)}")
    parameters = dict(network.named_parameters())  # one that several layers share is there once
    for name, parameter in parameters.items():
        parameter.requires_grad_(has_fresh_head and is_of_head(name, base))
    for name in chosen:
        if f"{name}.weight" not in parameters:
            raise BadInput(f"lora.targets: {name} shares the embeddings' weight (tie_word_embeddings): leave it out")
        network.set_submodule(name, LoraLinear(linear[name], lora, name, seed))


def freeze(network: Any, patterns: Sequence[str]) -> None:
    """Freezes parameters whose names match (fnmatch). Raises BadInput if a pattern matches none, or all are frozen."""
    names = [name for name, _ in network.named_parameters()]
    for pattern in patterns:
        matching = [name for name in names if fnmatch(name, pattern)]
        if not matching:
            raise BadInput(f"train.freeze: no parameter of the model matches {pattern}; one is {names[0]}")
        for name in matching:
            network.get_parameter(name).requires_grad_(False)
    if not any(parameter.requires_grad for parameter in network.parameters()):
        raise BadInput("train.freeze leaves no parameter to train")


def _is_target(name: str, targets: Sequence[str]) -> bool:
    """Returns whether a layer has one of these names, or ends in one after a dot."""
    return any(name == target or name.endswith(f".{target}") for target in targets)
