"""The launcher's `Workstation`, simulated: threads of the scheduler; a laptop's clock, processes and connections."""

import functools
import os
from collections.abc import Callable, Sequence
from random import Random
from typing import NoReturn

from launcher.errors import CommandTimeout
from launcher.shell import Result
from launcher.workstation import Address, ConnectionFailed, Owner, Workstation, hash_account
from tests.simulation.launcher import scripts
from tests.simulation.launcher.cluster import Kubectl
from tests.simulation.launcher.gcloud import Gcloud
from tests.simulation.launcher.hosts import EPOCH, Host, begin
from tests.simulation.launcher.world import BROKEN_SECONDS, Actor, Laptop, World
from tests.simulation.scheduler import Process, Scheduler, SimulatedThreads
from training.machine import Clock

_OnStart = Callable[[Callable[[], None]], object]  # is given what kills the process
_CONNECT_SECONDS = 5.0  # as the launcher's transport has it
_UPTIME = 777_000.0  # seconds of a laptop when a simulated run begins
_LONGEST_COMMAND = 3700.0  # seconds: a creation's, of slice.create_minutes


class LaptopClock(Clock):
    """The clock of a laptop: it stands still while the laptop sleeps, and its date then jumps."""

    def __init__(self, scheduler: Scheduler, laptop: Laptop) -> None:
        self._scheduler, self._laptop = scheduler, laptop

    def monotonic(self) -> float:
        return _UPTIME + self._scheduler.now - self._laptop.asleep

    def time(self) -> float:
        return self._scheduler.now + EPOCH + self._laptop.wall

    def sleep(self, seconds: float) -> None:
        self._scheduler.sleep(max(seconds, 1e-6))  # less would not move a clock of 64 bits


class Link:
    """An open ssh connection from a laptop to a host; see `launcher.workstation.HostConnection`."""

    def __init__(self, world: World, host: Host, actor: Actor) -> None:
        self.world, self.host, self.actor = world, host, actor
        self.boots, self.closed = host.boots, False
        self.forgotten = False  # by a firewall, which keeps a silent connection for minutes
        world.links.append(self)

    @property
    def is_open(self) -> bool:
        """Returns whether the laptop takes it for open."""
        return not self.closed

    def close(self) -> None:
        self.closed = True

    def run(self, command: str, *, timeout: float, stdin: str | None) -> tuple[int, str, str]:
        """Runs a command. Raises TimeoutError and ConnectionFailed."""
        world, host, scheduler = self.world, self.host, self.world.scheduler
        deadline = scheduler.now + timeout
        scheduler.sleep(world.rng.uniform(0.01, 0.06))
        self._require_packets(deadline)
        if world.ssh_fault() is not None:
            raise self._break("Connection reset by peer")
        script = scripts.unquote(command)
        name, parameters, arguments = scripts.parse(script)
        self.actor.scripts[host, "progress" if parameters.get("progress") else name].append(scheduler.now)
        if name == "observe":
            code, output = scripts.observe(world, host, parameters, arguments)
        else:
            code, output = self._run_in_task(script, stdin, deadline)
        self._require_packets(deadline)
        if world.api_fault("ssh loses answers") is not None:
            raise self._break("the connection closed before the command ended")
        world.answered(self.actor, host)
        if name == "observe" and not output.startswith("no engine"):
            self.actor.heard[host] = scheduler.now
        return code, output, ""

    def follow(self, command: str, *, timeout: float, on_line: Callable[[str], None]) -> int:
        """Runs a command, which ends with the connection, and passes on its lines. Raises as `run`."""
        code, output, _ = self.run(command, timeout=timeout, stdin=None)
        for line in output.splitlines():
            on_line(line)
        return code

    def _require_packets(self, deadline: float) -> None:
        """Waits while no packet gets through. Raises ConnectionFailed or TimeoutError when that takes too long."""
        host, scheduler = self.host, self.world.scheduler
        if self.closed or host.boots != self.boots:
            raise self._break("the connection is closed")
        if self.forgotten:
            raise self._break("Connection reset by peer")
        if host.reachable and not self.actor.laptop.offline:
            return
        left = deadline - scheduler.now
        wait = BROKEN_SECONDS if not host.hung else left  # a hanging host's kernel still acknowledges
        scheduler.sleep(max(0.0, min(left, wait)))
        if not (host.reachable and not self.actor.laptop.offline and host.boots == self.boots):
            if left <= wait:
                self._break("")
                raise TimeoutError
            raise self._break("Connection timed out")

    def _run_in_task(self, script: str, stdin: str | None, deadline: float) -> tuple[int, str]:
        host, scheduler = self.host, self.world.scheduler
        execution = host.begin(functools.partial(scripts.Shell(self.world, host, self.actor).run, script, stdin))
        try:
            while execution.result is None:
                if scheduler.now >= deadline:
                    raise TimeoutError
                scheduler.wait(execution.waiters, deadline - scheduler.now, f"a script on {host!r}")
                self._require_packets(deadline)
        finally:
            host.executions.pop(execution, None)
        code, output = execution.result
        return code, output

    def _break(self, why: str) -> ConnectionFailed:
        self.closed = True
        if self.host.reachable:
            self.world.refused(self.actor, self.host)
        return ConnectionFailed(why)


