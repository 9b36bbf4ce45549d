"""Reads a run: `status`, `events`, and `logs`, which may fetch lines into the run's folder. Hosts stay unchanged."""

import contextlib
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from launcher import costs
from launcher.config import Config
from launcher.errors import BadInput, Exit, LaunchError
from launcher.provider import Observation, Provider, SliceState, container_name
from launcher.run import events
from launcher.run.events import Entry
from launcher.run.ledger import Ledger
from launcher.run.logs import HostLog, next_page, read_from, tail
from launcher.run.session import Context, Output, find_run, open_session
from launcher.run.specification import SecretSource
from launcher.run.verdict import describe_exit
from launcher.workstation import Workstation
from training.machine import Clock, format_time, parse_time
from training.telemetry.progress_line import ProgressLine, slowest

_SILENCE_SECONDS = 600.0  # for which `logs -f` waits for a host to answer
_SUPERVISOR_CONFLICTS = 60  # fetches in a row that find the lock held
_FOLLOW_EVERY = 1.0  # seconds
_LAST_LINE_BYTES = 20_000  # of a host's log, for its last line
_RECENT_SECONDS = 60.0  # how far back hosts are asked for lines
_HISTORY_LINES = 8
_SHOWN_CHARACTERS = 500  # of a host's last line
# Events that `status` shows.
_SHOWN = (
    events.Supervised,
    events.Started,
    events.Ended,
    events.RunStopRequested,
    events.Recovering,
    events.Recovered,
    events.HostOutOfReach,
    events.HostBack,
    events.StragglerFound,
    events.StragglerGone,
)


@dataclass(frozen=True)
class HostStatus:
    """A host of a run, as `status` shows it."""

    worker: int
    address: str
    container: str  # its state, or why the host could not be asked
    last_line: str
    quiet_seconds: float | None = None  # between its last line (host's clock) and now (this machine's)
    progress: ProgressLine | None = None  # of its slowest process


@dataclass(frozen=True)
class Status:
    """A slice, its newest run, and its hosts, as `status` shows them."""

    slice_name: str
    slice: SliceState | None
    run: str | None
    attempt: int | None
    outcome: str | None
    history: list[str]
    hosts: list[HostStatus]
    progress: ProgressLine | None = None  # of the first host that tells it

    def as_json(self) -> dict[str, Any]:
        return asdict(self)

    def lines(self) -> list[str]:
        """Returns the slice and the run in lines for the user."""
        if self.slice is None:
            lines = [f"slice {self.slice_name}: does not exist"]
        else:
            detail = f" ({self.slice.detail})" if self.slice.detail else ""
            hosts = f"{len(self.slice.hosts)} hosts"
            lines = [f"slice {self.slice_name}: {self.slice.state}, {self.slice.accelerator_type}, {hosts}{detail}"]
        if self.run is None:
            return [*lines, "no run was started from this folder yet"]
        lines.append(f"run {self.run}: attempt {self.attempt}, {self.outcome or 'running'}")
        if self.progress is not None:
            lines.append(f"  {describe_progress(self.progress)}")
        return [*lines, *(f"  {line}" for line in self.history)]

    def rows(self) -> list[list[str]]:
        """Returns a row for each host: worker, address, container, age of the last line, the line."""
        return [
            [
                str(host.worker),
                host.address,
                host.container,
                "" if host.quiet_seconds is None else f"{costs.duration(host.quiet_seconds)} ago",
                host.last_line,
            ]
            for host in self.hosts
        ]


def read_status(config: Config, context: Context, provider: Provider, run_id: str | None = None) -> Status:
    """Asks the API, and each host once if the run (the newest without `run_id`) has an open attempt and the slice is
    READY. Returns the slice, that run's state and history, and a status for each host asked. Raises LaunchError if the
    API fails, BadInput for an unknown `run_id`."""
    slice_state = provider.describe()
    try:
        ledger = find_run(context.home, context.machine, run_id, slice_name=config.slice.name, provider=config.provider)
    except BadInput:
        if run_id is not None:
            raise
        return Status(config.slice.name, slice_state, None, None, None, [], [])
    number, outcome = ledger.state.attempt, ledger.state.outcome
    observations: list[Observation] = []
    addresses: Sequence[str] = ()
    if slice_state is not None and slice_state.ready and ledger.state.phase.is_open:
        addresses = slice_state.hosts
        observations = _observe_hosts(provider, ledger, number, len(addresses), context.machine)
    hosts = [
        _host_status(observation, addresses[observation.worker], ledger, number, context.machine.clock)
        for observation in observations
    ]
    return Status(
        config.slice.name,
        slice_state,
        ledger.run_id,
        max(number, 0),
        outcome,
        recent_history(ledger),
        hosts,
        next((host.progress for host in hosts if host.progress), ledger.newest_progress(number)),
    )


