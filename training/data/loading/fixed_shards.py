"""A record source for the compact layout: all records of a length have the same size, so offsets are arithmetic.

Every record's CRC is checked (`on_corrupt` is documented in `training.data.loading.record_source`). A shard that was
replaced after it was opened stops the run, and so does an id that the tokenizer does not have.

With a cache folder, blocks that came from a bucket are kept on the host's disk as
`<cache>/<dataset hash>/<length>-<first record>`, each written whole or not at all. They are checked like any other
bytes when they are read back; a damaged one is fetched again.

The same in TensorFlow: `training.data.tf.fixed_shards`.
"""

from __future__ import annotations

import bisect
import itertools
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from training import storage
from training.data.formats import fixed_records
from training.data.formats.dataset import Dataset, Shard, find_shards
from training.data.formats.tfrecord import HEADER, Corrupt
from training.data.loading.cache import Cache
from training.data.loading.record_source import REPLACED, Arrays, OnCorrupt, read_replacing, read_shard_bytes
from training.errors import BadInput


class FixedShards:
    """A `RecordSource` over the shards of one row length."""

    def __init__(
        self,
        dataset: Dataset,
        *,
        length: int | None = None,
        vocabulary: int | None = None,
        on_corrupt: OnCorrupt = "stop",
        cache: Path | None = None,
    ) -> None:
        """Checks every shard's size with one listing; reads no record yet.

        Args:
            dataset: in the compact layout.
            length: only the shards with rows of that many tokens (default: the dataset's sequence length).
            vocabulary: ids from here on are refused (default: the manifest's vocabulary).
            on_corrupt: what to do about a damaged record.
            cache: a folder for blocks of a remote dataset; None: none are kept.

        Raises:
            BadInput: a shard is not as the manifest lists it.
        """
        self.dataset, self.on_corrupt = dataset, on_corrupt
        self.length = length or dataset.sequence_length
        self.vocabulary = vocabulary or dataset.manifest.vocabulary
        self._layout = fixed_records.record_layout(dataset.manifest.features, self.length)
        self._shards: Sequence[Shard] = [
            shard for shard in dataset.shards if shard.length == self.length and shard.records
        ]
        self.unit = dataset.manifest.member_records
        self._member_offsets = {
            shard.name: [0, *itertools.accumulate(shard.members)] for shard in self._shards if self.unit
        }
        for shard in self._shards:
            if not self.unit and shard.bytes != shard.records * self._layout.size:
                raise BadInput(
                    f"{self._url(shard)}: {shard.bytes} bytes can't be {shard.records} records of {self._layout.size}"
                )
        self._stats = find_shards(dataset)
        self._starts = list(itertools.accumulate((shard.records for shard in self._shards), initial=0))
        self.records, self.record_bytes = self._starts[-1], self._layout.size
        self._cache = Cache(cache / dataset.hash[:16]) if cache and storage.is_remote(dataset.url) else None

    def empty(self, count: int) -> Arrays:
        columns = {
            column.name: np.empty((count, column.count), column.dtype.newbyteorder("="))
            for column in self._layout.columns
        }
        return {**columns, REPLACED: np.empty((count, 1), np.bool_)}

    def read(self, first: int, last: int, block: int) -> Arrays:
        assert 0 <= first < last <= self.records
        arrays = read_replacing(
            lambda first, last: self._load(first, last, block),
            first,
            last,
            block=block,
            records=self.records,
            on_corrupt=self.on_corrupt,
        )
        self._check_ids(arrays, first)
        return arrays

    def _load(self, first: int, last: int, block: int) -> tuple[Arrays, dict[int, BadInput]]:
        """Records [first, last), and what is wrong with bad rows."""
        data = self._read_cached(first, last, block)
        bad = fixed_records.find_broken(self._layout, data)
        if bad and self._cache is not None:  # the cache may be damaged and the bucket not
            data = self._fetch(first, last)
            bad = fixed_records.find_broken(self._layout, data)
            for start in range(first, last, block):
                self._cache.drop(self._cache_name(start))
        arrays: Arrays = {
            column.name: fixed_records.read_column(self._layout, data, column.name) for column in self._layout.columns
        }  # (n, count) each
        size = self.record_bytes
        return arrays, {row: self._corrupt(first + row, data[row * size : (row + 1) * size]) for row in bad}

    def locate(self, record: int) -> tuple[Shard, int]:
        """The shard of a record, and the record's number in it."""
        shard_number = bisect.bisect_right(self._starts, record) - 1
        return self._shards[shard_number], record - self._starts[shard_number]

    def _url(self, shard: Shard) -> str:
        return storage.join(self.dataset.url, shard.name)

    def _check_ids(self, arrays: Arrays, first: int) -> None:
        """Raises BadInput for an id that the tokenizer does not have; `first` is the first row's record."""
        ids = arrays["input_ids"]  # (n, length)
        if int(ids.max()) < self.vocabulary and int(ids.min()) >= 0:
            return
        row = int(np.flatnonzero(((ids >= self.vocabulary) | (ids < 0)).any(axis=1))[0])
        shard, number = self.locate(first + row)
        raise BadInput(
            f"{self._url(shard)}: record {number} has token id {int(ids[row].max())}, and the tokenizer has "
            f"{self.vocabulary} ids: the shards were written with another tokenizer; give that one, or write them again"
        )

    def _read_cached(self, first: int, last: int, block: int) -> bytes:
        """Records [first, last) without compression, from the cache as far as it has them."""
        if self._cache is None:
            return self._fetch(first, last)
        blocks: dict[int, bytes] = {}  # first record -> bytes
        for start in range(first, last, block):
            cached = self._cache.get(self._cache_name(start), (min(start + block, last) - start) * self.record_bytes)
            if cached is not None:
                blocks[start] = cached
        missing = [start for start in range(first, last, block) if start not in blocks]
        while missing:
            # Neighbouring blocks are one request.
            run = [start for number, start in enumerate(missing) if start == missing[0] + number * block]
            data = self._fetch(run[0], min(run[-1] + block, last))
            for start in run:
                offset = (start - run[0]) * self.record_bytes
                blocks[start] = data[offset : offset + block * self.record_bytes]
                self._cache.put(self._cache_name(start), blocks[start])
            missing = missing[len(run) :]
        return b"".join(blocks[start] for start in sorted(blocks))

    def _cache_name(self, first: int) -> str:
        return f"{self.length}-{first}"

    def _fetch(self, first: int, last: int) -> bytes:
        """Records [first, last) without compression, from the shards."""
        pieces = []
        record = first
        while record < last:
            shard, number = self.locate(record)
            stop = min(shard.records, number + last - record)
            if self.unit:
                pieces.append(self._fetch_members(shard, number, stop))
            else:
                pieces.append(self._fetch_bytes(shard, number, number * self.record_bytes, stop * self.record_bytes))
            record += stop - number
        return pieces[0] if len(pieces) == 1 else b"".join(pieces)

    def _fetch_members(self, shard: Shard, first: int, last: int) -> bytes:
        """Records [first, last) of a shard of gzip members."""
        offsets, begin = self._member_offsets[shard.name], first // self.unit
        stop = -(-last // self.unit)
        data = self._fetch_bytes(shard, first, offsets[begin], offsets[stop])
        pieces = []
        for number in range(begin, stop):
            member = data[offsets[number] - offsets[begin] : offsets[number + 1] - offsets[begin]]
            count = min(self.unit, shard.records - number * self.unit)
            pieces.append(fixed_records.expand_member(member, count * self.record_bytes))
        start = (first - begin * self.unit) * self.record_bytes
        return b"".join(pieces)[start : start + (last - first) * self.record_bytes]

    def _fetch_bytes(self, shard: Shard, record: int, start: int, end: int) -> bytes:
        """Bytes [start, end) of a shard; `record` is for messages."""
        data = read_shard_bytes(self._url(shard), start, end, self._stats[shard.name], record)
        if len(data) != end - start:
            raise BadInput(
                f"{self._url(shard)} ends at byte {start + len(data)}, where record {record} was to be read: "
                "it was cut while in use"
            )
        return data

    def _corrupt(self, record: int, data: bytes) -> Corrupt:
        """The error for a bad record, whose bytes are `data`."""
        shard, number = self.locate(record)
        if self.unit:
            offset = self._member_offsets[shard.name][number // self.unit]
            reason = "the gzip member there is damaged, or the record's checksum in it"
            return Corrupt(self._url(shard), number, offset, reason)
        reason = "its checksum (CRC-32C) does not match"
        if data[:HEADER] != self._layout.template[:HEADER]:
            reason = (
                "the checksum (CRC-32C) of its length does not match, or its length is not that of this dataset's "
                "records"
            )
        return Corrupt(self._url(shard), number, number * self.record_bytes, reason)
