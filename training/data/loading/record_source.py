"""Record sources: the records of a dataset's shards by number, checked and decoded, for the reader.

In the compact layout all records of a length have the same size, so offsets are arithmetic (`FixedShards`). In the
public recipe's (`RecipeShards`) they vary in size: each process has to read a shard whole to find where its records
start, when one of them is first needed.

The option `on_corrupt` decides what happens to a record whose CRC is wrong:

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
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any, Literal, Protocol

import numpy as np
import numpy.typing as npt

from training import storage
from training.data.formats import fixed_records, recipe_layout, tfrecord
from training.data.formats.dataset import Dataset, Shard, find_shards
from training.data.formats.tfrecord import HEADER, Corrupt
from training.data.sampling.masking import SpecialTokens
from training.data.sampling.order import host_rows
from training.errors import BadInput
from training.storage import Stat

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
        """Returns this host's rows, [first, last), of each global batch. Raises BadInput if hosts can't share it."""
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
        """Returns uninitialised arrays for `count` records: feature -> (count, its numbers); REPLACED -> (count, 1)."""
        ...

    def read(self, first: int, last: int, block: int) -> Arrays:
        """Reads and checks records [first, last). The column REPLACED marks those that replace bad ones, from the same
        `block` records if one of them is good. `first` is a multiple of `block`. Raises BadInput for a bad record
        (Corrupt) that may not or can't be replaced, or a shard that changed since it was listed; and StorageError."""
        ...


class ShardSource(RecordSource, ABC):
    """A `RecordSource` over some shards of a dataset; subclasses know the layout of their records."""

    def __init__(self, dataset: Dataset, length: int, vocabulary: int, on_corrupt: OnCorrupt) -> None:
        """Checks every shard's size with one listing; reads no record yet. Only shards with rows of `length` tokens are
        read, where ids from `vocabulary` on are refused. Raises BadInput, StorageError."""
        self.dataset, self.length, self.vocabulary, self.on_corrupt = dataset, length, vocabulary, on_corrupt
        self.shards = [shard for shard in dataset.shards if shard.length == length and shard.records]
        self.stats = find_shards(dataset)  # by the shard's URL
        self._starts = list(itertools.accumulate((shard.records for shard in self.shards), initial=0))
        self.records = self._starts[-1]

    @abstractmethod
    def _load(self, first: int, last: int) -> tuple[Arrays, dict[int, BadInput]]:
        """Returns the features of records [first, last), and the error of each bad one by its row, 0 for `first`."""

    def read(self, first: int, last: int, block: int) -> Arrays:
        """Reads as `RecordSource.read`; replaces bad records only if `on_corrupt` is "skip"."""
        assert 0 <= first < last <= self.records
        return read_replacing(self._load, first, last, block=block, records=self.records, on_corrupt=self.on_corrupt)

    def locate(self, record: int) -> tuple[Shard, int]:
        """Returns the shard of a record, and the record's number in it."""
        shard_number = bisect.bisect_right(self._starts, record) - 1
        return self.shards[shard_number], record - self._starts[shard_number]

    def split_by_shard(self, first: int, last: int) -> Iterator[tuple[Shard, int, int]]:
        """Yields (shard, first, last), numbers of records in it, for each shard with some of records [first, last)."""
        while first < last:
            shard, number = self.locate(first)
            stop = min(shard.records, number + last - first)
            yield shard, number, stop
            first += stop - number

    def url(self, shard: Shard) -> str:
        return self.dataset.shard_url(shard)

    def read_bytes(self, shard: Shard, start: int, end: int, record: int) -> bytes:
        """Reads bytes [start, end) of a shard. Raises BadInput if it changed, or was deleted or cut, since it was
        listed, with `record`, a number in the shard, in the message; and StorageError."""
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
    """Reads records [first, last) by `load`, and adds REPLACED; if `on_corrupt` is "skip", replaces a bad one by a good
    one of the same block, or of the next block that has one. `first` begins a block of `block` records; the source has
    `records`. Raises BadInput when a record is bad, and `on_corrupt` is "stop" or no record is good."""
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


def open_source(dataset: Dataset, *, vocabulary: int | None = None, on_corrupt: OnCorrupt = "stop") -> RecordSource:
    """Opens the record source for a dataset's layout (of several row lengths only the longest); reads no record yet.
    Reading refuses ids from `vocabulary` on (None: the manifest's, and no limit in the recipe's layout). Raises
    BadInput when a shard is missing or is not the one that the manifest lists, and StorageError."""
    layout = RecipeShards if dataset.manifest.layout == "recipe" else FixedShards
    return layout(dataset, vocabulary=vocabulary, on_corrupt=on_corrupt)


