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

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Generic, TypeVar

import numpy as np
import numpy.typing as npt

from training import storage
from training.data.formats.dataset import IGNORED, LABEL, SEGMENTS, TARGETS, TYPES, Dataset, Rows
from training.data.loading.reader import Reader, read_once
from training.data.loading.record_source import REPLACED, Arrays, HostSlice, RecordSource, open_source
from training.data.sampling.masking import Masked, Masker, Masking
from training.data.sampling.order import batch_of_step, group_lengths
from training.data.sampling.random_bits import Ints, bucket_seed
from training.errors import BadInput

B = TypeVar("B")


# Makes a task's batch of the epochs (rows,), records (rows,) and columns that `Reader.rows` returns.
Convert = Callable[[Ints, Ints, Arrays], B]


class Batches(Generic[B]):
    """Endless training batches. Thread-safe; `close` ends its threads."""

    def __init__(
        self, dataset: Dataset, host_slice: HostSlice, seed: int, rows: Rows | None, convert: Convert[B]
    ) -> None:
        """Checks every shard, with one listing per length bucket, and starts each bucket's reader threads; reads no
        record yet. `convert` makes a batch of what `Reader.rows` returns. Raises StorageError, and BadInput unless the
        dataset's rows are of the kind `rows` (None: labelled ones), hosts can share a batch, the tokenizer has its ids,
        and its shards are the manifest's."""
        sources = _open_buckets(dataset, host_slice, rows)
        self.lengths = tuple(source.length for source in sources)
        self._records = tuple(source.records for source in sources)
        self._starts = np.cumsum([0, *self._records])  # the first record of each bucket
        self._batch_size, self._seed, self._convert = host_slice.global_batch_size, seed, convert
        self._readers = [
            Reader(source, host_slice, seed if rows else bucket_seed(seed, source.length), _threads(dataset))
            for source in sources
        ]

    def batch(self, k: int) -> B:
        """Returns this host's rows of global batch k, all of the length bucket that step k takes, once they are read.
        Raises BadInput for a damaged record that is not replaced, a changed shard or an id beyond the tokenizer's; and
        StorageError."""
        bucket, number = batch_of_step(self._records, self._batch_size, self._seed, k)
        start = number * self._batch_size
        epochs, records, arrays = self._readers[bucket].rows(start, start + self._batch_size)
        return self._convert(epochs, records + self._starts[bucket], arrays)

    def close(self) -> None:
        """Ends the readers' threads after the requests that they have begun, without waiting for them. A `batch` that
        waits for a queued one, or is called later and has to read, raises CancelledError."""
        for reader in self._readers:
            reader.close()


def evaluation_batches(dataset: Dataset, host_slice: HostSlice, rows: Rows | None, convert: Convert[B]) -> Iterator[B]:
    """Yields this host's rows of each batch of one pass, bucket by bucket, in record order, as `convert` makes them.
    Every host gets the same number of batches; rows of weight 0 fill the last one of each bucket. Opens the dataset,
    whose rows must be of the kind `rows` (None: labelled ones), when the first batch is asked for. Raises BadInput,
    StorageError."""
    first, last = host_slice.rows()
    start = 0  # the bucket's first record
    for source in _open_buckets(dataset, host_slice, rows):
        # One token of attention: a row without any would divide by zero in a softmax.
        attended = np.arange(source.length) == 0
        fillers = {"input_ids": host_slice.tokenizer.pad, "attention_mask": attended, "records": -1}
        for records, arrays in read_once(source, host_slice, _threads(dataset)):
            epochs = np.full_like(records, EVALUATION_EPOCH)
            yield fill_rows(convert(epochs, records + start, arrays), last - first, fillers)
        start += source.records


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


def _open_buckets(dataset: Dataset, host_slice: HostSlice, rows: Rows | None) -> list[RecordSource]:
    """Opens the record source of each length bucket, ascending; each has enough records for a global batch, if the
    dataset has. Reads no record. Raises BadInput without records, for rows of another kind (None: without labels), when
    hosts can't share a batch, or the manifest has more ids than the given tokenizer; and as `open_source`."""
    if rows:
        dataset.require(rows=rows)
    else:
        dataset.require_labels()
    host_slice.rows()
    tokenizer = host_slice.tokenizer
    if dataset.manifest.vocabulary > tokenizer.vocabulary:
        raise BadInput(
            f"{dataset.url} was written with a tokenizer of {dataset.manifest.vocabulary} ids, and the given one has "
            f"{tokenizer.vocabulary}: give the one it was made with"
        )
    options = {"vocabulary": tokenizer.vocabulary, "pad": tokenizer.pad, "on_corrupt": host_slice.on_corrupt}
    groups = group_lengths(dataset.records_of_length, host_slice.global_batch_size)
    return [open_source(dataset, lengths=lengths, **options) for lengths in groups]


