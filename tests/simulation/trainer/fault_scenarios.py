"""Fault scenarios: several starts of one run meet at the worst moment, or a host freezes there.

Random faults alone would need very many simulated runs to hit such a moment. So a share of the runs is a scenario, most
of them without other faults. A scenario also sets what it needs of the plan: hosts, short steps, frequent saves.
"""

import random
from collections.abc import Callable
from dataclasses import replace

from tests.simulation.trainer.plan import REQUESTER, Fault, Plan

SHARE = 0.3  # of all simulated runs
OTHER_FAULTS = 0.25  # share of scenarios with other faults, too

Request = tuple[str, str]
MANIFEST: Request = ("write", "manifest.json")
CLAIM: Request = ("write", "attempt-")
_HANGS: tuple[Request, ...] = (
    ("read", "attempt-"), ("list", "checkpoints"), ("read", "manifest.json"), ("read", "part-"), ("write", "part-"),
    MANIFEST,
)  # fmt: skip


def add_scenario(plan: Plan) -> Plan:
    """Returns the plan, or, for a share of the seeds, a fault scenario made from it."""
    rng = random.Random(f"scene {plan.seed}")
    if rng.random() >= SHARE:
        return plan
    faults = plan.faults if rng.random() < OTHER_FAULTS else ()
    plan = replace(
        plan,
        faults=faults,
        every_steps=rng.choice((1, 2, 2, 3)),
        step_seconds=rng.choice((0.5, 0.5, 1.0)),
        compile_seconds=0.5,
        stop_seconds=25.0,
        jitter=rng.choice((0.2, 0.2, 1.0, 3.0)),
    )
    return rng.choice(_SCENARIOS)(rng, plan)


def _with(plan: Plan, *faults: Fault) -> Plan:
    return replace(plan, faults=(*plan.faults, *faults))


def _fault(kind: str, request: Request, number: int, moment: str = "before", seconds: float = 0.0) -> Fault:
    return Fault(kind, 0.0, (*request, number), moment, REQUESTER, seconds, 1.0)


def _late_commit(rng: random.Random, plan: Plan) -> Plan:
    """After the fence's check host 0's write takes effect late, or it freezes; meanwhile the run starts again."""
    number = rng.randint(1, 3)
    kind = rng.choice(("late", "late", "late", "freeze", "hang"))
    return _with(
        plan,
        _fault(kind, MANIFEST, number, rng.choice(("before", "before", "before", "after")), rng.uniform(3.0, 30.0)),
        _fault("second start", MANIFEST, number),
    )


def _several_starts(rng: random.Random, plan: Plan) -> Plan:
    """Two starts at the same moment, so that neither sees the claim of the other; perhaps a third that sees one."""
    plan = _with(plan, _fault("late", CLAIM, 1, "before", rng.uniform(4.0, 25.0)), _fault("second start", CLAIM, 1))
    if rng.random() < 0.6:
        plan = _with(replace(plan, jitter=0.2, steps=14), _fault("second start", CLAIM, 2, "after"))
    return plan


def _late_listing(rng: random.Random, plan: Plan) -> Plan:
    """The hosts of a start list the checkpoints at different times while an older start commits one."""
    number = rng.randint(1, 3)
    plan = _with(
        replace(plan, hosts=rng.randint(2, 3)),
        _fault("late", MANIFEST, number, "before", rng.uniform(3.0, 10.0)),
        _fault("second start", MANIFEST, number),
    )
    # Each commit of the older start lists checkpoints, too, and each of its hosts did at its beginning.
    listing = plan.hosts + number - 1 + rng.randint(1, plan.hosts)
    return _with(plan, _fault("late", ("list", "checkpoints"), listing, "before", rng.uniform(2.0, 9.0)))


def _late_commit_of_a_passed_step(rng: random.Random, plan: Plan) -> Plan:
    """A start that was asked to stop commits, late, a step that the newer start has passed and never saves."""
    number = rng.randint(1, 2)
    stop = Fault("sigterm all", rng.uniform(3.0, 9.0), None, "before", 0, 0.0, 1.0)
    return _with(
        replace(plan, every_steps=rng.randint(3, 5), steps=14, step_seconds=0.5, jitter=0.2),
        stop,
        _fault("late", MANIFEST, number, "before", rng.uniform(8.0, 20.0)),
        _fault("second start", MANIFEST, number),
    )


def _hang(rng: random.Random, plan: Plan) -> Plan:
    """A process hangs while its kernel still answers."""
    plan = replace(plan, hosts=rng.randint(2, 4), jitter=0.2)
    return _with(plan, _fault("hang", rng.choice(_HANGS), rng.randint(1, 5), "before", rng.uniform(60.0, 200.0)))


def _rot(rng: random.Random, plan: Plan) -> Plan:
    """The newest checkpoint is damaged, and the run starts again."""
    number = rng.randint(2, 5)
    plan = replace(plan, keep_last=rng.choice((2, 3)), jitter=0.2)
    return _with(plan, _fault("rot", MANIFEST, number, "after"), _fault("power", MANIFEST, number, "after"))


def _wrong_read(rng: random.Random, plan: Plan) -> Plan:
    """All hosts end, and later one of them reads a wrong byte of the checkpoint, once."""
    number = rng.randint(1, 3)
    request = rng.choice((("read", "manifest.json"), ("read", "part-")))
    wrong = Fault("wrong read", 0.0, (*request, rng.randint(1, 4)), "before", REQUESTER, 0.0, 1.0)
    return _with(replace(plan, faults=(), jitter=0.2), _fault("power", MANIFEST, number, "after"), wrong)


def _early_stop(rng: random.Random, plan: Plan) -> Plan:
    """A host is asked to stop while others wait for one that starts late."""
    late, asked = rng.uniform(16.0, 40.0), rng.uniform(9.0, 14.0)
    faults = (("late host", 0.4, late), ("power", 0.5, 0.0), ("sigterm", asked, 0.0))
    timed = tuple(Fault(kind, at, None, "before", 1, seconds, 1.0) for kind, at, seconds in faults)
    return replace(plan, hosts=4, later_hosts=(4,), faults=timed, jitter=0.2)


def _late_stop(rng: random.Random, plan: Plan) -> Plan:
    """A host is asked to stop in a step that takes longer than a stop may."""
    stop = Fault("sigterm", rng.uniform(4.0, 60.0), None, "before", rng.randrange(4), 0.0, 1.0)
    return replace(plan, hosts=rng.randint(2, 4), faults=(stop,), step_seconds=120.0, jitter=0.2)


def _late_record(rng: random.Random, plan: Plan) -> Plan:
    """A step is not finite, and writing its record is slow."""
    return _with(
        replace(plan, hosts=rng.randint(2, 4), jitter=0.2),
        Fault("nan", rng.uniform(0.5, 3.0), None, "before", 0, 0.0, 1.0),
        _fault("late", ("write", ".nonfinite.json"), 1, "before", rng.uniform(1.0, 9.0)),
    )


_SCENARIOS: tuple[Callable[[random.Random, Plan], Plan], ...] = (
    _late_commit, _late_commit, _several_starts, _several_starts, _late_listing, _late_commit_of_a_passed_step,
    _hang, _rot, _late_record, _wrong_read, _early_stop, _late_stop,
)  # fmt: skip
