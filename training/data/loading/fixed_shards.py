"""A record source for the compact layout: all records of a length have the same size, so offsets are arithmetic.

An id that the tokenizer does not have stops the run.

The same in TensorFlow: `training.data.tf.fixed_shards`.
"""

import numpy as np

from training.data.formats import fixed_records
from training.data.formats.dataset import Dataset
from training.data.formats.tfrecord import HEADER, Corrupt
from training.data.loading.recipe_shards import RecipeShards
from training.data.loading.record_source import REPLACED, Arrays, OnCorrupt, RecordSource, ShardSource
from training.errors import BadInput


def open_source(dataset: Dataset, *, vocabulary: int | None = None, on_corrupt: OnCorrupt = "stop") -> RecordSource:
    """Opens the record source for a dataset's layout. `vocabulary`, `on_corrupt`: as for `FixedShards`, `RecipeShards`.
    Raises BadInput when a shard is missing or is not the one that the manifest lists."""
    if dataset.manifest.layout == "recipe":
        return RecipeShards(dataset, vocabulary=vocabulary, on_corrupt=on_corrupt)
    return FixedShards(dataset, vocabulary=vocabulary, on_corrupt=on_corrupt)


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
        self._check_ids(arrays, first)
        return arrays

    def _load(self, first: int, last: int) -> tuple[Arrays, dict[int, BadInput]]:
        """Reads the features of records [first, last), and the error of each bad row, numbered from 0."""
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

    def _check_ids(self, arrays: Arrays, first: int) -> None:
        """Raises BadInput for an id that the tokenizer does not have; `first` is the first row's record."""
        ids = arrays["input_ids"]  # (n, length)
        if int(ids.max()) < self.vocabulary and int(ids.min()) >= 0:
            return
        row = int(np.flatnonzero(((ids >= self.vocabulary) | (ids < 0)).any(axis=1))[0])
        shard, number = self.locate(first + row)
        raise BadInput(
            f"{self.url(shard)}: record {number} has token id {int(ids[row].max())}, and the tokenizer has "
            f"{self.vocabulary} ids: the shards were written with another tokenizer; give that one, or write them again"
        )

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
