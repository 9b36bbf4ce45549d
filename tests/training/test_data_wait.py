"""The share of the steps' time that waited for batches. The clock goes on only where the test says so."""

import re
from collections.abc import Generator
from pathlib import Path

import pytest

from tests.training.manual_clock import ManualClock
from tests.training.numpy_backend import NumpyBackend, Runs
from training.batch import HostBatch
from training.tasks.task import Task
from training.telemetry.host_progress import PhaseTimer
from training.telemetry.metrics import read_history
from training.trainer import StepRate

SLOW_FROM = 20  # the batch whose loading takes three times as long as a step, as do all after it


def test_each_line_tells_the_data_wait_since_the_line_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    clock = ManualClock()

    def take_a_second(_number: int) -> None:
        clock.seconds += 1.0

    def batches(self: NumpyBackend, task: Task, start: int) -> Generator[HostBatch, None, None]:
        for number, batch in enumerate(task.batches(start), start):
            clock.seconds += 3.0 if number >= SLOW_FROM else 0.0
            yield batch

    monkeypatch.setattr(NumpyBackend, "batches", batches)
    runs = Runs(tmp_path)
    runs.train("slow", 0, take_a_second, timer=PhaseTimer(clock))
    lines = re.findall(r"step +(\d+)/.* (\d+)% data wait", capsys.readouterr().out)
    shown = {int(step): int(percent) / 100 for step, percent in lines}
    kept = {line["step"]: line["data_wait"] for line in read_history(str(runs.path("slow"))) if "data_wait" in line}
    assert shown == kept
    assert {kept[step] for step in range(1, SLOW_FROM - 3)} == {0.0}
    assert {kept[step] for step in range(SLOW_FROM + 4, 38)} == {0.75}


def test_it_is_a_share_where_a_framework_counts_more_compiling_than_the_clock_has() -> None:
    rate = StepRate()
    assert rate.update(seconds=1.0, waited=1.5, steps=1) == (1.0, 1.0)
    assert rate.update(seconds=0.5, waited=2.0, steps=2) == (-0.5, 0.0)
