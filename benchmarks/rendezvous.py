"""Measures the cost of a rendezvous of 512 hosts for host 0: its CPU time, and the bytes that it sends.

    make benchmark NAME=rendezvous [ARGS="--json --hosts 512 --meetings 50"]

Host 0 is this process, with the server's thread and its own client as in training. The other hosts are connections of
another process over loopback, each of which has passed the handshake, and sends what a host's client sends: its
phase, a new one each time, and its arrival. The CPU time is that of this whole process, the kernel's part for its
sockets included; on loopback that includes the receivers' part of TCP.

  barrier       no host sends a payload, as at the end of a step's save: the answer is a null for each, 3 KB
  checkpoint    every host reports its part of a checkpoint: the answer holds all of them, about 40 KB
  news          the phases of all hosts, sent to each of them once a second, where every host has another phase
  handshake     all hosts connect and are accepted

The peer is the goal, or the bytes of an earlier protocol, which sent every host the phases of all others one by one.
"""

from __future__ import annotations

import argparse
import multiprocessing
import resource
import secrets
import selectors
import socket
import sys
import time
from dataclasses import replace
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.peers.rows import Row, finish, row
from training.distributed.cluster import Cluster
from training.distributed.config import RendezvousSection
from training.distributed.handshake import host_credentials, perform_handshake
from training.distributed.messages import encode
from training.distributed.rendezvous import join
from training.distributed.server_protocol import NEWS_SECONDS
from training.distributed.shutdown import ShutdownRequest

GOAL_MS = 50.0
BEFORE_MB = 12.6


class Crowd:
    """The connections of all hosts but host 0."""

    def __init__(self, cluster: Cluster) -> None:
        own = host_credentials(cluster)
        self._hosts: list[socket.socket] = []
        self._selector = selectors.DefaultSelector()
        for worker in range(1, cluster.hosts):
            host = socket.create_connection((cluster.addresses[0], cluster.rendezvous_port), timeout=60)
            host.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            perform_handshake(host, own, worker, 60)
            self._hosts.append(host)
            self._selector.register(host, selectors.EVENT_READ)

    def report(self, phase: str) -> None:
        """Reports a different phase from every host."""
        for worker, host in enumerate(self._hosts, 1):
            host.sendall(encode({"phase": f"{phase} {worker}"}))

    def meet(self, name: str, payload: bool) -> int:
        """Lets all hosts arrive at a barrier and read its answer. Returns how many bytes they received."""
        for worker, host in enumerate(self._hosts, 1):
            part = {"name": f"part-{worker:05d}.safetensors", "size": 10**9, "crc32c": worker} if payload else None
            phase = {"phase": f"saving {name}: waiting for all parts"}
            host.sendall(encode(phase) + encode({"arrive": name, "payload": part, "seconds": 60}))
        return self.read(b'"%s"' % name.encode())

    def read(self, text: bytes) -> int:
        """Reads until every host has seen `text` and the end of its line. Returns how many bytes that were."""
        received = 0
        waiting = dict.fromkeys(self._hosts, b"")
        while waiting:
            for key, _ in self._selector.select(60):
                host: Any = key.fileobj
                data = host.recv(1 << 20)
                assert data, "host 0 has closed a connection"
                received += len(data)
                if host in waiting:
                    waiting[host] += data
                    place = waiting[host].find(text)
                    if place >= 0 and b"\n" in waiting[host][place:]:
                        del waiting[host]
        return received


def crowd(cluster: Cluster, orders: Connection) -> None:
    """Runs the process of all hosts but host 0: executes the orders of the measuring process."""
    allow_many_connections()
    hosts = Crowd(cluster)
    orders.send("in")
    while order := orders.recv():
        verb, *arguments = order
        orders.send(getattr(hosts, verb)(*arguments))


def allow_many_connections() -> None:
    """Raises the limit of open files, as a container engine does."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def measure(hosts: int, meetings: int) -> dict[str, float]:
    """Returns the CPU milliseconds of host 0 and the megabytes received by the others, for each kind of meeting."""
    allow_many_connections()
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port: int = probe.getsockname()[1]
    addresses = ("127.0.0.1",) * hosts
    cluster = Cluster(0, addresses, None, "benchmark", 0, port, secret=secrets.token_hex(32).encode())
    orders, theirs = multiprocessing.Pipe()
    began = time.process_time()
    rendezvous = join(cluster, ShutdownRequest(), RendezvousSection(start_seconds=60, seconds=60, lost_seconds=30))
    process = multiprocessing.get_context("spawn").Process(target=crowd, args=(replace(cluster, worker=1), theirs))
    process.start()
    orders.recv()
    results = {"handshake": 1e3 * (time.process_time() - began)}
    for kind in ("barrier", "checkpoint"):
        received = 0.0
        spent = []
        for number in range(meetings):
            name, payload = f"{kind} {number}", {"name": "part-00000.safetensors", "size": 10**9, "crc32c": 0}
            began = time.process_time()
            orders.send(("meet", name, kind == "checkpoint"))
            rendezvous.meet(name, payload if kind == "checkpoint" else None)
            received += orders.recv()
            spent.append(1e3 * (time.process_time() - began))
        results[f"{kind} median"] = sorted(spent)[len(spent) // 2]
        results[f"{kind} worst"] = max(spent)
        results[f"{kind} MB"] = received / meetings / 1e6
    time.sleep(2 * NEWS_SECONDS)
    orders.send(("report", "doing something of its own,"))
    orders.recv()
    began = time.process_time()
    orders.send(("read", b"doing something of its own"))
    results["news MB"] = orders.recv() / 1e6
    results["news"] = 1e3 * (time.process_time() - began)
    rendezvous.close(0)
    process.kill()
    process.join()
    return results


def main() -> None:
    """Measures, and prints the rows."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of a table")
    parser.add_argument("--hosts", type=int, default=512)
    parser.add_argument("--meetings", type=int, default=50)
    options = parser.parse_args()
    results = measure(options.hosts, options.meetings)
    rows: list[Row] = []
    at = f"{options.hosts} hosts"
    for kind in ("barrier", "checkpoint"):
        for which in ("median", "worst"):
            name, value = f"{at}: CPU of host 0, {kind}, {which}", results[f"{kind} {which}"]
            rows.append(row(name, "ms", value, "goal", GOAL_MS, f"less than {GOAL_MS:g}" if which == "median" else ""))
        rows.append(row(f"{at}: sent, {kind}", "MB", results[f"{kind} MB"], "before", BEFORE_MB, ""))
    rows.append(row(f"{at}: CPU of host 0, news", "ms", results["news"], "goal", GOAL_MS, f"less than {GOAL_MS:g}"))
    rows.append(row(f"{at}: sent, news", "MB", results["news MB"], "before", BEFORE_MB, "less than 1/10"))
    rows.append(row(f"{at}: CPU of host 0, handshake", "ms", results["handshake"], "none", None, ""))
    finish("rendezvous", rows, options.json)


if __name__ == "__main__":
    main()
