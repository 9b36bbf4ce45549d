"""The order of records: which record is in which row of which batch; and the length bucket of every step. Pure
functions of (records, seed, batch size, step).

`training.data` has the glossary of indices.

Reading single records in random order would cost one request each, so records are read in blocks: an order permutes
whole blocks and mixes the records of a window of them. It divides the rows of a batch into *lanes* of equal size, so
that each host reads (nearly) only what it uses: at most MAX_LANES, a divisor of the batch size. The number of lanes
follows from the batch and the dataset, not from the hosts; hosts hold consecutive rows, so consecutive lanes. An epoch
is shuffled in these stages, which all depend on seed and epoch:

  1. Permute all full blocks of the dataset: `block_permutation`, 8 bytes of state per block.
  2. Deal the permuted blocks to windows, consecutive ones, the same number to every lane of a window. The rest that
     can't be dealt evenly (less than a block a lane, and the dataset's last, shorter block) belongs to one window, the
     *uneven* one, another one in each epoch.
  3. Each lane of a window draws its rows, for all steps of the window, from its own blocks in random order:
     `TrainingOrder.window`, 8 bytes per record of one window. In the uneven window, lanes begin and end within blocks.
  4. An epoch of one window (some 64 MB) has no lanes: all of its records are permuted. Every host reads such a dataset
     once, for all epochs.

Reading cost: lanes are whole blocks, so one host reads a block, except where the uneven window's lanes share one, or
where hosts divide a lane. All hosts together read 1.2 GB of rows of 128 tokens 1.00 times an epoch with 8 hosts, 1.01
times with 64, 1.05 times with 512, when a batch is 4,096 rows (`benchmarks/read_amplification.py`). Lanes stay whole
while the rows of a lane divide a block; `training_order` chooses blocks so, unless a lane has more than two blocks of
rows in each step.

Quality: each epoch is a permutation of all records, and a record may be at any place of the epoch. Two records of one
block are in the same window. A window holds at least WINDOW_BLOCKS / 2 blocks, and a batch takes equally many records
from every lane: the records of one block that meet in a batch of B rows are about B over the blocks of the window, at
most the rows of a lane where a lane has one block, whatever the size of the dataset. All others come from other random
blocks. Rows of one lane, so often those of one device, come from few blocks; only the global batch is mixed.

The constants are part of what a seed means: changing one changes every order, and needs another ORDER_VERSION, which is
part of a checkpoint's identity.

Labelled rows have a stream of records for each length bucket. In epoch e, counted over the whole dataset, bucket b
gives as many batches as bring it to floor((e + 1) * N_b / B) in all, where N_b are its records and B the global batch
size. So each record is seen once per epoch, except for the batch that spans two epochs. The order of an epoch's batches
is shuffled. A *step* k counts the batches of all buckets; a bucket's *batch number* counts its own.
"""

from bisect import bisect_right
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import numpy.typing as npt

from training.data.sampling.random_bits import Ints, stream

ORDER_VERSION = 2
WINDOW_BLOCKS = 256  # blocks per window
BLOCK_BYTES = 256 << 10  # the largest block
MIN_BLOCK = 64  # records in the smallest block
MAX_LANES = 512


