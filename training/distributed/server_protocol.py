"""Host 0's side of the rendezvous as a pure function of bytes and times. `rendezvous_server.py` gives it sockets, a
thread and a clock.

`BarrierState` has the hosts of an attempt and its barriers. Every event (a host connects, reports its phase, arrives at
a barrier, leaves, its connection breaks, time passes) is a method that returns the messages to send, as (worker,
message); a message to several hosts is one object. An arrival counts once, and a lost attempt stays lost.

`ServerProtocol` turns bytes into these events and messages into bytes. A connection is any value that the caller
chooses; it is pending until its handshake (`handshake.py`) is complete. Every event (opened, received, closed, time
passes) is a method that returns actions, in order: (connection, bytes to send), (connection, None) to close it, or
(connection, HandOver): it is no longer this protocol's. The caller does not report a close that it was told to do. Bad
bytes cost at most the connection that sent them.

All hosts receive one summary of all phases, at most once a second, so what a host sends and receives does not grow with
the number of hosts."""

import hmac
from collections.abc import Hashable, Iterable
from dataclasses import dataclass, field, replace
from itertools import groupby
from typing import Any

from training.distributed import messages
from training.distributed.handshake import HostCredentials, Identity, Refusal, make_nonce, state_answer
from training.distributed.messages import FROM_HOST, HELLO, LineBuffer, Malformed, Message, decode, encode
from training.errors import Exit
from training.machine import SYSTEM, Machine

NEWS_SECONDS = 1.0
NEWS_CHARACTERS = 2000
SPARE_CONNECTIONS = 64  # pending connections that host 0 keeps, beyond one for each host
DESCRIBED = 16  # missing hosts whose last phase a message says; it only numbers the others


@dataclass(frozen=True)
class HandOver:
    """Takes a connection out of the server for the gradient exchange with `worker`; closes it if bytes are unsent."""

    worker: int


Actions = list[tuple[Any, bytes | HandOver | None]]
Outgoing = list[tuple[int, Message]]


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


def name_hosts(workers: list[int]) -> str:
    """Returns ascending worker numbers as a text: "host 3", or "hosts 0-2 4"."""
    runs = groupby(enumerate(workers), key=lambda entry: entry[1] - entry[0])  # of consecutive numbers
    numbers = [[worker for _, worker in run] for _, run in runs]
    text = " ".join(f"{run[0]}-{run[-1]}" if len(run) > 1 else str(run[0]) for run in numbers)
    return f"host {text}" if len(workers) == 1 else f"hosts {text}"


