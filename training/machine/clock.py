"""Clocks, and RFC 3339 timestamps.

State machines take a `Clock` as an argument, so that tests and simulations decide what time it is.
"""

import functools
import time
from datetime import UTC, datetime, timedelta


class Clock:
    """Tells the operating system's time, and waits. Others are derived from it."""

    def monotonic(self) -> float:
        """Returns seconds since an arbitrary moment; never goes backwards."""
        return time.monotonic()

    def time(self) -> float:
        """Returns Unix seconds, as far as this host knows."""
        return time.time()

    def sleep(self, seconds: float) -> None:
        """Returns after `seconds`."""
        time.sleep(seconds)


def format_time(seconds: float) -> str:
    """Returns Unix seconds as an RFC 3339 timestamp in UTC, to the second."""
    return time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(seconds))


def parse_time(timestamp: str) -> float | None:
    """Returns the Unix seconds of an RFC 3339 timestamp in UTC, as Google and container engines print it; None for an
    empty one. Raises ValueError for another text."""
    if not timestamp:
        return None
    head, _, fraction = timestamp.removesuffix("Z").partition(".")
    whole = datetime.fromisoformat(head).replace(tzinfo=UTC).timestamp()
    return whole + (float(f"0.{fraction}") if fraction.isdigit() else 0.0)


@functools.lru_cache(maxsize=1024)  # one observation asks three times about the same line
def shift(timestamp: str, by: timedelta) -> str:
    """Returns an RFC 3339 timestamp moved by a duration, with nine digits of a second (Python has six), so that
    timestamps compare as text."""
    head, _, fraction = timestamp.removesuffix("Z").partition(".")
    return f"{(datetime.fromisoformat(head) + by).isoformat()}.{(fraction or '0')[:9].ljust(9, '0')}Z"
