"""What a rendezvous server knows and decides: pure state, no sockets, no clock of its own.

Every event (a host says hello, tells its phase, arrives somewhere, leaves, its connection breaks, time passes) is a
method that returns the messages to send, as (worker, message). `rendezvous.py` gives it sockets. Two rules make repeats
harmless: what has happened stays happened (an arrival is counted once, a completed rendezvous answers for ever with the
same payloads), and a lost room stays lost.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass, field
from typing import Any

from training.errors import Exit

Message = dict[str, Any]
Outgoing = list[tuple[int, Message]]
REMEMBERED = 256  # completed rendezvous whose answers are kept for late repeats


@dataclass(frozen=True)
class Identity:
    """Who belongs together: hosts of one attempt of one run."""

    run_id: str
    attempt: int
    hosts: int


@dataclass
class Member:
    phase: str
    heard: float
    here: bool = True  # its connection is open


@dataclass
class Point:
    """A rendezvous that not everyone has reached."""

    deadline: float
    seconds: float
    payloads: dict[int, Any] = field(default_factory=dict)


def refusal(room: Identity, guest: Identity) -> tuple[str, bool] | None:
    """Why `guest` has no place in `room`, and whether asking again is pointless; None for a member."""
    if room == guest:
        return None
    if room.run_id != guest.run_id:
        return f"host 0 is in run {room.run_id!r}, this host in run {guest.run_id!r}", False
    if room.attempt != guest.attempt:
        return (
            f"host 0 is in attempt {room.attempt} of run {room.run_id!r}, this host in attempt {guest.attempt}",
            room.attempt > guest.attempt,
        )
    return f"host 0 expects {room.hosts} hosts, this host was told of {guest.hosts}; check TPU_WORKER_HOSTNAMES", True


class BarrierState:
    """The hosts of one attempt and the rendezvous they have reached."""

    def __init__(self, identity: Identity) -> None:
        self.identity = identity
        self.members: dict[int, Member] = {}
        self.points: dict[str, Point] = {}
        self.completed: OrderedDict[str, list[Any]] = OrderedDict()
        self.lost: str | None = None
        self.lost_code = (
            Exit.LOST_PEER
        )  # what the others end with: SAVED when the one who left did so because it was asked to stop

    def hello(self, worker: int, guest: Identity, now: float) -> tuple[str, bool] | None:
        """Admits a host, or says why not and whether asking again is pointless."""
        refused = refusal(self.identity, guest)
        if refused:
            return refused
        if not 0 <= worker < self.identity.hosts:
            return f"there is no worker {worker} among {self.identity.hosts} hosts", True
        if self.lost:
            return f"this attempt is over: {self.lost}", True
        if worker in self.members:
            return f"worker {worker} is here already; is a second trainer running on that host?", False
        self.members[worker] = Member("connected", now)
        return None

    def set_phase(self, worker: int, phase: str, now: float) -> None:
        member = self.members[worker]
        member.phase, member.heard = phase, now

    def arrive(self, worker: int, name: str, payload: Any, seconds: float, now: float) -> Outgoing:
        """`worker` has reached rendezvous `name` and waits at most `seconds`. Answers everyone when all are there."""
        self.members[worker].heard = now
        if self.lost:
            return [(worker, self._lost_message())]
        if name in self.completed:
            return [(worker, {"complete": name, "payloads": self.completed[name]})]
        point = self.points.setdefault(name, Point(now + seconds, seconds))
        point.payloads.setdefault(worker, payload)
        if len(point.payloads) < self.identity.hosts:
            return []
        del self.points[name]
        self.completed[name] = [point.payloads[each] for each in range(self.identity.hosts)]
        while len(self.completed) > REMEMBERED:
            self.completed.popitem(last=False)
        return [(each, {"complete": name, "payloads": self.completed[name]}) for each in self._present()]

    def goodbye(self, worker: int, code: int, reason: str, overdue: bool = False) -> Outgoing:
        """`worker` ends and says how. Any end but a good one is the end for all; so is a good one in the middle
        (`overdue`)."""
        member = self.members[worker]
        member.here = False
        if code in (Exit.FINISHED, Exit.SAVED) and not self.points and not overdue:
            return []
        if code == Exit.SAVED and self.lost is None:
            self.lost_code = Exit.SAVED
        return self._lose(
            f"host {worker} stopped in phase {member.phase!r} with exit code {code}" + (f": {reason}" if reason else "")
        )

    def closed(self, worker: int) -> Outgoing:
        """The connection to `worker` broke without a goodbye."""
        member = self.members.get(worker)
        if member is None or not member.here:
            return []
        member.here = False
        return self._lose(f"host {worker} is gone: its connection broke in phase {member.phase!r}")

    def tick(self, now: float) -> Outgoing:
        """Time has passed: rendezvous whose time is over lose the room."""
        for name, point in self.points.items():
            if now >= point.deadline:
                missing = [each for each in range(self.identity.hosts) if each not in point.payloads]
                said = "; ".join(self._describe(each, now) for each in missing)
                return self._lose(f"rendezvous {name!r}: not everyone arrived within {point.seconds:g} s: {said}")
        return []

    def phases(self) -> list[str]:
        return [
            self.members[each].phase if each in self.members else "never appeared"
            for each in range(self.identity.hosts)
        ]

    def _describe(self, worker: int, now: float) -> str:
        member = self.members.get(worker)
        if member is None:
            return f"host {worker} never appeared"
        return f"host {worker} was last heard of {max(0.0, now - member.heard):.0f} s ago in phase {member.phase!r}"

    def _present(self) -> list[int]:
        return [worker for worker, member in self.members.items() if member.here]

    def _lose(self, message: str) -> Outgoing:
        if self.lost is None:
            self.lost = message
        return [(worker, self._lost_message()) for worker in self._present()]

    def _lost_message(self) -> Message:
        return {"lost": self.lost, "code": int(self.lost_code)}
