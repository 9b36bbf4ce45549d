"""Batches of masked rows: packed rows with the masks of `training.data.sampling.masking`.

The same in TensorFlow: `training.data.tf.mlm_batches`.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from training.data.formats.dataset import Dataset
from training.data.loading.packed_batches import PackedBatch, PackedBatches, packed_evaluation
from training.data.loading.record_source import HostSlice
from training.data.sampling.masking import Masked, Masker, Masking

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
        super().__init__(dataset, host_slice, seed, "packed", lambda packed: _mask(masker, packed, packed.epochs))


def mlm_evaluation(dataset: Dataset, host_slice: HostSlice, masking: Masking, seed: int = 0) -> Iterator[MlmBatch]:
    """Yields this host's rows of each batch of one pass in record order, the last one filled with rows of weight 0.
    `seed` and the record alone decide the masks, so that runs can be compared."""
    masker = Masker(masking, host_slice.tokenizer, seed)
    return packed_evaluation(dataset, host_slice, "packed", lambda packed: _mask(masker, packed, EVALUATION_EPOCH))


def _mask(masker: Masker, packed: PackedBatch, epochs: npt.ArrayLike) -> MlmBatch:
    """Masks packed rows. epochs: one for all rows, or (rows,); another epoch gives other masks."""
    masked = masker(packed.input_ids, epochs, packed.records)
    return MlmBatch(**vars(masked), records=packed.records, replaced=packed.replaced)
