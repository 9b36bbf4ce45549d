"""Batches of masked rows: `MlmBatches.batch(k)` is a pure function of (dataset, seed, global batch size, k).

It does not depend on the number of hosts (each holds its rows of the same global batch), on threads, or on what was
read before; a run that resumes at step k starts as fast as one at step 0. `training.data` has the glossary of indices;
the masks are those of `training.data.sampling.masking`.

The same in TensorFlow: `training.data.tf.mlm_batches`.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from training import storage
from training.data.formats.dataset import Dataset
from training.data.loading.fixed_shards import open_source
from training.data.loading.reader import Reader
from training.data.loading.record_source import REPLACED, Arrays, HostSlice, RecordSource
from training.data.sampling.masking import Masked, Masker, Masking
from training.data.sampling.order import evaluation_order, training_order
from training.data.sampling.random_bits import Ints
from training.errors import BadInput

EVALUATION_EPOCH = -1  # no training epoch has this number: masks of evaluation are always the same


@dataclass(frozen=True)
class MlmBatch:
    """One host's rows of a global batch. Shapes are the same for every step and host.

    No row has padding, so there is no attention mask.

    Attributes:
        input_ids: (rows, length) int32, masked.
        positions: (rows, places) int32, ascending; 0 where nothing is predicted.
        labels: (rows, places) int32, the ids at these positions; 0 where nothing is predicted.
        weights: (rows, places) float32, 1 for a prediction and 0 where there is none.
        records: (rows,) int64, -1 in a row that only fills the last evaluation batch.
        replaced: (rows,) bool, the record is damaged, and another one has its place.
    """

    input_ids: npt.NDArray[np.int32]
    positions: npt.NDArray[np.int32]
    labels: npt.NDArray[np.int32]
    weights: npt.NDArray[np.float32]
    records: npt.NDArray[np.int64]
    replaced: npt.NDArray[np.bool_]


class MlmBatches:
    """Endless training batches. Thread-safe; `close` ends its threads."""

    def __init__(self, dataset: Dataset, host_slice: HostSlice, masking: Masking, seed: int) -> None:
        """Checks every shard's size with one listing; reads no record yet. Raises BadInput."""
        rows = _host_rows(dataset, host_slice)
        source = _open_source(dataset, host_slice)
        self.dataset, self.global_batch_size = dataset, host_slice.global_batch_size
        order = training_order(
            source.records,
            source.record_bytes,
            source.unit,
            seed=seed,
            batch=self.global_batch_size,
        )
        self._masker = Masker(masking, host_slice.tokenizer, seed)
        self._reader = Reader(source, order, self.global_batch_size, *rows, threads=_threads(dataset))

    @property
    def steps_per_epoch(self) -> int:
        """Steps after which every record has been seen at least once."""
        return -(-self.dataset.records // self.global_batch_size)

    def batch(self, k: int) -> MlmBatch:
        """This host's rows of global batch k. Raises BadInput, StorageError."""
        epochs, records, arrays = self._reader.rows(k * self.global_batch_size, (k + 1) * self.global_batch_size)
        one_epoch = bool((epochs == epochs[0]).all())
        masked = self._masker(arrays["input_ids"].astype(np.int32), int(epochs[0]) if one_epoch else epochs, records)
        return _mlm_batch(masked, records, arrays)

    def close(self) -> None:
        """Ends the threads."""
        self._reader.close()


def mlm_evaluation(dataset: Dataset, host_slice: HostSlice, masking: Masking, seed: int = 0) -> Iterator[MlmBatch]:
    """All records once, in record order, with the same masks each time.

    Every host gets the same number of batches; the last one is filled up with rows of weight 0.

    Args:
        dataset: for masked language modelling.
        host_slice: this host's rows.
        masking: how many tokens are predicted.
        seed: of the masks. With the default, runs of different seeds can be compared.

    Raises:
        BadInput: the dataset does not fit, or a record is damaged.
        StorageError: storage can't be read.
    """
    first, last = _host_rows(dataset, host_slice)
    source = _open_source(dataset, host_slice)
    order = evaluation_order(source.records, source.record_bytes, source.unit)
    masker = Masker(masking, host_slice.tokenizer, seed)
    batch_size = host_slice.global_batch_size
    with Reader(source, order, batch_size, first, last, threads=_threads(dataset)) as reader:
        for start in range(0, source.records, batch_size):
            _, records, arrays = reader.rows(start, min(start + batch_size, source.records))
            input_ids = arrays["input_ids"].astype(np.int32)
            batch = _mlm_batch(masker(input_ids, EVALUATION_EPOCH, records), records, arrays)
            yield _fill(batch, last - first, host_slice.tokenizer.pad)


def _host_rows(dataset: Dataset, host_slice: HostSlice) -> tuple[int, int]:
    dataset.require(rows="packed")
    return host_slice.rows()


def _open_source(dataset: Dataset, host_slice: HostSlice) -> RecordSource:
    vocabulary = host_slice.tokenizer.vocabulary
    if dataset.manifest.vocabulary > vocabulary:
        raise BadInput(
            f"{dataset.url} was written with a tokenizer of {dataset.manifest.vocabulary} ids, and the given one has "
            f"{vocabulary}: give the one it was made with"
        )
    return open_source(dataset, vocabulary=vocabulary, on_corrupt=host_slice.on_corrupt, cache=host_slice.cache)


def _threads(dataset: Dataset) -> int:
    return 16 if storage.is_remote(dataset.url) else 2


def _mlm_batch(masked: Masked, records: Ints, arrays: Arrays) -> MlmBatch:
    replaced = arrays[REPLACED][:, 0]  # (rows,)
    return MlmBatch(masked.input_ids, masked.positions, masked.labels, masked.weights, records, replaced)


def _fill(batch: MlmBatch, rows: int, pad: int) -> MlmBatch:
    """The batch with `rows` rows: those that are missing hold padding, weight 0 and record -1."""
    missing = rows - len(batch.records)
    if not missing:
        return batch

    def append(values: npt.NDArray[np.generic], value: float) -> npt.NDArray[np.generic]:
        return np.concatenate([values, np.full((missing, *values.shape[1:]), value, values.dtype)])

    fillers = (pad, 0, 0, 0, -1, False)
    filled = (append(values, filler) for values, filler in zip(vars(batch).values(), fillers, strict=True))
    return MlmBatch(*filled)  # type: ignore[arg-type]
