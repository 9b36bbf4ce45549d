"""How two hosts prove to each other that they belong to one attempt, before either reads anything else.

The launcher gives all hosts of an attempt the same random secret. Neither side ever sends it: each sends the other a
nonce of its own, and an HMAC-SHA256 under the secret of both nonces, of who it claims to be and of what the connection
is for. So an answer can't be repeated on another connection, sent back to its sender, or used for another purpose,
worker, run or attempt.

    host 0 -> who connected   {"challenge": nonce}
    host -> host 0            {"hello": worker, "run_id", "attempt", "hosts", "nonce", "proof"}
    host 0 -> host            {"welcome", "proof"}   {"refused": reason, "final", "proof"}

A hello whose proof is wrong gets no answer: its connection is closed. What follows on a connection is not encrypted:
this keeps strangers out, and not somebody who can read or change the hosts' own packets.

One process on each host of one machine, with loopback addresses alone, may do without a secret (an empty one): nobody
else can connect there.
"""

from __future__ import annotations

import hmac
import ipaddress
import json
import os
import secrets
from collections.abc import Callable
from dataclasses import dataclass, field

from training.distributed.barrier_state import Identity
from training.distributed.cluster import SECRET_VARIABLE, Cluster
from training.distributed.protocol.messages import (
    ANSWER,
    CHALLENGE,
    GREETING_BYTES,
    HELLO,
    LineBuffer,
    Malformed,
    Message,
    decode,
    encode,
)
from training.errors import BadInput

NONCE_BYTES = 32
SECONDS = 5.0  # for who connects to prove who it is
SPARE_CONNECTIONS = 64  # beyond one a host, of those that have not proved who they are
RENDEZVOUS = "rendezvous"
GRADIENT_EXCHANGE = "gradient exchange"
_VERSION = "tpu-launch 1"


def make_nonce() -> str:
    """NONCE_BYTES random bytes, in hexadecimal."""
    return secrets.token_hex(NONCE_BYTES)


@dataclass(frozen=True)
class Credentials:
    """What a host proves: that it knows the secret of an attempt; and for which purpose."""

    identity: Identity
    purpose: str
    secret: bytes = field(repr=False)

    def prove(self, role: str, worker: int, nonces: tuple[str, str], said: str = "") -> str:
        """The proof of the side `role` ("host" or "server") for the connection of `worker`.

        Args:
            role: Who proves it.
            worker: Whose connection it is.
            nonces: Host 0's and the host's.
            said: What is said with it.
        """
        identity = self.identity
        text = json.dumps(
            [_VERSION, self.purpose, role, identity.run_id, identity.attempt, identity.hosts, worker, *nonces, said]
        )
        return hmac.new(self.secret, text.encode(), "sha256").hexdigest()


def credentials(cluster: Cluster, purpose: str) -> Credentials:
    """What this host proves to the others. Raises BadInput where several hosts have no secret."""
    if not cluster.secret and not all(map(_is_loopback, cluster.addresses)):
        raise BadInput(
            f"{SECRET_VARIABLE} is not set: the {cluster.hosts} hosts of a run let only those in that know its secret. "
            "tpu-launch gives them one; where you start tpu-train yourself, set the same on every host, for example "
            "what `openssl rand -hex 32` prints"
        )
    return Credentials(Identity(cluster.run_id, cluster.attempt, cluster.hosts), purpose, cluster.secret)


def _is_loopback(address: str) -> bool:
    if address == "localhost":
        return True
    try:
        return ipaddress.ip_address(address).is_loopback
    except ValueError:
        return False


@dataclass(frozen=True)
class Greeting:
    """A hello whose proof is right."""

    worker: int
    identity: Identity
    nonces: tuple[str, str]


@dataclass
class _Stranger:
    nonce: str
    deadline: float
    lines: LineBuffer


