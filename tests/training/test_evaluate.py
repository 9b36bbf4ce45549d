"""Batches of an evaluation are in flight while earlier ones compute, as many as allowed, and each counts once."""

import math
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest

from tests.container.small_runs import StopAfter
from tests.training.numpy_backend import Runs
from training.batch import Arrays, HostBatch, Signals, StepResult
from training.distributed.rendezvous import SingleHost
from training.distributed.shutdown import ShutdownRequest
from training.errors import StopRequested
from training.evaluate import evaluate_all
from training.tasks.tokens import MaskedLanguageModeling
from training.telemetry.metrics import read_history

BATCHES = 7


class CountingBackend:
    """Computes nothing; knows how many batches were started and not read yet."""

    def __init__(self, in_flight: int, stop_at: int | None = None) -> None:
        self.in_flight, self.stop_at = in_flight, stop_at
        self.started = self.read = self.most = 0

    def evaluation_batches(self, _task: Any) -> Iterator[HostBatch]:
        for number in range(BATCHES):
            yield HostBatch({"number": np.array([number])}, np.array([number]))

    def evaluate(self, batch: Arrays, _signals: Signals) -> Any:
        number = int(batch["number"][0])
        self.started += 1
        self.most = max(self.most, self.started - self.read)

        def result() -> StepResult:
            assert number == self.read, "in the order in which they were started"
            self.read += 1
            sums = {"loss": float(number), "weight": 1.0, "correct": 0.0}
            return StepResult(sums, Signals(stop=number == self.stop_at))

        return SimpleNamespace(result=result)


def evaluate(backend: CountingBackend) -> StepResult:
    return evaluate_all(cast(Any, None), cast(Any, backend), SingleHost(), ShutdownRequest(), "evaluating")


@pytest.mark.parametrize("in_flight", [0, 1, 2, 20])
def test_as_many_batches_are_in_flight_as_the_backend_allows(in_flight: int) -> None:
    backend = CountingBackend(in_flight)
    result = evaluate(backend)
    assert backend.most == min(in_flight + 1, BATCHES)
    assert backend.read == backend.started == BATCHES
    assert result.sums == {"loss": sum(range(BATCHES)), "weight": BATCHES, "correct": 0.0}


def test_a_stop_is_seen_by_the_result_that_carries_it_and_what_is_in_flight_is_read() -> None:
    backend = CountingBackend(in_flight=2, stop_at=1)
    assert evaluate(backend).signals.stop
    assert backend.started == 4  # batch 1's result is read when the third one after it would wait
    assert backend.read == backend.started


@pytest.mark.parametrize("changes", [{}, {"checkpoint__best": {"metric": "loss", "mode": "min"}}])
def test_an_evaluation_broken_off_does_not_count_and_is_repeated(tmp_path: Path, changes: dict[str, Any]) -> None:
    runs, changes = Runs(tmp_path), {"train__steps": 30, "evaluation__every": 10, **changes}

    def evaluated() -> list[int]:
        return [line["step"] for line in read_history(str(runs.path("r"))) if "eval_loss" in line]

    with pytest.raises(StopRequested, match="stopped after step 10"):
        runs.train("r", 0, shutdown=StopAfter(12), **changes)  # at the start, in 10 steps, and in the first batch of 3
    assert evaluated() == []
    runs.train("r", 1, **changes)
    assert evaluated() == [10, 20, 30]


def test_figures_of_nothing_finite_are_nan() -> None:
    """A loss that overflows exp is no nan, and a nan is no large loss."""
    for loss, perplexity in ((1.0, math.e), (800.0, math.inf), (math.inf, math.inf), (math.nan, math.nan)):
        total = StepResult({"loss": loss, "weight": 1.0, "correct": 0.0}, Signals())
        figures = MaskedLanguageModeling.figures(cast(Any, None), total)
        assert figures["perplexity"] == pytest.approx(perplexity, nan_ok=True)
