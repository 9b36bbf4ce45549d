"""Small datasets of generated ids, and a bucket that can misbehave."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from tests.packed_datasets import pack_rows
from tests.servers import BucketServer
from training.data.formats.dataset import Dataset
from training.data.prepare.dataset_writer import DatasetPlan


class Samples:
    """Datasets whose content is known: row i of `ids` is record i."""

    vocabulary = 100

    def ids(self, count: int, seed: int = 0) -> npt.NDArray[np.int32]:
        """Rows that are all different: the record's number is in the first tokens. (count, 8)"""
        rows = np.random.default_rng(seed).integers(5, self.vocabulary, (count, 8))
        for place in range(3):
            rows[:, place] = 5 + np.arange(count) // 90**place % 90
        return rows.astype(np.int32)

    def make(self, folder: Path | str, count: int, per_shard: int = 10, seed: int = 0, **options: Any) -> Dataset:
        """A dataset of `ids(count, seed)` in a folder, local or gs://. options: of DatasetPlan"""
        plan = DatasetPlan("train", 8, "t" * 64, self.vocabulary, per_shard, **options)
        return pack_rows(folder, plan, self.ids(count, seed))


@pytest.fixture(scope="session")
def samples() -> Samples:
    return Samples()


@pytest.fixture
def gcs(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Iterator[BucketServer]:
    """gs://bucket on this machine, with short time-outs."""
    from training.storage import gcs as bucket

    server = BucketServer(tmp_path_factory.mktemp("storage"))
    monkeypatch.setenv("STORAGE_EMULATOR_HOST", server.url)
    quick = bucket.Timeouts(connect=2, silence=1, deadline=8, first_delay=0.005, longest_delay=0.05)
    monkeypatch.setattr(bucket, "timeouts", quick)
    yield server
    server.close()
