"""Batches of whole documents for next-token prediction: rows of documents with the position of each token in its
document, and the token that follows it there."""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from training.data.formats.dataset import SEGMENTS, TARGETS, Dataset
from training.data.loading.packed_batches import PackedBatch, PackedBatches, packed_evaluation
from training.data.loading.record_source import HostSlice

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


def follow(packed: PackedBatch) -> DocumentBatch:
    """Returns rows whose labels are each document's next tokens, with weight 0 where nothing is learnt."""
    ids, segments = packed.input_ids, packed.columns[SEGMENTS].astype(np.int32)  # (rows, length) each
    places = np.arange(ids.shape[1], dtype=np.int32)
    begins = np.diff(segments, axis=1, prepend=0) != 0
    positions = places - np.maximum.accumulate(np.where(begins, places, 0), axis=1)
    learnt = (segments[:, 1:] == segments[:, :-1]) & (segments[:, 1:] > 0)  # (rows, length - 1)
    if TARGETS in packed.columns:
        learnt &= packed.columns[TARGETS][:, 1:] > 0
    labels, weights = np.zeros_like(ids), np.zeros(ids.shape, np.float32)
    labels[:, :-1], weights[:, :-1] = np.where(learnt, ids[:, 1:], 0), learnt
    return DocumentBatch(
        ids, np.where(segments > 0, positions, 0).astype(np.int32), labels, weights, packed.records, packed.replaced
    )
