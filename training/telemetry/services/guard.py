"""A service behind which a network or a package of others may fail: the other trackers and the run go on without it.

It is called by the one thread that writes metrics (training.telemetry.writer). Values wait in memory, at most
`MOST_WAITING` of them. After a failure the service is left alone for `PAUSE_SECONDS`, so that its own time-outs don't
hold up the other trackers again and again. Values of a call that failed are sent again: a service may have some twice.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Protocol

from training.telemetry.console import warn
from training.telemetry.tensorboard import name_scalars
from training.telemetry.tracker import AttemptInfo, Values, finite_or_none

PAUSE_SECONDS = 60.0
MOST_WAITING = 10_000

Line = tuple[int, dict[str, float]]  # a step, and values by name


class Service(Protocol):
    """One attempt's record at a service."""

    def send(self, lines: Sequence[Line]) -> None:
        """Records values."""

    def close(self) -> None:
        """Ends the record of an attempt that ended in good order."""


class GuardedTracker:
    """A tracker that passes values on to a service, and never raises."""

    def __init__(
        self,
        name: str,
        open_service: Callable[[AttemptInfo], Service],
        info: AttemptInfo,
        *,
        warn: Callable[[str], None] = warn,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Opens nothing yet.

        Args:
            name: of the service, for warnings.
            open_service: begins the attempt's record; called again after it failed.
            info: the attempt.
            warn: shows a warning.
            clock: seconds.
        """
        self._name, self._open, self._info, self._warn, self._clock = name, open_service, info, warn, clock
        self._service: Service | None = None
        self._waiting: deque[Line] = deque(maxlen=MOST_WAITING)
        self._lost, self._not_before, self._is_failing = 0, float("-inf"), False

    def log(self, step: int, values: Values) -> None:
        """Takes values under TensorBoard's names; without room for them, the oldest are lost. What is not finite is
        left out."""
        self._lost += len(self._waiting) == MOST_WAITING
        self._waiting.append((step, name_scalars(finite_or_none(values))))

    def flush(self) -> None:
        """Sends what waits, unless the service failed a moment ago."""
        if self._clock() >= self._not_before:
            self._try(self._send)

    def finish(self) -> None:
        """Sends what waits, and ends the record."""
        self._try(self._end)
        if self._waiting or self._lost:
            self._warn(f"{self._name}: {len(self._waiting) + self._lost} lines of metrics did not reach it")

    def _send(self) -> None:
        if self._service is None:
            self._service = self._open(self._info)
        if self._waiting:
            self._service.send(list(self._waiting))
            self._waiting.clear()

    def _end(self) -> None:
        self._send()
        assert self._service is not None
        self._service.close()

    def _try(self, function: Callable[[], None]) -> None:
        try:
            function()
        except Exception as error:  # whatever a package of others raises
            if not self._is_failing:
                reason = " ".join(str(error).split()) or type(error).__name__
                self._warn(f"{self._name}: {reason}; training goes on, and it is tried again")
            self._is_failing, self._not_before = True, self._clock() + PAUSE_SECONDS
        else:
            self._is_failing = False