class Terminal:
    """`run` and `connect` of a command's workstation."""

    def __init__(self, world: World, actor: Actor) -> None:
        self.world, self.actor = world, actor

    def connect(self, address: Address) -> Link:
        """Opens a connection. Raises ConnectionFailed."""
        world, scheduler = self.world, self.world.scheduler
        scheduler.sleep(world.rng.uniform(0.05, 0.3))
        host = world.addresses.get(address.host)
        if host is None or not host.reachable or self.actor.laptop.offline:
            if host is not None and host.reachable:
                world.refused(self.actor, host)
            scheduler.sleep(_CONNECT_SECONDS)
            raise ConnectionFailed(f"can't be reached: no answer within {_CONNECT_SECONDS:.0f} s")
        if world.ssh_fault() is not None:
            world.refused(self.actor, host)
            raise ConnectionFailed("can't be reached: [Errno 111] Connection refused")
        if host.alias != address.alias:
            raise ConnectionFailed("the host key has changed: another host answers there")
        if not host.key_known or self.actor.is_refused or host.worker >= self.actor.laptop.refused_from:
            raise ConnectionFailed("Authentication failed.", refused=True)
        same = [each for each in world.links if (each.actor, each.host, each.boots) == (self.actor, host, host.boots)]
        if any(each.is_open and not each.forgotten for each in same):
            world.break_promise("a command has one connection to a host", f"{self.actor.name}: {host!r}")
        return Link(world, host, self.actor)

    def run(
        self, argv: Sequence[str], *, timeout: float, input: str | bytes | None = None, pass_fds: Sequence[int] = ()
    ) -> Result:
        """Runs gcloud or kubectl in a process of its own, after whose end Google still carries out its request."""
        world, scheduler = self.world, self.world.scheduler
        self._check_timeout(argv, timeout)
        if world.scheduler.trace is not None:
            shown = [word for word in argv if not word.startswith(("--command", "--ssh-flag", "--metadata", "--quiet"))]
            world.note("$ " + " ".join(shown)[:200])
        self.actor.calls[tuple(argv)].append(scheduler.now)
        inherited = [os.dup(descriptor) for descriptor in pass_fds]
        child = Process(f"{argv[0]} of {self.actor.name}")

        def work() -> tuple[int, str, str]:
            try:
                if world.cluster is not None:
                    return Kubectl(world.cluster, self.actor, argv).run(str(input))
                return Gcloud(world, self.actor, argv, input and str(input)).run()
            finally:
                for descriptor in inherited:
                    os.close(descriptor)

        execution = begin(scheduler, work, "gcloud", child)
        deadline = scheduler.now + timeout
        try:
            while execution.result is None and scheduler.now < deadline:
                scheduler.wait(execution.waiters, deadline - scheduler.now, "gcloud")
        except KeyboardInterrupt:
            scheduler.kill(child)
            raise
        if execution.result is None:
            scheduler.kill(child)
            raise CommandTimeout(f"no answer within {timeout:.0f} s from: {' '.join(argv)[:100]}\n  try again")
        return Result(tuple(argv), *execution.result)

    def _check_timeout(self, argv: Sequence[str], seconds: float) -> None:
        """A command ends in time, and later than kubectl ends itself."""
        own = [float(word.partition("=")[2].rstrip("s")) for word in argv if word.startswith("--request-timeout=")]
        if not max([0.0, *own]) < seconds <= _LONGEST_COMMAND:
            self.world.break_promise("a command has its time", f"{seconds:.0f} s of {' '.join(argv)[:200]}")

    def stream(
        self, argv: Sequence[str], on_line: Callable[[str], None], *, timeout: float, on_start: _OnStart | None = None
    ) -> Result:
        """Runs kubectl, which ends with its command or when it is killed, or `tpu-launch supervise` of one run."""
        if self.world.cluster is None:
            command = self.world.command(argv[-2], self.actor.laptop)
            command.url = argv[-1]
            if on_start is not None:
                on_start(command.interrupt)
            self.world.finish(command)
            for text in command.said:
                on_line(text)
            return Result(tuple(argv), -9 if command.code is None else command.code, "", "")
        self._check_timeout(argv, timeout)
        killed: list[bool] = []
        if on_start is not None:
            on_start(lambda: killed.append(True))
        code, output = Kubectl(self.world.cluster, self.actor, argv).stream(on_line, timeout, lambda: bool(killed))
        return Result(tuple(argv), code, output, "")


def make_machine(world: World, actor: Actor, rng: Random, end: Callable[[int], NoReturn] = os._exit) -> Workstation:
    """Returns the workstation of one command; `end` ends its process."""
    terminal = Terminal(world, actor)
    return Workstation(
        clock=LaptopClock(world.scheduler, actor.laptop),
        threads=SimulatedThreads(world.scheduler),
        random=rng,
        exit=end,
        run=terminal.run,
        stream=terminal.stream,
        connect=terminal.connect,
        find_owner=lambda: Owner(actor.user, hash_account(actor.user)),
    )
