"""Where arrays live: the devices of the slice, and how batches and state are laid out over them.

There is one layout: data parallelism. Under SPMD a mesh of all devices of all hosts has one axis, "data"; rows of a
batch are sharded over it, everything else is replicated, and the compiler adds the sum of gradients. On one CPU device
a process there is no mesh. Another layout (a model axis, sharded state) belongs here.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch_xla
import torch_xla.distributed.spmd as spmd
import torch_xla.runtime as xla_runtime
from torch import Tensor
from torch_xla import _XLAC

from training.batch import SUMS, Arrays, Signals
from training.distributed.cluster import Cluster
from training.errors import TrainError, UnusableTpu

SIGNALS = 2  # stop, save
_REPLICATED = "{replicated}"
REPORT = len(SUMS) + SIGNALS  # numbers that every step gives: the sums, and how many hosts raise each signal


@dataclass(frozen=True)
class HostArray:
    """An array on this host, and how it is laid out over the devices."""

    array: np.ndarray
    axes: tuple[str | None, ...]  # of the mesh, for each axis of the array


def rows_of(array: np.ndarray) -> HostArray:
    """(rows, ...) of this host, to be sharded by rows over all devices of all hosts."""
    return HostArray(array, ("data", *[None] * (array.ndim - 1)))


def replicated(array: np.ndarray) -> HostArray:
    """The same array for every device."""
    return HostArray(array, (None,) * array.ndim)


class DataParallel:
    """The devices of all hosts, each with its rows of the batch and a whole copy of the state."""

    def __init__(self, cluster: Cluster) -> None:
        """Opens the devices. SPMD is on where this process has, or preflight pretends to have, several devices. Raises
        UnusableTpu."""
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
        self._specs: dict[tuple[str | None, ...], spmd.ShardingSpec] = {}  # by axes

    def send_rows(self, batch: Arrays) -> dict[str, Tensor]:
        """Arrays (rows, ...) of this host, sharded by rows over all devices of all hosts."""
        return self.send({name: rows_of(array) for name, array in batch.items()})

    def send_replicated(self, array: np.ndarray) -> Tensor:
        """The same array on every device."""
        return self.send({"": replicated(array)})[""]

    def signal_rows(self, signals: Signals) -> HostArray:
        """(devices of this host, 5): rows whose sum over all hosts is zeros for the sums, then the number of hosts
        that raise each signal."""
        rows = np.zeros((self.devices // self._hosts, REPORT), dtype=np.float32)
        rows[0, len(SUMS) :] = [signals.stop, signals.save]
        return rows_of(rows)

    def send(self, arrays: Mapping[str, HostArray]) -> dict[str, Tensor]:
        """All of them in one upload."""
        tensors = [torch.from_numpy(np.ascontiguousarray(value.array)) for value in arrays.values()]
        specs = [self._spec(value, tensor) for value, tensor in zip(arrays.values(), tensors, strict=True)]
        devices = [str(self.device)] * len(tensors)
        sent = _XLAC._xla_tensors_from_aten(tensors, devices, specs if self._mesh else None)
        return dict(zip(arrays, sent, strict=True))

    def _spec(self, value: HostArray, tensor: Tensor) -> Any:
        if not self._mesh:
            return None
        if value.axes not in self._specs:
            minibatch = self._hosts > 1 and value.axes[:1] == ("data",)
            self._specs[value.axes] = spmd.ShardingSpec(self._mesh, value.axes, minibatch=minibatch)
        return self._specs[value.axes].xla_spec(tensor)

    def replicate_report(self, report: Tensor) -> Tensor:
        """Every host reads the report, so every device must have all of it; left alone, the compiler may shard it."""
        self._replicate([report])
        return report

    def replicate_state(self, tensors: Iterable[Tensor]) -> None:
        """Declares tensors on the devices as replicated, and with them what later programs make of them in place. To be
        said before the first step; else its outputs say it, and the second step is another program."""
        self._replicate(tensors)

    def _replicate(self, tensors: Iterable[Tensor]) -> None:
        if not self._mesh:
            return
        for tensor in tensors:
            # spmd.mark_sharding would import JAX, which takes seconds, to look for tensors of torchax.
            _XLAC._xla_mark_sharding(tensor, self._mesh.get_op_sharding((None,) * tensor.ndim))

    def require_replicated(self, tensors: Mapping[str, Tensor]) -> None:
        """Raises TrainError for tensors whose next value the compiler may split over the devices: reading one would be
        a program of all hosts, and hosts that read at different times would wait for each other forever."""
        if not self._mesh:
            return
        names = list(tensors)
        specs = _XLAC._get_xla_sharding_specs([tensors[name] for name in names])
        split = [name for name, spec in zip(names, specs, strict=True) if spec != _REPLICATED]
        if split:
            raise TrainError(
                f"{len(split)} of {len(names)} tensors of the state are not declared as replicated after the first "
                f"step, for example {split[0]}: the optimizer must change its tensors in place"
            )
