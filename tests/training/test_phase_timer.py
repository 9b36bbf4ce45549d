"""Claims about the seconds of a process by phase."""

from __future__ import annotations

from training.telemetry.phase_timer import PhaseTimer


class Time:
    """A clock that stands still until it is moved."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def test_nested_phases_count_each_second_once() -> None:
    time = Time()
    timer = PhaseTimer(time)
    with timer.phase("step"):
        time.now += 2
        with timer.phase("checkpoint"):
            time.now += 3
        time.now += 1
    time.now += 4
    timer.move("step", "compile", 2.5)
    assert timer.report() == {"step": 0.5, "checkpoint": 3.0, "compile": 2.5, "other": 4.0, "total": 10.0}
