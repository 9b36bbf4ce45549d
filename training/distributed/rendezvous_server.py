"""Host 0's thread of the rendezvous: sockets and a clock around `server_protocol.py`.

No connection delays another: nothing here waits for a peer to read or to write. The kernel breaks a connection whose
peer takes no bytes for `lost_seconds` (TCP_USER_TIMEOUT), and an error in handling a connection closes it alone. When
the thread ends, for whatever reason, it closes all connections, so that no host waits for an answer that will not come.
It also accepts the connections of the gradient exchange, which `take_exchange` takes out of it.
"""

import contextlib
import errno
import selectors
import socket
from collections import deque
from dataclasses import dataclass, field

from training.distributed.cluster import Cluster
from training.distributed.handshake import describe_error, host_credentials
from training.distributed.server_protocol import Actions, HandOver, ServerProtocol, name_hosts
from training.machine import SYSTEM, Connection, Machine, tell

TICK = 0.5  # seconds between checks of deadlines
_ACCEPTED_AT_ONCE = 64  # then open connections have their turn
_CHUNK = 1 << 16


@dataclass(eq=False)
class _Peer:
    socket: Connection
    unsent: deque[memoryview] = field(default_factory=deque)
    watched_for_writing: bool = False


class RendezvousServer:
    """The thread on host 0 that serves the rendezvous."""

    def __init__(self, cluster: Cluster, lost_seconds: float, machine: Machine = SYSTEM) -> None:
        """Listens, and starts the thread. Raises TrainError if it can't listen, BadInput as
        `host_credentials`."""
        self._protocol = ServerProtocol(host_credentials(cluster), machine)
        self._lost_seconds = lost_seconds
        self._machine, self._clock = machine, machine.clock.monotonic
        self._stop = machine.threads.event()
        self._connections: dict[_Peer, None] = {}  # an ordered set
        self._exchange: dict[int, Connection] = {}  # by worker, until `take_exchange`
        self._listener = machine.network.listen(cluster.addresses[0], cluster.rendezvous_port)
        self._listener.settimeout(0.0)
        self._selector = machine.network.selector()
        self._selector.register(self._listener, selectors.EVENT_READ, None)
        self._thread = machine.threads.start(self._serve, name="rendezvous-server")

    def phases(self) -> list[str]:
        """Returns the last known phase of each host, in worker order; "never connected" for one that did not."""
        return self._protocol.state.phases()

    def take_exchange(self, seconds: float) -> list[Connection]:
        """Waits until all other hosts have connected for the gradient exchange, and returns these connections, in
        worker order, with time-out `seconds`; the caller closes them. Raises TimeoutError, naming missing hosts, after
        `seconds`."""
        others = range(1, self._protocol.state.identity.hosts)
        deadline = self._clock() + seconds
        while missing := [worker for worker in others if worker not in self._exchange]:
            if self._clock() >= deadline:
                raise TimeoutError(f"{name_hosts(missing)} did not connect to the gradient exchange in {seconds:g} s")
            self._machine.clock.sleep(0.02)
        taken = [self._exchange.pop(worker) for worker in others]
        for connection in taken:
            connection.settimeout(seconds)
            if hasattr(socket, "TCP_USER_TIMEOUT"):  # a host that computes may take no bytes for longer
                connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, 0)
        return taken

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
            tell(f"the rendezvous server failed: {describe_error(error)}")
        finally:
            self._listener.close()
            for connection in (*(peer.socket for peer in self._connections), *self._exchange.values()):
                connection.close()
            self._selector.close()

    def _accept(self) -> None:
        """Accepts up to 64 waiting connections, and begins their handshakes. Without free file descriptors or memory,
        closes the connection that is in its handshake longest, or if none is, sleeps 0.05 s; the others wait in the
        listener's queue. Raises OSError if the listener is broken."""
        for _ in range(_ACCEPTED_AT_ONCE):
            try:
                accepted, _address = self._listener.accept()
            except (BlockingIOError, ConnectionError, TimeoutError):
                return  # a client that has given up raises too
            except OSError as error:
                if error.errno not in (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM):
                    raise
                if pending := self._protocol.pending:
                    self._perform(self._protocol.drop(pending[0]))
                else:
                    self._machine.clock.sleep(0.05)
                return
            try:
                accepted.settimeout(0.0)
                self._machine.network.detect_silence(accepted, self._lost_seconds)
            except OSError:
                accepted.close()  # already broken
                continue
            connection = _Peer(accepted)
            self._connections[connection] = None
            self._selector.register(accepted, selectors.EVENT_READ, connection)
            self._perform(self._protocol.opened(connection, self._clock()))

    def _handle(self, connection: _Peer, events: int) -> None:
        """Reads from or writes to a ready connection. Closes it on any error."""
        if connection not in self._connections:
            return  # closed since the selector looked
        try:
            if events & selectors.EVENT_WRITE and not self._flush(connection):
                self._perform(self._lose(connection))
            elif events & selectors.EVENT_READ:
                self._perform(self._read(connection))
        except Exception as error:  # a bug in handling one host must not end the server of all
            tell(f"the rendezvous server closes a connection: {describe_error(error)}")
            self._perform(self._protocol.drop(connection))

    def _read(self, connection: _Peer) -> Actions:
        """Reads once from a connection, which it closes at its end. Returns the actions that follow."""
        try:
            data = connection.socket.recv(_CHUNK)
        except BlockingIOError:
            return []
        except OSError:
            data = b""
        return self._protocol.received(connection, data, self._clock()) if data else self._lose(connection)

    def _perform(self, actions: Actions) -> None:
        """Sends messages, closes connections and hands them over as `actions` say. Loses each connection that breaks,
        and performs the actions that follow too."""
        pending = deque(actions)
        while pending:
            connection, data = pending.popleft()
            if connection not in self._connections:
                continue
            if isinstance(data, HandOver) and not connection.unsent:
                self._forget(connection)
                earlier = self._exchange.get(data.worker)
                self._exchange[data.worker] = connection.socket
                if earlier:  # it broke, and the host connected again
                    earlier.close()
            elif not isinstance(data, bytes):
                self._close(connection)
            else:
                connection.unsent.append(memoryview(data))
                if len(connection.unsent) == 1 and not self._flush(connection):  # else the selector tells when to go on
                    pending += self._lose(connection)

    def _lose(self, connection: _Peer) -> Actions:
        """Closes a broken connection, and passes the protocol its last bytes (a goodbye, for example) and its end.
        Returns the actions that follow."""
        actions: Actions = []
        with contextlib.suppress(OSError):
            while data := connection.socket.recv(_CHUNK):
                actions += self._protocol.received(connection, data, self._clock())
        self._close(connection)
        return actions + self._protocol.closed(connection)

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
        self._forget(connection)
        connection.socket.close()

    def _forget(self, connection: _Peer) -> None:
        """Stops watching a connection, whose socket stays open."""
        del self._connections[connection]
        self._selector.unregister(connection.socket)
