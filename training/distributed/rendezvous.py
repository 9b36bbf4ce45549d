"""Named, bounded meetings of all hosts over their own network. No framework, no device, no object store.

`meet("checkpoint 40", payload)` returns everyone's payload, in worker order, when all hosts have called it; if one does
not come within the time-out, every host gets LostPeer, which names the missing hosts and the phase they were last heard
of in. A server thread in host 0's process keeps the room (`room.py`); every host, host 0 too, holds one TCP connection
to it for the whole run and tells its phase on it.

Who is gone is noticed by the kernel, not by a Python heartbeat, which a long compilation could starve: a killed process
closes its connection at once, and a machine that vanished stops acknowledging keep-alive probes (`lost_seconds`). A
process that hangs but lives is caught by the time-outs of the meetings.

On the wire: one JSON object a line.
    host -> server   {"hello": worker, "run_id", "attempt", "hosts"}   {"phase"}   {"arrive": name, "payload",
    "seconds"}
                     {"goodbye": code, "reason", "overdue"}
    server -> host   {"welcome"}   {"refused": why, "final": bool}   {"complete": name, "payloads"}   {"lost": why,
    "code"}   {"phases": [...]}

What can fail half-way: a server that dies after answering some hosts. Those hosts go on and learn of it from their
broken connection within moments; whoever builds on a meeting must therefore tolerate that only some hosts know it
completed (a checkpoint is committed by its manifest, not here).
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
import sys
import threading
import time
from collections.abc import Callable
from typing import Any, Protocol

from training.distributed.barrier_state import Message
from training.distributed.cluster import Cluster
from training.distributed.rendezvous_server import RendezvousServer, send_line, watch
from training.distributed.shutdown import ShutdownRequest
from training.errors import Exit, LostPeer, StopRequested, TrainError

PATIENCE = 10.0  # seconds that a host waits for others at start-up after it was asked to stop
GRACE = 1.0  # seconds that a main thread gets to end by itself once a peer is lost


class Rendezvous(Protocol):
    """Where hosts meet."""

    def meet(self, name: str, payload: Any = None, seconds: float | None = None) -> list[Any]:
        """Everyone's payload in worker order, once all are here. Raises LostPeer."""

    def set_phase(self, name: str) -> None:
        """Tells the others what this host is doing; costs nothing."""

    def set_background_phase(self, name: str) -> None:
        """What a background thread does beside the phase; "" when it is done."""

    def check(self) -> None:
        """Raises LostPeer if another host is known to be gone."""

    def phases(self) -> str:
        """What each host was last known to do, for messages."""

    def close(self, code: int, reason: str = "", *, overdue: bool = False) -> None:
        """Says goodbye. A code other than "finished" and "saved" ends the others too, and with `overdue` so do
        these."""


class SingleHost:
    """The rendezvous of a single host."""

    def meet(self, name: str, payload: Any = None, seconds: float | None = None) -> list[Any]:
        return [payload]

    def set_phase(self, name: str) -> None:
        pass

    def set_background_phase(self, name: str) -> None:
        pass

    def check(self) -> None:
        pass

    def phases(self) -> str:
        return ""

    def close(self, code: int, reason: str = "", *, overdue: bool = False) -> None:
        pass


def join(
    cluster: Cluster, stopping: ShutdownRequest, *, start_seconds: float, seconds: float, lost_seconds: float
) -> Rendezvous:
    """Starts the server on host 0 and connects.

    Raises LostPeer when host 0 does not answer in time, TrainError when it refuses, StopRequested when asked to stop
    meanwhile."""
    if cluster.hosts == 1:
        return SingleHost()
    server = RendezvousServer(cluster, lost_seconds) if cluster.is_first else None
    try:
        return RendezvousClient(
            cluster,
            server,
            stopping,
            start_seconds=start_seconds,
            seconds=seconds,
            lost_seconds=lost_seconds,
            on_stuck=_leave_stuck,
        )
    except BaseException:
        if server:
            server.close(0)
        raise


def _leave_stuck(message: str, code: int) -> None:
    """The last resort: the main thread is stuck in a collective that will never end."""
    print(f"tpu-train: {'stopped' if code == Exit.SAVED else 'lost peer'}: {message}", file=sys.stderr, flush=True)
    os._exit(code)


