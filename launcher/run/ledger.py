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

What can fail half-way: a line of events or logs may be cut by a crash or a full disk; readers pass over it, and whoever
appends an event ends it first. A run.json that is empty or damaged (the machine lost power) is no run. The lock goes
with its process. All files are 0600, all folders 0700.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path

from launcher.config import Config
from launcher.errors import BadInput, Exit, LaunchError
from launcher.home import write_private, write_whole
from launcher.run.events import (
    AttemptBegan,
    Ended,
    Entry,
    Event,
    LeftBehind,
    Requested,
    Started,
    StopRequested,
    Swept,
    from_document,
    to_document,
)
from launcher.workstation import Workstation
from training.machine.clock import Clock, format_time

_LOCK_POLL_SECONDS = 0.05
_ROOM_SECONDS = 60.0  # for which an event waits on a full disk
_ROOM_POLL_SECONDS = 1.0


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


def read_record(folder: Path) -> RunRecord:
    """How the run of a folder was started. Raises BadInput when its file is damaged."""
    path = folder / "run.json"
    try:
        document = json.loads(path.read_text())
        return RunRecord(**{item.name: document[item.name] for item in fields(RunRecord) if item.name in document})
    except (OSError, ValueError, TypeError) as error:
        raise BadInput(
            f"{path} is damaged, or was written by another version of tpu-launch ({error}): remove its folder, or "
            "restore the file from a backup"
        ) from None


class Ledger:
    """The folder of one run."""

    def __init__(self, folder: Path, clock: Clock) -> None:
        self.folder = folder
        self.clock = clock
        self._events = folder / "events.jsonl"
        self._size = 0  # of the events' file, when it was read last
        self._whole: list[Entry] = []  # what its whole lines say
        self._end = 0  # of its last whole line, in bytes
        self._entries: Sequence[Entry] = ()  # with what may be read of a line that lacks its end

    @property
    def run_id(self) -> str:
        """The run's id, which is the folder's name."""
        return self.folder.name

    @property
    def record(self) -> RunRecord:
        """How the run was started. Raises BadInput when its file is damaged."""
        return read_record(self.folder)

    def append(self, event: Event, *, patience: float = _ROOM_SECONDS) -> None:
        """Records an event. It must not hold secrets: the file is kept.

        Args:
            patience: Seconds to wait for room on a disk that is full.

        Raises:
            LaunchError: It can't be written.
        """
        deadline = self.clock.monotonic() + patience
        while True:
            try:
                return self._write(event)
            except OSError as error:
                if self.clock.monotonic() < deadline:
                    self.clock.sleep(_ROOM_POLL_SECONDS)
                    continue
                waited = f" for {patience:.0f} s" if patience else ""
                raise LaunchError(
                    f"{self._events}: the event {event.kind!r} can't be recorded{waited}: {error.strerror}; what runs "
                    "on hosts goes on, and is billed: make room, then `tpu-launch run --attach`"
                ) from None

    def note(self, event: Event, say: Callable[[str], None]) -> None:
        """Records what only tells people something. Where it can't be written that is said, and changes nothing."""
        try:
            self.append(event, patience=0.0)
        except LaunchError as error:
            say(str(error))

    def _write(self, event: Event) -> None:
        line = json.dumps(to_document(format_time(self.clock.time()), event)) + "\n"
        with open(os.open(self._events, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o600), "r+b", buffering=0) as file:
            size = file.seek(0, os.SEEK_END)
            cut = size > 0 and os.pread(file.fileno(), 1, size - 1) != b"\n"
            write_whole(file, ("\n" * cut + line).encode())

    def entries(self) -> Sequence[Entry]:
        """Everything that was recorded, oldest first."""
        try:
            size = os.stat(self._events).st_size
        except FileNotFoundError:
            size = 0
        if size != self._size:  # it only grows, and is asked for many times a second
            self._read_on(size)
        return self._entries

    def _read_on(self, size: int) -> None:
        """Reads what was appended since the last time; all of a file that has become shorter: somebody replaced it."""
        if size < self._end:
            self._whole, self._end = [], 0
        with open(self._events, "rb") as file:
            file.seek(self._end)
            data = file.read()
        whole, newline, rest = data.rpartition(b"\n")
        self._size = self._end + len(data)
        self._end += len(whole) + len(newline)
        self._whole += _parse(whole)
        self._entries = (*self._whole, *_parse(rest))

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

    @property
    def started_everywhere(self) -> bool:
        """Whether the last attempt's containers were seen to have started on all hosts."""
        last = self.attempts - 1
        return any(isinstance(event, Started) and event.attempt == last for event in self.events())

    @property
    def stops(self) -> int:
        """How often the run's owner asked it to stop."""
        return sum(isinstance(event, StopRequested) for event in self.events())

    def stop_requested(self) -> bool:
        """Whether the run's owner asked it to stop, and has not asked for another attempt since."""
        recorded = self.events()
        asked = next((event for event in reversed(recorded) if isinstance(event, Requested)), None)
        if asked is not None and asked.stops is not None:
            return self.stops > asked.stops
        last = next((event for event in reversed(recorded) if isinstance(event, StopRequested | Requested)), None)
        if not isinstance(last, StopRequested):
            return False
        # A ledger of an older version has no `Requested`: there, a stop was one attempt's.
        return last.attempt >= self.attempts - 1 or any(isinstance(event, Requested) for event in recorded)

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

    def supervised(self) -> bool:
        """Whether a process holds the run's lock now."""
        try:
            lock = os.open(self.folder / "lock", os.O_RDONLY)
        except FileNotFoundError:
            return False
        try:
            fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
        finally:
            os.close(lock)
        return False

    @contextlib.contextmanager
    def supervising(self, patience: float = 5.0) -> Iterator[None]:
        """Holds the run's lock.

        Args:
            patience: Seconds to wait for it: `logs` takes it for a moment at a time.

        Raises:
            LaunchError: Another process supervises the run (Exit.CONFLICT).
        """
        deadline = self.clock.monotonic() + patience
        with open(os.open(self.folder / "lock", os.O_RDWR | os.O_CREAT, 0o600), "r+b", buffering=0) as lock:
            while True:
                try:
                    fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    break
                except BlockingIOError:
                    if self.clock.monotonic() < deadline:
                        self.clock.sleep(_LOCK_POLL_SECONDS)
                        continue
                    holder = lock.read().decode().strip() or "unknown"
                    raise LaunchError(
                        f"run {self.run_id} is supervised by another tpu-launch (process {holder}): "
                        "follow it with `tpu-launch logs -f`",
                        exit_code=Exit.CONFLICT,
                    ) from None
            with contextlib.suppress(OSError):  # a full disk: it holds without saying whose it is
                lock.truncate(0)
                lock.write(str(os.getpid()).encode())
            yield


