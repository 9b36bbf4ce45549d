"""A laptop whose disk is full for a while: half of the bytes written to a run's folder arrive."""

from __future__ import annotations

import builtins
import random
from dataclasses import dataclass
from typing import Any

from launcher.run import ledger, logs

_PROBABILITY = 0.04  # that it occurs in a run
_OF_STALLS = 0.15
_full = False


@dataclass(frozen=True)
class FullDisk:
    """When the disk is full, and for how many seconds."""

    anchor: str
    after: float
    seconds: float

    @property
    def long(self) -> bool:
        """Returns whether it lasts longer than the launcher waits to write lines and events."""
        return self.seconds > 40.0


def draw(seed: int, *, stalls: bool) -> FullDisk | None:
    """Draws the full disk of a run; None for most. `stalls`: silence of the program ends it."""
    rng = random.Random(f"disk {seed}")
    if rng.random() >= (_OF_STALLS if stalls else _PROBABILITY):
        return None
    if stalls:
        return FullDisk("start", rng.uniform(0.0, 10.0), 100.0)
    anchor = rng.choice(("run", "prepare", "start", "start", "recovery", "down"))
    return FullDisk(anchor, rng.uniform(0.0, 30.0), rng.choice((1.0, 10.0, 100.0)))


def fill(full: bool) -> None:
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
