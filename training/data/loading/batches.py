"""Batches: `batch(k)` is a pure function of (dataset, seed, global batch size, k).

It does not depend on the number of hosts (each holds its rows of the same global batch), on threads, or on earlier
reads; a run that resumes at step k starts as fast as one at step 0. `training.data` has the glossary of indices.

    MlmBatches        packed rows, with masks
    DocumentBatches   rows of whole documents, with the token that follows each
    LabelledBatches   rows with labels, of a few static lengths. All rows of a global batch are of one length bucket.
                      Each bucket is an endless stream of epochs of its own records, cut into full batches; no record is
                      dropped or repeated. `training.data.sampling.order` decides which bucket each step takes. A bucket
                      with fewer records than a batch would have to repeat rows within a batch, so it is joined to the
                      next longer one and its rows are padded further
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Generic, TypeVar

import numpy as np
import numpy.typing as npt

from training import storage
from training.data.formats.dataset import IGNORED, LABEL, SEGMENTS, TARGETS, TYPES, Dataset, Rows
from training.data.loading.reader import read_once, training_reader
from training.data.loading.record_source import REPLACED, Arrays, FixedShards, HostSlice, RecordSource, open_source
from training.data.sampling.masking import Masked, Masker, Masking
from training.data.sampling.order import batch_of_step, group_lengths
from training.data.sampling.random_bits import Ints, bucket_seed
from training.errors import BadInput

B = TypeVar("B")


# Makes a task's batch of the epochs (rows,), records (rows,) and columns that `Reader.rows` returns.
Convert = Callable[[Ints, Ints, Arrays], B]


class PackedBatches(Generic[B]):
    """Endless training batches. Thread-safe; `close` ends its threads."""

    def __init__(self, dataset: Dataset, host_slice: HostSlice, seed: int, rows: Rows, convert: Convert[B]) -> None:
        """Checks every shard with one listing and starts the reader's threads; reads no record yet. `convert` makes a
        batch of what `Reader.rows` returns. Raises StorageError, and BadInput unless the dataset's rows are of the kind
        `rows`, hosts can share a batch, the tokenizer has its ids, and its shards are the manifest's."""
        source = _open(dataset, host_slice, rows)
        self._batch_size, self._convert = host_slice.global_batch_size, convert
        self._reader = training_reader(source, host_slice, seed, _threads(dataset))

    def batch(self, k: int) -> B:
        """Returns this host's rows of global batch k, once they are read. Raises BadInput for a damaged record that is
        not replaced, a changed shard or an id beyond the tokenizer's; and StorageError."""
        return self._convert(*self._reader.rows(k * self._batch_size, (k + 1) * self._batch_size))

    def close(self) -> None:
        """Ends the reader's threads after the requests that they have begun, without waiting for them. A `batch` that
        waits for a queued one, or is called later and has to read, raises CancelledError."""
        self._reader.close()


def packed_evaluation(dataset: Dataset, host_slice: HostSlice, rows: Rows, convert: Convert[B]) -> Iterator[B]:
    """Yields this host's rows of each batch of one pass in record order, as `convert` makes them. Every host gets the
    same number of batches; rows of weight 0 fill the last one. Opens the dataset, whose rows must be of the kind
    `rows`, when the first batch is asked for. Raises BadInput, StorageError."""
    source = _open(dataset, host_slice, rows)
    first, last = host_slice.rows()
    fillers = {"input_ids": host_slice.tokenizer.pad, "records": -1}
    for found in read_once(source, host_slice, _threads(dataset)):
        yield fill_rows(convert(*found), last - first, fillers)


def fill_rows(batch: B, rows: int, fillers: Mapping[str, Any]) -> B:
    """Returns a batch (a dataclass of arrays, rows first) with filler rows appended until it has `rows`; the same
    object if it has. `fillers`: field -> its value in filler rows, or one row of values; 0 for other fields."""
    arrays = vars(batch)
    missing = rows - len(next(iter(arrays.values())))
    if not missing:
        return batch

    def fill(name: str, values: npt.NDArray[Any]) -> npt.NDArray[Any]:
        added = np.full((missing, *values.shape[1:]), fillers.get(name, 0), values.dtype)
        return np.concatenate([values, added])

    return replace(batch, **{name: fill(name, values) for name, values in arrays.items()})  # type: ignore[type-var]