def _parse(data: bytes) -> list[Entry]:
    """The entries of lines; those that a crash has cut say nothing."""
    entries = []
    for line in data.decode(errors="replace").split("\n"):
        with contextlib.suppress(json.JSONDecodeError):
            if isinstance(document := json.loads(line), dict):
                entries.append(from_document(document))
    return entries


def same_slice(config: Config, record: RunRecord) -> bool:
    """Whether a run was started on the slice of this configuration."""
    requested = (config.slice.name, config.project, config.zone, config.provider)
    return (record.slice, record.project, record.zone, record.provider) == requested


def runs(home: Path, machine: Workstation) -> list[Ledger]:
    """All runs of the launcher's folder, oldest first; not those whose run.json is damaged."""
    created = {}
    for path in (home / "runs").glob("*/run.json"):
        ledger = Ledger(path.parent, machine.clock)
        with contextlib.suppress(BadInput):  # `find` says it to whoever names the run
            created[ledger] = ledger.record.created
    return sorted(created, key=lambda ledger: (created[ledger], ledger.run_id))


def find(
    home: Path, machine: Workstation, run_id: str | None, *, slice_name: str | None = None, provider: str | None = None
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
        if (home / "runs" / run_id / "run.json").exists():
            read_record(home / "runs" / run_id)  # says what is damaged; else it is a run of another slice
        raise BadInput(f"there is no run {run_id!r} here; known: {', '.join(run.run_id for run in known) or 'none'}")
    if not known:
        raise BadInput(
            f"no run was started from this folder yet (looked in {home / 'runs'}); `tpu-launch run` starts one"
        )
    return known[-1]


def new_run_id(name: str, machine: Workstation) -> str:
    """An id of a run: the name, the UTC time, and random letters, so that two workstations don't collide."""
    now = format_time(machine.clock.time())
    day, time = now[5:10], now[11:19]
    return f"{name}-{day.replace('-', '')}-{time.replace(':', '')}-{machine.random.randrange(1 << 16):04x}"


def begin(
    home: Path, machine: Workstation, record: RunRecord, document: str, keep: Callable[[Path], None] | None = None
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
