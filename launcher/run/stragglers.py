"""Finds hosts that are slower than the others in a part of the step, from the hosts' lines of progress. Pure.

A window is what a host's seconds by part grew between two lines, divided by its steps. Waiting for the result is left
out: there every host but the slow one waits.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from training.telemetry import svg
from training.telemetry.progress_line import ProgressLine

WINDOW_SECONDS = 30.0
"""At least between the lines of a window."""

WINDOWS = 3
"""In a row that begin, or end, a straggler."""

_FACTOR, _SHARE = 1.5, 0.1  # of the others' median; of the step's seconds
_NOT_OWN = ("result",)
_COLUMNS = 200


@dataclass(frozen=True)
class Straggler:
    """A host that takes longer in a part of the step than the others."""

    worker: int
    part: str
    factor: float
    """Its seconds, as a multiple of the others' median."""

    step: int
    """At the end of the window."""

    def __str__(self) -> str:
        return f"host {self.worker} takes {self.factor:.1f} times the others' time in {self.part.replace('_', ' ')}"


def compare(before: Mapping[int, ProgressLine], now: Mapping[int, ProgressLine]) -> Straggler | None:
    """Returns the host that was slowest by far in a part of the steps of a window; None where none was, or where fewer
    than two hosts made steps."""
    shares = {worker: _seconds_a_step(before[worker], line) for worker, line in now.items() if worker in before}
    shares = {worker: parts for worker, parts in shares.items() if parts}
    found: list[tuple[float, Straggler]] = []
    if len(shares) < 2:
        return None
    for part in sorted({name for parts in shares.values() for name in parts} - set(_NOT_OWN)):
        slowest = max(shares, key=lambda worker: shares[worker].get(part, 0.0))
        own = shares[slowest].get(part, 0.0)
        others = statistics.median(parts.get(part, 0.0) for worker, parts in shares.items() if worker != slowest)
        excess = own - others
        if own >= _FACTOR * others and excess > _SHARE * sum(shares[slowest].values()):
            factor = own / others if others > own / 1000 else 1000.0
            found.append((excess, Straggler(slowest, part, factor, now[slowest].step)))
    return max(found, key=lambda each: each[0], default=(0.0, None))[1]


def own_seconds(before: Mapping[int, ProgressLine], now: Mapping[int, ProgressLine]) -> dict[int, float]:
    """Returns the seconds that a step took each host in a window, without waiting for the others."""
    shares = {worker: _seconds_a_step(before[worker], line) for worker, line in now.items() if worker in before}
    return {
        worker: round(sum(seconds for name, seconds in parts.items() if name not in _NOT_OWN), 4)
        for worker, parts in shares.items()
        if parts
    }


def draw_hosts(windows: Sequence[Mapping[str, Any]]) -> str:
    """Returns the heat map of hosts by steps as an SVG file. `windows`: "step", and "seconds" by host; several become
    one column, of the slowest, where there are too many."""
    size = math.ceil(len(windows) / _COLUMNS)
    columns = [windows[begin : begin + size] for begin in range(0, len(windows), size)]
    workers = sorted({worker for window in windows for worker in window["seconds"]}, key=int)
    rows = {
        f"host {worker}": [
            max((window["seconds"][worker] for window in column if worker in window["seconds"]), default=None)
            for column in columns
        ]
        for worker in workers
    }
    steps = [column[-1]["step"] for column in columns]
    return svg.standalone(svg.heat_map("A step on each host, without waiting for others", steps, rows))


def _seconds_a_step(before: ProgressLine, line: ProgressLine) -> dict[str, float]:
    """Returns the seconds by part of a step between two lines; {} without a step, or after a new start."""
    steps = line.step - before.step
    grown = {name: seconds - before.seconds.get(name, 0.0) for name, seconds in line.seconds.items()}
    if steps <= 0 or any(seconds < 0 for seconds in grown.values()):
        return {}
    return {name: seconds / steps for name, seconds in grown.items()}


@dataclass(frozen=True)
class Watch:
    """The windows of an attempt so far."""

    current: Straggler | None = None
    """The straggler that was reported and has not ended."""

    window: Mapping[int, ProgressLine] | None = None
    begun: float = 0.0
    recent: tuple[Straggler | None, ...] = ()
    """The straggler of each of the last windows, None without one."""

    def observe(
        self, lines: Mapping[int, ProgressLine], now: float
    ) -> tuple[Watch, Straggler | None, Straggler | None]:
        """Returns the next watch, and the straggler that has begun and the one that has ended now, or None. `lines` end
        a window if WINDOW_SECONDS have passed and two hosts made steps since it began; else the watch stays. A
        straggler begins when the last WINDOWS windows show it, and ends when none of them does. `now`: monotonic."""
        if (window := self.window) is None:
            return Watch(self.current, dict(lines), now, self.recent), None, None
        moved = sum(worker not in window or line.step != window[worker].step for worker, line in lines.items())
        if now - self.begun < WINDOW_SECONDS or moved < min(2, len(lines)):
            return self, None, None
        recent = (*self.recent, compare(window, lines))[-WINDOWS:]
        current = self.current
        begun = ended = None
        if current is not None and len(recent) == WINDOWS and not any(_is_same(current, each) for each in recent):
            current, ended = None, current
        elif current is None and (last := recent[-1]) is not None and len(recent) == WINDOWS:
            current = begun = last if all(_is_same(last, each) for each in recent) else None
        return Watch(current, dict(lines), now, recent), begun, ended


def _is_same(one: Straggler, other: Straggler | None) -> bool:
    return other is not None and (one.worker, one.part) == (other.worker, other.part)