class Doorkeeper:
    """Host 0's side of the greeting, for all connections of one purpose. Connections are numbers that the caller
    chooses."""

    def __init__(self, own: Credentials, make_nonce: Callable[[], str] = make_nonce) -> None:
        self._own = own
        self._make_nonce = make_nonce
        self._strangers: dict[int, _Stranger] = {}  # the oldest first

    def __contains__(self, connection: int) -> bool:
        return connection in self._strangers

    def __len__(self) -> int:
        return len(self._strangers)

    def opened(self, connection: int, now: float) -> bytes:
        """Somebody connected: what to send."""
        nonce = self._make_nonce()
        self._strangers[connection] = _Stranger(nonce, now + SECONDS, LineBuffer(GREETING_BYTES))
        return encode({"challenge": nonce})

    def received(self, connection: int, data: bytes) -> Greeting | None:
        """Somebody sent `data`: who it is, or None while the line is not complete. Raises Malformed: close it."""
        stranger = self._strangers[connection]
        for line in stranger.lines.feed(data):
            if not stranger.lines.is_empty:
                raise Malformed("more than a hello")
            _, hello = decode(line, HELLO)
            return self._check(stranger.nonce, hello)
        return None

    def _check(self, nonce: str, hello: Message) -> Greeting:
        given = Identity(hello["run_id"], hello["attempt"], hello["hosts"])
        nonces = (nonce, hello["nonce"])
        theirs = Credentials(given, self._own.purpose, self._own.secret)
        if not hmac.compare_digest(theirs.prove("host", hello["hello"], nonces), hello["proof"]):
            raise Malformed("the proof is wrong")
        return Greeting(hello["hello"], given, nonces)

    def welcome(self, greeting: Greeting) -> bytes:
        """The answer that lets a host in."""
        return encode({"welcome": True, "proof": self._prove(greeting, "welcome")})

    def refuse(self, greeting: Greeting, reason: str, final: bool) -> bytes:
        """The answer that does not; `final`: asking again is pointless."""
        return encode({"refused": reason, "final": final, "proof": self._prove(greeting, f"refused {final} {reason}")})

    def _prove(self, greeting: Greeting, said: str) -> str:
        theirs = Credentials(greeting.identity, self._own.purpose, self._own.secret)
        return theirs.prove("server", greeting.worker, greeting.nonces, said)

    def forget(self, connection: int) -> None:
        """A connection was let in, or is closed."""
        self._strangers.pop(connection, None)

    def oldest(self) -> int | None:
        """The connection that has longest not proved who it is."""
        return next(iter(self._strangers), None)

    def unwanted(self, now: float, limit: int) -> list[int]:
        """The connections to close: those that have not proved who they are in time, and the oldest beyond `limit`."""
        surplus = max(0, len(self._strangers) - limit)
        return [
            connection
            for place, (connection, stranger) in enumerate(self._strangers.items())
            if place < surplus or now >= stranger.deadline
        ]


@dataclass(frozen=True)
class Refused:
    """Host 0's answer to a host that it does not let in."""

    reason: str
    final: bool


class Introduction:
    """A host's side of the greeting on one connection: the lines that host 0 sends go in, what to send comes out."""

    def __init__(self, own: Credentials, worker: int, nonce: str) -> None:
        """`nonce`: NONCE_BYTES random bytes in hexadecimal, of this connection alone."""
        self._own, self._worker, self._nonce = own, worker, nonce
        self._nonces: tuple[str, str] | None = None

    def answer_challenge(self, line: bytes | bytearray) -> bytes:
        """The hello that answers host 0's first line. Raises Malformed."""
        _, message = decode(line, CHALLENGE)
        self._nonces = (message["challenge"], self._nonce)
        identity = self._own.identity
        return encode(
            {
                "hello": self._worker,
                "run_id": identity.run_id,
                "attempt": identity.attempt,
                "hosts": identity.hosts,
                "nonce": self._nonce,
                "proof": self._own.prove("host", self._worker, self._nonces),
            }
        )

    def check_answer(self, line: bytes | bytearray) -> Refused | None:
        """None when host 0 has let this host in, or why not. Raises Malformed when it is not host 0 that answers."""
        assert self._nonces is not None
        kind, message = decode(line, ANSWER)
        said = "welcome" if kind == "welcome" else f"refused {message['final']} {message['refused']}"
        if not hmac.compare_digest(self._own.prove("server", self._worker, self._nonces, said), message["proof"]):
            raise Malformed("who answers does not know the secret of this attempt")
        return None if kind == "welcome" else Refused(message["refused"], message["final"])


def derive_token(cluster: Cluster, token: str) -> str:
    """A name that only the hosts of this attempt can know, for a library's own exchange; `token` is what they agreed
    on. 32 bytes in hexadecimal."""
    secret = cluster.secret or os.fsencode(token)
    return hmac.new(secret, f"{_VERSION} {cluster.run_id} {cluster.attempt} {token}".encode(), "sha256").hexdigest()
