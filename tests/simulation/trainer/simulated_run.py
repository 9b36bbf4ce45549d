"""One simulated run of the trainer."""

import contextlib
import itertools
import os
import traceback
from collections.abc import Iterator
from dataclasses import dataclass, replace
from unittest import mock

from tests.simulation.scheduler import Stuck
from tests.simulation.trainer.bucket import DELETE, WRITE
from tests.simulation.trainer.features import add_features
from tests.simulation.trainer.hosts import Output
from tests.simulation.trainer.plan import Fault, Plan, add_scenario, draw
from tests.simulation.trainer.world import World
from training import progress

MOST_SKIPPED = 4  # steps in a row; the trainer's 50 are more than a run here has

os.environ.setdefault("PJRT_DEVICE", "CPU")  # or the trainer looks for chips


@dataclass(frozen=True)
class Result:
    broken: list[tuple[str, str]]  # promises, and what was seen
    trace: list[str]


def simulate(seed: int, *, trace: bool = False, without: frozenset[int] = frozenset()) -> Result:
    """Simulates one run: only the seed and the faults left out decide what happens in it."""
    return simulate_plan(add_features(add_scenario(draw(seed))).leave_out(without), trace=trace)


def kill_at_every_write(plan: Plan) -> Iterator[Plan]:
    """Yields the plan with one fault, for each write and deletion: a kill of its host or of all, before or after it."""
    quiet = replace(plan, faults=())
    trace = simulate_plan(quiet, trace=True).trace
    for operation in (WRITE, DELETE):
        for number in range(sum(f" {operation} gs://" in line for line in trace)):
            for kind, moment in itertools.product(("kill", "power"), ("before", "after")):
                yield quiet.also(Fault(kind, request=(operation, "", number + 1), moment=moment))


def simulate_plan(plan: Plan, *, trace: bool = False) -> Result:
    world = World(plan, trace=trace)
    output = Output(world)
    skips = mock.patch.object(progress, "MOST_SKIPPED", MOST_SKIPPED)
    with contextlib.redirect_stdout(output), contextlib.redirect_stderr(output), skips:  # type: ignore[type-var]
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
