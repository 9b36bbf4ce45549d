"""Hosts write their parts at the same time, so more hosts save faster where each has a network of its own. Starts
processes, and a slow line for each."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import threading
import time
from contextlib import ExitStack
from pathlib import Path

from tests.bucket_server import BucketServer
from tests.training.host_processes import free_port
from training.checkpoint.format import committed_steps
from training.checkpoint.reader import verify

HOUSE = Path(__file__).resolve().parents[2]
RATE = 4_000_000  # bytes a second, of each host
SIZE = 16 << 20  # bytes of state


class SlowLine:
    """A line to a server that takes `rate` bytes a second up, over all its connections together."""

    def __init__(self, target: str, rate: float) -> None:
        host, port = target.removeprefix("http://").split(":")
        self._target, self._rate = (host, int(port)), rate
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.url = f"http://127.0.0.1:{self._listener.getsockname()[1]}"
        self._free, self._lock = time.monotonic(), threading.Lock()
        threading.Thread(target=self._accept, daemon=True).start()

    def __enter__(self) -> SlowLine:
        return self

    def __exit__(self, *_: object) -> None:
        self._listener.shutdown(socket.SHUT_RDWR)  # wakes the thread that accepts
        self._listener.close()

    def _accept(self) -> None:
        while True:
            try:
                client, _ = self._listener.accept()
            except OSError:
                return
            server = socket.create_connection(self._target)
            for source, sink, slow in ((client, server, True), (server, client, False)):
                threading.Thread(target=self._pass, args=(source, sink, slow), daemon=True).start()

    def _pass(self, source: socket.socket, sink: socket.socket, slow: bool) -> None:
        try:
            while data := source.recv(1 << 16):
                if slow:
                    with self._lock:
                        self._free = max(self._free, time.monotonic()) + len(data) / self._rate
                        until = self._free
                    time.sleep(max(0.0, until - time.monotonic()))
                sink.sendall(data)
            sink.shutdown(socket.SHUT_WR)
        except OSError:
            source.close()
            sink.close()


def seconds_of_a_save(server: BucketServer, hosts: int) -> float:
    """From the moment when all hosts begin to the commit, as host 0 sees it."""
    port, folder = free_port(), f"gs://bucket/{hosts}"
    with ExitStack() as stack:
        processes = []
        for worker in range(hosts):
            line = stack.enter_context(SlowLine(server.url, RATE))
            arguments = map(str, (folder, worker, hosts, port, SIZE))
            command = [sys.executable, "-m", "tests.training.saving_host", *arguments]
            environment = {**os.environ, "STORAGE_EMULATOR_HOST": line.url, "PYTHONPATH": str(HOUSE)}
            processes.append(subprocess.Popen(command, cwd=HOUSE, env=environment, stdout=subprocess.PIPE, text=True))
        outputs = [process.communicate(timeout=120)[0] for process in processes]
    assert [process.returncode for process in processes] == [0] * hosts
    return float(outputs[0])


def test_four_hosts_save_in_less_than_half_of_the_time_of_one(gcs: BucketServer) -> None:
    one, four = seconds_of_a_save(gcs, 1), seconds_of_a_save(gcs, 4)
    assert committed_steps("gs://bucket/4") == [2, 1]
    assert len(verify("gs://bucket/4", 2).parts) == 4
    assert one > SIZE / RATE * 0.9, "the line is not slow"
    assert four <= 0.4 * one, f"1 host: {one:.2f} s, 4 hosts: {four:.2f} s"
    print(f"1 host: {one:.2f} s, 4 hosts: {four:.2f} s ({four / one:.2f})")
