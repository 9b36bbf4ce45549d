"""Small datasets of generated ids, for the tests of training.data."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest

from training.data import prepare
from training.data.dataset import Dataset
from training.data.masking import SpecialTokens


class Samples:
    """Datasets whose content is known: row i of `ids` is record i."""

    vocabulary = 100
    tokens = SpecialTokens(mask=4, pad=3, special=frozenset(range(5)), vocabulary=100)

    def ids(self, count: int, length: int = 8, seed: int = 0) -> npt.NDArray[np.int32]:
        """Rows that are all different: the record's number is in the first tokens. (count, length)"""
        rows = np.random.default_rng(seed).integers(5, self.vocabulary, (count, length))
        for place in range(min(3, length)):
            rows[:, place] = 5 + np.arange(count) // 90**place % 90
        return rows.astype(np.int32)

    def make(self, folder: Path | str, count: int, length: int = 8, per_shard: int = 10, seed: int = 0) -> Dataset:
        """A dataset of `ids(count, length, seed)` in a folder, local or gs://."""
        rows = self.ids(count, length, seed)
        plan = prepare.Plan("train", length, tokenizer_hash="t" * 64, vocabulary=self.vocabulary, records_per_shard=per_shard)
        return prepare.make(str(folder), plan, lambda: map(str, range(count)), lambda texts: [rows[int(text)] for text in texts]).dataset


@pytest.fixture(scope="session")
def samples() -> Samples:
    return Samples()
