"""Looking at a run without changing it: `status` and `logs`."""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from launcher import costs
from launcher.clock import parse_time
from launcher.config import Config
from launcher.errors import BadInput, LaunchError
from launcher.provider import LogLine, Observation, Provider, SliceState
from launcher.run import ledger as ledgers
from launcher.run.launch import make_attempt
from launcher.run.ledger import Ledger
from launcher.run.logs import HostLog, read_from, tail
from launcher.run.verdict import describe_exit

_FOLLOW_EVERY = 1.0  # seconds
_LAST_LINE_BYTES = 20_000  # of a host's log, for its last line


@dataclass(frozen=True)
class HostStatus:
    worker: int
    address: str
    container: str
    last_line: str
    quiet_seconds: float | None = None  # since its last line, by the clocks of the host and of this machine


@dataclass(frozen=True)
class Progress:
    """What the trainer's newest progress line says."""

    step: int
    steps: int
    loss: float
    examples_per_second: float


_PROGRESS = re.compile(r"step +(\d+)/(\d+)  loss (\S+)  ([\d,.]+) examples/s")  # training.telemetry.text.progress


@dataclass(frozen=True)
class Status:
    """What `status` shows: the slice, the newest run of it, its hosts."""

    slice_name: str
    slice: SliceState | None
    run: str | None
    attempt: int | None
    outcome: str | None
    story: list[str]
    hosts: list[HostStatus]
    progress: Progress | None = None

    def as_json(self) -> dict[str, Any]:
        return asdict(self)

    def lines(self) -> list[str]:
        if self.slice is None:
            lines = [f"slice {self.slice_name}: does not exist"]
        else:
            detail = f" ({self.slice.detail})" if self.slice.detail else ""
            lines = [
                f"slice {self.slice_name}: {self.slice.state}, {self.slice.accelerator_type}, {len(self.slice.hosts)} hosts{detail}"
            ]
        if self.run is None:
            return [*lines, "no run was started from this folder yet"]
        lines.append(f"run {self.run}: attempt {self.attempt}, {self.outcome or 'running'}")
        if self.progress is not None:
            now = self.progress
            lines.append(
                f"  step {now.step}/{now.steps}, loss {now.loss:.5f}, {now.examples_per_second:,.1f} examples/s"
            )
        return [*lines, *(f"  {line}" for line in self.story)]

    def rows(self) -> list[list[str]]:
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


def status(config: Config, provider: Provider, home: Path) -> Status:
    """Asks the API and, while an attempt is open, every host once."""
    found = provider.describe()
    try:
        ledger = ledgers.find(home, None, slice_name=config.slice.name, provider=config.provider)
    except BadInput:
        return Status(config.slice.name, found, None, None, None, [], [])
    number = ledger.attempts - 1
    looks: list[Observation] = []
    if found is not None and found.ready and number >= 0 and ledger.outcome is None:
        container = make_attempt(config, ledger.folder.name, number, "").container
        newest = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(time.time() - 60))
        with ThreadPoolExecutor(max_workers=64) as pool:
            looks = list(pool.map(lambda worker: provider.observe(worker, container, newest), range(len(found.hosts))))
    hosts = [
        HostStatus(
            look.worker,
            found.hosts[look.worker] if found else "",
            _container(look),
            last.text if (last := _newest(ledger, number, look)) else "",
            _age(last),
        )
        for look in looks
    ]
    progress = _progress(ledger, number, looks)
    return Status(
        config.slice.name, found, ledger.folder.name, max(number, 0), ledger.outcome, _story(ledger), hosts, progress
    )


