"""Simulated hosts: each runs a process of `tpu-train train` on a simulated machine. A group of hosts is an attempt.

A host runs the trainer's own code, from `rendezvous.join` to `ending_process`; only the machine, storage and
computation below it are simulated.
"""

from __future__ import annotations

import io
import signal
import sys
from functools import partial
from typing import NoReturn

from tests.simulation.scheduler import Killed, Process, Scheduler, SimulatedClock, SimulatedThreads, Task
from tests.simulation.trainer.bucket import HostStorage
from tests.simulation.trainer.connections import HostNetwork
from tests.simulation.trainer.model import Gathering, SimulatedBackend, SimulatedTask
from tests.simulation.trainer.plan import KILLED
from training.cli.train import ending_process, exit_overdue, print_error
from training.distributed.cluster import Cluster
from training.distributed.rendezvous import join
from training.distributed.shutdown import ShutdownRequest
from training.errors import TrainError
from training.machine import Machine
from training.run_setup import Dependencies
from training.telemetry.host_progress import PhaseTimer
from training.trainer import train

STOP_MARGIN = 20.0  # seconds in which host 0 waits for others to leave, and hosts at the start for each other


class Group:
    def __init__(self, world, label: str, attempt: int, slice_number: int, hosts: int) -> None:
        self.world, self.label, self.attempt, self.slice_number = world, label, attempt, slice_number
        self.size = hosts
        self.gatherings: list[Gathering] = []  # collectives, in order
        self.collective: dict[Task, None] = {}  # tasks that wait in one
        self.addresses = tuple(f"10.{slice_number}.0.{worker}" for worker in range(self.size))
        self.glitch: tuple[int, bool] | None = None  # a step whose update is not finite, and whether its norm shows it
        self.has_glitched = False
        self.is_blocked = False  # its collectives never return
        self.asked_to_stop = self.drifted = False
        self.delayed = world.jitter > 0.5  # storage is too slow for the time of a stop
        self.claimed = float("inf")  # when all hosts had met
        self.newest_at_claim = 0  # step of the newest whole checkpoint then
        self.began = world.scheduler.now
        self.hosts = [Host(self, worker) for worker in range(self.size)]
        for host in self.hosts:
            host.hurt = host.cut or any(host.address in pair for pair in world.wire.parted)
        # With slow requests, host 0's work before a barrier may take longer than the other hosts wait.
        self.disturbed = any(host.hurt for host in self.hosts) or world.jitter > 1

    @property
    def is_parted(self) -> bool:
        return any(pair <= set(self.addresses) for pair in self.world.wire.parted)

    @property
    def is_over(self) -> bool:
        return all(host.code is not None for host in self.hosts)

    @property
    def codes(self) -> list[int | None]:
        return [host.code for host in self.hosts]


