"""The order of records: which record stands in which row of which batch. Pure functions of (records, seed, batch size).

Indices used everywhere in training.data
  record    0 .. N-1, counted through the shards in the manifest's order; never changes
  step k    0, 1, 2, ...; its global batch is rows 0 .. B-1
  place     k * B + row: a batch's rows in one endless stream of epochs, so a batch may span two epochs and nothing is
  dropped or repeated epoch     place // N, and `index` = place % N within it
  block     `block` neighbouring records; what is read at once
  window    the stretch of an epoch that is shuffled together: about `WINDOW_BLOCKS` blocks
  cell      an index counted from its window's start

How an epoch is shuffled (every step of it depends on seed and epoch)
  1. The blocks of the dataset are permuted, all of them.                                     blocks():  8 bytes of
    state a block
  2. The permuted blocks are cut into windows, and each window's blocks into groups of GROUP_BLOCKS.
  3. The records of a group are permuted.                                                     window():  8 bytes a
    record of one window
  4. Groups are laid down the *columns* of the window: a column holds the cells of one row of the batch, step after
    step.

Why: reading single records in a random order costs one request each. Here a window costs about WINDOW_BLOCKS requests
for some 60 MB, for hundreds of steps. And because a group fills few rows, a host that needs only some rows reads only
some groups: all hosts together read the dataset about once an epoch, not once each.

How good it is: each epoch is a permutation of all records. A record may land in any place of the epoch. Two records of
one block end up in the same window, and in the same batch with probability of about B / window: beside a record stand
on average B / 256 others of its own block, whatever the size of the dataset, and otherwise records of blocks from
anywhere. A shuffle buffer of the window's size over files read in order would take *all* its records from one stretch
of the dataset. Datasets of up to GROUP_BLOCKS * MIN_BLOCK records are one group, so their permutation is uniform.

The constants are part of what a seed means: changing one changes every order. ORDER_VERSION goes into checkpoints for
that reason.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import numpy.typing as npt

from training.data.sampling.random_bits import stream

ORDER_VERSION = 1
WINDOW_BLOCKS = 256
GROUP_BLOCKS = 8
BLOCK_BYTES = 256 << 10
MIN_BLOCK = 64

Ints = npt.NDArray[np.int64]


@dataclass(frozen=True)
class Geometry:
    """How a dataset is cut. Depends on the dataset alone, so that every host count sees the same order."""

    records: int
    block: int  # records a block; the last block may be shorter
    window: int  # indices a window; the last window of an epoch may be shorter

    @property
    def blocks(self) -> int:
        return -(-self.records // self.block)

    @property
    def windows(self) -> int:
        return -(-self.records // self.window)


def geometry(records: int, record_bytes: int, unit: int = 0) -> Geometry:
    """Blocks of at most BLOCK_BYTES, fewer for a small dataset, so that it too has many; windows of equal size.

    With a `unit`, blocks are whole units: what is stored together is read together."""
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
    """The training order."""

    geometry: Geometry
    seed: int
    batch: int  # B

    def window(self, epoch: int, number: int) -> Ints:
        """The records of a window in the order in which steps use them. (cells,)"""
        return _window(self, epoch, number)


@dataclass(frozen=True)
class Sequential:
    """Record order, for evaluation: every epoch is 0, 1, 2, ..."""

    geometry: Geometry

    def window(self, epoch: int, number: int) -> Ints:
        """As `Shuffled.window`."""
        start = number * self.geometry.window
        return np.arange(start, min(start + self.geometry.window, self.geometry.records))


Order = Shuffled | Sequential


@dataclass(frozen=True)
class Stretch:
    """A run of consecutive places inside one window: cells [start, stop) of window `number` of `epoch`."""

    epoch: int
    number: int
    start: int
    stop: int


def stretches(geometry: Geometry, first: int, last: int) -> list[Stretch]:
    """The places [first, last) cut at the borders of windows and epochs."""
    found = []
    while first < last:
        epoch, index = divmod(first, geometry.records)
        number, cell = divmod(index, geometry.window)
        size = min(geometry.window, geometry.records - number * geometry.window)
        stop = min(size, cell + last - first)
        found.append(Stretch(epoch, number, cell, stop))
        first += stop - cell
    return found


def batch(order: Shuffled, k: int) -> tuple[Ints, Ints]:
    """Epoch and record of every row of global batch k: (B,), (B,)"""
    parts = stretches(order.geometry, k * order.batch, (k + 1) * order.batch)
    epochs = np.concatenate([np.full(part.stop - part.start, part.epoch) for part in parts])
    records = np.concatenate([order.window(part.epoch, part.number)[part.start : part.stop] for part in parts])
    return epochs, records


def rows(batch: int, host: int, hosts: int) -> tuple[int, int]:
    """The rows [first, last) of a global batch that host number `host` of `hosts` holds."""
    return host * batch // hosts, (host + 1) * batch // hosts


def cells_of_rows(
    order: Shuffled | Sequential, batch: int, epoch: int, number: int, first: int, last: int
) -> npt.NDArray[np.bool_]:
    """Which cells of a window fall into rows [first, last) of their batches. (cells,)"""
    place = epoch * order.geometry.records + number * order.geometry.window
    count = len(order.window(epoch, number))
    row = (place + np.arange(count)) % batch
    return (row >= first) & (row < last)


@lru_cache(maxsize=4)
def blocks(seed: int, epoch: int, count: int) -> Ints:
    """The permutation of all blocks in an epoch: (count,)"""
    return np.argsort(stream(seed, "blocks", epoch, count), kind="stable").astype(np.int64)


@lru_cache(maxsize=8)
def _window(order: Shuffled, epoch: int, number: int) -> Ints:
    shape = order.geometry
    start = number * shape.window
    size = min(shape.window, shape.records - start)
    cell = np.arange(size, dtype=np.int64)

    # Down the columns: the cells of one row, step after step, then those of the next row. The first `longer` rows have
    # one step more.
    steps, longer = divmod(size, order.batch)
    step, row = np.divmod(cell, order.batch)
    column = row * steps + np.minimum(row, longer) + step  # (cells,)

    # Permute within groups: sort by (group, random), the random part unique enough that a tie changes nothing but its
    # own pair.
    group = cell // (GROUP_BLOCKS * shape.block)
    random = stream(order.seed, "records", epoch, size, number)
    shuffled = np.lexsort((random, group))
    position = start + shuffled[column]  # in the epoch's sequence of permuted blocks

    # From that sequence to records. All blocks are full but the last one, which stands somewhere in the middle.
    permuted = blocks(order.seed, epoch, shape.blocks)
    missing = shape.blocks * shape.block - shape.records
    short = int(np.flatnonzero(permuted == shape.blocks - 1)[0])
    position = np.where(position < (short + 1) * shape.block - missing, position, position + missing)
    slot, inner = np.divmod(position, shape.block)
    records: Ints = permuted[slot] * shape.block + inner
    records.setflags(write=False)
    return records
