"""Exactly-once delivery of the hosts' log lines.

An engine gives lines from a time on, inclusive. Two lines can have the same time, and a line can be written a moment
after one with a later time (stdout and stderr are copied by two threads). So each observation asks again from
LOG_OVERLAP before the newest line, and lines that were delivered already are left out. The host's log file is the
cursor: what is in it was delivered, and a new process goes on from its end.

What can fail half-way: a crash can leave a last line without its end; it is cut off, and delivered again.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path

from launcher.clock import shift
from launcher.provider import LOG_OVERLAP, LogLine

_TAIL_BYTES = 2_000_000  # of a log file, to find the lines of the overlap again after a restart


@dataclass
class Cursor:
    """What of one host's log has been delivered."""

    newest: str = ""  # time of the newest line
    recent: Counter[tuple[str, str]] = field(
        default_factory=Counter
    )  # lines of the overlap, with how often they were seen

    @property
    def since(self) -> str | None:
        """From when on the next observation must ask, RFC 3339; None: from the beginning."""
        return shift(self.newest, -LOG_OVERLAP) if self.newest else None

    def new(self, lines: Iterable[LogLine]) -> list[LogLine]:
        """The lines that were not delivered yet, in order; they count as delivered now.

        Args:
            lines: An observation from `since` on, or from earlier.
        """
        allowance = Counter(self.recent)
        edge = shift(self.newest, -LOG_OVERLAP) if self.newest else ""
        fresh = []
        for line in lines:
            key = (line.timestamp, line.text)
            if line.timestamp < edge:
                continue  # of an observation that was asked for before the last one was delivered
            if allowance[key] > 0:
                allowance[key] -= 1
            else:
                fresh.append(line)
        for line in fresh:
            self.recent[line.timestamp, line.text] += 1
            self.newest = max(self.newest, line.timestamp)
        if self.newest:
            edge = shift(self.newest, -LOG_OVERLAP)
            self.recent = Counter({key: count for key, count in self.recent.items() if key[0] >= edge})
        return fresh


class HostLog:
    """The log file of one host in one attempt: every line once, with the engine's time."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.cursor = Cursor()
        if path.exists():
            self._repair()
            self.cursor.new(tail(path, _TAIL_BYTES))

    def take(self, lines: Iterable[LogLine]) -> list[LogLine]:
        """Writes the new ones among `lines` and returns them."""
        fresh = self.cursor.new(lines)
        if fresh:
            data = "".join(f"{line.timestamp} {line.text}\n" for line in fresh).encode(errors="surrogateescape")
            with open(os.open(self.path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600), "ab") as file:
                file.write(data)
        return fresh

    def _repair(self) -> None:
        """Cuts off a last line that a crash left without its end; it will be delivered again, whole."""
        data = self.path.read_bytes()
        if data and not data.endswith(b"\n"):
            with open(self.path, "r+b") as file:
                file.truncate(data.rfind(b"\n") + 1)


def tail(path: Path, size: int) -> list[LogLine]:
    """The lines in the last `size` bytes of a host's log file."""
    start = max(0, path.stat().st_size - size)
    lines, _ = read_from(path, start)
    return lines[1:] if start else lines  # the first may be cut


def read_from(path: Path, offset: int) -> tuple[list[LogLine], int]:
    """The whole lines of a host's log file from byte `offset` on, and the offset after them. No file yet: nothing."""
    if not path.exists():
        return [], offset
    with open(path, "rb") as file:
        file.seek(offset)
        data = file.read()
    data = data[: data.rfind(b"\n") + 1]
    lines = []
    for line in data.decode(errors="surrogateescape").split("\n"):
        if line:
            timestamp, _, text = line.partition(" ")
            lines.append(LogLine(timestamp, text))
    return lines, offset + len(data)
