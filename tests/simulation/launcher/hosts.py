"""Simulated hosts: their engine, containers, boots and clocks. `scripts` has the scripts that run on them."""

from __future__ import annotations

import bisect
import functools
import math
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

from launcher.provider import Overlay
from tests.simulation.scheduler import Process, Scheduler, Task

if TYPE_CHECKING:
    from tests.simulation.launcher.jobs import Job

EPOCH = 1_800_000_000.0  # Unix seconds at virtual time 0
_NEVER = "0001-01-01T00:00:00Z"  # an engine's text for an absent time


def timestamp(seconds: float) -> str:
    """Formats Unix seconds as an engine does: RFC 3339 with nine digits."""
    whole = int(seconds)
    return f"{_format_second(whole)}.{int((seconds - whole) * 1e9):09d}Z"


@functools.lru_cache(maxsize=10_000)
def _format_second(whole: int) -> str:
    return datetime.fromtimestamp(whole, UTC).strftime("%Y-%m-%dT%H:%M:%S")


@dataclass(eq=False)
class Container:
    name: str
    run: str
    attempt: int
    host: Host
    boot: str  # of the host, when it was created
    image: str
    status: str = "created"
    exit_code: int = 0
    oom_killed: bool = False
    error: str = ""
    started: float | None = None  # virtual seconds
    started_at: str = _NEVER
    finished_at: str = _NEVER
    ended: float = math.inf  # virtual time of its end
    job: Job | None = None
    log: list[tuple[str, str]] = field(default_factory=list)  # (time, line) in the order of their ends
    records: list[tuple[str, str]] = field(default_factory=list)  # (time, line with its end, or a part of one)
    latest: list[str] = field(default_factory=list)  # for each record, the latest time until then
    partial: tuple[str, str] | None = None  # (time, first part) of a line that has not ended
    waiters: dict[Task, None] = field(default_factory=dict)  # tasks that wait for its end
    stopping: bool = False  # it has got SIGTERM
    invented: bool = False  # its exit code, by the engine of a host that was rebooted
    cuts_lines: bool = True  # its engine stores long lines in parts, among other lines
    awaits_secrets: bool = False  # its command begins when they are delivered
    overlay: Overlay | None = None  # that was copied into it
    secrets_seconds: float = 0.0  # for which await_secrets.sh waits for them
    lines_written: int = 0
    stacks: dict[object, list[tuple[str, str]]] = field(default_factory=dict)
    """The stacks that each command has got: the kind of place, and the text."""
    wrote: float | None = None  # virtual time of its newest line

    @property
    def running(self) -> bool:
        return self.status == "running"

    def write(self, text: str, at: float | None = None) -> None:
        """Writes a line at a virtual time, now unless given."""
        moment = self.host.scheduler.now if at is None else at
        self.wrote = moment
        time = timestamp(moment + self.host.wall)
        self.log.append((time, text))
        self._store(time, f"{text}\n")

    def begin_line(self, text: str, at: float) -> None:
        """Writes the first part of a line at a virtual time."""
        self.wrote = at
        self.partial = timestamp(at + self.host.wall), text
        self._store(*self.partial)

    def end_line(self, rest: str | None) -> None:
        """Writes the rest of the line that was begun, if any; None: the container ends without a line end."""
        if self.partial is None:
            return
        (time, text), self.partial = self.partial, None
        self.log.append((time, text + (rest or "")))
        if rest is not None:
            self._store(time, f"{rest}\n")

    def _store(self, time: str, text: str) -> None:
        self.records.append((time, text))
        self.latest.append(max(time, self.latest[-1] if self.latest else ""))

    def lines(self, since: str, tail: int | None) -> list[tuple[str, str]]:
        """Does `docker logs --since --tail`: of the last `tail` lines those from `since` on."""
        if self.job is not None:
            self.job.write_lines(self)
        first = max(0, len(self.records) - tail) if tail is not None else 0
        first = max(first, bisect.bisect_left(self.latest, since))
        return [record for record in self.records[first:] if record[0] >= since]

    def progress(self) -> str:
        """Returns the output of READ_PROGRESS."""
        return self.job.progress(self) if self.job is not None and self.running else ""

    def end(self, code: int, *, oom_killed: bool = False) -> None:
        """Ends its command."""
        if not self.running:
            return
        if self.job is not None:
            self.job.write_lines(self)
        self.end_line(None)
        self.status, self.exit_code, self.oom_killed = "exited", code, oom_killed
        self.ended = self.host.scheduler.now
        self.finished_at = timestamp(self.ended + self.host.wall)
        self.host.scheduler.wake_all(self.waiters)


@dataclass(eq=False)
class Execution:
    """Work in a task of its own; other tasks may wait for its result."""

    result: Any = None  # once it has ended: exit code and output, and errors of gcloud and kubectl
    waiters: dict[Task, None] = field(default_factory=dict)


