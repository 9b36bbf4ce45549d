"""Order version 2: lanes of whole blocks, so that each host reads (nearly) only what it uses.

The rows of a batch are divided into *lanes* of equal size: at most MAX_LANES of them, a divisor of the batch size. How
many follows from the batch and the dataset, not from the hosts; hosts hold consecutive rows, so consecutive lanes.

How an epoch is shuffled (every stage depends on seed and epoch):

  1. All full blocks of the dataset are permuted: `block_permutation`, 8 bytes of state per block.
  2. The permuted blocks are dealt to windows, consecutive ones, the same number to every lane of a window. What can't
     be dealt evenly (less than a block a lane, and the dataset's last, shorter block) belongs to one window, the
     *uneven* one, another one in each epoch.
  3. A lane of a window draws its rows, for all steps of the window, from its own blocks in random order:
     `Lanes.window`, 8 bytes per record of one window. In the uneven window, lanes begin and end within blocks.
  4. An epoch of one window (some 64 MB) has no lanes: its records are permuted, all of them. Every host reads such a
     dataset once, for all epochs.

What hosts read: lanes are whole blocks, so a block is read by one host, except where the uneven window's lanes share a
block, or where a lane is divided among hosts. All hosts together read 1.2 GB of rows of 128 tokens 1.00 times an epoch
with 8 hosts, 1.01 times with 64, 1.05 times with 512, when a batch is 4,096 rows (`benchmarks/read_amplification.py`).
Version 1 read it 1.2, 3 and 17 times. Lanes stay whole while the rows of a lane divide a block; `lanes` chooses blocks
so, unless a lane has more than two blocks of rows in each step.

Quality: each epoch is a permutation of all records, and a record may be at any place of the epoch. Two records of one
block are in the same window. A window holds at least WINDOW_BLOCKS / 2 blocks, as in version 1, and a batch takes
equally many records from every lane: the records of one block that meet in a batch of B rows are about B over the
blocks of the window, at most the rows of a lane where a lane has one block, whatever the size of the dataset. All
others come from other random blocks. To know: rows of one lane, so often those of one device, come from few blocks;
only the global batch is mixed. A dataset of one window has the uniform permutation.

`training.data.tf.order` is the same in TensorFlow operations.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from training.data.sampling import blocks
from training.data.sampling.blocks import Ints, block_permutation
from training.data.sampling.random_bits import stream

MAX_LANES = 512


@dataclass(frozen=True)
class Lanes:
    """The training order of version 2, for batches of `batch` rows. An `order.Order`.

    Attributes:
        records: in the dataset.
        block: records per block.
        count: number of lanes, a divisor of `batch`.
        depth: blocks of a lane in a window, at most.
        seed: of the permutations.
        batch: rows of a global batch.
    """

    records: int
    block: int
    count: int
    depth: int
    seed: int
    batch: int

    @property
    def blocks(self) -> int:
        """Number of blocks that are permuted: all full ones."""
        return self.records // self.block

    @property
    def per_lane(self) -> int:
        """Blocks that every lane has in an epoch."""
        return self.blocks // self.count

    @property
    def windows(self) -> int:
        """Number of windows per epoch."""
        return max(1, -(-self.per_lane // self.depth))

    @property
    def rows(self) -> int:
        """Rows of a lane in each step."""
        return self.batch // self.count

    @property
    def left_blocks(self) -> int:
        """Full blocks that can't be dealt evenly."""
        return self.blocks - self.per_lane * self.count

    @property
    def left_records(self) -> int:
        """The same in records, with the dataset's last, shorter block."""
        return self.records - self.per_lane * self.count * self.block

    def uneven(self, epoch: int) -> int:
        """The window of an epoch that has what can't be dealt evenly."""
        return int(stream(self.seed, "uneven", epoch, 1)[0] >> np.uint64(1)) % self.windows

    def blocks_before(self, epoch: int, number: int) -> int:
        """Full blocks in the windows before `number`."""
        dealt = number * self.per_lane // self.windows * self.count
        return dealt + (self.left_blocks if number > self.uneven(epoch) else 0)

    def bounds(self, epoch: int, number: int) -> tuple[int, int]:
        """The first index of a window in its epoch, and how many cells it has."""
        uneven, cells = self.uneven(epoch), self.count * self.block
        start, stop = (
            border * self.per_lane // self.windows * cells + (self.left_records if border > uneven else 0)
            for border in (number, number + 1)
        )
        return start, stop - start

    def window(self, epoch: int, number: int) -> Ints:
        """The records of a window in the order in which steps use them. (cells,)"""
        return _window(self, epoch, number)


