"""Hosts meet and sum gradients on loopback, and learn in time if one is missing, lost, stuck, or of another attempt."""

import contextlib
import errno
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from typing import Any
from unittest.mock import Mock

import pytest

from tests.processes import ROOT, free_port, wait_until
from tests.training.test_protocol_fuzz import streams
from tests.training.test_server_protocol import OWN
from training.distributed import handshake as handshakes
from training.distributed.cluster import SECRET_VARIABLE, Cluster, discover
from training.distributed.handshake import Identity, host_credentials
from training.distributed.messages import HOST_BYTES, SERVER_BYTES, LineBuffer, encode
from training.distributed.rendezvous_server import RendezvousServer, _Peer
from training.distributed.server_protocol import _Sender
from training.distributed.tcp_allreduce import TcpAllReduce, raise_lost_peer
from training.errors import BadInput, Exit, LostPeer, TrainError
from training.machine import Machine

# A host: runs lines of Python, then exits as `tpu-train` does.
PROGRAM = """
import ctypes, functools, json, os, sys, threading, time
import numpy as np
from training.distributed import rendezvous
from training.distributed.tcp_allreduce import TcpAllReduce
from training.distributed.cluster import discover
from training.distributed.config import RendezvousSection
from training.errors import Exit, TrainError
from training.distributed.rendezvous import join
from training.distributed.shutdown import ShutdownRequest
code, why, meeting = 1, "", None
rendezvous.STOP_PATIENCE = rendezvous.WITHOUT_LOCK_SECONDS = 1.0
say = functools.partial(print, flush=True)
def meet(name, seconds=None):
    say(json.dumps(meeting.meet(name, {"from": os.environ["TPU_WORKER_ID"]}, seconds)))
def sleep(seconds):
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        meeting.check()
        time.sleep(0.01)
try:
    stopping = ShutdownRequest()
    if os.environ.get("ASKED"):
        threading.Timer(float(os.environ["ASKED"]), stopping.request).start()
    start = float(os.environ.get("START", "20"))
    meeting = join(discover(), stopping, RendezvousSection(start_seconds=start, seconds=20, lost_seconds=3))
    for line in sys.argv[1:]:
        exec(line)
    code = 0
except TrainError as error:
    code, why = error.exit_code, str(error)
    say("error:", error)
if meeting:
    meeting.close(code, why)
os._exit(code)
"""
OPEN, MEET, NOW, MEET_END = "say('open')", "meet('start')", "say('now')", "meet('end')"
CONNECT, HANG = "exchange = TcpAllReduce(discover(), meeting, 20)", "time.sleep(60)"
SUM = "say(exchange.sum(np.array([%s], np.float32)).tolist())"


class Hosts:
    """Starts hosts of one run, which meet on this machine."""

    def __init__(self) -> None:
        self.port, self.gloo_port = free_port(), free_port()
        self.started: list[subprocess.Popen[str]] = []

    def start(self, worker: int, hosts: int, *lines: str, **environment: str) -> subprocess.Popen[str]:
        addresses = {"TPU_WORKER_ID": str(worker), "TPU_WORKER_HOSTNAMES": ",".join(["127.0.0.1"] * hosts)}
        ports = {"TPU_LAUNCH_RENDEZVOUS_PORT": str(self.port), "TPU_LAUNCH_GLOO_PORT": str(self.gloo_port)}
        run = {**addresses, **ports, "TPU_LAUNCH_RUN_ID": "run", "PYTHONPATH": str(ROOT)}
        command, variables = [sys.executable, "-c", PROGRAM, *lines], {**os.environ, **run, **environment}
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=variables)
        self.started.append(process)
        return process


def end(process: subprocess.Popen[str], code: int = 0) -> str:
    """Waits for the end of a host, which must be with this exit code. Returns what it printed."""
    text, _ = process.communicate(timeout=60)
    assert process.returncode == code, text
    return text


def wait_for_line(process: subprocess.Popen[str], text: str) -> None:
    assert any(text in line for line in process.stdout), f"ended before it said {text!r}"


@pytest.fixture
def hosts() -> Iterator[Hosts]:
    hosts = Hosts()
    yield hosts
    for process in hosts.started:
        process.kill()
        process.wait()


def test_a_missing_host_is_named_with_its_last_phase(hosts: Hosts) -> None:
    waiting = [hosts.start(worker, 3, MEET, "meet('saved')", "meet('checkpoint 40', 3)") for worker in (0, 1)]
    save = "sleep(0.7)", "meeting.set_background_phase('saving')", "meet('saved')", "meeting.set_background_phase('')"
    hosts.start(2, 3, MEET, "meeting.set_phase('step 39')", *save, "sleep(30)")
    for process in waiting:
        text = end(process, Exit.LOST_PEER)
        assert "rendezvous 'checkpoint 40': not all hosts arrived within 3 s: host 2 was last heard of" in text
        assert "'step 39'" in text


