"""Whether the end of a container's log holds every line from a time on. Pure."""

from __future__ import annotations

from collections.abc import Sequence

from launcher.provider import LOG_OVERLAP, LogLine
from training.machine.clock import shift


def covers(lines: Sequence[LogLine], since: str, tail: int) -> bool:
    """Whether the last `tail` lines of a log hold every line from `since` on.

    They do when they begin well before the newest line that is known already, or at it with fewer than `tail` lines:
    `since` is LOG_OVERLAP before that line, and times run backwards a little where stdout and stderr meet.

    Args:
        lines: The last lines of the log, at most `tail`.
        since: RFC 3339 time, as `Cursor.since` gives it.
        tail: How many lines were asked for.
    """
    if not lines:
        return False
    first = lines[0].timestamp
    return first <= shift(since, LOG_OVERLAP / 2) or (len(lines) < tail and first <= shift(since, LOG_OVERLAP))
