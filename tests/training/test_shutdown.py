"""A first SIGTERM is a request, a second one the end, whatever the main thread is doing. Starts small processes."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

HOUSE = Path(__file__).resolve().parents[2]

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
    process = subprocess.Popen(
        [sys.executable, "-c", PROGRAM.format(then=then)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": str(HOUSE)},
    )
    assert process.stdout
    assert process.stdout.readline() == "ready\n"
    return process


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_request_is_noted_and_the_work_is_finished(number: signal.Signals) -> None:
    process = start("")
    process.send_signal(number)
    out, err = process.communicate(timeout=10)
    assert (process.returncode, out) == (75, "asked\nsaved\n")
    assert "save and leave" in err


@pytest.mark.parametrize("then", ["time.sleep(60)", STUCK])
def test_a_second_request_ends_even_a_process_that_hangs(then: str) -> None:
    process = start(then)
    process.send_signal(signal.SIGTERM)
    assert process.stdout
    assert process.stdout.readline() == "asked\n"
    began = time.monotonic()
    process.send_signal(signal.SIGTERM)
    _, err = process.communicate(timeout=10)
    assert process.returncode == 128 + signal.SIGTERM
    assert time.monotonic() - began < 2
    assert "without saving" in err


def test_a_signal_after_another_hosts_is_still_a_first_one() -> None:
    ended = subprocess.run(
        [sys.executable, "-c", HEARD],
        capture_output=True,
        text=True,
        timeout=60,
        env={**os.environ, "PYTHONPATH": str(HOUSE)},
    )
    assert (ended.returncode, ended.stdout) == (75, "heard\nsaved\n")


HEARD = """
import os, signal, time
from training.distributed import shutdown
request = shutdown.install_signal_handlers()
request.note_other_host()
print("heard" if request.requested else "not", flush=True)
os.kill(os.getpid(), signal.SIGTERM)
time.sleep(0.5)
print("saved", flush=True)
os._exit(75)
"""