def _threads(dataset: Dataset) -> int:
    """Returns the reader threads of one length bucket: 16 from Cloud Storage, 2 from a disk; half with several
    lengths."""
    buckets = 1 if len(dataset.records_of_length) == 1 else 2
    return (16 if storage.is_remote(dataset.url) else 2) // buckets


EVALUATION_EPOCH = -1  # no training epoch has this number: masks of evaluation are always the same


@dataclass(frozen=True)
class MlmBatch(Masked):
    """One host's rows of a global batch. Shapes are the same for every step and host."""

    records: npt.NDArray[np.int64]  # (rows,), -1 in a row that only fills the last evaluation batch
    replaced: npt.NDArray[np.bool_]  # (rows,): another record has the place of a damaged one


class MlmBatches(Batches[MlmBatch]):
    """Endless training batches of packed rows; `seed` decides the order and the masks."""

    def __init__(self, dataset: Dataset, host_slice: HostSlice, masking: Masking, seed: int) -> None:
        masker = Masker(masking, host_slice.tokenizer, seed)
        super().__init__(dataset, host_slice, seed, "packed", partial(_mask, masker))


def mlm_evaluation(dataset: Dataset, host_slice: HostSlice, masking: Masking, seed: int = 0) -> Iterator[MlmBatch]:
    """Yields batches as `evaluation_batches`. `seed` and the record alone decide the masks, so that runs can be
    compared."""
    masker = Masker(masking, host_slice.tokenizer, seed)
    return evaluation_batches(dataset, host_slice, "packed", partial(_mask, masker))


def _mask(masker: Masker, epochs: Ints, records: Ints, arrays: Arrays) -> MlmBatch:
    """Masks packed rows, each as in its own of `epochs`: another epoch gives other masks."""
    masked = masker(arrays["input_ids"].astype(np.int32), epochs, records)
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


class DocumentBatches(Batches[DocumentBatch]):
    """Endless training batches of rows of documents; `seed` decides the order."""

    def __init__(self, dataset: Dataset, host_slice: HostSlice, seed: int) -> None:
        super().__init__(dataset, host_slice, seed, "documents", follow)


def document_evaluation(dataset: Dataset, host_slice: HostSlice) -> Iterator[DocumentBatch]:
    """Yields batches as `evaluation_batches`."""
    return evaluation_batches(dataset, host_slice, "documents", follow)


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


class LabelledBatches(Batches[LabelledBatch]):
    """Endless training batches of labelled rows, each of one length bucket; `seed` decides the order."""

    def __init__(self, dataset: Dataset, host_slice: HostSlice, seed: int) -> None:
        convert = partial(_label, dataset.manifest.rows, host_slice.tokenizer.pad)
        super().__init__(dataset, host_slice, seed, None, convert)


def labelled_evaluation(dataset: Dataset, host_slice: HostSlice) -> Iterator[LabelledBatch]:
    """Yields batches as `evaluation_batches`."""
    convert = partial(_label, dataset.manifest.rows, host_slice.tokenizer.pad)
    return evaluation_batches(dataset, host_slice, None, convert)


def _label(rows: Rows, pad: int, _epochs: Ints, records: Ints, arrays: Arrays) -> LabelledBatch:
    """Builds a batch of rows of the kind `rows`, a PairBatch if there are token types. Labels are float32 if they are
    stored as floats, else int32. Weights are 1, but 0 at tokens without a label; attention is 0 at `pad`."""
    ids, stored = arrays["input_ids"].astype(np.int32), arrays[LABEL]  # (rows, length), (rows, numbers)
    labels: Labels = stored.astype(np.float32 if np.issubdtype(stored.dtype, np.floating) else np.int32)
    weights, replaced = np.ones(len(ids), np.float32), arrays[REPLACED][:, 0]  # (rows,), (rows,)
    if rows == "token-labelled":
        weights = (labels != IGNORED).astype(np.float32)  # (rows, length)
    elif rows != "set-labelled":
        labels = labels[:, 0]
    fields = (ids, (ids != pad).astype(np.int32), labels, weights, records, replaced)
    return PairBatch(*fields, arrays[TYPES].astype(np.int32)) if TYPES in arrays else LabelledBatch(*fields)
