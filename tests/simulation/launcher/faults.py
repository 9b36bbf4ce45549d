"""The faults of a simulated run: a list that is drawn before the run begins, so that each can be left out.

Beside those named here: "preempt" and "maintenance" of the slice, "full" (ann's disk) and "date" of her workstation; of
a host "reboot", "hang", "cut" (from all), "filter" (ssh), "connection" (to a peer), "die", "engine", "disk", "clock".
"""

from __future__ import annotations

from dataclasses import dataclass

MEDDLING = ("delete", "halt", "replace")  # by a colleague
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
