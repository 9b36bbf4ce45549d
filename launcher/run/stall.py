"""Judges from the hosts' lines of progress whether an attempt hangs. Pure: times are arguments.

An attempt makes progress when any host's step, phase or count changes. It hangs when none has changed for longer than
is normal in the phase of every host. Time in which the lines of most hosts could not be read does not count.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from training.telemetry.progress_line import COMPILE, END, EVALUATION, SAVE, START, TRAINING, ProgressLine

DEFAULT_SECONDS = 300.0
"""Longest training without progress, unless `run.stall_minutes` says otherwise."""

SLOW_STEPS = 20
"""Median steps that one step may take."""

_PHASE_FACTORS = {START: 12, COMPILE: 12, EVALUATION: 6, SAVE: 6, END: 12}
"""How many times the limit of training a phase may take: an hour, or half an hour, by default."""

_SEEN_STEPS = 16  # whose median seconds are computed


@dataclass(frozen=True)
class ProgressView:
    """The progress of one host, from all its lines. Times are seconds of the launcher's monotonic clock."""

    line: ProgressLine
    asked: float  # when its line was last read
    moved: float  # when step, phase or count was last seen to change
    steps: tuple[tuple[float, int], ...] = ()  # when which step was first seen, newest last

    @property
    def step_seconds(self) -> float:
        """Median seconds of a step: as told, else as seen; 0 before two steps were seen."""
        if self.line.step_seconds:
            return self.line.step_seconds
        seen = [
            (time - before) / (step - earlier)
            for (before, earlier), (time, step) in zip(self.steps, self.steps[1:], strict=False)
            if step > earlier
        ]
        return statistics.median(seen) if seen else 0.0

    def limit(self, seconds: float) -> float:
        """Returns how many seconds without progress are normal in its phase: in training at least `seconds`."""
        trains = self.line.phase == TRAINING or (not self.line.phase and len(self.steps) > 1)
        least = seconds if trains else seconds * _PHASE_FACTORS.get(self.line.phase, _PHASE_FACTORS[START])
        return max(least, SLOW_STEPS * self.step_seconds, self.line.save_seconds, self.line.limit)

    def later(self, seconds: float) -> ProgressView:
        """Returns the view with `asked` and `moved` so many seconds later."""
        return replace(self, asked=self.asked + seconds, moved=self.moved + seconds)


def update(view: ProgressView | None, line: ProgressLine, now: float) -> ProgressView:
    """Returns the view of a host with its newest line, which was read at `now`; `view` is None for its first line."""
    if view is None:
        return ProgressView(line, now, now, ((now, line.step),))
    before = view.line
    if (line.step, line.phase, line.count) == (before.step, before.phase, before.count):
        return replace(view, line=line, asked=now)
    steps = view.steps if line.step == before.step else (*view.steps, (now, line.step))[-_SEEN_STEPS:]
    return ProgressView(line, now, now, steps)


@dataclass(frozen=True)
class Stall:
    """An attempt that hangs."""

    seconds: float
    """Without progress."""

    limit: float

    def __str__(self) -> str:
        return f"no progress for {self.seconds / 60:.1f} minutes (normal: up to {self.limit / 60:.1f})"


def judge_stall(views: Mapping[int, ProgressView], limit: float, quiet: float) -> Stall | None:
    """Returns the stall of an attempt whose hosts tell their progress; None while it may be healthy.

    Args:
        views: Running hosts that tell their progress.
        limit: Seconds without progress in training, at least.
        quiet: For how many seconds no host has written a line of output, which counts for programs without phases.
    """
    if not views:
        return None
    asked = sorted((view.asked for view in views.values()), reverse=True)
    seconds = asked[(len(asked) - 1) // 2] - max(view.moved for view in views.values())
    if not all(view.line.phase for view in views.values()):
        seconds = min(seconds, quiet)
    longest = max(view.limit(limit) for view in views.values())
    return Stall(seconds, longest) if seconds > longest else None


def describe_limits(stall_minutes: float | None) -> Sequence[str]:
    """Returns two sentences, for `plan`, that say what counts as a stall with this run.stall_minutes."""
    minutes = DEFAULT_SECONDS / 60 if stall_minutes is None else stall_minutes
    without = "never hangs" if stall_minutes is None else f"hangs after {minutes:g} minutes without output"
    return [
        f"a run hangs after {minutes:g} minutes without a step (or {SLOW_STEPS} median steps, or its longest save, if "
        f"that is longer), {minutes * 12:g} minutes of start and compilation, "
        f"{minutes * 6:g} minutes of an evaluation or save",
        f"a program that reports no progress {without} (run.stall_minutes)",
    ]
