"""Opens and tries the chips of a slice with TorchTPU, behind the protocol of `training.device_check.Devices`."""

import os

import numpy as np
import torch

from training.backends.torch.step import rows_of
from training.backends.torch_tpu.processes import Chip
from training.distributed.cluster import Cluster
from training.distributed.rendezvous import Rendezvous

_ROWS, _INNER, _COLUMNS = 128, 256, 128
_SECONDS = 60.0


class TorchTpuDevices:
    """One process's chip; the figures are those of all processes."""

    def __init__(self, cluster: Cluster, rendezvous: Rendezvous) -> None:
        """Opens this process's chip and connects all processes: all call it. Raises BadInput, UnusableTpu."""
        self._chip = Chip(cluster, rendezvous, _SECONDS)
        self.local, self.total = int(os.environ["LOCAL_WORLD_SIZE"]), self._chip.devices

    def memory_bytes(self) -> int | None:
        return None  # no documented call of torch_tpu tells it

    def wrong_products(self) -> int:
        """Returns the number of wrong elements in matrix products, added up over all chips; all processes call it."""
        # Factors of -1, 0 and 1: the products are integers up to 256, which bfloat16 represents exactly.
        random = np.random.default_rng(0)
        left, right = (
            random.integers(-1, 2, shape).astype(np.float32) for shape in ((_ROWS, _INNER), (_INNER, _COLUMNS))
        )
        first, second, product = self._chip.send([rows_of(array) for array in (left, right, left @ right)])
        wrong = (first.to(torch.bfloat16) @ second.to(torch.bfloat16)).to(torch.float32) != product
        return int(self._add_up(wrong.to(torch.float32).sum()))

    def sum_ones(self) -> float:
        """Returns the sum of a 1 from each chip; all processes call it."""
        return self._add_up(torch.ones((), device=self._chip.device))

    def _add_up(self, value: torch.Tensor) -> float:
        """Returns the sum of a scalar over all processes."""
        [total] = self._chip.read(self._chip.sum(value.reshape(1)))
        return total
