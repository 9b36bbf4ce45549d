"""Datasets in the public recipe's layout: a folder of `<anything>-<i>-<count>.tfrecord`, int64 `input_ids` and
`attention_mask`, no manifest.

(transformers' examples/tensorflow/language-modeling-tpu/prepare_tfrecord_shards.py writes them.) What a manifest would
say is taken from the names and the first record: nothing tells which tokenizer wrote the ids. Records vary in size, so
each shard is read through once, when one of its records is first needed, to find where they start; with a cache folder
the result is kept on the host's disk. `tpu-train shards` writes a layout without that cost.
"""

from __future__ import annotations

import bisect
import hashlib
import itertools
import re
import threading
from pathlib import Path
from typing import Any

import google_crc32c
import numpy as np
import numpy.typing as npt

from training import storage
from training.data.formats import example, tfrecord
from training.data.formats.dataset import Dataset, Feature, Manifest, Shard, find_shards
from training.data.loading.cache import Cache
from training.data.loading.shards import Arrays, OnCorrupt, replacement
from training.errors import BadInput
from training.storage import Stat

NAME = re.compile(r"\A(?P<name>.+)-(?P<number>\d+)-(?P<records>\d+)\.tfrecord\Z")
_FIRST = 1 << 20


def name(split: str, number: int, records: int) -> str:
    """The name of a shard in this layout."""
    return f"{split}-{number}-{records}.tfrecord"


def features() -> dict[str, Feature]:
    """The features of this layout."""
    return {key: Feature(dtype="int64", shape=["length"]) for key in ("input_ids", "attention_mask")}


def encode(rows: npt.NDArray[np.integer]) -> bytes:
    """A shard with these rows, all of their tokens attended to. rows: (n, length)"""
    ones = [1] * rows.shape[1]
    return tfrecord.join(example.encode({"input_ids": row, "attention_mask": ones}) for row in rows)


def open_folder(url: str) -> Dataset | None:
    """The dataset in a folder without a manifest; None when its files are not named in this way. Raises BadInput."""
    found = [(NAME.match(storage.name_of(each.url)), each) for each in storage.listing(url)]
    matched = sorted(
        ((match, each) for match, each in found if match), key=lambda pair: (pair[0]["name"], int(pair[0]["number"]))
    )
    if not matched:
        return None
    first = next((each for match, each in matched if int(match["records"])), None)
    if first is None:
        raise BadInput(f"{url}: no shard has a record, by their names")
    length = _first_length(first)
    shards = [_shard(match, each, length) for match, each in matched]
    manifest = Manifest.model_validate(
        {
            "kind": "mlm",
            "layout": "recipe",
            "split": matched[0][0]["name"],
            "sequence_length": length,
            "features": {key: each.model_dump() for key, each in features().items()},
            "tokenizer_hash": "",
            "vocabulary": 1,
            "shards": [each.model_dump() for each in shards],
        }
    )
    return Dataset(url, manifest, hashlib.sha256(manifest.model_dump_json().encode()).hexdigest())


