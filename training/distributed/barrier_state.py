"""The state of an attempt's rendezvous on host 0: pure, without sockets and without a clock of its own.

Every event (a host connects, reports its phase, arrives at a barrier, leaves, its connection breaks, time passes) is a
method that returns the messages to send, as (worker, message); a message to several hosts is one object.
`protocol/server.py` makes bytes of them, and `rendezvous_server.py` gives it sockets and a clock. Two
rules make repeated messages harmless: an event counts once (an arrival is counted once, and a completed barrier answers
for ever with the same payloads), and an attempt that was lost stays lost.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass, field
from typing import Any

from training.errors import Exit

Message = dict[str, Any]
Outgoing = list[tuple[int, Message]]
DESCRIBED = 16  # hosts that did not arrive whose last phase is told; of the others, who they are
REMEMBERED = 256  # completed barriers whose answers are kept for late repeats


@dataclass(frozen=True)
class Identity:
    """Which hosts belong together: those of one attempt of one run."""

    run_id: str
    attempt: int
    hosts: int


@dataclass
class Member:
    """A host that was admitted."""

    phase: str
    last_heard: float  # seconds, of the clock that events are stamped with
    connected: bool = True


@dataclass
class Barrier:
    """A barrier that not all hosts have reached."""

    deadline: float
    seconds: float
    payloads: dict[int, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Refusal:
    """Why a host is not admitted, and whether asking again is pointless."""

    reason: str
    final: bool


def compare(expected: Identity, given: Identity) -> Refusal | None:
    """Why a host of identity `given` does not belong to the attempt `expected`; None when it does."""
    if expected == given:
        return None
    if expected.run_id != given.run_id:
        return Refusal(f"host 0 is in run {expected.run_id!r}, this host in run {given.run_id!r}", False)
    if expected.attempt != given.attempt:
        # A later attempt may ask again: this host 0 may be about to be replaced by that attempt's.
        return Refusal(
            f"host 0 is in attempt {expected.attempt} of run {expected.run_id!r}, this host in attempt {given.attempt}",
            expected.attempt > given.attempt,
        )
    return Refusal(
        f"host 0 expects {expected.hosts} hosts, this host was configured for {given.hosts}; check "
        "TPU_WORKER_HOSTNAMES",
        True,
    )


def name_hosts(workers: list[int]) -> str:
    """Ascending numbers of hosts, for a person: "host 3", or "hosts 0-2 4"."""
    ranges: list[tuple[int, int]] = []
    for worker in workers:
        if ranges and worker == ranges[-1][1] + 1:
            ranges[-1] = (ranges[-1][0], worker)
        else:
            ranges.append((worker, worker))
    text = " ".join(str(first) if first == last else f"{first}-{last}" for first, last in ranges)
    return f"host {text}" if len(workers) == 1 else f"hosts {text}"


class BarrierState:
    """The hosts of one attempt and the barriers they have reached."""

    def __init__(self, identity: Identity) -> None:
        self.identity = identity
        self.members: dict[int, Member] = {}
        self.barriers: dict[str, Barrier] = {}
        self.completed: OrderedDict[str, list[Any]] = OrderedDict()
        self.lost: str | None = None  # why the attempt is over
        self.lost_code = Exit.LOST_PEER  # what the others exit with; SAVED when the first to leave was asked to stop

    def connect(self, worker: int, given: Identity, now: float) -> Refusal | None:
        """Admits a host, or says why not."""
        refusal = compare(self.identity, given)
        if refusal:
            return refusal
        if not 0 <= worker < self.identity.hosts:
            return Refusal(f"there is no worker {worker} among {self.identity.hosts} hosts", True)
        if self.lost:
            return Refusal(f"this attempt is over: {self.lost}", True)
        if worker in self.members:
            return Refusal(f"worker {worker} is connected already; is a second trainer running on that host?", False)
        self.members[worker] = Member("connected", now)
        return None

    def set_phase(self, worker: int, phase: str, now: float) -> None:
        """Notes what a host is doing."""
        member = self.members[worker]
        member.phase, member.last_heard = phase, now

    def arrive(self, worker: int, name: str, payload: Any, seconds: float, now: float) -> Outgoing:
        """`worker` has reached barrier `name` and waits at most `seconds`. Answers all hosts once all are there."""
        self.members[worker].last_heard = now
        if self.lost:
            return [(worker, self._lost_message())]
        if name in self.completed:
            return [(worker, {"complete": name, "payloads": self.completed[name]})]
        barrier = self.barriers.setdefault(name, Barrier(now + seconds, seconds))
        barrier.payloads.setdefault(worker, payload)
        if len(barrier.payloads) < self.identity.hosts:
            return []
        del self.barriers[name]
        self.completed[name] = [barrier.payloads[number] for number in range(self.identity.hosts)]
        while len(self.completed) > REMEMBERED:
            self.completed.popitem(last=False)
        return self._to_all({"complete": name, "payloads": self.completed[name]})

    def leave(self, worker: int, code: int, reason: str, overdue: bool = False) -> Outgoing:
        """`worker` is about to exit with `code`.

        A failure ends the attempt for all. So does an orderly exit while others wait at a barrier, or one that comes
        before the others could save (`overdue`).
        """
        member = self.members[worker]
        member.connected = False
        if code in (Exit.FINISHED, Exit.SAVED) and not self.barriers and not overdue:
            return []
        if code == Exit.SAVED and self.lost is None:
            self.lost_code = Exit.SAVED
        return self._lose(
            f"host {worker} stopped in phase {member.phase!r} with exit code {code}" + (f": {reason}" if reason else "")
        )

    def disconnect(self, worker: int) -> Outgoing:
        """The connection to `worker` broke before it said that it leaves."""
        member = self.members.get(worker)
        if member is None or not member.connected:
            return []
        member.connected = False
        return self._lose(f"host {worker} is gone: its connection broke in phase {member.phase!r}")

    def check_deadlines(self, now: float) -> Outgoing:
        """Time has passed: a barrier whose deadline is over ends the attempt."""
        for name, barrier in self.barriers.items():
            if now >= barrier.deadline:
                missing = [number for number in range(self.identity.hosts) if number not in barrier.payloads]
                hosts = "; ".join(self._describe(number, now) for number in missing[:DESCRIBED])
                if others := missing[DESCRIBED:]:
                    hosts += f"; and {name_hosts(others)}"
                return self._lose(f"rendezvous {name!r}: not everyone arrived within {barrier.seconds:g} s: {hosts}")
        return []

    def phases(self) -> list[str]:
        """What each host was last known to do, in worker order."""
        return [
            self.members[number].phase if number in self.members else "never appeared"
            for number in range(self.identity.hosts)
        ]

    def _describe(self, worker: int, now: float) -> str:
        member = self.members.get(worker)
        if member is None:
            return f"host {worker} never appeared"
        seconds = max(0.0, now - member.last_heard)
        return f"host {worker} was last heard of {seconds:.0f} s ago in phase {member.phase!r}"

    def _to_all(self, message: Message) -> Outgoing:
        return [(worker, message) for worker, member in self.members.items() if member.connected]

    def _lose(self, reason: str) -> Outgoing:
        if self.lost is None:
            self.lost = reason
        return self._to_all(self._lost_message())

    def _lost_message(self) -> Message:
        return {"lost": self.lost, "code": int(self.lost_code)}
