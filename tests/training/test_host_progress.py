"""Claims about the line of progress, what any program may write as one, and the seconds of a process by phase."""

import json
import math
import time
from pathlib import Path

from hypothesis import given
from hypothesis import strategies as st

from tests.processes import wait_until
from tests.training.manual_clock import ManualClock
from training.machine import Machine
from training.telemetry.host_progress import HostProgress, PhaseTimer
from training.telemetry.progress_line import LONGEST_LINE, ProgressLine, encode, parse

LINE = ProgressLine(
    7, 100, "training", "result", 1.5, 3, 60.0, 1e9, 0.5, 12.0, {"data_wait": 1.25}, 5, 9, "abc", 2.5, 99.0,
    0.07, "1:00", 2, 3, 4, 6,
)  # fmt: skip


def test_a_line_is_parsed_to_what_was_encoded() -> None:
    assert parse(encode(LINE)) == LINE
    assert parse(encode(ProgressLine(0, loss=math.nan))) == ProgressLine(0)


def test_only_the_step_is_required_and_unknown_fields_are_ignored() -> None:
    line = parse('{"step": 3, "colour": "red", "phase": 5, "loss": NaN, "seconds": {"a": "b", "c": 1}}')
    assert line == ProgressLine(3, seconds={"c": 1.0})
    too_long = '{"step": 3}' + " " * LONGEST_LINE
    for text in ("", "{}", "[]", "null", '{"step": "3"}', '{"step": true}', "step 3", too_long):
        assert parse(text) is None


JSON = st.recursive(st.none() | st.booleans() | st.integers() | st.floats() | st.text(), lambda inner: st.lists(inner))


@given(st.dictionaries(st.sampled_from([*vars(LINE), "other"]), JSON | st.dictionaries(st.text(), JSON)))
def test_no_line_of_another_program_breaks_the_reader(document: dict[str, object]) -> None:
    line = parse(json.dumps(document))
    assert line is None or parse(encode(line)) is not None


def test_a_hung_step_is_told_with_its_part_and_for_how_long() -> None:
    clock = ManualClock()
    timer = PhaseTimer(clock)
    progress = HostProgress(timer, Machine(clock=clock), "unused")
    assert progress.line().phase == "start"
    with timer.phase("step"):
        assert progress.line().phase == "compile", "the first step"
    for step in range(1, 5):
        with timer.phase("step"), progress.part("dispatch"):
            clock.seconds += 2.0
        progress.finish_step(step)
    with timer.phase("data_wait"), progress.part("data_wait"):
        clock.seconds += 312.0
        line = progress.line()
    assert (line.step, line.phase, line.doing, line.doing_seconds) == (4, "training", "data_wait", 312.0)
    assert (line.step_seconds, line.seconds["dispatch"]) == (2.0, 8.0)
    with timer.phase("checkpoint"):
        assert progress.line().phase == "save"
        clock.seconds += 40.0
    assert progress.line().save_seconds == 40.0


def test_the_file_is_written_by_a_thread_while_the_loop_hangs(tmp_path: Path) -> None:
    path = tmp_path / "progress"
    timer = PhaseTimer()
    with timer.phase("evaluation"), HostProgress(timer, path=str(path)).writing():
        wait_until(path.exists)
        line = parse(path.read_text())
    assert (line.phase, line.memory_total > 0) == ("evaluation", True)


def test_a_step_costs_the_loop_less_than_a_tenth_of_a_millisecond() -> None:
    progress = HostProgress(PhaseTimer(), path="")
    begun, steps = time.process_time(), 2000
    for step in range(steps):
        for name in ("data_wait", "dispatch", "result"):
            with progress.part(name):
                pass
        progress.finish_step(step)
    assert (time.process_time() - begun) / steps < 1e-4


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
