"""The handshake by which two hosts prove to each other that they belong to one attempt, before either reads anything
else. The classes are pure, lines come in and lines go out; the functions at the end perform the handshake on sockets.

The launcher gives all hosts of an attempt the same random secret. No host ever sends it: each side sends the other a
nonce, and an HMAC-SHA256 under the secret of both nonces, of the identity it claims and of the connection's purpose. So
an answer can't be repeated on another connection, sent back to its sender, or used for another purpose, worker, run or
attempt.

    host 0 -> peer   {"challenge": nonce}
    peer -> host 0   {"hello": worker, "run_id", "attempt", "hosts", "nonce", "proof"}
    host 0 -> peer   {"welcome", "proof"}   {"refused": reason, "final", "proof"}

A hello with a wrong proof gets no answer: host 0 closes its connection. The rest of a connection is not encrypted: the
handshake keeps strangers out, but not an attacker who can read or change the hosts' own packets.

Processes that use loopback addresses alone may have an empty secret: no other machine can connect to them.
"""

import contextlib
import errno
import hmac
import ipaddress
import json
import os
import selectors
import socket
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, astuple, dataclass, field, replace
from typing import Any, Generic, TypeVar

from training.distributed.cluster import SECRET_VARIABLE, Cluster
from training.distributed.messages import (
    ANSWER,
    CHALLENGE,
    HANDSHAKE_BYTES,
    HELLO,
    LineBuffer,
    Malformed,
    Message,
    decode,
    encode,
)
from training.errors import BadInput
from training.machine import SYSTEM, Connection, Machine

HANDSHAKE_SECONDS = 5.0  # then host 0 closes the connection of a peer without a proof
SPARE_CONNECTIONS = 64  # pending connections that host 0 keeps, beyond one for each missing host
RENDEZVOUS = "rendezvous"
GRADIENT_EXCHANGE = "gradient exchange"
_VERSION = "tpu-launch 1"
T = TypeVar("T")


def make_nonce(machine: Machine = SYSTEM) -> str:
    """Returns 32 random bytes in hexadecimal."""
    return machine.random.randbytes(32).hex()


@dataclass(frozen=True)
class Identity:
    """The attempt to which a host belongs."""

    run_id: str
    attempt: int
    hosts: int


@dataclass(frozen=True)
class Refusal:
    """The reason why host 0 does not admit a host."""

    reason: str
    final: bool  # a retry is pointless


@dataclass(frozen=True)
class HostCredentials:
    """The identity that a host proves, the purpose of the connection, and the attempt's secret."""

    identity: Identity
    purpose: str
    secret: bytes = field(repr=False)

    def prove(self, role: str, worker: int, nonces: tuple[str, str], statement: str = "") -> str:
        """Returns the proof of `role`, "host" or "server", in hexadecimal, for a connection of `worker` to host 0.
        `nonces` are host 0's and the worker's; `statement` is host 0's answer, which the proof covers."""
        text = json.dumps([_VERSION, self.purpose, role, *astuple(self.identity), worker, *nonces, statement])
        return hmac.new(self.secret, text.encode(), "sha256").hexdigest()


def host_credentials(cluster: Cluster, purpose: str) -> HostCredentials:
    """Returns this host's credentials for connections with one `purpose`. Raises BadInput if there is no secret and an
    address is not a loopback one."""
    if not cluster.secret and not all(map(_is_loopback, cluster.addresses)):
        raise BadInput(
            f"{SECRET_VARIABLE} is not set: the {cluster.hosts} hosts of a run accept only hosts that know its secret. "
            "tpu-launch sets it; where you start tpu-train yourself, set the same random value on every host, for "
            "example the output of `openssl rand -hex 32`"
        )
    return HostCredentials(Identity(cluster.run_id, cluster.attempt, cluster.hosts), purpose, cluster.secret)


def _is_loopback(address: str) -> bool:
    """Returns whether an address is "localhost" or a loopback IP; does not resolve names."""
    if address == "localhost":
        return True
    try:
        return ipaddress.ip_address(address).is_loopback
    except ValueError:
        return False