def test_without_host_0_the_others_give_up(hosts: Hosts) -> None:
    text = end(hosts.start(1, 2, MEET, START="1"), Exit.LOST_PEER)
    assert f"host 0 (127.0.0.1:{hosts.port}) did not accept this host (worker 1) within 1 s" in text


@pytest.mark.parametrize(
    ("victim", "count", "before", "last", "victims_last"),
    [
        *((victim, 3, [], "sleep(30)", "sleep(30)") for victim in range(3)),
        (1, 2, [], HANG, "sleep(60)"),
        *((victim, 2, [CONNECT, SUM % 1], SUM % 1, HANG) for victim in range(2)),
    ],
    ids=["host 0", "host 1", "host 2", "of a stuck one", "host 0 in a sum", "host 1 in a sum"],
)
def test_a_killed_host_ends_all_others_at_once(
    hosts: Hosts, victim: int, count: int, before: list[str], last: str, victims_last: str
) -> None:
    lines = (MEET, *before, "meeting.set_phase('step 7')", "sleep(1.5)", NOW)
    ends = [victims_last if worker == victim else last for worker in range(count)]
    processes = [hosts.start(worker, count, *lines, ends[worker]) for worker in range(count)]
    for process in processes:
        wait_for_line(process, "now")
    processes.pop(victim).send_signal(signal.SIGKILL)
    killed = time.monotonic()
    for process in processes:
        text = end(process, Exit.LOST_PEER)
        assert time.monotonic() - killed < 10
        assert f"host {victim} is gone: its connection broke in phase 'step 7'" in text


def test_a_host_of_an_earlier_attempt_is_refused_and_disturbs_no_other(hosts: Hosts) -> None:
    first = hosts.start(0, 2, OPEN, MEET, MEET_END, TPU_LAUNCH_ATTEMPT="1")
    wait_for_line(first, "open")
    text = end(hosts.start(1, 2, MEET, TPU_LAUNCH_ATTEMPT="0"), Exit.FAILED)
    assert "host 0 is in attempt 1 of run 'run', this host in attempt 0" in text
    second = hosts.start(1, 2, MEET, MEET_END, TPU_LAUNCH_ATTEMPT="1")
    end(first)
    end(second)


def test_a_host_waits_while_an_old_attempt_still_holds_the_port(hosts: Hosts) -> None:
    old = hosts.start(0, 2, OPEN, "sleep(1)", "raise TrainError('over')", TPU_LAUNCH_ATTEMPT="0")
    wait_for_line(old, "open")
    early = hosts.start(1, 2, MEET, TPU_LAUNCH_ATTEMPT="1")
    end(old, Exit.FAILED)
    new = hosts.start(0, 2, MEET, TPU_LAUNCH_ATTEMPT="1")
    end(early)
    end(new)


def test_a_host_asked_to_stop_at_the_start_waits_for_others_only_briefly(hosts: Hosts) -> None:
    assert "waiting for host 0" in end(hosts.start(1, 2, MEET, ASKED="0.5"), Exit.SAVED)
    both = [hosts.start(worker, 3, MEET, ASKED="0.5") for worker in (0, 1)]
    for process in both:  # the third never comes; the first to leave ends the other
        assert "nothing is lost" in end(process, Exit.SAVED)


def test_a_port_in_use_is_named(hosts: Hosts) -> None:
    with socket.create_server(("127.0.0.1", hosts.port)):
        text = end(hosts.start(0, 2, MEET), Exit.FAILED)
    assert f"port {hosts.port} on 127.0.0.1 is in use" in text


@pytest.mark.parametrize("library", ["CDLL", "PyDLL"], ids=["releasing the lock", "holding the lock"])
@pytest.mark.parametrize("count", [1, 2])
def test_a_blocking_framework_ends_its_process_in_time_with_stack_traces(
    hosts: Hosts, count: int, library: str
) -> None:
    block = f"with meeting.limit('opening the devices', 1): ctypes.{library}(None).sleep(60)"
    lines = (MEET, "meeting.set_phase('loading the framework')", block)
    processes = [hosts.start(worker, count, *lines) for worker in range(count)]
    ended = [process.communicate(timeout=60)[0] for process in processes]
    codes = {process.returncode for process in processes}
    assert Exit.FAILED in codes, ended
    assert codes <= {Exit.FAILED, Exit.LOST_PEER}, ended  # the first to leave ends the other
    stacks = [text for text in ended if "most recent call first" in text]
    assert stacks, ended
    if library == "CDLL":
        assert any("opening the devices took longer than 1 s" in text and "doctor --devices" in text for text in stacks)
        assert count == 1 or any("loading the framework" in text for text in stacks)


