"""A run's folder: how the run was started, what happened, and what the hosts wrote.

`.tpu-launch/runs/<run id>/`
    run.json        how the run was started: written once, atomically; a folder without it is no run
    specification.yaml, overlay-<sha256>.tar.gz    what every attempt is made from (launcher.run.specification)
    config.yaml     the resolved document that every host is given
    events.jsonl    one JSON object a line (launcher.run.events); appended, never rewritten
    stacks/attempt-<n>/host-<worker>.txt  where the processes were when a run hung
    logs/attempt-<n>/host-<worker>.log    each line as "<engine's time> <line>", appended by whoever holds the lock
    post-mortem-<n>.tar.gz                what is kept of an attempt that failed (launcher.run.post_mortem)
    lock            held (flock) by the one process that supervises the run

What can fail half-way: a line of events or logs may be cut by a crash; readers pass over a last line without an end.
The lock goes with its process. All files are 0600, all folders 0700.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from launcher.clock import Clock, format_time
from launcher.errors import BadInput, Exit, LaunchError
from launcher.home import write_private
from launcher.machine import Machine
from launcher.run.events import (
    AttemptBegan,
    Ended,
    Entry,
    Event,
    LeftBehind,
    StopRequested,
    Swept,
    from_document,
    to_document,
)

_LOCK_POLL_SECONDS = 0.05


@dataclass(frozen=True)
class RunRecord:
    """How a run was started: enough to find it again."""

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

    def __init__(self, folder: Path, clock: Clock) -> None:
        self.folder = folder
        self.clock = clock
        self._cached: tuple[int, list[Entry]] = (0, [])  # size of the events that were read, and what they say

    @property
    def run_id(self) -> str:
        """The run's id, which is the folder's name."""
        return self.folder.name

    @property
    def record(self) -> RunRecord:
        """How the run was started."""
        return RunRecord(**json.loads((self.folder / "run.json").read_text()))

    def append(self, event: Event) -> None:
        """Records an event. It must not hold secrets: the file is kept."""
        line = json.dumps(to_document(format_time(self.clock.time()), event))
        with open(os.open(self._events, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600), "a") as file:
            file.write(line + "\n")

    def entries(self) -> Sequence[Entry]:
        """Everything that was recorded, oldest first."""
        size = self._events.stat().st_size if self._events.exists() else 0
        if size != self._cached[0]:  # it only grows, and is asked for many times a second
            entries = []
            for line in self._events.read_text().splitlines():
                with contextlib.suppress(json.JSONDecodeError):  # cut by a crash
                    entries.append(from_document(json.loads(line)))
            self._cached = size, entries
        return self._cached[1]

    def events(self) -> list[Event]:
        """The events alone, oldest first."""
        return [entry.event for entry in self.entries()]

    @property
    def attempts(self) -> int:
        """How many attempts were begun."""
        return 1 + max((event.attempt for event in self.events() if isinstance(event, AttemptBegan)), default=-1)

    @property
    def last_attempt(self) -> AttemptBegan | None:
        """The newest attempt; None before the first."""
        return next((event for event in reversed(self.events()) if isinstance(event, AttemptBegan)), None)

    @property
    def under_way(self) -> bool:
        """Whether an attempt was begun that has not ended, as far as is known here."""
        return self.attempts > 0 and self.outcome is None

    @property
    def outcome(self) -> str | None:
        """How the last attempt ended ("finished", "host lost", ...); None while it is open, or before the first."""
        for event in reversed(self.events()):
            if isinstance(event, Ended):
                return event.outcome
            if isinstance(event, AttemptBegan):
                return None
        return None

    def has_ended(self, attempt: int) -> bool:
        """Whether an attempt is known to have ended, whether or not another one follows."""
        return attempt < self.attempts - 1 or self.outcome is not None

    def stop_requested(self, attempt: int) -> bool:
        """Whether the run's owner asked this attempt to stop."""
        return any(isinstance(event, StopRequested) and event.attempt == attempt for event in self.events())

    def left_behind(self) -> list[LeftBehind]:
        """Containers that ended attempts may have left on hosts, and that were not removed since."""
        swept = {event.attempt for event in self.events() if isinstance(event, Swept)}
        return [event for event in self.events() if isinstance(event, LeftBehind) and event.attempt not in swept]

    def log_file(self, attempt: int, worker: int) -> Path:
        """Where the lines of a host are kept; makes the folder."""
        folder = self.folder / "logs" / f"attempt-{attempt}"
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        return folder / f"host-{worker}.log"

    def stacks_folder(self, attempt: int) -> Path:
        """Where the stacks of a run that hung are kept."""
        return self.folder / "stacks" / f"attempt-{attempt}"

    def write_stack(self, attempt: int, worker: int, text: str) -> None:
        """Keeps the stacks of one host's processes."""
        folder = self.stacks_folder(attempt)
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        write_private(folder / f"host-{worker}.txt", text)

    @contextlib.contextmanager
    def supervising(self, patience: float = 5.0) -> Iterator[None]:
        """Holds the run's lock.

        Args:
            patience: Seconds to wait for it: `logs` takes it for a moment at a time.

        Raises:
            LaunchError: Another process supervises the run (Exit.CONFLICT).
        """
        deadline = self.clock.monotonic() + patience
        with open(os.open(self.folder / "lock", os.O_RDWR | os.O_CREAT, 0o600), "r+") as lock:
            while True:
                try:
                    fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    break
                except BlockingIOError:
                    if self.clock.monotonic() < deadline:
                        self.clock.sleep(_LOCK_POLL_SECONDS)
                        continue
                    holder = lock.read().strip() or "unknown"
                    raise LaunchError(
                        f"run {self.run_id} is supervised by another tpu-launch (process {holder}): "
                        "follow it with `tpu-launch logs -f`",
                        exit_code=Exit.CONFLICT,
                    ) from None
            lock.seek(0)
            lock.truncate()
            lock.write(str(os.getpid()))
            lock.flush()
            yield

    @property
    def _events(self) -> Path:
        return self.folder / "events.jsonl"


