"""Sockets between the hosts of an attempt: performs the handshake on them, from both sides."""

import contextlib
import errno
import os
import queue
import socket
import threading
import time
from collections.abc import Callable, Iterator
from itertools import islice
from typing import Any, TypeVar

from training.distributed.barrier_state import Refusal
from training.distributed.handshake import (
    HANDSHAKE_SECONDS,
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
    accept: Callable[[], tuple[T, Any]], close_oldest: Callable[[], bool], sleep: Callable[[float], None] = time.sleep
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
    """Yields the lines of a connection; bytes after the last line taken stay in `lines`. Raises TimeoutError at the
    deadline, ConnectionResetError when the other side closes, and Malformed for a line that is too long."""
    while True:
        connection.settimeout(max(0.001, deadline - clock()))
        data = connection.recv(HANDSHAKE_BYTES)
        if not data:
            raise ConnectionResetError("closed the connection: it ends, is of another attempt, or has another secret")
        yield from lines.feed(data)


def accept_peers(listener: socket.socket, own: HostCredentials, seconds: float) -> dict[int, socket.socket]:
    """Returns connections of all hosts but host 0, by worker, after each has proved that it belongs to the attempt.
    Other clients delay nothing: each has a thread, for HANDSHAKE_SECONDS at most. Raises TimeoutError, which names the
    missing hosts, if not all connected within `seconds`, and OSError if the listener is broken."""
    peers: dict[int, socket.socket] = {}
    pending: list[socket.socket] = []  # without a proof yet, the oldest first
    proved: queue.SimpleQueue[tuple[int, socket.socket]] = queue.SimpleQueue()

    def close_oldest() -> bool:
        """Shuts down the connection that has been pending longest. Returns False if none is."""
        if not pending:
            return False
        with contextlib.suppress(OSError):
            pending.pop(0).shutdown(socket.SHUT_RDWR)  # its thread closes it
        return True

    def serve(connection: socket.socket) -> None:
        """Performs a client's handshake: queues the connection in `proved` if it is a host's, else closes it."""
        try:
            handshake, hello = _receive_hello(connection, own)
            pending.remove(connection)
            connection.sendall(handshake.welcome(hello))
        except (OSError, Malformed, ValueError):  # ValueError: it was closed to make room
            with contextlib.suppress(ValueError):
                pending.remove(connection)
            connection.close()
        else:
            proved.put((hello.worker, connection))

    deadline = time.monotonic() + seconds
    listener.setblocking(False)
    try:
        while missing := sorted(set(range(1, own.identity.hosts)) - set(peers)):
            if time.monotonic() >= deadline:
                names = ", ".join(map(str, missing))
                raise TimeoutError(f"host {names} did not connect to the {own.purpose} within {seconds:g} s")
            for connection in islice(iter(lambda: accept_connection(listener.accept, close_oldest), None), 64):
                pending.append(connection)
                if len(pending) > own.identity.hosts + SPARE_CONNECTIONS:
                    close_oldest()
                threading.Thread(target=serve, args=(connection,), name="handshake", daemon=True).start()
            with contextlib.suppress(queue.Empty):
                worker, connection = proved.get(timeout=0.05)
                if worker in peers:  # its connection broke, and it connected again
                    peers[worker].close()
                peers[worker] = connection
        return peers
    except BaseException:
        for peer in peers.values():
            peer.close()
        raise


def _receive_hello(connection: socket.socket, own: HostCredentials) -> tuple[ServerHandshake, VerifiedHello]:
    """Sends a challenge on a new connection to host 0 and returns the valid hello of another host of this attempt.
    Raises OSError after HANDSHAKE_SECONDS or if the other side closes, Malformed for other bytes or another attempt."""
    handshake = ServerHandshake(own)
    until = time.monotonic() + HANDSHAKE_SECONDS
    connection.settimeout(HANDSHAKE_SECONDS)
    connection.sendall(handshake.opened(0, 0.0))
    hello = None
    while hello is None:
        connection.settimeout(max(0.001, until - time.monotonic()))
        data = connection.recv(HANDSHAKE_BYTES)
        if not data:
            raise ConnectionResetError
        hello = handshake.received(0, data)
    if hello.identity != own.identity or not 0 < hello.worker < own.identity.hosts:
        raise Malformed("no other host of this attempt")
    return handshake, hello


def describe_error(error: BaseException) -> str:
    """Returns the first line of an error's message; the system's text for a bare errno; else its class name."""
    text = str(error) or (os.strerror(error.errno) if isinstance(error, OSError) and error.errno else "")
    return (text or type(error).__name__).splitlines()[0]
