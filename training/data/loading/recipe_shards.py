"""A record source for the public recipe's layout (`training.data.formats.recipe_layout`).

Records vary in size, so each process has to read a shard whole to find where its records start, when one of them is
first needed. `tpu-train shards` writes a layout without that cost.

The same in TensorFlow: `training.data.tf.recipe_shards`.
"""

import itertools
import threading
from concurrent.futures import Future

import numpy as np
import numpy.typing as npt

from training.data.formats import recipe_layout, tfrecord
from training.data.formats.dataset import Dataset, Shard
from training.data.loading.record_source import REPLACED, Arrays, OnCorrupt, ShardSource
from training.errors import BadInput
from training.storage import Stat

# Where the records of a shard start, by the shard's state; shared by all sources of this process.
_INDEXES: dict[Stat, Future[npt.NDArray[np.int64]]] = {}
_INDEX_LOCK = threading.Lock()


class RecipeShards(ShardSource):
    """The records of a folder in this layout."""

    def __init__(self, dataset: Dataset, *, vocabulary: int | None = None, on_corrupt: OnCorrupt = "stop") -> None:
        """Checks the shards as `ShardSource`; raises BadInput. Without `vocabulary`, accepts ids up to 2**31 - 1."""
        super().__init__(dataset, dataset.sequence_length, vocabulary or 1 << 31, on_corrupt)
        self.record_bytes = -(-sum(shard.bytes for shard in self.shards) // self.records)

    def empty(self, count: int) -> Arrays:
        return {"input_ids": np.empty((count, self.length), np.int32), REPLACED: np.empty((count, 1), np.bool_)}

    def _load(self, first: int, last: int) -> tuple[Arrays, dict[int, BadInput]]:
        """Reads the ids of records [first, last), and the error of each damaged one, 0 for `first`. Raises BadInput for
        an intact record that does not fit the dataset."""
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
        """Reads `offsets` from the whole shard. Raises BadInput for a damaged header, also with `skip`, or another
        number of records than in the shard's name."""
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
