"""A server on a loopback port for tests, with the emulator's HTTP."""

import socket
from typing import Any

from launcher.emulator.http_server import Acceptor, Handler, serve_http


class LoopbackServer:
    """Answers requests with a function, or with the method of a subclass, until `close`."""

    def __init__(self, answer: Handler | None = None, host: str = "127.0.0.1") -> None:
        self._handler = answer or self.answer
        self.listener = socket.create_server((host, 0), backlog=128)
        self.address = f"{host}:{self.listener.getsockname()[1]}"
        self.url = f"http://{self.address}"
        self.acceptor = Acceptor()
        self.acceptor.start()
        self.acceptor.add(self.listener, self.serve)

    def serve(self, connection: socket.socket) -> None:
        """Answers one connection."""
        serve_http(connection, self._handler)

    def answer(self, request: Any) -> Any:
        raise NotImplementedError

    def close(self) -> None:
        """Stops accepting connections."""
        self.acceptor.remove(self.listener)
        self.acceptor.close()
