"""TCP connections between hosts, as a protocol with the methods of `socket` and `selectors`."""

from __future__ import annotations

import errno
import selectors
import socket
import time
from typing import Any, Protocol

from training.errors import TrainError

NAME_SECONDS = 60.0  # for a cluster's name service to learn of this host


class Connection(Protocol):
    """A connected socket."""

    def sendall(self, data: bytes, /) -> None:
        """Sends everything. Raises OSError."""

    def send(self, data: memoryview, /) -> int:
        """Sends some bytes; returns how many. Raises OSError, and BlockingIOError when none can be sent now and the
        time-out is 0."""

    def recv(self, size: int, /) -> bytes:
        """Waits for some bytes, at most `size`; b"" when the other side has closed. Raises OSError, TimeoutError
        without an errno after the time of `settimeout`, and BlockingIOError at once when that is 0."""

    def settimeout(self, seconds: float | None, /) -> None:
        """How long one call may take; 0: it never waits."""

    def shutdown(self, how: int, /) -> None:
        """Closes for sending, receiving, or both (socket.SHUT_...). Raises OSError."""

    def close(self) -> None:
        """Gives the socket up."""


class Listener(Protocol):
    """A listening socket."""

    def accept(self) -> tuple[Connection, Any]:
        """A connection that a client has made, and the client's address. Raises OSError, and BlockingIOError when there
        is none and the time-out is 0."""

    def settimeout(self, seconds: float | None, /) -> None:
        """How long `accept` may take; 0: it never waits."""

    def close(self) -> None:
        """Listens no more."""


class Selector(Protocol):
    """As `selectors.BaseSelector`."""

    def register(self, fileobj: Any, events: int, data: Any = None) -> Any:
        """Watches a socket."""

    def modify(self, fileobj: Any, events: int, data: Any = None) -> Any:
        """Watches a socket that is registered for other events."""

    def unregister(self, fileobj: Any) -> Any:
        """Watches it no more. Raises KeyError, ValueError."""

    def select(self, timeout: float | None = None) -> list[tuple[Any, int]]:
        """Waits until sockets can be read or written, as they were registered, at most `timeout` seconds. Returns
        (key, events) of each."""

    def close(self) -> None:
        """Gives it up."""


class Network(Protocol):
    """Makes connections."""

    def listen(self, address: str, port: int) -> Listener:
        """Listens on this host's own address. Raises TrainError."""

    def connect(self, address: str, port: int, timeout: float) -> Connection:
        """Connects to a host. Raises OSError."""

    def selector(self) -> Selector:
        """Waits for several sockets at once."""

    def detect_silence(self, connection: Connection, lost_seconds: float) -> None:
        """Makes the kernel break a connection to a machine that has vanished, within about `lost_seconds`, whatever
        this process is busy with."""


class SystemNetwork:
    """The network of this machine."""

    def listen(self, address: str, port: int) -> socket.socket:
        return listen(address, port)

    def connect(self, address: str, port: int, timeout: float) -> socket.socket:
        return connect(address, port, timeout)

    def selector(self) -> Selector:
        return selectors.DefaultSelector()

    def detect_silence(self, connection: Any, lost_seconds: float) -> None:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        for option, value in (
            ("TCP_KEEPIDLE", 1),
            ("TCP_KEEPINTVL", 1),
            ("TCP_KEEPCNT", max(1, int(lost_seconds) - 1)),
            ("TCP_USER_TIMEOUT", int(lost_seconds * 1000)),
        ):
            if hasattr(socket, option):  # Linux has all four
                connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, option), value)


def connect(address: str, port: int, timeout: float) -> socket.socket:
    """A connection whose small messages are not held back. Raises OSError."""
    connection = socket.create_connection((address, port), timeout=timeout)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return connection


def listen(address: str, port: int) -> socket.socket:
    """Listens on this host's own address, waiting for its name to be known. Raises TrainError."""
    deadline = time.monotonic() + NAME_SECONDS
    while True:
        try:
            socket.getaddrinfo(address, port)
            break
        except socket.gaierror as error:
            if time.monotonic() > deadline:
                raise TrainError(
                    f"this host is worker 0, but its own name {address} was not known within {NAME_SECONDS:g} s: "
                    f"{error}"
                ) from None
            time.sleep(0.5)
    try:
        listener = socket.create_server((address, port), backlog=1024, reuse_port=False)
        listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)  # of the connections that it accepts, too
        return listener
    except OSError as error:
        if error.errno == errno.EADDRINUSE:
            raise TrainError(
                f"port {port} on {address} is in use, so the hosts can't meet there; does another trainer run on this "
                "host?"
            ) from None
        raise TrainError(
            f"this host is worker 0, but can't listen on {address}:{port}: {error.strerror or error}; is "
            "TPU_WORKER_HOSTNAMES in worker order?"
        ) from None
