"""Simulated TCP between hosts: implements the Protocols of training.machine.

Bytes arrive in order, after a latency. A process that dies closes its connections, and the other side notices. A host
that is cut off loses every packet: what was sent meanwhile arrives when it is back (TCP sends it again), unless the
silence lasted longer than the connection's limit; then both sides get an error, each when its own limit is over.
"""

from __future__ import annotations

import errno
import random
from collections import deque
from dataclasses import dataclass, field
from typing import Any

from tests.simulation.scheduler import Deadline, Process, Scheduler, Task
from training.errors import TrainError

_LATENCY = 0.002  # seconds, on average
_CONNECT_RETRY = 1.0  # seconds between SYN packets


@dataclass
class Link:
    """The network interface of a host."""

    address: str
    cut: bool = False
    ends: dict[End, None] = field(default_factory=dict)  # of open connections


class End:
    """A connected socket, one end of a connection."""

    def __init__(self, wire: Wire, link: Link, process: Process) -> None:
        self._wire, self.link, self.process = wire, link, process
        self.peer: End | None = None
        self.waiters: dict[Task, None] = {}
        self.watchers: list[Selector] = []
        self._received = bytearray()
        self._end_of_stream, self._error = False, 0
        self._timeout: float | None = None
        self.closed = False
        self.lost_seconds = 900.0  # seconds until a silent connection breaks
        self._arrives = 0.0  # time at which the last byte sent arrives
        self._held: deque[bytes | None] = deque()  # sent while a network was cut
        link.ends[self] = None

    # --- methods of a socket

    def settimeout(self, seconds: float | None, /) -> None:
        self._timeout = seconds

    def sendall(self, data: bytes, /) -> None:
        self._wire.scheduler.check_alive()
        if self.closed:
            raise OSError(errno.EBADF, "bad file descriptor")
        if self._error:
            raise OSError(self._error, "the connection broke")
        self.put_on_wire(bytes(data))
        self._wire.scheduler.maybe_pause()

    def send(self, data: bytes | memoryview, /) -> int:
        self.sendall(bytes(data))
        return len(data)

    def recv(self, size: int, /) -> bytes:
        scheduler = self._wire.scheduler
        scheduler.check_alive()
        deadline = Deadline(scheduler, self._timeout)
        while not self.readable:
            if self._timeout == 0.0:
                raise BlockingIOError(errno.EAGAIN, "nothing yet")
            if not scheduler.wait(self.waiters, deadline.left(), "bytes of a connection"):
                raise TimeoutError("timed out")
        if self.closed:
            raise OSError(errno.EBADF, "bad file descriptor")
        if self._received:
            data = bytes(self._received[:size])
            del self._received[:size]
            return data
        if self._error:
            raise OSError(self._error, "the connection broke")
        return b""

    def shutdown(self, how: int, /) -> None:
        if self.closed or self._error:
            raise OSError(errno.ENOTCONN, "not connected")
        self.put_on_wire(None)
        self._end_of_stream = True
        self.notify()

    def close(self) -> None:
        """Closes the socket: the peer reads the bytes sent, and then the end."""
        if not self.closed:
            self.closed = True
            self.link.ends.pop(self, None)
            self.put_on_wire(None)
            self.notify()

    # --- the network below

    @property
    def readable(self) -> bool:
        """Returns whether recv would return at once."""
        return bool(self._received) or self._end_of_stream or bool(self._error) or self.closed

    @property
    def _peer(self) -> End:
        assert self.peer is not None
        return self.peer

    def put_on_wire(self, data: bytes | None) -> None:
        """Sends bytes, or None for the end."""
        if self._held or self._wire.is_cut(self.link, self._peer.link):
            self._held.append(data)
            return
        wire = self._wire
        self._arrives = max(self._arrives, wire.scheduler.now + wire.latency())
        wire.scheduler.call_at(self._arrives, lambda: self._peer.receive(data, self))

    def receive(self, data: bytes | None, sender: End) -> None:
        """Receives bytes, or the end."""
        if self._error:
            return
        if self._wire.is_cut(self.link, sender.link):
            sender._held.append(data)
            return
        if self.closed:
            if data is not None:  # answered with a reset, which overtakes no earlier bytes
                wire = self._wire
                self._arrives = max(self._arrives, wire.scheduler.now + wire.latency())
                wire.scheduler.call_at(self._arrives, lambda: sender.break_off(errno.ECONNRESET))
            return
        if data is None:
            self._end_of_stream = True
        else:
            self._received += data
        self.notify()

    def resume(self) -> None:
        """Sends the bytes held back while the network was cut."""
        held, self._held = self._held, deque()
        for data in held:
            self.put_on_wire(data)

    def break_off(self, code: int) -> None:
        """Breaks the connection, as the kernel does."""
        if not self.closed and not self._error:
            self._error = code
            self._held.clear()
            self.notify()

    def notify(self) -> None:
        self._wire.scheduler.wake_all(self.waiters)
        for watcher in self.watchers:
            self._wire.scheduler.wake_all(watcher.waiters)


