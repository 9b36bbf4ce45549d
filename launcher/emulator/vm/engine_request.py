"""One request between a client and a container engine: its head, JSON replies, and raw bytes in both directions.

Every reply closes its connection, so one connection carries one request. Attach, exec, `logs -f` and BuildKit's h2c
sessions turn the connection into a stream; `forward` passes the bytes through unchanged. If either side disconnects,
`forward` closes both connections and the engine keeps what it has done.
"""

import contextlib
import json
import re
import socket
import threading
from dataclasses import dataclass
from http.client import parse_headers, responses
from typing import Any
from urllib.parse import parse_qs, urlencode

from launcher.emulator.http_server import Body, HttpRequest
from launcher.emulator.vm.engine_view import EngineRefusal

_LONGEST_LINE = 1 << 16
_BLOCK = 1 << 18


@dataclass
class EngineRequest(HttpRequest):
    """A request whose head was read; the body is still on the connection. The path is without the version."""

    connection: socket.socket
    version: str  # "/v1.41" or ""

    def json(self) -> dict[str, Any]:
        """Reads the body from the connection. Raises EngineRefusal when it is not a JSON object."""
        if self.headers.get("Expect", "").lower() == "100-continue":
            self.connection.sendall(b"HTTP/1.1 100 Continue\r\n\r\n")
        try:
            return super().json()
        except ValueError as error:
            raise EngineRefusal(400, f"the body is not JSON: {error}") from None


def receive(connection: socket.socket) -> EngineRequest | None:
    """Reads the head of the next request; None when the client closed the connection."""
    stream = connection.makefile("rb", buffering=0)  # takes no byte of the body from the connection
    line = stream.readline(_LONGEST_LINE)
    if not line:
        return None
    method, target, _ = line.decode("latin-1").split(" ", 2)
    headers = parse_headers(stream)
    target, _, query = target.partition("?")
    match = re.match(r"/v\d+\.\d+(?=/)", target)
    version = match[0] if match else ""
    parameters = {name: values[-1] for name, values in parse_qs(query, keep_blank_values=True).items()}
    body = Body(connection.makefile("rb"), headers)
    return EngineRequest(method, target.removeprefix(version), parameters, headers, body, connection, version)


def reply(connection: socket.socket, status: int, body: bytes) -> None:
    """Sends a complete response with a JSON body."""
    without_body = status in (204, 304)
    head = [f"HTTP/1.1 {status} {responses.get(status, '')}", "Api-Version: 1.41", "Ostype: linux"]
    head += ["Content-Type: application/json"]
    head += [] if without_body else [f"Content-Length: {len(body)}"]
    head += ["Connection: close"]
    connection.sendall(("\r\n".join(head) + "\r\n\r\n").encode() + (b"" if without_body else body))


def reply_error(connection: socket.socket, status: int, text: str) -> None:
    """Sends an error in the engine's format; does nothing when the client has disconnected."""
    with contextlib.suppress(OSError):
        reply(connection, status, json.dumps({"message": text}).encode())


def forward(request: EngineRequest, engine_path: str, path: str) -> None:
    """Sends the request to the engine's unix socket with another path (percent-encoded, without the version), then
    copies bytes both ways until the engine has ended, and ends the client's stream."""
    upgrade = "upgrade" in request.headers.get("Connection", "").lower()
    target = request.version + path + ("?" + urlencode(request.query) if request.query else "")
    head = [f"{request.method} {target} HTTP/1.1"]
    for name, value in request.headers.items():
        if upgrade or name.lower() not in ("connection", "keep-alive"):
            head.append(f"{name}: {value}")
    if not upgrade:
        head.append("Connection: close")
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as upstream:
        upstream.connect(engine_path)
        upstream.sendall(("\r\n".join(head) + "\r\n\r\n").encode("latin-1"))
        client_side = threading.Thread(target=_copy, args=(request.connection, upstream), daemon=True)
        client_side.start()
        _copy(upstream, request.connection)
        # The engine has sent everything; nothing reads what the client still sends.
        with contextlib.suppress(OSError):
            request.connection.shutdown(socket.SHUT_RDWR)
        client_side.join(60)


def _copy(source: socket.socket, target: socket.socket) -> None:
    """Copies bytes until the source ends, then ends the stream to the target: stdin may end before stdout."""
    with contextlib.suppress(OSError):
        while data := source.recv(_BLOCK):
            target.sendall(data)
    with contextlib.suppress(OSError):
        target.shutdown(socket.SHUT_WR)
