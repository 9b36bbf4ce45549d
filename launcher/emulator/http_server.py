"""The part of HTTP/1.1 that the emulator needs: requests with streamed bodies, responses from memory or from a file.

Listeners (TCP, unix, and those that hosts hand over) are added and removed while the server runs; each connection has a
thread of its own. Handlers are functions from `HttpRequest` to `HttpResponse` and know nothing about sockets. Why by
hand: docs/architecture.md.

What can fail half-way: when a client disconnects in the middle of a body, `Body` raises `Disconnected` in the handler,
and no response is sent.
"""

import base64
import contextlib
import json
import logging
import selectors
import socket
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from email.message import Message
from http.server import BaseHTTPRequestHandler
from typing import Any, BinaryIO
from urllib.parse import parse_qs, unquote

log = logging.getLogger(__name__)

BLOCK = 1 << 20
_IDLE_SECONDS = 3600.0
_LARGEST_BODY = 64 << 20  # bytes of a body that is held in memory


class Disconnected(Exception):
    """Raised when the client disconnected, or sent something other than HTTP."""


class Body:
    """A request's body, read as it arrives."""

    def __init__(self, source: BinaryIO, headers: Message) -> None:
        """Takes a connection at the begin of a body, whose length or chunks the headers announce. Reads nothing yet."""
        self._source = source
        self._chunked = headers.get("Transfer-Encoding", "").lower() == "chunked"  # until the last chunk was read
        # Bytes of the body, or of the current chunk.
        self._left = 0 if self._chunked else max(0, int(headers.get("Content-Length") or 0))

    def read(self, size: int = BLOCK) -> bytes:
        """Waits for and returns up to `size` bytes; b"" at the end. Raises Disconnected when the body ends early."""
        if self._chunked and not self._left:
            self._begin_chunk()
        if not self._left:
            return b""
        data = self._source.read(min(size, self._left))
        if not data:
            raise Disconnected("the body ended early")
        self._left -= len(data)
        if self._chunked and not self._left:
            self._source.readline(8)
        return data

    def _begin_chunk(self) -> None:
        """Reads a chunk's head, and after the last, empty one the body's end. Raises Disconnected for a broken one."""
        line = self._source.readline(1024)
        try:
            self._left = int(line.split(b";")[0], 16)
        except ValueError:
            raise Disconnected("a broken chunk") from None
        if not self._left:
            self._chunked = False
            while self._source.readline(65536).strip():
                pass

    def read_all(self, limit: int = _LARGEST_BODY) -> bytes:
        """Returns the whole body. Raises Disconnected if it ends early or is longer than `limit` bytes."""
        parts = []
        for data in self.blocks():
            parts.append(data)
            limit -= len(data)
            if limit < 0:
                raise Disconnected("a body too large to be held in memory")
        return b"".join(parts)

    def blocks(self) -> Iterator[bytes]:
        """Returns the body in blocks of at most `BLOCK` bytes. Raises Disconnected if it ends early."""
        return iter(self.read, b"")


@dataclass
class HttpRequest:
    method: str
    path: str  # still percent-encoded: an object's name may hold an encoded slash
    query: dict[str, str]  # decoded; of a repeated name the last value
    headers: Message
    body: Body
    connection: socket.socket | None = None  # from which a handler that returns None may read on
    target: str = ""  # path and query as they were sent

    def json(self) -> dict[str, Any]:
        """Reads the body and returns it as a JSON object, {} if it is empty. Raises ValueError when it is anything
        else, and Disconnected when it ends early or is too long."""
        value = json.loads(self.body.read_all() or b"{}")
        if not isinstance(value, dict):
            raise ValueError("a JSON object is expected")
        return value

    @property
    def login(self) -> tuple[str, str]:
        """Returns the user and the password of a Basic authorization, ("", "") without one."""
        kind, _, value = self.headers.get("Authorization", "").partition(" ")
        try:
            user, _, password = base64.b64decode(value if kind == "Basic" else "").decode().partition(":")
        except ValueError:
            return "", ""
        return user, password

    @property
    def segments(self) -> list[str]:
        """Returns the decoded parts of the path."""
        return [unquote(part) for part in self.path.strip("/").split("/")]


@dataclass
class FileRegion:
    """Bytes [start, start + length) of an open file; the sender closes it."""

    file: BinaryIO
    start: int
    length: int


@dataclass
class HttpResponse:
    """One HTTP response. Its Content-Length is added when it is sent."""

    status: int = 200
    body: bytes | FileRegion = b""
    headers: dict[str, str] = field(default_factory=dict)


def json_response(value: Any, status: int = 200, headers: dict[str, str] | None = None) -> HttpResponse:
    kind = {"Content-Type": "application/json; charset=UTF-8"}
    return HttpResponse(status, json.dumps(value, indent=1).encode(), {**kind, **(headers or {})})


def timestamp(seconds: float) -> str:
    """Formats seconds since 1970 in RFC 3339, as Google's APIs write times."""
    return datetime.fromtimestamp(seconds, UTC).strftime("%Y-%m-%dT%H:%M:%S.%fZ")


