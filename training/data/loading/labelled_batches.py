"""Batches of labelled rows, of a few static lengths: `LabelledBatches.batch(k)` is a pure function of (dataset, seed,
global batch size, k), as in `training.data.loading.packed_batches`.

All rows of a global batch are of one length bucket. Each bucket is an endless stream of epochs of its own records, cut
into full batches; no record is dropped or repeated. `training.data.sampling.order` decides which bucket each
step takes. A bucket with fewer records than a batch would have to repeat rows within a batch, so it is joined to the
next longer one and its rows are padded further.

The same in TensorFlow: `training.data.tf.batches`.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from training import storage
from training.data.formats.dataset import IGNORED, LABEL, TYPES, Dataset, Rows
from training.data.loading.packed_batches import fill_rows
from training.data.loading.reader import read_once, training_reader
from training.data.loading.record_source import REPLACED, Arrays, FixedShards, HostSlice
from training.data.sampling.order import batch_of_step, group_lengths
from training.data.sampling.random_bits import Ints, bucket_seed

Labels = npt.NDArray[np.int32 | np.float32]


@dataclass(frozen=True)
class LabelledBatch:
    """One host's rows of a global batch; their length is one of a few."""

    input_ids: npt.NDArray[np.int32]  # (rows, length)
    attention_mask: npt.NDArray[np.int32]  # (rows, length), 0 at padding
    # (rows,) class numbers or floats; (rows, labels) 0 or 1; or (rows, length) class numbers of tokens.
    labels: Labels
    # (rows,), 0 in a row that only fills an evaluation batch; (rows, length) if tokens have labels, 0 at those without.
    weights: npt.NDArray[np.float32]
    records: npt.NDArray[np.int64]  # (rows,), -1 in such a row
    replaced: npt.NDArray[np.bool_]  # (rows,): another record has the place of a damaged one


@dataclass(frozen=True)
class PairBatch(LabelledBatch):
    """A batch of rows of two texts. `token_type_ids`: (rows, length) int32, 1 at the second one."""

    token_type_ids: npt.NDArray[np.int32]


class JoinedLengths:
    """One `RecordSource` over shards of several row lengths: shorter rows first, all padded to the longest length."""

    def __init__(self, sources: Sequence[FixedShards], fillers: Mapping[str, int]) -> None:
        """Joins `sources`, ascending by row length. `fillers`: the value, by column, that pads shorter rows."""
        self.sources, self.fillers = sources, fillers
        self.length = sources[-1].length
        self.records = sum(source.records for source in sources)
        self.record_bytes = sources[-1].record_bytes

    def empty(self, count: int) -> Arrays:
        return self.sources[-1].empty(count)

    def read(self, first: int, last: int, block: int) -> Arrays:
        """Reads records [first, last) as `RecordSource.read`; those of another row length replace no bad ones."""
        if len(self.sources) == 1:
            return self.sources[0].read(first, last, block)
        arrays, start = self.empty(last - first), 0  # (n, length) and (n, 1); first record of the source
        for name, filler in self.fillers.items():
            arrays[name][:] = filler
        for source in self.sources:
            # Read block by block: replacements must not depend on which blocks are read together.
            for begin in range(first, last, block):
                low, high = max(begin, start), min(begin + block, last, start + source.records)
                if low < high:
                    for name, values in source.read(low - start, high - start, block).items():
                        arrays[name][low - first : high - first, : values.shape[1]] = values
            start += source.records
        return arrays


class LabelledBatches:
    """Endless training batches. Thread-safe; `close` ends its threads."""

    def __init__(self, dataset: Dataset, host_slice: HostSlice, seed: int) -> None:
        """Checks every shard with one listing per length and starts each bucket's reader threads; reads no record yet.
        Raises BadInput when rows have no labels, hosts can't share a batch, or a shard is missing or not the
        manifest's."""
        dataset.require_labels()
        host_slice.rows()  # raises before any shard is listed
        self._rows, self._batch_size, self._seed = dataset.manifest.rows, host_slice.global_batch_size, seed
        self._pad = host_slice.tokenizer.pad
        buckets = _open_buckets(dataset, host_slice)
        self.lengths = tuple(bucket.length for bucket in buckets)
        self._records = tuple(bucket.records for bucket in buckets)
        self._starts = np.cumsum([0, *self._records])  # the first record of each bucket
        self._readers = [
            training_reader(bucket, host_slice, bucket_seed(seed, bucket.length), _threads(dataset))
            for bucket in buckets
        ]

    def batch(self, k: int) -> LabelledBatch:
        """Returns this host's rows of global batch k, once they are read. Raises BadInput for a damaged or changed
        shard, and StorageError."""
        bucket, number = batch_of_step(self._records, self._batch_size, self._seed, k)
        start = number * self._batch_size
        _, records, arrays = self._readers[bucket].rows(start, start + self._batch_size)
        return _labelled_batch(arrays, records + self._starts[bucket], self._pad, self._rows)

    def close(self) -> None:
        """Ends the readers' threads after the requests that are queued, without waiting for them."""
        for reader in self._readers:
            reader.close()


