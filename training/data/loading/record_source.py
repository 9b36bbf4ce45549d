"""Record sources: the records of a dataset's shards by number, checked and decoded, for the reader.

In the compact layout all records of a length have the same size, so offsets are arithmetic (`FixedShards`). In the
public recipe's (`RecipeShards`) they vary in size: each process has to read a shard whole to find where its records
start, when one of them is first needed.

The option `on_corrupt` decides what happens to a record whose CRC is wrong:

  stop   raise `Corrupt` with shard, record and byte offset
  skip   replace it by the next good record of the same block (after the last comes the first), and count it. In a block
         without a good record replace each record by one of the next block that has a good one. The same damage gives
         the same replacements on every host, whatever was read before. Only a dataset without a
         good record stops the run.

Failure model: shards may be missing, short or flipped at any byte, and may be replaced while they are read. Every read
is pinned to the generation that was listed at the start, and every record's CRC is checked.
"""

import bisect
import itertools
import threading
from abc import ABC, abstractmethod
from collections.abc import Collection
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from training import storage
from training.data.formats import fixed_records, recipe_layout, tfrecord
from training.data.formats.dataset import IGNORED, LABEL, Dataset, Shard, find_shards
from training.data.formats.tfrecord import HEADER, Corrupt
from training.data.sampling.masking import SpecialTokens
from training.data.sampling.order import host_rows
from training.errors import BadInput
from training.storage import Stat

OnCorrupt = Literal["stop", "skip"]
Arrays = dict[str, npt.NDArray[Any]]
REPLACED = "replaced"  # (n, 1) bool, beside the features: another record has the place of a damaged one
NO_GOOD_RECORD = "the dataset has no good record that could be taken instead"


@dataclass(frozen=True)
class HostSlice:
    """The rows of each global batch that one host reads, and how."""

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


