"""Looking at a run without changing it: `status` and `logs`."""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

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

    def as_json(self) -> dict[str, Any]:
        return asdict(self)

    def lines(self) -> list[str]:
        if self.slice is None:
            lines = [f"slice {self.slice_name}: does not exist"]
        else:
            detail = f" ({self.slice.detail})" if self.slice.detail else ""
            lines = [f"slice {self.slice_name}: {self.slice.state}, {self.slice.accelerator_type}, {len(self.slice.hosts)} hosts{detail}"]
        if self.run is None:
            return [*lines, "no run was started from this folder yet"]
        return [*lines, f"run {self.run}: attempt {self.attempt}, {self.outcome or 'running'}", *(f"  {line}" for line in self.story)]

    def rows(self) -> list[list[str]]:
        return [[str(host.worker), host.address, host.container, host.last_line] for host in self.hosts]


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
            look.lines[-1].text if look.lines else _last_line(ledger, number, look.worker),
        )
        for look in looks
    ]
    return Status(config.slice.name, found, ledger.folder.name, max(number, 0), ledger.outcome, _story(ledger), hosts)


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
    """Prints every line of the newest attempt once: what is kept first, then what the hosts have that was not fetched yet.

    While another process supervises the run, it fetches the lines and this one reads its files.
    """
    ledger = ledgers.find(home, run_id, slice_name=config.slice.name, provider=config.provider)
    number = ledger.attempts - 1
    if number < 0:
        raise BadInput(f"run {ledger.folder.name} was never started: there are no lines")
    workers = range(config.accelerator.hosts) if host is None else [host]
    if host is not None and host not in range(config.accelerator.hosts):
        raise BadInput(f"--host {host}: a {config.slice.accelerator_type} has hosts 0 to {config.accelerator.hosts - 1}")
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


def _fetch(ledger: Ledger, provider: Provider, container: str, number: int, workers: list[int], say: Callable[[str], None]) -> None:
    """Brings the hosts' new lines into the run's files, unless a supervisor does."""
    try:
        with ledger.supervising():
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


def _last_line(ledger: Ledger, number: int, worker: int) -> str:
    path = ledger.log_file(number, worker)
    lines = tail(path, _LAST_LINE_BYTES) if path.exists() else []
    return lines[-1].text if lines else ""


def _story(ledger: Ledger) -> list[str]:
    """The last things that happened, one line each."""
    told = {"attempt", "started", "ended", "stop", "recover", "host out of reach", "host back"}
    lines = []
    for event in [event for event in ledger.events() if event["event"] in told][-6:]:
        details = event.get("outcome") or event.get("problem") or event.get("reason") or ""
        cause = event.get("cause") or {}
        where = (
            f" host {event['host']}"
            if "host" in event
            else f" host {cause['worker']}: {cause.get('what', '')}"
            if cause.get("worker", -1) >= 0
            else ""
        )
        lines.append(f"{event['time']} attempt {event.get('attempt', '?')}: {event['event']} {details}{where}".rstrip())
    return lines
