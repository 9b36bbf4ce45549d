"""TCP connections between hosts, as Protocols with the methods of `socket` and `selectors`."""

import errno
import selectors
import socket
import time
from typing import Any, Protocol

from training.errors import TrainError

NAME_SECONDS = 60.0  # in which the cluster's name service learns the name of this host


class Connection(Protocol):
    """A connected socket. All methods but `close` may raise OSError."""

    def sendall(self, data: bytes, /) -> None: ...

    def send(self, data: memoryview, /) -> int:
        """Sends some bytes and returns their number. Raises BlockingIOError if it would wait and the time-out is 0."""

    def recv(self, size: int, /) -> bytes:
        """Waits for at most `size` bytes; returns b"" if the peer has closed. Raises TimeoutError without an errno
        after the time of `settimeout`, and BlockingIOError at once if that is 0."""

    def settimeout(self, seconds: float | None, /) -> None: ...

    def shutdown(self, how: int, /) -> None: ...

    def close(self) -> None: ...


class Listener(Protocol):
    """A listening socket."""

    def accept(self) -> tuple[Connection, Any]:
        """Returns a new connection and the client's address. Raises OSError, and BlockingIOError if the time-out is 0
        and no client waits."""

    def settimeout(self, seconds: float | None, /) -> None: ...

    def close(self) -> None: ...


class Selector(Protocol):
    """`selectors.BaseSelector`."""

    def register(self, fileobj: Any, events: int, data: Any = None) -> Any: ...

    def modify(self, fileobj: Any, events: int, data: Any = None) -> Any: ...

    def unregister(self, fileobj: Any) -> Any: ...

    def select(self, timeout: float | None = None) -> list[tuple[Any, int]]:
        """Waits at most `timeout` seconds until sockets are ready. Returns their (key, events)."""

    def close(self) -> None: ...


class Network(Protocol):
    """Makes connections."""

    def listen(self, address: str, port: int) -> Listener:
        """Listens on this host's own address. Raises TrainError if it is not this host's, or its port is in use."""

    def connect(self, address: str, port: int, timeout: float) -> Connection:
        """Returns a connection to a host, made within `timeout` seconds. Raises OSError."""

    def selector(self) -> Selector: ...

    def detect_silence(self, connection: Connection, lost_seconds: float) -> None:
        """Makes the kernel break a connection to a vanished machine within about `lost_seconds`, however busy this
        process is."""


class SystemNetwork:
    """The network of this machine."""

    def listen(self, address: str, port: int) -> socket.socket:
        """Waits until the name service knows this host's `address`, NAME_SECONDS at most, and returns a listening
        socket. Raises TrainError if it stays unknown or is not this host's, or the port is in use."""
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
            listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)  # accepted connections inherit it
            return listener
        except OSError as error:
            if error.errno == errno.EADDRINUSE:
                raise TrainError(
                    f"port {port} on {address} is in use, so the hosts can't meet there: does another trainer run on "
                    "this host?"
                ) from None
            raise TrainError(
                f"this host is worker 0, but can't listen on {address}:{port}: {error.strerror or error}; is "
                "TPU_WORKER_HOSTNAMES in worker order?"
            ) from None

    def connect(self, address: str, port: int, timeout: float) -> socket.socket:
        """Returns a connection, made within `timeout` seconds, without Nagle's delay of small messages."""
        connection = socket.create_connection((address, port), timeout=timeout)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        return connection

    def selector(self) -> Selector:
        return selectors.DefaultSelector()

    def detect_silence(self, connection: Any, lost_seconds: float) -> None:
        """Sets TCP's keep-alive and time-out so that a vanished peer breaks the connection after `lost_seconds`."""
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        for option, value in (
            ("TCP_KEEPIDLE", 1),
            ("TCP_KEEPINTVL", 1),
            ("TCP_KEEPCNT", max(1, int(lost_seconds) - 1)),
            ("TCP_USER_TIMEOUT", int(lost_seconds * 1000)),
        ):
            if hasattr(socket, option):  # Linux has all four
                connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, option), value)
