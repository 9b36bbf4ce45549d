"""90,000 byte streams against the rendezvous: none has an effect or leaks a connection.

A seed decides the streams: plain noise, and valid messages that are cut, spliced, repeated, bit-flipped or given other
values, in pieces of any size. Most go to the protocol's objects; some hundreds through real sockets.
"""

import contextlib
import json
import os
import random
import socket
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any
from unittest.mock import Mock

import pytest

from tests.processes import free_port
from training.distributed import handshake as handshakes
from training.distributed import messages
from training.distributed.cluster import Cluster
from training.distributed.handshake import ClientHandshake, HostCredentials, Identity, make_nonce
from training.distributed.messages import ANSWER, FROM_SERVER, LineBuffer, Malformed, encode
from training.distributed.rendezvous import RendezvousClient
from training.distributed.rendezvous_server import RendezvousServer
from training.distributed.server_protocol import ServerProtocol
from training.distributed.shutdown import ShutdownRequest
from training.machine import Machine

SEED = 20260722
UNKNOWN, ADMITTED, CLIENTS = 65_000, 10_000, 15_000
OWN = HostCredentials(Identity("run", 1, 3), b"the secret of the attempt")

VALUES: list[Any] = [
    None, True, False, 0, -1, 1, 2, 7, 3.5, -0.0, 1e308, 2**31, 2**63, 10**300, "", "run", "x" * 700, "\ud800", "\n",
    "0" * 64, "f" * 64, [], {}, [[]], {"a": {}}, [None] * 5, {"hello": 1}, "start", "checkpoint 1",
]  # fmt: skip
RAW = [
    b"Infinity", b"-Infinity", b"NaN", b"1e999", b"[" * 100_000, b'{"a":' * 20_000, b"9" * 5000, b'"\\ud800"', b"1_0",
    b"\xef\xbb\xbf{}", b"\xff\xfe", b"\x00", b"01", b'"\\u0000"', b"\\", b'{"phase": "x", "phase": 1}', b"nul",
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
    message = dict(chance.choice(SHAPES))
    if kind in (2, 3):
        message[chance.choice(list(message))] = chance.choice(VALUES)
    elif kind == 4:
        message.pop(chance.choice(list(message)))
        message[chance.choice(FIELDS)] = chance.choice(VALUES)
    line = bytearray(json.dumps(message).encode() + b"\n")
    if kind == 5:
        line[chance.randrange(len(line))] ^= 1 << chance.randrange(8)
    elif kind == 6:
        begin = chance.randrange(len(line))
        line = line[begin:] if chance.random() < 0.5 else line[:begin]
    return bytes(line)


def cut(chance: random.Random, data: bytes) -> Iterator[bytes]:
    """Yields a stream in pieces, as a network delivers it."""
    while data:
        size = chance.choice((1, 7, 100, 5000, len(data))) if len(data) < 1000 else len(data)
        yield data[:size]
        data = data[size:]


def admit(server: ServerProtocol, connection: int, worker: int) -> None:
    [(_, challenge)] = server.opened(connection, 0.0)
    hello = ClientHandshake(OWN, worker, make_nonce()).answer_challenge((challenge or b"").strip())
    [(_, welcome)] = server.received(connection, hello, 0.0)
    assert b"welcome" in (welcome or b"")


def test_unknown_peers_change_nothing() -> None:
    chance = random.Random(SEED)
    server = ServerProtocol(OWN)
    for worker in range(2):
        admit(server, worker, worker)
    server.received(0, encode({"arrive": "start", "payload": None, "seconds": 1e6}), 0.0)
    before = snapshot(server)
    for number, stream in enumerate(streams(SEED, UNKNOWN), 10):
        now = number * 0.001
        sent = server.opened(number, now)
        for piece in cut(chance, stream):
            sent += server.received(number, piece, now)
        assert {connection for connection, data in sent if data is not None} == {number}, "only its challenge"
        assert sum(data is not None for _, data in sent) == 1
        assert len(server._peers) <= 2 + OWN.identity.hosts + 64
        if chance.random() < 0.3:
            server.closed(number)
        elif number % 1000 == 0:
            server.tick(now)
    server.tick(1e5)
    assert snapshot(server) == before
    assert len(server._peers) == 2
    admit(server, 2, 2)
    arrival = encode({"arrive": "start", "payload": None, "seconds": 10})
    assert server.received(1, arrival, 1e5) == []
    assert [connection for connection, _ in server.received(2, arrival, 1e5)] == [0, 1, 2]


def snapshot(server: ServerProtocol) -> str:
    state = server.state
    return repr((state.members, {name: barrier.payloads for name, barrier in state.barriers.items()}, state.lost))


def test_noise_of_a_host_closes_no_other_connection() -> None:
    """Valid messages in it count. The connections and the state of other hosts stay."""
    chance = random.Random(SEED + 1)
    for stream in streams(SEED + 1, ADMITTED):
        server = ServerProtocol(OWN)
        for worker in range(3):
            admit(server, worker, worker)
        closed = []
        for piece in cut(chance, stream):
            closed += [connection for connection, data in server.received(1, piece, 1.0) if data is None]
        assert set(closed) <= {1}
        assert {0, 2} <= set(server.workers)
        assert server.state.members[0].connected
        if closed:
            assert not server.state.members[1].connected
            assert server.state.lost or b"goodbye" in stream, "the others are told"
        for actions in (server.received(0, encode({"phase": "x"}), 1.0), server.tick(2.0)):
            assert all(isinstance(json.loads(data or b"{}"), dict) for _, data in actions)


def test_noise_instead_of_host_0_raises_only_malformed() -> None:
    chance = random.Random(SEED + 3)
    for stream in streams(SEED + 3, CLIENTS):
        handshake = ClientHandshake(OWN, 1, make_nonce())
        steps: list[Callable[[bytes], Any]] = [handshake.answer_challenge, handshake.check_answer]
        lines = LineBuffer(messages.HANDSHAKE_BYTES)
        try:
            for piece in cut(chance, stream):
                for line in lines.feed(piece):
                    if steps:
                        steps.pop(0)(bytes(line))
                    else:
                        pytest.fail("noise completed the handshake")
        except Malformed:
            pass
        lines = LineBuffer(messages.SERVER_BYTES)
        try:
            for line in lines.feed(stream):
                messages.decode(line, FROM_SERVER)
        except Malformed:
            pass


def cluster(worker: int, port: int) -> Cluster:
    return Cluster(worker, ("127.0.0.1",) * 3, None, "run", 1, port, free_port(), secret=OWN.secret)


def test_unknown_peers_at_the_rendezvous_leak_nothing_and_keep_no_host_out() -> None:
    port, files = free_port(), len(os.listdir("/proc/self/fd"))
    server = RendezvousServer(cluster(0, port), lost_seconds=2)
    hosts = []
    for worker in range(3):
        host = socket.create_connection(("127.0.0.1", port), timeout=10)
        assert isinstance(handshakes.perform_handshake(host, OWN, worker, 10), LineBuffer)
        hosts.append(host)
    peers: list[socket.socket] = []
    for number, stream in enumerate(streams(SEED + 4, 1000)):
        peer = socket.create_connection(("127.0.0.1", port), timeout=10)
        try:
            peer.sendall(stream)
            if number % 3 == 0:  # a reset instead of an end
                peer.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")
        except OSError:
            pass  # host 0 has closed it
        peers.append(peer)
        if number % 5:
            peers.pop(0).close()
    exchange = [socket.create_connection(("127.0.0.1", port), timeout=10) for _ in range(3)]
    for worker, host in zip((1, 1, 2), exchange, strict=True):  # the first connection broke, and came back
        own = replace(OWN, identity=replace(OWN.identity, exchange=True))
        assert isinstance(handshakes.perform_handshake(host, own, worker, 10), LineBuffer)
    taken = server.take_exchange(10)
    for host, own_end in zip(exchange[1:], taken, strict=True):
        host.sendall(b"gradients")
        assert own_end.recv(9) == b"gradients"
    for host in hosts:
        host.sendall(encode({"arrive": "start", "payload": None, "seconds": 10}))
    for host in hosts:
        host.settimeout(10)
        data = b""
        while b'"complete"' not in data:
            data += host.recv(1 << 16)
            assert b"lost" not in data
    for connection in (*hosts, *exchange, *taken, *peers):
        connection.close()
    server.close(5)
    assert len(os.listdir("/proc/self/fd")) <= files


def test_noise_from_host_0_is_a_lost_peer() -> None:
    leave = Mock()
    for stream in streams(SEED + 6, 100):
        theirs, ours = socket.socketpair()
        client = RendezvousClient(
            cluster(1, 1), None, ShutdownRequest(), ours, LineBuffer(messages.HANDSHAKE_BYTES), seconds=5,
            machine=Machine(exit=leave),
        )  # fmt: skip
        with contextlib.suppress(OSError):
            theirs.sendall(stream)
        theirs.close()
        deadline = time.monotonic() + 30
        while client._lost is None:
            assert time.monotonic() < deadline, stream
            time.sleep(0.001)
        client.close(1)
    leave.assert_not_called()