def print_logs(config: Config, context: Context, run_id: str | None, *, follow: bool, host: int | None) -> None:
    """Emits every line of the newest attempt once: first what the run's folder has, then further lines of hosts.

    While another process supervises the run, that process fetches the lines, and this one reads its files. Without a
    supervisor, this process fetches them into the run's folder, and stops following after minutes without an answer.

    Args:
        config: Finds the newest run of its slice, unless `run_id` names a run.
        follow: Go on until the attempt, or without a supervisor its containers, have ended.
        host: Worker index; None for all hosts.

    Raises:
        BadInput: The run was never started, or the slice has no such host.
    """
    ledger = find_run(context.home, context.machine, run_id, slice_name=config.slice.name, provider=config.provider)
    number = ledger.state.attempt
    if number < 0:
        raise BadInput(f"run {ledger.run_id} was never started: there are no lines")
    session = open_session(context, ledger, SecretSource({}, {}))
    workers = session.choose_workers(host)
    files = {worker: ledger.log_file(number, worker) for worker in workers}
    offsets = dict.fromkeys(workers, 0)
    fetcher = _Fetcher(ledger, session.provider, number, files, context.output)
    answered = context.machine.clock.monotonic()
    try:
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
                context.output.say(
                    f"run {ledger.run_id}: its containers have ended, and no tpu-launch watches the run: "
                    "`tpu-launch run --attach` says how it ended and goes on as the file says"
                )
                return
            now = context.machine.clock.monotonic()
            answered = answered if fetcher.silent else now
            if now - answered > _SILENCE_SECONDS:
                context.output.say(
                    f"run {ledger.run_id}: no host that may go on writing has answered for "
                    f"{_SILENCE_SECONDS / 60:.0f} minutes, and nothing watches the run: `tpu-launch status` looks at "
                    "the slice, `tpu-launch run` goes on with the run"
                )
                return
            context.machine.clock.sleep(_FOLLOW_EVERY)
    finally:
        session.provider.close()


def recent_history(ledger: Ledger) -> list[str]:
    """Returns the last eight events of the kinds that `status` shows, one line each."""
    return [describe_event(entry) for entry in ledger.entries() if isinstance(entry.event, _SHOWN)][-_HISTORY_LINES:]


def describe_event(entry: Entry) -> str:
    """Returns one event of a run's ledger as a line for the user."""
    event = entry.event
    name, host = event.kind, getattr(event, "host", None)
    if host is not None:
        name = name.replace("host", f"host {host}", 1) if name.startswith("host") else f"{name} on host {host}"
    details = _describe_details(event)
    cause = event.cause if isinstance(event, events.Ended) else None
    where = f"host {cause.worker}: {cause.what}" if cause is not None and cause.worker >= 0 else None
    return f"{entry.time} attempt {event.attempt}: " + ": ".join(part for part in (name, details, where) if part)


def _describe_details(event: events.RunEvent) -> str:
    """Returns the first of an event's outcome, problem, reason, path and holder, or its figures; "" without any."""
    if isinstance(event, events.Recovered):
        seconds = event.seconds
        parts = ", ".join(f"{part} {value:.1f} s" for part, value in seconds.items())
        return f"in {sum(seconds.values()):.1f} s: {parts}"
    if isinstance(event, events.StragglerFound):
        return f"{event.factor:.1f} times the others' time in {event.part} since step {event.step:,}"
    return next(
        (
            str(text)
            for name in ("outcome", "problem", "reason", "path", "holder")
            if (text := getattr(event, name, ""))
        ),
        "",
    )


def _observe_hosts(
    provider: Provider, ledger: Ledger, number: int, hosts: int, machine: Workstation
) -> list[Observation]:
    """Observes an attempt's container on all hosts at once, with their lines of the last minute."""
    container = container_name(ledger.run_id, number)
    since = format_time(machine.clock.time() - _RECENT_SECONDS)

    def observe(worker: int) -> Observation:
        observation = provider.observe(worker, container, since, progress=True)
        if observation.more:  # it ends before the newest line
            with contextlib.suppress(LaunchError):
                newest = provider.look(worker, container, lines=1).lines
                return replace(observation, lines=newest or observation.lines)
        return observation

    return machine.threads.map(observe, range(hosts), at_once=64)


