"""The progress that the hosts of an attempt tell: whether it hangs, which host is slower than the others, what is kept.

An attempt makes progress when any host's step, phase or count changes. It hangs when none has changed for longer than
is normal in the phase of every host. Time in which the lines of most hosts could not be read does not count.

A straggler is found by windows: what a host's seconds by part grew between two lines, divided by its steps. Waiting for
the result is left out: there every host but the slow one waits. All but `HostsProgress` is pure.
"""

import contextlib
import json
import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from launcher.home import write_private
from launcher.run import events
from launcher.run.ledger import Ledger
from training.telemetry import svg
from training.telemetry.progress_line import COMPILE, END, EVALUATION, SAVE, START, TRAINING, ProgressLine

DEFAULT_SECONDS = 300.0  # longest training without progress, unless `run.stall_minutes` says otherwise
SLOW_STEPS = 20  # median steps that one step may take
_PHASE_FACTORS = {START: 12, COMPILE: 12, EVALUATION: 6, SAVE: 6, END: 12}
"""How many times the limit of training a phase may take: an hour, or half an hour, by default."""
_SEEN_STEPS = 16  # whose median seconds are computed

WINDOW_SECONDS = 30.0  # at least between the lines of a window
WINDOWS = 3  # in a row that begin, or end, a straggler
_FACTOR, _SHARE = 1.5, 0.1  # of the others' median; of the step's seconds
_WAIT = "result"  # the part in which a host waits for the others
_COLUMNS = 200


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
        """Returns how many seconds without progress are normal in its phase: `seconds` in training, 6 or 12 times as
        many in others; more if 20 median steps, its longest save or the limit that it tells are longer."""
        trains = self.line.phase == TRAINING or (not self.line.phase and len(self.steps) > 1)
        least = seconds if trains else seconds * _PHASE_FACTORS.get(self.line.phase, _PHASE_FACTORS[START])
        return max(least, SLOW_STEPS * self.step_seconds, self.line.save_seconds, self.line.limit)


def update(view: ProgressView | None, line: ProgressLine, now: float) -> ProgressView:
    """Returns the view of a host with its newest line, which was read at `now`; `view` is None for its first line. It
    counts as having moved, at `now`, only if its step, phase or count changed."""
    if view is None:
        return ProgressView(line, now, now, ((now, line.step),))
    before = view.line
    if (line.step, line.phase, line.count) == (before.step, before.phase, before.count):
        return replace(view, line=line, asked=now)
    steps = view.steps if line.step == before.step else (*view.steps, (now, line.step))[-_SEEN_STEPS:]
    return ProgressView(line, now, now, steps)


