"""Records by number, from the shards of a dataset: checked, decoded, and never of another version than the one that was
opened.

Every record's CRC is verified. What is done about a bad one is `on_corrupt`:
  stop   raise `Corrupt` with shard, record and byte offset
  skip   put the next good record of the same block in its place (after the last comes the first), and count it. The
  same bad bytes give the same
         replacement on every host, whatever was read before. A block without a good record stops the run.
A shard that was replaced after it was opened stops the run in either case, as does an id that the tokenizer does not
have.

With a cache folder, blocks that came from a bucket are kept on the host's disk,
`<cache>/<dataset hash>/<length>-<first record>`, written whole or not at all and
checked like any other bytes when read back; a damaged one is fetched again.
"""

from __future__ import annotations

import bisect
import itertools
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal, Protocol

import numpy as np
import numpy.typing as npt

from training import storage
from training.data.formats import records as form
from training.data.formats.dataset import Dataset, Shard, find_shards
from training.data.formats.tfrecord import HEADER, Corrupt
from training.data.loading.cache import Cache
from training.errors import BadInput

OnCorrupt = Literal["stop", "skip"]
Arrays = dict[str, npt.NDArray[Any]]


class Source(Protocol):
    """Records 0 .. records-1, by number."""

    records: int
    record_bytes: int
    unit: int  # records that are stored together; 0: each stands alone

    def empty(self, count: int) -> Arrays:
        """Room for `count` records: feature -> (count, length) or (count, 1)"""
        ...

    def read(self, first: int, last: int, block: int) -> Arrays:
        """Records [first, last), checked; replacements come from the same `block` records (first is a multiple of
        it)."""
        ...

    def skipped(self) -> int:
        """How many different bad records have been replaced so far."""
        ...


