"""Sums across hosts over TCP: in worker order, with the same bits on all hosts, and a quick end when a host is lost."""

import json
import signal
import time

import pytest

from tests.training.host_processes import Hosts, end, free_port, wait_for_line
from training.errors import Exit


@pytest.fixture
def port() -> str:
    return str(free_port())


@pytest.mark.parametrize(("numbers", "total"), [((1e8, 1.0, -1e8), 0.0), ((1e8, -1e8, 1.0), 1.0)])
def test_all_hosts_sum_in_worker_order(hosts: Hosts, port: str, numbers: tuple[float, ...], total: float) -> None:
    """In single precision 1e8 + 1 is 1e8: the order shows."""
    processes = []
    for worker, number in reversed(list(enumerate(numbers))):
        lines = ("connect", f"sum [{number}, {worker}, 2.5]", "sum [1]", "meet end")
        processes.append(hosts.start(worker, 3, *lines, TPU_LAUNCH_GLOO_PORT=port))
    for process in processes:
        assert [json.loads(line) for line in end(process).splitlines()[:2]] == [[total, 3, 7.5], [3]]


@pytest.mark.parametrize("victim", [0, 1])
def test_a_host_that_dies_in_a_sum_is_named_by_the_others_at_once(hosts: Hosts, port: str, victim: int) -> None:
    lines = ("connect", "phase step 7", "sum [1]", "sleep 1.5", "say now")
    last = ["hang 60" if worker == victim else "sum [1]" for worker in (0, 1)]
    processes = [hosts.start(worker, 2, *lines, last[worker], TPU_LAUNCH_GLOO_PORT=port) for worker in (0, 1)]
    for process in processes:
        wait_for_line(process, "now")
    processes[victim].send_signal(signal.SIGKILL)
    killed = time.monotonic()
    text = end(processes[1 - victim], Exit.LOST_PEER)
    assert time.monotonic() - killed < 20
    assert f"host {victim} is gone: its connection broke in phase 'step 7'" in text
