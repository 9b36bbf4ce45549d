"""The plan of a simulated run, drawn from its seed before it begins: the run's configuration and its faults.

A fault strikes at a time, or at a request to storage ("the 2nd write of a manifest"), which is where a protocol is most
easily hurt. Faults can be left out one by one (`without`), and nothing else changes.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, replace

HOSTILE_SECONDS = 240.0  # in which faults strike; afterwards there are none
REQUESTER = -1  # instead of a worker: the host that makes the request


@dataclass(frozen=True)
class Fault:
    """A fault. Its kind decides which fields are used."""

    kind: str
    at: float  # seconds, for faults that strike at a time
    request: tuple[str, str, int] | None  # (operation, part of the name, number of the match) that triggers it
    moment: str  # "before" or "after" the request takes effect
    worker: int  # of the newest group; or REQUESTER
    seconds: float  # duration
    rate: float  # probability, for faults that strike repeatedly

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
# Only in fault_scenarios.py: "hang" (a process freezes, but its kernel answers), "late" (a request takes effect late,
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
    rendezvous_seconds: float
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

    def leave_out(self, numbers: frozenset[int]) -> Plan:
        """Returns the plan without some faults."""
        return replace(self, faults=tuple(fault for number, fault in enumerate(self.faults) if number not in numbers))


def draw(seed: int) -> Plan:
    """Returns the plan of a seed, before fault_scenarios.py and features.py change it."""
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
        rendezvous_seconds=30.0,
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
