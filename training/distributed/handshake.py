"""The handshake by which two hosts prove to each other that they belong to one attempt, before either reads anything
else. `server_protocol.py` is host 0's side; here are the proofs, and the other hosts' side.

The launcher gives all hosts of an attempt the same random secret. No host ever sends it: each side sends the other a
nonce, and an HMAC-SHA256 under the secret of both nonces and of the identity it claims, which says what the connection
is for. So an answer can't be repeated on another connection, sent back to its sender, or used for another purpose,
worker, run or attempt. Host 0 sends a challenge first, then the peer a hello, then host 0 its answer (`messages.py`).

A hello with a wrong proof gets no answer: host 0 closes its connection. The rest of a connection is not encrypted: the
handshake keeps strangers out, but not an attacker who can read or change the hosts' own packets.

Processes that use loopback addresses alone may have an empty secret: no other machine can connect to them.
"""

import hmac
import ipaddress
import json
import os
from collections.abc import Iterator
from dataclasses import asdict, astuple, dataclass, field

from training.distributed import messages
from training.distributed.cluster import SECRET_VARIABLE, Cluster
from training.distributed.messages import ANSWER, CHALLENGE, HANDSHAKE_BYTES, LineBuffer, Malformed, decode, encode
from training.errors import BadInput
from training.machine import SYSTEM, Connection, Machine

_VERSION = "tpu-launch 1"


def make_nonce(machine: Machine = SYSTEM) -> str:
    """Returns 32 random bytes in hexadecimal."""
    return machine.random.randbytes(32).hex()


@dataclass(frozen=True)
class Identity:
    """The attempt to which a host belongs, and what it connects for: the rendezvous, or the gradient exchange."""

    run_id: str
    attempt: int
    hosts: int
    exchange: bool = False


@dataclass(frozen=True)
class Refusal:
    """The reason why host 0 does not admit a host."""

    reason: str
    final: bool  # a retry is pointless


@dataclass(frozen=True)
class HostCredentials:
    """The identity that a host proves, and the attempt's secret."""

    identity: Identity
    secret: bytes = field(repr=False)

    def prove(self, role: str, worker: int, nonces: tuple[str, str], statement: str = "") -> str:
        """Returns the proof of `role`, "host" or "server", in hexadecimal, for a connection of `worker` to host 0.
        `nonces` are host 0's and the worker's; `statement` is host 0's (`state_answer`), which the proof covers."""
        text = json.dumps([_VERSION, role, *astuple(self.identity), worker, *nonces, statement])
        return hmac.new(self.secret, text.encode(), "sha256").hexdigest()


def host_credentials(cluster: Cluster, *, exchange: bool = False) -> HostCredentials:
    """Returns this host's credentials for the rendezvous, or the gradient `exchange`. Raises BadInput if there is no
    secret and an address is not a loopback one."""
    if not cluster.secret and not all(map(_is_loopback, cluster.addresses)):
        raise BadInput(
            f"{SECRET_VARIABLE} is not set: the {cluster.hosts} hosts of a run accept only hosts that know its secret. "
            "tpu-launch sets it; where you start tpu-train yourself, set the same random value on every host, for "
            "example the output of `openssl rand -hex 32`"
        )
    return HostCredentials(Identity(cluster.run_id, cluster.attempt, cluster.hosts, exchange), cluster.secret)


def _is_loopback(address: str) -> bool:
    """Returns whether an address is "localhost" or a loopback IP; does not resolve names."""
    if address == "localhost":
        return True
    try:
        return ipaddress.ip_address(address).is_loopback
    except ValueError:
        return False


def state_answer(refusal: Refusal | None) -> str:
    """Returns host 0's answer to a hello as a text for its proof. None: it accepts the host."""
    return f"refused {refusal.final} {refusal.reason}" if refusal else "welcome"


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
        refusal = None if kind == "welcome" else Refusal(message["refused"], message["final"])
        proof = self._own.prove("server", self._worker, self._nonces, state_answer(refusal))
        if not hmac.compare_digest(proof, message["proof"]):
            raise Malformed("the answering program does not know the secret of this attempt")
        return refusal


def perform_handshake(
    connection: Connection, own: HostCredentials, worker: int, seconds: float, machine: Machine = SYSTEM
) -> LineBuffer | Refusal:
    """Performs the handshake of `worker` on a new connection to host 0, within `seconds`; the connection keeps the
    time-out that is left. Waits longer for the answer to the hello than host 0 may admit this host: an admitted host's
    end is the attempt's. Returns the bytes received after the handshake, or host 0's refusal. Raises OSError if host 0
    closed the connection or did not answer in time, Malformed if another program than host 0 answered."""
    lines, clock = LineBuffer(HANDSHAKE_BYTES), machine.clock.monotonic
    deadline = clock() + seconds

    def receive() -> Iterator[bytearray]:
        """Yields lines as they come; bytes after the last line taken stay in `lines`."""
        while True:
            connection.settimeout(max(0.001, deadline - clock()))
            data = connection.recv(HANDSHAKE_BYTES)
            if not data:
                raise ConnectionResetError(
                    "closed the connection: it ends, is of another attempt, or has another secret"
                )
            yield from lines.feed(data)

    received, handshake = receive(), ClientHandshake(own, worker, make_nonce(machine))
    connection.sendall(handshake.answer_challenge(next(received)))
    deadline = max(deadline, clock() + 2 * messages.HANDSHAKE_SECONDS)
    return handshake.check_answer(next(received)) or lines


def describe_error(error: BaseException) -> str:
    """Returns the first line of an error's message; the system's text for a bare errno; else its class name."""
    text = str(error) or (os.strerror(error.errno) if isinstance(error, OSError) and error.errno else "")
    return (text or type(error).__name__).splitlines()[0]
