"""The program in the containers of an attempt: it trains on all hosts together, and ends in several ways.

A job is a state machine of timers, not tasks, because thousands of runs are simulated a minute. It knows why it ended;
the promises compare that with the launcher's verdict.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from random import Random

from launcher.container_output import PART_BYTES
from launcher.run.progress import DEFAULT_SECONDS
from tests.simulation.launcher import hangs
from tests.simulation.launcher.hangs import Hang, Slow
from tests.simulation.launcher.hosts import Container, Host
from tests.simulation.scheduler import Scheduler
from training.telemetry.progress_line import encode

SUPERVISORS = ("run", "attach", "supervise")  # commands that supervise a run
SECRET = "hf_sImUlAtEd0123456789"  # that every run has, and every program prints
REST = " and the rest"  # of a line that was cut
PEERS_WAIT = 40.0  # seconds that a program waits for the other hosts at its start
PEERS_WAIT_OF_PODS = 600.0  # which begin by themselves; the trainer's default


@dataclass(frozen=True)
class Plan:
    """The behaviour of an undisturbed program."""

    kind: str  # finish, fail, bad input, save, stall
    seconds: float
    host: int = 0  # the host that fails
    code: int = 0
    others_hang: bool = False  # whether hosts that lose a peer wait for it for minutes
    saves: bool = True  # whether SIGTERM makes it save and end with 75; else it ends with 143
    save_seconds: float = 2.0
    period: float = 1.0  # seconds between two lines of a host
    apart: float = 0.0  # seconds from the end of the other hosts to that of host 0, which exports
    tells: bool = False  # whether it reports its progress
    hang: Hang | None = None  # how a program of kind "stall" that reports its progress hangs
    slow: Slow | None = None  # which host of one that reports its progress is slower than the others
    second: int | None = None  # another host that fails within a fraction of a second, with exit code 3


@dataclass(frozen=True)
class Cause:
    kind: str  # of a plan; or stop, kill, host, deleted, no peers, no secrets
    worker: int = -1
    detail: str = ""


class Job:
    def __init__(self, scheduler: Scheduler, run: str, attempt: int, hosts: int, plan: Plan, rng: Random) -> None:
        if plan.hang is not None:  # a candidate may have fewer hosts than the file's slice
            plan = replace(plan, hang=replace(plan.hang, host=plan.hang.host % hosts))
        if plan.slow is not None:
            plan = replace(plan, slow=replace(plan.slow, host=plan.slow.host % hosts))
        self.scheduler, self.run, self.attempt, self.hosts, self.plan = scheduler, run, attempt, hosts, plan
        self.rng = rng
        self.containers: dict[int, Container] = {}
        self.began: float | None = None  # when all hosts had started
        self.on_end: Callable[[], None] = lambda: None  # called when it ends by itself
        self.on_hang: Callable[[], None] = lambda: None
        self.causes: list[Cause] = []  # all that happened to it, in order
        self.secrets = ""  # as its hosts got them
        self.watched = False  # whether one supervisor watched it to its end, and nothing was out of order
        self.seen_finished = False  # whether the launcher has reported its end
        self.confirmed = False  # whether the launcher has reported its start
        self.told_lost = False  # whether the launcher has ended it because of a host that was lost then
        self.disturbed = False  # by something other than its plan
        self.over = False
        self.stall_seconds: float | None = None  # of silence after which the file calls it stalled
        self.starts: set[int] = set()  # workers whose containers were started
        self.left: set[int] = set()  # workers whose containers were removed
        self.first_death: float | None = None  # when the first of its hosts died
        self.last_step = math.inf  # when it lost a host, without which none makes progress

    def __repr__(self) -> str:
        return f"{self.run}#{self.attempt}"

    @property
    def healthy(self) -> bool:
        """Returns whether it runs on all hosts and nothing has happened to it."""
        return not self.disturbed and not self.causes and all(item.running for item in self.containers.values())

    def started(self, container: Container) -> None:
        """Adds a container that was started; the program begins with the last one."""
        container.job = self
        self.containers[container.host.worker] = container
        if not container.host.engine_up:  # it failed while the start was under way
            self.disturbed = True
        wait = PEERS_WAIT if container.cuts_lines else PEERS_WAIT_OF_PODS
        self.scheduler.call_at(self.scheduler.now + wait, self._check_peers)
        if self.began is None and self._all_run():
            self.began = self.scheduler.now
            if self.plan.kind != "stall":
                self.scheduler.call_at(self.began + self.plan.seconds, self._end_as_planned)
            elif self.hung is not None:
                self.scheduler.call_at(self.hung, self.on_hang)
                self.scheduler.call_at(self.hung + hangs.HEARTBEAT_SECONDS, self._end_peers_of_silent_host)

    def write_lines(self, container: Container) -> None:
        """Writes the lines that the program of a container has printed so far."""
        if container.started is None or not container.running or container.awaits_secrets:
            return
        until = self.scheduler.now
        if self.plan.kind == "stall" and self.began is not None:
            until = min(until, self.began + self.plan.seconds)
        period, worker = self.plan.period, container.host.worker
        count = int((until - container.started) / period)
        for number in range(container.lines_written, count):
            at = container.started + (number + 1) * period
            text = f"line {number // 2 * 2} of host {worker}" if number % 7 == 1 else f"line {number} of host {worker}"
            if number % 9 == 2:
                text += f" with token {SECRET}"
            if number % 40 == 4 and container.cuts_lines:
                container.begin_line(text.ljust(PART_BYTES, "."), at)
            else:
                container.write(text, at)
            if number % 40 == 7:
                container.end_line(REST)
            if number % 5 == 0:
                container.write(text, at)  # the same line at the same time, twice
        container.lines_written = max(container.lines_written, count)

    def progress(self, container: Container) -> str:
        """Returns the line of progress of a container; "" of a program that tells none."""
        plan, begun = self.plan, self.began if self.began is not None else self.scheduler.now
        if not plan.tells or container.started is None or container.awaits_secrets:
            return ""
        since = max(0.0, min(self.scheduler.now, self.last_step) - begun)
        told = hangs.line(self.timeline, since, plan.hang, container.host.worker, plan.slow)
        return f"progress {encode(told)}\n"

    def stacks(self, container: Container, by: object, *, native: bool) -> str:
        """Returns what DUMP_STACKS prints in a container for a command, which it remembers."""
        now, worker = self.scheduler.now, container.host.worker
        step, phase, hang = int(now / 20.0), "training", self.plan.hang
        if self.plan.tells and self.began is not None:
            told = hangs.line(self.timeline, now - self.began, None, worker)
            step, phase = told.step, told.phase
        if hang is not None and self.hung is not None and now >= self.hung:
            kind = hang.show(worker)
        elif self.plan.kind == "stall" and hang is None:
            kind = "collective"
        else:
            kind = Random(f"{self} {worker} {step} {phase}").choice(hangs.HEALTHY[phase])
        shown = container.stacks.setdefault(by, [])
        shown.append((kind, hangs.stacks(kind, len(shown) + 1, native=native)))
        return shown[-1][1]

    @property
    def timeline(self) -> hangs.Timeline:
        """The moments of the program's progress; the last one lasts for ever."""
        plan = self.plan
        last = plan.hang.phase if plan.hang else "end"
        return hangs.timeline(plan.save_seconds, plan.seconds, self.stall_seconds or DEFAULT_SECONDS, last)

    @property
    def hung(self) -> float | None:
        """When it stopped making progress for good; None of one that does not hang, or has not begun."""
        return None if self.began is None or self.plan.hang is None else self.began + self.timeline[-1][0]

    def terminate(self, container: Container) -> None:
        """Sends SIGTERM: the program saves together with all others, or ends."""
        if container.stopping or not container.running:
            return
        container.stopping = True
        if container.awaits_secrets:
            container.end(143)
            return
        self.causes.append(Cause("stop", container.host.worker))
        if self.plan.saves and self._all_run() and self.began is not None:
            self.scheduler.call_at(self.scheduler.now + self.plan.save_seconds, self._all_saved)
        elif self.plan.saves:
            return  # it can't save without its peers: it waits for them, until SIGKILL
        else:
            self.scheduler.call_at(self.scheduler.now + 0.3, lambda: self._exit(container, 143))

    def kill(self, container: Container) -> None:
        """Sends SIGKILL."""
        if container.running:
            self.causes.append(Cause("kill", container.host.worker))
            container.end(137)
            self._lose_peer()

    def disturb(self, kind: str, worker: int, detail: str = "") -> None:
        """Records what happened to it on a host beside its plan."""
        self.disturbed = True
        self.causes.append(Cause(kind, worker, detail=detail))

    def host_troubled(self, host: Host, what: str) -> None:
        """Records that a host died, hangs or was cut off; its peers notice."""
        self.disturb("host", host.worker, what)
        self.last_step = min(self.last_step, self.scheduler.now)
        if what == "dead" and self.first_death is None:
            self.first_death = self.scheduler.now
        if self.hosts > 1 or what == "dead":
            self._lose_peer()

    def lose_connection(self, host: Host) -> None:
        """Breaks a connection between two hosts, both of which still answer the launcher."""
        if self.hosts > 1 and self.began is not None and not self.over:
            self.disturb("connection", host.worker)
            self._lose_peer()

    def _all_run(self) -> bool:
        containers = self.containers.values()
        return len(containers) == self.hosts and all(item.running and item.host.connected for item in containers)

    def _exit(self, container: Container, code: int) -> None:
        if not container.host.up:
            return
        if container.host.hung:  # it ends when the host answers again
            self._exit_later(container, code, 1.0)
            return
        container.end(code, oom_killed=code == 137 and self.plan.kind == "fail" and not container.stopping)

    def _end_as_planned(self) -> None:
        if self.over or not all(item.running and item.host.up for item in self.containers.values()):
            return
        if not self._all_run():  # a step waits for the slowest host
            self.scheduler.call_at(self.scheduler.now + 1.0, self._end_as_planned)
            return
        plan = self.plan
        self.over = True
        self.on_end()
        if plan.kind == "fail":
            first = plan.host % self.hosts  # a candidate may have fewer hosts than the file's slice
            self.causes.append(Cause("fail", first))
            self._exit(self.containers[first], plan.code)
            if plan.second is not None and plan.second % self.hosts != first:
                self._exit_later(self.containers[plan.second % self.hosts], 3, self.rng.uniform(0.01, 0.3))
            self._lose_peer()
            return
        code = {"finish": 0, "save": 75, "bad input": 2}[plan.kind]
        self.causes.append(Cause(plan.kind))
        for container in self.containers.values():
            export = plan.apart if container.host.worker == 0 else 0.0
            self._exit_later(container, code, export + self.rng.uniform(0.0, 0.8))

    def _end_peers_of_silent_host(self) -> None:
        """Ends the other programs if the host that hangs is silent for their framework."""
        if self.over or self.plan.hang is None or not self._all_run():
            return
        for worker, container in self.containers.items():
            self.write_lines(container)
            for text in (words := self.plan.hang.last_words(worker)):
                container.write(text, self.scheduler.now)
            if words:
                self._exit_later(container, 1, self.rng.uniform(0.1, 2.0))

    def _all_saved(self) -> None:
        if not self._all_run() or self.over:
            return
        self.over = True
        for container in self.containers.values():
            self._exit_later(container, 75, self.rng.uniform(0.0, 0.5))

    def _exit_later(self, container: Container, code: int, seconds: float) -> None:
        self.scheduler.call_at(self.scheduler.now + seconds, lambda: self._exit(container, code))

    def _lose_peer(self) -> None:
        """Ends the other programs when they notice that a peer is gone, which may take minutes."""
        self.over = self.over or self.began is not None
        if self.began is None:
            return
        for container in self.containers.values():
            if container.running:
                least, most = (100.0, 200.0) if self.plan.others_hang else (0.05, 6.0)
                self._exit_later(container, 76, self.rng.uniform(least, most))

    def _check_peers(self) -> None:
        """Ends a program whose peers did not start in time."""
        if self.began is None:
            for container in self.containers.values():
                if container.running:
                    self.causes.append(Cause("no peers", container.host.worker))
                    self._exit(container, 76)
