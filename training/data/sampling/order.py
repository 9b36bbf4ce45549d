"""The order of records: which record is in which row of which batch. Pure functions of (records, seed, batch size).

`training.data` has the glossary of indices; `training.data.tf.order` is the same in TensorFlow operations.

There are two versions of the training order, and the order of evaluation:

  1  `sampling.groups`
  2  `sampling.lanes`    which many hosts read about once, too
  `Sequential`           record 0, 1, 2, ...

Their constants are part of what a seed means: changing one changes every order, and then there must be another version.
New runs take ORDER_VERSION. A checkpoint says which version its run takes (`identity`), and the run goes on with that
one (`version_of`).
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from training.data.sampling.blocks import Geometry, Ints, geometry
from training.data.sampling.groups import Groups
from training.data.sampling.lanes import Lanes, lanes
from training.errors import BadInput

FIRST_ORDER_VERSION = 1  # which checkpoints do not name
ORDER_VERSION = 2  # of new runs
ORDER_VERSIONS = (FIRST_ORDER_VERSION, 2)
VERSION_KEY = "data.order"  # in a checkpoint's identity


class Order(Protocol):
    """Which record is where, window by window: consecutive indices of an epoch."""

    @property
    def records(self) -> int:
        """In the dataset."""

    @property
    def block(self) -> int:
        """Records per block, which are read together; the dataset's last block may be shorter."""

    @property
    def windows(self) -> int:
        """Number of windows per epoch."""

    def bounds(self, epoch: int, number: int) -> tuple[int, int]:
        """The first index of a window in its epoch, and how many cells it has."""

    def window(self, epoch: int, number: int) -> Ints:
        """The records of a window in the order in which steps use them. (cells,)"""


@dataclass(frozen=True)
class Sequential:
    """The order of evaluation: every epoch is record 0, 1, 2, ... An `Order`."""

    geometry: Geometry

    @property
    def records(self) -> int:
        """In the dataset."""
        return self.geometry.records

    @property
    def block(self) -> int:
        """Records per block."""
        return self.geometry.block

    @property
    def windows(self) -> int:
        """Number of windows per epoch."""
        return self.geometry.windows

    def bounds(self, epoch: int, number: int) -> tuple[int, int]:
        """As `Order.bounds`."""
        start = number * self.geometry.window
        return start, min(self.geometry.window, self.records - start)

    def window(self, epoch: int, number: int) -> Ints:
        """As `Order.window`."""
        start, size = self.bounds(epoch, number)
        return np.arange(start, start + size)


@dataclass(frozen=True)
class CellRange:
    """Consecutive places inside one window: cells [start, stop) of window `number` of `epoch`."""

    epoch: int
    number: int
    start: int
    stop: int


def training_order(
    version: int, records: int, record_bytes: int, unit: int = 0, *, seed: int, batch: int
) -> Groups | Lanes:
    """The training order of a dataset.

    Args:
        version: of the order.
        records: in the dataset, at least 1.
        record_bytes: the size of a record in its shard.
        unit: records that are stored together, such as a gzip member: blocks are whole units. 0: any block size.
        seed: of the run, or of a length bucket.
        batch: rows of a global batch.
    """
    if version == FIRST_ORDER_VERSION:
        return Groups(geometry(records, record_bytes, unit), seed, batch)
    assert version in ORDER_VERSIONS, version
    return lanes(records, record_bytes, unit, seed, batch)


def identity(version: int) -> dict[str, int]:
    """What a checkpoint says of the order, so that the run continues on the records that were not used yet."""
    return {} if version == FIRST_ORDER_VERSION else {VERSION_KEY: version}


def version_of(identity: Mapping[str, Any]) -> int:
    """The version that a checkpoint's identity names. Raises BadInput for one that this program does not have."""
    version = identity.get(VERSION_KEY, FIRST_ORDER_VERSION)
    if version not in ORDER_VERSIONS or type(version) is not int:
        raise BadInput(
            f"the run's checkpoints have version {version!r} of the order of records, and this program has versions "
            f"{ORDER_VERSIONS[0]} to {ORDER_VERSIONS[-1]}: go on with the program that began the run, or use another "
            "run id or output"
        )
    return version


def blocks_of_hosts(order: Order, batch: int, epoch: int, number: int, hosts: int) -> list[int]:
    """How many blocks each host reads for a window."""
    block = order.window(epoch, number) // order.block  # (cells,)
    start, size = order.bounds(epoch, number)
    row = (epoch * order.records + start + np.arange(size)) % batch  # (cells,)
    lasts = np.array([host_rows(batch, host, hosts)[1] for host in range(hosts)])  # (hosts,)
    host = np.searchsorted(lasts, row, side="right")  # (cells,)
    read = np.unique(host * (block.max() + 1) + block) // (block.max() + 1)  # (reads,) the host of each
    return [int(count) for count in np.bincount(read, minlength=hosts)]


def split_places(order: Order, first: int, last: int) -> list[CellRange]:
    """Cuts the places [first, last) at the borders of windows and epochs."""
    ranges = []
    while first < last:
        epoch, number, cell = locate(order, first)
        stop = min(order.bounds(epoch, number)[1], cell + last - first)
        ranges.append(CellRange(epoch, number, cell, stop))
        first += stop - cell
    return ranges


def locate(order: Order, place: int) -> tuple[int, int, int]:
    """The epoch of a place, its window, and its cell there."""
    epoch, index = divmod(place, order.records)
    number = bisect_right(range(order.windows), index, key=lambda window: order.bounds(epoch, window)[0]) - 1
    return epoch, number, index - order.bounds(epoch, number)[0]


def batch_records(order: Groups | Lanes, k: int) -> tuple[Ints, Ints]:
    """Epoch and record of every row of global batch k: (B,), (B,)."""
    ranges = split_places(order, k * order.batch, (k + 1) * order.batch)
    epochs = np.concatenate([np.full(cells.stop - cells.start, cells.epoch) for cells in ranges])
    records = np.concatenate([order.window(cells.epoch, cells.number)[cells.start : cells.stop] for cells in ranges])
    return epochs, records


def host_rows(batch: int, host: int, hosts: int) -> tuple[int, int]:
    """The rows [first, last) of a global batch of `batch` rows that host number `host` of `hosts` holds."""
    return host * batch // hosts, (host + 1) * batch // hosts


def cells_of_rows(order: Order, batch: int, epoch: int, number: int, first: int, last: int) -> npt.NDArray[np.bool_]:
    """Which cells of a window are in rows [first, last) of their batches of `batch` rows. (cells,)"""
    start, size = order.bounds(epoch, number)
    row = (epoch * order.records + start + np.arange(size)) % batch  # (cells,)
    return (row >= first) & (row < last)
