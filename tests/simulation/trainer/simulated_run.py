"""One simulated run of the trainer."""

from __future__ import annotations

import contextlib
import os
import traceback
from dataclasses import dataclass

from tests.simulation.scheduler import Stuck
from tests.simulation.trainer.fault_scenarios import add_scenario
from tests.simulation.trainer.features import add_features
from tests.simulation.trainer.hosts import Output
from tests.simulation.trainer.plan import draw
from tests.simulation.trainer.world import World

os.environ.setdefault("PJRT_DEVICE", "CPU")  # or the trainer looks for chips


@dataclass(frozen=True)
class Result:
    broken: list[tuple[str, str]]  # promises, and what was seen
    trace: list[str]


def simulate(seed: int, *, trace: bool = False, without: frozenset[int] = frozenset()) -> Result:
    """Simulates one run: only the seed and the faults left out decide what happens in it."""
    world = World(add_features(add_scenario(draw(seed))).leave_out(without), trace=trace)
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
    return Result(world.promises.violations, world.scheduler.trace or [])