class BarrierState:
    """The hosts of an attempt and its barriers."""

    def __init__(self, identity: Identity) -> None:
        self.identity = identity
        self.members: dict[int, Member] = {}
        self.barriers: dict[str, Barrier] = {}
        self.lost: str | None = None  # why the attempt is over
        self.lost_code = Exit.LOST_PEER  # of the other hosts; SAVED if the first host to leave was asked to stop
        self._left: tuple[str, Exit] | None = None  # of the first orderly exit: why and with which code others end

    def check_peer(self, worker: int, given: Identity) -> Refusal | None:
        """Returns None for a host of this attempt, else its refusal: final if a retry is pointless."""
        own = self.identity
        if own.run_id != given.run_id:
            return Refusal(f"host 0 is in run {own.run_id!r}, this host in run {given.run_id!r}", False)
        if own.attempt != given.attempt:
            # A host of a later attempt may retry: the host 0 of its own attempt may replace this one soon.
            return Refusal(
                f"host 0 is in attempt {own.attempt} of run {own.run_id!r}, this host in attempt {given.attempt}",
                own.attempt > given.attempt,
            )
        if own.hosts != given.hosts:
            return Refusal(
                f"host 0 expects {own.hosts} hosts, this host was configured for {given.hosts}; check "
                "TPU_WORKER_HOSTNAMES",
                True,
            )
        if not 0 <= worker < own.hosts:
            return Refusal(f"there is no worker {worker} among {own.hosts} hosts", True)
        return None

    def connect(self, worker: int, given: Identity, now: float) -> Refusal | None:
        """Admits a host and returns None; else returns why not: another identity, a wrong worker number, or one
        admitted before (if the attempt is lost, only one still connected). Also admits hosts to a lost attempt: the
        caller sends them `lost_message`, which ends them."""
        if refusal := self.check_peer(worker, given):
            return refusal
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
        """Records that `worker` waits at barrier `name`, whose deadline the `seconds` of the first to arrive set.
        Returns the messages to send: none while hosts are missing; then all payloads, by worker, to all hosts, and the
        barrier's name is free again; "lost", to this host if the attempt is over, to all if a host has left, which ends
        the attempt."""
        self.members[worker].last_heard = now
        if self.lost:
            return [(worker, self.lost_message())]
        if self._left:  # that host will never arrive
            return self._end_attempt(*self._left)
        barrier = self.barriers.setdefault(name, Barrier(now + seconds, seconds))
        barrier.payloads.setdefault(worker, payload)
        if len(barrier.payloads) < self.identity.hosts:
            return []
        del self.barriers[name]
        payloads = [barrier.payloads[number] for number in range(self.identity.hosts)]
        return self._to_all({"complete": name, "payloads": payloads})

    def leave(self, worker: int, code: int, reason: str, overdue: bool = False) -> Outgoing:
        """Records that `worker` exits with `code`, and returns the messages to send. A failure ends the attempt for all
        hosts. So does an orderly exit (FINISHED, SAVED) if other hosts wait at a barrier, then or later, or if it is
        `overdue` (the host could not save in time). They exit with SAVED if `code` is that, else LOST_PEER."""
        member = self.members[worker]
        member.connected = False
        why = f"host {worker} stopped in phase {member.phase!r} with exit code {code}"
        why += f": {reason}" if reason else ""
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
                hosts += f"; and {name_hosts(others)}" if (others := missing[DESCRIBED:]) else ""
                why = f"rendezvous {name!r}: not all hosts arrived within {barrier.seconds:g} s: {hosts}"
                return self._end_attempt(why)
        return []

    def phases(self) -> list[str]:
        """Returns the last known phase of each host, in worker order; "never connected" for one that did not."""
        members = (self.members.get(worker) for worker in range(self.identity.hosts))
        return [member.phase if member else "never connected" for member in members]

    def _describe(self, worker: int, now: float) -> str:
        """Returns when a missing host was last heard of, and its phase then."""
        member = self.members.get(worker)
        if member is None:
            return f"host {worker} never connected"
        seconds = max(0.0, now - member.last_heard)
        return f"host {worker} was last heard of {seconds:.0f} s ago in phase {member.phase!r}"

    def _to_all(self, message: Message) -> Outgoing:
        """Returns the message for each host that is connected."""
        return [(worker, message) for worker, member in self.members.items() if member.connected]

    def _end_attempt(self, reason: str, code: Exit = Exit.LOST_PEER) -> Outgoing:
        """Records why the attempt ends and the others' exit code, unless it has ended; returns messages to all."""
        if self.lost is None:
            self.lost, self.lost_code = reason, code
        return self._to_all(self.lost_message())

    def lost_message(self) -> Message:
        """Returns the message that tells a host why the attempt is lost, and its exit code."""
        return {"lost": self.lost, "code": int(self.lost_code)}


@dataclass
class _Sender:
    """The sender on a connection: unknown until its handshake is complete, then `worker`."""

    lines: LineBuffer
    nonce: str
    deadline: float  # of the handshake
    worker: int | None = None


