"""The faults of a simulated run: a list that is drawn before the run begins, so that each can be left out."""

import random
from dataclasses import dataclass

HOST_FAULTS = ("reboot", "hang", "cut", "die", "engine", "disk", "clock")
SLICE_FAULTS = ("preempt", "maintenance")
MEDDLING = ("delete", "halt", "replace")  # by a colleague; themes also have "filter" (ssh), "connection", "date"
# Google's API, and the way to it. For a time; the number is the probability that a call is hit.
API_FAULTS = {
    "unavailable": 0.9,
    "rate": 0.7,
    "permission": 1.0,
    "lost": 0.5,
    "busy": 0.8,
    "slow": 0.5,
    "stockout": 1.0,
    "quota": 1.0,
    "signed out": 1.0,  # until the user signs in again
    "stale": 0.7,  # lists
    "old describe": 0.4,
    "dead ssh": 0.3,
    "no ssh": 1.0,  # to any host, while Google's API answers
    "ssh loses answers": 0.3,
    "offline": 1.0,
    "bucket": 0.8,
}
_ONLY_IN_THEMES = ("old describe", "quota", "signed out", "no ssh", "bucket")
ALL = tuple(kind for kind in (*HOST_FAULTS, *SLICE_FAULTS, *API_FAULTS) if kind not in _ONLY_IN_THEMES)
_WEIGHTS = {"permission": 0.3, "reboot": 2.0, "preempt": 3.0, "cut": 2.0, "unavailable": 2.0, "disk": 0.5, "stale": 2.0}


@dataclass(frozen=True)
class Fault:
    """One thing that goes wrong."""

    kind: str
    anchor: str
    """The moment that `at` is counted from: "beginning"; "up" and "up again", the first and second `up`; "start", when
    the first attempt runs on all hosts; "awake", when the workstation has slept; "restart", the second command on a
    run; "recovery", the end of the first attempt that is followed by another; "made again", when a run has made its
    slice again; "round", when a round of a recovery has failed; "contact", the first ssh to a new slice; "down"."""
    at: float
    seconds: float  # how long it lasts
    number: int  # which host, or which variant

    def __str__(self) -> str:
        return f"{self.kind} {self.number} at {self.anchor}+{self.at:.1f} s for {self.seconds:.1f} s"


def draw(rng: random.Random) -> list[Fault]:
    """Draws the faults of a simulated run: none in some, one in many, several in the others."""
    kindness = rng.random()
    count = 0 if kindness < 0.08 else 1 if kindness < 0.3 else rng.randint(2, 8)
    weights = [_WEIGHTS.get(kind, 1.0) for kind in ALL]
    faults = []
    for kind in rng.choices(ALL, weights, k=count):
        anchor = rng.choice(("beginning", "start", "start", "start", "restart", "recovery", "recovery", "down"))
        at = rng.uniform(0.0, 90.0) if anchor == "beginning" else rng.uniform(-8.0, 45.0 if anchor == "start" else 8.0)
        seconds = rng.choice((rng.uniform(1.0, 12.0), rng.uniform(10.0, 60.0), rng.uniform(60.0, 300.0)))
        faults.append(Fault(kind, anchor, max(0.0, at), seconds, rng.randrange(64)))
    return faults
