"""Runs the layers of a decoder as one loop over stacked parameters: only one layer is traced and compiled.

Only the layers' inputs are kept for the backward pass, which runs each layer a second time. A stacked parameter is
named like the layers' own with `*` for the layer's number, as model.layers.*.mlp.up_proj.weight; its first axis is the
layers', the others are those of one layer's parameter.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from training.config import Train
from training.errors import BadInput
from training.models.hugging_face import SCANNED
from training.optim import STACKED

Tensors = list[Tensor]
Step = Callable[[Tensors, Tensors], tuple[Tensors, Tensors]]  # (carry, slices) -> (carry, results)
# (step, carry, stacked, turned) -> (carry, results, stacked in the order of rounds): the runtime's loop over the first
# axis of `stacked`, of which the first `turned` are read from their ends.
Loop = Callable[[Step, Tensors, Tensors, int], tuple[Tensors, Tensors]]
Place = Callable[[str, Tensor], Tensor]  # (stacked parameter's name, one layer's value) -> the value, with a layout


def choose_layers(network: Any, train: Train) -> str | None:
    """Returns the name of the list of layers that run as a scan; None if train.scan is false, train.remat is "none" or
    `find_layers` finds none. Changes nothing. Raises BadInput for None if `train.scan` is true."""
    layers = None if train.scan is False or train.remat == "none" else find_layers(network)
    if train.scan and layers is None:
        raise BadInput(
            f"train.scan: the layers of this {network.config.model_type} model can't run as a scan: they differ, have "
            "dropout, or belong to a family for which it is untested; remove train.scan"
        )
    return layers


def find_layers(network: Any) -> str | None:
    """Returns the name of the list of a network's layers if they may run as a scan: of a family in `SCANNED`, two or
    more, all built alike, trained alike, without buffers and dropout; else None."""
    if network.config.model_type not in SCANNED:
        return None
    name = next(name for name, module in network.named_modules() if isinstance(module, torch.nn.ModuleList))
    layers = list(network.get_submodule(name))
    modules = (module for layer in layers for module in layer.modules())  # attention has its rate as a number
    rates = (getattr(each, "p" if isinstance(each, torch.nn.Dropout) else "attention_dropout", 0) for each in modules)
    alike = len({_describe(layer) for layer in layers}) == 1
    return name if len(layers) > 1 and alike and not any(rates) and not list(layers[0].buffers()) else None


def _describe(layer: Any) -> tuple[Any, ...]:
    """Returns a layer's attention window and its parameters' names, shapes and whether each is trained."""
    window = getattr(layer, "attention_type", None), getattr(getattr(layer, "self_attn", None), "sliding_window", None)
    return (*window, *((name, value.shape, value.requires_grad) for name, value in layer.named_parameters()))


def group_layers(names: Iterable[str], layers: str) -> dict[str, list[str]]:
    """Returns the names of the layers' parameters, from the last layer to the first, by the name of the stacked
    parameter: so the backward pass writes gradients in the order of its rounds, as the forward pass its layers' inputs.
    Skips other names. `names` may have a prefix, as in a checkpoint; `layers`: what `find_layers` returned."""
    members: dict[str, dict[int, str]] = {}
    for name in names:
        if match := re.fullmatch(rf"(.*\b{re.escape(layers)}\.)(\d+)\.(.+)", name):
            members.setdefault(f"{match[1]}{STACKED[1:]}{match[3]}", {})[int(match[2])] = name
    return {stacked: [of[number] for number in sorted(of, reverse=True)] for stacked, of in members.items()}


class LayerScan(torch.nn.Module):  # type: ignore[misc]  # torch is not here when types are checked
    """Replaces a network's list of layers: a list with one element, which runs all of them."""

    def __init__(self, layers: Any, loop: Loop, place: Place) -> None:
        """Keeps the first layer to compute all; empties its parameters, which `State.upload` replaces by stacks.
        Replaces `rotate_half` of the layers' module in transformers, for other networks of the process too. `place`:
        (stacked parameter's name, one layer's value) -> the value with its layout on the devices."""
        super().__init__()
        pattern = layers[0]
        for name, value in list(pattern.named_parameters()):
            module, _, attribute = name.rpartition(".")
            setattr(pattern.get_submodule(module), attribute, torch.nn.Parameter(torch.empty(0), value.requires_grad))
        pattern.gradient_checkpointing = False
        # Also changes other networks of this family in the process, whose values and gradients stay the same.
        family: Any = sys.modules[type(pattern).__module__]
        if hasattr(family, "rotate_half"):
            family.rotate_half = _RotateHalf.apply
        self.add_module("*", pattern)
        self._loop, self._place, self.attention_type = loop, place, getattr(pattern, "attention_type", None)

    def __iter__(self) -> Iterator[LayerScan]:
        return iter([self])

    def __getitem__(self, _some: slice) -> list[LayerScan]:
        """Returns the one element, for any slice of the layers."""
        return [self]

    def forward(self, hidden_states: Tensor, *others: Any, **keywords: Any) -> Any:
        """Returns what the last layer returns; if that is a tuple, one of its first element alone. Other arguments are
        the same for each layer, and get no gradient."""
        pattern = self._modules["*"]
        named = dict(pattern.named_parameters())
        is_tuple: list[bool] = []

        def run(hidden: Tensor, parameters: Sequence[Tensor]) -> Tensor:
            values = {name: self._place(f"{STACKED}{name}", own) for name, own in zip(named, parameters, strict=True)}
            result = torch.func.functional_call(pattern, values, (hidden, *others), keywords)
            is_tuple[:] = [isinstance(result, tuple)]
            return (result[0] if is_tuple[0] else result).to(hidden.dtype)

        result = _Scan.apply(run, self._loop, torch.is_grad_enabled(), hidden_states, *named.values())
        return (result,) if is_tuple[0] else result


