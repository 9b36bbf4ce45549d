"""Passes the numbers of a run to its trackers, and keeps them as JSON lines, the tracker that every run has:

    <run folder>/metrics/attempt-0002.00000.jsonl    small objects; the newest is rewritten until it is full
    <run folder>/metrics.jsonl                       the whole history, written when an attempt finishes or stops

An object store can't append, and limits how often one name is overwritten. So lines are buffered until `flush`, which
rewrites the newest object, of at most `LINES` lines. A killed attempt loses its buffered lines, of steps after its
newest commit, and may leave a truncated line. An attempt that resumed at step s supersedes the lines of earlier
attempts beyond s. `read_history` leaves out both.

To add a tracker, write a class that satisfies `Tracker` and takes an `AttemptInfo`, and add it to `TRACKERS`. Its
package is imported only when a run uses it.
"""

import json
import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Protocol

from training import storage as default_storage
from training.registry import load
from training.storage import Storage, join, name_of
from training.telemetry.console import warn

LINES = 1000
_NAME = re.compile(r"attempt-(\d+)\.(\d+)\.jsonl")

Values = Mapping[str, float | None]


def finite_or_none(values: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the values with None for each float that is NaN or infinite, which JSON can't represent."""
    lost = {name for name, value in values.items() if isinstance(value, float) and not math.isfinite(value)}
    return {name: None if name in lost else value for name, value in values.items()}


@dataclass(frozen=True)
class AttemptInfo:
    """The attempt that a tracker records."""

    folder: str  # of the run
    attempt: int
    resumed_at: int  # steps done by earlier attempts
    token: str = ""  # of this group of processes: no attempt of another run has it, whatever its folder's name
    storage: Storage = default_storage
    settings: Mapping[str, Any] = field(default_factory=dict)  # the trainer's configuration
    file_number: int = 0  # for file names: unique even in a local run, whose attempts all have number 0


class Tracker(Protocol):
    """Keeps the numbers of one attempt. Values may be buffered until `flush`; a crash loses only those."""

    def log(self, step: int, values: Values) -> None:
        """Records values of the state after `step` steps."""

    def flush(self) -> None:
        """Writes buffered values. Raises if it can't; the values stay buffered."""

    def finish(self, failed: bool) -> None:
        """Ends the attempt's records after the last `log`. `failed`: by an error, not at the last step or by a stop."""


# Name -> "module:function or class", which is called with an AttemptInfo and returns a Tracker.
TRACKERS = {
    "jsonl": "training.telemetry.metrics:JsonLinesTracker",
    "tensorboard": "training.telemetry.trackers:TensorBoardTracker",
    "wandb": "training.telemetry.trackers:open_wandb",
    "mlflow": "training.telemetry.trackers:open_mlflow",
}


class MetricsLog:
    """Passes the numbers of one attempt to its trackers, on host 0; in training, the writer's thread calls it."""

    def __init__(
        self, info: AttemptInfo, trackers: Sequence[str] = ("jsonl",), fence: Callable[[], None] = lambda: None
    ) -> None:
        """Opens the `trackers`, names in TRACKERS (reports and later attempts read "jsonl"), with a file number that no
        earlier attempt of the run has used. `fence` raises when a newer start has claimed the run; it is called after
        the listing that decides the file number: a newer start then has a greater one."""
        used = [number + 1 for number, _ in _list_objects(info.folder, info.storage)]
        fence()
        info = replace(info, file_number=max([info.attempt, *used]))  # local attempts are all 0
        self._trackers: list[Tracker] = [load(TRACKERS[name])(info) for name in trackers]

    def log(self, step: int, values: Values) -> None:
        """Passes values of the state after `step` steps to all trackers, which buffer them."""
        for tracker in self._trackers:
            tracker.log(step, values)

    def flush(self) -> None:
        """Flushes all trackers; then raises the first error, if any: the next call writes those values again."""
        self._call([tracker.flush for tracker in self._trackers])

    def finish(self, failed: bool = False) -> None:
        """Ends all trackers' records of an attempt, `failed` or not, flushing them; then raises the first error, if
        any: the next call tries again."""
        self._call([partial(tracker.finish, failed) for tracker in self._trackers])

    def _call(self, functions: Sequence[Callable[[], None]]) -> None:
        """Calls all functions, then raises the error of the first that failed, if any."""
        errors = []
        for function in functions:
            try:
                function()
            except Exception as error:
                errors.append(error)
        if errors:
            raise errors[0]


class JsonLinesTracker:
    """Writes one attempt's lines. The first one says where the attempt resumed."""

    def __init__(self, info: AttemptInfo) -> None:
        self._info = info
        self._chunk = 0  # number of the newest object
        self._lines = [json.dumps({"attempt": info.attempt, "resumed_at": info.resumed_at})]  # of the newest object
        self._dirty = True

    def log(self, step: int, values: Values) -> None:
        """Buffers a line. A float keeps all digits; one that is not finite is null, its name in "not_finite"."""
        finite = finite_or_none(values)
        lost = [name for name, value in values.items() if value is not None and finite[name] is None]
        self._lines.append(json.dumps({"step": step, **finite, **({"not_finite": lost} if lost else {})}))
        self._dirty = True

    def flush(self) -> None:
        """Rewrites the newest object if there are new lines; begins the next object after `LINES` lines. Raises
        StorageError, and keeps the lines then."""
        while self._dirty:
            name = f"attempt-{self._info.file_number:04d}.{self._chunk:05d}.jsonl"
            self._info.storage.write(join(self._info.folder, "metrics", name), _encode_lines(self._lines[:LINES]))
            self._dirty = len(self._lines) > LINES
            if len(self._lines) >= LINES:
                self._chunk, self._lines = self._chunk + 1, self._lines[LINES:]

    def finish(self, failed: bool) -> None:
        """Flushes and, unless the attempt failed, writes the run's whole history to metrics.jsonl."""
        self.flush()
        if failed:
            return
        folder, storage = self._info.folder, self._info.storage
        history = read_history(folder, storage)
        storage.write(join(folder, "metrics.jsonl"), _encode_lines(json.dumps(values) for values in history))


def read_history(folder: str, storage: Storage = default_storage) -> list[dict[str, Any]]:
    """Returns all lines of a run in the order of its steps, but those that a later attempt superseded, and unreadable
    ones, of which it warns: "step" and the figures of training or of an evaluation ("eval_..."), None for those that
    are not finite, whose names are in "not_finite". [] without any. Raises StorageError."""
    history: list[dict[str, Any]] = []
    for _, url in sorted(_list_objects(folder, storage).items()):
        lines = storage.read(url).splitlines()
        parsed = [_parse_line(line) for line in lines]
        if None in parsed:
            warn(f"{url}: line {parsed.index(None) + 1} of {len(lines)} is not readable; left out")
        for values in parsed:
            if values is None:
                continue
            if "resumed_at" in values:  # the first line of an attempt
                history = [earlier for earlier in history if earlier["step"] <= values["resumed_at"]]
            else:
                history.append(values)
    return history


def _parse_line(line: bytes) -> dict[str, Any] | None:
    """Returns the values of a line; None without a whole number as "step" or "resumed_at", or if truncated."""
    try:
        values = json.loads(line)
    except ValueError:
        return None
    is_line = isinstance(values, dict) and isinstance(values.get("step", values.get("resumed_at")), int)
    return values if is_line else None


def _list_objects(folder: str, storage: Storage) -> dict[tuple[int, int], str]:
    """Returns the URLs of a run's metrics by (file number of the attempt, number of the object)."""
    urls = {}
    for info in storage.listing(join(folder, "metrics")):
        match = _NAME.fullmatch(name_of(info.url))
        if match:
            urls[int(match[1]), int(match[2])] = info.url
    return urls


def _encode_lines(lines: Iterable[str]) -> bytes:
    return "".join(f"{line}\n" for line in lines).encode()
