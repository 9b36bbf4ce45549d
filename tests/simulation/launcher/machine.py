"""The launcher's `Workstation`, simulated: threads of the scheduler, and a laptop's clock."""

from __future__ import annotations

import random

from launcher.owner import Owner, hash_account
from launcher.workstation import Workstation
from tests.simulation.launcher.hosts import EPOCH
from tests.simulation.launcher.world import Actor, Laptop, Terminal, World
from tests.simulation.scheduler import Scheduler, SimulatedThreads


class LaptopClock:
    """The clock of a laptop: it stands still while the laptop sleeps, and its date then jumps."""

    def __init__(self, scheduler: Scheduler, laptop: Laptop) -> None:
        self._scheduler, self._laptop = scheduler, laptop

    def monotonic(self) -> float:
        return self._scheduler.now - self._laptop.asleep

    def time(self) -> float:
        return self._scheduler.now + EPOCH + self._laptop.wall

    def sleep(self, seconds: float) -> None:
        self._scheduler.sleep(max(seconds, 1e-6))  # less would not move a clock of 64 bits


def make_machine(world: World, actor: Actor, rng: random.Random) -> Workstation:
    """Returns the workstation of one command."""
    terminal = Terminal(world, actor)
    return Workstation(
        clock=LaptopClock(world.scheduler, actor.laptop),
        threads=SimulatedThreads(world.scheduler),
        random=rng,
        run=terminal.run,
        stream=terminal.stream,
        connect=terminal.connect,
        find_owner=lambda: Owner(actor.user, hash_account(actor.user)),
    )