@dataclass(frozen=True)
class VerifiedHello:
    """A hello with a valid proof. Its identity may still be that of another attempt."""

    worker: int
    peer: HostCredentials
    nonces: tuple[str, str]


@dataclass
class _PendingPeer:
    nonce: str
    deadline: float
    lines: LineBuffer


class ServerHandshake(Generic[T]):
    """Host 0's side of the handshake, for all connections of one purpose. A connection is any value that the caller
    chooses; it is pending from `opened` to `forget`."""

    def __init__(self, own: HostCredentials, machine: Machine = SYSTEM) -> None:
        self.own, self._machine = own, machine
        self._pending: dict[T, _PendingPeer] = {}  # the oldest first

    def __contains__(self, connection: object) -> bool:
        return connection in self._pending

    def __len__(self) -> int:
        return len(self._pending)

    def opened(self, connection: T, now: float) -> bytes:
        """Registers a connection as pending, until HANDSHAKE_SECONDS after `now`, and returns the challenge to send."""
        nonce = make_nonce(self._machine)
        self._pending[connection] = _PendingPeer(nonce, now + HANDSHAKE_SECONDS, LineBuffer(HANDSHAKE_BYTES))
        return encode({"challenge": nonce})

    def received(self, connection: T, data: bytes) -> VerifiedHello | None:
        """Returns the hello once its line is complete, None before. Raises Malformed if its proof is wrong, or if the
        bytes are no hello. Afterwards the caller calls `forget`. The hello's attempt and worker are unchecked."""
        peer = self._pending[connection]
        for line in peer.lines.feed(data):
            if not peer.lines.is_empty:
                raise Malformed("more than a hello")
            _, hello = decode(line, HELLO)
            return self._verify(peer.nonce, hello)
        return None

    def _verify(self, nonce: str, hello: Message) -> VerifiedHello:
        """Returns a hello if its proof is valid for the identity that it claims, or raises Malformed."""
        claimed = Identity(hello["run_id"], hello["attempt"], hello["hosts"])
        peer, nonces = replace(self.own, identity=claimed), (nonce, hello["nonce"])
        if not hmac.compare_digest(peer.prove("host", hello["hello"], nonces), hello["proof"]):
            raise Malformed("the proof is wrong")
        return VerifiedHello(hello["hello"], peer, nonces)

    def welcome(self, hello: VerifiedHello) -> bytes:
        """Returns the answer that accepts a peer."""
        return encode({"welcome": True, "proof": _prove_answer(hello, "welcome")})

    def refuse(self, hello: VerifiedHello, reason: str, final: bool) -> bytes:
        """Returns the answer that refuses a peer. `final`: a retry is pointless."""
        return encode({"refused": reason, "final": final, "proof": _prove_answer(hello, f"refused {final} {reason}")})

    def forget(self, connection: T) -> None:
        """Removes a connection that was accepted or closed."""
        self._pending.pop(connection, None)

    def oldest(self) -> T | None:
        """Returns the connection that has been pending longest; None if none is pending."""
        return next(iter(self._pending), None)

    def overdue(self, now: float, limit: int) -> list[T]:
        """Returns the pending connections past their deadline, and the oldest ones if there are more than `limit`. They
        stay pending: the caller closes them and calls `forget`."""
        surplus = max(0, len(self._pending) - limit)
        return [
            connection
            for place, (connection, peer) in enumerate(self._pending.items())
            if place < surplus or now >= peer.deadline
        ]


def _prove_answer(hello: VerifiedHello, statement: str) -> str:
    """Returns host 0's proof of its answer to a hello, for the identity that the hello claims."""
    return hello.peer.prove("server", hello.worker, hello.nonces, statement)