class RecordSource(ABC):
    """Records 0 .. records-1 of some shards of a dataset, by number; subclasses know the layout of their bytes. Those
    of shorter rows come first, padded to the longest. Thread-safe."""

    columns: dict[str, np.ndarray]  # of no records: (0, its numbers), by feature
    record_bytes: int  # the size of a longest record in a shard; the mean size in the recipe layout

    def __init__(
        self,
        dataset: Dataset,
        *,
        lengths: Collection[int] | None = None,
        vocabulary: int | None = None,
        pad: int = 0,
        on_corrupt: OnCorrupt = "stop",
    ) -> None:
        """Checks every shard's size with one listing; reads no record yet. Only shards with rows of these `lengths` are
        read (None: of the dataset's sequence length); `pad` and, as the label of tokens, IGNORED fill shorter rows. Ids
        from `vocabulary` on are refused (None: from the manifest's on, without limit in the recipe's layout). Raises
        BadInput when a shard is missing or is not the one that the manifest lists, and StorageError."""
        self.dataset, self.on_corrupt = dataset, on_corrupt
        limit = 1 << 31 if dataset.manifest.layout == "recipe" else dataset.manifest.vocabulary
        self.vocabulary = vocabulary or limit
        self.lengths = sorted(lengths or [dataset.sequence_length])
        self.length = self.lengths[-1]
        shards = [shard for shard in dataset.shards if shard.length in self.lengths and shard.records]
        self.shards = sorted(shards, key=lambda shard: shard.length)
        self.stats = find_shards(dataset)  # by the shard's URL
        self._starts = list(itertools.accumulate((shard.records for shard in self.shards), initial=0))
        self._fillers = {"input_ids": pad, **({LABEL: IGNORED} if dataset.manifest.rows == "token-labelled" else {})}
        self.records = self._starts[-1]

    @abstractmethod
    def decode(self, shard: Shard, first: int, last: int) -> tuple[Arrays, dict[int, BadInput]]:
        """Returns the features of records [first, last) of a shard, (n, numbers) each, and the error of each damaged
        one by its row, 0 for `first`. Raises BadInput for an intact one that does not fit the dataset or has an id from
        `vocabulary` on; and as `read_bytes`."""

    def empty(self, count: int) -> Arrays:
        """Returns arrays for `count` records: feature -> (count, its numbers), padding; REPLACED -> (count, 1)."""
        columns = {
            name: np.full((count, values.shape[1]), self._fillers.get(name, 0), values.dtype)
            for name, values in self.columns.items()
        }
        return {**columns, REPLACED: np.zeros((count, 1), np.bool_)}

    def read(self, first: int, last: int, block: int) -> Arrays:
        """Reads and checks records [first, last). The column REPLACED marks those that replace bad ones, from the same
        `block` records if one of them is good. `first` is a multiple of `block`. Raises BadInput for a bad record
        (Corrupt) that may not or can't be replaced, or a shard that changed since it was listed; and StorageError."""
        assert 0 <= first < last <= self.records
        arrays, bad = self.load(first, last)
        if bad and self.on_corrupt == "stop":
            raise bad[min(bad)]
        for begin in sorted({row // block * block for row in bad}):
            end = min(begin + block, last - first)
            for name, values in self._find_good(first + begin, first + end).items():
                arrays[name][begin:end] = values
        arrays[REPLACED][list(bad)] = True
        return arrays

    def load(self, first: int, last: int) -> tuple[Arrays, dict[int, BadInput]]:
        """Reads records [first, last). Returns them as `empty` does, and the error of each damaged one by its row,
        whose values mean nothing. Raises as `decode`."""
        arrays, bad, row = self.empty(last - first), dict[int, BadInput](), 0
        while row < last - first:
            shard, number = self.locate(first + row)
            stop = min(shard.records, number + last - first - row)
            features, errors = self.decode(shard, number, stop)
            for name, values in features.items():
                arrays[name][row : row + stop - number, : values.shape[1]] = values
            bad |= {row + place: error for place, error in errors.items()}
            row += stop - number
        return arrays, bad

    def _find_good(self, first: int, last: int) -> Arrays:
        """Returns the records [first, last) of one block with another record in the place of each bad one: of the same
        block, or else of the next that has a good one. Raises BadInput if no record is good."""
        size, begin, tried, error = last - first, first, 0, None
        while True:
            count = min(size, self.records - begin)
            arrays, bad = self.load(begin, begin + count)
            if len(bad) < count:
                break
            error, tried = error or bad[min(bad)], tried + count
            if tried >= self.records:
                raise error.without_replacement(NO_GOOD_RECORD) if isinstance(error, Corrupt) else error
            begin = (begin + count) % self.records
        good = np.array(sorted(set(range(count)) - set(bad)))  # (good rows,)
        taken = good[np.searchsorted(good, np.arange(size) % count) % len(good)]  # (size,)
        return {name: values[taken] for name, values in arrays.items()}

    def locate(self, record: int) -> tuple[Shard, int]:
        """Returns the shard of a record, and the record's number in it."""
        shard_number = bisect.bisect_right(self._starts, record) - 1
        return self.shards[shard_number], record - self._starts[shard_number]

    def read_bytes(self, shard: Shard, start: int, end: int, record: int) -> bytes:
        """Reads bytes [start, end) of a shard. Raises BadInput if it changed, or was deleted or cut, since it was
        listed, with `record`, a number in the shard, in the message; and StorageError."""
        url = self.dataset.shard_url(shard)
        try:
            data = storage.read(url, start, end, generation=self.stats[url].generation)
        except (storage.Changed, storage.NotFound) as error:
            raise BadInput(f"{error} (while reading record {record} of this shard)") from error
        if len(data) != end - start:
            raise BadInput(f"{url} ends at byte {start + len(data)}, inside record {record}: it was cut while in use")
        return data


def open_source(dataset: Dataset, **options: Any) -> RecordSource:
    """Opens the record source for a dataset's layout; reads no record yet. `options` and errors: of `RecordSource`."""
    layout = RecipeShards if dataset.manifest.layout == "recipe" else FixedShards
    return layout(dataset, **options)


class FixedShards(RecordSource):
    """Records of the compact layout."""

    def __init__(self, dataset: Dataset, **options: Any) -> None:
        """Checks the shards as `RecordSource`, and that each has the size of its records; raises BadInput."""
        super().__init__(dataset, **options)
        self._layouts = {
            length: fixed_records.record_layout(dataset.manifest.features, length) for length in self.lengths
        }
        longest = self._layouts[self.length]
        self.record_bytes = longest.size
        self.columns = {name: fixed_records.read_column(longest, b"", name) for name in longest.dtype.names or ()}
        for shard in self.shards:
            size = self._layouts[shard.length].size
            if shard.bytes != shard.records * size:
                url = dataset.shard_url(shard)
                raise BadInput(f"{url}: {shard.bytes} bytes can't be {shard.records} records of {size}")

    def decode(self, shard: Shard, first: int, last: int) -> tuple[Arrays, dict[int, BadInput]]:
        """Returns the features of records [first, last), and the errors of damaged ones, as `RecordSource.decode`."""
        layout, url = self._layouts[shard.length], self.dataset.shard_url(shard)
        data = self.read_bytes(shard, first * layout.size, last * layout.size, first)
        bad: dict[int, BadInput] = {}
        for row in fixed_records.find_broken(layout, data):
            reason, offset = "its checksum (CRC-32C) does not match", row * layout.size
            if data[offset : offset + HEADER] != layout.template[:HEADER]:
                reason = (
                    "the checksum (CRC-32C) of its length does not match, or its length is not that of this dataset's "
                    "records"
                )
            bad[row] = Corrupt(url, first + row, first * layout.size + offset, reason)
        arrays: Arrays = {name: fixed_records.read_column(layout, data, name) for name in layout.dtype.names or ()}
        ids = arrays["input_ids"]  # (n, length)
        unknown = np.asarray((ids >= self.vocabulary) | (ids < 0))
        unknown[np.array(list(bad), np.int64)] = False
        for row in np.flatnonzero(unknown.any(axis=1))[:1]:
            raise BadInput(
                f"{url}: record {first + row} has token id {ids[row][unknown[row]][0]}, and the tokenizer has "
                f"{self.vocabulary} ids: the shards were written with another tokenizer; give that one, or write them "
                "again"
            )
        return arrays, bad


# Where the records of a shard start, by the shard's state; shared by all sources of this process.
_INDEXES: dict[Stat, npt.NDArray[np.int64]] = {}
_INDEX_LOCKS: dict[Stat, threading.Lock] = {}  # one thread reads a shard, others wait for it
_INDEX_LOCK = threading.Lock()


class RecipeShards(RecordSource):
    """The records of a folder in the public recipe's layout."""

    def __init__(self, dataset: Dataset, **options: Any) -> None:
        """Checks the shards as `RecordSource`; raises BadInput."""
        super().__init__(dataset, **options)
        self.record_bytes = -(-sum(shard.bytes for shard in self.shards) // self.records)
        self.columns = {"input_ids": np.empty((0, self.length), np.int32)}

    def decode(self, shard: Shard, first: int, last: int) -> tuple[Arrays, dict[int, BadInput]]:
        """Returns the ids of records [first, last), and the errors of damaged ones, as `RecordSource.decode`."""
        rows, bad = np.zeros((last - first, self.length), np.int32), dict[int, BadInput]()  # (n, length)
        offsets = self.offsets(shard)[first : last + 1].tolist()
        data = self.read_bytes(shard, offsets[0], offsets[-1], first)
        for row, (start, stop) in enumerate(itertools.pairwise(offsets)):
            framed, where = (
                data[start - offsets[0] : stop - offsets[0]],
                (self.dataset.shard_url(shard), first + row, start),
            )
            try:
                rows[row] = recipe_layout.decode_ids(framed, *where, self.length, self.vocabulary)
            except Corrupt as error:
                bad[row] = error
        return {"input_ids": rows}, bad

    def offsets(self, shard: Shard) -> npt.NDArray[np.int64]:
        """Returns, (records + 1,), the byte at which each record of a shard starts, and last the shard's size. The
        first call in this process reads the whole shard; other threads and sources wait for it and share the result.
        Raises BadInput, StorageError."""
        stat = self.stats[self.dataset.shard_url(shard)]
        with _INDEX_LOCK:
            lock = _INDEX_LOCKS.setdefault(stat, threading.Lock())
        with lock:
            if stat not in _INDEXES:
                _INDEXES[stat] = self._read_offsets(shard)
            return _INDEXES[stat]

    def _read_offsets(self, shard: Shard) -> npt.NDArray[np.int64]:
        """Computes `offsets` from the whole shard. Raises BadInput for a damaged header, also if `on_corrupt` is
        "skip", or another number of records than in the shard's name."""
        url = self.dataset.shard_url(shard)
        try:
            offsets = np.array(tfrecord.index(self.read_bytes(shard, 0, shard.bytes, 0), url), np.int64)
        except Corrupt as error:
            if self.on_corrupt == "stop":
                raise
            raise error.without_replacement(
                "records of this layout vary in size, so those behind this one can't be found"
            ) from None
        if len(offsets) != shard.records + 1:
            raise BadInput(
                f"{url} holds {len(offsets) - 1} records, and its name says {shard.records}: it was cut or "
                "renamed; copy it again"
            )
        return offsets
