"""The state of an attempt's rendezvous on host 0. Pure, without sockets and without a clock.

Every event (a host connects, reports its phase, arrives at a barrier, leaves, its connection breaks, time passes) is a
method that returns the messages to send, as (worker, message); a message to several hosts is one object.
`server_protocol.py` turns them into bytes, and `rendezvous_server.py` has the sockets and the clock. Repeated messages
are harmless: an arrival counts once, a completed barrier always answers with the same payloads, and a lost attempt
stays lost.
"""

from collections import OrderedDict
from dataclasses import dataclass, field
from typing import Any

from training.errors import Exit

Message = dict[str, Any]
Outgoing = list[tuple[int, Message]]
DESCRIBED = 16  # missing hosts whose last phase a message says; it only numbers the others
REMEMBERED = 256  # completed barriers whose answers are kept for repeated arrivals


@dataclass(frozen=True)
class Identity:
    """The attempt to which a host belongs."""

    run_id: str
    attempt: int
    hosts: int


@dataclass
class Member:
    """An admitted host."""

    phase: str
    last_heard: float  # on the clock of the events
    connected: bool = True


@dataclass
class Barrier:
    """A barrier that some hosts have not reached."""

    deadline: float
    seconds: float
    payloads: dict[int, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Refusal:
    """The reason why host 0 does not admit a host."""

    reason: str
    final: bool  # a retry is pointless


def compare(expected: Identity, given: Identity) -> Refusal | None:
    """Returns the refusal of a host that is not of the expected attempt; None if it is."""
    if expected == given:
        return None
    if expected.run_id != given.run_id:
        return Refusal(f"host 0 is in run {expected.run_id!r}, this host in run {given.run_id!r}", False)
    if expected.attempt != given.attempt:
        # A host of a later attempt may retry: the host 0 of its own attempt may replace this one soon.
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
    """Returns ascending worker numbers as a text: "host 3", or "hosts 0-2 4"."""
    ranges: list[tuple[int, int]] = []
    for worker in workers:
        if ranges and worker == ranges[-1][1] + 1:
            ranges[-1] = (ranges[-1][0], worker)
        else:
            ranges.append((worker, worker))
    text = " ".join(str(first) if first == last else f"{first}-{last}" for first, last in ranges)
    return f"host {text}" if len(workers) == 1 else f"hosts {text}"


class BarrierState:
    """The hosts of an attempt and its barriers."""

    def __init__(self, identity: Identity) -> None:
        self.identity = identity
        self.members: dict[int, Member] = {}
        self.barriers: dict[str, Barrier] = {}
        self.completed: OrderedDict[str, list[Any]] = OrderedDict()
        self.lost: str | None = None  # why the attempt is over
        self.lost_code = Exit.LOST_PEER  # of the other hosts; SAVED if the first host to leave was asked to stop
        self._left: tuple[str, Exit] | None = None  # of the first orderly exit: why and with which code others end

    def connect(self, worker: int, given: Identity, now: float) -> Refusal | None:
        """Admits a host and returns None; else returns why not: another identity, a wrong worker number, or one that is
        connected. Also admits hosts to a lost attempt: the caller sends them `lost_message`, which ends them."""
        refusal = compare(self.identity, given)
        if refusal:
            return refusal
        if not 0 <= worker < self.identity.hosts:
            return Refusal(f"there is no worker {worker} among {self.identity.hosts} hosts", True)
        member = self.members.get(worker)
        if member and (member.connected or not self.lost):
            return Refusal(f"worker {worker} is connected already; is a second trainer running on that host?", False)
        self.members[worker] = Member("connected", now)
        return None

    def set_phase(self, worker: int, phase: str, now: float) -> None:
        """Records what a host does, and that it was heard of at `now`."""
        member = self.members[worker]
        member.phase, member.last_heard = phase, now

    def arrive(self, worker: int, name: str, payload: Any, seconds: float, now: float) -> Outgoing:
        """Records that `worker` waits up to `seconds` at barrier `name`. Returns the messages to send: all payloads, to
        all once every host has arrived, or to one that arrives again; "lost", if the attempt is over or a host left."""
        self.members[worker].last_heard = now
        if self.lost:
            return [(worker, self.lost_message())]
        if name in self.completed:
            return [(worker, {"complete": name, "payloads": self.completed[name]})]
        if self._left:  # that host will never arrive
            return self._end_attempt(*self._left)
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
        """Records that `worker` exits with `code`, and returns the messages to send. A failure ends the attempt for all
        hosts. So does an orderly exit (FINISHED, SAVED) if other hosts wait at a barrier, then or later, or if it is
        `overdue`: the host could not save in the time for a stop."""
        member = self.members[worker]
        member.connected = False
        why = f"host {worker} stopped in phase {member.phase!r} with exit code {code}" + (
            f": {reason}" if reason else ""
        )
        end = (why, Exit.SAVED if code == Exit.SAVED else Exit.LOST_PEER)
        if code in (Exit.FINISHED, Exit.SAVED) and not self.barriers and not overdue:
            self._left = self._left or end
            return []
        return self._end_attempt(*end)

    def disconnect(self, worker: int) -> Outgoing:
        """Ends the attempt if the connection of `worker` broke before its goodbye. Returns the messages to send."""
        member = self.members.get(worker)
        if member is None or not member.connected:
            return []
        member.connected = False
        return self._end_attempt(f"host {worker} is gone: its connection broke in phase {member.phase!r}")

    def check_deadlines(self, now: float) -> Outgoing:
        """Ends the attempt if the deadline of a barrier has passed. Returns the messages to send."""
        for name, barrier in self.barriers.items():
            if now >= barrier.deadline:
                missing = [number for number in range(self.identity.hosts) if number not in barrier.payloads]
                hosts = "; ".join(self._describe(number, now) for number in missing[:DESCRIBED])
                if others := missing[DESCRIBED:]:
                    hosts += f"; and {name_hosts(others)}"
                return self._end_attempt(
                    f"rendezvous {name!r}: not all hosts arrived within {barrier.seconds:g} s: {hosts}"
                )
        return []

    def phases(self) -> list[str]:
        """Returns the last known phase of each host, in worker order."""
        return [
            self.members[number].phase if number in self.members else "never connected"
            for number in range(self.identity.hosts)
        ]

    def _describe(self, worker: int, now: float) -> str:
        """Returns when a missing host was last heard of, and its phase then."""
        member = self.members.get(worker)
        if member is None:
            return f"host {worker} never connected"
        seconds = max(0.0, now - member.last_heard)
        return f"host {worker} was last heard of {seconds:.0f} s ago in phase {member.phase!r}"

    def _to_all(self, message: Message) -> Outgoing:
        """Returns a message for each host that is still connected."""
        return [(worker, message) for worker, member in self.members.items() if member.connected]

    def _end_attempt(self, reason: str, code: Exit = Exit.LOST_PEER) -> Outgoing:
        """Records why the attempt ends and the others' exit code, unless it has ended; returns messages to all."""
        if self.lost is None:
            self.lost, self.lost_code = reason, code
        return self._to_all(self.lost_message())

    def lost_message(self) -> Message:
        """Returns the message that tells a host why the attempt is lost, and its exit code."""
        return {"lost": self.lost, "code": int(self.lost_code)}
