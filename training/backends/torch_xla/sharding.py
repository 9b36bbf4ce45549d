"""The devices of the slice, layouts of arrays over them, and a check of them.

Under SPMD, rows of a batch are split over all devices of all hosts, and the state is placed as
`training.backends.placement` says. The compiler adds the collectives: the sum of gradients and, for a split state, the
gathering of a layer's matrices before their use and the scattering of their gradients. On one CPU device a process
there is no mesh, and the state is never split.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
import torch_xla
import torch_xla.core.xla_model as xm
import torch_xla.distributed.spmd as spmd
import torch_xla.runtime as xla_runtime
from torch import Tensor

from training.backends import placement
from training.backends.placement import FSDP, ROWS, Axes, mesh_shape, rows_first
from training.backends.torch.step import HostArray, replicated, rows_of
from training.backends.torch_xla import internals
from training.checkpoint.tensors import HeldSlice
from training.config import mesh_mistake
from training.distributed.cluster import Cluster
from training.distributed.rendezvous import Rendezvous
from training.distributed.tcp_allreduce import TcpAllReduce
from training.errors import BadInput, TrainError, UnusableTpu

_ROWS, _INNER, _COLUMNS = 128, 256, 128  # of the matrices that try a device
_SECONDS = 60.0


class DataParallel:
    """The devices of all hosts, each with its rows of the batch and its slices of the state."""

    def __init__(self, cluster: Cluster, fsdp: int = 1, *, must_connect: bool = True) -> None:
        """Opens the devices, under SPMD if this process has several or preflight simulates some. `fsdp`: over how many
        devices the state is split under SPMD. Raises UnusableTpu, TrainError if hosts that `must_connect` are not
        connected, and BadInput unless `fsdp` divides the devices."""
        is_tpu = os.environ.get("PJRT_DEVICE") == "TPU"
        several = is_tpu or int(os.environ.get("CPU_NUM_DEVICES") or 1) > 1
        self.is_spmd = several or xla_runtime.is_spmd()  # preflight says so, where there is one device
        if self.is_spmd and not xla_runtime.is_spmd():
            xla_runtime.use_spmd()
        try:
            self.device = torch_xla.device()
            self.devices: int = xla_runtime.global_runtime_device_count() if self.is_spmd else cluster.hosts
        except RuntimeError as error:
            if not is_tpu:
                raise
            raise UnusableTpu(str(error), cluster.accelerator_type) from None
        self._hosts, self.local_devices = cluster.hosts, self.devices // cluster.hosts
        if must_connect and self.is_spmd and cluster.hosts > 1 and len(internals.local_devices()) == self.devices:
            raise TrainError(
                f"torch_xla shows {self.devices} devices, all of this host, but the run has {cluster.hosts} hosts, "
                "whose devices must be connected; CPUs can't be: leave CPU_NUM_DEVICES out; on TPUs: `doctor --devices`"
            )
        if self.is_spmd and (mistake := mesh_mistake(fsdp, self.devices)):
            raise BadInput(mistake)
        self.mesh_shape = mesh_shape(self.devices, fsdp) if self.is_spmd else mesh_shape(1, 1)
        self._meshes: dict[str, Any] = {}  # by the axis that arrays are split over
        if self.is_spmd:
            grid = tuple(self.mesh_shape.values())
            self._meshes[ROWS] = spmd.Mesh(np.arange(self.devices), (self.devices,), (ROWS,))
            self._meshes[FSDP] = spmd.Mesh(np.arange(self.devices), grid, tuple(self.mesh_shape))
        self._specs: dict[Axes, spmd.ShardingSpec] = {}
        self._texts: dict[Axes, str] = {}

    @property
    def splits_state(self) -> bool:
        return self.mesh_shape[FSDP] > 1

    def place(self, name: str, shape: tuple[int, ...]) -> Axes:
        """Returns how a tensor of the state is split over this mesh, as `placement.place` does."""
        return placement.place(name, shape, self.mesh_shape)

    def slices(self, name: str, shape: tuple[int, ...]) -> list[HeldSlice]:
        """Returns the slices of a tensor of the state; [] if every device holds all of it."""
        return placement.slices(name, shape, self.mesh_shape, self._hosts)

    def send_replicated(self, array: np.ndarray) -> Tensor:
        """Uploads an array, all of it to every device."""
        return self.send([replicated(array)])[0]

    def set_seed(self, seed: int) -> None:
        xm.set_rng_state(seed, self.device)

    def send(self, arrays: list[HostArray]) -> list[Tensor]:
        """Uploads all arrays in one call, each with its layout over the devices."""
        tensors = [torch.from_numpy(np.ascontiguousarray(value.array)) for value in arrays]
        if not self.is_spmd:
            return internals.upload(tensors, self.device, None)
        specs = [self._spec(value.axes, tensor) for value, tensor in zip(arrays, tensors, strict=True)]
        return internals.upload(tensors, self.device, specs)

    def _spec(self, axes: Axes, tensor: Tensor) -> Any:
        """Returns torch_xla's description of a tensor's split over the mesh."""
        if axes not in self._specs:
            minibatch = self._hosts > 1 and axes[:1] == (ROWS,)
            self._specs[axes] = spmd.ShardingSpec(self._mesh_of(axes), axes, minibatch=minibatch)
        return self._specs[axes].xla_spec(tensor)

    def _mesh_of(self, axes: Axes) -> Any:
        """Returns torch_xla's mesh for a split: that with the axis "fsdp" if `axes` has it, else that of rows."""
        return self._meshes[FSDP if FSDP in axes else ROWS]

    def replicate_report(self, report: Tensor) -> Tensor:
        """Declares that every device holds all of the report, and returns it: the compiler might split it."""
        self.declare(report, (None,) * report.ndim)
        return report

    def declare_state(self, tensors: Mapping[str, Tensor]) -> None:
        """Declares the placement of the state's tensors, and of what later programs make of them in place. Call it
        before the first step; else the outputs of the first step declare it, and the second is another program."""
        for name, tensor in tensors.items():
            self.declare(tensor, self.place(name, tuple(tensor.shape)))

    def describe(self, name: str, shape: tuple[int, ...]) -> str:
        """Returns the placement of a tensor of the state as XLA writes it; uploads a small array to learn a new one."""
        axes = self.place(name, shape)
        if axes not in self._texts:
            sizes = [self.mesh_shape[axis] if axis else 1 for axis in axes]
            [sample] = self.send([HostArray(np.zeros(sizes, np.float32), axes)])
            self.declare(sample, axes)
            [self._texts[axes]] = internals.read_shardings([sample])
        return self._texts[axes]

    def split_activations(self, network: Any) -> None:
        """Makes the layers' hidden states, and their gradients, stay split by rows, if the state is split: the compiler
        might else split them as the matrices are. If "data" is 1, a plain head gathers all rows."""
        if not self.splits_state:
            return
        stacks = [module for module in network.modules() if isinstance(module, torch.nn.ModuleList)]
        for layer in (layer for stack in stacks for layer in stack):
            layer.register_forward_hook(self._split_hidden)
        if hasattr(network, "has_plain_head") and self.mesh_shape["data"] == 1:
            # Gather rows rather than the head: each device computes its part of the vocabulary for all rows.
            network.lm_head.register_forward_pre_hook(lambda _, rows: (self._gather(rows[0], rows_first(3)),))

    def _split_hidden(self, _layer: Any, _arguments: Any, output: Any) -> Any:
        """Returns a layer's output, or tuple of outputs, with the first, (rows, positions, width), declared by rows."""
        if isinstance(output, tuple):
            return (_Placed.apply(output[0], self, rows_first(output[0].ndim)), *output[1:])
        return _Placed.apply(output, self, rows_first(output.ndim))

    def place_slice(self, name: str, value: Tensor) -> Tensor:
        """Returns one layer's value of a stacked parameter, gathered on every device if it is split. Without this the
        compiler splits the matrix products as the parameter is, and exchanges their results instead."""
        axes = self.place(name, (1, *value.shape))[1:]
        return self._gather(value, axes) if any(axes) else value

    def _gather(self, tensor: Tensor, axes: Axes) -> Tensor:
        """Returns a copy of a tensor, which is split as `axes` say, declared to be whole on every device, of the same
        shape; cast to autocast's type first, if it is on, to send fewer bytes. The gradient is summed over the devices
        and split as the tensor is."""
        kind = tensor.device.type
        dtype = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else tensor.dtype
        return _Placed.apply(_Placed.apply(tensor.to(dtype), self, axes), self, (None,) * len(axes))

    def declare(self, tensor: Tensor, axes: Axes) -> None:
        """Declares how a tensor is split over the mesh; does nothing without SPMD."""
        if self.is_spmd:
            internals.declare_sharding(tensor, self._mesh_of(axes).get_op_sharding(axes))

    def enter_rows(self, tensor: Tensor) -> Tensor:
        """Returns a copy of `tensor` that operations see as each device's own rows, for those that the compiler can't
        split; without SPMD `tensor` itself."""
        if not self.is_spmd:
            return tensor
        placed = tensor.clone()
        self.declare(placed, rows_first(placed.ndim))
        return internals.split_by_hand(placed)

    def leave_rows(self, part: Tensor, shape: tuple[int, ...]) -> Tensor:
        """Undoes `enter_rows`: returns the tensor of all rows, of this shape, from each device's `part`."""
        if not self.is_spmd:
            return part
        return internals.join_by_hand(part, self._meshes[ROWS].get_op_sharding(rows_first(len(shape))), shape)

    def require_declared(self, tensors: Mapping[str, Tensor]) -> None:
        """Raises TrainError for tensors of the state whose next value the compiler may place in another way than was
        declared: reading one would be a program of all hosts, and hosts that read at different times would wait for
        each other forever."""
        if not self.is_spmd:
            return
        shardings = zip(tensors.items(), internals.read_shardings(list(tensors.values())), strict=True)
        others = [name for (name, value), text in shardings if text != self.describe(name, tuple(value.shape))]
        if others:
            raise TrainError(
                f"{len(others)} of {len(tensors)} tensors of the state are not placed as declared after the first "
                f"step, for example {others[0]}: the optimizer must change its tensors in place"
            )


