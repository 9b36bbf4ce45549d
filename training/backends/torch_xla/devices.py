"""Opens and tries the devices of a slice with PyTorch/XLA, behind the protocol of `training.device_check.Devices`."""

from __future__ import annotations

import contextlib

import numpy as np
import torch
import torch_xla
import torch_xla.core.xla_model as xm
import torch_xla.runtime as xla_runtime

from training.backends.torch_xla import internals
from training.backends.torch_xla.sharding import DataParallel
from training.distributed.cluster import Cluster
from training.distributed.rendezvous import Rendezvous
from training.distributed.tcp_allreduce import TcpAllReduce

_ROWS, _INNER, _COLUMNS = 128, 256, 128  # of a device
_SECONDS = 60.0


class TorchDevices:
    """Under SPMD, `wrong_products` and `sum_ones` are programs of all hosts."""

    def __init__(self, cluster: Cluster, rendezvous: Rendezvous) -> None:
        """Opens the devices and, between CPU hosts, connects them. All hosts call it. Raises TrainError."""
        self._sharding, self._exchange = DataParallel(cluster), None
        self.total = self._sharding.devices
        self.local: int = xla_runtime.addressable_runtime_device_count() if self._sharding.is_spmd else 1
        if cluster.hosts > 1 and not self._sharding.is_spmd:
            self._exchange = TcpAllReduce(cluster, rendezvous, _SECONDS)

    def memory_bytes(self) -> int | None:
        return memory_of(self._sharding)[1] or None

    def wrong_products(self) -> int:
        """Returns the number of wrong elements in matrix products, added up over all devices; all hosts call it."""
        # Factors of -1, 0 and 1: the products are integers up to 256, which bfloat16 represents exactly.
        random = np.random.default_rng(0)
        rows = random.integers(-1, 2, (self.local * _ROWS, _INNER)).astype(np.float32)
        columns = random.integers(-1, 2, (_INNER, _COLUMNS)).astype(np.float32)
        sent = self._sharding.send_rows({"rows": rows, "product": rows @ columns})
        factor = self._sharding.send_replicated(columns).to(torch.bfloat16)
        wrong = (sent["rows"].to(torch.bfloat16) @ factor).to(torch.float32) != sent["product"]
        return int(self._read(wrong.to(torch.float32).sum()))

    def sum_ones(self) -> float:
        """Returns the sum of a 1 from each device of all hosts: by XLA's all-reduce, between CPU hosts over TCP."""
        ones = self._sharding.send_rows({"ones": np.ones((self.local, 1), np.float32)})["ones"]
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
