"""A run's folder: how the run was started, what happened, and what the hosts wrote.

`.tpu-launch/runs/<run id>/`
    run.json        how the run was started: written once, atomically; a folder without it is no run
    specification.yaml, overlay-<sha256>.tar.gz    what every attempt is made from (launcher.run.specification)
    config.yaml     the resolved document that every host is given
    events.jsonl    one JSON object a line (launcher.run.events); appended, never rewritten
    stacks/attempt-<n>/host-<worker>.txt  stack traces of the processes of a run that hung; explanation.txt: why
    logs/attempt-<n>/host-<worker>.log    each line as "<engine's time> <line>", appended by the holder of the lock
    progress-<n>.jsonl                    lines of progress of the first host, as the supervisor read them
    hosts-<n>.jsonl, hosts-<n>.svg        each host's seconds a step, every half minute, and a heat map of them
    post-mortem-<n>.tar.gz                the archive of a failed attempt (launcher.run.post_mortem)
    lock            held (flock) by the one process of this machine that supervises the run
    holder, events.lock    the name in its leases; held (flock) while an event is recorded in the run's bucket

The ledger of a run whose output is in a bucket is there (launcher.run.bucket), and events.jsonl is a copy: an event is
created in the bucket, then appended to the file. Events that only the bucket has are pulled.

Partial failures: a crash or a full disk may cut a line of events or logs; readers skip it, and the next writer of an
event ends it first. A run.json that is empty or damaged (power loss) is no run. The lock goes with its process. All
files are 0600, all folders 0700.
"""

import contextlib
import functools
import json
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar

from launcher.errors import BadInput, Exit, LaunchError, from_disk
from launcher.home import is_held, lock, write_private, write_whole
from launcher.run.bucket import Lease, RunBucket
from launcher.run.events import Entry, RunEvent, from_document
from launcher.run.state import Phase, RunState, state_of
from training import storage
from training.machine import Clock, Threads, format_time
from training.telemetry.progress_line import LONGEST_LINE, ProgressLine, encode, parse

AnyEvent = TypeVar("AnyEvent", bound=RunEvent)
_LOCK_POLL_SECONDS = 0.05
_LOCK_SECONDS = 5.0  # for which a thread or process waits for another that records or pulls; renewals wait with it
_FULL_DISK_SECONDS = 60.0  # for which `append` retries
_FULL_DISK_POLL_SECONDS = 1.0


class NotRecorded(LaunchError):
    """An event can't be recorded: the run's record does not tell all that is done."""


@dataclass(frozen=True)
class RunRecord:
    """How a run was started: enough to find it again."""

    run_id: str
    project: str
    zone: str
    slice: str
    config_hash: str
    created: float
    provider: str
    bucket: str = ""  # URL of the run's launcher folder in its bucket; empty where the ledger is on this machine only
    user: str = ""  # as `account`
    account: str = ""  # the owner (launcher.workstation) in the labels of the run's slices; empty without a bucket


@dataclass(frozen=True)
class _Read:
    """The events' file as far as it was read."""

    size: int = 0
    whole: tuple[Entry, ...] = ()  # entries of its whole lines
    end: int = 0  # bytes up to the end of its last whole line
    entries: tuple[Entry, ...] = ()  # with the entry of a last line that lacks its newline
    state: RunState = field(default_factory=RunState)