def labelled_evaluation(dataset: Dataset, host_slice: HostSlice) -> Iterator[LabelledBatch]:
    """Yields this host's rows of all records once, bucket by bucket, in record order. Every host gets the same number
    of batches; rows of weight 0 fill the last one of each bucket. Raises BadInput, StorageError."""
    dataset.require_labels()
    first, last = host_slice.rows()
    bucket_start, pad = 0, host_slice.tokenizer.pad
    for bucket in _open_buckets(dataset, host_slice):
        for _, records, arrays in read_once(bucket, host_slice, _threads(dataset)):
            batch = _labelled_batch(arrays, records + bucket_start, pad, dataset.manifest.rows)
            # One token of attention: a row without any would divide by zero in a softmax.
            attended = np.arange(bucket.length) == 0
            yield fill_rows(batch, last - first, {"input_ids": pad, "attention_mask": attended, "records": -1})
        bucket_start += bucket.records


def _open_buckets(dataset: Dataset, host_slice: HostSlice) -> list[JoinedLengths]:
    """Opens the length buckets, ascending; each has enough records for a global batch, if the dataset has. Raises
    BadInput for a missing shard or one that is not the manifest's."""

    def open_length(length: int) -> FixedShards:
        return FixedShards(
            dataset, length=length, vocabulary=host_slice.tokenizer.vocabulary, on_corrupt=host_slice.on_corrupt
        )

    return [
        JoinedLengths([open_length(length) for length in lengths], fillers(dataset, host_slice.tokenizer.pad))
        for lengths in group_lengths(dataset.records_of_length, host_slice.global_batch_size)
    ]


def _threads(dataset: Dataset) -> int:
    """Returns how many threads read each length bucket: more from a bucket of Cloud Storage than from a disk."""
    return 8 if storage.is_remote(dataset.url) else 1


def fillers(dataset: Dataset, pad: int) -> dict[str, int]:
    """Returns the value, by column, with which rows are padded to a longer length."""
    labels = {LABEL: IGNORED} if dataset.manifest.rows == "token-labelled" else {}
    return {"input_ids": pad, **labels, **({TYPES: 0} if dataset.has_pairs else {})}


def label_dtype(stored: np.dtype[np.generic]) -> np.dtype[np.int32 | np.float32]:
    """Returns the dtype of a batch's labels: float32 for stored floats, int32 for stored integers."""
    return np.dtype(np.float32) if np.issubdtype(stored, np.floating) else np.dtype(np.int32)


def _labelled_batch(arrays: Arrays, records: Ints, pad: int, rows: Rows) -> LabelledBatch:
    """Builds a batch from a source's columns, a PairBatch if there are token types. Weights are 1, but 0 at tokens
    without a label; attention is 0 at `pad`. records: (rows,)."""
    ids = arrays["input_ids"].astype(np.int32)  # (rows, length)
    labels = arrays[LABEL].astype(label_dtype(arrays[LABEL].dtype))  # (rows, numbers)
    weights, replaced = np.ones(len(ids), np.float32), arrays[REPLACED][:, 0]  # (rows,), (rows,)
    if rows == "token-labelled":
        weights = (labels != IGNORED).astype(np.float32)  # (rows, length)
    elif rows != "set-labelled":
        labels = labels[:, 0]
    fields = (ids, (ids != pad).astype(np.int32), labels, weights, records, replaced)
    return PairBatch(*fields, arrays[TYPES].astype(np.int32)) if TYPES in arrays else LabelledBatch(*fields)
