"""The state of a run in torch_xla: the network's parameters and the optimizer's tensors, on the host until the first
step and then on the devices; how it is named, loaded and copied to the host.

The state is uploaded in one way whether it is fresh or restored: so both lead to the same program.

A step costs the host by the number of buffers of the state, not by their sizes, and most tensors are vectors: biases
and norms. Over SPMD's devices, vectors of one kind and length are one *packed buffer* with a vector a row. A traced
step unpacks and packs them. Matrices are not packed: the TPU's compiler then copies each packed buffer once a step
(four layers of bert-base on v3-8: a tenth more bytes a step; with vectors, a thousandth). Layers that run as a scan
(`models.torch.layer_scan`) have their parameters stacked in the network itself. Checkpoints have every tensor by its
own name.

Once steps are cached, the tensors of the network are stale: the newest buffers are in a list beside them, because
giving each tensor its new buffer costs as much as starting the step. `buffers` brings them up to date.
"""

from __future__ import annotations

import math
import os
from collections.abc import Container, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import numpy as np
import torch
import torch_xla.core.xla_model as xm
from torch import Tensor
from torch.utils.dlpack import from_dlpack
from torch_xla.utils.dlpack import to_dlpack

from training.backends.placement import PACKED
from training.backends.torch.state import HostState
from training.backends.torch.step import HostArray
from training.backends.torch_xla import internals
from training.backends.torch_xla.sharding import DataParallel
from training.checkpoint.snapshot import Snapshot, in_batches
from training.checkpoint.tensors import Slice, TensorSpec, copy_into, key_in_part, whole
from training.models.torch.dropout import DropoutNoise
from training.models.torch.layer_scan import LayerScan, group_layers
from training.models.torch.network import move


