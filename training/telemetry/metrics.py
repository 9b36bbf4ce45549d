"""The numbers that a run leaves behind. `MetricsLog` keeps one JSON line an interval:

    <run folder>/metrics/attempt-0002.00000.jsonl     one small object after another, each rewritten until it is full
    <run folder>/metrics.jsonl                        the whole history of the run, written when an attempt ends in good
    order <run folder>/tensorboard/                         the same for TensorBoard (training/telemetry/tensorboard.py)

An object store can't append, and limits how often one name is overwritten. So lines are held back for `FLUSH_SECONDS`
and the newest object is rewritten whole, at most `LINES` lines of it. A killed attempt loses only what it held back. An
attempt that went on from step s supersedes the lines of earlier attempts beyond s; `history` leaves them out.
"""

from __future__ import annotations

import json
import re
import time
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from training import storage
from training.telemetry.tensorboard import EventLog

LINES = 1000
FLUSH_SECONDS = 20.0
_NAME = re.compile(r"attempt-(\d+)\.(\d+)\.jsonl")


class MetricsLog:
    """The lines of one attempt. Host 0 has the only one."""

    def __init__(
        self,
        folder: str,
        attempt: int,
        resumed_at: int,
        now: Callable[[], float] = time.monotonic,
        *,
        tensorboard: bool = False,
    ) -> None:
        """`resumed_at` steps were done before. A number that was used before (a local run has no attempts) is never
        overwritten."""
        self._folder, self._now = folder, now
        self._attempt = max([attempt, *(used + 1 for used, _ in _objects(folder))])
        self._events = EventLog(folder, self._attempt, resumed_at) if tensorboard else None
        self._chunk, self._lines, self._dirty, self._flushed = (
            0,
            [json.dumps({"attempt": attempt, "resumed_at": resumed_at})],
            True,
            now(),
        )

    def write(self, line: Mapping[str, Any]) -> None:
        """Adds a line. Floats keep all their digits."""
        self._lines.append(json.dumps(line))
        if self._events:
            self._events.write(line)
        self._dirty = True
        if len(self._lines) >= LINES or self._now() - self._flushed >= FLUSH_SECONDS:
            self.flush()

    def flush(self) -> None:
        if self._events:
            self._events.flush()
        if self._dirty:
            name = f"attempt-{self._attempt:04d}.{self._chunk:05d}.jsonl"
            storage.write(storage.join(self._folder, "metrics", name), _join(self._lines))
            self._dirty, self._flushed = False, self._now()
        if len(self._lines) >= LINES:
            self._chunk, self._lines = self._chunk + 1, []

    def finish(self) -> None:
        """Flushes, and writes the run's whole history to metrics.jsonl."""
        self.flush()
        storage.write(
            storage.join(self._folder, "metrics.jsonl"), _join(json.dumps(line) for line in read_history(self._folder))
        )


def read_history(folder: str) -> list[dict[str, Any]]:
    """All lines of a run in the order of its steps, without those that a later attempt trained again."""
    attempts: dict[int, list[dict[str, Any]]] = {}
    for (attempt, _), url in sorted(_objects(folder).items()):
        attempts.setdefault(attempt, []).extend(json.loads(line) for line in storage.read(url).splitlines())
    return merge_attempts(attempts[attempt] for attempt in sorted(attempts))


def merge_attempts(attempts: Iterable[list[dict[str, Any]]]) -> list[dict[str, Any]]:
    """Lines of successive attempts as one history. Each attempt begins with a line that tells where it went on."""
    result: list[dict[str, Any]] = []
    for lines in attempts:
        for line in lines:
            if "resumed_at" in line:
                result = [earlier for earlier in result if earlier["step"] <= line["resumed_at"]]
            else:
                result.append(line)
    return result


def _objects(folder: str) -> dict[tuple[int, int], str]:
    """(attempt, number) -> URL of each object of a run's metrics."""
    found = {}
    for each in storage.listing(storage.join(folder, "metrics")):
        match = _NAME.fullmatch(storage.name_of(each.url))
        if match:
            found[int(match[1]), int(match[2])] = each.url
    return found


def _join(lines: Iterable[str]) -> bytes:
    return "".join(f"{line}\n" for line in lines).encode()
