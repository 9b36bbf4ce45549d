"""Named, bounded barriers of all hosts over their own network. No framework, no device, no object store.

`meet("checkpoint 40", payload)` returns all payloads, in worker order, when all hosts have called it; if one does not
arrive within the time-out, every host gets LostPeer, which names the missing hosts and the phase they last reported. A
server thread in host 0's process keeps the state (`barrier_state.py`); every host, host 0 too, holds one TCP connection
to it for the whole run and reports its phase on it.

A lost host is noticed by the kernel, not by a Python heartbeat, which a long compilation could starve: a killed process
closes its connection at once, and a machine that vanished stops acknowledging keep-alive probes (`lost_seconds`). A
process that hangs but lives is caught by the time-outs of the barriers.

On the wire, one JSON object a line:
    host -> server   {"hello": worker, "run_id", "attempt", "hosts"}   {"phase"}
                     {"arrive": name, "payload", "seconds"}   {"goodbye": code, "reason", "overdue"}
    server -> host   {"welcome"}   {"refused": reason, "final": bool}   {"complete": name, "payloads"}
                     {"lost": reason, "code"}   {"phases": [...]}

What can fail half-way: a server that dies after answering some hosts. Those hosts continue, and learn of it from their
broken connection within moments; whoever builds on a barrier must therefore tolerate that only some hosts know it
completed (a checkpoint is committed by its manifest, not here).
"""

from __future__ import annotations

import contextlib
import json
import socket
import sys
from collections.abc import Callable
from typing import Any, Protocol

from training.distributed.barrier_state import Message
from training.distributed.cluster import Cluster
from training.distributed.rendezvous_server import RendezvousServer, send_line
from training.distributed.shutdown import ShutdownRequest
from training.errors import Exit, LostPeer, StopRequested, TrainError
from training.machine import SYSTEM, Machine
from training.machine.network import Connection

STOP_PATIENCE = 10.0  # seconds that a host waits for others at start-up after it was asked to stop
GRACE = 1.0  # seconds that a main thread gets to end by itself once a peer is lost
ANSWER_MARGIN = 10.0  # seconds beyond a barrier's time-out: the server's message says more than the client's could
PHASE_INTERVAL = 0.5  # seconds between reports of a changed phase
CONNECT_INTERVAL = 0.2  # seconds between attempts to connect


class Rendezvous(Protocol):
    """Where the hosts of an attempt meet."""

    def meet(self, name: str, payload: Any = None, seconds: float | None = None) -> list[Any]:
        """Waits for all hosts at barrier `name`, and returns their payloads (JSON values) in worker order.

        Raises LostPeer when a host is lost or does not arrive within `seconds`."""

    def set_phase(self, name: str) -> None:
        """Reports what this host is doing; costs nothing."""

    def set_background_phase(self, name: str) -> None:
        """Reports what a background thread does beside the phase; "" when it is done."""

    def check(self) -> None:
        """Raises LostPeer if another host is known to be lost."""

    def phases(self) -> str:
        """What each host was last known to do, for messages."""

    def close(self, code: int, reason: str = "", *, overdue: bool = False) -> None:
        """Reports that this host exits with `code`. A failure ends the other hosts too; so does an orderly exit with
        `overdue`."""


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
    cluster: Cluster,
    shutdown: ShutdownRequest,
    *,
    start_seconds: float,
    seconds: float,
    lost_seconds: float,
    machine: Machine = SYSTEM,
) -> Rendezvous:
    """Starts the server on host 0 and connects to it.

    Args:
        cluster: This host's place among the hosts.
        shutdown: Whether this host was asked to stop.
        start_seconds: How long to try to connect.
        seconds: Time-out of a barrier, unless its caller gives one.
        lost_seconds: How long a host's network may be silent.
        machine: What this process runs on.

    Raises:
        LostPeer: Host 0 did not answer in time.
        TrainError: Host 0 refused this host, or this is host 0 and it can't listen.
        StopRequested: This host was asked to stop meanwhile.
    """
    if cluster.hosts == 1:
        return SingleHost()
    server = RendezvousServer(cluster, lost_seconds, machine) if cluster.is_first else None
    try:
        connection, unread = _connect(cluster, shutdown, start_seconds, lost_seconds, machine)
    except BaseException:
        if server:
            server.close(0)
        raise
    return RendezvousClient(cluster, server, shutdown, connection, unread, seconds=seconds, machine=machine)