class RecipeShards:
    """A `training.data.loading.shards.Source` over this layout."""

    def __init__(
        self,
        dataset: Dataset,
        *,
        vocabulary: int | None = None,
        on_corrupt: OnCorrupt = "stop",
        cache: Path | None = None,
    ) -> None:
        self.dataset, self.on_corrupt = dataset, on_corrupt
        self.length = dataset.sequence_length
        self.vocabulary = vocabulary or 1 << 31
        self._shards = [shard for shard in dataset.shards if shard.records]
        self._stats = find_shards(dataset)
        self._starts = list(itertools.accumulate((shard.records for shard in self._shards), initial=0))
        self.records = self._starts[-1]
        self.unit = 0
        self.record_bytes = -(-sum(shard.bytes for shard in self._shards) // self.records)
        self._cache = Cache(cache / dataset.hash[:16]) if cache else None
        self._index: dict[str, npt.NDArray[np.int64]] = {}
        self._bad: set[int] = set()
        self._lock = threading.Lock()

    def empty(self, count: int) -> Arrays:
        return {"input_ids": np.empty((count, self.length), np.int32)}

    def skipped(self) -> int:
        return len(self._bad)

    def read(self, first: int, last: int, block: int) -> Arrays:
        rows = self.empty(last - first)["input_ids"]
        bad: dict[int, BadInput] = {}
        record = first
        while record < last:
            at = bisect.bisect_right(self._starts, record) - 1
            number = record - self._starts[at]
            stop = min(self._shards[at].records, number + last - record)
            for row, each in self._decoded(self._shards[at], number, stop):
                if isinstance(each, BadInput):
                    bad[record - first + row] = each
                else:
                    rows[record - first + row] = each
            record += stop - number
        if bad and self.on_corrupt == "stop":
            raise bad[min(bad)]
        for row, error in bad.items():
            rows[row] = rows[replacement(row, set(bad), block, last - first, error)]
        if bad:
            with self._lock:
                self._bad.update(first + row for row in bad)
        return {"input_ids": rows}

    def _decoded(self, shard: Shard, first: int, last: int) -> list[tuple[int, npt.NDArray[np.int32] | BadInput]]:
        """(row, ids or what is wrong with them) of records [first, last) of a shard."""
        url, offsets = storage.join(self.dataset.url, shard.name), self.offsets(shard)
        start = int(offsets[first])
        data = _read(url, start, int(offsets[last]), self._stats[shard.name], first)
        found: list[tuple[int, npt.NDArray[np.int32] | BadInput]] = []
        for number in range(first, last):
            piece = data[int(offsets[number]) - start : int(offsets[number + 1]) - start]
            try:
                found.append(
                    (number - first, ids(piece, url, number, int(offsets[number]), self.length, self.vocabulary))
                )
            except BadInput as error:
                found.append((number - first, error))
        return found

    def offsets(self, shard: Shard) -> npt.NDArray[np.int64]:
        """Where each record of a shard starts, and its size; reads the shard when asked for the first time. (records +
        1,)"""
        with self._lock:
            found = self._index.get(shard.name)
        if found is not None:
            return found
        url = storage.join(self.dataset.url, shard.name)
        name = f"{shard.name}.index"
        kept = self._cache.get(name, 8 * (shard.records + 1)) if self._cache else None
        if kept is not None:
            offsets = np.frombuffer(kept, "<i8").astype(np.int64)
        else:
            offsets = np.array(tfrecord.index(_read(url, 0, shard.bytes, self._stats[shard.name], 0), url), np.int64)
            if len(offsets) != shard.records + 1:
                raise BadInput(
                    f"{url} holds {len(offsets) - 1} records, and its name says {shard.records}: it was cut or renamed; copy it again"
                )
            if self._cache:
                self._cache.put(name, offsets.astype("<i8").tobytes())
        with self._lock:
            self._index[shard.name] = offsets
        return offsets


def ids(framed: bytes, url: str, number: int, offset: int, length: int, vocabulary: int) -> npt.NDArray[np.int32]:
    """The input_ids of one record with its framing; its place is for messages. Raises BadInput."""
    [(_, payload)] = tfrecord.walk(framed, url, first=number, offset=offset)
    try:
        found = example.decode(payload).get("input_ids")
    except example.NotAnExample as error:
        raise tfrecord.Corrupt(url, number, offset, f"it is not a tf.train.Example: {error}") from None
    if not isinstance(found, np.ndarray) or found.dtype != np.int64 or len(found) != length:
        raise BadInput(
            f"{url}: record {number} at byte {offset} has no int64 input_ids of {length} numbers as the first record has"
        )
    if found.min() < 0 or found.max() >= vocabulary:
        raise BadInput(
            f"{url}: record {number} has token id {found.max()}, and the tokenizer has {vocabulary} ids: give the one it was made with"
        )
    return found.astype(np.int32)


def _read(url: str, start: int, end: int, stat: Stat, record: int) -> bytes:
    try:
        return storage.read(url, start, end, generation=stat.generation)
    except (storage.Changed, storage.NotFound) as error:
        raise BadInput(f"{error} (record {record} of this shard was to be read)") from error


def _shard(match: re.Match[str], stat: Stat, length: int) -> Shard:
    crc32c = (
        stat.stored_crc32c
        if stat.stored_crc32c is not None
        else google_crc32c.value(f"{stat.size} {stat.generation}".encode())
    )
    return Shard(
        name=storage.name_of(stat.url), length=length, records=int(match["records"]), bytes=stat.size, crc32c=crc32c
    )


def _first_length(stat: Stat) -> int:
    data = storage.read(stat.url, 0, _FIRST, generation=stat.generation)
    _, payload = next(tfrecord.walk(data, stat.url), (0, b""))
    try:
        ids: Any = example.decode(payload).get("input_ids")
    except example.NotAnExample as error:
        raise tfrecord.Corrupt(stat.url, 0, 0, f"it is not a tf.train.Example: {error}") from None
    if not isinstance(ids, np.ndarray) or ids.dtype != np.int64 or not len(ids):
        raise BadInput(
            f"{stat.url}: its first record has no int64 feature input_ids, so it is not a dataset in the public recipe's layout"
        )
    return len(ids)
