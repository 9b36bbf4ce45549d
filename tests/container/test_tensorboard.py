"""TensorBoard's own reader reads what a run leaves, and a step that was trained twice is told once."""

import math
from pathlib import Path

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from training.telemetry import trackers as events
from training.telemetry.metrics import AttemptInfo, MetricsLog


def values(loss: float) -> dict[str, float | None]:
    return {"loss": loss, "learning_rate": 1e-3, "examples_per_second": 10.0}


def read(folder: Path) -> EventAccumulator:
    events_read = EventAccumulator(str(folder / events.FOLDER))
    events_read.Reload()
    return events_read


def test_resumed_runs_are_one_curve(tmp_path: Path) -> None:
    first, second = (
        MetricsLog(AttemptInfo(str(tmp_path), attempt, step), trackers=("jsonl", "tensorboard"))
        for attempt, step in ((0, 0), (1, 2))
    )
    for step in (1, 2, 3, 4):
        first.log(step, values(float(step)))
    first.flush()  # and then it was killed; the last commit was step 2
    for step in (3, 4, 5):
        second.log(step, values(step + 0.5))
    second.log(5, {"eval_loss": 1.25, "eval_perplexity": math.exp(1.25)})
    second.finish()
    events_read = read(tmp_path)
    losses = [(event.step, event.value) for event in events_read.Scalars("train/loss")]
    assert losses == [(1, 1.0), (2, 2.0), (3, 3.5), (4, 4.5), (5, 5.5)]
    assert events_read.Scalars("evaluation/perplexity")[0].value == pytest.approx(math.exp(1.25))
    assert set(events_read.Tags()["scalars"]) == {
        *("train/loss", "train/learning_rate", "train/examples_per_second"),
        *("evaluation/loss", "evaluation/perplexity"),
    }


def test_a_file_grows_in_place_on_a_disk(tmp_path: Path) -> None:
    log = events.TensorBoardTracker(AttemptInfo(str(tmp_path), 0, 0))
    log.log(1, values(1.0))
    log.flush()
    [file] = (tmp_path / events.FOLDER).iterdir()
    before = (file.stat().st_ino, file.read_bytes())
    log.log(2, values(2.0))
    log.flush()
    assert file.stat().st_ino == before[0]  # a reader that keeps the file open sees the rest
    assert file.read_bytes().startswith(before[1])
    assert len(read(tmp_path).Scalars("train/loss")) == 2


def test_in_a_bucket_an_object_is_rewritten_until_it_is_full(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    written: list[str] = []

    def write(url: str, data: bytes) -> None:
        written.append(url.rsplit(".", 1)[-1])
        path = tmp_path / url.removeprefix("gs://bucket/")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)

    monkeypatch.setattr(events.storage, "write", write)
    monkeypatch.setattr(events, "ROLL_BYTES", 600)
    log = events.TensorBoardTracker(AttemptInfo("gs://bucket", 0, 0))
    for step in range(1, 13):
        log.log(step, values(float(step)))
        log.flush()
    assert written == sorted(written)
    assert 1 < len(set(written)) < len(written)
    assert [event.step for event in read(tmp_path).Scalars("train/loss")] == list(range(1, 13))