class Ledger:
    """The folder of one run. Threads may use it at once."""

    def __init__(self, folder: Path, clock: Clock) -> None:
        """Reads nothing yet, and creates nothing; `clock` times the events."""
        self.folder = folder
        self.clock = clock
        self._events = folder / "events.jsonl"
        self._read = _Read()  # replaced as a whole, because threads read at once
        self._writer = os.urandom(8).hex()  # makes its events differ from those of all other processes
        self._unrecorded = set[str]()  # kinds of events that `note` could not record since it last recorded one
        self.lease: Lease | None = None
        """This process's; None when it does not supervise the run, or the run has no bucket."""

    @property
    def run_id(self) -> str:
        return self.folder.name

    @property
    def record(self) -> RunRecord:
        """How the run was started. Raises BadInput when run.json is missing or damaged."""
        path = self.folder / "run.json"
        try:
            return RunRecord(**json.loads(path.read_text()))
        except (OSError, ValueError, TypeError) as error:
            raise BadInput(
                f"{path} is damaged, or was written by another version of tpu-launch ({error}): remove its folder, or "
                "restore the file from a backup"
            ) from None

    @functools.cached_property
    def bucket(self) -> RunBucket | None:
        """The run's folder in its bucket; None if the ledger is on this machine only, or run.json is damaged."""
        with contextlib.suppress(BadInput):
            if url := self.record.bucket:
                return RunBucket(url)
        return None

    @property
    def state(self) -> RunState:
        """Where the run stands by the events in this machine's file, without lines that a crash has cut; the state of a
        new run if there is no file. Raises BadInput for another version's event."""
        return self._read_on().state

    def append(self, event: RunEvent, *, patience: float = _FULL_DISK_SECONDS) -> None:
        """Records an event, which must not hold secrets, in the bucket, if there is one, and in the file. Retries for
        `patience` seconds (0: tries once), then raises NotRecorded; but with patience, a holder of the lease waits for
        the bucket without end. Ends this process if another one has the lease. Raises BadInput as `entries`."""
        deadline = self.clock.monotonic() + patience
        document = Entry(format_time(self.clock.time()), event).document()
        line = json.dumps(document | ({"by": self._writer} if self.bucket else {}))
        number = 0
        while True:
            try:
                number = number or (len(self.entries()) + 1 if self.bucket else 1)
                return self._record(line, number)
            except (OSError, storage.StorageError) as error:
                in_time = self.clock.monotonic() < deadline
                if in_time or (patience and self.lease is not None and isinstance(error, storage.StorageError)):
                    if not in_time:
                        self.confirm()  # the bucket has failed: waits until the lease is renewed
                    self.clock.sleep(_FULL_DISK_POLL_SECONDS)
                    continue
                waited = f" for {patience:.0f} s" if patience else ""
                reason, advice = (error.strerror, "make room") if isinstance(error, OSError) else (error, "wait")
                raise NotRecorded(
                    f"{self._events}: the event {event.kind!r} can't be recorded{waited}: {reason}; what runs "
                    f"on hosts goes on, and is billed: {advice}, then `tpu-launch run --attach`"
                ) from None

    def note(self, event: RunEvent, say: Callable[[str], None]) -> None:
        """Records an event that only informs. Tries once, and only if this process's lease, if it has one, is fresh; if
        that fails, says so, once a kind of event, and goes on."""
        try:
            if self.lease is not None and not self.lease.is_fresh():  # a request to the bucket would block for minutes
                raise LaunchError(f"run {self.run_id}: {event.kind!r} is not recorded: its bucket does not answer")
            self.append(event, patience=0.0)
            self._unrecorded.clear()
        except LaunchError as error:
            if event.kind not in self._unrecorded:
                say(str(error))
            self._unrecorded.add(event.kind)

    def confirm(self) -> None:
        """If this process has the run's lease, waits until it is fresh; ends the process if another one has it."""
        if self.lease is not None:
            self.lease.confirm()

    def pull(self, threads: Threads | None = None) -> None:
        """Appends to the file the events that only the bucket has; does nothing without a bucket. `threads` reads many
        at once (None: one by one). Raises LaunchError if the bucket does not answer or this machine's disk is full.
        Ends this process if it has lost the run's lease."""
        if self.bucket is None:
            return
        try:
            with self._recording():
                for text in self.bucket.read_events(len(self.entries()) + 1, threads) if threads is not None else ():
                    self._write(text)
                while (found := self.bucket.read_event(len(self.entries()) + 1)) is not None:
                    self._write(found)
                self._check_supervisor()
        except (storage.StorageError, OSError) as error:  # OSError: this machine's disk is full
            raise LaunchError(f"run {self.run_id}: its events can't be read: {from_disk(error) or error}") from None

    def publish(self) -> None:
        """Copies config, specification and, if missing there, overlays and run.json to the bucket; does nothing without
        one. First waits until this process's lease is fresh (`confirm`). Raises LaunchError."""
        if self.bucket is not None:
            self.confirm()
            try:
                self.bucket.upload(self.folder)
            except (storage.StorageError, OSError) as error:
                raise LaunchError(f"run {self.run_id} can't be written to its bucket: {error}") from None

    def _record(self, line: str, number: int) -> None:
        """Appends an event's line to the file. Before that creates it in the bucket, if there is one, as `number` or
        the next free one, and appends others' events up to there. Raises OSError, StorageError, and BadInput as
        `entries`; ends a process that lost its lease."""
        if self.bucket is None:
            self._write(line)
            return
        with self._recording():
            self._check_supervisor()
            while (found := self.bucket.put_event(number, line)) != line:
                if number > len(self.entries()):
                    self._write(found)
                    self._check_supervisor()
                    if json.loads(found) | {"time": ""} == json.loads(line) | {"time": ""}:  # an earlier try of ours
                        return
                number += 1
            if number > len(self.entries()):
                self._write(line)

    def _check_supervisor(self) -> None:
        """Ends this process if it had the lease and the file has a later Supervised event, of another process."""
        state = self.state
        if self.lease is not None and state.supervisions > self.lease.supervisions:
            self.lease.end(state.supervisor)

    @contextlib.contextmanager
    def _recording(self) -> Iterator[None]:
        """Holds the lock under which one thread of this machine compares the file with the bucket. Raises StorageError
        if another one has it for 5 s: the bucket does not answer, or its process is stopped."""
        path, deadline = self.folder / "events.lock", self.clock.monotonic() + _LOCK_SECONDS
        with open(os.open(path, os.O_RDWR | os.O_CREAT, 0o600), "r+b", buffering=0) as file:
            while not lock(file, path):
                if self.clock.monotonic() > deadline:
                    raise storage.StorageError(f"{path} is locked: end a tpu-launch that is stopped, or try again")
                self.clock.sleep(_LOCK_POLL_SECONDS)
            yield

    def _write(self, line: str) -> None:
        """Appends an event's line, or only its newline if the rest is there; ends a cut line before. Raises OSError."""
        with open(os.open(self._events, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o600), "r+b", buffering=0) as file:
            size = file.seek(0, os.SEEK_END)
            last = os.pread(file.fileno(), len(line), max(0, size - len(line))).decode(errors="replace")
            start = "\n" if last and not last.endswith("\n") else ""
            write_whole(file, ("\n" if last == line else f"{start}{line}\n").encode())

    def progress_file(self, attempt: int) -> Path:
        """Returns the path of an attempt's kept lines of progress, which may not exist."""
        return self.folder / f"progress-{attempt}.jsonl"

    def keep_progress(self, attempt: int, line: ProgressLine) -> None:
        """Appends a line to the attempt's `progress_file`. Ignores OSError (a full disk): the next line comes soon."""
        _append(self.progress_file(attempt), encode(line))

    def keep_hosts(self, attempt: int, step: int, seconds: Mapping[int, float]) -> None:
        """Appends each host's seconds a step, until `step`, to hosts-<attempt>.jsonl. Ignores OSError (a full disk)."""
        _append(self.folder / f"hosts-{attempt}.jsonl", json.dumps({"step": step, "seconds": seconds}))

    def newest_progress(self, attempt: int) -> ProgressLine | None:
        """Returns the newest line of progress in the run's folder, where a supervisor keeps those of the first host
        that tells any; None without one. Asks no host."""
        try:
            with open(self.progress_file(attempt), "rb") as file:
                file.seek(max(0, file.seek(0, os.SEEK_END) - 2 * LONGEST_LINE))
                lines = file.read().decode(errors="replace").splitlines()
        except FileNotFoundError:
            return None
        return next(filter(None, map(parse, reversed(lines))), None)

    def entries(self) -> Sequence[Entry]:
        """Returns all events with their times, oldest first. Raises BadInput for an event of another version."""
        return self._read_on().entries

    def _read_on(self) -> _Read:
        """Returns all entries and the run's state (none before there is a file), after reading what was appended since
        the last call. Reads a file that became shorter anew. Leaves out lines that do not parse; an incomplete last one
        is read again. Raises BadInput for another version's event."""
        before = self._read
        try:
            size = os.stat(self._events).st_size
        except FileNotFoundError:
            size = 0
        if size == before.size:  # the file only grows, and is asked for many times a second
            return before
        if size < before.end:
            before = _Read()
        with open(self._events, "rb") as file:
            file.seek(before.end)
            data = file.read()
        lines, newline, rest = data.rpartition(b"\n")
        whole = (*before.whole, *self._parse(lines))
        entries = (*whole, *self._parse(rest))
        end = before.end + len(lines) + len(newline)
        self._read = read = _Read(before.end + len(data), whole, end, entries, state_of(item.event for item in entries))
        return read

    def _parse(self, data: bytes) -> list[Entry]:
        """Returns the entries of lines, without those that a crash has cut. Raises BadInput for another version's."""
        entries = []
        for line in data.decode(errors="replace").split("\n"):
            with contextlib.suppress(json.JSONDecodeError):
                try:
                    entries.append(from_document(json.loads(line)))
                except (AttributeError, KeyError, TypeError) as error:
                    raise BadInput(
                        f"{self._events}: an event of another version of tpu-launch ({error!r}): {line[:200]}\n"
                        "  use that version, or remove the run's folder"
                    ) from None
        return entries

    def events(self) -> list[RunEvent]:
        """Returns all events, oldest first. Raises BadInput as `entries`."""
        return [entry.event for entry in self.entries()]

    def last(self, *kinds: type[AnyEvent]) -> AnyEvent | None:
        """Returns the newest event of these kinds; None without one. Raises BadInput as `entries`."""
        return next((event for event in reversed(self.events()) if isinstance(event, kinds)), None)

    def log_file(self, attempt: int, worker: int) -> Path:
        """Returns the path of a host's log, after making its folder."""
        folder = self.folder / "logs" / f"attempt-{attempt}"
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        return folder / f"host-{worker}.log"

    def write_stack(self, attempt: int, name: str, text: str) -> Path:
        """Writes stacks/attempt-<n>/NAME.txt, stack traces of one host or their explanation, and returns its path."""
        path = self.folder / "stacks" / f"attempt-{attempt}" / f"{name}.txt"
        write_private(path, text)
        return path

    def supervised(self) -> bool | None:
        """Returns whether a process supervises the run: one of this machine holds its lock or, if the run has not
        finished, one of another machine has its lease in the bucket, which is read. None if the bucket does not answer
        or, for a run that has finished or has no bucket, the file system has no locks, of which it warns."""
        held = is_held(self.folder / "lock", exclusively=True)
        if held or self.bucket is None or self.state.phase is Phase.FINISHED:
            return held
        with contextlib.suppress(storage.StorageError):
            lease = self.bucket.read_lease()
            return lease is not None and lease.is_live and lease.holder != self.holder
        return None

    @property
    def holder(self) -> str:
        """This folder's name in the run's leases; empty before the first."""
        with contextlib.suppress(OSError):
            return (self.folder / "holder").read_text()
        return ""

    @contextlib.contextmanager
    def supervising(self, patience: float = 5.0) -> Iterator[None]:
        """Holds the run's lock, whose file names this process. Waits `patience` seconds (`logs` takes the lock for a
        moment at a time), then raises LaunchError (Exit.CONFLICT): another process supervises the run. Raises BadInput
        where files can't be locked."""
        deadline = self.clock.monotonic() + patience
        path = self.folder / "lock"
        with open(os.open(path, os.O_RDWR | os.O_CREAT, 0o600), "r+b", buffering=0) as file:
            while not lock(file, path):
                if self.clock.monotonic() >= deadline:
                    holder = file.read().decode().strip() or "unknown"
                    raise LaunchError(
                        f"run {self.run_id} is supervised by another tpu-launch (process {holder}): "
                        "follow it with `tpu-launch logs -f`",
                        exit_code=Exit.CONFLICT,
                    )
                self.clock.sleep(_LOCK_POLL_SECONDS)
            with contextlib.suppress(OSError):  # on a full disk the lock holds without its holder's process id
                file.truncate(0)
                file.write(str(os.getpid()).encode())
            yield


def _append(path: Path, line: str) -> None:
    """Appends a line to a file, which it creates if need be. Silently does nothing if that fails, as on a full disk."""
    with contextlib.suppress(OSError):
        fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        with open(fd, "ab", buffering=0) as file:
            write_whole(file, f"{line}\n".encode())