class Listener:
    def __init__(self, wire: Wire, key: tuple[str, int], process: Process) -> None:
        self._wire, self._key, self.process = wire, key, process
        self.queue: deque[End] = deque()
        self.waiters: dict[Task, None] = {}
        self.watchers: list[Selector] = []
        self._timeout: float | None = None
        self.closed = False

    @property
    def readable(self) -> bool:
        """Returns whether accept would return at once."""
        return bool(self.queue)

    def settimeout(self, seconds: float | None, /) -> None:
        self._timeout = seconds

    def accept(self) -> tuple[End, Any]:
        scheduler = self._wire.scheduler
        deadline = Deadline(scheduler, self._timeout)
        while not self.queue:
            if self._timeout == 0.0:
                raise BlockingIOError(errno.EAGAIN, "nobody")
            if not scheduler.wait(self.waiters, deadline.left(), "a connection"):
                raise TimeoutError("timed out")
        end = self.queue.popleft()
        return end, (end.peer.link.address if end.peer else "", 0)

    def close(self) -> None:
        """Stops listening; breaks connections that were not accepted."""
        if not self.closed:
            self.closed = True
            self._wire.listeners.pop(self._key, None)
            for end in self.queue:
                end.close()
            self.queue.clear()

    def offer(self, end: End) -> None:
        """Queues a client's connection."""
        self.queue.append(end)
        self._wire.scheduler.wake_all(self.waiters)
        for watcher in self.watchers:
            self._wire.scheduler.wake_all(watcher.waiters)


@dataclass(frozen=True)
class Key:
    """selectors.SelectorKey."""

    fileobj: Any
    data: Any


class Selector:
    """selectors.DefaultSelector, for reading only."""

    def __init__(self, scheduler: Scheduler) -> None:
        self._scheduler = scheduler
        self._keys: dict[Any, Key] = {}
        self.waiters: dict[Task, None] = {}

    def register(self, fileobj: Any, events: int, data: Any = None) -> Key:
        self._keys[fileobj] = Key(fileobj, data)
        fileobj.watchers.append(self)
        return self._keys[fileobj]

    def modify(self, fileobj: Any, events: int, data: Any = None) -> None:
        """Does nothing: writing never waits here."""

    def unregister(self, fileobj: Any) -> Key:
        fileobj.watchers.remove(self)
        return self._keys.pop(fileobj)

    def select(self, timeout: float | None = None) -> list[tuple[Any, int]]:
        deadline = Deadline(self._scheduler, timeout)
        while not (ready := [(key, 1) for fileobj, key in self._keys.items() if fileobj.readable]):
            if not self._scheduler.wait(self.waiters, deadline.left(), "any connection"):
                return []
        return ready

    def close(self) -> None:
        for fileobj in list(self._keys):
            self.unregister(fileobj)