def _host_status(observation: Observation, address: str, ledger: Ledger, number: int, clock: Clock) -> HostStatus:
    """Returns a host's status: its container, progress, and newest line with its age, observed or from its kept log."""
    kept = ledger.log_file(number, observation.worker)
    lines = observation.lines or (tail(kept, _LAST_LINE_BYTES) if kept.exists() else ())
    progress = slowest(observation.progress)
    if not lines:
        return HostStatus(observation.worker, address, _describe_container(observation), "", progress=progress)
    last = lines[-1]
    written = parse_time(last.timestamp)
    quiet = None if written is None else max(0.0, round(clock.time() - written, 1))
    text = last.text.rstrip("\r").rpartition("\r")[2][:_SHOWN_CHARACTERS]  # a progress bar's newest state
    return HostStatus(observation.worker, address, _describe_container(observation), text, quiet, progress)


def describe_progress(line: ProgressLine) -> str:
    """Returns step, phase, loss and rate of a line, as far as it tells them."""
    parts = [f"step {line.step:,}/{line.steps:,}" if line.steps else f"step {line.step:,}", line.phase]
    parts.append("" if line.loss is None else f"loss {line.loss:.5f}")
    parts.append(f"{line.examples_per_second:,.1f} examples/s" if line.examples_per_second else "")
    return ", ".join(filter(None, parts))


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

    def __init__(
        self, ledger: Ledger, provider: Provider, number: int, files: Mapping[int, Path], output: Output
    ) -> None:
        self._ledger, self._provider, self._files, self._output = ledger, provider, files, output
        self._number = number
        self._problems = dict.fromkeys(files, "")
        self._next_page: dict[int, str] = {}
        """Time from which on the last observation of a host had no room for lines."""
        self.containers_ended = False
        """Whether the last fetch found no running container on any host."""
        self.silent = False
        """Whether no host that may go on writing answered the last fetch."""
        self._conflicts = 0  # fetches in a row that found the run's lock held

    @property
    def more(self) -> bool:
        """Whether hosts have lines that did not fit into the last fetch."""
        return bool(self._next_page)

    def fetch(self) -> None:
        """Appends each host's new lines to its file, and updates `more`, `containers_ended` and `silent`. While another
        process holds the run's lock, fetches nothing; after a minute of that, takes it for a supervisor: not
        `silent`."""
        pages, self._next_page, self.containers_ended = self._next_page, {}, False
        try:
            with self._ledger.supervising(patience=0.0):
                running = [worker for worker in self._files if self._fetch_from(worker, pages.get(worker))]
                self.containers_ended = not running
                self.silent, self._conflicts = all(self._problems[worker] for worker in running), 0
        except LaunchError as error:
            if error.exit_code is not Exit.CONFLICT:
                raise
            self._conflicts += 1
            if self._conflicts > _SUPERVISOR_CONFLICTS:  # another `logs` would let go of the lock
                self.silent = False

    def _fetch_from(self, worker: int, page: str | None) -> bool:
        """Appends a page of a host's new lines, from the time `page` on (None: the log's end), and says if the host
        does not answer. Returns whether its container may go on writing."""
        log = HostLog(self._files[worker])
        container = container_name(self._ledger.run_id, self._number)
        try:
            since = page or log.cursor.since
            observation = replace(self._provider.observe(worker, container, since), since=since)
        except LaunchError as error:
            observation = Observation(worker, None, problem=str(error).splitlines()[0])
        if observation.problem not in ("", self._problems[worker]):
            self._output.say(f"host {worker} does not answer: {observation.problem}")
        self._problems[worker] = observation.problem
        log.append_new(observation.lines, open=observation.open)
        if page := next_page(observation):
            self._next_page[worker] = page
        state = observation.container
        return state is None or not (state.ended or state.status in ("absent", "created"))


def _describe_container(observation: Observation) -> str:
    """Returns the state of a host's container in words, or why the host could not be asked."""
    if observation.container is None:
        return f"not reachable: {observation.problem}"
    return describe_exit(observation.container) if observation.container.ended else observation.container.status