class FixedShards(ShardSource):
    """The records of one row length."""

    def __init__(
        self,
        dataset: Dataset,
        *,
        length: int | None = None,
        vocabulary: int | None = None,
        on_corrupt: OnCorrupt = "stop",
    ) -> None:
        """Checks the shards as `ShardSource`, and that each has the size of its records; raises BadInput. Defaults: the
        dataset's sequence length, the manifest's vocabulary."""
        length, manifest = length or dataset.sequence_length, dataset.manifest
        super().__init__(dataset, length, vocabulary or manifest.vocabulary, on_corrupt)
        self._layout = fixed_records.record_layout(manifest.features, length)
        self.record_bytes = self._layout.size
        for shard in self.shards:
            if shard.bytes != shard.records * self.record_bytes:
                raise BadInput(
                    f"{self.url(shard)}: {shard.bytes} bytes can't be {shard.records} records of {self.record_bytes}"
                )

    def empty(self, count: int) -> Arrays:
        """Returns uninitialised arrays for `count` records, as `RecordSource.empty`."""
        columns = {
            column.name: np.empty((count, column.count), column.dtype.newbyteorder("="))
            for column in self._layout.columns
        }
        return {**columns, REPLACED: np.empty((count, 1), np.bool_)}

    def read(self, first: int, last: int, block: int) -> Arrays:
        """Reads as `RecordSource.read`; raises BadInput also for an id that the tokenizer does not have."""
        arrays = super().read(first, last, block)
        ids = arrays["input_ids"]  # (n, length)
        if int(ids.max()) < self.vocabulary and int(ids.min()) >= 0:
            return arrays
        row = int(np.flatnonzero(((ids >= self.vocabulary) | (ids < 0)).any(axis=1))[0])
        shard, number = self.locate(first + row)
        raise BadInput(
            f"{self.url(shard)}: record {number} has token id {int(ids[row].max())}, and the tokenizer has "
            f"{self.vocabulary} ids: the shards were written with another tokenizer; give that one, or write them again"
        )

    def _load(self, first: int, last: int) -> tuple[Arrays, dict[int, BadInput]]:
        """Returns the features of records [first, last), and the error of each bad one by its row, 0 for `first`."""
        size = self.record_bytes
        data = b"".join(
            self.read_bytes(shard, begin * size, end * size, begin)
            for shard, begin, end in self.split_by_shard(first, last)
        )
        bad = fixed_records.find_broken(self._layout, data)
        arrays: Arrays = {
            column.name: fixed_records.read_column(self._layout, data, column.name) for column in self._layout.columns
        }  # (n, count) each
        return arrays, {row: self._corrupt(first + row, data[row * size : (row + 1) * size]) for row in bad}

    def _corrupt(self, record: int, data: bytes) -> Corrupt:
        """Returns the error for a bad record with the bytes `data`."""
        shard, number = self.locate(record)
        reason = "its checksum (CRC-32C) does not match"
        if data[:HEADER] != self._layout.template[:HEADER]:
            reason = (
                "the checksum (CRC-32C) of its length does not match, or its length is not that of this dataset's "
                "records"
            )
        return Corrupt(self.url(shard), number, number * self.record_bytes, reason)


# Where the records of a shard start, by the shard's state; shared by all sources of this process.
_INDEXES: dict[Stat, Future[npt.NDArray[np.int64]]] = {}
_INDEX_LOCK = threading.Lock()


class RecipeShards(ShardSource):
    """The records of a folder in the public recipe's layout."""

    def __init__(self, dataset: Dataset, *, vocabulary: int | None = None, on_corrupt: OnCorrupt = "stop") -> None:
        """Checks the shards as `ShardSource`; raises BadInput. Without `vocabulary`, accepts ids up to 2**31 - 1."""
        super().__init__(dataset, dataset.sequence_length, vocabulary or 1 << 31, on_corrupt)
        self.record_bytes = -(-sum(shard.bytes for shard in self.shards) // self.records)

    def empty(self, count: int) -> Arrays:
        return {"input_ids": np.empty((count, self.length), np.int32), REPLACED: np.empty((count, 1), np.bool_)}

    def _load(self, first: int, last: int) -> tuple[Arrays, dict[int, BadInput]]:
        """Returns the ids of records [first, last), and the error of each damaged one by its row, 0 for `first`. Raises
        BadInput for an intact record that does not fit the dataset."""
        rows = np.zeros((last - first, self.length), np.int32)  # (n, length)
        bad: dict[int, BadInput] = {}
        row = 0
        for shard, begin, end in self.split_by_shard(first, last):
            offsets = self.offsets(shard)[begin : end + 1].tolist()
            data = self.read_bytes(shard, offsets[0], offsets[-1], begin)
            for number, (start, stop) in enumerate(itertools.pairwise(offsets), begin):
                framed, where = data[start - offsets[0] : stop - offsets[0]], (self.url(shard), number, start)
                try:
                    rows[row] = recipe_layout.decode_ids(framed, *where, self.length, self.vocabulary)
                except tfrecord.Corrupt as error:
                    bad[row] = error
                row += 1
        return {"input_ids": rows}, bad

    def offsets(self, shard: Shard) -> npt.NDArray[np.int64]:
        """Returns, (records + 1,), the byte at which each record of a shard starts, and last the shard's size. The
        first call in this process reads the whole shard; other threads and sources wait for it and share the result.
        Raises BadInput, StorageError."""
        stat = self.stats[self.url(shard)]
        with _INDEX_LOCK:
            is_new = stat not in _INDEXES
            index = _INDEXES.setdefault(stat, Future())
        if is_new:
            try:
                index.set_result(self._read_offsets(shard))
            except BaseException as error:
                with _INDEX_LOCK:
                    del _INDEXES[stat]  # the next caller tries again
                index.set_exception(error)
        return index.result()

    def _read_offsets(self, shard: Shard) -> npt.NDArray[np.int64]:
        """Computes `offsets` from the whole shard. Raises BadInput for a damaged header, also if `on_corrupt` is
        "skip", or another number of records than in the shard's name."""
        try:
            offsets = np.array(tfrecord.index(self.read_bytes(shard, 0, shard.bytes, 0), self.url(shard)), np.int64)
        except tfrecord.Corrupt as error:
            if self.on_corrupt == "stop":
                raise
            raise error.without_replacement(
                "records of this layout vary in size, so those behind this one can't be found"
            ) from None
        if len(offsets) != shard.records + 1:
            raise BadInput(
                f"{self.url(shard)} holds {len(offsets) - 1} records, and its name says {shard.records}: it was cut or "
                "renamed; copy it again"
            )
        return offsets
