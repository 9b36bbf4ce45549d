"""Host 0's thread of the rendezvous: sockets and a clock around `server_protocol.py`.

No connection delays another: nothing here waits for a peer to read or to write. The kernel breaks a connection whose
peer takes no bytes for `lost_seconds` (TCP_USER_TIMEOUT), and an error in handling a connection closes it alone. When
the thread ends, for whatever reason, it closes all connections, so that no host waits for an answer that will not come.
"""

import contextlib
import selectors
import sys
from collections import deque
from dataclasses import dataclass, field

from training.distributed.cluster import Cluster
from training.distributed.handshake import RENDEZVOUS, accept_connection, describe_error, host_credentials
from training.distributed.server_protocol import Actions, ServerProtocol
from training.machine import SYSTEM, Connection, Machine

TICK = 0.5  # seconds between checks of deadlines
_ACCEPTED_AT_ONCE = 64  # then open connections have their turn
_CHUNK = 1 << 16


@dataclass(eq=False)
class _Peer:
    number: int
    socket: Connection
    unsent: deque[memoryview] = field(default_factory=deque)
    watched_for_writing: bool = False


class RendezvousServer:
    """The thread on host 0 that serves the rendezvous."""

    def __init__(self, cluster: Cluster, lost_seconds: float, machine: Machine = SYSTEM) -> None:
        """Listens, and starts the thread. Raises TrainError if it can't listen, BadInput without the hosts' secret."""
        self._protocol = ServerProtocol(host_credentials(cluster, RENDEZVOUS), machine)
        self._lost_seconds = lost_seconds
        self._machine, self._clock = machine, machine.clock.monotonic
        self._stop = machine.threads.event()
        self._connections: dict[int, _Peer] = {}
        self._opened = 0
        self._listener = machine.network.listen(cluster.addresses[0], cluster.rendezvous_port)
        self._listener.settimeout(0.0)
        self._selector = machine.network.selector()
        self._selector.register(self._listener, selectors.EVENT_READ, None)
        self._thread = machine.threads.start(self._serve, name="rendezvous-server")

    def phases(self) -> list[str]:
        """Returns the last known phase of each host, in worker order."""
        return self._protocol.state.phases()

    def close(self, wait_seconds: float) -> None:
        """Waits until all other hosts have left, at most `wait_seconds`, then has the thread close all connections and
        end, and waits for that at most 5 s."""
        deadline = self._clock() + wait_seconds
        while self._clock() < deadline and self._thread.is_alive() and self._protocol.workers not in ([], [0]):
            self._machine.clock.sleep(0.02)
        self._stop.set()
        self._thread.join(timeout=5)

    def _serve(self) -> None:
        """Serves connections and deadlines until `close` or a bug, then closes all. Runs in the server thread."""
        next_tick = 0.0
        try:
            while not self._stop.is_set():
                for key, events in self._selector.select(timeout=TICK):
                    if key.data is None:
                        self._accept()
                    else:
                        self._handle(key.data, events)
                now = self._clock()
                if now >= next_tick:
                    next_tick = now + TICK
                    self._perform(self._protocol.tick(now))
        except Exception as error:  # a bug: the hosts notice at once that their connections close
            _warn(f"failed: {describe_error(error)}")
        finally:
            self._listener.close()
            for connection in self._connections.values():
                connection.socket.close()
            self._selector.close()

    def _accept(self) -> None:
        """Accepts waiting connections, some at each call, and begins their handshakes. Closes the one pending longest
        when the process can have no more. Raises OSError if the listener is broken."""
        for _ in range(_ACCEPTED_AT_ONCE):
            accepted = accept_connection(self._listener.accept, self._close_oldest, self._machine.clock.sleep)
            if accepted is None:
                return
            try:
                accepted.settimeout(0.0)
                self._machine.network.detect_silence(accepted, self._lost_seconds)
            except OSError:
                accepted.close()  # already broken
                continue
            connection = _Peer(self._opened, accepted)
            self._opened += 1
            self._connections[connection.number] = connection
            self._selector.register(accepted, selectors.EVENT_READ, connection)
            self._perform(self._protocol.opened(connection.number, self._clock()))

    def _close_oldest(self) -> bool:
        """Closes the connection whose handshake is pending longest; returns False if there is none."""
        oldest = self._protocol.handshake.oldest()
        if oldest is not None:
            self._perform(self._protocol.drop(oldest))
        return oldest is not None

    def _handle(self, connection: _Peer, events: int) -> None:
        """Reads from or writes to a ready connection. Closes it on any error."""
        if self._connections.get(connection.number) is not connection:
            return  # closed since the selector looked
        try:
            if events & selectors.EVENT_WRITE and not self._flush(connection):
                self._lose(connection)
            elif events & selectors.EVENT_READ:
                self._read(connection)
        except Exception as error:  # a bug in handling one host must not end the server of all
            _warn(f"closes a connection: {describe_error(error)}")
            self._perform(self._protocol.drop(connection.number))

    def _read(self, connection: _Peer) -> None:
        """Reads once from a connection and performs the protocol's actions for the bytes; closes it at its end."""
        try:
            data = connection.socket.recv(_CHUNK)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        if data:
            self._perform(self._protocol.received(connection.number, data, self._clock()))
        else:
            self._lose(connection)

    def _lose(self, connection: _Peer) -> None:
        """Passes a broken connection's last bytes to the protocol and, if it is still open, its end; closes it."""
        self._perform(self._read_last_words(connection))
        if self._connections.get(connection.number) is not connection:
            return  # closed because of its last bytes
        self._close(connection)
        self._perform(self._protocol.closed(connection.number))

    def _perform(self, actions: Actions) -> None:
        """Sends messages and closes connections as `actions` say. Passes the protocol the last bytes and the end of
        each connection that breaks, closes it, and performs the actions that follow too."""
        pending = deque(actions)
        while pending:
            number, data = pending.popleft()
            connection = self._connections.get(number)
            if connection is None:
                continue
            if data is None:
                self._close(connection)
                continue
            connection.unsent.append(memoryview(data))
            if len(connection.unsent) == 1 and not self._flush(connection):  # else the selector tells when to go on
                pending += self._read_last_words(connection)
                self._close(connection)
                pending += self._protocol.closed(number)

    def _read_last_words(self, connection: _Peer) -> Actions:
        """Passes the protocol a broken connection's last bytes (a goodbye, for example); returns its actions."""
        actions: Actions = []
        with contextlib.suppress(OSError):
            while data := connection.socket.recv(_CHUNK):
                actions += self._protocol.received(connection.number, data, self._clock())
        return actions

    def _flush(self, connection: _Peer) -> bool:
        """Sends unsent bytes as far as the peer takes them, and has the selector wait for room for the rest. Returns
        False if the connection is broken."""
        unsent = connection.unsent
        try:
            while unsent:
                sent = connection.socket.send(unsent[0])
                if sent == len(unsent[0]):
                    unsent.popleft()
                else:
                    unsent[0] = unsent[0][sent:]
        except BlockingIOError:
            pass
        except OSError:
            return False
        if bool(unsent) != connection.watched_for_writing:
            connection.watched_for_writing = bool(unsent)
            events = selectors.EVENT_READ | (selectors.EVENT_WRITE if unsent else 0)
            self._selector.modify(connection.socket, events, connection)
        return True

    def _close(self, connection: _Peer) -> None:
        """Closes a connection and stops watching it, without telling the protocol."""
        del self._connections[connection.number]
        self._selector.unregister(connection.socket)
        connection.socket.close()


def _warn(event: str) -> None:
    print(f"tpu-train: the rendezvous server {event}", file=sys.stderr, flush=True)
