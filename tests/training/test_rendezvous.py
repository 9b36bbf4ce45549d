"""Hosts meet and sum gradients on loopback, and learn in time if one is missing, lost, stuck, or of another attempt."""

import json
import signal
import socket
import time

import pytest

from tests.training.host_processes import Hosts, end, free_port, wait_for_line
from training.errors import Exit


def test_all_hosts_get_all_payloads_in_worker_order(hosts: Hosts) -> None:
    late = [hosts.start(worker, 3, "meet start", "meet end") for worker in (2, 1)]
    time.sleep(0.5)
    for process in (hosts.start(0, 3, "meet start", "meet end"), *late):
        lines = end(process).splitlines()
        assert [json.loads(line) for line in lines] == [[{"from": str(worker)} for worker in range(3)]] * 2


def test_a_missing_host_is_named_with_its_last_phase(hosts: Hosts) -> None:
    waiting = [hosts.start(worker, 3, "meet start", "meet checkpoint 40", WAIT="2") for worker in (0, 1)]
    hosts.start(2, 3, "meet start", "phase step 39", "sleep 30")
    for process in waiting:
        text = end(process, Exit.LOST_PEER)
        assert "rendezvous 'checkpoint 40': not all hosts arrived within 2 s: host 2 was last heard of" in text
        assert "'step 39'" in text


def test_without_host_0_the_others_give_up(hosts: Hosts) -> None:
    text = end(hosts.start(1, 2, "meet start", START="1"), Exit.LOST_PEER)
    assert f"host 0 (127.0.0.1:{hosts.port}) did not accept this host (worker 1) within 1 s" in text


@pytest.mark.parametrize("victim", [0, 1, 2])
def test_a_killed_host_ends_all_others_at_once(hosts: Hosts, victim: int) -> None:
    lines = ("meet start", "phase step 7", "say here", "sleep 1.5", "say now", "sleep 30")
    processes = [hosts.start(worker, 3, *lines) for worker in range(3)]
    for process in processes:
        wait_for_line(process, "now")
    processes[victim].send_signal(signal.SIGKILL)
    killed = time.monotonic()
    for worker, process in enumerate(processes):
        if worker != victim:
            text = end(process, Exit.LOST_PEER)
            assert time.monotonic() - killed < 10
            assert f"host {victim} is gone: its connection broke in phase 'step 7'" in text


def test_a_stuck_host_is_ended_when_a_peer_dies(hosts: Hosts) -> None:
    stuck = hosts.start(0, 2, "meet start", "say now", "hang 60")
    other = hosts.start(1, 2, "meet start", "say now", "sleep 60")
    wait_for_line(stuck, "now")
    wait_for_line(other, "now")
    other.kill()
    assert "host 1 is gone" in end(stuck, Exit.LOST_PEER, 10)


def test_a_host_of_an_earlier_attempt_is_refused_and_disturbs_no_other(hosts: Hosts) -> None:
    first = hosts.start(0, 2, "say open", "meet start", "meet end", TPU_LAUNCH_ATTEMPT="1")
    wait_for_line(first, "open")
    text = end(hosts.start(1, 2, "meet start", TPU_LAUNCH_ATTEMPT="0"), Exit.FAILED)
    assert "host 0 is in attempt 1 of run 'run', this host in attempt 0" in text
    second = hosts.start(1, 2, "meet start", "meet end", TPU_LAUNCH_ATTEMPT="1")
    end(first)
    end(second)


def test_a_host_waits_while_an_old_attempt_still_holds_the_port(hosts: Hosts) -> None:
    old = hosts.start(0, 2, "say open", "sleep 1", "fail over", TPU_LAUNCH_ATTEMPT="0")
    wait_for_line(old, "open")
    early = hosts.start(1, 2, "meet start", TPU_LAUNCH_ATTEMPT="1")
    end(old, Exit.FAILED)
    new = hosts.start(0, 2, "meet start", TPU_LAUNCH_ATTEMPT="1")
    end(early)
    end(new)


def test_a_host_asked_to_stop_at_the_start_waits_for_others_only_briefly(hosts: Hosts) -> None:
    assert "waiting for host 0" in end(hosts.start(1, 2, "meet start", ASKED="0.5"), Exit.SAVED)
    both = [hosts.start(worker, 3, "meet start", ASKED="0.5") for worker in (0, 1)]
    for process in both:  # the third never comes; the first to leave ends the other
        assert "nothing is lost" in end(process, Exit.SAVED)


def test_a_port_in_use_is_named(hosts: Hosts) -> None:
    with socket.create_server(("127.0.0.1", hosts.port)):
        text = end(hosts.start(0, 2, "meet start"), Exit.FAILED)
    assert f"port {hosts.port} on 127.0.0.1 is in use" in text


@pytest.mark.parametrize("lock", ["releasing", "holding"])
@pytest.mark.parametrize("count", [1, 2])
def test_a_blocking_framework_ends_its_process_in_time_with_stack_traces(hosts: Hosts, count: int, lock: str) -> None:
    processes = [hosts.start(worker, count, "meet start", f"limit 1 {lock}") for worker in range(count)]
    ended = [process.communicate(timeout=20)[0] for process in processes]
    codes = {process.returncode for process in processes}
    assert Exit.FAILED in codes, ended
    assert codes <= {Exit.FAILED, Exit.LOST_PEER}, ended  # the first to leave ends the other
    stacks = [text for text in ended if "most recent call first" in text]
    assert stacks, ended
    if lock == "releasing":
        assert any("opening the devices took longer than 1 s" in text and "doctor --devices" in text for text in stacks)
        assert count == 1 or any("loading the framework" in text for text in stacks)


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