class RendezvousClient:
    """A host's end of the rendezvous."""

    def __init__(
        self,
        cluster: Cluster,
        server: RendezvousServer | None,
        stopping: ShutdownRequest,
        *,
        start_seconds: float,
        seconds: float,
        lost_seconds: float,
        on_stuck: Callable[[str, int], None],
    ) -> None:
        self._cluster = cluster
        self._server = server
        self._stopping = stopping
        self._seconds = seconds
        self._on_stuck = on_stuck
        self._changed = threading.Condition()
        self._sending = threading.Lock()
        self._answers: dict[str, list[Any]] = {}
        self._lost: str | None = None
        self._lost_code = int(Exit.LOST_PEER)
        self._closing = threading.Event()
        self._main, self._aside, self._told = "connected", "", ""
        self._phases: list[str] = []
        self._socket, unread = _connect(cluster, stopping, start_seconds, lost_seconds)
        threading.Thread(target=self._listen, args=(unread,), name="rendezvous-listener", daemon=True).start()
        threading.Thread(target=self._tell, name="rendezvous-phase", daemon=True).start()

    def meet(self, name: str, payload: Any = None, seconds: float | None = None) -> list[Any]:
        wait = self._seconds if seconds is None else seconds
        self._post({"phase": self._phase})
        self._post({"arrive": name, "payload": payload, "seconds": wait})
        deadline = time.monotonic() + wait + 10  # the server's answer says more than ours could
        patience = time.monotonic() + PATIENCE
        with self._changed:
            while name not in self._answers:
                self._raise_if_lost()
                self._changed.wait(timeout=0.5)
                if not self._stopping.may_exit_now:
                    patience = time.monotonic() + PATIENCE
                elif time.monotonic() >= patience:
                    raise StopRequested(
                        f"asked to stop while waiting for the other hosts at {name!r}; nothing was trained and nothing is lost"
                    )
                if time.monotonic() >= deadline:
                    raise LostPeer(
                        f"rendezvous {name!r}: host 0 did not answer within {wait + 10:g} s; last known phases: {self.phases()}"
                    )
            return self._answers.pop(name)

    def set_phase(self, name: str) -> None:
        self._main = name

    def set_background_phase(self, name: str) -> None:
        self._aside = name

    @property
    def _phase(self) -> str:
        return f"{self._main}, {self._aside}" if self._aside else self._main

    def check(self) -> None:
        if self._lost:
            with self._changed:
                self._raise_if_lost()

    def close(self, code: int, reason: str = "", *, overdue: bool = False) -> None:
        if self._closing.is_set():
            return
        self._post({"phase": self._phase})
        self._post({"goodbye": int(code), "reason": reason.splitlines()[0][:500] if reason else "", "overdue": overdue})
        self._closing.set()
        if self._server:
            self._server.close(5 if code in (Exit.FINISHED, Exit.SAVED) else 1)
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()

    def _raise_if_lost(self) -> None:
        if self._lost and self._stopping.may_exit_now:
            raise StopRequested(f"asked to stop before training began ({self._lost}); nothing is lost")
        if self._lost:
            raise StopRequested(self._lost) if self._lost_code == Exit.SAVED else LostPeer(self._lost)

    def phases(self) -> str:
        return ", ".join(f"host {worker} {phase!r}" for worker, phase in enumerate(self._phases)) or "none"

    def _post(self, message: Message) -> None:
        with self._sending:
            send_line(self._socket, message)  # a broken connection is the listener's news

    def _tell(self) -> None:
        while not self._closing.wait(0.5):
            phase = self._phase
            if phase != self._told:
                self._told = phase
                self._post({"phase": phase})

    def _listen(self, unread: bytes) -> None:
        while True:
            while b"\n" in unread:
                line, unread = unread.split(b"\n", 1)
                self._take(json.loads(line))
            try:
                data = self._socket.recv(1 << 16)
            except OSError as error:
                if isinstance(error, TimeoutError) and error.errno is None:
                    continue  # our own waiting time; the kernel's "connection timed out" has an errno
                data = b""
            if not data:
                last = self._phases[0] if self._phases else "unknown"
                gone = f"host 0 is gone: its connection broke in phase {last!r}"
                self._take({"lost": "this host, host 0, has lost its network" if self._cluster.is_first else gone})
                return
            unread += data

    def _take(self, message: Message) -> None:
        with self._changed:
            if "complete" in message:
                self._answers[message["complete"]] = message["payloads"]
            elif "phases" in message:
                self._phases = message["phases"]
            elif "lost" in message and self._lost is None and not self._closing.is_set():
                self._lost, self._lost_code = message["lost"], message.get("code", int(Exit.LOST_PEER))
                threading.Thread(
                    target=self._insist, args=(self._lost, self._lost_code), name="rendezvous-lost", daemon=True
                ).start()
            self._changed.notify_all()

    def _insist(self, message: str, code: int) -> None:
        """Lets the main thread end by itself; ends the process when it can't."""
        if not self._closing.wait(GRACE):
            self._on_stuck(message, code)


def _connect(
    cluster: Cluster, stopping: ShutdownRequest, start_seconds: float, lost_seconds: float
) -> tuple[socket.socket, bytes]:
    """A connection that host 0 has welcomed, and what it sent after the welcome. Keeps trying until `start_seconds` are
    over."""
    address = (cluster.addresses[0], cluster.rendezvous_port)
    deadline = time.monotonic() + start_seconds
    patience = time.monotonic() + PATIENCE
    why = "no answer"
    while time.monotonic() < deadline:
        connection = None
        if not stopping.may_exit_now:
            patience = time.monotonic() + PATIENCE
        elif time.monotonic() >= patience:
            raise StopRequested("asked to stop while waiting for host 0; nothing was trained and nothing is lost")
        try:
            connection = socket.create_connection(address, timeout=min(lost_seconds, start_seconds))
            watch(connection, lost_seconds)
            send_line(
                connection,
                {"hello": cluster.worker, "run_id": cluster.run_id, "attempt": cluster.attempt, "hosts": cluster.hosts},
            )
            unread = b""
            while b"\n" not in unread:
                data = connection.recv(1 << 16)
                if not data:
                    raise ConnectionResetError("closed the connection")
                unread += data
            line, unread = unread.split(b"\n", 1)
            answer = json.loads(line)
            if "welcome" in answer:
                connection.settimeout(lost_seconds)
                return connection, unread
            why = f"refused: {answer.get('refused')}"
            connection.close()
            if answer.get("final"):
                raise TrainError(
                    f"host 0 ({address[0]}:{address[1]}) refused this host (worker {cluster.worker}): {answer['refused']}"
                )
        except (OSError, ValueError) as error:
            why = str(error) or type(error).__name__
            if connection:
                connection.close()
        time.sleep(0.2)
    raise LostPeer(
        f"host 0 ({address[0]}:{address[1]}) did not let this host (worker {cluster.worker}) in within {start_seconds:g} s: {why}"
    )
