"""A client of the workstation's container engine: the part of the Docker Engine API that the emulator uses."""

import http.client
import json
import socket
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlencode

LABEL = "tpu-launch.emulator"  # = <emulator id>, on everything the emulator makes
HOST_LABEL = "tpu-launch.emulator.host"  # = <hostname>, on containers that run on an emulated host
MACHINE_LABEL = "tpu-launch.emulator.machine"  # = <node>-<i>, on the container that is an emulated host


class EngineError(Exception):
    """A call that an engine, emulated or real, refused: its HTTP status, the engine's message, and the call."""

    def __init__(self, status: int, message: str, call: str = "") -> None:
        super().__init__(f"{call}: {message}" if call else message)
        self.status = status
        self.message = message


class UnixConnection(http.client.HTTPConnection):
    """HTTP over a unix socket."""

    def __init__(self, path: str, timeout: float | None) -> None:
        super().__init__("localhost")
        self.timeout, self._path = timeout, path

    def connect(self) -> None:
        self.sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self.sock.settimeout(self.timeout)
        self.sock.connect(self._path)


@dataclass(frozen=True)
class Engine:
    """The engine behind a unix socket. Each call has its own connection."""

    path: str

    def call(
        self, method: str, path: str, query: dict[str, Any] | None = None, body: Any = None, *, timeout: float = 120
    ) -> Any:
        """Sends `body` as JSON (None: no body). Returns the response's JSON, None for an empty one. Raises EngineError
        for a status of 400 or more; OSError when the engine is down, breaks off, or is silent for `timeout` seconds."""
        status, data = self.raw(method, path, query, body, timeout=timeout)
        if status >= 400:
            raise EngineError(status, _error_text(data), f"{method} {path}")
        return json.loads(data) if data.strip() else None

    def raw(
        self,
        method: str,
        path: str,
        query: dict[str, Any] | None = None,
        body: Any = None,
        *,
        headers: dict[str, str] | None = None,
        timeout: float = 120,
    ) -> tuple[int, bytes]:
        """Sends a request as `call`. Returns the status and body of any response, errors included. Raises OSError."""
        connection = UnixConnection(self.path, timeout)
        try:
            data = None if body is None else json.dumps(body).encode()
            content = {"Content-Type": "application/json"} if data is not None else {}
            target = path + ("?" + urlencode(query) if query else "")
            connection.request(method, target, data, {**content, **(headers or {})})
            response = connection.getresponse()
            return response.status, response.read()
        except http.client.HTTPException as error:
            raise OSError(f"{method} {path}: the response was cut off: {error!r}") from None
        finally:
            connection.close()

    def containers(self, *labels: str) -> list[dict[str, Any]]:
        """Returns all containers, running or not, that have all `labels` ("key" or "key=value")."""
        return list(self.call("GET", "/containers/json", {"all": "1", "filters": json.dumps({"label": labels})}))


def _error_text(data: bytes) -> str:
    """Returns the message of an engine's error, or the first 500 characters of another response."""
    try:
        return str(json.loads(data)["message"])
    except (ValueError, KeyError, TypeError):
        return data.decode(errors="replace")[:500]
