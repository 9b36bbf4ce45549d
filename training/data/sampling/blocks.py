"""Blocks: records that are read together, and their permutation in an epoch. Pure functions.

Reading single records in random order costs one request each, so an order permutes whole blocks, and mixes the records
of a window of them. The constants are part of what a seed means: see `training.data.sampling.order`.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import numpy.typing as npt

from training.data.sampling.random_bits import stream

WINDOW_BLOCKS = 256  # blocks per window
BLOCK_BYTES = 256 << 10  # the largest block
MIN_BLOCK = 64  # records in the smallest block

Ints = npt.NDArray[np.int64]


@dataclass(frozen=True)
class Geometry:
    """How a dataset is cut into blocks and windows of equal size. Depends on the dataset alone.

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
    block = block_records(records, record_bytes, BLOCK_BYTES)
    if unit:
        block = max(unit, block // unit * unit)
    windows = -(-records // (block * WINDOW_BLOCKS))
    window = -(-records // (windows * block)) * block
    return Geometry(records, block, window)


def block_records(records: int, record_bytes: int, block_bytes: int) -> int:
    """Records per block of at most `block_bytes`; fewer in a small dataset, so that it has many blocks, too."""
    assert records > 0
    return min(max(1, block_bytes // record_bytes), max(MIN_BLOCK, -(-records // WINDOW_BLOCKS)))


@lru_cache(maxsize=4)
def block_permutation(seed: int, epoch: int, count: int) -> Ints:
    """The permutation of all blocks in an epoch, computed once for all its windows. (count,)"""
    permuted: Ints = np.argsort(stream(seed, "blocks", epoch, count), kind="stable").astype(np.int64)
    permuted.setflags(write=False)
    return permuted
