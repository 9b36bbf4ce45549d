"""How many training steps the TensorFlow backend starts in one call: `training.backends.tensorflow.calls`."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.container import small_runs
from tests.training.numpy_backend import Runs
from training.backends.tensorflow.calls import CALL_SECONDS, MOST_STEPS, StepCalls
from training.errors import StopRequested


class Program:
    """Steps of which each takes `seconds`; the result of a step is its seed and its scalar."""

    def __init__(self, seconds: float) -> None:
        self.seconds, self.time, self.calls = seconds, 0.0, list[int]()

    def run(self, iterator: Any, seeds: np.ndarray, scalars: np.ndarray, due: int) -> np.ndarray:
        assert iterator == "iterator"
        self.calls.append(due)
        self.time += due * self.seconds
        return np.stack([seeds[:due].astype(np.float32), scalars[:due, 0]], axis=1)


def train(calls: StepCalls, steps: int) -> None:
    """As the loop on a CPU does: results are read as soon as fewer steps need to be in flight."""
    in_flight: list[tuple[int, Any]] = []
    for number in range(steps):
        in_flight.append((number, calls.add("iterator", number, (number / 2,))))
        while len(in_flight) > calls.length - 1:
            expected, result = in_flight.pop(0)
            assert np.asarray(result).tolist() == [expected, expected / 2]


@pytest.mark.parametrize(("seconds", "longest"), [(1e-6, MOST_STEPS), (CALL_SECONDS / 10, 10), (2 * CALL_SECONDS, 1)])
def test_a_call_grows_until_it_takes_half_a_second(seconds: float, longest: int) -> None:
    program = Program(seconds)
    train(StepCalls(program.run, None, lambda: program.time), 300)
    assert program.calls[0] == 1
    assert max(program.calls) == longest
    assert all(later <= 2 * earlier for earlier, later in zip(program.calls, program.calls[1:], strict=False))


def test_the_first_call_is_of_one_step_and_later_ones_are_as_configured() -> None:
    program = Program(1.0)
    train(StepCalls(program.run, 4, lambda: program.time), 9)
    assert program.calls == [1, 4, 4]


def test_reading_a_result_starts_the_queued_steps() -> None:
    program = Program(1.0)
    calls = StepCalls(program.run, 8, lambda: program.time)
    first, *others = [calls.add("iterator", number, (0.0,)) for number in range(4)]
    assert program.calls == [1]
    assert [np.asarray(step)[0] for step in (first, *others)] == [0, 1, 2, 3]
    assert program.calls == [1, 3]


def test_a_host_without_others_stops_after_the_step_in_which_it_is_asked(tmp_path: Path) -> None:
    """Two steps are in flight: their results are not waited for by starting more."""
    with pytest.raises(StopRequested, match="stopped after step 5, "):
        Runs(tmp_path).train("stopped", 0, shutdown=small_runs.StopAfter(5))
