"""Serves JSON over HTTP on loopback, for the Hubs of hub_server and hub_downloads."""

import contextlib
import http.server
import json
import threading
from collections.abc import Iterator, Mapping
from typing import Any


class HubHandler(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    hub: Any

    def begin(self, status: int, headers: Mapping[str, str]) -> None:
        self.send_response(status)
        for name, text in headers.items():
            self.send_header(name, text)
        self.end_headers()

    def _json(self, value: Any, status: int = 200, headers: Mapping[str, str] | None = None) -> None:
        data = json.dumps(value).encode()
        self.begin(status, {"Content-Type": "application/json", "Content-Length": str(len(data)), **(headers or {})})
        if self.command != "HEAD":
            self.wfile.write(data)

    def log_message(self, *_: object) -> None:
        pass


@contextlib.contextmanager
def serve_hub(hub: Any, handler: type[HubHandler]) -> Iterator[None]:
    """Answers for a Hub, whose address it sets, as long as the block runs."""
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), type("Handler", (handler,), {"hub": hub}))
    hub.url = f"http://127.0.0.1:{server.server_port}"
    threading.Thread(target=server.serve_forever, name="hub", daemon=True).start()
    try:
        yield
    finally:
        server.shutdown()
        server.server_close()
