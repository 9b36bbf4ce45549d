"""Exactly-once delivery of the hosts' log lines, and `logs`, which prints them.

A container engine returns lines from a time on, inclusive. Two lines can have the same time, and a line can be written
a moment after one with a later time (stdout and stderr are copied by two threads). So each observation begins
LOG_OVERLAP before the newest line, and lines that were delivered before are skipped. The host's log file is the cursor:
its lines were delivered, and a new process goes on from its end.

Lines are delivered when they have ended, in the order of their ends, but have the times of their beginnings
(`launcher.container_output`). While a line is open, observations begin before it, also in a new process: its time is in
a file beside the log. The parts of a line that was cut are skipped.

A host's clock can step back. Lines then have times before the newest line, and are not among the lines from that time
on. While a host's clock is behind that time, the host returns its last lines instead (`tpu_vm/scripts/observe.sh`);
lines after the last delivered one are new. Lines are lost only if no observation is made while the clock is behind.

Partial failures: a crash can leave a last line without its end; it is cut off, and delivered again.
"""

import contextlib
import os
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from launcher.config import Config
from launcher.container_output import CUT, after
from launcher.errors import BadInput, Exit, LaunchError, from_disk
from launcher.home import write_private, write_whole
from launcher.provider import LOG_OVERLAP, LogLine, Observation
from launcher.run.session import Context, Output, Session, find_on_slice, open_session
from training.machine import shift

_TAIL_BYTES = 2_000_000  # of a log file, to find the lines of the overlap again after a restart
_BLOCK_BYTES = 1 << 16  # read at once to find a log file's last whole line
_PIECE_BYTES = 4_000_000  # of a log file in memory at once; larger than _TAIL_BYTES, and than a line (LINE_BYTES)
_LAST_SECONDS, _END_LINES = 60.0, 1000  # for which the rest of a huge log is fetched; then so many lines of its end
_FULL_DISK_SECONDS = 40.0  # for which last lines wait on a full disk of this machine, or on a log that can't be read
_LAST_TRIES, _LAST_TRY_EVERY = 3, 1.0  # of a host that does not answer when its last lines are fetched; seconds
_SILENCE_SECONDS = 600.0  # for which `logs -f` waits for a host to answer
_SUPERVISOR_CONFLICTS = 60  # fetches in a row that find the lock held
_FOLLOW_EVERY = 1.0  # seconds


@dataclass
class Cursor:
    """Position in one host's log up to which lines were delivered. A line is a text as in the file (time, blank, text):
    one object, because a second may hold 100,000."""

    newest: str = ""  # the latest time of a delivered line
    recent: Counter[str] = field(default_factory=Counter)  # deliveries of each line of the overlap, and of the last
    last: str | None = None  # the line that was delivered last; not the newest after a host's clock stepped back
    open: frozenset[str] = frozenset()  # times of lines that have begun and not ended
    cut: frozenset[str] = frozenset()  # times of lines that were cut: their other parts are not delivered

    @property
    def since(self) -> str | None:
        """Time from which the next observation must begin, RFC 3339; None: from the beginning."""
        if not self.newest:
            return None
        begin = shift(min([self.newest, *self.open]), -LOG_OVERLAP)
        return max(begin, after(max(self.cut))) if self.cut else begin

    def advance(self, lines: Sequence[LogLine], open: Iterable[str] = ()) -> list[LogLine]:
        """Returns, in order, the new lines of an observation from `since` or earlier, counts them as delivered and
        updates `since`. New are the lines after the last delivered one or, if that is not among `lines`, those of the
        overlap that come more often than they were delivered; of other lines those that were open; of a cut line only
        its first part. `open`: times of lines that have not ended, which `since` stays before."""
        # Where an observation is cut short, a line that was delivered seems open, or is cut.
        open = frozenset(open)
        doubtful = open | {line.timestamp for line in lines if line.text.endswith(CUT)}
        delivered = self.cut | {time for key in self.recent if (time := key.partition(" ")[0]) in doubtful and time}
        lines = [line for line in lines if line.timestamp not in (delivered if line.text.endswith(CUT) else self.cut)]
        edge = shift(self.newest, -LOG_OVERLAP) if self.newest else ""
        known, fresh, end_of_known = Counter[str](), [], self._end_of_known(lines)
        for index, line in enumerate(lines):
            key = f"{line.timestamp} {line.text}"
            if end_of_known is not None and index >= end_of_known:
                fresh.append(line)  # its time may be old: the host's clock stepped back, or it was open
            elif line.timestamp in self.open or (end_of_known is None and line.timestamp >= edge):
                if known[key] < self.recent[key]:
                    known[key] += 1
                else:
                    fresh.append(line)
        seen = max([*open, *(line.timestamp for line in lines)], default="")
        begun = {time for time in open if time >= edge and time not in delivered}
        # An older observation does not show lines that began after it.
        self.open = frozenset(begun | {time for time in self.open if time in open or time > seen})
        for line in fresh:
            self.last = f"{line.timestamp} {line.text}"
            self.recent[self.last] += 1
            self.newest = max(self.newest, line.timestamp)
        self.cut |= {line.timestamp for line in fresh if line.timestamp and line.text.endswith(CUT)}
        if self.newest:
            edge = shift(self.newest, -LOG_OVERLAP)
            for key in [key for key in self.recent if key < edge and key != self.last]:
                del self.recent[key]
        return fresh

    def _end_of_known(self, lines: Sequence[LogLine]) -> int | None:
        """Returns the index after the line that was delivered last: of equal lines, after as many as were delivered.
        None if `lines` have fewer, or none was delivered yet."""
        if self.last is None:
            return None
        last = LogLine(*self.last.split(" ", 1))
        places = [index for index, line in enumerate(lines) if line == last]
        count = self.recent[self.last]
        return places[count - 1] + 1 if len(places) >= count else None