class Host:
    def __init__(self, group: Group, worker: int) -> None:
        world = group.world
        self.group, self.worker, self.world = group, worker, world
        self.name = f"{group.label}.{worker}"
        self.address = group.addresses[worker]
        self.scheduler: Scheduler = world.scheduler
        self.process = Process(self.name)
        self.code: int | None = None
        self.ended = 0.0
        self.cut_until = 0.0  # seconds; its network
        self.lines: list[str] = []  # printed so far
        self.frozen = self.hanging = self.drifts = False
        self.hurt = False  # it was frozen, or without network, at some time
        self.stops: list[float] = []  # times of requests to stop
        self.joined = float("inf")  # when it was admitted to the rendezvous
        self.interrupted = False  # by Ctrl-C
        self.shutdown: ShutdownRequest | None = None
        self.backend: SimulatedBackend | None = None
        skew = world.random.choice((0.0, 0.0, -3600.0, 86400.0))
        self.clock = SimulatedClock(self.scheduler, started=-1000 * world.random.random(), wall=1.8e9 + skew)
        self.machine = Machine(
            clock=self.clock,
            threads=SimulatedThreads(self.scheduler),
            network=HostNetwork(world.wire, self.address, self.process),
            random=world.random,
            exit=self.exit,
        )

    @property
    def cut(self) -> bool:
        return self.world.wire.link(self.address).cut

    def start(self, delay: float) -> None:
        """Starts the process after `delay` seconds."""
        self.scheduler.spawn(self._main, delay, name="main", process=self.process)

    def _main(self, delay: float) -> None:
        self.scheduler.sleep(delay)
        self.scheduler.note("starts")
        world, group = self.world, self.group
        config, machine = world.config, self.machine
        self.shutdown = shutdown = ShutdownRequest(machine)
        timer = PhaseTimer(now=machine.clock.monotonic)
        secret = f"the secret of {group.label}".encode()
        cluster = Cluster(self.worker, group.addresses, run_id="run", attempt=group.attempt, secret=secret)
        try:
            rendezvous = join(cluster, shutdown, config.rendezvous, machine)
        except TrainError as error:  # as cli.main does
            print_error(error)
            self.exit(error.exit_code)
        self.joined = self.scheduler.now
        stop_seconds = config.checkpoint.stop_seconds
        shutdown.limit(stop_seconds, lambda: exit_overdue(rendezvous, stop_seconds, machine))
        dependencies = Dependencies(
            machine=machine,
            storage=HostStorage(world.bucket, self.name),
            open_task=lambda *_: SimulatedTask(self),
            open_backend=self._open_backend,
            trackers=("jsonl",),
            push=partial(world.hub.push, self),
            profiles=lambda _: None,
        )
        with ending_process(rendezvous, machine):
            train(config, cluster, rendezvous, shutdown, timer, dependencies)

    def _open_backend(self, *_: object) -> SimulatedBackend:
        self.backend = SimulatedBackend(self)
        return self.backend

    def exit(self, code: int) -> NoReturn:
        """Ends the process from inside, with an exit code."""
        self.scheduler.check_alive()
        self._end(int(code))
        raise Killed

    def kill(self) -> None:
        """Ends the process from outside."""
        if self.code is None:
            self._end(KILLED)

    def _end(self, code: int) -> None:
        self.code, self.ended = code, self.scheduler.now
        self.scheduler.note(f"{self.name} exits with {code}")
        self.world.wire.kill(self.process)
        self.scheduler.thaw(self.process)
        self.world.promises.process_ended(self)
        self.world.changed()
        self.scheduler.kill(self.process)

    def sigterm(self) -> None:
        """Sends SIGTERM, as the engine or the launcher does."""
        self.stops.append(self.scheduler.now)
        if self._signal("SIGTERM"):
            limit = self.scheduler.now + self.world.plan.stop_seconds + STOP_MARGIN
            self.scheduler.call_at(limit, partial(self.world.promises.a_stop_takes_no_longer_than_it_may, self))

    def interrupt(self) -> None:
        """Sends SIGINT, as a user's Ctrl-C does."""
        self.interrupted = True
        self._signal("Ctrl-C", signal.SIGINT)

    def _signal(self, name: str, *number: int) -> bool:
        """Asks the process to stop, or ends it before it has a handler. Returns whether it was asked."""
        self.group.asked_to_stop = True
        if self.code is None and self.shutdown is None:
            self._end(143)
        elif self.code is None:
            self.scheduler.note(f"{name} for {self.name}")
            self.scheduler.spawn(self.shutdown.request, *number, name="signals", process=self.process)
            return True
        return False

    def freeze(self) -> None:
        """Freezes the machine: neither its process nor its network answers."""
        if not self.frozen and self.code is None:
            self.frozen = self.hurt = True
            self.scheduler.note(f"{self.name} freezes")
            self.world.wire.cut(self.address)
            self.scheduler.freeze(self.process)

    def hang(self) -> None:
        """Freezes the process alone; its kernel still answers."""
        if not self.frozen and not self.hanging and self.code is None:
            self.hanging = self.hurt = True
            self.scheduler.note(f"{self.name} hangs")
            self.scheduler.freeze(self.process)

    def thaw(self) -> None:
        """Ends a freeze or a hang."""
        if self.hanging or self.frozen:
            self.scheduler.note(f"{self.name} {'wakes up' if self.frozen else 'runs on'}")
            if self.frozen:
                self.world.wire.restore(self.address)
            self.scheduler.thaw(self.process)
        self.hanging = self.frozen = False

    def pass_time(self, purpose: str, seconds: float) -> None:
        """Waits about so many seconds."""
        self.scheduler.sleep(seconds * (0.5 + self.world.random.random()))


class Output(io.TextIOBase):
    """Standard output and error of all processes: each line belongs to the host that prints it."""

    def __init__(self, world) -> None:
        self._world = world

    def write(self, text: str) -> int:
        task = self._world.scheduler.current
        host = self._world.host_of(task.process) if task else None
        if host is None:
            return sys.__stdout__.write(text)
        lines = [line for line in text.splitlines() if line]
        host.lines += lines
        self._world.promises.damage_is_told(text)
        for line in lines:
            self._world.scheduler.note(f"| {line[:300]}")
        return len(text)
