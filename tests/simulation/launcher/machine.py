"""The launcher's `Machine`, simulated: tasks of the scheduler, and a workstation's clock."""

from __future__ import annotations

import queue
import random
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from typing import Any

from launcher.machine import Machine
from launcher.machine.owner import Owner
from tests.simulation import scheduler as simulated
from tests.simulation.launcher.hosts import EPOCH
from tests.simulation.launcher.world import Actor, Terminal, Workstation, World
from tests.simulation.scheduler import Killed, Scheduler


class Tasks:
    """See `launcher.machine.tasks.Tasks`."""

    def __init__(self, scheduler: Scheduler) -> None:
        self._scheduler = scheduler

    def lock(self) -> AbstractContextManager[Any]:
        return simulated.Lock(self._scheduler)

    def semaphore(self, count: int) -> AbstractContextManager[Any]:
        return simulated.Semaphore(self._scheduler, count)

    def event(self) -> simulated.Event:
        return simulated.Event(self._scheduler)

    def queue(self, size: int) -> Queue:
        return Queue(self._scheduler, size)

    def start(self, function: Callable[..., None], *arguments: Any) -> None:
        self._scheduler.spawn(function, *arguments, name=getattr(function, "__name__", "task"))
        self._scheduler.maybe_pause()

    def submit(self, function: Callable[[], Any]) -> simulated.Future:
        future = simulated.Future(self._scheduler, function, (), {})
        self._scheduler.spawn(future.run, name="submitted")
        return future

    def map(self, function: Callable[[Any], Any], items: Iterable[Any], at_once: int) -> list[Any]:
        waiting = list(items)
        results: list[Any] = [None] * len(waiting)
        failures: dict[int, BaseException] = {}
        numbers = iter(range(len(waiting)))

        def work() -> None:
            for number in numbers:
                try:
                    results[number] = function(waiting[number])
                except Killed:
                    raise
                except BaseException as error:
                    failures[number] = error

        workers = [self._scheduler.spawn(work, name=f"worker {number}") for number in range(min(at_once, len(waiting)))]
        for worker in workers:
            worker.join()
        if failures:
            raise failures[min(failures)]
        return results


class Queue(simulated.Queue):
    """See `launcher.machine.tasks.Queue`."""

    def get(self, timeout: float) -> Any | None:  # type: ignore[override]
        try:
            return super().get(block=timeout > 0, timeout=timeout)
        except queue.Empty:
            return None


class WorkstationClock:
    """The clock of a workstation, which stands still while it sleeps, and whose date then jumps."""

    def __init__(self, scheduler: Scheduler, workstation: Workstation) -> None:
        self._scheduler, self._place = scheduler, workstation

    def monotonic(self) -> float:
        return self._scheduler.now - self._place.asleep

    def time(self) -> float:
        return self._scheduler.now + EPOCH + self._place.wall

    def sleep(self, seconds: float) -> None:
        self._scheduler.sleep(max(seconds, 1e-6))  # less would not move a clock of 64 bits


def make_machine(world: World, actor: Actor, chance: random.Random) -> Machine:
    """The machine of one command."""
    terminal = Terminal(world, actor)
    scheduler = world.scheduler
    clock, owner = WorkstationClock(scheduler, actor.workstation), Owner(actor.person)
    return Machine(clock, Tasks(scheduler), terminal.run, terminal.connect, chance, owner)
