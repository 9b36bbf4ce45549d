"""What happens in a life, drawn from its seed before it begins: the run, and the faults that meet it.

A fault strikes at a time, or at a request to storage ("the 2nd write of a manifest"), which is where a protocol is most
easily hurt. Faults can be left out one by one (`without`), and nothing else changes.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, replace

HOSTILE_SECONDS = 240.0  # within which faults strike; after that the world is kind
REQUESTER = -1  # in the place of a worker: the host whose request it is


@dataclass(frozen=True)
class Fault:
    """Something bad. Which of the fields count depends on the kind."""

    kind: str
    at: float  # seconds; of those that strike at a time
    request: tuple[str, str, int] | None  # (operation, part of the object's name, its number) at which it strikes
    moment: str  # before or after the request takes effect
    worker: int  # whom it strikes, of the newest group; or REQUESTER
    seconds: float  # how long it lasts
    rate: float  # how often, of faults that strike now and then

    def __str__(self) -> str:
        when = (
            f"{self.moment} {self.request[0]} {self.request[1]} {self.request[2]}"
            if self.request
            else f"{self.at:.1f} s"
        )
        return f"{self.kind} (host {self.worker}, {self.seconds:.1f} s, rate {self.rate:.2f}) at {when}"


KINDS = (
    "kill",  # a process ends at once
    "freeze",  # a machine stands still, and wakes up
    "cut",  # a host loses its network, and has it again
    "sigterm",
    "sigterm twice",
    "sigterm all",
    "power",  # all hosts of a group end at once
    "second start",  # somebody starts the same run again, elsewhere
    "storm",  # storage fails before or after it wrote
    "slow",  # storage takes very long
    "full",  # storage takes no more bytes
    "telemetry",  # storage refuses what is not a checkpoint
    "cut line",  # a file of metrics ends in the middle of a line
    "bad write",  # storage keeps another byte of a part than it was sent
    "rot",  # a byte of the newest checkpoint changes
    "nan",  # an update gives a state that is not finite
    "poison",  # the first step after the newest checkpoint is not finite, whenever it is restored
    "clock",  # a wall clock jumps
    "late host",  # a host of the next attempt starts much later than the others
)
# Beside these, in scenes of duels.py alone: "hang" (a process stands still, and its network answers for it) and "late"
# (a request takes effect late, or its answer comes late); in those of ends.py: "slow request" (as "late", within what
# storage may take), "sigterm all twice" and "interrupt twice".
_REQUESTS = (
    ("write", "manifest.json"),
    ("write", "part-"),
    ("write", "attempt-"),
    ("list", "checkpoints"),
    ("list", "attempts"),
    ("delete", "manifest.json"),
    ("delete", "part-"),
    ("read", "manifest.json"),
    ("read", "part-"),
    ("write", "summary.json"),
)


@dataclass(frozen=True)
class Plan:
    """One life."""

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
    launcher_patience: float  # seconds that a launcher waits for hosts it can't reach
    faults: tuple[Fault, ...]
    jitter: float = 0.2  # seconds that storage takes at most to carry out a request
    # What ends.py adds to some lives.
    skip: bool = False  # train.on_nonfinite: skip
    skipped: frozenset[int] = frozenset()  # the steps that are never finite
    export: bool = False  # the model, at the end
    hub: str = ""  # uploads: at the "end", or of each "checkpoint" too
    hub_fault: str = ""  # what is wrong with the Hub, or with the processes that upload to it

    def leave_out(self, numbers: frozenset[int]) -> Plan:
        """The same without some of the faults."""
        return replace(self, faults=tuple(fault for number, fault in enumerate(self.faults) if number not in numbers))


def draw(seed: int) -> Plan:
    """The plan of a seed, before duels.py makes a scene of some."""
    rng = random.Random(f"trainer {seed}")
    hosts = rng.choice((1, 2, 2, 2, 3, 3, 4))
    steps = rng.randint(4, 14)
    every = rng.choice((None, 1, 2, 2, 3, 4))
    count = rng.choice((0, 1, 1, 2, 2, 3, 4, 6))
    faults = tuple(_draw_fault(rng, hosts) for _ in range(count))
    return Plan(
        seed=seed,
        hosts=hosts,
        records=rng.choice((12, 24)),
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
    )


def _draw_fault(rng: random.Random, hosts: int) -> Fault:
    kind = rng.choice(KINDS)
    at, worker = rng.random() * rng.choice((30.0, 90.0, HOSTILE_SECONDS)), rng.randrange(hosts)
    seconds, rate = rng.choice((2.0, 8.0, 30.0, 90.0)) * (0.5 + rng.random()), rng.choice((0.1, 0.3, 1.0))
    operation, name = rng.choice(_REQUESTS)
    moment, number, by_request = rng.choice(("before", "after")), rng.randint(1, 4), rng.random() < 0.5
    return Fault(kind, at, (operation, name, number) if by_request else None, moment, worker, seconds, rate)
