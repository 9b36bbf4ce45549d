"""Programs that tell their progress: healthy ones that are slow in every phase, and ones that hang in one of them."""

from __future__ import annotations

import bisect
import functools
import random
from dataclasses import dataclass

from training.telemetry.progress_line import ProgressLine, encode

KINDS = ("code", "storage", "lock", "stopped", "kernel", "no stacks", "program", "step", "collective", "all in storage")
PHASES = ("start", "compile", "training", "evaluation", "save")
_LIMITS = {"start": 12.0, "compile": 12.0, "evaluation": 6.0, "save": 6.0}  # times the limit of training
_AHEAD = "step"  # the host that is ahead skipped a collective

_WAITING = "    all_reduce (/x/site-packages/torch/distributed/distributed_c10d.py:9)\n    step (/app/train.py:50)\n"
_PLACES = {
    "code": "    augment (/app/my_data.py:12)\n",
    "storage": "    recv (/usr/lib/python3.11/http/client.py:9)\n    read (/app/my_data.py:88)\n",
    "lock": "    acquire (/usr/lib/python3.11/threading.py:9)\n    log (/app/log.py:8)\n",
}
_STATES = {"stopped": "T (stopped)", "kernel": "D (disk sleep)"}


@dataclass(frozen=True)
class Hang:
    """A hang: in which phase, of which kind, on which host."""

    phase: str
    kind: str
    host: int

    @property
    def named(self) -> int:
        """The host that the verdict must name; -1: none differs."""
        return -1 if self.kind in ("collective", "all in storage") else self.host


def limit(phase: str, seconds: float) -> float:
    """Returns the seconds without progress after which a phase is a stall; `seconds`: of training."""
    return seconds * _LIMITS.get(phase, 1.0)


@functools.lru_cache(maxsize=200)
def timeline(seed: float, seconds: float, stall_seconds: float, last: str) -> list[tuple[float, str, int]]:
    """Returns when which phase and step begin, from 0 to `seconds`: all change sooner than the limits. The last one is
    of the phase `last`."""
    rng = random.Random(seed)
    moments, now, step = [(0.0, "start", 0)], 0.0, 0
    while now < seconds:
        phase = rng.choice(("training",) * 12 + ("compile", "evaluation", "save")) if step else "compile"
        moments.append((now, phase, step))
        longest = 0.8 * limit(phase, stall_seconds)
        now += rng.uniform(0.1, 4.0) if rng.random() < 0.7 else rng.uniform(0.5, 1.0) * longest
        step += phase in ("training", "compile")
    return [*moments, (now, last, step)]


def line(moments: list[tuple[float, str, int]], since: float, hang: Hang | None, worker: int) -> ProgressLine:
    """Returns a host's line so many seconds after the start of the program."""
    number = bisect.bisect_right(moments, since, key=lambda moment: moment[0]) - 1
    _, phase, step = moments[number]
    is_odd = hang is not None and number == len(moments) - 1 and worker == hang.host
    program = "another" if is_odd and hang is not None and hang.kind == "program" else "abc"
    step += bool(is_odd and hang is not None and hang.kind == _AHEAD)
    return ProgressLine(step, phase=phase, count=number, program=program, step_seconds=1.0)


def format_line(told: ProgressLine) -> str:
    return f"progress {encode(told)}\n"


def stacks(hang: Hang | None, worker: int) -> str:
    """Returns the output of stacks.sh on a host of a program that hangs."""
    kind = hang.kind if hang is not None and worker == hang.host else "collective"
    if hang is not None and hang.kind == "all in storage":
        kind = "storage"
    if kind == "no stacks":
        return "Error response from daemon: it does not answer\n"
    frames = _PLACES.get(kind, _WAITING)
    state = _STATES.get(kind, "S (sleeping)")
    return f'process 7 [{state}] [futex] python train.py\nThread 7 (idle): "MainThread"\n{frames}'
