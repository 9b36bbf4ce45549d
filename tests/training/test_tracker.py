"""Claims about trackers: a new one is a class and an entry, and receives what the others receive."""

import importlib
import sys
from pathlib import Path

import pytest

from training.telemetry import metrics as tracker
from training.telemetry.metrics import AttemptInfo, MetricsLog, read_history

MODULE = """
OPENED = []

class Tracker:
    def __init__(self, info):
        self.info, self.calls = info, []
        OPENED.append(self)

    def log(self, step, values):
        self.calls.append((step, dict(values)))

    def flush(self):
        self.calls.append("flush")

    def finish(self, failed):
        self.calls.append("failed" if failed else "finished")
"""


@pytest.mark.parametrize("failed", [False, True])
def test_every_tracker_receives_the_same_values(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, failed: bool) -> None:
    monkeypatch.delitem(sys.modules, "recording_tracker", raising=False)
    (tmp_path / "recording_tracker.py").write_text(MODULE)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setitem(tracker.TRACKERS, "recording", "recording_tracker:Tracker")
    run = str(tmp_path / "run")
    log = MetricsLog(AttemptInfo(run, 2, 40, "token"), trackers=("jsonl", "recording"))
    log.log(41, {"loss": 2.5})
    log.log(41, {"eval_loss": 2.25})
    log.flush()
    log.finish(failed)
    [recording] = importlib.import_module("recording_tracker").OPENED
    assert recording.info == AttemptInfo(run, attempt=2, resumed_at=40, file_number=2, token="token")
    values, end = [(41, {"loss": 2.5}), (41, {"eval_loss": 2.25})], "failed" if failed else "finished"
    assert recording.calls == [*values, "flush", end]
    assert (tmp_path / "run" / "metrics.jsonl").exists() is not failed
    assert read_history(run) == [{"step": 41, "loss": 2.5}, {"step": 41, "eval_loss": 2.25}]


def test_an_unused_tracker_is_not_imported(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setitem(tracker.TRACKERS, "absent", "no.such.module:Tracker")
    MetricsLog(AttemptInfo(str(tmp_path), 0, 0)).finish()
    with pytest.raises(ModuleNotFoundError):
        MetricsLog(AttemptInfo(str(tmp_path), 0, 0), trackers=("absent",))
