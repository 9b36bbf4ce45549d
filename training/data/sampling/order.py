"""The order of records: which record is in which row of which batch. Pure functions of (records, seed, batch size).

`training.data` has the glossary of indices; `training.data.tf.order` is the same in TensorFlow operations.

How an epoch is shuffled (every stage depends on seed and epoch):

  1. The blocks of the dataset are permuted, all of them: `block_permutation`, 8 bytes of state per block.
  2. The permuted blocks are cut into windows, and each window's blocks into groups of GROUP_BLOCKS.
  3. The records of a group are permuted: `Shuffled.window`, 8 bytes per record of one window.
  4. The permuted records are laid out down the *columns* of the window: a column holds the cells of one row of the
     batch, step after step.

Why not a global permutation of records: reading single records in random order costs one request each. Here a window
costs about WINDOW_BLOCKS requests for some 60 MB, enough for tens to hundreds of steps. And because a group fills few
rows, a host that needs only some rows reads only some groups, whole blocks of them: up to 8 hosts together read the
dataset about 1.2 times an epoch, 64 hosts 3 times, 512 hosts 17 times (`benchmarks/read_amplification.py`). What one
host reads falls all the same with the number of hosts, to two or three groups of 2 MB a window.

Quality: each epoch is a permutation of all records, and a record may be at any place of the epoch. Two records of one
block are in the same window, and in the same batch with a probability of about B / window: with a record come on
average B / 256 others of its own block, whatever the size of the dataset; all others come from random blocks. A shuffle
buffer of the window's size over files read in order would take *all* its records from one stretch of the dataset.
Datasets of up to GROUP_BLOCKS * MIN_BLOCK records are one group, so their permutation is uniform.

The constants are part of what a seed means: changing one changes every order, and then ORDER_VERSION must change, too.
It is part of what a checkpoint must agree with (`identity`).
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import numpy.typing as npt

from training.data.sampling.random_bits import stream

ORDER_VERSION = 1
WINDOW_BLOCKS = 256  # blocks per window
GROUP_BLOCKS = 8  # blocks per group
BLOCK_BYTES = 256 << 10  # the largest block
MIN_BLOCK = 64  # records in the smallest block
FIRST_ORDER_VERSION = 1  # which checkpoints do not name

Ints = npt.NDArray[np.int64]


@dataclass(frozen=True)
class Geometry:
    """How a dataset is cut into blocks and windows. Depends on the dataset alone, not on the number of hosts.

    Attributes:
        records: in the dataset.
        block: records per block; the last block may be shorter.
        window: cells per window, a multiple of `block`; the last window of an epoch may be shorter.
    """

    records: int
    block: int
    window: int

    @property
    def blocks(self) -> int:
        """Number of blocks."""
        return -(-self.records // self.block)

    @property
    def windows(self) -> int:
        """Number of windows per epoch."""
        return -(-self.records // self.window)


def geometry(records: int, record_bytes: int, unit: int = 0) -> Geometry:
    """The geometry of a dataset: windows of equal size, blocks of at most BLOCK_BYTES.

    Args:
        records: at least 1. Blocks of a small dataset are smaller, so that it has many, too.
        record_bytes: the size of a record in its shard.
        unit: records that are stored together, such as a gzip member: blocks are whole units. 0: any block size.
    """
    assert records > 0
    largest = max(1, BLOCK_BYTES // record_bytes)
    block = min(largest, max(MIN_BLOCK, -(-records // WINDOW_BLOCKS)))
    if unit:
        block = max(unit, block // unit * unit)
    windows = -(-records // (block * WINDOW_BLOCKS))
    window = -(-records // (windows * block)) * block
    return Geometry(records, block, window)


@dataclass(frozen=True)
class Shuffled:
    """The training order, for batches of `batch` rows."""

    geometry: Geometry
    seed: int
    batch: int

    def window(self, epoch: int, number: int) -> Ints:
        """The records of a window in the order in which steps use them. (cells,)"""
        return _window(self, epoch, number)


@dataclass(frozen=True)
class Sequential:
    """The order of evaluation: every epoch is record 0, 1, 2, ..."""

    geometry: Geometry

    def window(self, epoch: int, number: int) -> Ints:
        """As `Shuffled.window`."""
        start = number * self.geometry.window
        return np.arange(start, min(start + self.geometry.window, self.geometry.records))


Order = Shuffled | Sequential


@dataclass(frozen=True)
class CellRange:
    """Consecutive places inside one window: cells [start, stop) of window `number` of `epoch`."""

    epoch: int
    number: int
    start: int
    stop: int


def identity() -> dict[str, int]:
    """What a checkpoint must agree with, so that the run continues on the records that were not used yet."""
    return {} if ORDER_VERSION == FIRST_ORDER_VERSION else {"data.order": ORDER_VERSION}


def blocks_of_hosts(order: Shuffled, epoch: int, number: int, hosts: int) -> list[int]:
    """How many blocks each host reads for a window."""
    blocks = order.window(epoch, number) // order.geometry.block  # (cells,)
    counts = []
    for host in range(hosts):
        rows = host_rows(order.batch, host, hosts)
        counts.append(len(np.unique(blocks[cells_of_rows(order, order.batch, epoch, number, *rows)])))
    return counts


def split_places(geometry: Geometry, first: int, last: int) -> list[CellRange]:
    """Cuts the places [first, last) at the borders of windows and epochs."""
    ranges = []
    while first < last:
        epoch, index = divmod(first, geometry.records)
        number, cell = divmod(index, geometry.window)
        size = min(geometry.window, geometry.records - number * geometry.window)
        stop = min(size, cell + last - first)
        ranges.append(CellRange(epoch, number, cell, stop))
        first += stop - cell
    return ranges


def batch_records(order: Shuffled, k: int) -> tuple[Ints, Ints]:
    """Epoch and record of every row of global batch k: (B,), (B,)."""
    ranges = split_places(order.geometry, k * order.batch, (k + 1) * order.batch)
    epochs = np.concatenate([np.full(cells.stop - cells.start, cells.epoch) for cells in ranges])
    records = np.concatenate([order.window(cells.epoch, cells.number)[cells.start : cells.stop] for cells in ranges])
    return epochs, records


def host_rows(batch: int, host: int, hosts: int) -> tuple[int, int]:
    """The rows [first, last) of a global batch of `batch` rows that host number `host` of `hosts` holds."""
    return host * batch // hosts, (host + 1) * batch // hosts


def cells_of_rows(
    order: Shuffled | Sequential, batch: int, epoch: int, number: int, first: int, last: int
) -> npt.NDArray[np.bool_]:
    """Which cells of a window are in rows [first, last) of their batches of `batch` rows. (cells,)"""
    place = epoch * order.geometry.records + number * order.geometry.window  # of cell 0
    count = len(order.window(epoch, number))
    row = (place + np.arange(count)) % batch  # (cells,)
    return (row >= first) & (row < last)


@lru_cache(maxsize=4)
def block_permutation(seed: int, epoch: int, count: int) -> Ints:
    """The permutation of all blocks in an epoch. (count,)"""
    return np.argsort(stream(seed, "blocks", epoch, count), kind="stable").astype(np.int64)


@lru_cache(maxsize=8)
def _window(order: Shuffled, epoch: int, number: int) -> Ints:
    """`Shuffled.window`, kept for the batches of the same window."""
    shape = order.geometry
    start = number * shape.window
    size = min(shape.window, shape.records - start)
    cell = np.arange(size, dtype=np.int64)  # (cells,)

    # Down the columns: the cells of one row, step after step, then those of the next row. The first `longer` rows have
    # one step more.
    steps, longer = divmod(size, order.batch)
    step, row = np.divmod(cell, order.batch)  # (cells,), (cells,)
    column = row * steps + np.minimum(row, longer) + step  # (cells,)

    # Permute within groups: sort by (group, random). A tie of random numbers is rare and changes only its own pair.
    group = cell // (GROUP_BLOCKS * shape.block)  # (cells,)
    random = stream(order.seed, "records", epoch, size, number)  # (cells,)
    shuffled = np.lexsort((random, group))  # (cells,)
    position = start + shuffled[column]  # (cells,) in the epoch's sequence of permuted blocks

    # From that sequence to records. All blocks are full except the dataset's last one, which is somewhere in the
    # sequence: positions behind it move up by what it lacks.
    permuted = block_permutation(order.seed, epoch, shape.blocks)
    missing = shape.blocks * shape.block - shape.records
    short = int(np.flatnonzero(permuted == shape.blocks - 1)[0])
    # (cells,)
    position = np.where(position < (short + 1) * shape.block - missing, position, position + missing)
    slot, inner = np.divmod(position, shape.block)
    records: Ints = permuted[slot] * shape.block + inner
    records.setflags(write=False)
    return records
