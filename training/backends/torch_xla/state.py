"""The state of a run in torch_xla: the network's parameters and the optimizer's tensors, on the host until the first
step and then on the devices; how it is named, loaded and copied to the host.

The state is uploaded in one way whether it is fresh or restored: so both lead to the same program.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch_xla.core.xla_model as xm
from torch import Tensor
from torch.utils.dlpack import from_dlpack
from torch_xla.utils.dlpack import to_dlpack

from training.backends.torch_xla.dropout import Noise
from training.backends.torch_xla.sharding import DataParallel
from training.checkpoint.safetensors_file import Damaged, TensorSpec
from training.checkpoint.snapshot import Snapshot


class State:
    """A network, what its optimizer keeps, and the table that its dropouts draw from."""

    def __init__(self, network: Any, optimizer_class: Any, settings: Any, noise: Noise | None) -> None:
        """
        Args:
            network: on the CPU, in training mode.
            optimizer_class: of training.registry.OPTIMIZERS.
            settings: its section of the configuration.
            noise: of the network's dropouts, as `patch_modules` gives it.
        """
        self.network, self.noise = network, noise
        self._name_parameters()
        self.optimizer = optimizer_class(settings, self.parameters)
        self.is_uploaded = False
        self._newest: list[Tensor] | None = None  # values that a program has returned and that no tensor holds yet
        self.planned_transfers = 0  # copies to the host that a result or a snapshot asked for
        self._snapshot = Snapshot()

    def _name_parameters(self) -> None:
        self.parameters: dict[str, Tensor] = dict(self.network.named_parameters())  # tied ones once

    def tensors(self) -> dict[str, Tensor]:
        """All tensors by their names in a checkpoint, with their present values."""
        named = self._name_tensors()
        if self._newest is not None:
            for tensor, value in zip(named.values(), self._newest, strict=True):
                if tensor is not value:
                    tensor.data = value
            self._newest = None
        return named

    def values(self) -> Sequence[Tensor]:
        """The present values in the order of `tensors`. The tensors themselves are left with values of earlier steps,
        which may be gone."""
        return list(self._name_tensors().values()) if self._newest is None else self._newest

    def advance(self, places: Sequence[int], values: Sequence[Tensor]) -> None:
        """Replaces the values at these places of `values()` by what a program has made of them."""
        newest = list(self.values())
        for place, value in zip(places, values, strict=True):
            newest[place] = value
        self._newest = newest

    def _name_tensors(self) -> dict[str, Tensor]:
        groups = {"model": self.parameters, **self.optimizer.state()}
        return {f"{group}/{name}": value for group, values in groups.items() for name, value in values.items()}

    def tensor_specs(self) -> dict[str, TensorSpec]:
        """Type, shape and bytes of each."""
        return {
            name: TensorSpec("F32", tuple(value.shape), value.numel() * 4) for name, value in self.tensors().items()
        }

    def upload(self, sharding: DataParallel) -> None:
        """Moves everything to the devices, once."""
        if self.is_uploaded:
            return
        _move(self.network, sharding.device)
        self._name_parameters()
        if self.noise:
            self.noise.table = sharding.send_replicated(self.noise.table.numpy())
        self.optimizer.move_state(lambda value: value.to(sharding.device))
        sharding.replicate_state(self.tensors().values())
        self.is_uploaded = True

    def load(self, tensors: Mapping[str, tuple[TensorSpec, memoryview]]) -> None:
        """Replaces tensors by copies. Raises Damaged for one that has no place here."""
        assert not self.is_uploaded, "restore before the first step"
        current, specs = self.tensors(), self.tensor_specs()
        for name, (spec, data) in tensors.items():
            if specs.get(name) != spec:
                raise Damaged(f"tensor {name} is {spec.dtype} {list(spec.shape)}, which has no place in this model")
            # By numpy: a copy by torch waits for all of its threads, each of which may have to wait for a busy
            # processor.
            current[name].detach().numpy()[...] = np.frombuffer(data, np.float32).reshape(spec.shape)

    def snapshot(self, buffers: Mapping[str, memoryview], sharding: DataParallel) -> Snapshot:
        """Begins to copy the named tensors to host memory."""
        current = self.tensors()
        if self.is_uploaded:
            xm.wait_device_ops()
        pairs = ((np.frombuffer(buffer, np.float32), current[name].detach()) for name, buffer in buffers.items())
        if self.is_uploaded and not sharding.is_spmd and os.environ["PJRT_DEVICE"] == "CPU":
            # A single CPU device shows its memory, which stays as it is until the next program that changes it:
            # `wait_before_mutation` comes first.
            self._snapshot = Snapshot(
                (buffer, from_dlpack(to_dlpack(value)).numpy().reshape(-1)) for buffer, value in pairs
            )
        else:
            # Tensor after tensor, since each takes fresh memory on its way.
            for buffer, value in pairs:
                buffer[:] = self.to_host(value).numpy().reshape(-1)
            self._snapshot = Snapshot()
        return self._snapshot

    def wait_before_mutation(self) -> None:
        """Right before a program overwrites the state: what is being copied must be copied, and nobody may look at that
        memory any more (PJRT would give the program another, with a copy of the state in it)."""
        self._snapshot.wait_before_mutation()

    def to_host(self, value: Tensor) -> Tensor:
        """A copy that is planned, and counted as such."""
        self.planned_transfers += value.device.type == "xla"
        return value.cpu()


def _move(network: Any, device: Any) -> None:
    """Moves a network, of which what is tied stays tied: moving to XLA makes two of a tied weight.

    transformers' `tie_weights` would tie them too, but pads the bias of some heads: an operation that waits for the
    first step, whose program is then another one than that of the second.
    """
    names: dict[int, list[str]] = {}
    for name, parameter in network.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), []).append(name)
    network.to(device)
    for first, *others in names.values():
        for other in others:
            module, _, attribute = other.rpartition(".")
            setattr(network.get_submodule(module), attribute, network.get_parameter(first))
