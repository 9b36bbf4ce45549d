"""Order version 1: windows of blocks, shuffled in groups.

How an epoch is shuffled (every stage depends on seed and epoch):

  1. The blocks of the dataset are permuted, all of them: `block_permutation`, 8 bytes of state per block.
  2. The permuted blocks are cut into windows, and each window's blocks into groups of GROUP_BLOCKS.
  3. The records of a group are permuted: `Groups.window`, 8 bytes per record of one window.
  4. The permuted records are laid out down the *columns* of the window: a column holds the cells of one row of the
     batch, step after step.

A group fills few rows, so a host that needs only some rows reads only some groups. But with many hosts a host needs
less than a group, and groups span hosts: 8 hosts together read the dataset about 1.2 times an epoch, 64 hosts 3 times,
512 hosts 17 times (`benchmarks/read_amplification.py`). Therefore version 2: `training.data.sampling.lanes`.

`training.data.tf.order` is the same in TensorFlow operations.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from training.data.sampling.blocks import Geometry, Ints, block_permutation
from training.data.sampling.random_bits import stream

GROUP_BLOCKS = 8  # blocks per group


@dataclass(frozen=True)
class Groups:
    """The training order of version 1, for batches of `batch` rows. An `order.Order`."""

    geometry: Geometry
    seed: int
    batch: int

    @property
    def records(self) -> int:
        """In the dataset."""
        return self.geometry.records

    @property
    def block(self) -> int:
        """Records per block."""
        return self.geometry.block

    @property
    def blocks(self) -> int:
        """Number of blocks that are permuted."""
        return self.geometry.blocks

    @property
    def windows(self) -> int:
        """Number of windows per epoch."""
        return self.geometry.windows

    def bounds(self, epoch: int, number: int) -> tuple[int, int]:
        """The first index of a window in its epoch, and how many cells it has."""
        start = number * self.geometry.window
        return start, min(self.geometry.window, self.records - start)

    def window(self, epoch: int, number: int) -> Ints:
        """The records of a window in the order in which steps use them. (cells,)"""
        return _window(self, epoch, number)


@lru_cache(maxsize=8)
def _window(order: Groups, epoch: int, number: int) -> Ints:
    """`Groups.window`, kept for the batches of the same window."""
    shape = order.geometry
    start, size = order.bounds(epoch, number)
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
