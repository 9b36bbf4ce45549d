"""When to save and what to keep: small frozen policies with one method each, no I/O and no clock of their own."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable
from dataclasses import dataclass


@dataclass(frozen=True)
class EverySteps:
    """Save after every `steps` steps; None never."""

    steps: int | None

    def due(self, step: int) -> bool:
        """Whether to save once `step` steps are done."""
        return self.steps is not None and step % self.steps == 0


@dataclass(frozen=True)
class EveryMinutes:
    """Save when `minutes` have passed since the last save began; None never. One host's clock decides, and that host
    tells the others."""

    minutes: float | None

    def due(self, now: float, last: float) -> bool:
        """Whether to save now. `now` and `last` in seconds."""
        return self.minutes is not None and now - last >= 60 * self.minutes


@dataclass(frozen=True)
class Keep:
    """Keep the newest `last` checkpoints, and for ever those whose step is a multiple of `every`."""

    last: int
    every: int | None = None

    def deletable(self, committed: Iterable[int], best: Collection[int] = ()) -> list[int]:
        """Which of these committed steps may be deleted, oldest first. Never the newest, nor the best."""
        assert self.last >= 1
        ordered = sorted(committed)
        return [
            step for step in ordered[: -self.last] if not (self.every and step % self.every == 0) and step not in best
        ]


@dataclass(frozen=True)
class Best:
    """Which evaluation is the best so far, by one of its figures."""

    metric: str
    mode: str  # min or max

    def better(self, value: float, than: float | None) -> bool:
        """Whether `value` is better. The first value is better than None; equal ones are not, and what is not finite
        never is."""
        if not math.isfinite(value):
            return False
        return than is None or (value < than if self.mode == "min" else value > than)