class FixedShards:
    """The compact layout: every record has the same size, so a record's place is arithmetic."""

    def __init__(
        self,
        dataset: Dataset,
        *,
        length: int | None = None,
        vocabulary: int | None = None,
        on_corrupt: OnCorrupt = "stop",
        cache: Path | None = None,
    ) -> None:
        """The shards of `dataset` with rows of `length` tokens (default: its sequence length). Raises BadInput where a
        shard is not as listed."""
        self.dataset, self.on_corrupt = dataset, on_corrupt
        self.length = length or dataset.sequence_length
        self.vocabulary = vocabulary or dataset.manifest.vocabulary
        self._layout = form.layout(dataset.manifest.features, self.length)
        self._shards: Sequence[Shard] = [each for each in dataset.shards if each.length == self.length and each.records]
        self.unit = dataset.manifest.member_records
        self._members = {shard.name: [0, *itertools.accumulate(shard.members)] for shard in self._shards if self.unit}
        for shard in self._shards:
            if not self.unit and shard.bytes != shard.records * self._layout.size:
                raise BadInput(
                    f"{storage.join(dataset.url, shard.name)}: {shard.bytes} bytes can't be {shard.records} records of {self._layout.size}"
                )
        self._stats = find_shards(dataset)
        self._starts = list(itertools.accumulate((shard.records for shard in self._shards), initial=0))
        self.records, self.record_bytes = self._starts[-1], self._layout.size
        self._cache = Cache(cache / dataset.hash[:16]) if cache and storage.is_remote(dataset.url) else None
        self._bad: set[int] = set()
        self._lock = threading.Lock()

    def empty(self, count: int) -> Arrays:
        return {each.name: np.empty((count, each.count), each.dtype.newbyteorder("=")) for each in self._layout.columns}

    def skipped(self) -> int:
        return len(self._bad)

    def read(self, first: int, last: int, block: int) -> Arrays:
        assert 0 <= first < last <= self.records
        data = self._bytes(first, last, block)
        bad = form.broken(self._layout, data)
        if bad and self._cache is not None:  # was it the cache?
            data = self._fetched(first, last)
            bad = form.broken(self._layout, data)
            for start in range(first, last, block):
                self._cache.drop(self._kept_as(start))
        if bad and self.on_corrupt == "stop":
            raise self._corrupt(first + bad[0], data[bad[0] * self.record_bytes : (bad[0] + 1) * self.record_bytes])
        arrays: Arrays = {each.name: form.column(self._layout, data, each.name) for each in self._layout.columns}
        if bad:
            taken = np.arange(last - first)
            for row in bad:
                taken[row] = replacement(row, set(bad), block, last - first, self._corrupt(first + row, b""))
            arrays = {name: values[taken] for name, values in arrays.items()}
            with self._lock:
                self._bad.update(first + row for row in bad)
        ids = arrays["input_ids"]
        if int(ids.max()) >= self.vocabulary or int(ids.min()) < 0:
            row = int(np.flatnonzero(((ids >= self.vocabulary) | (ids < 0)).any(axis=1))[0])
            shard, number = self.locate(first + row)
            raise BadInput(
                f"{storage.join(self.dataset.url, shard.name)}: record {number} has token id {int(ids[row].max())}, and the tokenizer has "
                f"{self.vocabulary} ids: the shards were written with another tokenizer; give that one, or write them again"
            )
        return arrays

    def locate(self, record: int) -> tuple[Shard, int]:
        """The shard of a record, and its number there."""
        at = bisect.bisect_right(self._starts, record) - 1
        return self._shards[at], record - self._starts[at]

    def _bytes(self, first: int, last: int, block: int) -> bytes:
        """Records [first, last) as they stand in uncompressed shards; first is a multiple of `block`."""
        if self._cache is None:
            return self._fetched(first, last)
        parts: dict[int, bytes] = {}
        for start in range(first, last, block):
            kept = self._cache.get(self._kept_as(start), (min(start + block, last) - start) * self.record_bytes)
            if kept is not None:
                parts[start] = kept
        missing = [start for start in range(first, last, block) if start not in parts]
        while missing:
            run = [
                start for number, start in enumerate(missing) if start == missing[0] + number * block
            ]  # neighbours are one request
            data = self._fetched(run[0], min(run[-1] + block, last))
            for start in run:
                parts[start] = data[(start - run[0]) * self.record_bytes : (start - run[0] + block) * self.record_bytes]
                self._cache.put(self._kept_as(start), parts[start])
            missing = missing[len(run) :]
        return b"".join(parts[start] for start in sorted(parts))

    def _fetched(self, first: int, last: int) -> bytes:
        pieces = []
        record = first
        while record < last:
            shard, number = self.locate(record)
            stop = min(shard.records, number + last - record)
            pieces.append(self._range(shard, number, stop))
            record += stop - number
        return pieces[0] if len(pieces) == 1 else b"".join(pieces)

    def _kept_as(self, first: int) -> str:
        return f"{self.length}-{first}"

    def _range(self, shard: Shard, first: int, last: int) -> bytes:
        if self.unit:
            return self._expanded(shard, first, last)
        return self._stored(shard, first, first * self.record_bytes, last * self.record_bytes)

    def _expanded(self, shard: Shard, first: int, last: int) -> bytes:
        """Records [first, last) of a shard of gzip members."""
        offsets, begin = self._members[shard.name], first // self.unit
        stop = -(-last // self.unit)
        data = self._stored(shard, first, offsets[begin], offsets[stop])
        pieces = []
        for number in range(begin, stop):
            member = data[offsets[number] - offsets[begin] : offsets[number + 1] - offsets[begin]]
            count = min(self.unit, shard.records - number * self.unit)
            pieces.append(form.expand(member, count * self.record_bytes))
        start = (first - begin * self.unit) * self.record_bytes
        return b"".join(pieces)[start : start + (last - first) * self.record_bytes]

    def _stored(self, shard: Shard, record: int, start: int, end: int) -> bytes:
        """Bytes [start, end) of a shard; `record` is for messages."""
        url = storage.join(self.dataset.url, shard.name)
        try:
            data = storage.read(url, start, end, generation=self._stats[shard.name].generation)
        except (storage.Changed, storage.NotFound) as error:
            raise BadInput(f"{error} (record {record} of this shard was to be read)") from error
        if len(data) != end - start:
            raise BadInput(
                f"{url} ends at byte {start + len(data)}, where record {record} was to be read: it was cut while in use"
            )
        return data

    def _corrupt(self, record: int, data: bytes) -> Corrupt:
        shard, number = self.locate(record)
        if self.unit:
            offset, what = (
                self._members[shard.name][number // self.unit],
                "the gzip member there is damaged, or the record's checksum in it",
            )
            return Corrupt(storage.join(self.dataset.url, shard.name), number, offset, what)
        what = "its checksum (CRC-32C) does not match"
        if data[:HEADER] != self._layout.template[:HEADER]:
            what = "the checksum (CRC-32C) of its length does not match, or its length is not that of this dataset's records"
        return Corrupt(storage.join(self.dataset.url, shard.name), number, number * self.record_bytes, what)


def replacement(row: int, bad: set[int], block: int, count: int, error: BadInput) -> int:
    """The row that stands in for a bad one: the next good row of its block, of which `count` rows in all are here.
    Raises `error` if there is none."""
    begin = row - row % block
    size = min(block, count - begin)
    for step in range(1, size):
        other = begin + (row - begin + step) % size
        if other not in bad:
            return other
    raise error
