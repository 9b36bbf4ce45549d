"""The emulator's servers for tests that need no emulated slice: on a loopback port, with faults on demand."""

import contextlib
import socket
import threading
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from launcher.emulator import storage
from launcher.emulator.bucket import Buckets
from launcher.emulator.http_server import Handler, HttpRequest, HttpResponse, accept, serve_http
from launcher.emulator.registry import NAMES, EmulatedRegistry
from launcher.emulator.state import EmulatorState, Store
from launcher.emulator.tls import CA_FILE, serve_tls, tls_context

HOST = "us-central2-docker.pkg.dev"
OTHER_HOST = "registry.example.com"  # one that is not Google's
TOKEN = "a-good-token"


class LoopbackServer:
    """Answers requests with a function, or with the method of a subclass, until `close`."""

    def __init__(self, answer: Handler | None = None, host: str = "127.0.0.1") -> None:
        self._handler = answer or self.answer
        self.listener = socket.create_server((host, 0), backlog=128)
        self.address = f"{host}:{self.listener.getsockname()[1]}"
        self.url = f"http://{self.address}"
        self._connections: list[socket.socket] = []
        self._end, until = socket.socketpair()
        self._thread = threading.Thread(target=accept, args=({self.listener: self._serve}, until), daemon=True)
        self._thread.start()

    def _serve(self, connection: socket.socket) -> None:
        self._connections.append(connection)
        self.serve(connection)

    def serve(self, connection: socket.socket) -> None:
        """Answers one connection."""
        serve_http(connection, self._handler)

    def answer(self, request: Any) -> Any:
        raise NotImplementedError

    def close(self) -> None:
        """Stops accepting connections, and shuts down those that are open."""
        self._end.close()
        self._thread.join(5)
        for connection in self._connections:
            with contextlib.suppress(OSError):  # it has ended
                connection.shutdown(socket.SHUT_RDWR)


class BucketServer(LoopbackServer):
    """A server of Cloud Storage on a loopback port.

    `fault(request)` may return a response, which is sent instead of the service's; by default it returns None.
    `requests` has the method, the path and the Range header of each request.
    """

    def __init__(self, folder: Path) -> None:
        """Starts a server with a bucket named "bucket" whose objects are below `folder`."""
        self.folder = folder
        self.restart()
        self.fault: Callable[[Any], Any] = lambda request: None
        self.requests: list[tuple[str, str, str]] = []
        super().__init__()

    def restart(self) -> None:
        """Forgets everything that is not on disk, as a new server after a crash."""
        buckets = Buckets(self.folder)
        buckets.ensure("bucket")
        self.serve_storage = partial(storage.answer, buckets)

    def answer(self, request: Any) -> Any:
        self.requests.append((request.method, request.path, request.headers.get("Range", "")))
        return self.fault(request) or self.serve_storage(request)


class RegistryServer(LoopbackServer):
    """An emulated registry, and what clients asked it. `token`: what it demands; "" for nothing."""

    def __init__(self, folder: Path, *, token: str = TOKEN) -> None:
        folder.mkdir()
        self.state = EmulatorState("0badcafe", 1, "/nowhere", "/nowhere", 1.0, 1.0, token=token)
        self.api = EmulatedRegistry(folder / "registry", Store(self.state, None))
        self.asked: list[str] = []
        self.bytes_received = 0
        self.before: Callable[[HttpRequest], HttpResponse | None] = lambda request: None
        self.context = tls_context(folder, (*NAMES, OTHER_HOST, "localhost"))
        self.ca = folder / CA_FILE
        super().__init__()

    def serve(self, connection: socket.socket) -> None:
        serve_tls(connection, self.context, self.answer)

    def answer(self, request: HttpRequest) -> HttpResponse:
        self.asked.append(f"{request.method} {request.path}")
        self.bytes_received += int(request.headers.get("Content-Length") or 0)
        return self.before(request) or self.api.answer(request)
