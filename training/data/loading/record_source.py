"""Record sources: the records of a dataset's shards by number, checked and decoded, for the reader.

`training.data.tf.record_source` is the same in TensorFlow operations. The option `on_corrupt` decides what happens to a
record whose CRC is wrong:

  stop   raise `Corrupt` with shard, record and byte offset
  skip   replace it by the next good record of the same block (after the last comes the first), and count it. In a block
         without a good record replace each record by one of the next block that has a good one. The same damage gives
         the same replacements on every host and in both pipelines, whatever was read before. Only a dataset without a
         good record stops the run.

Failure model: shards may be missing, short or flipped at any byte, and may be replaced while they are read. Every read
is pinned to the generation that was listed at the start, and every record's CRC is checked.
"""

import bisect
import itertools
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal, Protocol

import numpy as np
import numpy.typing as npt

from training import storage
from training.data.formats.dataset import Dataset, Shard, find_shards
from training.data.formats.tfrecord import Corrupt
from training.data.sampling.masking import SpecialTokens
from training.data.sampling.order import host_rows
from training.errors import BadInput

OnCorrupt = Literal["stop", "skip"]
Arrays = dict[str, npt.NDArray[Any]]
REPLACED = "replaced"  # (n, 1) bool, beside the features: another record has the place of a damaged one
NO_GOOD_RECORD = "the dataset has no good record that could be taken instead"

# Loads records [first, last): the features, and the error of each bad row.
Load = Callable[[int, int], tuple[Arrays, Mapping[int, BadInput]]]


@dataclass(frozen=True)
class HostSlice:
    """The rows of each global batch that one host reads, and how. Used by the numpy and the TensorFlow pipeline."""

    tokenizer: SpecialTokens  # of the tokenizer that wrote the ids
    global_batch_size: int  # rows of a batch, over all hosts
    host: int = 0  # this host's number, 0 .. hosts-1
    hosts: int = 1  # that read the batch
    on_corrupt: OnCorrupt = "stop"  # what to do about a damaged record

    def rows(self) -> tuple[int, int]:
        """Returns this host's rows, [first, last), of each global batch. Raises BadInput if it is not divisible."""
        assert 0 <= self.host < self.hosts
        if self.global_batch_size < 1 or self.global_batch_size % self.hosts:
            raise BadInput(
                f"the global batch size {self.global_batch_size} can't be divided among {self.hosts} hosts: "
                f"use a multiple of {self.hosts}"
            )
        return host_rows(self.global_batch_size, self.host, self.hosts)


class RecordSource(Protocol):
    """Records 0 .. records-1 by number. Thread-safe."""

    records: int  # number of records
    record_bytes: int  # the size of one in a shard; the mean size in the recipe layout

    @abstractmethod
    def empty(self, count: int) -> Arrays:
        """Returns uninitialised arrays for `count` records: feature (or REPLACED) -> (count, length) or (count, 1)."""
        ...

    def read(self, first: int, last: int, block: int) -> Arrays:
        """Reads records [first, last) and checks them. The column REPLACED marks those that replace bad ones.

        Args:
            first: a multiple of `block`.
            last: exclusive.
            block: replacements of bad records come from the same `block` records, if one of them is good.

        Raises:
            BadInput: a record is damaged (Corrupt), or a shard has changed since it was listed.
            StorageError: storage can't be read.
        """
        ...


class ShardSource(RecordSource, ABC):
    """A `RecordSource` over some shards of a dataset; subclasses know the layout of their records."""

    def __init__(self, dataset: Dataset, length: int, vocabulary: int, on_corrupt: OnCorrupt) -> None:
        """Checks every shard's size with one listing; reads no record yet. Raises BadInput.

        Args:
            dataset: of the subclass's layout.
            length: only shards with rows of so many tokens are read.
            vocabulary: ids from here on are refused.
            on_corrupt: what to do about a damaged record.
        """
        self.dataset, self.length, self.vocabulary, self.on_corrupt = dataset, length, vocabulary, on_corrupt
        self.shards = [shard for shard in dataset.shards if shard.length == length and shard.records]
        self.stats = find_shards(dataset)  # by the shard's URL
        self._starts = list(itertools.accumulate((shard.records for shard in self.shards), initial=0))
        self.records = self._starts[-1]

    @abstractmethod
    def _load(self, first: int, last: int) -> tuple[Arrays, dict[int, BadInput]]:
        """Reads the features of records [first, last), and the error of each bad row, 0 for `first`."""

    def read(self, first: int, last: int, block: int) -> Arrays:
        assert 0 <= first < last <= self.records
        return read_replacing(self._load, first, last, block=block, records=self.records, on_corrupt=self.on_corrupt)

    def locate(self, record: int) -> tuple[Shard, int]:
        """Returns the shard of a record, and the record's number in it."""
        shard_number = bisect.bisect_right(self._starts, record) - 1
        return self.shards[shard_number], record - self._starts[shard_number]

    def split_by_shard(self, first: int, last: int) -> Iterator[tuple[Shard, int, int]]:
        """Yields (shard, first, last) for each shard that holds some of the records [first, last), by their numbers in
        that shard."""
        while first < last:
            shard, number = self.locate(first)
            stop = min(shard.records, number + last - first)
            yield shard, number, stop
            first += stop - number

    def url(self, shard: Shard) -> str:
        return self.dataset.shard_url(shard)

    def read_bytes(self, shard: Shard, start: int, end: int, record: int) -> bytes:
        """Reads bytes [start, end) of a shard. Raises BadInput, with `record`, if it changed since it was listed."""
        try:
            data = storage.read(self.url(shard), start, end, generation=self.stats[self.url(shard)].generation)
        except (storage.Changed, storage.NotFound) as error:
            raise BadInput(f"{error} (while reading record {record} of this shard)") from error
        if len(data) != end - start:
            raise BadInput(
                f"{self.url(shard)} ends at byte {start + len(data)}, inside record {record}: it was cut while in use"
            )
        return data


def read_replacing(load: Load, first: int, last: int, *, block: int, records: int, on_corrupt: OnCorrupt) -> Arrays:
    """Reads records [first, last) with REPLACED; if `on_corrupt` is "skip", replaces a bad one by a good one of the
    same block, or of the next block that has one. `first` begins a block of `block` records; the source has `records`.
    Raises BadInput when a record is bad, and `on_corrupt` is "stop" or no record is good."""
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
    """Returns the rows [first, last) of one block with another record in the place of each in `bad` (row -> error): of
    the same block, or else of the next that has a good one. Raises BadInput if no record is good."""
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
