"""Moves a network to a device."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch


def move(network: Any, device: Any, placeholder: Callable[[Any], Any] = torch.empty) -> None:
    """Moves a network to the device, with tied weights still tied: runtimes of TPUs make two of a tied weight.
    `placeholder`: makes a tensor from the shape of a parameter without values (on the meta device), on any device.
    transformers' `tie_weights` would tie them too, but pads the bias of some heads: an operation that waits for the
    first step, whose program is then another one than that of the second."""
    names: dict[int, list[str]] = {}
    for name, parameter in network.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), []).append(name)
    for first, *others in names.values():
        if (parameter := network.get_parameter(first)).is_meta:
            parameter = torch.nn.Parameter(placeholder(parameter.shape), parameter.requires_grad)
            for name in (first, *others):
                _set_parameter(network, name, parameter)
    network.to(device)
    for first, *others in names.values():
        for other in others:
            _set_parameter(network, other, network.get_parameter(first))


def _set_parameter(network: Any, name: str, parameter: Any) -> None:
    module, _, attribute = name.rpartition(".")
    setattr(network.get_submodule(module), attribute, parameter)