@pytest.mark.parametrize(("numbers", "total"), [((1e8, 1.0, -1e8), 0.0), ((1e8, -1e8, 1.0), 1.0)])
def test_all_hosts_sum_and_meet_in_worker_order(hosts: Hosts, numbers: tuple[float, ...], total: float) -> None:
    """In single precision 1e8 + 1 is 1e8: the order shows."""
    processes = []
    for worker, number in reversed(list(enumerate(numbers))):
        processes.append(hosts.start(worker, 3, *(CONNECT, SUM % f"{number}, {worker}, 2.5", SUM % 1, MEET_END)))
    payloads = [{"from": str(worker)} for worker in range(3)]
    for process in processes:
        assert [json.loads(line) for line in end(process).splitlines()] == [[total, 3, 7.5], [3], payloads]


def test_another_host_0_at_the_gradient_exchange_is_a_lost_peer_and_short_memory_is_none() -> None:
    gone = {"connect_hosts.side_effect": TrainError("refused"), "check.side_effect": LostPeer("host 0 is gone")}
    with pytest.raises(LostPeer, match="host 0 is gone"):
        TcpAllReduce(Cluster(1, ("127.0.0.1", "127.0.0.1")), Mock(**gone), 5)
    with pytest.raises(RuntimeError, match="out of HBM"):
        raise_lost_peer(Mock(), "adding up gradients", RuntimeError("RESOURCE_EXHAUSTED: out of HBM"))


LOST_SECONDS = 5.0
TWO = Cluster(0, ("127.0.0.1",) * 2, run_id="r", secret=OWN.secret)


class Host:
    """A connection that host 0 has let in."""

    def __init__(self, port: int, worker: int, exchange: bool = False) -> None:
        self.socket = socket.create_connection(("127.0.0.1", port), timeout=10)
        own = replace(OWN, identity=replace(OWN.identity, exchange=exchange))
        self._lines = handshakes.perform_handshake(self.socket, own, worker, 10)
        assert isinstance(self._lines, LineBuffer)
        self._lines.limit = SERVER_BYTES
        self.socket.settimeout(20)

    def send(self, **message: Any) -> None:
        self.socket.sendall(encode(message))

    def read(self) -> dict[str, Any]:
        """Returns the next message that is no news."""
        data = b""
        while True:
            for line in self._lines.feed(data):
                if "news" not in (message := json.loads(line)):
                    return message
            data = self.socket.recv(1 << 20)
            assert data, "host 0 has closed the connection"


@pytest.fixture
def port() -> int:
    return free_port()


@pytest.fixture
def server(port: int) -> Iterator[RendezvousServer]:
    server = RendezvousServer(Cluster(0, ("127.0.0.1",) * 3, None, "run", 1, port, secret=OWN.secret), LOST_SECONDS)
    yield server
    server.close(0)


@pytest.fixture
def peers(server: RendezvousServer, port: int) -> Iterator[list[Host]]:
    peers = [Host(port, worker) for worker in range(3)]
    yield peers
    for host in peers:
        host.socket.close()


def test_a_host_that_reads_nothing_delays_no_other_and_is_lost(server: RendezvousServer, peers: list[Host]) -> None:
    """Its process is stopped: its kernel answers, and its buffers fill up."""
    large = "x" * 3_900_000
    began = time.monotonic()
    for host in peers:
        host.send(arrive="parts", payload=[host.socket.fileno(), large], seconds=60)
    for host in peers[1:]:
        assert [payload[1] == large for payload in host.read()["payloads"]] == [True] * 3
    assert 0 in server._protocol.workers, "its time is not over: the others did not wait for it"
    for host in peers[1:]:
        assert "host 0 is gone" in host.read()["lost"]
    assert time.monotonic() - began < LOST_SECONDS + 10


