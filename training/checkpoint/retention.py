"""Policies that decide when to save and which checkpoints to keep: frozen dataclasses with one pure method each."""

import math
from collections.abc import Collection, Iterable
from dataclasses import dataclass


@dataclass(frozen=True)
class EverySteps:
    """Save after every `steps` steps; None never."""

    steps: int | None

    def due(self, step: int) -> bool:
        """Returns whether to save once `step` steps are done."""
        return self.steps is not None and step % self.steps == 0


@dataclass(frozen=True)
class EveryMinutes:
    """Save when `minutes` have passed since the last save began; None never. One host's clock decides, and that host
    tells the others."""

    minutes: float | None

    def due(self, now: float, last: float) -> bool:
        """Returns whether to save at `now`, when the last save began at `last` (both in seconds)."""
        return self.minutes is not None and now - last >= 60 * self.minutes


@dataclass(frozen=True)
class Keep:
    """Keep the newest `last` checkpoints, and for ever those whose step is a multiple of `every`."""

    last: int
    every: int | None = None

    def deletable(self, committed: Iterable[int], best: Collection[int] = ()) -> list[int]:
        """Returns the committed steps to delete, oldest first: not the `last` newest, multiples of `every`, `best`."""
        assert self.last >= 1
        ordered = sorted(committed)
        return [
            step for step in ordered[: -self.last] if not (self.every and step % self.every == 0) and step not in best
        ]


@dataclass(frozen=True)
class Best:
    """Compares evaluations by one of their figures."""

    metric: str
    mode: str  # min or max

    def better(self, value: float, than: float | None) -> bool:
        """Returns whether `value` is better than `than` (None: there is none yet); False if it is not finite."""
        if not math.isfinite(value):
            return False
        return than is None or (value < than if self.mode == "min" else value > than)