def lanes(records: int, record_bytes: int, unit: int, seed: int, batch: int) -> Lanes:
    """The lanes of a dataset.

    Args:
        records: in the dataset, at least 1.
        record_bytes: the size of a record in its shard.
        unit: records that are stored together: blocks are whole units. 0: any block size.
        seed: of the permutations.
        batch: rows of a global batch.
    """
    # A window is WINDOW_BLOCKS * BLOCK_BYTES with any number of lanes: more lanes have smaller blocks, if units allow.
    most = MAX_LANES if unit * record_bytes * MAX_LANES <= blocks.WINDOW_BLOCKS * blocks.BLOCK_BYTES else MAX_LANES // 2
    count = max(lane for lane in range(1, min(most, batch) + 1) if batch % lane == 0)
    block_bytes = blocks.WINDOW_BLOCKS * blocks.BLOCK_BYTES // max(count, blocks.WINDOW_BLOCKS)
    block = blocks.block_records(records, record_bytes, block_bytes)
    if unit:
        block = max(unit, block // unit * unit)
    whole = math.lcm(unit or 1, batch // count)  # records: whole units, and whole steps of a lane
    if block >= whole:
        block = block // whole * whole
    elif whole <= 2 * block:
        block = whole
    return Lanes(records, block, count, max(1, blocks.WINDOW_BLOCKS // count), seed, batch)


@lru_cache(maxsize=8)
def _window(order: Lanes, epoch: int, number: int) -> Ints:
    """`Lanes.window`, kept for the batches of the same window."""
    start, size = order.bounds(epoch, number)
    steps, longer = divmod(size, order.batch)
    begin = (epoch * order.records + start) % order.batch  # the row of cell 0

    def ranks(row: Ints) -> Ints:
        """Cells in the rows before each of some rows: `longer` rows, from `begin` on, have one step more."""
        around = np.minimum(row, max(0, begin + longer - order.batch))  # those that are behind the last row
        return row * steps + np.clip(row - begin, 0, longer) + around

    # By (row, step): the cells of one row, step after step, then those of the next row. Lanes are consecutive.
    step, column = np.divmod(np.arange(size, dtype=np.int64), order.batch)  # (cells,), (cells,)
    rank = ranks((begin + column) % order.batch) + step  # (cells,)

    # Permute within lanes: sort by (lane, random). A tie of random numbers is rare and changes only its own pair.
    random = stream(order.seed, "lanes", epoch, size, number)  # (cells,)
    borders = ranks(np.arange(order.count + 1) * order.rows)  # (lanes + 1,) ranks
    if order.windows == 1:
        borders = np.array([0, size])
    lane = np.repeat(np.arange(len(borders) - 1), np.diff(borders))  # (cells,), of each rank
    position = np.lexsort((random, lane))[rank]  # (cells,) in the window's sequence of permuted blocks

    # From that sequence to records. The dataset's last, shorter block is behind the full ones of the uneven window.
    first = order.blocks_before(epoch, number)
    full = block_permutation(order.seed, epoch, order.blocks)[first : first + size // order.block]
    slot, inner = np.divmod(position, order.block)
    records: Ints = np.append(full, order.blocks)[slot] * order.block + inner
    records.setflags(write=False)
    return records