class ClientHandshake:
    """A peer's side of the handshake, on one connection to host 0."""

    def __init__(self, own: HostCredentials, worker: int, nonce: str) -> None:
        """`nonce`: of `make_nonce`, for this connection alone."""
        self._own, self._worker, self._nonce = own, worker, nonce
        self._nonces: tuple[str, str] | None = None

    def answer_challenge(self, line: bytes | bytearray) -> bytes:
        """Returns the hello for host 0's challenge, kept for `check_answer`. Raises Malformed for any other line."""
        _, message = decode(line, CHALLENGE)
        self._nonces = (message["challenge"], self._nonce)
        proof = self._own.prove("host", self._worker, self._nonces)
        return encode({"hello": self._worker, **asdict(self._own.identity), "nonce": self._nonce, "proof": proof})

    def check_answer(self, line: bytes | bytearray) -> Refusal | None:
        """Returns None if host 0's answer to the hello of `answer_challenge` accepts this host, else its refusal.
        Raises Malformed if it is no answer or its proof is wrong: another program listens there."""
        assert self._nonces is not None
        kind, message = decode(line, ANSWER)
        statement = "welcome" if kind == "welcome" else f"refused {message['final']} {message['refused']}"
        if not hmac.compare_digest(self._own.prove("server", self._worker, self._nonces, statement), message["proof"]):
            raise Malformed("the answering program does not know the secret of this attempt")
        return None if kind == "welcome" else Refusal(message["refused"], message["final"])


def accept_connection(
    accept: Callable[[], tuple[T, Any]], close_oldest: Callable[[], bool], sleep: Callable[[float], None] = time.sleep
) -> T | None:
    """Returns the next connection; None if none waits, or its client gave up, or, after 0.05 s, if this process can
    have no more and none is to close. `accept`: of a listener with time-out 0; `close_oldest` closes the oldest pending
    connection to make room, or returns False if there is none. Raises OSError if the listener itself is broken."""
    while True:
        try:
            accepted, _ = accept()
        except (BlockingIOError, ConnectionError, TimeoutError):
            return None  # a client that has given up raises too
        except OSError as error:
            if error.errno not in (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM):
                raise
            if not close_oldest():
                sleep(0.05)  # the connection stays in the listener's queue
                return None
        else:
            return accepted


def connect_to_first(
    cluster: Cluster,
    port: int,
    own: HostCredentials,
    seconds: float,
    machine: Machine = SYSTEM,
    lost_seconds: float | None = None,
) -> tuple[Connection, LineBuffer | Refusal]:
    """Connects to host 0 once, and performs the handshake, within `seconds` each. Returns the connection, which breaks
    after `lost_seconds` of silence (None: when TCP gives up), with the result of `perform_handshake`; the caller closes
    it, after a refusal too. Raises OSError if host 0 does not answer, Malformed if another program does."""
    connection = machine.network.connect(cluster.addresses[0], port, seconds)
    try:
        if lost_seconds is not None:
            machine.network.detect_silence(connection, lost_seconds)
        return connection, perform_handshake(connection, own, cluster.worker, seconds, machine)
    except BaseException:
        connection.close()
        raise


def perform_handshake(
    connection: Connection, own: HostCredentials, worker: int, seconds: float, machine: Machine = SYSTEM
) -> LineBuffer | Refusal:
    """Performs the handshake of `worker` on a new connection to host 0, within `seconds`, and changes its time-out.
    Returns the bytes received after the handshake, or host 0's refusal. Raises OSError if host 0 closed the connection
    or did not answer in time, Malformed if another program than host 0 answered."""
    lines = LineBuffer(HANDSHAKE_BYTES)
    received = _receive_lines(connection, lines, machine.clock.monotonic() + seconds, machine.clock.monotonic)
    handshake = ClientHandshake(own, worker, make_nonce(machine))
    connection.sendall(handshake.answer_challenge(next(received)))
    return handshake.check_answer(next(received)) or lines


