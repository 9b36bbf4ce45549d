"""Seconds of a process by phase. Goodput is the share of the total that was spent in training steps."""

import contextlib
import time
from collections.abc import Callable, Iterator


class PhaseTimer:
    """Adds up the seconds of each phase. Phases may nest: each second counts once, for the innermost phase."""

    def __init__(self, now: Callable[[], float] = time.monotonic, began: float | None = None) -> None:
        """`now` returns seconds. `began`: when the process began, by `now`; the present moment, unless given."""
        self._now = now
        self.began = now() if began is None else began
        self.seconds: dict[str, float] = {}
        self._stack: list[tuple[str, float]] = []  # open phases, outermost first: (name, counted until)

    @contextlib.contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Counts the time of the block for the phase `name`, without that of phases inside the block."""
        self._count_innermost(now := self._now())
        self._stack.append((name, now))
        try:
            yield
        finally:
            now = self._now()
            self._count_innermost(now)
            self._stack.pop()
            if self._stack:
                self._stack[-1] = (self._stack[-1][0], now)

    def move(self, source: str, target: str, seconds: float) -> None:
        """Moves `seconds`, if positive, from one phase to another, for example those of a compilation inside a step."""
        if seconds > 0:
            self.add(source, -seconds)
            self.add(target, seconds)

    def add(self, name: str, seconds: float) -> None:
        self.seconds[name] = self.seconds.get(name, 0.0) + seconds

    @property
    def innermost(self) -> str:
        """Returns the name of the innermost open phase; "" without one. Threads may read it."""
        stack = self._stack[-1:]
        return stack[0][0] if stack else ""

    def total(self) -> float:
        """Returns the seconds since the process began, in phases or not."""
        return self._now() - self.began

    def report(self) -> dict[str, float]:
        """Returns the seconds of each phase, of the rest as "other", and the "total", rounded to milliseconds."""
        total = self.total()
        phases = {name: max(0.0, seconds) for name, seconds in self.seconds.items()}
        phases["other"] = max(0.0, total - sum(phases.values()))
        return {name: round(seconds, 3) for name, seconds in {**phases, "total": total}.items()}

    def _count_innermost(self, now: float) -> None:
        """Adds the seconds until `now` to the innermost open phase; the caller marks them as counted."""
        if self._stack:
            name, since = self._stack[-1]
            self.add(name, now - since)