def test_when_the_servers_thread_ends_all_hosts_notice_at_once(
    server: RendezvousServer, peers: list[Host], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(server._protocol, "tick", Mock(side_effect=ZeroDivisionError("a bug")))
    began = time.monotonic()
    for host in peers:
        while host.socket.recv(1 << 16):
            pass
    assert time.monotonic() - began < LOST_SECONDS
    assert "tpu-train: the rendezvous server failed: a bug" in capsys.readouterr().err


def test_an_error_closes_one_host(server: RendezvousServer, peers: list[Host], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server._protocol.state, "set_phase", Mock(side_effect=ZeroDivisionError("a bug")))
    peers[1].send(phase="x")
    for host in (peers[0], peers[2]):
        assert "host 1 is gone" in host.read()["lost"]


def test_without_room_for_a_connection_the_oldest_pending_one_is_closed() -> None:
    machine = Machine(network=Mock(), threads=Mock(), clock=Mock(monotonic=Mock(return_value=0.0)))
    sockets = [Mock(send=len), Mock(send=len)]
    full = OSError(errno.EMFILE, "too many open files")
    server = RendezvousServer(TWO, 4.0, machine)
    server._listener.accept.side_effect = [*((socket, None) for socket in sockets), *[full] * 3]
    for place in range(2):
        server._accept()
        assert [socket.close.called for socket in sockets] == [True] * (place + 1) + [False] * (1 - place)
    machine.clock.sleep.assert_not_called()
    server._accept()
    machine.clock.sleep.assert_called_once()  # it must not spin


def test_unknown_peers_leak_nothing_and_keep_no_host_out(
    server: RendezvousServer, peers: list[Host], port: int
) -> None:
    files, strangers = len(os.listdir("/proc/self/fd")), list[socket.socket]()
    for number, stream in enumerate(streams(5, 1000)):
        stranger = socket.create_connection(("127.0.0.1", port), timeout=10)
        with contextlib.suppress(OSError):  # host 0 has closed it
            stranger.sendall(stream)
            if number % 3 == 0:  # a reset instead of an end
                stranger.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")
        strangers.append(stranger)
        if number % 5:
            strangers.pop(0).close()
    exchange = [Host(port, worker, exchange=True).socket for worker in (1, 1, 2)]  # the first broke, and came back
    taken = server.take_exchange(10)
    for host, own_end in zip(exchange[1:], taken, strict=True):
        host.sendall(b"gradients")
        assert own_end.recv(9) == b"gradients"
    for peer in peers:
        peer.send(arrive="start", payload=None, seconds=10)
    assert [peer.read()["payloads"] for peer in peers] == [[None] * 3] * 3
    for connection in (*exchange, *taken, *strangers):
        connection.close()
    wait_until(lambda: len(os.listdir("/proc/self/fd")) <= files)


def test_several_hosts_without_a_secret_are_refused_in_one_line() -> None:
    cluster = Cluster(1, ("10.0.0.1", "10.0.0.2"))
    with pytest.raises(BadInput, match="TPU_LAUNCH_SECRET is not set: the 2 hosts") as refused:
        host_credentials(cluster)
    assert "openssl rand -hex 32" in str(refused.value)
    assert "\n" not in str(refused.value)
    assert host_credentials(Cluster(1, ("127.0.0.1", "localhost", "::1"))).secret == b""


def test_a_short_secret_is_refused_and_no_message_shows_one() -> None:
    environment = {"TPU_WORKER_HOSTNAMES": "10.0.0.1,10.0.0.2", SECRET_VARIABLE: "short"}
    with pytest.raises(BadInput, match="5 characters; it must be random, with at least 16"):
        discover(environment)
    cluster = discover({**environment, SECRET_VARIABLE: f"{OWN.secret.decode()}\n"})
    assert cluster.secret == OWN.secret, "the end of a file's line does not count"
    assert OWN.secret.decode() not in repr((cluster, host_credentials(cluster)))


@pytest.mark.parametrize(
    ("goodbye", "lost"),
    [
        ((0, ""), None),
        ((2, "bad record"), "host 1 stopped in phase 'connected' with exit code 2: bad record"),
        (None, "host 1 is gone: its connection broke in phase 'connected'"),
    ],
)
def test_a_host_is_lost_unless_it_said_a_good_goodbye(goodbye: tuple[int, str] | None, lost: str | None) -> None:
    """Host 0 sends to a host that closed its connection after its last words: the socket got a reset."""
    received = [encode({"goodbye": goodbye[0], "reason": goodbye[1], "overdue": False})] if goodbye else []
    reset: Any = Mock(send=Mock(side_effect=ConnectionResetError))
    reset.recv.side_effect = [*received, ConnectionResetError]
    server = RendezvousServer(TWO, 4.0, Machine(network=Mock(), threads=Mock()))
    protocol, peer = server._protocol, _Peer(reset)
    assert protocol.state.connect(1, Identity("r", 0, 2), 0.0) is None
    protocol._peers[peer], protocol._connections[1] = _Sender(LineBuffer(HOST_BYTES), "", 0.0, worker=1), peer
    server._connections[peer] = None
    server._perform([(peer, b"news\n")])
    assert server._connections == {}
    assert protocol.state.lost == lost