@dataclass(frozen=True)
class TrainingOrder:
    """Shuffled epochs, for batches of `batch` rows."""

    records: int  # in the dataset
    block: int  # records per block
    lanes: int  # number of lanes, a divisor of `batch`
    depth: int  # blocks of a lane in a window, at most
    seed: int  # of the permutations
    batch: int  # rows of a global batch

    @property
    def blocks(self) -> int:  # that are permuted: all full ones
        return self.records // self.block

    @property
    def blocks_per_lane(self) -> int:  # in an epoch
        return self.blocks // self.lanes

    @property
    def windows(self) -> int:  # in an epoch
        return max(1, -(-self.blocks_per_lane // self.depth))

    @property
    def rows_per_lane(self) -> int:  # in each step
        return self.batch // self.lanes

    @property
    def leftover_blocks(self) -> int:  # full ones that can't be dealt evenly
        return self.blocks - self.blocks_per_lane * self.lanes

    @property
    def leftover_records(self) -> int:  # those of the leftover blocks and of the last, shorter block
        return self.records - self.blocks_per_lane * self.lanes * self.block

    def uneven_window(self, epoch: int) -> int:
        """Returns the number of the window that holds an epoch's leftover records."""
        return int(stream(self.seed, "uneven", epoch, 1)[0] >> np.uint64(1)) % self.windows

    def bounds(self, epoch: int, number: int) -> tuple[int, int]:
        """Returns the first index of a window in its epoch, and how many cells it has."""
        uneven, cells = self.uneven_window(epoch), self.lanes * self.block
        start, stop = (
            border * self.blocks_per_lane // self.windows * cells + (self.leftover_records if border > uneven else 0)
            for border in (number, number + 1)
        )
        return start, stop - start

    def window(self, epoch: int, number: int) -> Ints:
        """Returns which records a window has, by number, in the order in which steps use them: (cells,), read-only."""
        return _shuffled_window(self, epoch, number)


def training_order(records: int, record_bytes: int, *, seed: int, batch: int) -> TrainingOrder:
    """Returns the order of a dataset with so many records, 1 or more, of this size in their shards. `seed`: of
    the run, or of a length bucket; `batch`: rows of a global batch."""
    assert records > 0
    # A window is WINDOW_BLOCKS * BLOCK_BYTES with any number of lanes: more lanes have smaller blocks.
    lanes = max(count for count in range(1, min(MAX_LANES, batch) + 1) if batch % count == 0)
    block_bytes = WINDOW_BLOCKS * BLOCK_BYTES // max(lanes, WINDOW_BLOCKS)
    # Fewer records in a small dataset, so that it has many blocks.
    block = min(max(1, block_bytes // record_bytes), max(MIN_BLOCK, -(-records // WINDOW_BLOCKS)))
    rows = batch // lanes  # of a lane in each step: a block has whole steps
    if block >= rows:
        block = block // rows * rows
    elif rows <= 2 * block:
        block = rows
    return TrainingOrder(records, block, lanes, max(1, WINDOW_BLOCKS // lanes), seed, batch)


@lru_cache(maxsize=4)
def block_permutation(seed: int, epoch: int, count: int) -> Ints:
    """Returns the blocks in an epoch's order, (count,), read-only; computes it once for all its windows."""
    permuted: Ints = np.argsort(stream(seed, "blocks", epoch, count), kind="stable").astype(np.int64)
    permuted.setflags(write=False)
    return permuted


@lru_cache(maxsize=8)
def _shuffled_window(order: TrainingOrder, epoch: int, number: int) -> Ints:
    """Computes `TrainingOrder.window`, cached and read-only: each lane's rows draw from its own shuffled blocks; if an
    epoch is one window, all rows from all blocks."""
    start, size = order.bounds(epoch, number)
    steps, longer = divmod(size, order.batch)
    begin = (epoch * order.records + start) % order.batch  # the row of cell 0

    def ranks(row: Ints) -> Ints:
        """Counts the cells in the rows before each given row: `longer` rows, from `begin` on, have one step more."""
        around = np.minimum(row, max(0, begin + longer - order.batch))  # rows that wrap behind the last one
        return row * steps + np.clip(row - begin, 0, longer) + around

    # By (row, step): the cells of one row, step after step, then those of the next row. Lanes are consecutive.
    step, column = np.divmod(np.arange(size, dtype=np.int64), order.batch)  # (cells,), (cells,)
    rank = ranks((begin + column) % order.batch) + step  # (cells,)

    # Permute within lanes: sort by (lane, random). A tie of random numbers is rare and changes only its own pair.
    random = stream(order.seed, "lanes", epoch, size, number)  # (cells,)
    borders = ranks(np.arange(order.lanes + 1) * order.rows_per_lane)  # (lanes + 1,) ranks
    if order.windows == 1:
        borders = np.array([0, size])
    lane = np.repeat(np.arange(len(borders) - 1), np.diff(borders))  # (cells,), of each rank
    position = np.lexsort((random, lane))[rank]  # (cells,) in the window's sequence of permuted blocks

    # From that sequence to records. The dataset's last, shorter block is behind the full ones of the uneven window.
    first = number * order.blocks_per_lane // order.windows * order.lanes  # full blocks in the windows before
    first += order.leftover_blocks if number > order.uneven_window(epoch) else 0
    full = block_permutation(order.seed, epoch, order.blocks)[first : first + size // order.block]
    slot, inner = np.divmod(position, order.block)
    records: Ints = np.append(full, order.blocks)[slot] * order.block + inner
    records.setflags(write=False)
    return records


def split_places(order: TrainingOrder, first: int, last: int) -> Iterator[tuple[int, int, int, int]]:
    """Cuts the places [first, last), which count rows through all epochs, at the borders of windows and epochs. Yields
    (epoch, window, start, stop) for each part: cells [start, stop) of the window."""
    while first < last:
        epoch, number, start = locate(order, first)
        stop = min(order.bounds(epoch, number)[1], start + last - first)
        yield epoch, number, start, stop
        first += stop - start


def locate(order: TrainingOrder, place: int) -> tuple[int, int, int]:
    """Returns the epoch of a place (a row of the endless stream), the number of its window, and its cell there."""
    epoch, index = divmod(place, order.records)
    number = bisect_right(range(order.windows), index, key=lambda window: order.bounds(epoch, window)[0]) - 1
    return epoch, number, index - order.bounds(epoch, number)[0]


def host_rows(batch: int, host: int, hosts: int) -> tuple[int, int]:
    """Returns the rows [first, last) of a global batch of `batch` rows that host number `host` of `hosts` holds."""
    return host * batch // hosts, (host + 1) * batch // hosts


def cells_of_rows(
    order: TrainingOrder, batch: int, epoch: int, number: int, first: int, last: int
) -> npt.NDArray[np.bool_]:
    """Returns for each cell of a window whether it is in rows [first, last) of its batch of `batch` rows. (cells,)"""
    start, size = order.bounds(epoch, number)
    row = (epoch * order.records + start + np.arange(size)) % batch  # (cells,)
    return (row >= first) & (row < last)


def group_lengths(records_of_length: Mapping[int, int], at_least: int) -> list[list[int]]:
    """Joins row lengths to buckets: shorter ones to longer ones until a bucket has `at_least` records.
    `records_of_length` (row length -> records) is ascending; the longest lengths join the bucket before when they have
    fewer. Returns the lengths of each bucket, ascending. A bucket's rows are padded to its last length."""
    groups: list[list[int]] = [[]]
    for length in records_of_length:
        groups[-1].append(length)
        if sum(records_of_length[member] for member in groups[-1]) >= at_least:
            groups.append([])
    rest = groups.pop()
    if rest and groups:
        groups[-1] += rest
    elif rest:
        groups = [rest]
    return groups


def batch_lengths(records_of_length: Mapping[int, int], at_least: int) -> tuple[int, ...]:
    """Returns the row lengths of batches, ascending: the longest of each group of `group_lengths`."""
    return tuple(group[-1] for group in group_lengths(records_of_length, at_least))


def batch_of_step(records: tuple[int, ...], batch: int, seed: int, k: int) -> tuple[int, int]:
    """Returns the bucket of step k, and which of that bucket's batches it takes, from 0. records: of each bucket."""
    if len(records) == 1:
        return 0, k
    epoch = max(0, k * batch // sum(records) - 1)
    while _first_step(records, batch, epoch + 1) <= k:
        epoch += 1
    while _first_step(records, batch, epoch) > k:
        epoch -= 1
    order, index = epoch_order(records, batch, seed, epoch), k - _first_step(records, batch, epoch)
    bucket = int(order[index])
    return bucket, epoch * records[bucket] // batch + int(np.count_nonzero(order[:index] == bucket))


@lru_cache(maxsize=4)
def epoch_order(records: tuple[int, ...], batch: int, seed: int, epoch: int) -> Ints:
    """Returns the bucket of each step of an epoch, shuffled; records that fill no batch go to the next. (steps,)"""
    counts = [(epoch + 1) * count // batch - epoch * count // batch for count in records]
    order = np.repeat(np.arange(len(records)), counts)  # (steps,)
    shuffled: Ints = order[np.argsort(stream(seed, "buckets", epoch, len(order)), kind="stable")]
    return shuffled


def _first_step(records: tuple[int, ...], batch: int, epoch: int) -> int:
    """Returns the first step of an epoch. records: of each bucket."""
    return sum(epoch * count // batch for count in records)