def runs(home: Path, machine: Machine) -> list[Ledger]:
    """All runs of the launcher's folder, oldest first."""
    ledgers = [Ledger(path.parent, machine.clock) for path in (home / "runs").glob("*/run.json")]
    return sorted(ledgers, key=lambda ledger: (ledger.record.created, ledger.run_id))


def find(
    home: Path, machine: Machine, run_id: str | None, *, slice_name: str | None = None, provider: str | None = None
) -> Ledger:
    """The run of that id, or the newest one (of that slice, on that provider). Raises BadInput when there is none."""
    known = [
        ledger
        for ledger in runs(home, machine)
        if slice_name in (None, ledger.record.slice) and provider in (None, ledger.record.provider)
    ]
    if run_id is not None:
        for ledger in known:
            if ledger.run_id == run_id:
                return ledger
        raise BadInput(f"there is no run {run_id!r} here; known: {', '.join(run.run_id for run in known) or 'none'}")
    if not known:
        raise BadInput(
            f"no run was started from this folder yet (looked in {home / 'runs'}); `tpu-launch run` starts one"
        )
    return known[-1]


def new_run_id(name: str, machine: Machine) -> str:
    """An id of a run: the name, the UTC time, and random letters, so that two workstations don't collide."""
    now = format_time(machine.clock.time())
    day, time = now[5:10], now[11:19]
    return f"{name}-{day.replace('-', '')}-{time.replace(':', '')}-{machine.random.randrange(1 << 16):04x}"


def begin(
    home: Path, machine: Machine, record: RunRecord, document: str, keep: Callable[[Path], None] | None = None
) -> Ledger:
    """Makes the folder of a new run.

    Args:
        home: The launcher's folder.
        machine: This machine.
        record: How the run is started; its id names the folder.
        document: The resolved configuration, as YAML.
        keep: Writes what else belongs into the folder, before it counts as a run.
    """
    folder = home / "runs" / record.run_id
    folder.mkdir(mode=0o700, parents=True)
    write_private(folder / "config.yaml", document)
    if keep is not None:
        keep(folder)
    write_private(folder / "run.json", json.dumps(asdict(record), indent=1))  # last: a folder without it is no run
    return Ledger(folder, machine.clock)
