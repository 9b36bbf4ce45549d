"""Sockets between the hosts of an attempt: performs the handshake on them, from both sides."""

from __future__ import annotations

import errno
import os
import selectors
import socket
import time
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

from training.distributed.barrier_state import Refusal
from training.distributed.handshake import (
    NONCE_BYTES,
    SPARE_CONNECTIONS,
    ClientHandshake,
    HostCredentials,
    ServerHandshake,
    VerifiedHello,
)
from training.distributed.messages import HANDSHAKE_BYTES, LineBuffer, Malformed
from training.machine import SYSTEM, Machine
from training.machine.network import Connection

T = TypeVar("T")


def accept_connection(
    accept: Callable[[], tuple[T, Any]],
    close_oldest: Callable[[], bool],
    sleep: Callable[[float], None] = time.sleep,
) -> T | None:
    """Returns the next connection, or None if none waits, or if this process can have no more. `accept` is that of a
    listener with time-out 0; `close_oldest` closes the oldest pending connection to make room, or returns False if
    there is none. Raises OSError if the listener itself is broken."""
    while True:
        try:
            accepted, _ = accept()
        except (BlockingIOError, ConnectionError, TimeoutError):
            return None  # a client that has given up raises too
        except OSError as error:
            if error.errno not in (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM):
                raise
            if not close_oldest():
                sleep(0.05)  # the connection stays in the listener's queue
                return None
        else:
            return accepted


def perform_handshake(
    connection: Connection, own: HostCredentials, worker: int, seconds: float, machine: Machine = SYSTEM
) -> LineBuffer | Refusal:
    """Performs the handshake of `worker` on a new connection to host 0, within `seconds`, and changes its time-out.
    Returns the bytes received after the handshake, or host 0's refusal. Raises OSError if host 0 closed the connection
    or did not answer in time, Malformed if another program than host 0 answered."""
    lines = LineBuffer(HANDSHAKE_BYTES)
    received = _receive_lines(connection, lines, machine.clock.monotonic() + seconds, machine.clock.monotonic)
    handshake = ClientHandshake(own, worker, machine.random.randbytes(NONCE_BYTES).hex())
    connection.sendall(handshake.answer_challenge(next(received)))
    return handshake.check_answer(next(received)) or lines


def _receive_lines(
    connection: Connection, lines: LineBuffer, deadline: float, clock: Callable[[], float]
) -> Iterator[bytearray]:
    """Yields the lines of a connection until the deadline. Bytes after the last line taken stay in `lines`."""
    while True:
        connection.settimeout(max(0.001, deadline - clock()))
        data = connection.recv(HANDSHAKE_BYTES)
        if not data:
            raise ConnectionResetError("closed the connection: it ends, is of another attempt, or has another secret")
        yield from lines.feed(data)


def accept_peers(listener: socket.socket, own: HostCredentials, seconds: float) -> dict[int, socket.socket]:
    """Returns connections of all hosts but host 0, by worker, after each has proved that it belongs to the attempt.
    Other clients delay nothing: each holds a connection for HANDSHAKE_SECONDS at most. Raises TimeoutError, which names
    the missing hosts, if not all connected within `seconds`, and OSError if the listener is broken."""
    acceptor = _PeerAcceptor(listener, own)
    try:
        deadline = time.monotonic() + seconds
        while missing := sorted(set(range(1, own.identity.hosts)) - set(acceptor.peers)):
            now = time.monotonic()
            if now >= deadline:
                names = ", ".join(map(str, missing))
                raise TimeoutError(f"host {names} did not connect to the {own.purpose} within {seconds:g} s")
            acceptor.serve(min(0.25, deadline - now))
        return acceptor.peers
    except BaseException:
        for peer in acceptor.peers.values():
            peer.close()
        raise
    finally:
        acceptor.close()


class _PeerAcceptor:
    """Accepts connections on host 0 and performs the handshake on all of them at once."""

    def __init__(self, listener: socket.socket, own: HostCredentials) -> None:
        self.peers: dict[int, socket.socket] = {}  # accepted, by worker
        self._own, self._listener = own, listener
        self._handshake = ServerHandshake(own)
        self._pending: dict[int, socket.socket] = {}
        self._opened = 0
        self._selector = selectors.DefaultSelector()
        listener.setblocking(False)
        self._selector.register(listener, selectors.EVENT_READ, None)

    def serve(self, seconds: float) -> None:
        """Waits for events at most `seconds`, and handles them."""
        for key, _ in self._selector.select(seconds):
            if key.data is None:
                self._accept()
            elif key.data in self._pending:
                self._read(key.data)
        for number in self._handshake.overdue(time.monotonic(), self._own.identity.hosts + SPARE_CONNECTIONS):
            self._drop(number)

    def _accept(self) -> None:
        """Accepts one connection and sends it a challenge."""
        connection = accept_connection(self._listener.accept, self._close_oldest)
        if connection is None:
            return
        number, self._opened = self._opened, self._opened + 1
        try:
            connection.setblocking(False)
            connection.sendall(self._handshake.opened(number, time.monotonic()))  # fits an empty buffer
        except OSError:
            self._handshake.forget(number)
            connection.close()
            return
        self._pending[number] = connection
        self._selector.register(connection, selectors.EVENT_READ, number)

    def _read(self, number: int) -> None:
        """Reads from a pending connection. Moves it to `peers` after a valid hello, closes it after bad bytes."""
        connection = self._pending[number]
        try:
            data = connection.recv(HANDSHAKE_BYTES)
            if not data:
                raise ConnectionResetError
            hello = self._handshake.received(number, data)
            if hello is None:
                return
            if not self._is_peer(hello):
                raise Malformed("no other host of this attempt")
            connection.sendall(self._handshake.welcome(hello))
        except BlockingIOError:
            return
        except (OSError, Malformed):
            self._drop(number)
            return
        self._forget(number)
        if hello.worker in self.peers:  # its connection broke, and it connected again
            self.peers[hello.worker].close()
        self.peers[hello.worker] = connection

    def _is_peer(self, hello: VerifiedHello) -> bool:
        """Returns whether a hello is from another host of this very attempt."""
        return hello.identity == self._own.identity and 0 < hello.worker < self._own.identity.hosts

    def _forget(self, number: int) -> socket.socket:
        """Removes a pending connection without closing it, and returns it."""
        self._handshake.forget(number)
        connection = self._pending.pop(number)
        self._selector.unregister(connection)
        return connection

    def _drop(self, number: int) -> None:
        """Closes a pending connection."""
        self._forget(number).close()

    def _close_oldest(self) -> bool:
        """Closes the connection that has been pending longest. Returns False if none is pending."""
        oldest = self._handshake.oldest()
        if oldest is not None:
            self._drop(oldest)
        return oldest is not None

    def close(self) -> None:
        """Closes all pending connections."""
        for number in list(self._pending):
            self._drop(number)
        self._selector.close()


def describe_error(error: BaseException) -> str:
    """Returns the first line of an error's message; the system's text for a bare errno; else its class name."""
    text = str(error) or (os.strerror(error.errno) if isinstance(error, OSError) and error.errno else "")
    return (text or type(error).__name__).splitlines()[0]