# None: the handler has used the connection itself, which carries no other request.
Handler = Callable[[HttpRequest], HttpResponse | None]


def serve_http(connection: socket.socket, handler: Handler, *, read_ahead: bool = True) -> None:
    """Answers the requests of one connection, with 500 where `handler` raises; returns when the client closes it or is
    silent for _IDLE_SECONDS, and after a handler's None or Disconnected. Leaves the connection open. Without
    `read_ahead`, takes no byte from it that `handler` has not read."""
    connection.setblocking(True)
    with contextlib.suppress(OSError):  # a unix socket has no such option
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    with contextlib.suppress(OSError, Disconnected):
        _Connection(connection, handler, BLOCK if read_ahead else 0)


class _Connection(BaseHTTPRequestHandler):
    """Answers one connection. BaseHTTPRequestHandler parses heads and answers `Expect: 100-continue`."""

    protocol_version = "HTTP/1.1"
    wbufsize = -1  # head and body of a small response are one packet
    timeout = _IDLE_SECONDS

    def __init__(self, connection: socket.socket, handler: Handler, rbufsize: int) -> None:
        self._handler = handler
        self.rbufsize = rbufsize  # type: ignore[misc]  # of this connection alone
        super().__init__(connection, "", None)  # type: ignore[arg-type]  # the address and the server are not used

    def log_message(self, format: str, *args: object) -> None:
        log.debug(format, *args)

    def __getattr__(self, name: str) -> Any:
        """Returns `_answer` for do_GET, do_PUT and every other method of HTTP."""
        if name.startswith("do_"):
            return self._answer
        raise AttributeError(name)

    def _answer(self) -> None:
        """Sends the handler's response, a 500 if it fails; nothing if it returns None or the client disconnected: then
        the connection takes no further request."""
        path, _, query = self.path.partition("?")
        body = Body(self.rfile, self.headers)  # type: ignore[arg-type]
        parameters = {name: values[-1] for name, values in parse_qs(query, keep_blank_values=True).items()}
        self.wfile.flush()  # `100 Continue`, for which a client may wait with its body
        try:
            request = HttpRequest(self.command, path, parameters, self.headers, body, self.connection, self.path)
            response = self._handler(request)
        except Disconnected:
            response = None
        except Exception:
            log.exception("%s %s", self.command, self.path)
            error = {"code": 500, "message": "the emulator failed; see its log", "status": "INTERNAL"}
            response = json_response({"error": error}, 500)
        if response is None:
            self.close_connection = True
            return
        try:
            for _ in body.blocks():  # closing with unread bytes resets a connection: the client would miss the response
                pass
        except Disconnected:
            self.close_connection = True
        self._send(response)

    def _send(self, response: HttpResponse) -> None:
        """Sends head and body (no body for HEAD and 204), and closes the file of a FileRegion."""
        body, has_body = response.body, self.command != "HEAD" and response.status != 204
        self.send_response_only(response.status)
        for name, value in {"Date": self.date_time_string(), **response.headers}.items():
            self.send_header(name, value)
        if response.status != 204:
            self.send_header("Content-Length", str(body.length if isinstance(body, FileRegion) else len(body)))
        if self.close_connection:
            self.send_header("Connection", "close")
        self.end_headers()
        if isinstance(body, FileRegion):
            with body.file as file:
                if has_body and body.length:
                    self.wfile.flush()
                    self.connection.sendfile(file, body.start, body.length)
        elif has_body:
            self.wfile.write(body)


def accept(
    listeners: Mapping[socket.socket, Callable[[socket.socket], None]], until: socket.socket | None = None
) -> None:
    """Accepts on listeners until the other end of the socket `until` sends something or is closed (None: for ever);
    then closes them and `until`. A thread for each connection runs its listener's function, logs its exception, and
    closes the connection."""
    with contextlib.ExitStack() as stack:
        selector = stack.enter_context(selectors.DefaultSelector())
        if until is not None:
            selector.register(stack.enter_context(until), selectors.EVENT_READ)
        for listener, serve in listeners.items():
            stack.enter_context(listener).setblocking(False)
            selector.register(listener, selectors.EVENT_READ, (listener, serve))
        while True:
            ready = [key.data for key, _ in selector.select()]
            if None in ready:
                return
            for listener, serve in ready:
                try:
                    connection, _ = listener.accept()
                except OSError:  # the client has given up; or no descriptor is left: do not spin until one is
                    time.sleep(0.01)
                    continue
                try:
                    threading.Thread(target=_run, args=(serve, connection), daemon=True).start()
                except RuntimeError:  # no thread is left: the client can try again
                    connection.close()


def accept_in_thread(listener: socket.socket, serve: Callable[[socket.socket], None]) -> socket.socket:
    """Accepts on a listener in a thread, as `accept`, until the returned socket is closed or garbage-collected."""
    end, until = socket.socketpair()
    threading.Thread(target=accept, args=({listener: serve}, until), name="accept", daemon=True).start()
    return end


def _run(serve: Callable[[socket.socket], None], connection: socket.socket) -> None:
    """Runs `serve`, logs its exception, and closes the connection."""
    with connection:
        try:
            serve(connection)
        except Exception:
            log.exception("serving a connection")
