"""Host 0's side of the rendezvous over real sockets: no host can hold up another one, and its end is noticed, but one
that says goodbye is not lost, even if host 0 is just sending to it."""

import errno
import json
import socket
import time
from collections.abc import Iterator
from typing import Any
from unittest.mock import Mock

import pytest

from tests.training.host_processes import free_port
from training.distributed import handshake as handshakes
from training.distributed.cluster import SECRET_VARIABLE, Cluster, discover
from training.distributed.handshake import RENDEZVOUS, HostCredentials, Identity, host_credentials
from training.distributed.messages import HOST_BYTES, LineBuffer, encode
from training.distributed.rendezvous_server import RendezvousServer, _Peer
from training.errors import BadInput
from training.machine import Machine

SECRET = b"the secret of the attempt"
LOST_SECONDS = 5.0


class Host:
    """A connection that host 0 has let in."""

    def __init__(self, port: int, worker: int) -> None:
        self.socket = socket.create_connection(("127.0.0.1", port), timeout=10)
        own = HostCredentials(Identity("run", 1, 3), RENDEZVOUS, SECRET)
        assert not isinstance(handshakes.perform_handshake(self.socket, own, worker, 10), handshakes.Refusal)
        self.socket.settimeout(20)
        self._unread = b""

    def arrive(self, name: str, payload: Any = None) -> None:
        self.socket.sendall(encode({"arrive": name, "payload": payload, "seconds": 60}))

    def read(self, kind: str) -> dict[str, Any]:
        while True:
            while b"\n" in self._unread:
                line, self._unread = self._unread.split(b"\n", 1)
                message: dict[str, Any] = json.loads(line)
                if kind in message:
                    return message
            data = self.socket.recv(1 << 20)
            assert data, "host 0 has closed the connection"
            self._unread += data


@pytest.fixture
def port() -> int:
    return free_port()


@pytest.fixture
def server(port: int) -> Iterator[RendezvousServer]:
    cluster = Cluster(0, ("127.0.0.1",) * 3, None, "run", 1, port, secret=SECRET)
    server = RendezvousServer(cluster, LOST_SECONDS)
    yield server
    server.close(0)


@pytest.fixture
def hosts(server: RendezvousServer, port: int) -> Iterator[list[Host]]:
    hosts = [Host(port, worker) for worker in range(3)]
    yield hosts
    for host in hosts:
        host.socket.close()


def test_a_host_that_reads_nothing_delays_no_other_and_is_lost(server: RendezvousServer, hosts: list[Host]) -> None:
    """Its process is stopped: its kernel answers, and its buffers fill up."""
    large = "x" * 3_900_000
    began = time.monotonic()
    for host in hosts:
        host.arrive("parts", [host.socket.fileno(), large])
    for host in hosts[1:]:
        assert [payload[1] == large for payload in host.read("complete")["payloads"]] == [True] * 3
    assert 0 in server._protocol.workers, "its time is not over: the others did not wait for it"
    for host in hosts[1:]:
        assert "host 0 is gone" in host.read("lost")["lost"]
    assert time.monotonic() - began < LOST_SECONDS + 10


def test_when_the_servers_thread_ends_all_hosts_notice_at_once(
    server: RendezvousServer, hosts: list[Host], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(server._protocol, "tick", Mock(side_effect=ZeroDivisionError("a bug")))
    began = time.monotonic()
    for host in hosts:
        while host.socket.recv(1 << 16):
            pass
    assert time.monotonic() - began < LOST_SECONDS
    assert "tpu-train: the rendezvous server failed: a bug" in capsys.readouterr().err


def test_an_error_closes_one_host(server: RendezvousServer, hosts: list[Host], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server._protocol.state, "set_phase", Mock(side_effect=ZeroDivisionError("a bug")))
    hosts[1].socket.sendall(encode({"phase": "x"}))
    for host in (hosts[0], hosts[2]):
        assert "host 1 is gone" in host.read("lost")["lost"]


def test_without_room_for_a_connection_the_oldest_pending_one_is_closed() -> None:
    pending, closed = ["first", "second"], []

    def accept() -> tuple[str, None]:
        if len(pending) > 1:
            raise OSError(errno.EMFILE, "too many open files")
        return "a host", None

    def close_oldest() -> bool:
        closed.append(pending.pop(0))
        return True

    assert handshakes.accept_connection(accept, close_oldest) == "a host"
    assert closed == ["first"]
    sleeps: list[float] = []
    pending = ["first", "second"]
    assert handshakes.accept_connection(accept, lambda: False, sleeps.append) is None
    assert sleeps, "it must not spin"


def test_several_hosts_without_a_secret_are_refused_in_one_line() -> None:
    cluster = Cluster(1, ("10.0.0.1", "10.0.0.2"))
    with pytest.raises(BadInput, match="TPU_LAUNCH_SECRET is not set: the 2 hosts") as refused:
        host_credentials(cluster, RENDEZVOUS)
    assert "openssl rand -hex 32" in str(refused.value)
    assert "\n" not in str(refused.value)
    assert host_credentials(Cluster(1, ("127.0.0.1", "localhost", "::1")), RENDEZVOUS).secret == b""


def test_a_short_secret_is_refused_and_no_message_shows_one() -> None:
    environment = {"TPU_WORKER_HOSTNAMES": "10.0.0.1,10.0.0.2", SECRET_VARIABLE: "short"}
    with pytest.raises(BadInput, match="5 characters; it must be random, with at least 16"):
        discover(environment)
    cluster = discover({**environment, SECRET_VARIABLE: f"{SECRET.decode()}\n"})
    assert cluster.secret == SECRET, "the end of a file's line does not count"
    assert SECRET.decode() not in repr((cluster, host_credentials(cluster, RENDEZVOUS)))


@pytest.mark.parametrize(
    ("last_words", "why_lost"),
    [
        (encode({"goodbye": 0, "reason": "", "overdue": False}), None),
        (b"", "host 1 is gone: its connection broke in phase 'connected'"),
    ],
)
def test_a_host_is_lost_unless_it_said_goodbye(last_words: bytes, why_lost: str | None) -> None:
    """Host 0 sends to a host that closed its connection after its last words: the socket got a reset."""
    received = [data for data in (last_words,) if data]
    reset: Any = Mock(send=Mock(side_effect=ConnectionResetError))
    reset.recv.side_effect = [*received, ConnectionResetError]
    cluster = Cluster(0, ("127.0.0.1", "127.0.0.1"), run_id="r", secret=SECRET)
    server = RendezvousServer(cluster, 4.0, Machine(network=Mock(), threads=Mock()))
    protocol = server._protocol
    assert protocol.state.connect(1, Identity("r", 0, 2), 0.0) is None
    protocol._workers[7], protocol._connections[1] = (1, LineBuffer(HOST_BYTES)), 7
    server._connections[7] = _Peer(7, reset)
    server._perform([(7, b"news\n")])
    assert server._connections == {}
    assert protocol.state.lost == why_lost
