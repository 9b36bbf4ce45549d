"""With `data.on_corrupt: skip` a run says exactly how many rows it has replaced, in training and in evaluations."""

from pathlib import Path

import pytest

from tests.training.damage import flip
from tests.training.numpy_backend import Runs


def damage(folder: Path) -> None:
    """Damages one record, in the middle of a shard."""
    path = min(folder.glob("*.tfrecord"))
    flip(path, path.stat().st_size // 2)


def test_a_damaged_record_counts_once_and_evaluations_tell(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    runs = Runs(tmp_path)
    damage(runs.folder / "train")
    damage(runs.folder / "evaluation")
    changes = {"train__steps": 3 * 64 // 8, "train__global_batch_size": 8, "checkpoint__every_steps": None}
    summary = runs.train("r", 0, **changes, data__on_corrupt="skip")
    assert summary["skipped_records"] == 3, "once in each of three epochs"
    told = capsys.readouterr()
    assert "1 damaged records of this host's part of" in told.err
    assert "so the figures are not exact" in told.err