class Wire:
    """The network between all hosts of a simulated run."""

    def __init__(self, scheduler: Scheduler, randomness: random.Random) -> None:
        self.scheduler, self._random = scheduler, randomness
        self.listeners: dict[tuple[str, int], Listener] = {}
        self.links: dict[str, Link] = {}
        self.parted: set[frozenset[str]] = set()  # pairs of addresses that do not reach each other

    def is_cut(self, one: Link, other: Link) -> bool:
        return one.cut or other.cut or frozenset((one.address, other.address)) in self.parted

    def latency(self) -> float:
        """Returns the seconds that a packet takes."""
        return self._random.random() * 2 * _LATENCY

    def link(self, address: str) -> Link:
        return self.links.setdefault(address, Link(address))

    def cut(self, address: str) -> None:
        """Cuts a host from the network. Each side of its connections breaks after its own `lost_seconds`."""
        self.link(address).cut = True
        self._watch_silence(address)

    def part(self, *addresses: str) -> None:
        """Cuts two hosts from each other; both reach all else."""
        self.parted.add(frozenset(addresses))
        self._watch_silence(addresses[0])

    def _watch_silence(self, address: str) -> None:
        for end in self.link(address).ends:
            for side in filter(None, (end, end.peer)):
                self.scheduler.call_at(self.scheduler.now + side.lost_seconds, lambda side=side: self._give_up(side))

    def restore(self, *addresses: str) -> None:
        """Ends the cut of a host, or of two from each other."""
        self.parted.discard(frozenset(addresses))
        self.link(addresses[0]).cut &= len(addresses) > 1
        for end in list(self.link(addresses[0]).ends):
            for side in filter(None, (end, end.peer)):
                side.resume()

    def kill(self, process: Process) -> None:
        """Closes the sockets of a dead process, as its kernel does."""
        for listener in [listener for listener in self.listeners.values() if listener.process is process]:
            listener.close()
        for link in self.links.values():
            for end in [end for end in link.ends if end.process is process]:
                end.close()

    def _give_up(self, end: End) -> None:
        peer = end.peer
        if self.is_cut(end.link, peer.link if peer is not None else end.link):
            end.break_off(errno.ETIMEDOUT)
            # From now on, the peer's bytes are answered with a reset, once they arrive.
            if peer is not None:
                self.scheduler.call_at(self.scheduler.now + peer.lost_seconds, lambda: peer.break_off(errno.ECONNRESET))


class HostNetwork:
    """The training.machine.Network of one process."""

    def __init__(self, wire: Wire, address: str, process: Process) -> None:
        self._wire, self._link, self._process = wire, wire.link(address), process

    def listen(self, address: str, port: int) -> Listener:
        key = (address, port)
        if key in self._wire.listeners:
            raise TrainError(f"port {port} on {address} is in use, so the hosts can't meet there")
        self._wire.listeners[key] = Listener(self._wire, key, self._process)
        return self._wire.listeners[key]

    def connect(self, address: str, port: int, timeout: float) -> End:
        scheduler, wire = self._wire.scheduler, self._wire
        deadline = Deadline(scheduler, timeout)
        while True:
            scheduler.sleep(wire.latency())
            other = wire.link(address)
            if not wire.is_cut(self._link, other):
                break
            if not deadline.left():
                raise TimeoutError("timed out")
            scheduler.sleep(min(_CONNECT_RETRY, deadline.left() or 0.0))
        listener = wire.listeners.get((address, port))
        if listener is None:
            raise ConnectionRefusedError(errno.ECONNREFUSED, "connection refused")
        own, theirs = End(wire, self._link, self._process), End(wire, other, listener.process)
        own.peer, theirs.peer = theirs, own
        own.settimeout(timeout)
        listener.offer(theirs)
        return own

    def selector(self) -> Selector:
        return Selector(self._wire.scheduler)

    def detect_silence(self, connection: Any, lost_seconds: float) -> None:
        connection.lost_seconds = lost_seconds
