"""Batches of masked rows: packed rows with the masks of `training.data.sampling.masking`.

The same in TensorFlow: `training.data.tf.mlm_batches`.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from training.data.formats.dataset import Dataset
from training.data.loading.packed_batches import PackedBatch, PackedBatches, fill_rows, packed_evaluation
from training.data.loading.record_source import HostSlice
from training.data.sampling.masking import Masked, Masker, Masking

EVALUATION_EPOCH = -1  # no training epoch has this number: masks of evaluation are always the same


@dataclass(frozen=True)
class MlmBatch(Masked):
    """One host's rows of a global batch. Shapes are the same for every step and host."""

    records: npt.NDArray[np.int64]  # (rows,), -1 in a row that only fills the last evaluation batch
    replaced: npt.NDArray[np.bool_]  # (rows,): another record has the place of a damaged one


class MlmBatches:
    """Endless training batches. Thread-safe; `close` ends its threads."""

    def __init__(self, dataset: Dataset, host_slice: HostSlice, masking: Masking, seed: int) -> None:
        """Arguments and errors as for `PackedBatches`, whose threads it starts; `seed` decides the masks too."""
        self._packed = PackedBatches(dataset, host_slice, seed)
        self._masker = Masker(masking, host_slice.tokenizer, seed)
        self.close = self._packed.close

    def batch(self, k: int) -> MlmBatch:
        """Returns this host's rows of global batch k, once they are read, masked. Raises as `PackedBatches.batch`."""
        packed = self._packed.batch(k)
        return _mask(self._masker, packed, packed.epochs)


def mlm_evaluation(dataset: Dataset, host_slice: HostSlice, masking: Masking, seed: int = 0) -> Iterator[MlmBatch]:
    """Yields all records once, in record order, masked by `seed` and the record alone, so that runs can be compared.
    Every host gets the same number of batches; rows of weight 0 fill the last one. Raises BadInput, StorageError."""
    first, last = host_slice.rows()
    masker = Masker(masking, host_slice.tokenizer, seed)
    for packed in packed_evaluation(dataset, host_slice):
        batch = _mask(masker, packed, EVALUATION_EPOCH)
        yield fill_rows(batch, last - first, {"input_ids": host_slice.tokenizer.pad, "records": -1})


def _mask(masker: Masker, packed: PackedBatch, epochs: npt.ArrayLike) -> MlmBatch:
    """Masks packed rows. epochs: one for all rows, or (rows,); another epoch gives other masks."""
    masked = masker(packed.input_ids, epochs, packed.records)
    return MlmBatch(**vars(masked), records=packed.records, replaced=packed.replaced)
