"""Sockets between the hosts of an attempt: listening, letting in who proves that it belongs there, and noticing that a
peer is gone."""

from __future__ import annotations

import errno
import os
import selectors
import socket
import time
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

from training.distributed.protocol.greeting import (
    NONCE_BYTES,
    SPARE_CONNECTIONS,
    Credentials,
    Doorkeeper,
    Greeting,
    Introduction,
    Refused,
)
from training.distributed.protocol.messages import GREETING_BYTES, LineBuffer, Malformed
from training.machine import SYSTEM, Machine
from training.machine.network import Connection

T = TypeVar("T")


def accept(
    listener_accept: Callable[[], tuple[T, Any]],
    shed: Callable[[], bool],
    sleep: Callable[[float], None] = time.sleep,
) -> T | None:
    """The next connection; None when there is none any more, or no room for it.

    Args:
        listener_accept: `accept` of a listener whose time-out is 0.
        shed: Closes the oldest connection that has not proved who it is, where there is one; then there is room.
        sleep: Waits so many seconds.

    Raises:
        OSError: The listener itself is broken.
    """
    while True:
        try:
            accepted, _ = listener_accept()
        except (BlockingIOError, ConnectionError, TimeoutError):
            return None  # who connected has given up already
        except OSError as error:
            if error.errno not in (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM):
                raise
            if not shed():
                sleep(0.05)  # it stays in the listener's queue
                return None
        else:
            return accepted


def introduce(
    connection: Connection, own: Credentials, worker: int, seconds: float, machine: Machine = SYSTEM
) -> LineBuffer | Refused:
    """A host's side of the greeting on a connection to host 0.

    Args:
        connection: Is left with a time-out of its own.
        own: What this host proves, and for which purpose.
        worker: This host's number.
        seconds: For all of it.
        machine: What this process runs on.

    Returns:
        What was received after the greeting; or why host 0 does not let this host in.

    Raises:
        OSError: Host 0 closed the connection, or did not answer in time.
        Malformed: It is not host 0 that answers.
    """
    lines = LineBuffer(GREETING_BYTES)
    received = _lines(connection, lines, machine.clock.monotonic() + seconds, machine.clock.monotonic)
    introduction = Introduction(own, worker, machine.random.randbytes(NONCE_BYTES).hex())
    connection.sendall(introduction.answer_challenge(next(received)))
    return introduction.check_answer(next(received)) or lines


def let_in(listener: socket.socket, own: Credentials, seconds: float) -> dict[int, socket.socket]:
    """The connections of all hosts but host 0, by worker, each having proved that it belongs to the attempt.

    Strangers that connect meanwhile hold nobody up: each costs a connection, for greeting.SECONDS at most.

    Raises:
        TimeoutError: Not all hosts have connected within `seconds`; the message names those that have not.
        OSError: The listener is broken.
    """
    entrance = _Entrance(listener, own)
    try:
        deadline = time.monotonic() + seconds
        while missing := sorted(set(range(1, own.identity.hosts)) - set(entrance.hosts)):
            now = time.monotonic()
            if now >= deadline:
                names = ", ".join(map(str, missing))
                raise TimeoutError(f"host {names} did not connect to the {own.purpose} within {seconds:g} s")
            entrance.serve(min(0.25, deadline - now))
        return entrance.hosts
    except BaseException:
        for host in entrance.hosts.values():
            host.close()
        raise
    finally:
        entrance.close()


class _Entrance:
    """The connections of strangers, until all hosts are among them."""

    def __init__(self, listener: socket.socket, own: Credentials) -> None:
        self.hosts: dict[int, socket.socket] = {}
        self._own, self._listener = own, listener
        self._doorkeeper = Doorkeeper(own)
        self._strangers: dict[int, socket.socket] = {}
        self._opened = 0
        self._selector = selectors.DefaultSelector()
        listener.setblocking(False)
        self._selector.register(listener, selectors.EVENT_READ, None)

    def serve(self, seconds: float) -> None:
        """Lets in who comes within `seconds`."""
        for key, _ in self._selector.select(seconds):
            if key.data is None:
                self._accept()
            elif key.data in self._strangers:
                self._read(key.data)
        for number in self._doorkeeper.unwanted(time.monotonic(), self._own.identity.hosts + SPARE_CONNECTIONS):
            self._drop(number)

    def _accept(self) -> None:
        stranger = accept(self._listener.accept, self._shed)
        if stranger is None:
            return
        number, self._opened = self._opened, self._opened + 1
        try:
            stranger.setblocking(False)
            stranger.sendall(self._doorkeeper.opened(number, time.monotonic()))  # fits an empty buffer
        except OSError:
            self._doorkeeper.forget(number)
            stranger.close()
            return
        self._strangers[number] = stranger
        self._selector.register(stranger, selectors.EVENT_READ, number)

    def _read(self, number: int) -> None:
        stranger = self._strangers[number]
        try:
            data = stranger.recv(GREETING_BYTES)
            if not data:
                raise ConnectionResetError
            greeting = self._doorkeeper.received(number, data)
            if greeting is None:
                return
            if not self._is_member(greeting):
                raise Malformed("no other host of this attempt")
            stranger.sendall(self._doorkeeper.welcome(greeting))
        except BlockingIOError:
            return
        except (OSError, Malformed):
            self._drop(number)
            return
        self._forget(number)
        if greeting.worker in self.hosts:  # its connection broke, and it connected again
            self.hosts[greeting.worker].close()
        self.hosts[greeting.worker] = stranger

    def _is_member(self, greeting: Greeting) -> bool:
        return greeting.identity == self._own.identity and 0 < greeting.worker < self._own.identity.hosts

    def _forget(self, number: int) -> socket.socket:
        self._doorkeeper.forget(number)
        stranger = self._strangers.pop(number)
        self._selector.unregister(stranger)
        return stranger

    def _drop(self, number: int) -> None:
        self._forget(number).close()

    def _shed(self) -> bool:
        oldest = self._doorkeeper.oldest()
        if oldest is not None:
            self._drop(oldest)
        return oldest is not None

    def close(self) -> None:
        """Closes the connections of those that are still strangers."""
        for number in list(self._strangers):
            self._drop(number)
        self._selector.close()


def _lines(
    connection: Connection, lines: LineBuffer, deadline: float, clock: Callable[[], float]
) -> Iterator[bytearray]:
    """The lines of a connection, until the deadline. What follows the last one that is taken stays in `lines`."""
    while True:
        connection.settimeout(max(0.001, deadline - clock()))
        data = connection.recv(GREETING_BYTES)
        if not data:
            raise ConnectionResetError("closed the connection: it ends, is of another attempt, or has another secret")
        yield from lines.feed(data)


def describe(error: BaseException) -> str:
    """What went wrong, in one line."""
    text = str(error) or (os.strerror(error.errno) if isinstance(error, OSError) and error.errno else "")
    return (text or type(error).__name__).splitlines()[0]
