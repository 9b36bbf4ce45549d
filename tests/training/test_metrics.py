"""Claims about the numbers of a run: the lines of all attempts are one history, kept in small objects."""

import json
from pathlib import Path
from typing import Any

import pytest

from training.config import Train
from training.errors import BadInput
from training.optim.adamw import bias_corrections
from training.optim.schedule import learning_rate, step_seed
from training.telemetry import metrics
from training.telemetry.metrics import AttemptInfo, MetricsLog, read_history


def test_lines_are_buffered_and_written_in_small_objects(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(metrics, "LINES", 4)
    log = MetricsLog(AttemptInfo(str(tmp_path), 0, 0))
    log.log(1, {"loss": 0.1 + 0.2})
    assert not (tmp_path / "metrics").exists()
    log.flush()
    for step in range(2, 8):
        log.log(step, {"loss": 1.0})
    log.finish()
    objects = sorted(path.name for path in (tmp_path / "metrics").iterdir())
    assert objects == ["attempt-0000.00000.jsonl", "attempt-0000.00001.jsonl"]
    lines = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == list(range(1, 8))
    assert lines[0]["loss"] == 0.1 + 0.2  # all digits


def test_repeated_steps_are_in_the_history_once(tmp_path: Path) -> None:
    first = MetricsLog(AttemptInfo(str(tmp_path), 0, 0))
    for step in (1, 2, 3, 4):
        first.log(step, {"loss": float(step)})
    first.flush()  # and then it was killed; the last commit was step 2
    second = MetricsLog(AttemptInfo(str(tmp_path), 1, 2))
    for step in (3, 4, 5):
        second.log(step, {"loss": step + 0.5})
    second.finish()
    assert [line["loss"] for line in read_history(str(tmp_path))] == [1.0, 2.0, 3.5, 4.5, 5.5]


def test_a_run_without_attempt_numbers_never_overwrites_its_past(tmp_path: Path) -> None:
    for resumed_at in (0, 1):
        log = MetricsLog(AttemptInfo(str(tmp_path), 0, resumed_at))
        log.log(resumed_at + 1, {"loss": 1.0})
        log.finish()
    assert [line["step"] for line in read_history(str(tmp_path))] == [1, 2]


def test_an_attempt_that_resumes_beside_a_newer_one_hides_no_lines_of_it(tmp_path: Path) -> None:
    newer = MetricsLog(AttemptInfo(str(tmp_path), 1, 0))

    def fence() -> None:  # this attempt was suspended until the newer one had lines
        newer.log(1, {"loss": 1.0})
        newer.flush()
        raise BadInput("the run was started again")

    with pytest.raises(BadInput):
        MetricsLog(AttemptInfo(str(tmp_path), 0, 0), fence=fence).finish()
    assert [line["step"] for line in read_history(str(tmp_path))] == [1]


def test_a_truncated_line_is_left_out_with_a_warning(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    log = MetricsLog(AttemptInfo(str(tmp_path), 0, 0))
    for step in (1, 2, 3):
        log.log(step, {"loss": 1.0})
    log.flush()
    [path] = (tmp_path / "metrics").iterdir()
    path.write_bytes(path.read_bytes()[:-5])
    again = MetricsLog(AttemptInfo(str(tmp_path), 1, 2))
    again.log(3, {"loss": 2.0})
    again.finish()
    assert [line["step"] for line in read_history(str(tmp_path))] == [1, 2, 3]
    assert f"{path}: line 4 of 4 is not readable; left out" in capsys.readouterr().err


def train(**changes: Any) -> Train:
    return Train(**{"steps": 100, "global_batch_size": 8, "learning_rate": 1.0, "warmup_steps": 10, **changes})


def test_the_warm_up_is_one_step_ahead_of_hugging_faces_and_the_rest_is_the_same() -> None:
    def published(step: int) -> float:  # transformers.get_linear_schedule_with_warmup
        return step / 10 if step < 10 else (100 - step) / (100 - 10)

    for step in range(100):
        assert learning_rate(train(), step) == pytest.approx(published(step + 1 if step < 10 else step))


def test_cosine_is_half_way_down_in_the_middle() -> None:
    assert learning_rate(train(schedule="cosine", warmup_steps=0), 50) == pytest.approx(0.5)


def test_wsd_stays_at_the_peak_and_falls_to_its_floor_at_the_end() -> None:
    settings = train(schedule="wsd", decay_steps=40, floor=0.2)
    rates = [learning_rate(settings, step) for step in range(101)]
    assert rates[10:61] == [1.0] * 51
    assert (rates[80], rates[100]) == (pytest.approx(0.6), pytest.approx(0.2))
    assert learning_rate(train(schedule="wsd"), 90) == pytest.approx(0.5), "the last fifth by default"
    assert {learning_rate(train(schedule="constant", floor=0.2), step) for step in (10, 50, 100)} == {1.0}
    assert learning_rate(train(schedule="cosine", floor=0.2), 100) == pytest.approx(0.2)


def test_the_numbers_of_a_step_depend_on_the_step_alone() -> None:
    assert (learning_rate(train(), 0), *bias_corrections(train(), 0)) == (0.1, pytest.approx(0.1), pytest.approx(0.001))
    seeds = {step_seed(seed, step, host) for seed in range(3) for step in range(50) for host in range(4)}
    assert len(seeds) == 600
    assert all(0 <= seed < 2**31 for seed in seeds)
