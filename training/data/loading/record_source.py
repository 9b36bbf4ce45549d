"""The interface between a dataset's shards and the reader: records by number, checked and decoded.

`training.data.tf.record_source` is the same in TensorFlow operations. What happens to a record whose CRC is wrong is
the option `on_corrupt`:

  stop   raise `Corrupt` with shard, record and byte offset
  skip   replace it by the next good record of the same block (after the last comes the first), and count it. In a block
         without a good record (one damaged gzip member may be a whole block) each record is replaced by one of the next
         block that has a good one. The same damage gives the same replacements on every host and in both pipelines,
         whatever was read before. Only a dataset without a good record stops the run.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Literal, Protocol

import numpy as np
import numpy.typing as npt

from training import storage
from training.data.formats.tfrecord import Corrupt
from training.errors import BadInput
from training.storage import Stat

OnCorrupt = Literal["stop", "skip"]
Arrays = dict[str, npt.NDArray[Any]]
REPLACED = "replaced"  # (n, 1) bool, beside the features: a bad record whose place another has taken
NO_GOOD_RECORD = "the dataset has no good record that could be taken instead"

# Loads records [first, last): the features, and what is wrong with bad rows.
Load = Callable[[int, int], tuple[Arrays, Mapping[int, BadInput]]]


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
        """Uninitialised arrays for `count` records: feature -> (count, length) or (count, 1), and REPLACED."""
        ...

    def read(self, first: int, last: int, block: int) -> Arrays:
        """Records [first, last), checked, with REPLACED.

        Args:
            first: a multiple of `block`.
            last: exclusive.
            block: replacements of bad records come from the same `block` records, as far as one of them is good.

        Raises:
            BadInput: a record is damaged (Corrupt), or a shard has changed since it was opened.
            StorageError: storage can't be read.
        """
        ...


def read_replacing(load: Load, first: int, last: int, *, block: int, records: int, on_corrupt: OnCorrupt) -> Arrays:
    """Records [first, last) with REPLACED: each bad one replaced, see the module's docstring.

    Args:
        load: loads records of the source.
        first: begins a block.
        last: exclusive.
        block: records per block; the last block may be shorter.
        records: in the source.
        on_corrupt: what to do about a bad record.

    Raises:
        BadInput: a record is bad, and `on_corrupt` is "stop" or no record is good.
    """
    arrays, bad = load(first, last)
    if bad and on_corrupt == "stop":
        raise bad[min(bad)]
    replaced = np.zeros((last - first, 1), np.bool_)
    replaced[list(bad)] = True
    if bad:
        blocks = []
        for begin in range(0, last - first, block):
            end = min(begin + block, last - first)
            rows = {name: values[begin:end] for name, values in arrays.items()}
            bad_rows = {row - begin: error for row, error in bad.items() if begin <= row < end}
            blocks.append(_replace_bad(load, rows, bad_rows, first + begin, first + end, records))
        arrays = {name: np.concatenate([rows[name] for rows in blocks]) for name in arrays}
    return {**arrays, REPLACED: replaced}


def _replace_bad(load: Load, rows: Arrays, bad: Mapping[int, BadInput], first: int, last: int, records: int) -> Arrays:
    """The rows [first, last) of one block with another record in the place of each bad one. Raises BadInput."""
    size = last - first
    candidates, bad_candidates, count, tried = rows, bad, size, 0
    begin = first
    while len(bad_candidates) == count:
        tried += count
        if tried >= records:
            error = bad[min(bad)]
            raise error.without_replacement(NO_GOOD_RECORD) if isinstance(error, Corrupt) else error
        begin = (begin + count) % records
        count = min(size, records - begin)
        candidates, bad_candidates = load(begin, begin + count)
    good = np.array(sorted(set(range(count)) - set(bad_candidates)))  # (good rows,)
    taken = good[np.searchsorted(good, np.arange(size) % count) % len(good)]  # (size,)
    return {name: values[taken] for name, values in candidates.items()}


def read_shard_bytes(url: str, start: int, end: int, stat: Stat, record: int) -> bytes:
    """Bytes [start, end) of a shard in the version of `stat`; `record` is for messages. Raises BadInput."""
    try:
        return storage.read(url, start, end, generation=stat.generation)
    except (storage.Changed, storage.NotFound) as error:
        raise BadInput(f"{error} (record {record} of this shard was to be read)") from error
