"""Hosts as small processes on loopback, for the tests of the rendezvous and of the gradient exchange."""

import os
import socket
import subprocess
import sys

from tests.processes import ROOT

# A host: does what its arguments say, then exits as `tpu-train` does.
PROGRAM = """
import ctypes, json, os, sys, threading, time
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
try:
    stopping = ShutdownRequest()
    if os.environ.get("ASKED"):
        threading.Timer(float(os.environ["ASKED"]), stopping.request).start()
    start, seconds = (float(os.environ.get(name, "20")) for name in ("START", "WAIT"))
    meeting = join(discover(), stopping, RendezvousSection(start_seconds=start, seconds=seconds, lost_seconds=3))
    for line in sys.argv[1:]:
        what, _, rest = line.partition(" ")
        if what == "meet":
            print(json.dumps(meeting.meet(rest, {"from": os.environ["TPU_WORKER_ID"]})), flush=True)
        elif what == "phase":
            meeting.set_phase(rest)
        elif what == "say":
            print(rest, flush=True)
        elif what == "sleep":
            deadline = time.monotonic() + float(rest)
            while time.monotonic() < deadline:
                meeting.check()
                time.sleep(0.01)
        elif what == "hang":
            time.sleep(float(rest))
        elif what == "limit":
            limit, held = rest.split()
            meeting.set_phase("loading the framework")
            with meeting.limit("opening the devices", float(limit)):
                (ctypes.PyDLL if held == "holding" else ctypes.CDLL)(None).sleep(60)  # PyDLL keeps the GIL
        elif what == "fail":
            raise TrainError(rest)
        elif what == "connect":
            exchange = TcpAllReduce(discover(), meeting, 20)
        elif what == "sum":
            print(json.dumps(exchange.sum(np.array(json.loads(rest), np.float32)).tolist()), flush=True)
    code = 0
except TrainError as error:
    code, why = error.exit_code, str(error)
    print("error:", error, flush=True)
if meeting:
    meeting.close(code, why)
os._exit(code)
"""


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        return probe.getsockname()[1]


class Hosts:
    """Starts hosts of one run, which meet on this machine."""

    def __init__(self) -> None:
        self.port = free_port()
        self.started: list[subprocess.Popen[str]] = []

    def start(self, worker: int, hosts: int, *lines: str, **environment: str) -> subprocess.Popen[str]:
        addresses = {"TPU_WORKER_ID": str(worker), "TPU_WORKER_HOSTNAMES": ",".join(["127.0.0.1"] * hosts)}
        run = {"TPU_LAUNCH_RENDEZVOUS_PORT": str(self.port), "TPU_LAUNCH_RUN_ID": "run", "PYTHONPATH": str(ROOT)}
        command, variables = [sys.executable, "-c", PROGRAM, *lines], {**os.environ, **addresses, **run, **environment}
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=variables)
        self.started.append(process)
        return process

    def close(self) -> None:
        for process in self.started:
            process.kill()
            process.wait()


def end(process: subprocess.Popen[str], code: int = 0, seconds: float = 20) -> str:
    """Waits for the end of a host, which must be with this exit code. Returns what it printed."""
    text, _ = process.communicate(timeout=seconds)
    assert process.returncode == code, text
    return text


def wait_for_line(process: subprocess.Popen[str], text: str) -> None:
    for line in process.stdout:
        if text in line:
            return
    raise AssertionError(f"ended before it said {text!r}")