def begin(scheduler: Scheduler, work: Callable[[], Any], name: str, process: Process) -> Execution:
    """Begins work in a task of a process, which ends with it."""
    execution = Execution()

    def do() -> None:
        execution.result = work()
        scheduler.wake_all(execution.waiters)

    scheduler.spawn(do, name=name, process=process)
    return execution


class Host:
    def __init__(self, scheduler: Scheduler, slice_name: str, worker: int, address: str) -> None:
        self.scheduler, self.slice_name, self.worker, self.address = scheduler, slice_name, worker, address
        self.process = Process(f"{slice_name}-w{worker}")
        self.containers: dict[str, Container] = {}
        self.marks: set[str] = set()  # files below /tmp and /var/tmp
        self.executed: list[object] = []  # who asked for each command of a user that ran on it
        self.images: set[str] = set()  # that its engine has
        self.starting = False  # start.sh's lock
        self.boots = 1
        self.booted = scheduler.now
        self.wall = EPOCH  # its clock: virtual time plus this
        self.clock_jumped = False
        self.up = True
        self.engine_up = True
        self.hung = False  # answers nothing, and is not dead
        self.cut = False  # no packet reaches it
        self.filtered = False  # ssh does not reach it, other hosts do
        self.disk_full = False
        self.key_known = False  # whether our ssh key has reached it
        self.gone = False  # its slice was taken away, or deleted
        self.executions: dict[Execution, None] = {}  # commands that run on it
        self.ssh_from = scheduler.now  # when its sshd answers
        self.alias = f"tpu.{slice_name}.{address}-{worker}"
        self.troubled: list[float] = []  # when it ceased to answer
        self.trouble_over = scheduler.now  # when it last began to answer

    def __repr__(self) -> str:
        return f"{self.slice_name}-w{self.worker}"

    @property
    def boot(self) -> str:
        return f"{self!r}-boot-{self.boots}"

    @property
    def connected(self) -> bool:
        """Returns whether it answers other hosts."""
        return self.up and not self.cut and not self.hung

    @property
    def reachable(self) -> bool:
        """Returns whether it answers ssh."""
        return self.connected and not self.filtered and self.scheduler.now >= self.ssh_from

    def note(self, text: str) -> None:
        if self.scheduler.trace is not None:
            self.scheduler.note(f"[host {self!r}] {text}")

    def quiet_since(self, since: float) -> bool:
        """Returns whether it has been reachable since a moment."""
        return self.reachable and self.engine_up and self.trouble_over < since

    def begin(self, work: Callable[[], tuple[int, str]]) -> Execution:
        """Runs a script, which ends with the host."""
        execution = begin(self.scheduler, work, "a script", self.process)
        self.executions[execution] = None
        return execution

    def changed(self) -> None:
        """Wakes every task that waits for this host: it may have to fail."""
        for execution in self.executions:
            self.scheduler.wake_all(execution.waiters)
        for container in self.containers.values():
            self.scheduler.wake_all(container.waiters)

    def cease(self, what: str) -> None:
        """Records that it answers nothing; its peers notice."""
        self.troubled.append(self.scheduler.now)
        self.note(f"is {what}")
        self.changed()
        for container in list(self.containers.values()):
            if container.job is not None and container.status in ("running", "lost"):
                container.job.host_troubled(self, what)

    def cut_off(self) -> None:
        """Drops all packets to it; its programs go on."""
        self.cut = True
        self.cease("cut off")

    def hang(self) -> None:
        """Makes it answer nothing until `recover` or a reboot."""
        self.hung = True
        self.cease("hanging")

    def recover(self) -> None:
        """Makes it answer again; its state is unchanged."""
        self.cut, self.filtered, self.hung, self.trouble_over = False, False, False, self.scheduler.now
        self.note("answers again")

    def die(self, *, for_good: bool) -> None:
        """Takes its power: everything on it ends at once, unrecorded."""
        if not self.up:
            self.gone = self.gone or for_good
            return
        self.up, self.gone = False, self.gone or for_good
        self.scheduler.kill(self.process)
        self.process = Process(f"{self.slice_name}-w{self.worker}")
        for container in [item for item in self.containers.values() if item.running]:
            if container.job is not None:
                container.job.write_lines(container)
            container.end_line(None)
            container.status = "lost"
        self.cease("dead")

    def boot_up(self, exit_code: int, *, writes_time: bool) -> None:
        """Boots it; the engine restores its containers with an invented exit code."""
        if self.gone or self.up:
            return
        self.up, self.hung, self.engine_up, self.boots = True, False, True, self.boots + 1
        self.booted = self.trouble_over = self.scheduler.now
        self.marks = {mark for mark in self.marks if mark.endswith(".over")}  # those below /var/tmp
        self.starting = False
        self.executions.clear()
        self.ssh_from = self.scheduler.now + 2.0
        self.note(f"booted; its engine says that containers ended with {exit_code}")
        for container in self.containers.values():
            if container.status == "lost":
                container.status, container.exit_code, container.invented = "exited", exit_code, True
                container.ended = self.scheduler.now
                container.finished_at = timestamp(self.scheduler.now + self.wall) if writes_time else _NEVER