def _open(dataset: Dataset, host_slice: HostSlice, rows: Rows) -> RecordSource:
    """Opens the dataset's record source; reads no record. Raises as `open_source`, and BadInput without records, for
    rows of another kind, when hosts can't share a batch, or its manifest has more ids than the given tokenizer."""
    dataset.require(rows=rows)
    host_slice.rows()
    vocabulary = host_slice.tokenizer.vocabulary
    if dataset.manifest.vocabulary > vocabulary:
        raise BadInput(
            f"{dataset.url} was written with a tokenizer of {dataset.manifest.vocabulary} ids, and the given one has "
            f"{vocabulary}: give the one it was made with"
        )
    return open_source(dataset, vocabulary=vocabulary, on_corrupt=host_slice.on_corrupt)


def _threads(dataset: Dataset) -> int:
    """Returns how many threads read a dataset, more from Cloud Storage than from a disk; half as many per bucket."""
    return 16 if storage.is_remote(dataset.url) else 2


EVALUATION_EPOCH = -1  # no training epoch has this number: masks of evaluation are always the same


@dataclass(frozen=True)
class MlmBatch(Masked):
    """One host's rows of a global batch. Shapes are the same for every step and host."""

    records: npt.NDArray[np.int64]  # (rows,), -1 in a row that only fills the last evaluation batch
    replaced: npt.NDArray[np.bool_]  # (rows,): another record has the place of a damaged one


class MlmBatches(PackedBatches[MlmBatch]):
    """Endless training batches. Thread-safe; `close` ends its threads."""

    def __init__(self, dataset: Dataset, host_slice: HostSlice, masking: Masking, seed: int) -> None:
        """Checks shards, starts threads and raises as `PackedBatches`; `seed` decides the order and the masks."""
        masker = Masker(masking, host_slice.tokenizer, seed)
        super().__init__(dataset, host_slice, seed, "packed", partial(_mask, masker, None))


def mlm_evaluation(dataset: Dataset, host_slice: HostSlice, masking: Masking, seed: int = 0) -> Iterator[MlmBatch]:
    """Yields this host's rows of each batch of one pass in record order, the last one filled with rows of weight 0.
    `seed` and the record alone decide the masks, so that runs can be compared. Raises BadInput, StorageError."""
    masker = Masker(masking, host_slice.tokenizer, seed)
    return packed_evaluation(dataset, host_slice, "packed", partial(_mask, masker, EVALUATION_EPOCH))


def _mask(masker: Masker, epoch: int | None, epochs: Ints, records: Ints, arrays: Arrays) -> MlmBatch:
    """Masks packed rows as in `epoch`; None: each row as in its own of `epochs`. Another epoch gives other masks."""
    masked = masker(arrays["input_ids"].astype(np.int32), epochs if epoch is None else epoch, records)
    return MlmBatch(**vars(masked), records=records, replaced=arrays[REPLACED][:, 0])


Ids = npt.NDArray[np.int32]


@dataclass(frozen=True)
class DocumentBatch:
    """One host's rows of a global batch. Shapes are the same for every step and host."""

    input_ids: Ids  # (rows, length)
    position_ids: Ids  # (rows, length): a token's place in its document; 0 at each token of padding
    labels: Ids  # (rows, length), the id that follows in the same document; 0 where none does
    weights: npt.NDArray[np.float32]  # (rows, length), 1 where a label is learnt, else 0
    records: npt.NDArray[np.int64]  # (rows,), -1 in a row that only fills the last evaluation batch
    replaced: npt.NDArray[np.bool_]  # (rows,): another record has the place of a damaged one


class DocumentBatches(PackedBatches[DocumentBatch]):
    """Endless training batches. Thread-safe; `close` ends its threads."""

    def __init__(self, dataset: Dataset, host_slice: HostSlice, seed: int) -> None:
        super().__init__(dataset, host_slice, seed, "documents", follow)


def document_evaluation(dataset: Dataset, host_slice: HostSlice) -> Iterator[DocumentBatch]:
    """Yields this host's rows of each batch of one pass in record order; rows of weight 0 fill the last one. Raises
    BadInput, StorageError."""
    return packed_evaluation(dataset, host_slice, "documents", follow)


