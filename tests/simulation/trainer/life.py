"""Plays one life of the trainer's protocol."""

from __future__ import annotations

import contextlib
import os
import time
import traceback
from dataclasses import dataclass

from tests.simulation.scheduler import Stuck
from tests.simulation.trainer.duels import stage
from tests.simulation.trainer.ends import add_ends
from tests.simulation.trainer.hosts import Output
from tests.simulation.trainer.plan import Plan, draw
from tests.simulation.trainer.world import World

os.environ.setdefault("PJRT_DEVICE", "CPU")  # or the trainer looks for chips


@dataclass(frozen=True)
class Life:
    """What became of a life."""

    seed: int
    plan: Plan
    broken: list[tuple[str, str]]  # promises, and what was seen
    story: list[str]
    seconds: float  # of this computer
    virtual_seconds: float
    attempts: int


def play(seed: int, *, story: bool = False, without: frozenset[int] = frozenset()) -> Life:
    """The life of a seed. Nothing but the seed, and the faults that are left out, decides what happens in it."""
    began = time.perf_counter()
    world = World(add_ends(stage(draw(seed))).leave_out(without), story=story)
    output = Output(world)
    with contextlib.redirect_stdout(output), contextlib.redirect_stderr(output):  # type: ignore[type-var]
        try:
            world.live()
        except Stuck as error:
            world.promises.broken("every wait ends", str(error))
        except BaseException:
            world.scheduler.close()
            raise
        world.scheduler.close()
    for task in world.scheduler.crashed:
        lines = "".join(traceback.format_exception(task.error))
        world.promises.broken("no thread dies of an exception", f"{task}: {lines[-1500:]}")
    return Life(
        seed, world.plan, world.promises.violations, world.scheduler.story or [],
        time.perf_counter() - began, world.scheduler.now, len(world.groups),
    )  # fmt: skip
