"""The emulator's Cloud Storage for tests that need no emulated slice: one bucket, and faults on demand."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

from launcher.emulator.bucket import Buckets
from launcher.emulator.storage import StorageApi
from tests.loopback import LoopbackServer


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
        self.api = StorageApi(buckets)

    def answer(self, request: Any) -> Any:
        self.requests.append((request.method, request.path, request.headers.get("Range", "")))
        return self.fault(request) or self.api.answer(request)
