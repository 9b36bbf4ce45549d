"""Batches of rows of one length: packed rows with masks, for masked-language modelling, and rows of whole documents,
for next-token prediction. `PackedBatches.batch(k)` is a pure function of (dataset, seed, global batch size, k).

It does not depend on the number of hosts (each holds its rows of the same global batch), on threads, or on earlier
reads; a run that resumes at step k starts as fast as one at step 0. `training.data` has the glossary of indices.

Masked rows in TensorFlow: `training.data.tf.batches`.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Generic, TypeVar

import numpy as np
import numpy.typing as npt

from training import storage
from training.data.formats.dataset import SEGMENTS, TARGETS, Dataset, Rows
from training.data.loading.reader import read_once, training_reader
from training.data.loading.record_source import REPLACED, Arrays, HostSlice, RecordSource, open_source
from training.data.sampling.masking import Masked, Masker, Masking
from training.data.sampling.random_bits import Ints
from training.errors import BadInput

B = TypeVar("B")


# Makes a task's batch of the epochs (rows,), records (rows,) and columns that `Reader.rows` returns.
Convert = Callable[[Ints, Ints, Arrays], B]


class PackedBatches(Generic[B]):
    """Endless training batches. Thread-safe; `close` ends its threads."""

    def __init__(self, dataset: Dataset, host_slice: HostSlice, seed: int, rows: Rows, convert: Convert[B]) -> None:
        """Checks every shard with one listing and starts the reader's threads; reads no record yet. Raises BadInput
        when rows are of another kind, hosts can't share a batch, the tokenizer has too few ids, or a shard is not the
        manifest's."""
        source = _open(dataset, host_slice, rows)
        self._batch_size, self._convert = host_slice.global_batch_size, convert
        self._reader = training_reader(source, host_slice, seed, _threads(dataset))

    def batch(self, k: int) -> B:
        """Returns this host's rows of global batch k, once they are read. Raises BadInput for a damaged or changed
        shard, and StorageError."""
        return self._convert(*self._reader.rows(k * self._batch_size, (k + 1) * self._batch_size))

    def close(self) -> None:
        """Ends the reader's threads after the requests that are queued, without waiting for them."""
        self._reader.close()


def packed_evaluation(dataset: Dataset, host_slice: HostSlice, rows: Rows, convert: Convert[B]) -> Iterator[B]:
    """Yields this host's rows of each batch of one pass in record order, as `convert` makes them. Every host gets the
    same number of batches; rows of weight 0 fill the last one. Raises BadInput, StorageError."""
    source = _open(dataset, host_slice, rows)
    first, last = host_slice.rows()
    fillers = {"input_ids": host_slice.tokenizer.pad, "records": -1}
    for found in read_once(source, host_slice, _threads(dataset)):
        yield fill_rows(convert(*found), last - first, fillers)


def fill_rows(batch: B, rows: int, fillers: Mapping[str, Any]) -> B:
    """Returns a dataclass of arrays with rows appended until it has `rows`, the same one if it has. `fillers` gives a
    field's value, or row, there; 0 for fields without one."""
    arrays = vars(batch)
    missing = rows - len(next(iter(arrays.values())))
    if not missing:
        return batch

    def fill(name: str, values: npt.NDArray[Any]) -> npt.NDArray[Any]:
        added = np.full((missing, *values.shape[1:]), fillers.get(name, 0), values.dtype)
        return np.concatenate([values, added])

    return replace(batch, **{name: fill(name, values) for name, values in arrays.items()})  # type: ignore[type-var]


def _open(dataset: Dataset, host_slice: HostSlice, rows: Rows) -> RecordSource:
    """Opens the dataset's record source. Raises BadInput when its rows are of another kind, hosts can't share a batch,
    or its manifest has more ids than the given tokenizer."""
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
    """Returns how many threads read the shards: more from a bucket than from a disk."""
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
        """Checks the shards and starts threads as `PackedBatches`; `seed` decides the order and the masks."""
        masker = Masker(masking, host_slice.tokenizer, seed)
        super().__init__(dataset, host_slice, seed, "packed", partial(_mask, masker, None))


def mlm_evaluation(dataset: Dataset, host_slice: HostSlice, masking: Masking, seed: int = 0) -> Iterator[MlmBatch]:
    """Yields this host's rows of each batch of one pass in record order, the last one filled with rows of weight 0.
    `seed` and the record alone decide the masks, so that runs can be compared."""
    masker = Masker(masking, host_slice.tokenizer, seed)
    return packed_evaluation(dataset, host_slice, "packed", partial(_mask, masker, EVALUATION_EPOCH))


def _mask(masker: Masker, epoch: int | None, epochs: Ints, records: Ints, arrays: Arrays) -> MlmBatch:
    """Masks packed rows, as of `epoch` if it is given; another epoch gives other masks."""
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
    """Yields this host's rows of each batch of one pass in record order; rows of weight 0 fill the last one."""
    return packed_evaluation(dataset, host_slice, "documents", follow)


def follow(_epochs: Ints, records: Ints, arrays: Arrays) -> DocumentBatch:
    """Returns rows whose labels are each document's next tokens, with weight 0 where nothing is learnt."""
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
