"""The times of executions on a virtual TPU whose executions end late, as its log has them."""

from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple


class Execution(NamedTuple):
    """Times in seconds of time.monotonic: the call, and when the device began and ended."""

    called: float
    begun: float
    ended: float


def read_executions(log: Path) -> list[Execution]:
    """Reads the file that VIRTUAL_TPU_LOG named."""
    lines = log.read_text().splitlines()
    return [Execution(*(int(number) / 1e9 for number in line.split())) for line in lines]


def idle_seconds(executions: Sequence[Execution]) -> float:
    """For which the device waited between these executions."""
    return sum(later.begun - earlier.ended for earlier, later in pairwise(executions))