class _Placed(torch.autograd.Function):  # type: ignore[misc]  # torch is not here when types are checked
    """The identity, which declares how a tensor and its gradient are split."""

    @staticmethod
    def forward(context: Any, tensor: Tensor, sharding: DataParallel, axes: Axes) -> Tensor:
        context.sharding, context.axes = sharding, axes
        result = tensor.clone()
        sharding.declare(result, axes)
        return result

    @staticmethod
    def backward(context: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        result = gradient.clone()
        context.sharding.declare(result, context.axes)
        return result, None, None


class TorchDevices:
    """Tries the devices, behind the protocol of `training.device_check.Devices`. Under SPMD,
    `wrong_products` and `sum_ones` are programs of all hosts."""

    def __init__(self, cluster: Cluster, rendezvous: Rendezvous) -> None:
        """Opens the devices and, between CPU hosts, connects them. All hosts call it. Raises TrainError."""
        self._sharding, self._exchange = DataParallel(cluster, must_connect=False), None
        self.total = self._sharding.devices
        self.local: int = xla_runtime.addressable_runtime_device_count() if self._sharding.is_spmd else 1
        if cluster.hosts > 1 and not self._sharding.is_spmd:
            self._exchange = TcpAllReduce(cluster, rendezvous, _SECONDS)

    def memory_bytes(self) -> int | None:
        return memory_of(self._sharding)[1] or None

    def wrong_products(self) -> int:
        """Returns the number of wrong elements in matrix products: under SPMD on all devices, and all hosts call it,
        else on this host's device."""
        # Factors of -1, 0 and 1: the products are integers up to 256, which bfloat16 represents exactly.
        random = np.random.default_rng(0)
        rows = random.integers(-1, 2, (self.local * _ROWS, _INNER)).astype(np.float32)
        columns = random.integers(-1, 2, (_INNER, _COLUMNS)).astype(np.float32)
        first, product = self._sharding.send([rows_of(rows), rows_of(rows @ columns)])
        second = self._sharding.send_replicated(columns)
        wrong = (first.to(torch.bfloat16) @ second.to(torch.bfloat16)).to(torch.float32) != product
        return int(self._read(wrong.to(torch.float32).sum()))

    def sum_ones(self) -> float:
        """Returns the sum of a 1 from each device of all hosts, by XLA's all-reduce or TCP; all hosts call it."""
        [ones] = self._sharding.send([rows_of(np.ones((self.local, 1), np.float32))])
        total = self._read(ones.sum())
        return float(self._exchange.sum(np.array([total], np.float32))[0]) if self._exchange else total

    def _read(self, value: torch.Tensor) -> float:
        """Runs the recorded operations and returns their scalar; under SPMD all hosts must call it."""
        report = self._sharding.replicate_report(value.reshape(1))
        torch_xla.sync()
        return float(report.cpu().item())


def has_tpu_cores() -> bool:
    """Returns whether the devices are cores of TPUs: others may be called TPU, but have no place in a grid."""
    return all("coords" in attributes for attributes in xla_runtime.global_runtime_device_attributes())


def memory_of(sharding: DataParallel) -> tuple[int, int]:
    """Returns bytes in use and in total of this host's first device; 0, 0 where PJRT does not report them: CPUs."""
    with contextlib.suppress(RuntimeError, KeyError):
        device = internals.local_devices()[0] if sharding.is_spmd else str(sharding.device)
        memory = xm.get_memory_info(device)
        return int(memory["bytes_used"]), int(memory["bytes_limit"])
    return 0, 0
