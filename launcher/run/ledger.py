"""A run's folder: what was asked for, what happened, what the hosts said.

`.tpu-launch/runs/<run id>/`
    run.json        how the run was started: written once, atomically
    config.yaml     the resolved document that every host is given
    events.jsonl    one JSON object a line: time, event, and what belongs to it; appended, never rewritten
    stacks/attempt-<n>/host-<worker>.txt  where the processes were when a run hung
    logs/attempt-<n>/host-<worker>.log    each line as "<engine's time> <line>", appended by whoever holds the lock
    lock            held (flock) by the one process that supervises the run

What can fail half-way: a line of events or logs may be cut by a crash; readers pass over a last line without an end.
The lock goes with its process. All files are 0600, all folders 0700.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import os
import secrets
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from launcher.errors import BadInput, Exit, LaunchError
from launcher.home import write_private


@dataclass(frozen=True)
class RunRecord:
    """What a run is: enough to attach to it, or to start its next attempt, from another terminal."""

    run_id: str
    name: str
    project: str
    zone: str
    slice: str
    file: str
    command: list[str]
    config_hash: str
    created: float
    provider: str = "tpu-vm"


class Ledger:
    """The folder of one run."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._read: tuple[int, list[dict[str, Any]]] = (0, [])  # bytes of the events that were read, and what they say

    @property
    def record(self) -> RunRecord:
        return RunRecord(**json.loads((self.folder / "run.json").read_text()))

    def event(self, event: str, **details: Any) -> None:
        """Appends one event. `details` must not hold secrets: this file is kept."""
        line = (
            json.dumps({"time": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()), "event": event, **details}) + "\n"
        )
        _append(self.folder / "events.jsonl", line)

    def events(self) -> list[dict[str, Any]]:
        path = self.folder / "events.jsonl"
        size = path.stat().st_size if path.exists() else 0
        if size != self._read[0]:  # it only grows: asked for many times a second
            events = []
            for line in path.read_text().splitlines():
                with contextlib.suppress(json.JSONDecodeError):  # cut by a crash
                    events.append(json.loads(line))
            self._read = size, events
        return list(self._read[1])

    @property
    def attempts(self) -> int:
        """How many attempts were begun."""
        return 1 + max((event["attempt"] for event in self.events() if event["event"] == "attempt"), default=-1)

    @property
    def under_way(self) -> bool:
        """Whether an attempt was begun that has not ended, as far as is known here."""
        return self.attempts > 0 and self.outcome is None

    @property
    def outcome(self) -> str | None:
        """How the last attempt ended ("finished", "host lost", ...); None while it is open, or before the first."""
        for event in reversed(self.events()):
            if event["event"] == "ended":
                return str(event["outcome"])
            if event["event"] == "attempt":
                return None
        return None

    def stop_requested(self, attempt: int) -> bool:
        """Whether the run's owner asked this attempt to stop."""
        return any(event["event"] == "stop" and event.get("attempt") == attempt for event in self.events())

    def left_behind(self) -> list[dict[str, Any]]:
        """The attempts that ended while some of their hosts were out of reach, and whose hosts were not cleared
        since."""
        events = self.events()
        swept = {event["attempt"] for event in events if event["event"] == "swept"}
        return [event for event in events if event["event"] == "left behind" and event["attempt"] not in swept]

    def log_file(self, attempt: int, worker: int) -> Path:
        folder = self.folder / "logs" / f"attempt-{attempt}"
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        return folder / f"host-{worker}.log"

    def stacks_folder(self, attempt: int) -> Path:
        return self.folder / "stacks" / f"attempt-{attempt}"

    def write_stack(self, attempt: int, worker: int, text: str) -> None:
        folder = self.stacks_folder(attempt)
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        write_private(folder / f"host-{worker}.txt", text)

    @contextlib.contextmanager
    def supervising(self, patience: float = 5.0) -> Iterator[None]:
        """Holds the run's lock. Raises LaunchError (conflict) when another process supervises the run.

        `logs` takes it for a moment at a time: so long it is waited for.
        """
        deadline = time.monotonic() + patience
        with open(os.open(self.folder / "lock", os.O_RDWR | os.O_CREAT, 0o600), "r+") as lock:
            while True:
                try:
                    fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    break
                except BlockingIOError:
                    if time.monotonic() < deadline:
                        time.sleep(0.05)
                        continue
                    holder = lock.read().strip() or "unknown"
                    raise LaunchError(
                        f"run {self.folder.name} is supervised by another tpu-launch (process {holder}): follow it with `tpu-launch logs -f`",
                        exit_code=Exit.CONFLICT,
                    ) from None
            lock.seek(0)
            lock.truncate()
            lock.write(str(os.getpid()))
            lock.flush()
            yield


def runs(home: Path) -> list[Ledger]:
    """All runs of this folder, oldest first."""
    found = [Ledger(path.parent) for path in (home / "runs").glob("*/run.json")]
    return sorted(found, key=lambda ledger: (ledger.record.created, ledger.folder.name))


def find(home: Path, run_id: str | None, *, slice_name: str | None = None, provider: str | None = None) -> Ledger:
    """The run of that id, or the newest one (of that slice, on that provider). Raises BadInput when there is none."""
    known = [
        ledger
        for ledger in runs(home)
        if slice_name in (None, ledger.record.slice) and provider in (None, ledger.record.provider)
    ]
    if run_id is not None:
        for ledger in known:
            if ledger.folder.name == run_id:
                return ledger
        raise BadInput(
            f"there is no run {run_id!r} here; known: {', '.join(ledger.folder.name for ledger in known) or 'none'}"
        )
    if not known:
        raise BadInput(
            f"no run was started from this folder yet (looked in {home / 'runs'}); `tpu-launch run` starts one"
        )
    return known[-1]


def begin(home: Path, record_of: Callable[[str], RunRecord], document: str, name: str) -> Ledger:
    """Makes the folder of a new run. Its id is the name, the UTC time and a few random letters, so that two
    workstations don't collide."""
    run_id = f"{name}-{time.strftime('%m%d-%H%M%S', time.gmtime())}-{secrets.token_hex(2)}"
    folder = home / "runs" / run_id
    folder.mkdir(mode=0o700, parents=True)
    ledger = Ledger(folder)
    write_private(folder / "config.yaml", document)
    write_private(
        folder / "run.json", json.dumps(asdict(record_of(run_id)), indent=1)
    )  # last: a folder without it is no run
    return ledger


def config_hash(document: str, command: list[str]) -> str:
    """Tells whether two starts mean the same run."""
    return hashlib.sha256(json.dumps([document, command]).encode()).hexdigest()[:16]


def _append(path: Path, text: str) -> None:
    with open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600), "a") as file:
        file.write(text)
