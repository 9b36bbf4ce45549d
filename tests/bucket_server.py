"""The emulator's Cloud Storage for tests that need no emulated slice: one bucket, and faults on demand."""

import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any


class BucketServer:
    """A server of Cloud Storage on a loopback port.

    `fault(request)` may return a response, which is sent instead of the service's; by default it returns None.
    `requests` has the method, the path and the Range header of each request.
    """

    def __init__(self, folder: Path) -> None:
        """Starts a server with a bucket named "bucket" whose objects are below `folder`."""
        from launcher.emulator.http_server import Acceptor, serve_http

        self.folder = folder
        self.restart()
        self.fault: Callable[[Any], Any] = lambda request: None
        self.requests: list[tuple[str, str, str]] = []
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.url = f"http://127.0.0.1:{self._listener.getsockname()[1]}"
        self._acceptor = Acceptor()
        self._acceptor.start()
        self._acceptor.add(self._listener, lambda connection: serve_http(connection, self.answer))

    def restart(self) -> None:
        """Forgets everything that is not on disk, as a new server after a crash."""
        from launcher.emulator.storage.api import StorageApi
        from launcher.emulator.storage.bucket import Buckets

        buckets = Buckets(self.folder)
        buckets.ensure("bucket")
        self.api = StorageApi(buckets)

    def answer(self, request: Any) -> Any:
        """Answers one request."""
        self.requests.append((request.method, request.path, request.headers.get("Range", "")))
        return self.fault(request) or self.api.answer(request)

    def close(self) -> None:
        """Stops accepting connections."""
        self._acceptor.remove(self._listener, close=True)
        self._acceptor.close()
