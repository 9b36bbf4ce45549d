"""A record source for the public recipe's layout (`training.data.formats.recipe_layout`).

Records vary in size, so a shard has to be read whole to find where its records start, when one of them is first needed.
The hosts of a run divide the shards of a bucket among themselves, and share and keep where records start as
`<output>/recipe-indexes/<key>/<shard>.index`; a host that finds none reads the shard itself.

The same in TensorFlow: `training.data.tf.recipe_shards`.
"""

from __future__ import annotations

import contextlib
import itertools
import threading
from collections import deque
from collections.abc import Iterator
from concurrent.futures import Future

import numpy as np
import numpy.typing as npt

from training import storage
from training.data.formats import recipe_layout, tfrecord
from training.data.formats.dataset import Dataset, Shard
from training.data.loading.cache import Cache, seal, unseal
from training.data.loading.record_source import REPLACED, Arrays, HostSlice, OnCorrupt, ShardSource
from training.errors import BadInput
from training.storage import Stat, StorageError

# Where the records of a shard start, by the shard's state; shared by all sources of this process.
_INDEXES: dict[Stat, Future[npt.NDArray[np.int64]]] = {}
_INDEX_LOCK = threading.Lock()


class RecipeShards(ShardSource):
    """The records of a folder in this layout."""

    def __init__(
        self,
        dataset: Dataset,
        *,
        vocabulary: int | None = None,
        on_corrupt: OnCorrupt = "stop",
        cache: Cache | None = None,
        sharing: HostSlice | None = None,
    ) -> None:
        """Arguments as for `ShardSource`. Without `vocabulary`, ids up to 2**31 - 1 are accepted. `sharing`: this host
        among those that share `sharing.indexes`."""
        super().__init__(dataset, dataset.sequence_length, vocabulary or 1 << 31, on_corrupt, cache)
        self.record_bytes = -(-sum(shard.bytes for shard in self.shards) // self.records)
        self._indexes = sharing.indexes if sharing and storage.is_remote(dataset.url) else None
        self._in_order = deque(_order(self.shards, sharing.host, sharing.hosts) if sharing and self._indexes else ())

    def empty(self, count: int) -> Arrays:
        return {"input_ids": np.empty((count, self.length), np.int32), REPLACED: np.empty((count, 1), np.bool_)}

    def _pieces(self, first: int, last: int) -> Iterator[tuple[Shard, int, list[int]]]:
        """Yields, for each shard that holds some of the records [first, last): the shard, the number of the first of
        them in it, and where they start and the last ends."""
        for shard, begin, end in self.split_by_shard(first, last):
            yield shard, begin, self.offsets(shard)[begin : end + 1].tolist()

    def _bytes(self, first: int, last: int) -> int:
        return sum(offsets[-1] - offsets[0] for _, _, offsets in self._pieces(first, last))

    def _fetch(self, first: int, last: int) -> bytes:
        pieces = self._pieces(first, last)
        return b"".join(self.read_bytes(shard, offsets[0], offsets[-1], begin) for shard, begin, offsets in pieces)

    def _decode(self, data: bytes, first: int, last: int) -> tuple[Arrays, dict[int, BadInput]]:
        """Implements `ShardSource`. Raises BadInput for an intact record that does not fit the dataset."""
        rows = np.zeros((last - first, self.length), np.int32)  # (n, length)
        bad: dict[int, BadInput] = {}
        row = position = 0
        for shard, begin, offsets in self._pieces(first, last):
            for number, (start, stop) in enumerate(itertools.pairwise(offsets), begin):
                framed, position = data[position : position + stop - start], position + stop - start
                where = (self.url(shard), number, start)
                try:
                    rows[row] = recipe_layout.decode_ids(framed, *where, self.length, self.vocabulary)
                except tfrecord.Corrupt as error:
                    bad[row] = error
                row += 1
        return {"input_ids": rows}, bad

    def offsets(self, shard: Shard) -> npt.NDArray[np.int64]:
        """Returns, (records + 1,), the byte at which each record of a shard starts, and last the shard's size. The
        first call in this process reads the whole shard, or its index; other threads and sources wait for it and share
        it. Where hosts share indexes, shards before it in this host's order come first. Raises BadInput,
        StorageError."""
        while self._in_order and self.stats[self.url(shard)] not in _INDEXES:
            with contextlib.suppress(IndexError):  # another thread has taken the last
                self._index(self._in_order.popleft())
        return self._index(shard)

    def _index(self, shard: Shard) -> npt.NDArray[np.int64]:
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
        """Reads `offsets` from the shared index or from the whole shard, and then writes the index. Raises BadInput for
        a damaged header, also with `skip`, or another number of records than in the shard's name."""
        index = storage.join(self._indexes, self.key, f"{shard.name}.index") if self._indexes else None
        if index:
            with contextlib.suppress(StorageError):
                shared = unseal(storage.read(index), 8 * (shard.records + 1))
                if shared is not None:
                    return np.frombuffer(shared, "<i8").astype(np.int64)
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
        if index:
            with contextlib.suppress(StorageError):  # others read the shard themselves
                storage.write(index, seal(offsets.astype("<i8").tobytes()))
        return offsets


def _order(shards: list[Shard], host: int, hosts: int) -> list[Shard]:
    """Returns the shards in the order in which a host indexes them: first its own; then those of the other hosts, the
    last ones first, which come last there. [] for a single host, which indexes a shard when it needs it."""
    others = (shards[(host + distance) % hosts :: hosts] for distance in range(1, hosts))
    return [*shards[host::hosts], *(shard for share in others for shard in reversed(share))] if hosts > 1 else []
