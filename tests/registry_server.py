"""The emulated registry on a loopback port, over TLS, and this process's environment leading there."""

import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from launcher.emulator.http_server import HttpRequest, HttpResponse
from launcher.emulator.registry import NAMES, EmulatedRegistry
from launcher.emulator.state import EmulatorState, Store
from launcher.emulator.tls import CA_FILE, serve_tls, tls_context
from launcher.images.registry import ADDRESS
from tests.loopback import LoopbackServer

HOST = "us-central2-docker.pkg.dev"
OTHER_HOST = "registry.example.com"  # one that is not Google's
TOKEN = "a-good-token"


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


@contextmanager
def serve(folder: Path, patch: pytest.MonkeyPatch) -> Iterator[RegistryServer]:
    """A registry that this process's client reaches under any name."""
    server = RegistryServer(folder)
    patch.setenv(ADDRESS, server.address)
    patch.setenv("SSL_CERT_FILE", str(server.ca))
    yield server
    server.close()