def _receive_lines(
    connection: Connection, lines: LineBuffer, deadline: float, clock: Callable[[], float]
) -> Iterator[bytearray]:
    """Yields the lines of a connection; bytes after the last line taken stay in `lines`. Raises TimeoutError at the
    deadline, ConnectionResetError when the other side closes, and Malformed for a line that is too long."""
    while True:
        connection.settimeout(max(0.001, deadline - clock()))
        data = connection.recv(HANDSHAKE_BYTES)
        if not data:
            raise ConnectionResetError("closed the connection: it ends, is of another attempt, or has another secret")
        yield from lines.feed(data)


def accept_peers(listener: socket.socket, own: HostCredentials, seconds: float) -> dict[int, socket.socket]:
    """Waits for all hosts but host 0. Returns their connections, non-blocking, by worker, after each has proved that it
    belongs to the attempt. Closes other clients, after HANDSHAKE_SECONDS at the latest; they delay nothing. Raises
    TimeoutError, naming the missing hosts, if not all connected within `seconds`, and OSError if the listener is
    broken; both close all connections. Leaves the listener open, and non-blocking."""
    handshake: ServerHandshake[socket.socket] = ServerHandshake(own)
    peers: dict[int, socket.socket] = {}

    def forget(connection: socket.socket) -> socket.socket:
        handshake.forget(connection)
        selector.unregister(connection)
        return connection

    def close_oldest() -> bool:
        if (oldest := handshake.oldest()) is not None:
            forget(oldest).close()
        return oldest is not None

    def serve(connection: socket.socket) -> None:
        """Reads from a pending connection: closes it if it is broken or no other host's; keeps it once its hello is
        welcomed, and closes an earlier one of that host."""
        try:
            hello = _receive_hello(connection, handshake)
        except (OSError, Malformed):
            forget(connection).close()
            return
        if hello:
            if hello.worker in peers:  # its connection broke, and it connected again
                peers[hello.worker].close()
            peers[hello.worker] = forget(connection)

    deadline = time.monotonic() + seconds
    listener.setblocking(False)
    with selectors.DefaultSelector() as selector:
        selector.register(listener, selectors.EVENT_READ)
        try:
            while missing := sorted(set(range(1, own.identity.hosts)) - set(peers)):
                if time.monotonic() >= deadline:
                    names = ", ".join(map(str, missing))
                    raise TimeoutError(f"host {names} did not connect to the {own.purpose} within {seconds:g} s")
                for key, _ in selector.select(timeout=0.05):
                    if key.data in handshake:
                        serve(key.data)
                    elif key.data is None and (connection := accept_connection(listener.accept, close_oldest)):
                        connection.setblocking(False)
                        selector.register(connection, selectors.EVENT_READ, connection)
                        with contextlib.suppress(OSError):  # then it can be read, and is closed
                            connection.sendall(handshake.opened(connection, time.monotonic()))
                for connection in handshake.overdue(time.monotonic(), own.identity.hosts + SPARE_CONNECTIONS):
                    forget(connection).close()
            return peers
        except BaseException:
            for peer in peers.values():
                peer.close()
            raise
        finally:
            for connection in handshake.overdue(deadline, 0):  # all
                connection.close()


def _receive_hello(connection: socket.socket, handshake: ServerHandshake[socket.socket]) -> VerifiedHello | None:
    """Reads from a connection without waiting. Returns and welcomes a valid hello of another host of this attempt;
    returns None before all of it came. Raises OSError if the connection is broken, Malformed if the other side has
    closed it, or sent other bytes or another attempt or worker number. Closes nothing."""
    try:
        data = connection.recv(HANDSHAKE_BYTES)
    except BlockingIOError:
        return None
    hello = handshake.received(connection, data)
    own = handshake.own.identity
    if not data or (hello and (hello.peer.identity != own or not 0 < hello.worker < own.hosts)):
        raise Malformed("no other host of this attempt")
    if hello:
        connection.sendall(handshake.welcome(hello))
    return hello


def describe_error(error: BaseException) -> str:
    """Returns the first line of an error's message; the system's text for a bare errno; else its class name."""
    text = str(error) or (os.strerror(error.errno) if isinstance(error, OSError) and error.errno else "")
    return (text or type(error).__name__).splitlines()[0]