class RendezvousClient:
    """A host's end of the rendezvous."""

    def __init__(
        self,
        cluster: Cluster,
        server: RendezvousServer | None,
        shutdown: ShutdownRequest,
        connection: Connection,
        unread: bytes,
        *,
        seconds: float,
        machine: Machine = SYSTEM,
    ) -> None:
        """Takes over a connection that host 0 has accepted.

        Args:
            server: The server of this process, which closes with the client; None except on host 0.
            unread: What was received on `connection` after the acceptance.
            seconds: Time-out of a barrier, unless its caller gives one.
            machine: What this process runs on.
        """
        self._cluster = cluster
        self._server = server
        self._shutdown = shutdown
        self._socket = connection
        self._seconds = seconds
        self._machine, self._clock = machine, machine.clock
        self._changed = machine.threads.condition()
        self._sending = machine.threads.lock()
        self._answers: dict[str, list[Any]] = {}
        self._lost: str | None = None
        self._lost_code = int(Exit.LOST_PEER)
        self._closing = machine.threads.event()
        self._main_phase, self._background_phase, self._reported_phase = "connected", "", ""
        self._phases: list[str] = []
        machine.threads.start(self._listen, unread, name="rendezvous-listener")
        machine.threads.start(self._report_phases, name="rendezvous-phase")

    def meet(self, name: str, payload: Any = None, seconds: float | None = None) -> list[Any]:
        wait = self._seconds if seconds is None else seconds
        self._post({"phase": self._phase})
        self._post({"arrive": name, "payload": payload, "seconds": wait})
        deadline = self._clock() + wait + ANSWER_MARGIN
        patience = _StopPatience(self._shutdown, self._clock)
        with self._changed:
            while name not in self._answers:
                self._raise_if_lost()
                self._changed.wait(timeout=0.5)
                if patience.is_over():
                    raise StopRequested(
                        f"asked to stop while waiting for the other hosts at {name!r}; nothing was trained and "
                        "nothing is lost"
                    )
                if self._clock() >= deadline:
                    raise LostPeer(
                        f"rendezvous {name!r}: host 0 did not answer within {wait + ANSWER_MARGIN:g} s; last known "
                        f"phases: {self.phases()}"
                    )
            return self._answers.pop(name)

    def set_phase(self, name: str) -> None:
        self._main_phase = name

    def set_background_phase(self, name: str) -> None:
        self._background_phase = name

    @property
    def _phase(self) -> str:
        return f"{self._main_phase}, {self._background_phase}" if self._background_phase else self._main_phase

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
        if self._lost and self._shutdown.may_exit_now:
            raise StopRequested(f"asked to stop before training began ({self._lost}); nothing is lost")
        if self._lost:
            raise StopRequested(self._lost) if self._lost_code == Exit.SAVED else LostPeer(self._lost)

    def phases(self) -> str:
        return ", ".join(f"host {worker} {phase!r}" for worker, phase in enumerate(self._phases)) or "none"

    def _post(self, message: Message) -> None:
        with self._sending:
            send_line(self._socket, message)  # that a connection is broken is noticed by the listener

    def _report_phases(self) -> None:
        while not self._closing.wait(PHASE_INTERVAL):
            phase = self._phase
            if phase != self._reported_phase:
                self._reported_phase = phase
                self._post({"phase": phase})

    def _listen(self, unread: bytes) -> None:
        while True:
            while b"\n" in unread:
                line, unread = unread.split(b"\n", 1)
                self._handle(json.loads(line))
            try:
                data = self._socket.recv(1 << 16)
            except OSError as error:
                if isinstance(error, TimeoutError) and error.errno is None:
                    continue  # the socket's own time-out; the kernel's "connection timed out" has an errno
                data = b""
            if not data:
                phase = self._phases[0] if self._phases else "unknown"
                gone = f"host 0 is gone: its connection broke in phase {phase!r}"
                self._handle({"lost": "this host, host 0, has lost its network" if self._cluster.is_first else gone})
                return
            unread += data

    def _handle(self, message: Message) -> None:
        with self._changed:
            if "complete" in message:
                self._answers[message["complete"]] = message["payloads"]
            elif "phases" in message:
                self._phases = message["phases"]
            elif "lost" in message and self._lost is None and not self._closing.is_set():
                self._lost, self._lost_code = message["lost"], message.get("code", int(Exit.LOST_PEER))
                self._machine.threads.start(self._end_if_stuck, self._lost, self._lost_code, name="rendezvous-lost")
            self._changed.notify_all()

    def _end_if_stuck(self, message: str, code: int) -> None:
        """Lets the main thread end by itself; ends the process when it does not: it may be stuck in a collective that
        will never end."""
        if not self._closing.wait(GRACE):
            kind = "stopped" if code == Exit.SAVED else "lost peer"
            print(f"tpu-train: {kind}: {message}", file=sys.stderr, flush=True)
            self._machine.exit(code)


