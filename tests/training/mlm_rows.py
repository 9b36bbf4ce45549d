"""Batches of the datasets that the fixture `samples` makes, and the rows that were masked in them."""

from typing import Any

import numpy as np

from training.data.formats.dataset import Dataset
from training.data.loading.batches import MlmBatches
from training.data.loading.record_source import HostSlice
from training.data.sampling.masking import Masking, SpecialTokens

TOKENS = SpecialTokens(mask=4, pad=3, special=frozenset(range(5)), vocabulary=100)


def mlm_batches(dataset: Dataset, *, seed: int = 1, **how: Any) -> MlmBatches:
    """Returns training batches of 16 rows on one host, unless `how`, the fields of HostSlice, says otherwise."""
    return MlmBatches(dataset, HostSlice(**{"tokenizer": TOKENS, "global_batch_size": 16, **how}), Masking(), seed)


def unmask(batch: Any) -> Any:
    """Returns the rows before masking. `batch`: MlmBatch or Masked"""
    ids, used = batch.input_ids.copy(), batch.weights > 0
    ids[np.nonzero(used)[0], batch.positions[used]] = batch.labels[used]
    return ids
