"""The plan of a simulated run, drawn from its seed before it begins: the run's configuration and its faults.

A fault strikes at a time, or at a request to storage ("the 2nd write of a manifest"), which is where a protocol is most
easily hurt. Faults can be left out one by one (`without`), and nothing else changes. A share of the runs is a scenario:
several starts of one run meet at the worst moment, or a host freezes there. Random faults alone would need very many
runs to hit such a moment.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, replace

RUN = "gs://bucket/runs/run"
KILLED = 128 + 9  # exit code of a killed process
HOSTILE_SECONDS = 240.0  # in which faults strike; afterwards there are none
REQUESTER = -1  # instead of a worker: the host that makes the request


@dataclass(frozen=True)
class Fault:
    """A fault. Its kind decides which fields are used."""

    kind: str
    at: float = 0.0  # seconds, for faults that strike at a time
    request: tuple[str, str, int] | None = None  # (operation, part of the name, number of the match) that triggers it
    moment: str = "before"  # or "after" the request takes effect
    worker: int = REQUESTER  # or one of the newest group
    seconds: float = 0.0  # duration
    rate: float = 1.0  # probability, for faults that strike repeatedly

    def __str__(self) -> str:
        when = " ".join(map(str, (self.moment, *self.request))) if self.request else f"{self.at:.1f} s"
        return f"{self.kind} (host {self.worker}, {self.seconds:.1f} s, rate {self.rate:.2f}) at {when}"


KINDS = (
    "kill",  # a process ends at once
    "freeze",  # a machine freezes for a while
    "cut",  # a host loses its network for a while
    "part",  # a host and the one before it do not reach each other for a while
    "sigterm",
    "sigterm twice",
    "sigterm all",
    "power",  # all hosts of a group end at once
    "second start",  # the same run is started again elsewhere
    "storm",  # storage fails before or after a write
    "slow",  # storage is very slow
    "full",  # storage has no room
    "forbidden",  # storage answers host 0, and perhaps another, with 403
    "quota",  # storage answers with 429, and then late or not at all
    "telemetry",  # storage refuses all but checkpoints
    "cut line",  # a file of metrics ends in the middle of a line
    "bad write",  # storage stores a wrong byte of a part
    "rot",  # a byte of the newest checkpoint changes
    "nan",  # an update makes the state not finite
    "poison",  # the step after the newest checkpoint is not finite, after each restore
    "clock",  # a wall clock jumps
    "late host",  # a host of the next attempt starts much later than the others
)
# Only in scenarios: "hang" (a process freezes, but its kernel answers), "late" (a request takes effect late,
# or its answer is late) and "wrong read" (one read returns a wrong byte). Only in features.py: "slow request" ("late"
# within the limit of storage), "drift" (a host's weights differ at the end), "sigterm all twice", "interrupt twice".
_REQUESTS = (
    ("write", "manifest.json"), ("write", "part-"), ("write", "attempt-"), ("list", "checkpoints"),
    ("list", "attempts"), ("delete", "manifest.json"), ("delete", "part-"), ("read", "manifest.json"),
    ("read", "part-"), ("write", "summary.json"),
)  # fmt: skip


@dataclass(frozen=True)
class Plan:
    seed: int
    hosts: int
    records: int
    batch: int
    steps: int
    every_steps: int | None
    keep_last: int
    keep_every: int | None
    evaluate_every: int | None
    best: bool
    background: bool
    in_flight: int
    step_seconds: float
    compile_seconds: float
    stop_seconds: float
    launcher_patience: float  # seconds that a launcher waits for unreachable hosts
    faults: tuple[Fault, ...]
    later_hosts: tuple[int, ...]  # of attempts 1, 2, 3, ...; they repeat
    jitter: float = 0.2  # seconds until storage carries out a request, at most
    # Set by features.py.
    skip: bool = False  # train.on_nonfinite: skip
    skipped: frozenset[int] = frozenset()  # steps that are never finite
    export: bool = False  # the model, at the end
    strangers: bool = False  # the run's folder has records of another program
    hub: str = ""  # uploads: at the "end", or also of each "checkpoint"
    hub_fault: str = ""  # the fault of the Hub, or of the uploading processes

    def also(self, *faults: Fault) -> Plan:
        """Returns the plan with more faults."""
        return replace(self, faults=(*self.faults, *faults))

    def leave_out(self, numbers: frozenset[int]) -> Plan:
        """Returns the plan without some faults."""
        return replace(self, faults=tuple(fault for number, fault in enumerate(self.faults) if number not in numbers))


def draw(seed: int) -> Plan:
    """Returns the plan of a seed, before a scenario and features.py change it."""
    rng = random.Random(f"trainer {seed}")
    hosts = rng.choice((1, 2, 2, 2, 3, 3, 4))
    steps = rng.randint(4, 14)
    every = rng.choice((None, 1, 2, 2, 3, 4))
    faults = tuple(_draw_fault(rng, hosts) for _ in range(rng.choice((0, 1, 1, 2, 2, 3, 4, 6))))
    return Plan(
        seed=seed,
        hosts=hosts,
        records=rng.choice((12, 20, 24)),
        batch=12,
        steps=steps,
        every_steps=every,
        keep_last=rng.choice((1, 2, 2, 3)),
        keep_every=rng.choice((None, None, 4)),
        evaluate_every=rng.choice((None, None, 3)),
        best=rng.random() < 0.2,
        background=rng.random() < 0.8,
        in_flight=rng.choice((0, 0, 2)),
        step_seconds=rng.choice((0.5, 1.0, 3.0)) if rng.random() < 0.99 else 170.0,
        compile_seconds=rng.choice((0.5, 5.0)),
        stop_seconds=rng.choice((15.0, 25.0)),
        launcher_patience=rng.choice((5.0, 40.0)),
        faults=faults,
        later_hosts=tuple(rng.choices((1, 2, 3, 4), k=4)) if rng.random() < 0.15 else (hosts,) * 4,
    )


def _draw_fault(rng: random.Random, hosts: int) -> Fault:
    kind = rng.choice(KINDS)
    at, worker = rng.random() * rng.choice((30.0, 90.0, HOSTILE_SECONDS)), rng.randrange(hosts)
    seconds, rate = rng.choice((2.0, 8.0, 30.0, 90.0)) * (0.5 + rng.random()), rng.choice((0.1, 0.3, 1.0))
    operation, name = rng.choice(_REQUESTS)
    moment, number, by_request = rng.choice(("before", "after")), rng.randint(1, 4), rng.random() < 0.5
    return Fault(kind, at, (operation, name, number) if by_request else None, moment, worker, seconds, rate)


_SCENARIO_SHARE = 0.3  # of all simulated runs
_OTHER_FAULTS = 0.25  # share of scenarios with other faults, too

_Request = tuple[str, str]
_MANIFEST: _Request = ("write", "manifest.json")
_CLAIM: _Request = ("write", "attempt-")
_HANGS: tuple[_Request, ...] = (
    ("read", "attempt-"), ("list", "checkpoints"), ("read", "manifest.json"), ("read", "part-"), ("write", "part-"),
    _MANIFEST,
)  # fmt: skip


def add_scenario(plan: Plan) -> Plan:
    """Returns the plan, or, for a share of the seeds, a fault scenario made from it."""
    rng = random.Random(f"scene {plan.seed}")
    if rng.random() >= _SCENARIO_SHARE:
        return plan
    faults = plan.faults if rng.random() < _OTHER_FAULTS else ()
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


def _fault(kind: str, request: _Request, number: int, moment: str = "before", seconds: float = 0.0) -> Fault:
    return Fault(kind, request=(*request, number), moment=moment, seconds=seconds)


def _late_commit(rng: random.Random, plan: Plan) -> Plan:
    """After the fence's check host 0's write takes effect late, or it freezes; meanwhile the run starts again."""
    number = rng.randint(1, 3)
    kind = rng.choice(("late", "late", "late", "freeze", "hang"))
    return plan.also(
        _fault(kind, _MANIFEST, number, rng.choice(("before", "before", "before", "after")), rng.uniform(3.0, 30.0)),
        _fault("second start", _MANIFEST, number),
    )


def _several_starts(rng: random.Random, plan: Plan) -> Plan:
    """Two starts at the same moment, so that neither sees the claim of the other; perhaps a third that sees one."""
    plan = plan.also(_fault("late", _CLAIM, 1, "before", rng.uniform(4.0, 25.0)), _fault("second start", _CLAIM, 1))
    if rng.random() < 0.6:
        plan = replace(plan, jitter=0.2, steps=14).also(_fault("second start", _CLAIM, 2, "after"))
    return plan


def _late_listing(rng: random.Random, plan: Plan) -> Plan:
    """The hosts of a start list the checkpoints at different times while an older start commits one."""
    number = rng.randint(1, 3)
    plan = replace(plan, hosts=rng.randint(2, 3)).also(
        _fault("late", _MANIFEST, number, "before", rng.uniform(3.0, 10.0)), _fault("second start", _MANIFEST, number)
    )
    # Each commit of the older start lists checkpoints, too, and each of its hosts did at its beginning.
    listing = plan.hosts + number - 1 + rng.randint(1, plan.hosts)
    return plan.also(_fault("late", ("list", "checkpoints"), listing, "before", rng.uniform(2.0, 9.0)))


def _late_commit_of_a_passed_step(rng: random.Random, plan: Plan) -> Plan:
    """A start that was asked to stop commits, late, a step that the newer start has passed and never saves."""
    number = rng.randint(1, 2)
    stop = Fault("sigterm all", rng.uniform(3.0, 9.0), worker=0)
    return replace(plan, every_steps=rng.randint(3, 5), steps=14, step_seconds=0.5, jitter=0.2).also(
        stop,
        _fault("late", _MANIFEST, number, "before", rng.uniform(8.0, 20.0)),
        _fault("second start", _MANIFEST, number),
    )


def _hang(rng: random.Random, plan: Plan) -> Plan:
    """A process hangs while its kernel still answers."""
    plan = replace(plan, hosts=rng.randint(2, 4), jitter=0.2)
    return plan.also(_fault("hang", rng.choice(_HANGS), rng.randint(1, 5), "before", rng.uniform(60.0, 200.0)))


def _rot(rng: random.Random, plan: Plan) -> Plan:
    """The newest checkpoint is damaged, and the run starts again."""
    number = rng.randint(2, 5)
    plan = replace(plan, keep_last=rng.choice((2, 3)), jitter=0.2)
    return plan.also(_fault("rot", _MANIFEST, number, "after"), _fault("power", _MANIFEST, number, "after"))


def _wrong_read(rng: random.Random, plan: Plan) -> Plan:
    """All hosts end, and later one of them reads a wrong byte of the checkpoint, once."""
    number = rng.randint(1, 3)
    request = rng.choice((("read", "manifest.json"), ("read", "part-")))
    faults = (_fault("power", _MANIFEST, number, "after"), _fault("wrong read", request, rng.randint(1, 4)))
    return replace(plan, faults=faults, jitter=0.2)


def _early_stop(rng: random.Random, plan: Plan) -> Plan:
    """A host is asked to stop while others wait for one that starts late."""
    late, asked = rng.uniform(16.0, 40.0), rng.uniform(9.0, 14.0)
    faults = (
        Fault("late host", 0.4, worker=1, seconds=late),
        Fault("power", 0.5, worker=1),
        Fault("sigterm", asked, worker=1),
    )
    return replace(plan, hosts=4, later_hosts=(4,), faults=faults, jitter=0.2)


def _late_stop(rng: random.Random, plan: Plan) -> Plan:
    """A host is asked to stop in a step that takes longer than a stop may."""
    stop = Fault("sigterm", rng.uniform(4.0, 60.0), worker=rng.randrange(4))
    return replace(plan, hosts=rng.randint(2, 4), faults=(stop,), step_seconds=120.0, jitter=0.2)


def _late_record(rng: random.Random, plan: Plan) -> Plan:
    """A step is not finite, and writing its record is slow."""
    return replace(plan, hosts=rng.randint(2, 4), jitter=0.2).also(
        Fault("nan", rng.uniform(0.5, 3.0), worker=0),
        _fault("late", ("write", ".nonfinite.json"), 1, "before", rng.uniform(1.0, 9.0)),
    )


_SCENARIOS: tuple[Callable[[random.Random, Plan], Plan], ...] = (
    _late_commit, _late_commit, _several_starts, _several_starts, _late_listing, _late_commit_of_a_passed_step,
    _hang, _rot, _late_record, _wrong_read, _early_stop, _late_stop,
)  # fmt: skip
