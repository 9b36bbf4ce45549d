"""90,000 byte streams against the rendezvous: none has an effect or leaks a connection.

A seed decides the streams: plain noise, and valid messages that are cut, spliced, repeated, bit-flipped or given other
values, in pieces of any size. Most go to the protocol's objects; some hundreds through real sockets.
"""

import contextlib
import json
import random
import socket
from collections.abc import Callable, Iterator
from typing import Any
from unittest.mock import Mock

import pytest

from tests.processes import wait_until
from tests.training.mutations import nasty, spoil_bytes, spoil_json
from tests.training.test_server_protocol import ARRIVAL, OWN, Meeting
from training.distributed import messages
from training.distributed.cluster import Cluster
from training.distributed.handshake import ClientHandshake, make_nonce
from training.distributed.messages import ANSWER, FROM_SERVER, LineBuffer, Malformed
from training.distributed.rendezvous import RendezvousClient
from training.distributed.server_protocol import ServerProtocol
from training.distributed.shutdown import ShutdownRequest
from training.machine import Machine

SEED = 20260722
UNKNOWN, ADMITTED, CLIENTS = 65_000, 10_000, 15_000

RAW = [
    b"Infinity", b"-Infinity", b"NaN", b"1e999", b"[" * 100_000, b'{"a":' * 20_000, b"9" * 5000, b'"\\ud800"', b"1_0",
    b"\xef\xbb\xbf{}", b"\xff\xfe", b"\x00", b"01", b'"\\u0000"', b"\\", b'{"phase": "x", "phase": 1}', b"nul",
    b"GET / HTTP/1.1\r\n\r\n", b"x" * (messages.HANDSHAKE_BYTES + 1), b"",
]  # fmt: skip
FIELDS = sorted({name for kinds in (messages.HELLO, messages.FROM_HOST, FROM_SERVER, ANSWER) for name in kinds})
SHAPES: list[dict[str, Any]] = [
    {"hello": 1, "run_id": "run", "attempt": 1, "hosts": 3, "exchange": False, "nonce": "0" * 64, "proof": "0" * 64},
    {"challenge": "0" * 64},
    {"welcome": True, "proof": "0" * 64},
    {"refused": "no", "final": True, "proof": "0" * 64},
    {"phase": "step 1"},
    {"arrive": "start", "payload": None, "seconds": 10},
    {"arrive": "end", "payload": {"crc32c": 1}, "seconds": 0.5},
    {"goodbye": 0, "reason": "", "overdue": False},
    {"complete": "start", "payloads": [1, 2, 3]},
    {"lost": "host 1 is gone", "code": 76},
    {"news": "host 0 'x'", "host_0": "x"},
]


def streams(seed: int, count: int) -> Iterator[bytes]:
    chance = random.Random(seed)
    for _ in range(count):
        yield b"".join(_piece(chance) for _ in range(chance.choice((1, 1, 1, 2, 3, 8))))


def _piece(chance: random.Random) -> bytes:
    """Returns a line, a part of one, or noise."""
    kind = chance.randrange(8)
    if kind == 0:
        return chance.randbytes(chance.choice((0, 1, 5, 60, 600)))
    if kind == 1:
        raw = chance.choice(RAW)
        return raw + b"\n" if chance.random() < 0.5 else b'{"%s": %s}\n' % (chance.choice(FIELDS).encode(), raw)
    message = chance.choice(SHAPES)
    if kind == 2:
        message = {**message, chance.choice(FIELDS): nasty(chance)}
    elif kind in (3, 4):
        message = spoil_json(message, chance)
    line = json.dumps(message).encode() + b"\n"
    return spoil_bytes(line, chance) if kind in (5, 6) else line


def cut(chance: random.Random, data: bytes) -> Iterator[bytes]:
    """Yields a stream in pieces, as a network delivers it."""
    while data:
        size = chance.choice((1, 7, 100, 5000, len(data))) if len(data) < 1000 else len(data)
        yield data[:size]
        data = data[size:]