class ServerProtocol:
    """Host 0's side of all connections of an attempt."""

    def __init__(self, own: HostCredentials, machine: Machine = SYSTEM) -> None:
        self.state = BarrierState(own.identity)
        self._own, self._machine = own, machine
        self._peers: dict[Hashable, _Sender] = {}  # by connection, the oldest first
        self._connections: dict[int, Hashable] = {}  # by worker
        self._news: Message = {}
        self._next_news = 0.0

    @property
    def workers(self) -> list[int]:
        """Returns the workers of the hosts that are connected."""
        return list(self._connections)

    @property
    def pending(self) -> list[Hashable]:
        """Returns the connections whose handshake is not complete, the oldest first."""
        return [connection for connection, peer in self._peers.items() if peer.worker is None]

    def opened(self, connection: Hashable, now: float) -> Actions:
        """Begins the handshake on a new connection, and closes pending ones that are too old or too many."""
        nonce, deadline = make_nonce(self._machine), now + messages.HANDSHAKE_SECONDS
        self._peers[connection] = _Sender(LineBuffer(messages.HANDSHAKE_BYTES), nonce, deadline)
        return [*self._close_overdue(now), (connection, encode({"challenge": nonce}))]

    def received(self, connection: Hashable, data: bytes, now: float) -> Actions:
        """Returns the actions for bytes of a handshake or of messages. If they are malformed, drops the connection,
        which ends the attempt if it is a host's."""
        actions: Actions = []
        peer = self._peers.get(connection)
        if peer is None:  # closed by now
            return actions
        if peer.worker is None and now >= peer.deadline:  # its host may have given up
            return self.drop(connection)
        try:
            for line in peer.lines.feed(data):
                if peer.worker is not None:
                    actions += self._handle(peer.worker, *decode(line, FROM_HOST), now)
                elif peer.lines.is_empty:
                    actions += self._shake_hands(connection, peer, decode(line, HELLO)[1], now)
                else:
                    raise Malformed("more than a hello")
            return actions
        except Malformed:
            return [*actions, *self.drop(connection)]

    def drop(self, connection: Hashable) -> Actions:
        """Returns the actions that close a connection which is still open (else `closed`), and forgets it. If it is a
        host's that had not said goodbye, the attempt ends for all."""
        return [(connection, None), *self.closed(connection)]

    def closed(self, connection: Hashable) -> Actions:
        """Forgets a connection that broke and is closed already. Returns the actions that end the attempt for all, if
        its host had not said goodbye."""
        peer = self._peers.pop(connection, None)
        if peer is None or peer.worker is None or self._connections.get(peer.worker) != connection:
            return []
        del self._connections[peer.worker]
        return self._address(self.state.disconnect(peer.worker))

    def tick(self, now: float) -> Actions:
        """Ends the attempt if a barrier's deadline has passed, closes pending connections that are too old or too many,
        and sends all hosts a summary of changed phases, at most once in NEWS_SECONDS."""
        actions = self._close_overdue(now) + self._address(self.state.check_deadlines(now))
        if now < self._next_news:
            return actions
        self._next_news = now + NEWS_SECONDS
        phases = self.state.phases()
        news = {"news": summarize(phases)[:NEWS_CHARACTERS], "host_0": phases[0]}
        if news != self._news:
            self._news = news
            data = encode(news)
            actions += [(connection, data) for connection in self._connections.values()]
        return actions

    def _close_overdue(self, now: float) -> Actions:
        """Closes pending connections that are too old, and the oldest if there are too many."""
        pending = self.pending
        surplus = len(pending) - self.state.identity.hosts - SPARE_CONNECTIONS
        overdue = [each for place, each in enumerate(pending) if place < surplus or now >= self._peers[each].deadline]
        return [action for connection in overdue for action in self.drop(connection)]

    def _shake_hands(self, connection: Hashable, peer: _Sender, hello: Message, now: float) -> Actions:
        """Ends a handshake: accepts a host, and tells it if the attempt is lost; or hands its connection over, if it is
        for the gradient exchange; or refuses it and closes. Raises Malformed if its proof is wrong."""
        worker, nonces = hello["hello"], (peer.nonce, hello["nonce"])
        identity = Identity(hello["run_id"], hello["attempt"], hello["hosts"], hello["exchange"])
        claimed = replace(self._own, identity=identity)
        if not hmac.compare_digest(claimed.prove("host", worker, nonces), hello["proof"]):
            raise Malformed("the proof is wrong")
        is_exchange = identity.exchange
        refusal = self.state.check_peer(worker, identity) if is_exchange else self.state.connect(worker, identity, now)
        if refusal:
            refusal = replace(refusal, reason=messages.clip(refusal.reason))
        proof = claimed.prove("server", worker, nonces, state_answer(refusal))
        if refusal:
            answer = encode({"refused": refusal.reason, "final": refusal.final, "proof": proof})
            return [(connection, answer), *self.drop(connection)]
        welcome = encode({"welcome": True, "proof": proof})
        if is_exchange:
            del self._peers[connection]
            return [(connection, welcome), (connection, HandOver(worker))]
        peer.worker, peer.lines.limit = worker, messages.HOST_BYTES
        self._connections[worker] = connection
        late = [(worker, self.state.lost_message())] if self.state.lost else []
        return [(connection, welcome), *self._address(late)]

    def _handle(self, worker: int, kind: str, message: Message, now: float) -> Actions:
        """Records a host's phase, arrival at a barrier or goodbye, and returns the actions that follow."""
        if kind == "phase":
            self.state.set_phase(worker, message["phase"], now)
            return []
        if kind == "arrive":
            name, payload, seconds = message["arrive"], message["payload"], message["seconds"]
            return self._address(self.state.arrive(worker, name, payload, seconds, now))
        return self._address(self.state.leave(worker, message["goodbye"], message["reason"], message["overdue"]))

    def _address(self, outgoing: Outgoing) -> Actions:
        """Encodes messages for their workers' connections, one to several hosts once; skips unconnected workers."""
        encoded = {place: encode(message) for place, message in {id(post): post for _, post in outgoing}.items()}
        posts = [(self._connections.get(worker), encoded[id(message)]) for worker, message in outgoing]
        return [(connection, data) for connection, data in posts if connection is not None]


def summarize(phases: Iterable[str]) -> str:
    """Returns the phases of all hosts, given in worker order, as a text for the user: the rarest phase first."""
    workers: dict[str, list[int]] = {}
    for worker, phase in enumerate(phases):
        workers.setdefault(phase, []).append(worker)
    groups = sorted(workers.items(), key=lambda group: len(group[1]))
    return ", ".join(f"{name_hosts(members)} {phase!r}" for phase, members in groups)
