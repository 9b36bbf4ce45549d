"""Claims about the loop's record of its run, without framework or clock, and the progress line of any program."""

import json
import math
import time
from dataclasses import replace
from pathlib import Path
from unittest.mock import Mock

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.processes import wait_until
from tests.training.manual_clock import ManualClock
from training import storage
from training.batch import SUMS, HostBatch, Signals, StepResult
from training.checkpoint.config import Best
from training.distributed.rendezvous import SingleHost
from training.errors import BadInput, NonFinite, TrainError
from training.machine import Machine
from training.progress import MOST_SKIPPED, Compilations, Evaluations, NonFiniteHistory, Progress
from training.telemetry.host_progress import HostProgress, PhaseTimer
from training.telemetry.progress_line import LONGEST_LINE, ProgressLine, encode, parse
from training.telemetry.report import NonFiniteStep, write_nonfinite

LOSS = Best(metric="loss", mode="min")


def batch(length: int = 8) -> HostBatch:
    return HostBatch({"input_ids": np.zeros((2, length), np.int32)}, np.array([40, 41]))


def result(loss: float, signals: Signals = Signals()) -> StepResult:  # noqa: B008
    return StepResult({"loss": loss, "weight": 1.0, "correct": 0.0}, signals)


def test_losses_and_signals_are_those_of_finished_steps() -> None:
    progress = Progress()
    for _ in range(3):
        progress.start_step()
    progress.finish_step(result(5.0, Signals(save=True)), batch())
    progress.finish_step(result(4.0, Signals(stop=True)), batch())
    assert (progress.step, progress.finished, progress.trained) == (3, 2, 3)
    assert (progress.first_loss, progress.last_loss) == (5.0, 4.0)
    assert progress.signals == Signals(stop=True, save=True)


def test_the_best_evaluation_is_the_first_of_equal_ones() -> None:
    evaluations = Evaluations(Best(metric="accuracy", mode="max"))
    for step, accuracy in ((10, 0.5), (20, 0.7), (30, 0.7), (35, float("inf")), (40, float("nan"))):
        evaluations.record(step, {"accuracy": accuracy}, None)
        assert evaluations.is_best(step) == (step in (10, 20))
    assert evaluations.best == {"step": 20, "metric": "accuracy", "mode": "max", "value": 0.7}
    assert evaluations.state(40)["evaluated"] == 40
    assert evaluations.state(41)["figures"] is None
    again = Evaluations(Best(metric="accuracy", mode="max"))
    again.resume(evaluations.state(41))
    assert (again.best, again.step, again.figures) == (evaluations.best, 40, {})


@pytest.mark.parametrize(
    ("rule", "data", "is_kept"),
    [
        (LOSS, "d1", True), (None, "d1", True), (Best(metric="accuracy", mode="max"), "d1", False),
        (Best(metric="loss", mode="max"), "d1", False), (LOSS, "d2", False), (None, "d2", False),
    ],
)  # fmt: skip
def test_evaluations_by_another_metric_mode_or_data_are_not_compared(rule: Best, data: str, is_kept: bool) -> None:
    before = Evaluations(LOSS, "d1")
    before.record(10, {"loss": 0.5, "accuracy": 0.1}, None)
    after = Evaluations(rule, data)
    after.resume(before.state(10))
    assert (after.best, after.step) == ((before.best, 10) if is_kept else (None, -1))


def test_evaluations_end_training_when_so_many_in_a_row_were_not_better() -> None:
    evaluations = Evaluations(LOSS, patience=2)
    for step, loss, ends in ((1, 3.0, False), (2, math.nan, False), (3, 2.0, False), (4, 2.0, False), (5, 2.5, True)):
        evaluations.record(step, {"loss": loss}, None)
        again = Evaluations(LOSS, patience=2)
        again.resume(evaluations.state(step))
        assert evaluations.ends_training == again.ends_training == ends, step
    assert not Evaluations(LOSS, since_best=9).ends_training


def test_only_skipped_steps_in_a_row_end_a_run() -> None:
    progress, good, skipped = Progress(), result(5.0), replace(result(float("nan")), skipped=True)
    for step in (*[skipped] * (MOST_SKIPPED - 1), good, *[skipped] * (MOST_SKIPPED - 1)):
        progress.finish_step(step, batch())
    assert progress.skipped == 2 * MOST_SKIPPED - 2
    with pytest.raises(NonFinite, match=f"{MOST_SKIPPED} steps in a row"):
        progress.finish_step(skipped, batch())
    with pytest.raises(NonFinite, match="step 0 has no loss: all predictions of its batch have weight 0; none before"):
        Progress().finish_step(replace(result(0.0), sums=dict.fromkeys(SUMS, 0.0)), batch())


def test_steps_of_another_program_that_were_not_finite_do_not_count(tmp_path: Path) -> None:
    for number, program in enumerate("pqp"):
        record = NonFiniteStep(number, number, f"c{number}", program)
        write_nonfinite(str(tmp_path / "attempts" / f"attempt-{number}.t.json"), record)
    history = NonFiniteHistory.read(str(tmp_path), "p", SingleHost(), True, storage)
    assert history.suspects == {"c0", "c2"}
    assert isinstance(history.judge(NonFinite(1, "nan"), 0), NonFinite)
    assert isinstance(history.judge(NonFinite(2, "nan"), 0), BadInput)


def test_each_shape_compiles_once_and_another_program_is_a_warning_or_an_error() -> None:
    warnings, programs = list[str](), list[str]()
    backend = Mock(compilations=lambda: (len(programs), 0.0))
    watch = Compilations(backend, PhaseTimer(lambda: 0.0), 2, strict=False, warn=warnings.append)
    for length in (8, 16):
        programs.append("step")
        watch.check_step(0, batch(length))
    with watch.evaluation():
        programs.append("evaluation")
    watch.check_step(1, batch(8))
    assert warnings == []
    programs.append("step")
    watch.check_step(2, batch(16))
    assert warnings == ["step 2 compiled another program (training has 3 now); its arrays were input_ids [2, 16]"]
    strict = Compilations(backend, PhaseTimer(lambda: 0.0), 1, strict=True, warn=warnings.append)
    strict.check_step(0, batch(8))
    programs.append("step")
    with pytest.raises(TrainError, match=r"train\.strict"):
        strict.check_step(1, batch(8))


def test_seconds_of_compiling_are_moved_out_of_the_phase() -> None:
    backend = Mock(compilations=Mock(side_effect=[(0, 0.0), (0, 4.0)]))
    timer = PhaseTimer(iter((0.0, 0.0, 10.0, 10.0)).__next__)
    with Compilations(backend, timer, 1, strict=False, warn=print).timed("step"):
        pass
    assert timer.seconds == {"step": 6.0, "compile": 4.0}


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
