"""Sums across hosts over TCP: in worker order, with the same bits on all hosts, and a quick end when a host is lost."""

import json
import signal
import socket
import time

import pytest

from tests.training.host_processes import Hosts, end, free_port, wait_for_line
from training.distributed.barrier_state import Identity
from training.distributed.connection import perform_handshake
from training.distributed.handshake import GRADIENT_EXCHANGE, HANDSHAKE_SECONDS, HostCredentials
from training.distributed.messages import Malformed
from training.errors import Exit


@pytest.fixture
def port() -> str:
    return str(free_port())


@pytest.mark.parametrize(("numbers", "total"), [((1e8, 1.0, -1e8), 0.0), ((1e8, -1e8, 1.0), 1.0)])
def test_the_sum_is_in_worker_order_and_the_same_on_all_hosts(
    hosts: Hosts, port: str, numbers: tuple[float, ...], total: float
) -> None:
    """In single precision 1e8 + 1 is 1e8: the order shows."""
    processes = []
    for worker, number in reversed(list(enumerate(numbers))):
        lines = ("connect", f"sum [{number}, {worker}, 2.5]", "sum [1]", "meet end")
        processes.append(hosts.start(worker, 3, *lines, TPU_LAUNCH_GLOO_PORT=port))
    for process in processes:
        code, text = end(process)
        assert code == 0, text
        assert [json.loads(line) for line in text.splitlines()[:2]] == [[total, 3, 7.5], [3]]


@pytest.mark.parametrize("victim", [0, 1])
def test_a_host_that_dies_in_a_sum_is_named_by_the_others_at_once(hosts: Hosts, port: str, victim: int) -> None:
    lines = ("connect", "phase step 7", "sum [1]", "sleep 1.5", "say now")
    processes = [
        hosts.start(worker, 2, *lines, "hang 60" if worker == victim else "sum [1]", TPU_LAUNCH_GLOO_PORT=port)
        for worker in (0, 1)
    ]
    for process in processes:
        wait_for_line(process, "now")
    processes[victim].send_signal(signal.SIGKILL)
    killed = time.monotonic()
    code, text = end(processes[1 - victim])
    assert time.monotonic() - killed < 4
    assert (code, f"host {victim} is gone: its connection broke in phase 'step 7'" in text) == (Exit.LOST_PEER, True), (
        text
    )


def test_unknown_peers_are_not_added_and_delay_no_host(hosts: Hosts, port: str) -> None:
    """Some send nothing, some send noise, and one claims to be worker 1 without the secret."""
    environment = {"TPU_LAUNCH_GLOO_PORT": port, "TPU_LAUNCH_SECRET": "a secret of this attempt"}
    first = hosts.start(0, 2, "say open", "connect", "sum [1]", **environment)
    wait_for_line(first, "open")
    peers = [connect(int(port)) for _ in range(20)]
    for number, peer in enumerate(peers):
        if number % 2:
            peer.sendall(b"another token!!!" + b"\1\0\0\0")
    own = HostCredentials(Identity("run", 0, 2), GRADIENT_EXCHANGE, b"not the secret of this attempt")
    with connect(int(port)) as impostor, pytest.raises((OSError, Malformed)):
        perform_handshake(impostor, own, 1, 3.0)
    began = time.monotonic()
    second = hosts.start(1, 2, "connect", "sum [2]", **environment)
    for process in (first, second):
        code, text = end(process)
        assert (code, json.loads(text.splitlines()[-1])) == (0, [3]), text
    assert time.monotonic() - began < HANDSHAKE_SECONDS
    for peer in peers:
        peer.close()


def connect(port: int) -> socket.socket:
    """Returns a connection, once a process listens."""
    deadline = time.monotonic() + 20
    while True:
        try:
            return socket.create_connection(("127.0.0.1", port), timeout=5)
        except OSError:
            assert time.monotonic() < deadline
            time.sleep(0.1)
