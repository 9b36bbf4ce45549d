"""Several training steps in one call of the program: between them the device does not wait for Python.

A step that the loop asks for is queued, and a call starts all queued steps: when the call is full, or when a result is
read, which is what the loop does before it saves, evaluates or stops. So each of these happens on its own step. The
numbers do not depend on how the steps were divided into calls.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt

MOST_STEPS = 64  # of a call, unless the configuration says otherwise
CALL_SECONDS = 0.5  # that a call may take: for so long, at most twice, a stop is not seen

# (the strategy's iterator, the seeds of the steps (n,), their scalars (n, m), how many are due) -> results (due, ...)
RunSteps = Callable[[Any, npt.NDArray[np.int32], npt.NDArray[np.float32], int], Any]


class StepCalls:
    """The steps that were asked for and not started, and how many a call takes.

    The first call is of one step: it compiles, and what is wrong is told at once. From then on a call takes `steps`.
    When that is None, it takes as many as were seen to fit into CALL_SECONDS, and at most twice as many as the last.
    """

    def __init__(self, run: RunSteps, steps: int | None, now: Callable[[], float] = time.monotonic) -> None:
        """
        Args:
            run: starts steps; its result may still be under way.
            steps: of a call.
            now: the time source, in seconds.
        """
        self._run, self._steps, self._now = run, steps, now
        self._most = steps or MOST_STEPS
        self._queue: list[tuple[Any, int, tuple[float, ...]]] = []  # of each step: iterator, seed, scalars
        self._call = _Call()  # in which the queued steps will run
        self._ended = 0.0  # when the last call was seen to have ended
        self.length = 1
        """Steps of the next call."""

    def add(self, iterator: Any, seed: int, scalars: tuple[float, ...]) -> QueuedStep:
        """Queues a step; starts all that are queued when they fill a call.

        Args:
            iterator: the strategy's, from which the step takes its rows.
            seed: of dropout.
            scalars: the learning rate, and the optimizer's.
        """
        step = QueuedStep(self, self._call, len(self._queue))
        self._queue.append((iterator, seed, scalars))
        if len(self._queue) >= self.length:
            self.flush()
        return step

    def flush(self) -> None:
        """Starts the steps that are queued."""
        if not self._queue:
            return
        iterators, queued_seeds, queued_scalars = zip(*self._queue, strict=True)
        self._queue, call, self._call = [], self._call, _Call()
        due = len(queued_seeds)
        # Of one size, whatever is due: another size would be another program.
        seeds = np.zeros(self._most, np.int32)
        scalars = np.zeros((self._most, len(queued_scalars[0])), np.float32)
        seeds[:due], scalars[:due] = queued_seeds, queued_scalars
        call.began = self._now()
        call.results = self._run(iterators[0], seeds, scalars, due)
        if self._steps:
            self.length = self._steps

    def ended(self, began: float, due: int) -> None:
        """Takes note that the call of `due` steps, started at `began`, has ended, for the length of later ones."""
        now = self._now()
        seconds, self._ended = (now - max(began, self._ended)) / due, now
        if self._steps is None:
            fitting = int(CALL_SECONDS / seconds) if seconds > 0 else MOST_STEPS
            self.length = max(1, min(fitting, 2 * due, MOST_STEPS))


class _Call:
    """One call of the program."""

    began = 0.0
    results: Any = None  # of its steps, once it was started
    values: npt.NDArray[np.float32] | None = None  # the results, once they were read


class QueuedStep:
    """The result of a step that waits for its call, or runs in it."""

    def __init__(self, calls: StepCalls, call: _Call, index: int) -> None:
        """`index`: of the step in its call."""
        self._calls, self._call, self._index = calls, call, index

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> npt.NDArray[np.float32]:
        """Waits for the call, which is started if need be."""
        call = self._call
        if call.results is None:
            self._calls.flush()
        if call.values is None:
            call.values = np.asarray(call.results)
            self._calls.ended(call.began, len(call.values))
        return np.asarray(call.values[self._index], dtype)