class HostLog:
    """The log file of one host in one attempt: every line once, with the engine's time."""

    def __init__(self, path: Path) -> None:
        """Goes on from the end of an existing file, after cutting off a last line without its end."""
        self.path = path
        self.cursor = Cursor()
        self.kept_open: frozenset[str] = frozenset()  # as the file beside the log has it
        self.behind = False  # the newest observation could not be written
        if path.exists():
            self._repair()
            self.cursor.advance(tail(path, _TAIL_BYTES))
        if self._open_file.exists():
            self.kept_open = frozenset(self._open_file.read_text().split())
            self.cursor.open = self.kept_open - {key.partition(" ")[0] for key in self.cursor.recent}

    @property
    def _open_file(self) -> Path:
        """Returns the path of the file beside the log with the times of open lines."""
        return self.path.with_suffix(".open")

    def append_new(self, lines: Sequence[LogLine], since: str | None = None, open: Iterable[str] = ()) -> list[LogLine]:
        """Writes the new lines of an observation that begins at `since` (None: unknown, taken as it is) to the log
        file, and returns them. `open`: times of lines that have not ended in it. Raises OSError if they can't be
        written: they stay new, and until they are written, observations that begin later are skipped ([])."""
        if self.behind and since is not None and since > (self.cursor.since or ""):
            return []
        cursor = replace(self.cursor, recent=self.cursor.recent.copy())
        fresh = cursor.advance(lines, open)
        text = "".join(f"{line.timestamp} {line.text}\n" for line in fresh)
        try:
            self._keep_open(self.cursor.open | cursor.open)  # a line that ends now stays open until it is written
            if fresh:
                self._append(text.encode(errors="surrogateescape"))
        except OSError:
            self.behind = True
            raise
        self.cursor, self.behind = cursor, False
        with contextlib.suppress(OSError):  # the next observation tries again
            self._keep_open(cursor.open)
        return fresh

    def _keep_open(self, times: frozenset[str]) -> None:
        """Writes the times of lines that have begun and not ended to the file beside the log, unless it has just these:
        a new process then observes from before them. Raises OSError."""
        if times != self.kept_open:
            write_private(self._open_file, "\n".join(sorted(times)))
            self.kept_open = times

    def _append(self, data: bytes) -> None:
        """Appends all of the data to the log or, before it raises OSError, nothing."""
        with open(os.open(self.path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600), "ab", buffering=0) as file:
            size = file.seek(0, os.SEEK_END)
            try:
                write_whole(file, data)
            except OSError:
                file.truncate(size)
                raise

    def _repair(self) -> None:
        """Cuts off a last line that a crash left without its end, so that it is delivered again. The end may be longer
        than a line: a file system may leave zeros after a power failure."""
        with open(self.path, "r+b") as file:
            end, newline = file.seek(0, os.SEEK_END), -1
            while end and newline < 0:
                start = file.seek(max(0, end - _BLOCK_BYTES))
                newline = file.read(end - start).rfind(b"\n")
                end = start + newline + 1
            file.truncate(end)


