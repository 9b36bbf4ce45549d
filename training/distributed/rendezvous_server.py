"""Host 0's side of the rendezvous: a thread that keeps the barrier state and talks to every host over TCP. The
protocol is in `rendezvous.py`, what it decides in `barrier_state.py`."""

from __future__ import annotations

import contextlib
import json
import selectors
from dataclasses import dataclass

from training.distributed.barrier_state import BarrierState, Identity, Message, Outgoing
from training.distributed.cluster import Cluster
from training.machine import SYSTEM, Machine
from training.machine.network import Connection

TICK = 0.25  # seconds between checks of deadlines
PHASES_INTERVAL = 1.0  # seconds between broadcasts of all hosts' phases
LONGEST_LINE = 4 << 20


@dataclass
class _Connection:
    socket: Connection
    worker: int | None = None  # None until it has been admitted
    unread: bytes = b""


class RendezvousServer:
    """Host 0's thread that keeps the barrier state."""

    def __init__(self, cluster: Cluster, lost_seconds: float, machine: Machine = SYSTEM) -> None:
        """Listens and serves from now on. Raises TrainError when it can't listen."""
        self._state = BarrierState(Identity(cluster.run_id, cluster.attempt, cluster.hosts))
        self._lost_seconds = lost_seconds
        self._machine, self._clock = machine, machine.clock
        self._selector = machine.network.selector()
        self._connections: dict[int, _Connection] = {}  # by worker
        self._stop = machine.threads.event()
        self._listener = machine.network.listen(cluster.addresses[0], cluster.rendezvous_port)
        self._selector.register(self._listener, selectors.EVENT_READ, None)
        self._thread = machine.threads.start(self._serve, name="rendezvous-server")

    def close(self, wait_seconds: float) -> None:
        """Ends once every other host has left, or after `wait_seconds`."""
        deadline = self._clock() + wait_seconds
        while self._clock() < deadline and any(worker != 0 for worker in list(self._connections)):
            self._machine.sleep(0.02)
        self._stop.set()
        self._thread.join(timeout=5)

    def _serve(self) -> None:
        sent: list[str] = []
        next_phases = 0.0
        while not self._stop.is_set():
            for key, _ in self._selector.select(timeout=TICK):
                if key.fileobj is self._listener:
                    self._accept()
                else:
                    self._read(key.data)
            now = self._clock()
            self._send(self._state.check_deadlines(now))
            if now >= next_phases and (phases := self._state.phases()) != sent:
                sent, next_phases = phases, now + PHASES_INTERVAL
                self._send([(worker, {"phases": phases}) for worker in list(self._connections)])
        for connection in list(self._connections.values()):
            connection.socket.close()
        self._listener.close()
        self._selector.close()

    def _accept(self) -> None:
        try:
            accepted, _ = self._listener.accept()
        except OSError:
            return  # the client has given up already
        self._machine.network.detect_silence(accepted, self._lost_seconds)
        accepted.settimeout(self._lost_seconds)  # for sending; reading happens only when there is something
        self._selector.register(accepted, selectors.EVENT_READ, _Connection(accepted))

    def _read(self, connection: _Connection) -> None:
        try:
            data = connection.socket.recv(1 << 16)
        except OSError:
            data = b""
        connection.unread += data
        if not data or len(connection.unread) > LONGEST_LINE:
            self._drop(connection)
            return
        while b"\n" in connection.unread:
            line, connection.unread = connection.unread.split(b"\n", 1)
            try:
                self._handle(connection, json.loads(line))
            except (ValueError, KeyError, TypeError):
                self._drop(connection)  # does not speak this protocol
                return

    def _handle(self, connection: _Connection, message: Message) -> None:
        now, worker = self._clock(), connection.worker
        if worker is None:
            self._admit(connection, message, now)
        elif "phase" in message:
            self._state.set_phase(worker, message["phase"], now)
        elif "arrive" in message:
            self._send(self._state.arrive(worker, message["arrive"], message["payload"], message["seconds"], now))
        elif "goodbye" in message:
            self._send(self._state.leave(worker, message["goodbye"], message["reason"], message.get("overdue", False)))

    def _admit(self, connection: _Connection, message: Message, now: float) -> None:
        """The first message of a connection."""
        worker = int(message["hello"])
        refusal = self._state.connect(worker, Identity(message["run_id"], message["attempt"], message["hosts"]), now)
        if refusal:
            send_line(connection.socket, {"refused": refusal.reason, "final": refusal.final})
            self._drop(connection)
            return
        connection.worker = worker
        self._connections[worker] = connection
        self._send([(worker, {"welcome": True})])

    def _send(self, outgoing: Outgoing) -> None:
        for worker, message in outgoing:
            connection = self._connections.get(worker)
            if connection and not send_line(connection.socket, message):
                self._drop(connection)

    def _drop(self, connection: _Connection) -> None:
        with contextlib.suppress(KeyError, ValueError):
            self._selector.unregister(connection.socket)
        connection.socket.close()
        if connection.worker is not None and self._connections.get(connection.worker) is connection:
            del self._connections[connection.worker]
            self._send(self._state.disconnect(connection.worker))


def send_line(connection: Connection, message: Message) -> bool:
    """Sends a message. Returns whether it could be sent."""
    try:
        connection.sendall(json.dumps(message).encode() + b"\n")
    except OSError:
        return False
    return True
