"""Seconds of this process by phase, and this host's line of progress (`progress_line.py`).

A thread keeps the line up to date, so that a step that hangs is told too. The loop only adds up seconds: a few
microseconds a step. A change of phase is written within a second, everything else every five. Without
TPU_LAUNCH_PROGRESS_FILE nothing is written.
"""

import contextlib
import itertools
import os
import re
import statistics
import time
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import replace

from training import storage
from training.machine import SYSTEM, Machine
from training.telemetry import progress_line
from training.telemetry.progress_line import ProgressLine


class PhaseTimer:
    """Adds up the seconds of each phase. Phases may nest: each second counts once, for the innermost phase. Goodput is
    the share of the total that was spent in training steps."""

    def __init__(self, now: Callable[[], float] = time.monotonic, began: float | None = None) -> None:
        """`now` returns seconds. `began`: when the process began, by `now`; the present moment, unless given."""
        self._now = now
        self.began = now() if began is None else began
        self.seconds: dict[str, float] = {}
        self._stack: list[str] = []  # open phases, outermost first
        self._counted = self.began  # the time until which phases are counted

    @contextlib.contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Counts the time of the block for the phase `name`, without that of phases inside the block."""
        self._count_innermost()
        self._stack.append(name)
        try:
            yield
        finally:
            self._count_innermost()
            self._stack.pop()

    def _count_innermost(self) -> None:
        """Adds the seconds since the last call to the innermost open phase, if there is one."""
        before, self._counted = self._counted, self._now()
        if self._stack:
            self.add(self._stack[-1], self._counted - before)

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
        return next(iter(self._stack[-1:]), "")

    def total(self) -> float:
        """Returns the seconds since `began`, in phases or not."""
        return self._now() - self.began

    def report(self) -> dict[str, float]:
        """Returns the seconds of each phase, of the rest as "other", and the "total", rounded to milliseconds. Those
        since a phase last began or ended are in "other", even if one is open."""
        total = self.total()
        phases = {name: max(0.0, seconds) for name, seconds in self.seconds.items()}
        phases["other"] = max(0.0, total - sum(phases.values()))
        return {name: round(seconds, 3) for name, seconds in {**phases, "total": total}.items()}


_LOOK_SECONDS, _WRITE_SECONDS = 1.0, 5.0
_STEPS = 32  # whose median is told
_PHASES = {
    "evaluation": progress_line.EVALUATION,
    "checkpoint": progress_line.SAVE,
    "export": progress_line.END,
    "upload": progress_line.END,
}  # by phase of the timer; others are the start before the first step, and training after it
_MEMORY = re.compile(r"^(MemTotal|MemAvailable): +(\d{1,15}) kB", re.MULTILINE)


class HostProgress:
    """What this host is doing. One thread of the trainer changes it, another tells it."""

    def __init__(self, timer: PhaseTimer, machine: Machine = SYSTEM, path: str | None = None) -> None:
        """`path`: of the file; TPU_LAUNCH_PROGRESS_FILE, unless given. Starts nothing: `writing` does."""
        self._timer, self._machine = timer, machine
        self._path = os.environ.get(progress_line.FILE_VARIABLE, "") if path is None else path
        self._now = machine.clock.monotonic
        self.figures = ProgressLine(0)  # what the loop knows: step, steps, loss, ...
        self.program = ""
        self.limit = 0.0  # seconds without progress that are normal outside of training
        self.count = 0  # grows inside a phase
        self._seconds: dict[str, float] = {}
        self._part: tuple[str, float] | None = None
        self._phase = ("", 0.0)  # and since when
        self._finished: deque[float] = deque(maxlen=_STEPS + 1)
        self._save_seconds = 0.0
        self._is_over = machine.threads.event()

    @contextlib.contextmanager
    def writing(self) -> Iterator[None]:
        """Writes the file, if it has a path, every few seconds from a thread; does not wait for the thread to end."""
        if self._path:
            self._machine.threads.start(self._write_repeatedly, name="progress")
        try:
            yield
        finally:
            self._is_over.set()

    @contextlib.contextmanager
    def part(self, name: str) -> Iterator[None]:
        """Adds the block's seconds to the attempt's total for `name`, a part of its steps; meanwhile shows `name` as
        what this host is doing. Parts don't nest."""
        begun = self._now()
        self._part = (name, begun)
        try:
            yield
        finally:
            self._part = None
            self._seconds[name] = self._seconds.get(name, 0.0) + self._now() - begun

    def finish_step(self, step: int) -> None:
        """Notes, for the line, that `step` steps are done (the result of the last one was read), and when."""
        self.figures = replace(self.figures, step=step)
        self._finished.append(self._now())

    def count_batch(self) -> None:
        """Counts one more batch of a phase, such as an evaluation: a sign of progress within it."""
        self.count += 1

    def line(self) -> ProgressLine:
        """Returns this moment's line: the loop's figures with the phase, seconds of parts and steps, and memory. Notes
        when a phase changed, so one thread calls it."""
        now, innermost, part = self._now(), self._timer.innermost, self._part
        phase = _PHASES.get(innermost, progress_line.TRAINING if self._finished else progress_line.START)
        if phase == progress_line.START and innermost in ("step", "data_wait"):
            phase = progress_line.COMPILE
        if phase != self._phase[0]:
            if self._phase[0] == progress_line.SAVE:
                self._save_seconds = max(self._save_seconds, now - self._phase[1])
            self._phase = (phase, now)
        doing, since = part or (innermost, self._phase[1])
        times = list(self._finished)
        steps = [later - earlier for earlier, later in itertools.pairwise(times)]
        saving = now - self._phase[1] if phase == progress_line.SAVE else 0.0
        seconds = {**self._seconds, "save": self._timer.seconds.get("checkpoint", 0.0)}
        used, total = _read_memory()
        return replace(
            self.figures,
            phase=phase,
            doing=doing,
            doing_seconds=round(now - since, 1),
            count=self.count,
            limit=0.0 if phase == progress_line.TRAINING else self.limit,
            time=round(self._machine.clock.time(), 3),
            step_seconds=round(statistics.median(steps), 4) if steps else 0.0,
            save_seconds=round(max(self._save_seconds, saving), 1),
            seconds={name: round(amount, 3) for name, amount in seconds.items() if amount},
            memory_used=used,
            memory_total=total,
            program=self.program,
            bytes_read=storage.traffic["read"],
        )

    def _write_repeatedly(self) -> None:
        """Writes the file every 5 s and within a second of a new phase, until the block of `writing` ends; not at its
        end. Ignores OSError: the next write is due as usual."""
        written, phase = float("-inf"), ""
        while not self._is_over.is_set():
            line = self.line()
            if line.phase != phase or self._now() - written >= _WRITE_SECONDS:
                with contextlib.suppress(OSError):
                    progress_line.write(self._path, line)
                written, phase = self._now(), line.phase
            self._is_over.wait(_LOOK_SECONDS)


def _read_memory() -> tuple[int, int]:
    """Returns bytes of this host in use and in total; 0, 0 where /proc/meminfo does not tell."""
    with contextlib.suppress(OSError, KeyError), open("/proc/meminfo", encoding="ascii") as file:
        amounts = {name: int(kilobytes) * 1024 for name, kilobytes in _MEMORY.findall(file.read(4000))}
        return amounts["MemTotal"] - amounts["MemAvailable"], amounts["MemTotal"]
    return 0, 0