def judge_stall(views: Mapping[int, ProgressView], stall_minutes: float | None, quiet: float) -> str | None:
    """Returns how an attempt hangs, in words; None while it may be healthy.

    Args:
        views: Running hosts that tell their progress. Without any, the attempt hangs only by `stall_minutes`.
        stall_minutes: `run.stall_minutes`; None: five minutes, and no limit without `views`.
        quiet: Seconds since any host wrote a line. Without `views` only they count; if a host tells no phase, a line
            counts as progress.
    """
    limit = DEFAULT_SECONDS if stall_minutes is None else stall_minutes * 60
    if not views:
        silent = stall_minutes is not None and quiet > limit
        return f"no host has written a line for {quiet / 60:.1f} minutes" if silent else None
    asked = sorted((view.asked for view in views.values()), reverse=True)
    seconds = asked[(len(asked) - 1) // 2] - max(view.moved for view in views.values())
    if not all(view.line.phase for view in views.values()):
        seconds = min(seconds, quiet)
    longest = max(view.limit(limit) for view in views.values())
    if seconds <= longest:
        return None
    return f"no progress for {seconds / 60:.1f} minutes (normal: up to {longest / 60:.1f})"


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


@dataclass(frozen=True)
class Straggler:
    """A host that takes longer in a part of the step than the others."""

    worker: int
    part: str
    factor: float  # its seconds, as a multiple of the others' median
    step: int  # at the end of the window

    @property
    def place(self) -> tuple[int, str]:
        return self.worker, self.part

    def __str__(self) -> str:
        return f"host {self.worker} takes {self.factor:.1f} times the others' time in {self.part.replace('_', ' ')}"


def seconds_a_step(before: Mapping[int, ProgressLine], now: Mapping[int, ProgressLine]) -> dict[int, dict[str, float]]:
    """Returns by host the seconds a step that each part took between two sets of lines, the begin and end of a window,
    of hosts that tell parts, made steps and did not restart."""
    shares = {}
    for worker, line in now.items():
        old = before.get(worker, line)  # a host that is new has made no step
        grown = {name: seconds - old.seconds.get(name, 0.0) for name, seconds in line.seconds.items()}
        if grown and line.step > old.step and all(seconds >= 0 for seconds in grown.values()):
            shares[worker] = {name: seconds / (line.step - old.step) for name, seconds in grown.items()}
    return shares


def find_straggler(shares: Mapping[int, Mapping[str, float]], lines: Mapping[int, ProgressLine]) -> Straggler | None:
    """Returns the host slowest by far in one part of its steps, by the `shares` that `seconds_a_step` returns for the
    window that ends with `lines`; None if none was, or fewer than two made steps."""
    found: list[tuple[float, Straggler]] = []
    for part in sorted({name for parts in shares.values() for name in parts} - {_WAIT}) if len(shares) > 1 else ():
        slowest = max(shares, key=lambda worker: shares[worker].get(part, 0.0))
        own = shares[slowest].get(part, 0.0)
        others = statistics.median(parts.get(part, 0.0) for worker, parts in shares.items() if worker != slowest)
        excess = own - others
        if own >= _FACTOR * others and excess > _SHARE * sum(shares[slowest].values()):
            factor = own / others if others > own / 1000 else 1000.0
            found.append((excess, Straggler(slowest, part, factor, lines[slowest].step)))
    return max(found, key=lambda each: each[0], default=(0.0, None))[1]


def draw_hosts(windows: Sequence[Mapping[str, Any]]) -> str:
    """Returns the heat map of hosts by steps as the text of an SVG file. `windows`: at least one, each with "step" and
    "seconds", a mapping of a worker number, as text, to the host's seconds a step. Of more than 200 windows, several
    share a column, which shows the slowest."""
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


class HostsProgress:
    """The progress of an attempt."""

    def __init__(self, ledger: Ledger, attempt: int, say: Callable[[str], None]) -> None:
        self._ledger, self._attempt, self._say = ledger, attempt, say
        self.views: dict[int, ProgressView] = {}  # by worker; only of hosts that report progress

        self.stepped = float("-inf")  # when a host was last seen to do another training step, by the monotonic clock
        self._kept_step = -1  # of the progress that was last kept
        self._window: Mapping[int, ProgressLine] = {}  # the lines with which the window began
        self._window_begun = 0.0
        self._recent: list[Straggler | None] = []  # of each of the last windows, None without one
        self._straggler: Straggler | None = None  # the one that was reported and has not ended

    def draw(self) -> None:
        """Writes hosts-<attempt>.svg, a heat map of the whole lines of hosts-<attempt>.jsonl; does nothing without any,
        or if it can't read or write."""
        folder, windows = self._ledger.folder, list[dict[str, Any]]()
        with contextlib.suppress(OSError):
            for line in (folder / f"hosts-{self._attempt}.jsonl").read_text("utf-8", errors="replace").splitlines():
                with contextlib.suppress(ValueError):  # a line that a full disk cut
                    windows.append(json.loads(line))
            if windows:
                write_private(folder / f"hosts-{self._attempt}.svg", draw_hosts(windows))

    @property
    def lines(self) -> Mapping[int, ProgressLine]:
        return {worker: view.line for worker, view in self.views.items()}

    @property
    def step_seconds(self) -> float | None:
        """Returns the median seconds of the last steps of the first host that tells them; None if none does."""
        return next(filter(None, (view.line.step_seconds for view in self.views.values())), None)

    def moved(self, default: float) -> float:
        """Returns when any host last made progress, by the monotonic clock; `default` before the first line."""
        return max((view.moved for view in self.views.values()), default=default)

    def forgive(self, seconds: float) -> None:
        """Moves all times later by the `seconds` in which this process stood still, so that they do not count."""
        for worker, view in self.views.items():
            self.views[worker] = replace(view, asked=view.asked + seconds, moved=view.moved + seconds)
        self.stepped += seconds

    def update(self, worker: int, line: ProgressLine, now: float) -> bool:
        """Takes in a host's newest line, read at `now` (monotonic), and records stragglers; keeps the line in the run's
        folder if no lower host tells progress and its step is new. Returns whether it is the host's first or its step,
        phase or count is new."""
        before = self.views.get(worker)
        view = self.views[worker] = update(before, line, now)
        if before is not None and line.step > before.line.step:
            self.stepped = now
        if worker == min(self.views) and line.step != self._kept_step:
            self._kept_step = line.step
            self._ledger.keep_progress(self._attempt, line)
        self._end_window(now)
        return view.moved == now

    def _end_window(self, now: float) -> None:
        """Does nothing until 30 s have passed and two hosts (or the only one) made steps since the window began. Then
        keeps each host's seconds a step without waits for others, and records and says that a straggler begins (the
        last 3 windows show it) or ends (none of them does)."""
        lines, window = self.lines, self._window
        moved = sum(worker not in window or line.step != window[worker].step for worker, line in lines.items())
        if window and (now - self._window_begun < WINDOW_SECONDS or moved < min(2, len(lines))):
            return
        self._window, self._window_begun = lines, now
        if not window:
            return
        shares = seconds_a_step(window, lines)
        own = {worker: sum(parts[name] for name in parts if name != _WAIT) for worker, parts in shares.items()}
        if own:
            rounded = {worker: round(seconds, 4) for worker, seconds in own.items()}
            self._ledger.keep_hosts(self._attempt, max(line.step for line in lines.values()), rounded)
        found, current = find_straggler(shares, lines), self._straggler
        self._recent = [*self._recent, found][-WINDOWS:]
        places = {each and each.place for each in self._recent}
        if len(self._recent) < WINDOWS:
            return
        if current is None and found is not None and len(places) == 1:
            self._straggler = found
            event = events.StragglerFound(self._attempt, *found.place, round(found.factor, 2), found.step)
            self._ledger.note(event, self._say)
            self._say(f"{found}, since about step {found.step:,}")
        elif current is not None and current.place not in places:
            self._straggler = None
            self._ledger.note(events.StragglerGone(self._attempt, *current.place), self._say)
            self._say(f"host {current.worker} is as fast as the others again in {current.part.replace('_', ' ')}")
