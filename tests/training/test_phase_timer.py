"""Claims about the seconds of a process by phase."""

from tests.training.manual_clock import ManualClock
from training.telemetry.host_progress import PhaseTimer


def test_nested_phases_count_each_second_once() -> None:
    clock = ManualClock()
    timer = PhaseTimer(clock)
    with timer.phase("step"):
        clock.seconds += 2
        with timer.phase("checkpoint"):
            clock.seconds += 3
        clock.seconds += 1
    clock.seconds += 4
    timer.move("step", "compile", 2.5)
    assert timer.report() == {"step": 0.5, "checkpoint": 3.0, "compile": 2.5, "other": 4.0, "total": 10.0}
