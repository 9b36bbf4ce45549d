"""Time: the clock that supervision and recovery are given, and RFC 3339 timestamps.

State machines take a `Clock` as an argument, so that tests and simulations decide what time it is.
"""

from __future__ import annotations

import functools
import time
from datetime import UTC, datetime, timedelta
from typing import Protocol


class Clock(Protocol):
    """Where time comes from, and what waiting means."""

    def monotonic(self) -> float:
        """Seconds since some moment; never goes backwards."""

    def time(self) -> float:
        """Unix seconds."""

    def sleep(self, seconds: float) -> None:
        """Returns after so many seconds."""


class SystemClock:
    """The clock of this machine."""

    def monotonic(self) -> float:
        return time.monotonic()

    def time(self) -> float:
        return time.time()

    def sleep(self, seconds: float) -> None:
        time.sleep(seconds)


def format_time(seconds: float) -> str:
    """Unix seconds as an RFC 3339 time in UTC, to the second."""
    return time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(seconds))


def parse_time(text: str) -> float | None:
    """Unix seconds of an RFC 3339 time in UTC, as Google and container engines print it; None for an empty one."""
    if not text:
        return None
    head, _, fraction = text.removesuffix("Z").partition(".")
    whole = datetime.fromisoformat(head).replace(tzinfo=UTC).timestamp()
    return whole + (float(f"0.{fraction}") if fraction.isdigit() else 0.0)


@functools.lru_cache(maxsize=1024)  # an observation asks three times about the same line
def shift(timestamp: str, by: timedelta) -> str:
    """Another RFC 3339 time, with nine digits of a second (Python has six), so that times compare as text."""
    head, _, fraction = timestamp.removesuffix("Z").partition(".")
    return f"{(datetime.fromisoformat(head) + by).isoformat()}.{(fraction or '0')[:9].ljust(9, '0')}Z"