def follow(_epochs: Ints, records: Ints, arrays: Arrays) -> DocumentBatch:
    """Makes a batch of documents: a token's label is its document's next id, of weight 1. Label and weight are 0 at
    padding, at a document's last token, and where the column `targets`, if any, says that the next id is not learnt."""
    ids, segments = (arrays[name].astype(np.int32) for name in ("input_ids", SEGMENTS))  # (rows, length) each
    places = np.arange(ids.shape[1], dtype=np.int32)
    begins = np.diff(segments, axis=1, prepend=0) != 0
    positions = places - np.maximum.accumulate(np.where(begins, places, 0), axis=1)
    learnt = (segments[:, 1:] == segments[:, :-1]) & (segments[:, 1:] > 0)  # (rows, length - 1)
    if TARGETS in arrays:
        learnt &= arrays[TARGETS][:, 1:] > 0
    labels, weights = np.zeros_like(ids), np.zeros(ids.shape, np.float32)
    labels[:, :-1], weights[:, :-1] = np.where(learnt, ids[:, 1:], 0), learnt
    positions = np.where(segments > 0, positions, 0).astype(np.int32)
    return DocumentBatch(ids, positions, labels, weights, records, arrays[REPLACED][:, 0])


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
        """Reads records [first, last) as `RecordSource.read`; only one of the same row length replaces a bad one."""
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
        """Checks every shard with one listing per length and starts each bucket's reader threads; reads no record.
        Raises StorageError, and BadInput when rows have no labels, hosts can't share a batch, or a shard is not the
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
            training_reader(bucket, host_slice, bucket_seed(seed, bucket.length), _threads(dataset) // 2)
            for bucket in buckets
        ]

    def batch(self, k: int) -> LabelledBatch:
        """Returns this host's rows of global batch k, all of the length bucket that step k takes, once they are read.
        Raises as `PackedBatches.batch`."""
        bucket, number = batch_of_step(self._records, self._batch_size, self._seed, k)
        start = number * self._batch_size
        _, records, arrays = self._readers[bucket].rows(start, start + self._batch_size)
        return _labelled_batch(arrays, records + self._starts[bucket], self._pad, self._rows)

    def close(self) -> None:
        """Ends the readers' threads, as `PackedBatches.close`."""
        for reader in self._readers:
            reader.close()


def labelled_evaluation(dataset: Dataset, host_slice: HostSlice) -> Iterator[LabelledBatch]:
    """Yields this host's rows of all records once, bucket by bucket, in record order. Every host gets the same number
    of batches; rows of weight 0 fill the last one of each bucket. Raises BadInput, StorageError."""
    dataset.require_labels()
    first, last = host_slice.rows()
    bucket_start, pad = 0, host_slice.tokenizer.pad
    for bucket in _open_buckets(dataset, host_slice):
        for _, records, arrays in read_once(bucket, host_slice, _threads(dataset) // 2):
            batch = _labelled_batch(arrays, records + bucket_start, pad, dataset.manifest.rows)
            # One token of attention: a row without any would divide by zero in a softmax.
            attended = np.arange(bucket.length) == 0
            yield fill_rows(batch, last - first, {"input_ids": pad, "attention_mask": attended, "records": -1})
        bucket_start += bucket.records


def _open_buckets(dataset: Dataset, host_slice: HostSlice) -> list[JoinedLengths]:
    """Opens the length buckets, ascending; each has enough records for a global batch, if the dataset has. Raises
    BadInput for a missing shard or one that is not the manifest's, and StorageError."""

    def open_length(length: int) -> FixedShards:
        return FixedShards(
            dataset, length=length, vocabulary=host_slice.tokenizer.vocabulary, on_corrupt=host_slice.on_corrupt
        )

    return [
        JoinedLengths([open_length(length) for length in lengths], fillers(dataset, host_slice.tokenizer.pad))
        for lengths in group_lengths(dataset.records_of_length, host_slice.global_batch_size)
    ]


def fillers(dataset: Dataset, pad: int) -> dict[str, int]:
    """Returns column -> the value that pads its rows to a longer length: `pad` for ids, IGNORED for the labels of
    tokens, 0 for token types; other columns are not padded."""
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
