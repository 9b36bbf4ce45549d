"""Trackers are a class and an entry and all get the same values; a service that fails is a warning."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from unittest.mock import Mock, call

import pytest

from training.config import Telemetry
from training.errors import BadInput
from training.run_setup import require_trackers
from training.telemetry import metrics as tracker
from training.telemetry.metrics import AttemptInfo, MetricsLog, read_history
from training.telemetry.trackers import MOST_WAITING, PAUSE_SECONDS, GuardedTracker, Line, flatten


@pytest.mark.parametrize("failed", [False, True])
def test_every_tracker_receives_the_same_values(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, failed: bool) -> None:
    module, run = Mock(), str(tmp_path / "run")
    monkeypatch.setitem(sys.modules, "recording_tracker", module)
    monkeypatch.setitem(tracker.TRACKERS, "recording", "recording_tracker:Tracker")
    log = MetricsLog(AttemptInfo(run, 2, 40, "token"), trackers=("jsonl", "recording"))
    log.log(41, {"loss": 2.5})
    log.log(41, {"eval_loss": 2.25})
    log.flush()
    log.finish(failed)
    module.Tracker.assert_called_once_with(AttemptInfo(run, attempt=2, resumed_at=40, file_number=2, token="token"))
    values = [call.log(41, {"loss": 2.5}), call.log(41, {"eval_loss": 2.25})]
    assert module.Tracker().mock_calls == [*values, call.flush(), call.finish(failed)]
    assert (tmp_path / "run" / "metrics.jsonl").exists() is not failed
    assert read_history(run) == [{"step": 41, "loss": 2.5}, {"step": 41, "eval_loss": 2.25}]


def test_an_unused_tracker_is_not_imported(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setitem(tracker.TRACKERS, "absent", "no.such.module:Tracker")
    MetricsLog(AttemptInfo(str(tmp_path), 0, 0)).finish()
    with pytest.raises(ModuleNotFoundError):
        MetricsLog(AttemptInfo(str(tmp_path), 0, 0), trackers=("absent",))


class Service:
    """Keeps what it gets from its guarded tracker, and fails when the test says so."""

    def __init__(self) -> None:
        self.lines, self.warnings = list[Line](), list[str]()
        self.is_down, self.opened, self.now = False, 0, 0.0
        self.failed: bool | None = None  # True or False once closed
        warn, info = self.warnings.append, AttemptInfo("/runs/a", 0, 0)
        self.tracker = GuardedTracker("wandb", self.open, info, warn=warn, clock=lambda: self.now)

    def open(self, info: AttemptInfo) -> Service:
        self.opened += 1
        if self.is_down:
            raise TimeoutError("no answer\nwithin 30 s")
        return self

    def send(self, lines: Sequence[Line]) -> None:
        self.lines += lines

    def close(self, failed: bool) -> None:
        self.failed = failed


@pytest.fixture
def service() -> Service:
    return Service()


@pytest.mark.parametrize("failed", [False, True])
def test_values_arrive_once_under_tensorboards_names(service: Service, failed: bool) -> None:
    service.tracker.log(10, {"loss": 2.0, "gradient_norm": float("nan"), "eval_loss": 1.5, "absent": None})
    service.tracker.flush()
    service.tracker.flush()
    assert service.failed is None
    service.tracker.finish(failed)
    assert service.lines == [(10, {"train/loss": 2.0, "evaluation/loss": 1.5})]
    assert (service.failed, service.warnings) == (failed, [])


def test_a_service_that_recovers_gets_all_values_after_one_warning(service: Service) -> None:
    service.is_down = True
    for step in (1, 2, 3):
        service.tracker.log(step, {"loss": float(step)})
        service.tracker.flush()
    assert service.opened == 1, "it is left alone for a while"
    assert service.warnings == ["wandb: no answer within 30 s; training continues, and tpu-train will try again"]
    service.now, service.is_down = PAUSE_SECONDS, False
    service.tracker.flush()
    assert [step for step, _ in service.lines] == [1, 2, 3]


def test_lines_that_did_not_reach_a_service_are_counted(service: Service) -> None:
    service.is_down = True
    for step in range(MOST_WAITING + 5):
        service.tracker.log(step, {"loss": 1.0})
    service.tracker.finish(False)
    assert service.warnings[-1] == f"wandb: {MOST_WAITING + 5} lines of metrics did not reach it"


@pytest.mark.parametrize("names", [["wandb", "wandb"], ["comet"]])
def test_unknown_and_repeated_trackers_are_refused(names: list[str]) -> None:
    with pytest.raises(ValueError, match="trackers"):
        Telemetry.model_validate({"trackers": names})


def test_a_missing_trackers_package_is_one_message() -> None:
    with pytest.raises(BadInput, match=r"no_such_tracker is not installed here: install it"):
        require_trackers(["no_such_tracker"])
    require_trackers(["json"])


def test_settings_become_flat_parameters() -> None:
    settings = {"train": {"steps": 10, "clip": None, "class_weights": {"C++/R&D": 2.0}}, "seed": 1}
    assert list(flatten(settings)) == [("train.steps", 10), ("train.class_weights.C___R_D", 2.0), ("seed", 1)]