class State(HostState):
    def __init__(
        self, network: Any, optimizer_class: Any, settings: Any, noise: DropoutNoise | None, layers: str | None = None
    ) -> None:
        """See `HostState`. `network`: maybe without weights (`build_empty`), for tracing only; `layers`: of
        `find_layers`, those that run as a scan over SPMD's devices."""
        super().__init__(network, optimizer_class, settings, noise)
        self._layers, self._renew_optimizer = layers, partial(optimizer_class, settings)
        self.is_empty = any(parameter.is_meta for parameter in self.parameters.values())
        self._packed: dict[str, Tensor] = {}  # packed buffers by name: (members, length)
        self._members: dict[str, list[str]] = {}  # names of the tensors in each packed or stacked one
        self._newest: list[Tensor] | None = None  # buffers that a program returned and no tensor holds yet
        self.undeclared: dict[int, str] = {}  # names of placeholders, which nothing can be declared of, by id
        self.planned_transfers = 0  # copies to the host that a result or a snapshot asked for
        self._snapshot = Snapshot()

    # --- on the devices

    def buffers(self) -> dict[str, Tensor]:
        """Brings the network's and the optimizer's tensors up to date. Returns them by name, and packed buffers in
        place of the tensors that they hold; before `upload` all are on the host."""
        named = self._name_buffers()
        if self._newest is not None:
            for tensor, value in zip(named.values(), self._newest, strict=True):
                if tensor is not value:
                    tensor.data = value
            self._newest = None
        return named

    def values(self) -> Sequence[Tensor]:
        """Returns the newest buffers in the order of `buffers`. The tensors themselves keep buffers of earlier steps,
        which may be gone."""
        return list(self._name_buffers().values()) if self._newest is None else self._newest

    def replace(self, places: Sequence[int], values: Sequence[Tensor]) -> None:
        """Replaces the buffers at these places of `values()`; the network's tensors are stale until `buffers()`."""
        newest = list(self.values())
        for place_, value in zip(places, values, strict=True):
            newest[place_] = value
        self._newest = newest

    @contextmanager
    def recording(self, *, changes: bool) -> Iterator[None]:
        """Unpacks the tensors for a step that is traced in this block and, if the step `changes` them, packs them
        again. The step's numbers are constants of its program. Call `buffers` before it."""
        tensors = self.tensors()
        for name, packed in self._packed.items():
            for row, member in enumerate(self._members[name]):
                tensors[member].data = torch.select_copy(packed, 0, row)
        with internals.numbers_as_constants():
            yield
        for name, packed in self._packed.items():
            members = [tensors[member] for member in self._members[name]]
            if changes:
                with torch.no_grad():
                    packed.copy_(torch.stack(members))
            for member in members:
                member.data = self._nothing  # else it would keep the operations alive

    def _name_buffers(self) -> dict[str, Tensor]:
        """Returns unpacked tensors and packed buffers by name, which are stale while `_newest` is set."""
        packed = _all_members(self._members)
        return {**{name: value for name, value in self.tensors().items() if name not in packed}, **self._packed}

    def upload(self, sharding: DataParallel) -> None:
        """Moves all tensors to the devices in few calls and frees their host memory (without weights, makes
        placeholders). Under SPMD, packs vectors, and puts a `LayerScan` in place of layers that run as a scan; if the
        state is split, hooks keep the layers' outputs split by rows. Later calls do nothing."""
        if self.is_uploaded:
            return
        stacked = group_layers(self._specs, self._layers) if self._layers and sharding.is_spmd else {}
        if sharding.is_spmd:
            self._members = {**_group_vectors(self._specs, _all_members(stacked)), **stacked}
        sharding.split_activations(self.network)
        sent = self._send(sharding)
        if stacked:
            layers = self.network.get_submodule(self._layers)
            self.network.set_submodule(self._layers, LayerScan(layers, internals.loop_over, sharding.place_slice))
        move(self.network, sharding.device, internals.placeholder)
        self.name_parameters()
        if stacked:
            self.optimizer = self._renew_optimizer(self.trained)
        if self.noise:
            self.noise.table = sharding.send_replicated(self.noise.table.numpy())
        self._nothing = sharding.send_replicated(np.empty(0, np.float32))
        self.optimizer.move_state(lambda _name, _value: self._nothing.detach().clone())
        for name, tensor in self.tensors().items():
            tensor.data = sent.get(name, self._nothing)
        self._packed = {name: sent[name] for name in self._members if name not in stacked}
        if self.is_empty:
            self.undeclared = {id(tensor): name for name, tensor in self.buffers().items()}
        else:
            sharding.declare_state(self.buffers())
        self.is_uploaded = True

    def _send(self, sharding: DataParallel) -> dict[str, Tensor]:
        """Sends all tensors to the devices, members of a packed or stacked one as one, and frees their host memory.
        Returns by name what is on the devices; placeholders if there are no weights."""
        members, tensors, sent = _all_members(self._members), self.tensors(), dict[str, Tensor]()
        shapes = {name: spec.shape for name, spec in self._specs.items() if name not in members}
        shapes |= {name: (len(group), *self._specs[group[0]].shape) for name, group in self._members.items()}
        if self.is_empty:
            return {name: internals.placeholder(shape) for name, shape in shapes.items()}
        for names in in_batches({name: 4 * math.prod(shape) for name, shape in shapes.items()}):
            arrays = {name: self._host_array(name, tensors) for name in names}
            placed = [HostArray(array, sharding.place(name, array.shape)) for name, array in arrays.items()]
            sent |= dict(zip(names, sharding.send(placed), strict=True))
            for member in (member for name in names for member in self._members.get(name, [name])):
                tensors[member].data = torch.empty(0)  # its memory is free
        return sent

    def _host_array(self, name: str, tensors: Mapping[str, Tensor]) -> np.ndarray:
        """Returns a tensor on the host as an array; a packed buffer's members stacked."""
        if name in self._members:
            return np.stack([tensors[member].detach().numpy() for member in self._members[name]])
        return tensors[name].detach().numpy()

    def snapshot(self, buffers: Mapping[str, memoryview], sharding: DataParallel) -> Snapshot:
        """Copies the tensors or slices that `buffers` names into them. On a single CPU device, once the state is there,
        only starts to: a thread reads the device's memory, until `wait_before_mutation` returns. Moves the state to the
        devices first if it is split."""
        split = {name: held for name, spec in self._specs.items() if (held := sharding.slices(name, spec.shape))}
        if sharding.splits_state:
            self.upload(sharding)
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
        requested = {*buffers, *(key.rpartition("[")[0] for key in buffers)}  # names, with and without slices
        members = {name: self._members.get(name, [name]) for name in values}
        wanted = {name: 4 * value.numel() for name, value in values.items() if requested.intersection(members[name])}
        for names in in_batches(wanted):
            for name, box, array in self._copies({name: values[name] for name in names}, split):
                shape = self._specs[name].shape
                key = key_in_part(name, box, shape)
                if key in buffers:
                    np.frombuffer(buffers[key], np.float32)[:] = array.reshape(-1)
                elif name in buffers:
                    copy_into(buffers[name], whole(shape), memoryview(array.tobytes()), box)
        self._snapshot = Snapshot()
        return self._snapshot

    def _copies(self, values: Mapping[str, Tensor], split: Container[str]) -> Iterator[tuple[str, Slice, np.ndarray]]:
        """Copies buffers to the host, unless they are there: whole ones by one call, and by another one what this
        host's devices hold of buffers of tensors that are `split`; counts each call as planned. Yields name, slice,
        values of each of their tensors."""
        cut = [name for name in values if self._members.get(name, [name])[0] in split]
        uncut = {name: value.detach() for name, value in values.items() if name not in cut}
        if self.is_uploaded:
            self.planned_transfers += bool(cut) + bool(uncut)  # even a call for no tensor would count
        copies = internals.download(list(uncut.values())) if self.is_uploaded and uncut else uncut.values()
        parts = {name: [((slice(0, None),) * copy.ndim, copy)] for name, copy in zip(uncut, copies, strict=True)}
        if cut:
            parts |= zip(cut, internals.local_slices([values[name] for name in cut]), strict=True)
        for name, of_devices in parts.items():
            members = self._members.get(name)
            for index, copy in of_devices:
                offsets = tuple(axis.start for axis in index)[1 if members else 0 :]
                for member, row in zip(members, copy, strict=True) if members else [(name, copy)]:
                    yield member, Slice(offsets, tuple(row.shape)), row.numpy()

    def wait_before_mutation(self) -> None:
        """Waits until a running snapshot has copied the state. Call it right before a program overwrites the state:
        as long as anything looks at that memory, PJRT gives the program other memory, with a copy of the state. Raises
        the copying thread's error."""
        self._snapshot.wait_before_mutation()

    def to_host(self, value: Tensor) -> Tensor:
        """Returns a copy on the host, and counts one from a device as planned."""
        self.planned_transfers += value.device.type == "xla"
        return value.cpu()


def _all_members(groups: Mapping[str, Sequence[str]]) -> set[str]:
    return {member for members in groups.values() for member in members}


def _group_vectors(specs: Mapping[str, TensorSpec], stacked: Container[str]) -> dict[str, list[str]]:
    """Returns the names of all vectors, which no mesh splits, but the `stacked` ones, of one kind (parameters, or one
    of the optimizer's tensors) and length, by the name of their packed buffer."""
    members: dict[str, list[str]] = {}
    for name, spec in specs.items():
        if len(spec.shape) == 1 and name not in stacked:
            members.setdefault(f"{name.partition('/')[0]}{PACKED}{spec.shape[0]}", []).append(name)
    return members
