"""Runs several training steps in one call of the program, so that the device does not wait for Python between them.

`add` queues a step, and a call starts all queued steps: when the call is full, or when a result is read, which the loop
does before it saves, evaluates or stops. So each of these happens on its own step. The results do not depend on how the
steps are divided into calls.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt

MOST_STEPS = 64  # of a call, unless the configuration sets it
CALL_SECONDS = 0.5  # target duration of a call: a stop request may wait for two calls

# (the strategy's iterator, the seeds of the steps (n,), their scalars (n, m), how many are due) -> results (due, ...)
RunSteps = Callable[[Any, npt.NDArray[np.int32], npt.NDArray[np.float32], int], Any]


class StepCalls:
    """Queues steps and starts them, `steps` in a call.

    If `steps` is None, a call takes as many as fit into CALL_SECONDS at the last call's speed, and at most twice as
    many as the last call. The first call takes one step: it compiles, and reports errors at once. `run` starts steps;
    its result may not be ready when it returns."""

    def __init__(self, run: RunSteps, steps: int | None, now: Callable[[], float] = time.monotonic) -> None:
        """`run` starts the steps of a call; `steps`: in each call, chosen by time if None; `now` returns seconds."""
        self._run, self._steps, self._now = run, steps, now
        self._most = steps or MOST_STEPS
        self._queue: list[tuple[Any, int, tuple[float, ...]]] = []  # of each step: iterator, seed, scalars
        self._call = _Call()  # the call of the queued steps
        self._ended = 0.0  # time at which the last call's end was noticed
        self.length = 1  # steps of the next call

    def add(self, iterator: Any, seed: int, scalars: tuple[float, ...]) -> QueuedStep:
        """Queues a step, and starts all queued steps if they fill a call. `iterator`: the strategy's, from which the
        step takes its rows; `seed`: of dropout; `scalars`: the learning rate and the optimizer's."""
        step = QueuedStep(self, self._call, len(self._queue))
        self._queue.append((iterator, seed, scalars))
        if len(self._queue) >= self.length:
            self.flush()
        return step

    def flush(self) -> None:
        """Starts the queued steps, if there are any, in one call, and does not wait for its end."""
        if not self._queue:
            return
        iterators, queued_seeds, queued_scalars = zip(*self._queue, strict=True)
        self._queue, call, self._call = [], self._call, _Call()
        due = len(queued_seeds)
        # Always of the same size: another size would be another program.
        seeds = np.zeros(self._most, np.int32)
        scalars = np.zeros((self._most, len(queued_scalars[0])), np.float32)
        seeds[:due], scalars[:due] = queued_seeds, queued_scalars
        call.began = self._now()
        call.results = self._run(iterators[0], seeds, scalars, due)
        if self._steps:
            self.length = self._steps

    def note_end(self, began: float, due: int) -> None:
        """Notes that a call of `due` steps, begun at `began` by the clock `now`, ends now, and sets the next call's
        length, unless it is fixed."""
        now = self._now()
        seconds, self._ended = (now - max(began, self._ended)) / due, now
        if self._steps is None:
            fitting = int(CALL_SECONDS / seconds) if seconds > 0 else MOST_STEPS
            self.length = max(1, min(fitting, 2 * due, MOST_STEPS))


class _Call:
    """One call of the program."""

    began = 0.0
    results: Any = None  # of its steps; None until it starts
    values: npt.NDArray[np.float32] | None = None  # the results; None until they are read


class QueuedStep:
    """The result of the step with number `index` in a call, which may not have started."""

    def __init__(self, calls: StepCalls, call: _Call, index: int) -> None:
        self._calls, self._call, self._index = calls, call, index

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> npt.NDArray[np.float32]:
        """Returns the step's numbers: starts the call if it has not started, and waits for its end."""
        call = self._call
        if call.results is None:
            self._calls.flush()
        if call.values is None:
            call.values = np.asarray(call.results)
            self._calls.note_end(call.began, len(call.values))
        return np.asarray(call.values[self._index], dtype)
