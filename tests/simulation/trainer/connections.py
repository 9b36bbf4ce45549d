"""Simulated TCP between hosts: implements the Protocols of training.machine.

Bytes arrive in order, after a latency. A process that dies closes its connections, and the other side notices. A host
that is cut off loses every packet: what was sent meanwhile arrives when it is back (TCP sends it again), unless the
silence lasted longer than the connection's limit; then both sides get an error, each when its own limit is over.
"""

from __future__ import annotations

import errno
import random
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from selectors import EVENT_READ, SelectorKey
from typing import Any

from tests.simulation.scheduler import Process, Scheduler, Task
from training.errors import TrainError

_LATENCY = 0.002  # seconds, on average
_CONNECT_RETRY = 1.0  # seconds between SYN packets


@dataclass
class Link:
    """The network interface of a host."""

    address: str
    cut: bool = False
    ends: dict[End, None] = field(default_factory=dict)  # of open connections


class Socket:
    """Is the base of connections and listeners: a task waits for one, or for the first of several."""

    readable = False  # whether the next call returns at once

    def __init__(self, wire: Wire, process: Process) -> None:
        self._wire, self.process = wire, process
        self.waiters: dict[Task, None] = {}
        self.watchers: list[Selector] = []
        self._timeout: float | None = None
        self.closed = False

    def settimeout(self, seconds: float | None, /) -> None:
        self._timeout = seconds

    def notify(self) -> None:
        for each in (self, *self.watchers):
            self._wire.scheduler.wake_all(each.waiters)

    def _await(self, what: str) -> None:
        """Blocks until the socket is readable, as long as its time-out allows."""
        if not self.readable and self._timeout == 0.0:
            raise BlockingIOError(errno.EAGAIN, "nothing yet")
        if not self._wire.scheduler.wait_until(lambda: self.readable, self.waiters, self._timeout, what):
            raise TimeoutError("timed out")


class End(Socket):
    """A connected socket, one end of a connection."""

    def __init__(self, wire: Wire, link: Link, process: Process) -> None:
        super().__init__(wire, process)
        self.link = link
        self.peer: End  # set at once
        self._received = bytearray()
        self._end_of_stream, self._error = False, 0
        self.lost_seconds = 900.0  # seconds until a silent connection breaks
        self._arrives = 0.0  # time at which the last byte sent arrives
        self._held: deque[bytes | None] = deque()  # sent while a network was cut
        link.ends[self] = None

    # --- methods of a socket

    def sendall(self, data: bytes | memoryview, /) -> None:
        self._wire.scheduler.check_alive()
        if self.closed:
            raise OSError(errno.EBADF, "bad file descriptor")
        if self._error:
            raise OSError(self._error, "the connection broke")
        self.put_on_wire(bytes(data))
        self._wire.scheduler.maybe_pause()

    def send(self, data: bytes | memoryview, /) -> int:
        self.sendall(data)
        return len(data)

    def recv(self, size: int, /) -> bytes:
        self._wire.scheduler.check_alive()
        self._await("bytes of a connection")
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
        return bool(self._received) or self._end_of_stream or bool(self._error) or self.closed

    def _after_latency(self, arrive: Callable[[], None]) -> None:
        """Calls a function when what is sent now arrives: it overtakes nothing that was sent earlier."""
        scheduler = self._wire.scheduler
        self._arrives = max(self._arrives, scheduler.now + self._wire.latency())
        scheduler.call_at(self._arrives, arrive)

    def put_on_wire(self, data: bytes | None) -> None:
        """Sends bytes, or None for the end."""
        if self._held or self._wire.is_cut(self.link, self.peer.link):
            self._held.append(data)
        else:
            self._after_latency(lambda: self.peer.receive(data, self))

    def receive(self, data: bytes | None, sender: End) -> None:
        """Receives bytes, or the end."""
        if self._error:
            return
        if self._wire.is_cut(self.link, sender.link):
            sender._held.append(data)
        elif not self.closed:
            self._end_of_stream |= data is None
            self._received += data or b""
            self.notify()
        elif data is not None:
            self._after_latency(lambda: sender.break_off(errno.ECONNRESET))

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


class Listener(Socket):
    def __init__(self, wire: Wire, key: tuple[str, int], process: Process) -> None:
        super().__init__(wire, process)
        self._key = key
        self.queue: deque[End] = deque()

    @property
    def readable(self) -> bool:
        return bool(self.queue)

    def accept(self) -> tuple[End, tuple[str, int]]:
        self._await("a connection")
        end = self.queue.popleft()
        return end, (end.peer.link.address, 0)

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
        self.notify()


class Selector:
    """selectors.DefaultSelector, for reading only."""

    def __init__(self, scheduler: Scheduler) -> None:
        self._scheduler = scheduler
        self._keys: dict[Socket, SelectorKey] = {}
        self.waiters: dict[Task, None] = {}

    def register(self, fileobj: Socket, events: int, data: Any = None) -> SelectorKey:
        self._keys[fileobj] = SelectorKey(fileobj, 0, events, data)
        fileobj.watchers.append(self)
        return self._keys[fileobj]

    def modify(self, fileobj: Socket, events: int, data: Any = None) -> None:
        """Does nothing: writing never waits here."""

    def unregister(self, fileobj: Socket) -> SelectorKey:
        fileobj.watchers.remove(self)
        return self._keys.pop(fileobj)

    def select(self, timeout: float | None = None) -> list[tuple[SelectorKey, int]]:
        def ready() -> list[tuple[SelectorKey, int]]:
            return [(key, EVENT_READ) for fileobj, key in self._keys.items() if fileobj.readable]

        return self._scheduler.wait_until(ready, self.waiters, timeout, "any connection")

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
            for side in (end, end.peer):
                self.scheduler.call_at(self.scheduler.now + side.lost_seconds, lambda side=side: self._give_up(side))

    def restore(self, *addresses: str) -> None:
        """Ends the cut of a host, or of two from each other."""
        self.parted.discard(frozenset(addresses))
        self.link(addresses[0]).cut &= len(addresses) > 1
        for end in list(self.link(addresses[0]).ends):
            for side in (end, end.peer):
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
        if self.is_cut(end.link, peer.link):
            end.break_off(errno.ETIMEDOUT)
            # From now on, the peer's bytes are answered with a reset, once they arrive.
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
        scheduler, wire, other = self._wire.scheduler, self._wire, self._wire.link(address)
        deadline = scheduler.now + timeout
        scheduler.sleep(wire.latency())
        while wire.is_cut(self._link, other):
            if scheduler.now >= deadline:
                raise TimeoutError("timed out")
            scheduler.sleep(min(_CONNECT_RETRY, deadline - scheduler.now))
            scheduler.sleep(wire.latency())
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

    def detect_silence(self, connection: End, lost_seconds: float) -> None:
        connection.lost_seconds = lost_seconds
