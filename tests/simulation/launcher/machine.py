"""The launcher's `Workstation`, simulated: threads of the scheduler, and a workstation's clock."""

from __future__ import annotations

import random

from launcher import workstation
from launcher.owner import Owner
from tests.simulation.launcher.hosts import EPOCH
from tests.simulation.launcher.world import Actor, Terminal, Workstation, World
from tests.simulation.scheduler import Scheduler, SimulatedThreads


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


def make_machine(world: World, actor: Actor, chance: random.Random) -> workstation.Workstation:
    """Returns the workstation of one command."""
    terminal = Terminal(world, actor)
    return workstation.Workstation(
        clock=WorkstationClock(world.scheduler, actor.workstation),
        threads=SimulatedThreads(world.scheduler),
        random=chance,
        run=terminal.run,
        connect=terminal.connect,
        owner=Owner(actor.person),
    )
