"""The faults of a simulated run: a list that is drawn before the run begins, so that each can be left out."""

from __future__ import annotations

import builtins
import random
from dataclasses import dataclass
from typing import Any

from launcher.run import ledger, logs

HOST_FAULTS = ("reboot", "hang", "cut", "die", "engine", "disk", "clock")
SLICE_FAULTS = ("preempt", "maintenance")
MEDDLING = ("delete", "halt", "replace")  # by a colleague; themes also have "filter" (ssh), "connection", "date"
# Google's API, and the way to it. For a time; the number is the probability that a call is hit.
API_FAULTS = {
    "unavailable": 0.9,
    "rate": 0.7,
    "permission": 1.0,
    "lost": 0.5,
    "busy": 0.8,
    "slow": 0.5,
    "stockout": 1.0,
    "quota": 1.0,
    "signed out": 1.0,  # until the user signs in again
    "stale": 0.7,  # lists
    "old describe": 0.4,
    "dead ssh": 0.3,
    "no ssh": 1.0,  # to any host, while Google's API answers
    "ssh loses answers": 0.3,
    "offline": 1.0,
    "bucket": 0.8,
}
_ONLY_IN_THEMES = ("old describe", "quota", "signed out", "no ssh", "bucket")
ALL = tuple(kind for kind in (*HOST_FAULTS, *SLICE_FAULTS, *API_FAULTS) if kind not in _ONLY_IN_THEMES)
_WEIGHTS = {"permission": 0.3, "reboot": 2.0, "preempt": 3.0, "cut": 2.0, "unavailable": 2.0, "disk": 0.5, "stale": 2.0}


@dataclass(frozen=True)
class Fault:
    """One thing that goes wrong."""

    kind: str
    anchor: str
    """The moment that `at` is counted from: "beginning"; "up" and "up again", the first and second `up`; "start", when
    the first attempt runs on all hosts; "awake", when the workstation has slept; "restart", the second command on a
    run; "recovery", the end of the first attempt that is followed by another; "made again", when a run has made its
    slice again; "round", when a round of a recovery has failed; "contact", the first ssh to a new slice; "down"."""
    at: float
    seconds: float  # how long it lasts
    number: int  # which host, or which variant

    def __str__(self) -> str:
        return f"{self.kind} {self.number} at {self.anchor}+{self.at:.1f} s for {self.seconds:.1f} s"


def draw(rng: random.Random) -> list[Fault]:
    """Draws the faults of a simulated run: none in some, one in many, several in the others."""
    kindness = rng.random()
    count = 0 if kindness < 0.08 else 1 if kindness < 0.3 else rng.randint(2, 8)
    weights = [_WEIGHTS.get(kind, 1.0) for kind in ALL]
    faults = []
    for kind in rng.choices(ALL, weights, k=count):
        anchor = rng.choice(("beginning", "start", "start", "start", "restart", "recovery", "recovery", "down"))
        at = rng.uniform(0.0, 90.0) if anchor == "beginning" else rng.uniform(-8.0, 45.0 if anchor == "start" else 8.0)
        seconds = rng.choice((rng.uniform(1.0, 12.0), rng.uniform(10.0, 60.0), rng.uniform(60.0, 300.0)))
        faults.append(Fault(kind, anchor, max(0.0, at), seconds, rng.randrange(64)))
    return faults


_FULL_DISK = 0.04  # that it occurs in a run
_FULL_IN_STALLS = 0.15
_full = False


@dataclass(frozen=True)
class FullDisk:
    """When a laptop's disk is full, and for how many seconds: half of the bytes for a run's folder arrive."""

    anchor: str
    after: float
    seconds: float

    @property
    def long(self) -> bool:
        """Returns whether it lasts longer than the launcher waits to write lines and events."""
        return self.seconds > 40.0


def draw_full_disk(seed: int, *, stalls: bool) -> FullDisk | None:
    """Draws the full disk of a run; None for most. `stalls`: silence of the program ends it."""
    rng = random.Random(f"disk {seed}")
    if rng.random() >= (_FULL_IN_STALLS if stalls else _FULL_DISK):
        return None
    if stalls:
        return FullDisk("start", rng.uniform(0.0, 10.0), 100.0)
    anchor = rng.choice(("run", "prepare", "start", "start", "recovery", "down"))
    return FullDisk(anchor, rng.uniform(0.0, 30.0), rng.choice((1.0, 10.0, 100.0)))


def fill_disk(full: bool) -> None:
    """Makes the disk full, or frees it."""
    global _full
    _full = full
    for module in (ledger, logs):
        vars(module)["open"] = _open  # found before the builtin


def _open(file: Any, mode: str = "r", *arguments: Any, **options: Any) -> Any:
    opened = builtins.open(file, mode, *arguments, **options)  # noqa: SIM115
    return _FullFile(opened) if _full and ("+" in mode or "a" in mode) else opened


class _FullFile:
    """An open file on the full disk."""

    def __init__(self, file: Any) -> None:
        self._file = file

    def __enter__(self) -> _FullFile:
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._file, name)

    def write(self, data: Any) -> int:
        """Writes half of the data, and returns its length as an unbuffered file does."""
        written: int = self._file.write(data[: len(data) // 2])
        return written
