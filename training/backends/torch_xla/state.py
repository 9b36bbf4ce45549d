"""The state of a run in torch_xla: the network's parameters and the optimizer's tensors, on the host until the first
step and then on the devices; how it is named, loaded and copied to the host.

The state is uploaded in one way whether it is fresh or restored: so both lead to the same program.

A step costs the host by the number of its buffers, not by their sizes, and most tensors are vectors: biases and norms.
Over SPMD's devices, vectors of one kind and length are one buffer, a *stack* with a vector a row. A traced step takes
them apart and puts them together again. Matrices are not stacked: the TPU's compiler then copies each stack once a step
(four layers of bert-base on v3-8: a tenth more bytes a step; with vectors, a thousandth). Checkpoints have every tensor
by its own name.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
import torch_xla.core.xla_model as xm
from torch import Tensor
from torch.utils.dlpack import from_dlpack
from torch_xla import _XLAC
from torch_xla.utils.dlpack import to_dlpack

from training.backends.torch_xla.dropout import Noise
from training.backends.torch_xla.sharding import DataParallel, replicated
from training.checkpoint.safetensors_file import Damaged, TensorSpec
from training.checkpoint.snapshot import Snapshot, in_batches


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
        self._is_stacked = True  # once it is uploaded to SPMD's devices
        self._stacks: dict[str, Tensor] = {}  # by name: (members, length)
        self._members: dict[str, list[str]] = {}  # the names of each stack's tensors
        self._specs = {
            name: TensorSpec("F32", tuple(value.shape), value.numel() * 4) for name, value in self.tensors().items()
        }
        self._newest: list[Tensor] | None = None  # values that a program has returned and that no tensor holds yet
        self.planned_transfers = 0  # copies to the host that a result or a snapshot asked for
        self._snapshot = Snapshot()

    def _name_parameters(self) -> None:
        self.parameters: dict[str, Tensor] = dict(self.network.named_parameters())  # tied ones once

    def tensors(self) -> dict[str, Tensor]:
        """All tensors by their names in a checkpoint. On the devices: to be read and changed by `record` alone."""
        groups = {"model": self.parameters, **self.optimizer.state()}
        return {f"{group}/{name}": value for group, values in groups.items() for name, value in values.items()}

    def tensor_specs(self) -> dict[str, TensorSpec]:
        """Type, shape and bytes of each."""
        return dict(self._specs)

    # --- on the devices

    def buffers(self) -> dict[str, Tensor]:
        """What the devices hold, with present values: tensors by their names, and stacks."""
        named = self._name_buffers()
        if self._newest is not None:
            for tensor, value in zip(named.values(), self._newest, strict=True):
                if tensor is not value:
                    tensor.data = value
            self._newest = None
        return named

    def values(self) -> Sequence[Tensor]:
        """The present values in the order of `buffers`. The tensors themselves are left with values of earlier steps,
        which may be gone."""
        return list(self._name_buffers().values()) if self._newest is None else self._newest

    def advance(self, places: Sequence[int], values: Sequence[Tensor]) -> None:
        """Replaces the values at these places of `values()` by what a program has made of them."""
        newest = list(self.values())
        for place, value in zip(places, values, strict=True):
            newest[place] = value
        self._newest = newest

    def record(self, trace: Callable[[], Tensor], *, trains: bool) -> Tensor:
        """Records a step on the `tensors`, and with it how stacks are taken apart before and, when it `trains`, put
        together after it. To be called after `buffers`. Returns what `trace` returns."""
        if not self._stacks:
            return trace()
        tensors = self.tensors()
        for name, stack in self._stacks.items():
            for row, member in enumerate(self._members[name]):
                tensors[member].data = torch.select_copy(stack, 0, row)
        report = trace()
        for name, stack in self._stacks.items():
            members = [tensors[member] for member in self._members[name]]
            if trains:
                with torch.no_grad():
                    stack.copy_(torch.stack(members))
            for member in members:
                member.data = self._nothing  # else it would keep the operations alive
        return report

    def keep_apart(self) -> None:
        """No stacks: for whoever looks at the operations, and runs them by `torch_xla.sync`."""
        assert not self.is_uploaded, "to be chosen before the first step"
        self._is_stacked = False

    def _name_buffers(self) -> dict[str, Tensor]:
        stacked = {member for members in self._members.values() for member in members}
        return {**{name: value for name, value in self.tensors().items() if name not in stacked}, **self._stacks}

    def upload(self, sharding: DataParallel) -> None:
        """Moves everything to the devices, once, in few calls."""
        if self.is_uploaded:
            return
        if self._is_stacked and sharding.is_spmd:
            self._members = _group_vectors(self._specs)
        tensors, sent = self.tensors(), dict[str, Tensor]()
        sizes = {name: sum(self._specs[member].size for member in members) for name, members in self._members.items()}
        stacked = {member for members in self._members.values() for member in members}
        sizes |= {name: spec.size for name, spec in self._specs.items() if name not in stacked}
        for names in in_batches(sizes):
            arrays = {name: self._host_array(name, tensors) for name in names}
            sent |= sharding.send({name: replicated(array) for name, array in arrays.items()})
            for member in (member for name in names for member in self._members.get(name, [name])):
                tensors[member].data = torch.empty(0)  # its memory is free
        _move(self.network, sharding.device)
        self._name_parameters()
        if self.noise:
            self.noise.table = sharding.send_replicated(self.noise.table.numpy())
        self._nothing = sharding.send_replicated(np.empty(0, np.float32))
        self.optimizer.move_state(lambda _value: self._nothing.detach().clone())
        for name, tensor in self.tensors().items():
            tensor.data = sent.get(name, self._nothing)
        self._stacks = {name: sent[name] for name in self._members}
        sharding.replicate_state(self.buffers().values())
        self.is_uploaded = True

    def _host_array(self, name: str, tensors: Mapping[str, Tensor]) -> np.ndarray:
        """A tensor, or the rows of a stack."""
        if name in self._members:
            return np.stack([tensors[member].detach().numpy() for member in self._members[name]])
        array: np.ndarray = tensors[name].detach().numpy()
        return array

    def load(self, tensors: Mapping[str, tuple[TensorSpec, memoryview]]) -> None:
        """Replaces tensors by copies. Raises Damaged for one that has no place here."""
        assert not self.is_uploaded, "restore before the first step"
        current = self.tensors()
        for name, (spec, data) in tensors.items():
            if self._specs.get(name) != spec:
                raise Damaged(f"tensor {name} is {spec.dtype} {list(spec.shape)}, which has no place in this model")
            # By numpy: a copy by torch waits for all of its threads, each of which may have to wait for a busy
            # processor.
            current[name].detach().numpy()[...] = np.frombuffer(data, np.float32).reshape(spec.shape)

    def snapshot(self, buffers: Mapping[str, memoryview], sharding: DataParallel) -> Snapshot:
        """Begins to copy the named tensors to host memory."""
        if self.is_uploaded:
            xm.wait_device_ops()
        values = self.buffers()
        if self.is_uploaded and not sharding.is_spmd and os.environ["PJRT_DEVICE"] == "CPU":
            # A single CPU device shows its memory, which stays as it is until the next program that changes it:
            # `wait_before_mutation` comes first.
            self._snapshot = Snapshot(
                (np.frombuffer(buffer, np.float32), from_dlpack(to_dlpack(values[name].detach())).numpy().reshape(-1))
                for name, buffer in buffers.items()
            )
            return self._snapshot
        members = {name: [name] for name in values} | self._members
        wanted = {name: value for name, value in values.items() if any(member in buffers for member in members[name])}
        for names in in_batches({name: 4 * value.numel() for name, value in wanted.items()}):
            copies = self._fetch([wanted[name].detach() for name in names])
            for name, copy in zip(names, copies, strict=True):
                rows = copy.numpy().reshape(len(members[name]), -1)
                for member, row in zip(members[name], rows, strict=True):
                    if member in buffers:
                        np.frombuffer(buffers[member], np.float32)[:] = row
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

    def _fetch(self, values: Sequence[Tensor]) -> Sequence[Tensor]:
        """Copies of tensors by one call, which counts once. Those on the host already are returned as they are."""
        if not self.is_uploaded:
            return values
        self.planned_transfers += 1
        copies: list[Tensor] = _XLAC._xla_get_cpu_tensors(list(values))
        return copies


def _group_vectors(specs: Mapping[str, TensorSpec]) -> dict[str, list[str]]:
    """The stacks: the names of all vectors of one kind (parameters, or one of the optimizer's tensors) and length."""
    members: dict[str, list[str]] = {}
    for name, spec in specs.items():
        if len(spec.shape) == 1:
            members.setdefault(f"{name.partition('/')[0]}/vectors of {spec.shape[0]}", []).append(name)
    return members


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
