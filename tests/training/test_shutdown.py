"""A first signal is a request, as are more SIGTERMs in the time to save; a second Ctrl-C ends even a stuck process."""

import signal
import subprocess
import sys
import time
from typing import Any
from unittest.mock import Mock

import pytest

from tests.training.manual_clock import ManualClock
from training.distributed.shutdown import ShutdownRequest
from training.machine import Machine

PROGRAM = """
import os, sys, time
from training.distributed import shutdown
request = shutdown.install_signal_handlers()
print("ready", flush=True)
while not request.requested:
    time.sleep(0.01)
print("asked", flush=True)
{then}
print("saved", flush=True)
os._exit(75)
"""
# A main thread that never comes back to Python code, as in a collective whose peer is gone.
STUCK = "import socket; a, b = socket.socketpair(); a.recv(1)"


def start(then: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-c", PROGRAM.format(then=then)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert process.stdout.readline() == "ready\n"
    return process


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_the_first_signal_lets_the_work_finish(number: signal.Signals) -> None:
    process = start("")
    process.send_signal(number)
    out, err = process.communicate(timeout=10)
    assert (process.returncode, out) == (75, "asked\nsaved\n")
    assert "save and leave" in err


@pytest.mark.parametrize("then", ["time.sleep(60)", STUCK])
def test_a_second_ctrl_c_ends_even_a_hanging_process(then: str) -> None:
    process = start(then)
    process.send_signal(signal.SIGINT)
    assert process.stdout.readline() == "asked\n"
    began = time.monotonic()
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=50)
    assert process.returncode == 128 + signal.SIGINT
    assert time.monotonic() - began < 20
    assert "without saving" in err


@pytest.mark.parametrize(("limit", "one_request"), [(None, 30.0), (25.0, 30.0), (600.0, 600.0)])
def test_a_sigterm_after_the_time_to_save_ends_at_once(limit: float | None, one_request: float, capsys: Any) -> None:
    clock = ManualClock()
    request = ShutdownRequest(Machine(clock=clock, threads=Mock(), exit=sys.exit))
    if limit:
        request.limit(limit, lambda: None)
    request.request(signal.SIGTERM)
    clock.seconds += one_request - 0.1
    request.request(signal.SIGTERM)
    assert request.requested
    assert "this host saves first" in capsys.readouterr().err
    clock.seconds += 0.2
    with pytest.raises(SystemExit, match="143"):
        request.request(signal.SIGTERM)


def test_a_signal_after_another_hosts_request_is_the_first_and_two_ctrl_c_after_it_end_the_process() -> None:
    request = ShutdownRequest(Machine(exit=sys.exit))
    request.note_other_host()
    request.request(signal.SIGTERM)
    request.request(signal.SIGINT)
    assert request.requested
    with pytest.raises(SystemExit, match="130"):
        request.request(signal.SIGINT)