class AttemptLogs:
    """The logs of an attempt's hosts: delivers each line once, to the host's file and to the user."""

    def __init__(self, session: Session, attempt: int) -> None:
        """Opens the hosts' logs at their ends."""
        self.hosts = {worker: HostLog(session.ledger.log_file(attempt, worker)) for worker in session.workers}
        self._session, self._attempt = session, attempt
        self._clock, self._output = session.machine.clock, session.context.output
        self._delivering = session.machine.threads.lock()  # one page at a time: threads fetch the rest
        self._disk_full = False  # this machine's, so that lines wait on their hosts

    def deliver(self, observation: Observation) -> bool:
        """Writes new lines to the host's log and emits them; returns whether there were any. On a full, read-only or
        broken disk says so once and returns True: the lines are fetched again. Raises other OSErrors."""
        with self._delivering:
            try:
                log = self.hosts[observation.worker]
                fresh = log.append_new(observation.lines, observation.since, observation.open)
            except OSError as error:
                if from_disk(error) is None:
                    raise
                if not self._disk_full:
                    self._output.say(
                        f"this machine's disk: {error.strerror}: log lines stay on the hosts until there is space; "
                        "supervision continues"
                    )
                self._disk_full = True
                return True
            self._disk_full = self._disk_full and not fresh
            for line in fresh:
                self._output.emit(observation.worker, line)
            return bool(fresh)

    def fetch_rest(self, worker: int) -> None:
        """Delivers a host's last lines, page by page; after 60 s only the last 1000 (`_fetch_end`). Asks a host that
        does not answer 3 times, and waits 40 s for a full disk or a log that can't be read, as its container is removed
        next; then says that lines may be missing. Threads may fetch from different hosts at once."""
        log, begun, failures = self.hosts[worker], self._clock.monotonic(), 0
        since = log.cursor.since
        while True:
            observation = self._session.observe(worker, self._attempt, since)
            if observation.container is None:
                failures += 1
                problem, give_up = observation.problem or "no answer", failures == _LAST_TRIES
            else:
                self.deliver(observation)
                problem = observation.problem or ("this machine's disk is full" if log.behind else "")
                give_up = self._clock.monotonic() - begun > _FULL_DISK_SECONDS
            if problem and give_up:
                self._output.say(f"host {worker}: its last lines may be missing: {problem}")
                return
            if problem:
                self._clock.sleep(_LAST_TRY_EVERY)
            elif not (since := next_page(observation)):
                return
            elif self._clock.monotonic() - begun > _LAST_SECONDS:
                self._fetch_end(worker)
                return

    def _fetch_end(self, worker: int) -> None:
        """Delivers the last 1000 lines of a host's log, and says which lines may be missing."""
        missing = f"lines before its last {_END_LINES} may be missing: it wrote too many"
        try:
            end = self._session.provider.look(worker, self._session.container(self._attempt), lines=_END_LINES)
        except LaunchError as error:  # the attempt's end must be recorded all the same
            end = Observation(worker, None, problem=str(error).splitlines()[0])
        if end.container is None:
            missing = f"its last lines may be missing: {end.problem}"
        self._output.say(f"host {worker}: {missing}")
        self.deliver(end)


def next_page(observation: Observation) -> str:
    """Returns the time from which to observe again at once if this observation was cut short; LOG_OVERLAP is not
    subtracted, as its lines may fill an observation. Returns "" if it was complete, or the next would be the same."""
    if not observation.more or not (observation.open or observation.lines):
        return ""
    last = observation.lines[-1] if observation.lines else LogLine("", "")
    page = min(observation.open, default=after(last.timestamp) if last.text.endswith(CUT) else last.timestamp)
    return page if page > (observation.since or "") else ""


def tail(path: Path, size: int) -> list[LogLine]:
    """Returns the whole lines in the last `size` bytes of a host's log file, which must exist; the first is left out
    unless the file begins with it. `size`: at most 4 MB, for only the first 4 MB of these bytes are read."""
    start = max(0, path.stat().st_size - size)
    lines, _ = read_from(path, start)
    return lines[1:] if start else lines  # the first may be cut


def read_from(path: Path, offset: int) -> tuple[list[LogLine], int]:
    """Returns whole lines of a host's log file from byte `offset` on, at most 4 MB or one longer line, and the offset
    after them; [] at the end, and if there is no file yet."""
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


