"""Exactly-once delivery of the hosts' log lines.

An engine gives lines from a time on, inclusive. Two lines can have the same time, and a line can be written a moment
after one with a later time (stdout and stderr are copied by two threads). So each observation asks again from
LOG_OVERLAP before the newest line, and lines that were delivered already are left out. The host's log file is the
cursor: what is in it was delivered, and a new process goes on from its end.

A host's clock can step back: then lines come whose times were over already, and asking from a time on would leave them
out. While a host's clock is behind that time, the host gives its last lines instead (`tpu_vm/scripts/observe.sh`), and
what stands behind the line that was delivered last is new. Lines are lost only where nobody asks while it is behind.

What can fail half-way: a crash can leave a last line without its end; it is cut off, and delivered again.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from launcher.home import write_whole
from launcher.provider import LOG_OVERLAP, LogLine
from training.machine.clock import shift

_TAIL_BYTES = 2_000_000  # of a log file, to find the lines of the overlap again after a restart
_PIECE_BYTES = 4_000_000  # of a log file in memory at once; more than _TAIL_BYTES
_BLOCK_BYTES = 64_000  # read at once to find the end of the last whole line


Key = tuple[str, str]  # time and text of a line


@dataclass
class Cursor:
    """What of one host's log has been delivered."""

    newest: str = ""
    """The latest time of a line."""

    recent: Counter[Key] = field(default_factory=Counter)
    """Lines of the overlap, and the last one, with how often they were seen."""

    last: Key | None = None
    """The line that was delivered last. After a host's clock stepped back it is not the newest."""

    @property
    def since(self) -> str | None:
        """From when on the next observation must ask, RFC 3339; None: from the beginning."""
        return shift(self.newest, -LOG_OVERLAP) if self.newest else None

    def new(self, lines: Iterable[LogLine]) -> list[LogLine]:
        """The lines that were not delivered yet, in order; they count as delivered now.

        Args:
            lines: An observation from `since` on, or from earlier, in the log's order.
        """
        lines = list(lines)
        allowance = Counter(self.recent)
        edge = shift(self.newest, -LOG_OVERLAP) if self.newest else ""
        end_of_known = self._end_of_known(lines)
        fresh = []
        for index, line in enumerate(lines):
            key = (line.timestamp, line.text)
            if line.timestamp < edge:
                # Delivered before: this observation was asked for earlier. But what the log has behind the line that
                # was delivered last is new, with a clock that stepped back.
                if index >= end_of_known:
                    fresh.append(line)
            elif allowance[key] > 0:
                allowance[key] -= 1
            else:
                fresh.append(line)
        for line in fresh:
            self.last = (line.timestamp, line.text)
            self.recent[self.last] += 1
            self.newest = max(self.newest, line.timestamp)
        if self.newest:
            edge = shift(self.newest, -LOG_OVERLAP)
            kept = {key: count for key, count in self.recent.items() if key[0] >= edge or key == self.last}
            self.recent = Counter(kept)
        return fresh

    def _end_of_known(self, lines: Sequence[LogLine]) -> int:
        """The index behind the line that was delivered last; behind all lines when it is not among them."""
        if self.last is None:
            return len(lines)
        places = [index for index, line in enumerate(lines) if (line.timestamp, line.text) == self.last]
        count = self.recent[self.last]
        return places[count - 1] + 1 if len(places) >= count else len(lines)


class HostLog:
    """The log file of one host in one attempt: every line once, with the engine's time."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.cursor = Cursor()
        self.behind = False  # whether the newest observation could not be written
        if path.exists():
            self._repair()
            self.cursor.new(tail(path, _TAIL_BYTES))

    def take(self, lines: Iterable[LogLine], since: str | None = None) -> list[LogLine]:
        """Writes the new ones among `lines` and returns them.

        Args:
            lines: An observation.
            since: What it was asked from. One from behind lines that could not be written is left alone: they come
                first.

        Raises:
            OSError: They can't be written, for example because the disk is full: all of them are still new.
        """
        if self.behind and since is not None and since > (self.cursor.since or ""):
            return []
        cursor = replace(self.cursor, recent=self.cursor.recent.copy())
        fresh = cursor.new(lines)
        if fresh:
            text = "".join(f"{line.timestamp} {line.text}\n" for line in fresh)
            try:
                self._append(text.encode(errors="surrogateescape"))
            except OSError:
                self.behind = True
                raise
        self.cursor, self.behind = cursor, False
        return fresh

    def _append(self, data: bytes) -> None:
        """Writes all of it, or nothing."""
        with open(os.open(self.path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600), "ab", buffering=0) as file:
            size = file.seek(0, os.SEEK_END)
            try:
                write_whole(file, data)
            except OSError:
                file.truncate(size)
                raise

    def _repair(self) -> None:
        """Cuts off a last line that a crash left without its end; it will be delivered again, whole."""
        with open(self.path, "r+b") as file:
            size = end = file.seek(0, os.SEEK_END)
            while end:
                start = max(0, end - _BLOCK_BYTES)
                file.seek(start)
                newline = file.read(end - start).rfind(b"\n")
                if newline >= 0:
                    end = start + newline + 1
                    break
                end = start
            if end < size:
                file.truncate(end)


def tail(path: Path, size: int) -> list[LogLine]:
    """The lines in the last `size` bytes of a host's log file."""
    start = max(0, path.stat().st_size - size)
    lines, _ = read_from(path, start)
    return lines[1:] if start else lines  # the first may be cut


def read_from(path: Path, offset: int) -> tuple[list[LogLine], int]:
    """Whole lines of a host's log file from byte `offset` on, and the offset after them: `_PIECE_BYTES` of them, or one
    longer line. None when there is no more, or no file yet."""
    if not path.exists():
        return [], offset
    with open(path, "rb") as file:
        file.seek(offset)
        data = piece = file.read(_PIECE_BYTES)
        while b"\n" not in piece and (piece := file.read(_PIECE_BYTES)):
            data += piece
    data = data[: data.rfind(b"\n") + 1]
    lines = []
    for line in data.decode(errors="surrogateescape").split("\n"):
        if line:
            timestamp, _, text = line.partition(" ")
            lines.append(LogLine(timestamp, text))
    return lines, offset + len(data)