class _StopPatience:
    """How long a host that was asked to stop, and has nothing to save, still waits for others."""

    def __init__(self, shutdown: ShutdownRequest, clock: Callable[[], float]) -> None:
        self._shutdown, self._clock = shutdown, clock
        self._end = clock() + STOP_PATIENCE

    def is_over(self) -> bool:
        """Whether the host was asked to stop so long ago. To be called often: the time counts from the last call that
        saw no request."""
        if not self._shutdown.may_exit_now:
            self._end = self._clock() + STOP_PATIENCE
        return self._clock() >= self._end


def _connect(
    cluster: Cluster, shutdown: ShutdownRequest, start_seconds: float, lost_seconds: float, machine: Machine
) -> tuple[Connection, bytes]:
    """Tries until host 0 accepts this host, for at most `start_seconds`.

    Returns:
        The connection, and what was received on it after the acceptance.
    """
    host, clock = f"host 0 ({cluster.addresses[0]}:{cluster.rendezvous_port})", machine.clock
    deadline = clock() + start_seconds
    patience = _StopPatience(shutdown, clock)
    why = "no answer"
    while clock() < deadline:
        if patience.is_over():
            raise StopRequested("asked to stop while waiting for host 0; nothing was trained and nothing is lost")
        try:
            connection, answer, unread = _say_hello(cluster, min(lost_seconds, start_seconds), lost_seconds, machine)
            if "welcome" in answer:
                connection.settimeout(lost_seconds)
                return connection, unread
            connection.close()
            why = f"refused: {answer.get('refused')}"
            if answer.get("final"):
                raise TrainError(f"{host} refused this host (worker {cluster.worker}): {answer['refused']}")
        except (OSError, ValueError) as error:
            why = str(error) or type(error).__name__
        machine.sleep(CONNECT_INTERVAL)
    raise LostPeer(f"{host} did not accept this host (worker {cluster.worker}) within {start_seconds:g} s: {why}")


def _say_hello(
    cluster: Cluster, timeout: float, lost_seconds: float, machine: Machine
) -> tuple[Connection, Message, bytes]:
    """Connects to host 0 once.

    Returns:
        The connection, host 0's answer, and what was received after it.

    Raises:
        OSError, ValueError: Host 0 could not be reached, or did not answer as it should.
    """
    connection = machine.network.connect(cluster.addresses[0], cluster.rendezvous_port, timeout)
    try:
        machine.network.detect_silence(connection, lost_seconds)
        identity = {"run_id": cluster.run_id, "attempt": cluster.attempt, "hosts": cluster.hosts}
        send_line(connection, {"hello": cluster.worker, **identity})
        received = b""
        while b"\n" not in received:
            data = connection.recv(1 << 16)
            if not data:
                raise ConnectionResetError("closed the connection")
            received += data
        line, unread = received.split(b"\n", 1)
        return connection, json.loads(line), unread
    except BaseException:
        connection.close()
        raise
