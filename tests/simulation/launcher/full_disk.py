"""A laptop whose disk is full for a while: of what is written of a run, half arrives."""

from __future__ import annotations

import builtins
import random
from dataclasses import dataclass
from typing import Any

from launcher.run import ledger, logs

_PROBABILITY = 0.04  # that it happens in a simulation
_full = False


@dataclass(frozen=True)
class FullDisk:
    """When the disk is full, and for how long, in seconds."""

    anchor: str
    after: float
    seconds: float

    @property
    def long(self) -> bool:
        """Whether lines and events are not waited for so long."""
        return self.seconds > 40.0


def draw(seed: int) -> FullDisk | None:
    """That of a simulation. Its numbers are its own, so that simulated runs without one are what they were."""
    chance = random.Random(f"disk {seed}")
    if chance.random() >= _PROBABILITY:
        return None
    anchor = chance.choice(("run", "prepare", "start", "start", "recovery", "down"))
    return FullDisk(anchor, chance.uniform(0.0, 30.0), chance.choice((1.0, 10.0, 100.0)))


def fill(full: bool) -> None:
    """The disk is full from now on, or no longer."""
    global _full
    _full = full
    for module in (ledger, logs):
        vars(module)["open"] = _open  # found before the builtin


def _open(file: Any, mode: str = "r", *arguments: Any, **options: Any) -> Any:
    opened = builtins.open(file, mode, *arguments, **options)  # noqa: SIM115
    return _FullFile(opened) if _full and ("+" in mode or "a" in mode) else opened


class _FullFile:
    """An open file that nothing more fits into."""

    def __init__(self, file: Any) -> None:
        self._file = file

    def __enter__(self) -> _FullFile:
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._file, name)

    def write(self, data: Any) -> int:
        """Half of it, which is all that a file without a buffer says."""
        written: int = self._file.write(data[: len(data) // 2])
        return written