def logs(
    config: Config,
    provider: Provider,
    home: Path,
    run_id: str | None,
    *,
    follow: bool,
    host: int | None,
    emit: Callable[[int, LogLine], None],
    say: Callable[[str], None],
) -> None:
    """Prints every line of the newest attempt once: what is kept first, then what the hosts have that was not fetched
    yet.

    While another process supervises the run, it fetches the lines and this one reads its files.
    """
    ledger = ledgers.find(home, run_id, slice_name=config.slice.name, provider=config.provider)
    number = ledger.attempts - 1
    if number < 0:
        raise BadInput(f"run {ledger.folder.name} was never started: there are no lines")
    workers = range(config.accelerator.hosts) if host is None else [host]
    if host is not None and host not in range(config.accelerator.hosts):
        raise BadInput(
            f"--host {host}: a {config.slice.accelerator_type} has hosts 0 to {config.accelerator.hosts - 1}"
        )
    container = make_attempt(config, ledger.folder.name, number, "").container
    read = dict.fromkeys(workers, 0)
    while True:
        ended = ledger.outcome is not None
        if not ended:
            _fetch(ledger, provider, container, number, list(workers), say)
        for worker in workers:
            lines, read[worker] = read_from(ledger.log_file(number, worker), read[worker])
            for line in lines:
                emit(worker, line)
        if ended or not follow:
            return
        time.sleep(_FOLLOW_EVERY)


def _fetch(
    ledger: Ledger, provider: Provider, container: str, number: int, workers: list[int], say: Callable[[str], None]
) -> None:
    """Brings the hosts' new lines into the run's files, unless a supervisor does."""
    try:
        with ledger.supervising(patience=0.0):
            for worker in workers:
                log = HostLog(ledger.log_file(number, worker))
                look = provider.observe(worker, container, log.cursor.since)
                if look.problem:
                    say(f"host {worker} does not answer: {look.problem}")
                log.take(look.lines)
    except LaunchError:
        return  # supervised by another process: its files are read


def _container(look: Observation) -> str:
    if look.container is None:
        return f"not reachable: {look.problem}"
    return describe_exit(look.container) if look.container.ended else look.container.status


def _newest(ledger: Ledger, number: int, look: Observation) -> LogLine | None:
    """A host's newest line, of the last minute or from what is kept."""
    lines = list(look.lines) or _kept(ledger, number, look.worker)
    return lines[-1] if lines else None


def _kept(ledger: Ledger, number: int, worker: int) -> list[LogLine]:
    path = ledger.log_file(number, worker)
    return tail(path, _LAST_LINE_BYTES) if path.exists() else []


def _age(line: LogLine | None) -> float | None:
    """Seconds since a line was written."""
    written = parse_time(line.timestamp) if line is not None else None
    return None if written is None else max(0.0, round(time.time() - written, 1))


def _progress(ledger: Ledger, number: int, looks: Sequence[Observation]) -> Progress | None:
    """The newest progress line of host 0, which writes for all; None when the command is not our trainer, or has not
    begun."""
    if number < 0:
        return None
    lines = [line for look in looks if look.worker == 0 for line in look.lines]
    for line in reversed([*_kept(ledger, number, 0), *lines]):
        if match := _PROGRESS.search(line.text):
            return Progress(int(match[1]), int(match[2]), float(match[3]), float(match[4].replace(",", "")))
    return None


def _story(ledger: Ledger) -> list[str]:
    """The last things that happened, one line each: enough for a lost host, what was done about it, and where the run
    is now."""
    shown = {"started", "ended", "stop", "recover", "recovered", "host out of reach", "host back"}
    return [told(event) for event in ledger.events() if event["event"] in shown][-8:]


def told(event: Mapping[str, Any]) -> str:
    """One event of a run's ledger as a line for a person."""
    name = str(event["event"])
    if "host" in event:
        name = (
            name.replace("host", f"host {event['host']}", 1)
            if name.startswith("host")
            else f"{name} on host {event['host']}"
        )
    details = event.get("outcome") or event.get("problem") or event.get("reason") or event.get("path")
    if name == "recovered":
        details = f"in {sum(event['seconds'].values()):.1f} s: " + ", ".join(
            f"{part} {value:.1f} s" for part, value in event["seconds"].items()
        )
    cause = event.get("cause") or {}
    where = f"host {cause['worker']}: {cause.get('what', '')}" if cause.get("worker", -1) >= 0 else None
    return f"{event['time']} attempt {event.get('attempt', '?')}: " + ": ".join(
        each for each in (name, details, where) if each
    )
