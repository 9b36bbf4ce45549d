"""A record source for the public recipe's layout (`training.data.formats.recipe_layout`).

Records vary in size, so each process reads each shard once, when one of its records is first needed, to find where its
records start. With a cache folder that index is kept on the host's disk, as `<cache>/<dataset hash>/<shard>.index`.

The same in TensorFlow: `training.data.tf.recipe_shards`.
"""

from __future__ import annotations

import bisect
import itertools
import threading
from concurrent.futures import Future
from pathlib import Path

import numpy as np
import numpy.typing as npt

from training import storage
from training.data.formats import recipe_layout, tfrecord
from training.data.formats.dataset import Dataset, Shard, find_shards
from training.data.loading.cache import Cache
from training.data.loading.record_source import REPLACED, Arrays, OnCorrupt, read_replacing, read_shard_bytes
from training.errors import BadInput
from training.storage import Stat

# Where the records of a shard begin, by the state of the shard: of all sources in this process.
_INDEXES: dict[Stat, Future[npt.NDArray[np.int64]]] = {}
_INDEX_LOCK = threading.Lock()


class RecipeShards:
    """A `RecordSource` over this layout."""

    def __init__(
        self,
        dataset: Dataset,
        *,
        vocabulary: int | None = None,
        on_corrupt: OnCorrupt = "stop",
        cache: Path | None = None,
    ) -> None:
        """Checks every shard's size; reads nothing yet. The options are those of `FixedShards`. Raises BadInput."""
        self.dataset, self.on_corrupt = dataset, on_corrupt
        self.length = dataset.sequence_length
        self.vocabulary = vocabulary or 1 << 31
        self._shards = [shard for shard in dataset.shards if shard.records]
        self.stats = find_shards(dataset)  # of each shard, by its name
        self._starts = list(itertools.accumulate((shard.records for shard in self._shards), initial=0))
        self.records = self._starts[-1]
        self.unit = 0
        self.record_bytes = -(-sum(shard.bytes for shard in self._shards) // self.records)
        self._cache = Cache(cache / dataset.hash[:16]) if cache else None

    def empty(self, count: int) -> Arrays:
        return {"input_ids": np.empty((count, self.length), np.int32), REPLACED: np.empty((count, 1), np.bool_)}

    def read(self, first: int, last: int, block: int) -> Arrays:
        return read_replacing(self._load, first, last, block=block, records=self.records, on_corrupt=self.on_corrupt)

    def _load(self, first: int, last: int) -> tuple[Arrays, dict[int, BadInput]]:
        """Records [first, last), and what is wrong with bad rows."""
        rows = np.zeros((last - first, self.length), np.int32)  # (n, length)
        bad: dict[int, BadInput] = {}
        record = first
        while record < last:
            shard_number = bisect.bisect_right(self._starts, record) - 1
            number = record - self._starts[shard_number]
            stop = min(self._shards[shard_number].records, number + last - record)
            decoded = self._decode(self._shards[shard_number], number, stop)
            for row, ids in enumerate(decoded, record - first):
                if isinstance(ids, tfrecord.Corrupt):
                    bad[row] = ids
                else:
                    rows[row] = ids
            record += stop - number
        return {"input_ids": rows}, bad

    def _decode(self, shard: Shard, first: int, last: int) -> list[npt.NDArray[np.int32] | tfrecord.Corrupt]:
        """The ids of records [first, last) of a shard, or their damage. Raises BadInput for whole records that are not
        this dataset's."""
        url, offsets = storage.join(self.dataset.url, shard.name), self.offsets(shard).tolist()
        start = offsets[first]
        data = read_shard_bytes(url, start, offsets[last], self.stats[shard.name], first)
        decoded: list[npt.NDArray[np.int32] | tfrecord.Corrupt] = []
        for number in range(first, last):
            framed = data[offsets[number] - start : offsets[number + 1] - start]
            try:
                decoded.append(
                    recipe_layout.decode_ids(framed, url, number, offsets[number], self.length, self.vocabulary)
                )
            except tfrecord.Corrupt as error:
                decoded.append(error)
        return decoded

    def offsets(self, shard: Shard) -> npt.NDArray[np.int64]:
        """The byte at which each record of a shard starts, and last its size. (records + 1,)

        Reads the whole shard at the first call in this process, or its index from the cache; other threads and sources
        wait for that and share it. Raises BadInput, StorageError.
        """
        stat = self.stats[shard.name]
        with _INDEX_LOCK:
            is_new = stat not in _INDEXES
            index = _INDEXES.setdefault(stat, Future())
        if is_new:
            try:
                index.set_result(self._index(shard))
            except BaseException as error:
                with _INDEX_LOCK:
                    del _INDEXES[stat]  # the next one tries again
                index.set_exception(error)
        return index.result()

    def _index(self, shard: Shard) -> npt.NDArray[np.int64]:
        """`offsets`, from the cache or by reading the whole shard."""
        url = storage.join(self.dataset.url, shard.name)
        name = f"{shard.name}.index"
        cached = self._cache.get(name, 8 * (shard.records + 1)) if self._cache else None
        if cached is not None:
            return np.frombuffer(cached, "<i8").astype(np.int64)
        data = read_shard_bytes(url, 0, shard.bytes, self.stats[shard.name], 0)
        try:
            offsets = np.array(tfrecord.index(data, url), np.int64)
        except tfrecord.Corrupt as error:
            if self.on_corrupt == "stop":
                raise
            raise error.without_replacement(
                "records of this layout vary in size, so those behind this one can't be found"
            ) from None
        if len(offsets) != shard.records + 1:
            raise BadInput(
                f"{url} holds {len(offsets) - 1} records, and its name says {shard.records}: it was cut or renamed; "
                "copy it again"
            )
        if self._cache:
            self._cache.put(name, offsets.astype("<i8").tobytes())
        return offsets
