"""The interface between a dataset's shards and the reader: records by number, checked and decoded.

`training.data.tf.record_source` is the same in TensorFlow operations. What happens to a record whose CRC is wrong is
the option `on_corrupt`:

  stop   raise `Corrupt` with shard, record and byte offset
  skip   replace it by the next good record of the same block (after the last comes the first), and count it. The same
         damage gives the same replacement on every host, whatever was read before. A block without a good record
         stops the run.
"""

from __future__ import annotations

from typing import Any, Literal, Protocol

import numpy.typing as npt

from training import storage
from training.errors import BadInput
from training.storage import Stat

OnCorrupt = Literal["stop", "skip"]
Arrays = dict[str, npt.NDArray[Any]]


class RecordSource(Protocol):
    """Records 0 .. records-1 by number. Thread-safe.

    Attributes:
        records: how many there are.
        record_bytes: the size of one in a shard; a mean where sizes vary.
        unit: how many records are stored, and so read, together; 0: each by itself.
    """

    records: int
    record_bytes: int
    unit: int

    def empty(self, count: int) -> Arrays:
        """Uninitialised arrays for `count` records: feature -> (count, length) or (count, 1)."""
        ...

    def read(self, first: int, last: int, block: int) -> Arrays:
        """Records [first, last), checked.

        Args:
            first: a multiple of `block`.
            last: exclusive.
            block: replacements of bad records come from the same `block` records.

        Raises:
            BadInput: a record is damaged (Corrupt), or a shard has changed since it was opened.
            StorageError: storage can't be read.
        """
        ...

    def skipped(self) -> int:
        """How many different bad records have been replaced so far."""
        ...


def replacement_row(row: int, bad: set[int], block: int, count: int, error: BadInput) -> int:
    """The row that replaces a bad one: the next good row of its block.

    Args:
        row: the bad row, counted from the first of `count` rows, which begins a block.
        bad: all bad rows.
        block: rows per block; the last block may be shorter.
        count: rows in all.
        error: is raised where the block has no good row.
    """
    begin = row - row % block
    size = min(block, count - begin)
    for step in range(1, size):
        other = begin + (row - begin + step) % size
        if other not in bad:
            return other
    raise error


def read_shard_bytes(url: str, start: int, end: int, stat: Stat, record: int) -> bytes:
    """Bytes [start, end) of a shard in the version of `stat`; `record` is for messages. Raises BadInput."""
    try:
        return storage.read(url, start, end, generation=stat.generation)
    except (storage.Changed, storage.NotFound) as error:
        raise BadInput(f"{error} (record {record} of this shard was to be read)") from error