class _RotateHalf(torch.autograd.Function):  # type: ignore[misc]
    """Computes transformers' `rotate_half`. Its own gradient would pad each half with zeros and add both."""

    @staticmethod
    def forward(_context: Any, values: Tensor) -> Tensor:
        """Returns the last axis's second half, negated, before its first."""
        first, second = values.chunk(2, -1)
        return torch.cat([-second, first], -1)

    @staticmethod
    def backward(_context: Any, gradient: Tensor) -> Tensor:
        return -_RotateHalf.forward(None, gradient)


class _Scan(torch.autograd.Function):  # type: ignore[misc]
    @staticmethod
    def forward(
        context: Any, run: Callable[..., Tensor], loop: Loop, keeps: bool, hidden: Tensor, *stacked: Tensor
    ) -> Tensor:
        """Returns the last layer's result; keeps each layer's input for the backward pass if `keeps`."""
        device = hidden.device.type
        context.autocast = device, torch.get_autocast_dtype(device), torch.is_autocast_enabled(device)
        context.run, context.loop = run, loop

        def step(carry: Tensors, parameters: Tensors) -> tuple[Tensors, Tensors]:
            return [run(carry[0], parameters)], carry if keeps else []

        [last], inputs = loop(step, [hidden], list(stacked), len(stacked))
        context.save_for_backward(*inputs, *stacked)
        return last

    @staticmethod
    def backward(context: Any, gradient: Tensor) -> Any:
        """Returns gradients of the input and of trained parameters; runs each layer again, from the last one on."""
        inputs, *stacked = context.saved_tensors
        needed = context.needs_input_grad[4:]

        def step(carry: Tensors, values: Tensors) -> tuple[Tensors, Tensors]:
            hidden, *parameters = (value.detach() for value in values)
            wanted = [value.requires_grad_() for value, need in zip(parameters, needed, strict=True) if need]
            with torch.enable_grad(), torch.autocast(*context.autocast):
                result = context.run(hidden.requires_grad_(), parameters)
            first, *others = torch.autograd.grad(result, [hidden, *wanted], carry[0])
            return [first], others

        [first], found = context.loop(step, [gradient], [inputs, *stacked], 1)
        gradients = iter(found)
        return (None, None, None, first, *(next(gradients) if need else None for need in needed))