def test_unknown_peers_change_nothing() -> None:
    chance, meeting = random.Random(SEED), Meeting(joined=2)
    server, hosts = meeting.server, meeting.hosts
    meeting.send(hosts[0], {**ARRIVAL, "seconds": 1e6})
    before = snapshot(server)
    for number, stream in enumerate(streams(SEED, UNKNOWN), 10):
        now = number * 0.001
        sent = server.opened(number, now)
        for piece in cut(chance, stream):
            sent += server.received(number, piece, now)
        assert {connection for connection, data in sent if data is not None} == {number}, "only its challenge"
        assert sum(data is not None for _, data in sent) == 1
        assert ((number, None) in sent) == (b"\n" in stream or len(stream) > messages.HANDSHAKE_BYTES)
        assert len(server._peers) <= 2 + OWN.identity.hosts + 64
        if chance.random() < 0.3:
            server.closed(number)
        elif number % 1000 == 0:
            server.tick(now)
    server.tick(1e5)
    assert snapshot(server) == before
    assert len(server._peers) == 2
    hosts.append(meeting.join(2)[0])
    assert meeting.send(hosts[1], ARRIVAL) == []
    assert [connection for connection, _ in meeting.send(hosts[2], ARRIVAL)] == hosts


def snapshot(server: ServerProtocol) -> str:
    state = server.state
    return repr((state.members, {name: barrier.payloads for name, barrier in state.barriers.items()}, state.lost))


def test_noise_of_a_host_closes_no_other_connection() -> None:
    """Valid messages in it count. The connections and the state of other hosts stay."""
    chance = random.Random(SEED + 1)
    for stream in streams(SEED + 1, ADMITTED):
        meeting = Meeting(joined=3)
        server, hosts = meeting.server, meeting.hosts
        for piece in cut(chance, stream):
            meeting.send(hosts[1], piece)
        assert [meeting.is_closed(host) for host in (hosts[0], hosts[2])] == [False, False]
        assert {0, 2} <= set(server.workers)
        assert server.state.members[0].connected
        if meeting.is_closed(hosts[1]):
            assert not server.state.members[1].connected
            assert server.state.lost or b"goodbye" in stream, "the others are told"
        for actions in (meeting.send(hosts[0], {"phase": "x"}), server.tick(2.0)):
            assert all(isinstance(json.loads(data or b"{}"), dict) for _, data in actions)


def test_noise_instead_of_host_0_raises_only_malformed() -> None:
    chance = random.Random(SEED + 3)
    for stream in streams(SEED + 3, CLIENTS):
        handshake = ClientHandshake(OWN, 1, make_nonce())
        steps: list[Callable[[bytes], Any]] = [handshake.answer_challenge, handshake.check_answer]
        lines = LineBuffer(messages.HANDSHAKE_BYTES)
        with contextlib.suppress(Malformed):
            for piece in cut(chance, stream):
                for line in lines.feed(piece):
                    assert steps, "noise completed the handshake"
                    steps.pop(0)(bytes(line))
        with contextlib.suppress(Malformed):
            for line in LineBuffer(messages.SERVER_BYTES).feed(stream):
                messages.decode(line, FROM_SERVER)


@pytest.mark.parametrize("stream", list(streams(SEED + 6, 100)), ids=range(100))
def test_noise_from_host_0_is_a_lost_peer(stream: bytes) -> None:
    (theirs, ours), leave = socket.socketpair(), Mock()
    cluster = Cluster(1, ("127.0.0.1",) * 3, run_id="run", secret=OWN.secret)
    lines, machine = LineBuffer(messages.HANDSHAKE_BYTES), Machine(exit=leave)
    client = RendezvousClient(cluster, None, ShutdownRequest(), ours, lines, seconds=5, machine=machine)
    with contextlib.suppress(OSError):
        theirs.sendall(stream)
    theirs.close()
    wait_until(lambda: client._lost is not None, 30)
    client.close(1)
    leave.assert_not_called()
