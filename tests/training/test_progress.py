"""What the loop knows of its run: steps and losses, evaluations, compilations. No framework, no clock."""

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from training import storage
from training.batch import HostBatch, Signals, StepResult
from training.checkpoint.config import Best
from training.distributed.rendezvous import SingleHost
from training.errors import BadInput, NonFinite, TrainError
from training.progress import MOST_SKIPPED, Compilations, Evaluations, NonFiniteHistory, Progress
from training.telemetry.host_progress import PhaseTimer
from training.telemetry.report import NonFiniteStep, write_nonfinite


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
        (Best(metric="loss", mode="min"), "d1", True),
        (None, "d1", True),
        (Best(metric="accuracy", mode="max"), "d1", False),
        (Best(metric="loss", mode="max"), "d1", False),
        (Best(metric="loss", mode="min"), "d2", False),
        (None, "d2", False),
    ],
)
def test_evaluations_by_another_metric_mode_or_data_are_not_compared(rule: Best, data: str, is_kept: bool) -> None:
    before = Evaluations(Best(metric="loss", mode="min"), "d1")
    before.record(10, {"loss": 0.5, "accuracy": 0.1}, None)
    after = Evaluations(rule, data)
    after.resume(before.state(10))
    assert (after.best, after.step) == ((before.best, 10) if is_kept else (None, -1))


def test_evaluations_end_training_when_so_many_in_a_row_were_not_better() -> None:
    evaluations = Evaluations(Best(metric="loss", mode="min"), patience=2)
    for step, loss, ends in ((1, 3.0, False), (2, math.nan, False), (3, 2.0, False), (4, 2.0, False), (5, 2.5, True)):
        evaluations.record(step, {"loss": loss}, None)
        again = Evaluations(Best(metric="loss", mode="min"), patience=2)
        again.resume(evaluations.state(step))
        assert evaluations.ends_training == again.ends_training == ends, step
    assert not Evaluations(Best(metric="loss", mode="min"), since_best=9).ends_training


def test_only_skipped_steps_in_a_row_end_a_run() -> None:
    progress, good, skipped = Progress(), result(5.0), replace(result(float("nan")), skipped=True)
    for step in (*[skipped] * (MOST_SKIPPED - 1), good, *[skipped] * (MOST_SKIPPED - 1)):
        progress.finish_step(step, batch())
    assert progress.skipped == 2 * MOST_SKIPPED - 2
    with pytest.raises(NonFinite, match=f"{MOST_SKIPPED} steps in a row"):
        progress.finish_step(skipped, batch())


def test_steps_of_another_program_that_were_not_finite_do_not_count(tmp_path: Path) -> None:
    for number, program in enumerate("pqp"):
        record = NonFiniteStep(number, number, f"c{number}", program)
        write_nonfinite(str(tmp_path / "attempts" / f"attempt-{number}.t.json"), record)
    history = NonFiniteHistory.read(str(tmp_path), "p", SingleHost(), True, storage)
    assert history.suspects == {"c0", "c2"}
    assert isinstance(history.judge(NonFinite(1, "nan"), 0), NonFinite)
    assert isinstance(history.judge(NonFinite(2, "nan"), 0), BadInput)


class Backend:
    """Counts what it is told to have compiled."""

    def __init__(self) -> None:
        self.count, self.seconds = 0, 0.0

    def compilations(self) -> tuple[int, float]:
        return self.count, self.seconds


def test_each_shape_compiles_once_and_another_program_is_a_warning_or_an_error() -> None:
    warnings: list[str] = []
    backend: Any = Backend()
    watch = Compilations(backend, PhaseTimer(lambda: 0.0), 2, strict=False, warn=warnings.append)
    for length in (8, 16):
        backend.count += 1
        watch.check_step(0, batch(length))
    with watch.evaluation():
        backend.count += 1  # not a training program
    watch.check_step(1, batch(8))
    assert warnings == []
    backend.count += 1
    watch.check_step(2, batch(16))
    assert warnings == ["step 2 compiled another program (training has 3 now); its arrays were input_ids [2, 16]"]
    strict = Compilations(backend, PhaseTimer(lambda: 0.0), 1, strict=True, warn=warnings.append)
    strict.check_step(0, batch(8))
    backend.count += 1
    with pytest.raises(TrainError, match=r"train\.strict"):
        strict.check_step(1, batch(8))


def test_seconds_of_compiling_are_moved_out_of_the_phase() -> None:
    now = iter((0.0, 0.0, 10.0, 10.0))
    backend: Any = Backend()
    timer = PhaseTimer(lambda: next(now))
    with Compilations(backend, timer, 1, strict=False, warn=print).timed("step"):
        backend.seconds = 4.0
    assert timer.seconds == {"step": 6.0, "compile": 4.0}