def print_logs(config: Config, context: Context, run_id: str | None, *, follow: bool, host: int | None) -> None:
    """Emits every line of the run's newest attempt once, of one host or all (None): first what the run's folder has,
    then further lines of hosts, with `follow` until the attempt, or without a supervisor its containers, have ended.
    While another process supervises the run, that process fetches the lines, and this one reads its files. Without a
    supervisor, this process fetches them into the run's folder, and stops following after 10 minutes without an answer.
    Raises BadInput if the run was never started, or the slice has no such host."""
    ledger = find_on_slice(config, context, run_id)
    number = ledger.state.attempt
    if number < 0:
        raise BadInput(f"run {ledger.run_id} was never started: there are no lines")
    session = open_session(context, ledger)
    workers = session.choose_workers(host)
    files = {worker: ledger.log_file(number, worker) for worker in workers}
    offsets = dict.fromkeys(workers, 0)
    clock, say = context.machine.clock, context.output.say
    fetcher = _Fetcher(session, number, files)
    with contextlib.closing(session.provider):
        while True:
            with contextlib.suppress(LaunchError):
                ledger.pull()
            ended = ledger.state.has_ended(number)
            if not ended:
                fetcher.fetch()
            for worker in workers:
                offsets[worker] = _emit_from(files[worker], offsets[worker], worker, context.output)
            if ended or not (follow or fetcher.more):
                return
            if fetcher.more or (fetcher.containers_ended and ledger.state.has_ended(number)):
                continue
            if fetcher.containers_ended:
                say(
                    f"run {ledger.run_id}: its containers have ended, and no tpu-launch watches the run: "
                    "`tpu-launch run --attach` says how it ended and goes on as the file says"
                )
                return
            if clock.monotonic() - fetcher.answered > _SILENCE_SECONDS:
                say(
                    f"run {ledger.run_id}: no host that may go on writing has answered for "
                    f"{_SILENCE_SECONDS / 60:.0f} minutes, and nothing watches the run: `tpu-launch status` looks at "
                    "the slice, `tpu-launch run` goes on with the run"
                )
                return
            clock.sleep(_FOLLOW_EVERY)


def _emit_from(path: Path, offset: int, worker: int, output: Output) -> int:
    """Emits the lines of a host's log file from `offset` on, and returns the offset after them."""
    while True:
        lines, offset = read_from(path, offset)
        if not lines:
            return offset
        for line in lines:
            output.emit(worker, line)


class _Fetcher:
    """Fetches the lines of an attempt's hosts into the run's files while no other process supervises the run."""

    def __init__(self, session: Session, number: int, files: Mapping[int, Path]) -> None:
        self._session, self._attempt, self._files = session, number, files
        self._problems = dict.fromkeys(files, "")
        self._next_page: dict[int, str] = {}  # time from which on a host's last observation had no room for lines
        self.containers_ended = False  # whether the last fetch found no running container on any host
        self.answered = session.machine.clock.monotonic()
        """When a host that may go on writing last answered, or another process may have fetched its lines."""

        self._silent = False  # whether no such host answered when this process fetched last
        self._conflicts = 0  # fetches in a row that found the run's lock held

    @property
    def more(self) -> bool:
        """Whether hosts have lines that did not fit into the last fetch."""
        return bool(self._next_page)

    def fetch(self) -> None:
        """Appends each host's new lines to its file, and updates `more`, `containers_ended` and `answered` (when a host
        last answered). While another process holds the run's lock, fetches nothing: then `answered` becomes now if
        hosts answered the last fetch, and after a minute in any case."""
        pages, self._next_page, self.containers_ended = self._next_page, {}, False
        try:
            with self._session.ledger.supervising(patience=0.0):
                running = [worker for worker in self._files if self._fetch_from(worker, pages.get(worker))]
                self.containers_ended, self._conflicts = not running, 0
                self._silent = all(self._problems[worker] for worker in running)
        except LaunchError as error:
            if error.exit_code is not Exit.CONFLICT:
                raise
            self._conflicts += 1
            if self._conflicts > _SUPERVISOR_CONFLICTS:  # another `logs` would let go of the lock
                self._silent = False
        if not self._silent:
            self.answered = self._session.machine.clock.monotonic()

    def _fetch_from(self, worker: int, page: str | None) -> bool:
        """Appends a page of a host's new lines to its file, from the time `page` on (None: from the file's newest), and
        says when the host stops answering or answers again. Returns whether its container may go on writing; True
        without an answer. Raises OSError."""
        log = HostLog(self._files[worker])
        observation = self._session.observe(worker, self._attempt, page or log.cursor.since)
        if observation.problem not in ("", self._problems[worker]):
            self._session.context.output.say(f"host {worker} does not answer: {observation.problem}")
        elif self._problems[worker] and not observation.problem:
            self._session.context.output.say(f"host {worker} answers again")
        self._problems[worker] = observation.problem
        log.append_new(observation.lines, open=observation.open)
        if page := next_page(observation):
            self._next_page[worker] = page
        state = observation.container
        return state is None or not (state.ended or state.status in ("absent", "created"))
