"""HTTPS to registries: one connection a server, kept open; redirects of downloads; proxies; certificates.

Certificates are checked against this machine's, those of SSL_CERT_FILE and those of TPU_LAUNCH_CA_BUNDLE. Proxies are
the environment's (https_proxy, no_proxy). TPU_LAUNCH_REGISTRY_ADDRESS=HOST:PORT is connected to instead of any
registry, which is still asked under its own name and must have its own certificate: a tunnel, or an emulated slice's
registry.

A connection that the server closed while it was idle shows only at the next request; the client repeats that.
"""

from __future__ import annotations

import http.client
import os
import socket
import ssl
import urllib.request
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import unquote, urljoin, urlsplit

from launcher.errors import BadInput
from launcher.images.distribution.credentials import Credentials

ADDRESS = "TPU_LAUNCH_REGISTRY_ADDRESS"
_SECONDS = 60.0  # for one answer, or one piece of it
_REDIRECTS = (301, 302, 303, 307, 308)
_MOST_REDIRECTS = 5

Content = bytes | Iterable[bytes]


@dataclass(frozen=True)
class Answer:
    """A whole response."""

    status: int
    headers: Mapping[str, str]
    body: bytes
    url: str
    """Where it came from: what a relative Location is relative to."""

    def header(self, name: str) -> str:
        """A header field; empty when there is none."""
        return self.headers.get(name.lower(), "")


class Transport:
    """Connections to registries. Use it as a context manager."""

    def __init__(self, ca_bundle: Path | None = None) -> None:
        """Nothing is connected yet.

        Args:
            ca_bundle: more certificates to trust.

        Raises:
            BadInput: the bundle, or TPU_LAUNCH_REGISTRY_ADDRESS, can't be used.
        """
        self._context = _tls_context(ca_bundle)
        self._address = _parse_address(os.environ.get(ADDRESS, ""))
        self._connections: dict[str, http.client.HTTPSConnection] = {}

    def __enter__(self) -> Transport:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def close(self) -> None:
        """Ends all connections."""
        for connection in self._connections.values():
            connection.close()
        self._connections.clear()

    def request(
        self, method: str, url: str, headers: Mapping[str, str], body: Content = b"", *, registry: bool = True
    ) -> Answer:
        """Sends one request and reads its whole response. Raises OSError or http.client.HTTPException.

        Args:
            method: of HTTP.
            url: https://...
            headers: Authorization is not sent on to other servers.
            body: bytes, or pieces of a body whose Content-Length is among the headers.
            registry: whether the server is a registry, and not one that a registry sends us to.
        """
        for _ in range(_MOST_REDIRECTS + 1):
            answer = self._once(method, url, headers, body, registry=registry)
            if answer.status not in _REDIRECTS or method not in ("GET", "HEAD"):
                return answer
            target = urljoin(url, answer.header("location"))
            if urlsplit(target).scheme != "https":
                raise OSError(f"{urlsplit(url).netloc} redirects to {target.split('?')[0]}, which is not https")
            if urlsplit(target).netloc != urlsplit(url).netloc:
                headers = {name: value for name, value in headers.items() if name != "Authorization"}
                registry = False
            url = target
        raise OSError(f"{urlsplit(url).netloc} redirects without an end")

    def _once(self, method: str, url: str, headers: Mapping[str, str], body: Content, *, registry: bool) -> Answer:
        parts = urlsplit(url)
        connection = self._connection(parts.netloc, registry=registry)
        target = parts.path + (f"?{parts.query}" if parts.query else "")
        try:
            connection.request(method, target, body or None, dict(headers))
            response = connection.getresponse()
            fields = {name.lower(): value for name, value in response.getheaders()}
            answer = Answer(response.status, fields, response.read(), url)
        except BaseException:
            self._connections.pop(parts.netloc).close()
            raise
        if response.will_close:
            self._connections.pop(parts.netloc).close()
        return answer

    def _connection(self, server: str, *, registry: bool) -> http.client.HTTPSConnection:
        if server in self._connections:
            return self._connections[server]
        connection = _Connection(server, self._context, self._address if registry else None)
        proxy = urllib.request.getproxies().get("https")
        if proxy and not (registry and self._address) and not urllib.request.proxy_bypass(server):
            parts = urlsplit(proxy if "//" in proxy else f"//{proxy}")
            port = connection.port
            connection = _Connection(f"{parts.hostname}:{parts.port or 3128}", self._context, None)
            headers = _proxy_headers(parts.username, parts.password)
            connection.set_tunnel(server.partition(":")[0], port, headers)
        self._connections[server] = connection
        return connection


class _Connection(http.client.HTTPSConnection):
    """HTTPS, to another address where one is given."""

    def __init__(self, server: str, context: ssl.SSLContext, address: tuple[str, int] | None) -> None:
        super().__init__(server, timeout=_SECONDS, context=context)
        self._tls, self._address = context, address

    def connect(self) -> None:
        if self._address is None:
            super().connect()
            return
        raw = socket.create_connection(self._address, self.timeout)
        raw.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.sock = self._tls.wrap_socket(raw, server_hostname=self.host)


def _proxy_headers(user: str | None, password: str | None) -> dict[str, str]:
    if user is None:
        return {}
    return {"Proxy-Authorization": Credentials(unquote(user), unquote(password or "")).basic}


def _tls_context(ca_bundle: Path | None) -> ssl.SSLContext:
    context = ssl.create_default_context()
    known = ssl.get_default_verify_paths()
    if not known.cafile and not known.capath:  # Python as python.org installs it on macOS
        import certifi

        context.load_verify_locations(certifi.where())
    if ca_bundle is not None:
        try:
            context.load_verify_locations(ca_bundle)
        except (OSError, ssl.SSLError) as error:
            raise BadInput(f"{ca_bundle}: not a file of CA certificates: {error}") from None
    return context


def _parse_address(text: str) -> tuple[str, int] | None:
    host, _, port = text.rpartition(":")
    if not text:
        return None
    if not host or not port.isdecimal():
        raise BadInput(f"{ADDRESS}={text}: must be HOST:PORT")
    return host, int(port)
