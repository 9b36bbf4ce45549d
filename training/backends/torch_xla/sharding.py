"""Layouts of arrays over the devices of the slice.

Under SPMD a mesh of all devices of all hosts has one axis, "data". Rows of a batch are split over it, the state is
placed as `training.backends.placement` says, and the compiler adds the sum of gradients. On one CPU device a process
there is no mesh.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch_xla
import torch_xla.distributed.spmd as spmd
import torch_xla.runtime as xla_runtime
from torch import Tensor

from training.backends.placement import Axes, place
from training.backends.torch_xla import internals
from training.batch import SUMS, Arrays, Signals
from training.distributed.cluster import Cluster
from training.errors import TrainError, UnusableTpu

SIGNALS = 2  # stop, save
REPORT = len(SUMS) + SIGNALS  # numbers that every step gives: the sums, and how many hosts raise each signal
_REPLICATED = "{replicated}"  # in XLA's text


@dataclass(frozen=True)
class HostArray:
    """An array on this host, and its layout over the devices."""

    array: np.ndarray
    axes: Axes


def rows_of(array: np.ndarray) -> HostArray:
    """Returns (rows, ...) of this host, split by rows over all devices of all hosts."""
    return HostArray(array, ("data", *[None] * (array.ndim - 1)))


def replicated(array: np.ndarray) -> HostArray:
    """Returns the same array for every device."""
    return HostArray(array, (None,) * array.ndim)


class DataParallel:
    """The devices of all hosts, each with its rows of the batch."""

    def __init__(self, cluster: Cluster) -> None:
        """Opens the devices, under SPMD if this process has several or preflight simulates some. Raises UnusableTpu."""
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
        self._hosts = cluster.hosts
        self._mesh = spmd.Mesh(np.arange(self.devices), (self.devices,), ("data",)) if self.is_spmd else None
        self._specs: dict[Axes, spmd.ShardingSpec] = {}

    @property
    def mesh_shape(self) -> dict[str, int]:
        """Axis -> number of devices along it."""
        return {"data": self.devices if self.is_spmd else 1}

    def send_rows(self, batch: Arrays) -> dict[str, Tensor]:
        """Uploads arrays (rows, ...) of this host, split by rows over all devices of all hosts."""
        return dict(zip(batch, self.send([rows_of(array) for array in batch.values()]), strict=True))

    def send_replicated(self, array: np.ndarray) -> Tensor:
        """Uploads the same array to every device."""
        return self.send([replicated(array)])[0]

    def signal_rows(self, signals: Signals) -> HostArray:
        """Returns (devices of this host, 5): rows whose sum over all hosts is zeros for the sums, then the number of
        hosts that raise each signal."""
        rows = np.zeros((self.devices // self._hosts, REPORT), dtype=np.float32)
        rows[0, len(SUMS) :] = [signals.stop, signals.save]
        return rows_of(rows)

    def send(self, arrays: list[HostArray]) -> list[Tensor]:
        """Uploads all arrays in one call."""
        tensors = [torch.from_numpy(np.ascontiguousarray(value.array)) for value in arrays]
        specs = [self._spec(value.axes, tensor) for value, tensor in zip(arrays, tensors, strict=True)]
        return internals.upload(tensors, self.device, specs if self._mesh else None)

    def _spec(self, axes: Axes, tensor: Tensor) -> Any:
        """Returns torch_xla's description of a tensor's split over the mesh; None without a mesh."""
        if not self._mesh:
            return None
        if axes not in self._specs:
            minibatch = self._hosts > 1 and axes[:1] == ("data",)
            self._specs[axes] = spmd.ShardingSpec(self._mesh, axes, minibatch=minibatch)
        return self._specs[axes].xla_spec(tensor)

    def replicate_report(self, report: Tensor) -> Tensor:
        """Declares that every device holds all of the report, and returns it: the compiler might split it."""
        self._declare(report, (None,) * report.ndim)
        return report

    def declare_state(self, tensors: Mapping[str, Tensor]) -> None:
        """Declares the placement of the state's tensors, and of what later programs make of them in place. Call it
        before the first step; else the outputs of the first step declare it, and the second is another program."""
        for name, tensor in tensors.items():
            self._declare(tensor, place(name, tuple(tensor.shape)))

    def _declare(self, tensor: Tensor, axes: Axes) -> None:
        """Declares how a tensor is split over the mesh; does nothing without one."""
        if self._mesh:
            internals.declare_sharding(tensor, self._mesh.get_op_sharding(axes))

    def require_declared(self, tensors: Mapping[str, Tensor]) -> None:
        """Raises TrainError for tensors whose next value the compiler may split over the devices: reading one would be
        a program of all hosts, and hosts that read at different times would wait for each other forever."""
        if not self._mesh:
            return
        shardings = dict(zip(tensors, internals.read_shardings(list(tensors.values())), strict=True))
        assert not any(any(place(name, tuple(value.shape))) for name, value in tensors.items()), "compare their texts"
        split = [name for name, sharding in shardings.items() if sharding != _REPLICATED]
        if split:
            raise TrainError(
                f"{len(split)} of {len(tensors)} tensors of the state are not declared as replicated after the first "
                f"step, for example {split[0]}: the optimizer must change its tensors in place"
            )
