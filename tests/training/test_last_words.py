"""A host that says goodbye and closes its connection is not lost, even if host 0 is just sending to it."""

from types import SimpleNamespace
from typing import Any

from training.distributed.barrier_state import Identity
from training.distributed.cluster import Cluster
from training.distributed.messages import HOST_BYTES, LineBuffer, encode
from training.distributed.rendezvous_server import RendezvousServer, _Peer
from training.machine import Machine


class Reset:
    """A socket that got a reset after the peer's last message."""

    def __init__(self, received: bytes) -> None:
        self.received = received

    def send(self, data: Any) -> int:
        raise ConnectionResetError

    def recv(self, size: int) -> bytes:
        data, self.received = self.received, b""
        if not data:
            raise ConnectionResetError
        return data

    def close(self) -> None:
        pass


class Idle:
    """A listener, a selector, and a thread that does nothing."""

    def __getattr__(self, name: str) -> Any:
        return lambda *args, **keywords: None


def serve(last_words: bytes) -> str | None:
    """Sends from host 0 to a host that closed its connection after `last_words`. Returns why the attempt is lost."""
    network = SimpleNamespace(listen=lambda *_: Idle(), selector=Idle)
    threads = SimpleNamespace(event=Idle, start=lambda *_, **__: Idle())
    cluster = Cluster(0, ("127.0.0.1", "127.0.0.1"), run_id="r", secret=b"0123456789abcdef")
    server = RendezvousServer(cluster, 4.0, Machine(network=network, threads=threads))  # type: ignore[arg-type]
    protocol = server._protocol
    assert protocol.state.connect(1, Identity("r", 0, 2), 0.0) is None
    protocol._workers[7], protocol._connections[1] = (1, LineBuffer(HOST_BYTES)), 7
    server._connections[7] = _Peer(7, Reset(last_words))
    server._perform([(7, b"news\n")])
    assert server._connections == {}
    return protocol.state.lost


def test_a_host_that_said_goodbye_is_not_lost() -> None:
    assert serve(encode({"goodbye": 0, "reason": "", "overdue": False})) is None


def test_a_host_without_a_goodbye_is_lost() -> None:
    assert serve(b"") == "host 1 is gone: its connection broke in phase 'connected'"
