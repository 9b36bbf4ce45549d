"""Batches for training and evaluation: `batch(k)` is a pure function of (dataset, seed, global batch size, k).

It does not depend on the number of hosts (each holds its rows of the same global batch), on threads, or on what was
read before. Going on at step k costs the same as starting at 0. The glossary of indices is in
`training.data.sampling.order`, the masks are in `training.data.sampling.masking`.
"""

from __future__ import annotations

import contextlib
import queue
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TypeVar

import numpy as np
import numpy.typing as npt

from training import storage
from training.data.formats.dataset import Dataset
from training.data.loading.host_slice import Reading
from training.data.loading.reader import Reader
from training.data.loading.shards import Source
from training.data.loading.source import open_source
from training.data.sampling.masking import Masked, Masker, Masking
from training.data.sampling.order import Ints, Order, Sequential, Shuffled, geometry
from training.errors import BadInput

T = TypeVar("T")

EVALUATION_EPOCH = -1  # masks of evaluation are none that training sees, and always the same


@dataclass(frozen=True)
class MlmBatch:
    """One host's rows of a global batch. Shapes are the same for every step and host.

    input_ids: (rows, sequence) int32, masked; positions, labels: (rows, predictions) int32; weights: (rows,
    predictions) float32, 0 where there is nothing to predict; records: (rows,) int64, -1 in a row that only fills the
    last evaluation batch. No row has padding, so there is no attention mask."""

    input_ids: npt.NDArray[np.int32]
    positions: npt.NDArray[np.int32]
    labels: npt.NDArray[np.int32]
    weights: npt.NDArray[np.float32]
    records: npt.NDArray[np.int64]


class MlmBatches:
    """Endless training batches. `close` ends its threads."""

    def __init__(self, dataset: Dataset, how: Reading, masking: Masking, seed: int) -> None:
        """Looks at every shard's size (one listing), reads nothing yet. Raises BadInput."""
        rows = how.rows(dataset, "mlm")
        source = _open(dataset, how)
        self.dataset, self.global_batch_size = dataset, how.global_batch_size
        order = Shuffled(geometry(source.records, source.record_bytes, source.unit), seed, self.global_batch_size)
        self._masker = Masker(masking, how.tokenizer, seed)
        self._reader = Reader(source, order, self.global_batch_size, *rows, threads=_threads(dataset))

    @property
    def steps_per_epoch(self) -> int:
        """Steps after which every record has been seen at least once."""
        return -(-self.dataset.records // self.global_batch_size)

    @property
    def skipped(self) -> int:
        """Damaged records that this host has replaced (on_corrupt: skip)."""
        return self._reader.source.skipped()

    def batch(self, k: int) -> MlmBatch:
        """This host's rows of global batch k."""
        epochs, records, arrays = self._reader.rows(k * self.global_batch_size, (k + 1) * self.global_batch_size)
        same = bool((epochs == epochs[0]).all())
        return _mlm(
            self._masker(arrays["input_ids"].astype(np.int32), int(epochs[0]) if same else epochs, records), records
        )

    def close(self) -> None:
        self._reader.close()


def evaluation(dataset: Dataset, how: Reading, masking: Masking, seed: int = 0) -> Iterator[MlmBatch]:
    """All records once, in record order, with the same masks each time; the last batch is filled up with rows of weight
    0 (record -1).

    Every host gets the same number of batches. `seed` chooses the masks: leave it alone, and runs of different seeds
    can be compared."""
    first, last = how.rows(dataset, "mlm")
    source = _open(dataset, how)
    order: Order = Sequential(geometry(source.records, source.record_bytes, source.unit))
    masker = Masker(masking, how.tokenizer, seed)
    with Reader(source, order, how.global_batch_size, first, last, threads=_threads(dataset)) as reader:
        for start in range(0, source.records, how.global_batch_size):
            _, records, arrays = reader.rows(start, min(start + how.global_batch_size, source.records))
            input_ids = arrays["input_ids"].astype(np.int32)
            batch = _mlm(masker(input_ids, EVALUATION_EPOCH, records), records)
            yield _filled(batch, last - first, how.tokenizer.pad)


def prefetch(function: Callable[[int], T], start: int, depth: int, *, stop: int | None = None) -> Iterator[T]:
    """function(start), function(start + 1), ... (below `stop`), computed up to `depth` ahead on a background thread.

    An exception of the function is raised here, in its turn. Closing the iterator ends the thread after the call under
    way."""
    ready: queue.Queue[tuple[T | None, BaseException | None]] = queue.Queue(maxsize=max(1, depth))
    closed = threading.Event()

    def put(item: tuple[T | None, BaseException | None]) -> None:
        while not closed.is_set():
            with contextlib.suppress(queue.Full):
                ready.put(item, timeout=0.1)
                return

    def work() -> None:
        k = start
        try:
            while not closed.is_set() and (stop is None or k < stop):
                put((function(k), None))
                k += 1
            put((None, StopIteration()))
        except BaseException as error:
            put((None, error))

    thread = threading.Thread(target=work, name="prefetch", daemon=True)
    thread.start()
    try:
        while True:
            value, error = ready.get()
            if isinstance(error, StopIteration):
                return
            if error is not None:
                raise error
            yield value  # type: ignore[misc]  # a value, when there is no error
    finally:
        closed.set()


def _open(dataset: Dataset, how: Reading) -> Source:
    vocabulary = how.tokenizer.vocabulary
    if dataset.manifest.vocabulary > vocabulary:
        raise BadInput(
            f"{dataset.url} was written with a tokenizer of {dataset.manifest.vocabulary} ids, and the given one has {vocabulary}: "
            "give the one it was made with"
        )
    return open_source(dataset, vocabulary=vocabulary, on_corrupt=how.on_corrupt, cache=how.cache)


def _threads(dataset: Dataset) -> int:
    return 16 if storage.is_remote(dataset.url) else 2


def _mlm(masked: Masked, records: Ints) -> MlmBatch:
    return MlmBatch(masked.input_ids, masked.positions, masked.labels, masked.weights, records)


def _filled(batch: MlmBatch, count: int, pad: int) -> MlmBatch:
    missing = count - len(batch.records)
    if not missing:
        return batch

    def fill(values: npt.NDArray[np.generic], value: float) -> npt.NDArray[np.generic]:
        return np.concatenate([values, np.full((missing, *values.shape[1:]), value, values.dtype)])

    filled = (fill(values, value) for values, value in zip(vars(batch).values(), (pad, 0, 0, 0, -1), strict=True))
    return MlmBatch(*filled)  # type: ignore[arg-type]
