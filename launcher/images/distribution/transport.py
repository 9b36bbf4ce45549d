"""HTTPS to registries over urllib3: certificates, proxies, and redirects of downloads.

Certificates are checked against those of this machine, of SSL_CERT_FILE and of a CA bundle. Proxies are those of the
environment (https_proxy, no_proxy). TPU_LAUNCH_REGISTRY_ADDRESS=HOST:PORT replaces the address of every registry, which
must still present its own certificate: for a tunnel, or an emulated slice's registry.
"""

import os
import ssl
import traceback
import urllib.request
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import unquote, urljoin, urlsplit

from launcher.errors import BadInput
from launcher.images.distribution.credentials import RegistryCredentials

ADDRESS = "TPU_LAUNCH_REGISTRY_ADDRESS"
_SECONDS = 60.0  # for a connection, and between two pieces of a response
_REDIRECTS = (301, 302, 303, 307, 308)
_MOST_REDIRECTS = 5

Content = bytes | Iterable[bytes]


@dataclass(frozen=True)
class RegistryResponse:
    """A complete response."""

    status: int
    headers: Mapping[str, str]  # by their names in lower case
    body: bytes
    url: str  # a relative Location is relative to it

    def header(self, name: str) -> str:
        """Returns a header field; "" when there is none."""
        return self.headers.get(name.lower(), "")


class Transport:
    """Connections to registries, one kept open for each server."""

    def __init__(self, ca_bundle: Path | None = None) -> None:
        """Connects to nothing yet. Raises BadInput for an unusable CA bundle, proxy or TPU_LAUNCH_REGISTRY_ADDRESS."""
        import urllib3  # here, because it takes a tenth of a second and most commands ask no registry

        self._error = urllib3.exceptions.HTTPError
        context = _tls_context(ca_bundle)
        self._address = _parse_address(os.environ.get(ADDRESS, ""))
        self._direct = urllib3.PoolManager(ssl_context=context, timeout=_SECONDS)
        self._proxied = self._direct
        if proxy := urllib.request.getproxies().get("https"):
            parts = urlsplit(proxy if "//" in proxy else f"http://{proxy}")
            if parts.scheme not in ("http", "https"):
                raise BadInput(f"https_proxy={parts.scheme}://...: only http and https proxies are supported")
            address = f"{parts.scheme}://{parts.hostname}:{parts.port or 3128}"
            login = RegistryCredentials(unquote(parts.username or ""), unquote(parts.password or ""))
            headers = {"Proxy-Authorization": login.basic} if parts.username is not None else None
            self._proxied = urllib3.ProxyManager(address, ssl_context=context, timeout=_SECONDS, proxy_headers=headers)

    def close(self) -> None:
        """Closes all connections."""
        self._direct.clear()
        self._proxied.clear()

    def request(
        self, method: str, url: str, headers: Mapping[str, str], body: Content = b"", *, registry: bool = True
    ) -> RegistryResponse:
        """Sends one request and reads its whole response; follows redirects of GET and HEAD. Raises OSError.

        Args:
            headers: fields to send. Authorization is not sent to other servers after a redirect.
            body: bytes, or pieces of a body whose Content-Length is among the headers.
            registry: whether TPU_LAUNCH_REGISTRY_ADDRESS applies to the server.
        """
        for _ in range(_MOST_REDIRECTS + 1):
            response = self._send(method, url, headers, body, registry=registry)
            if response.status not in _REDIRECTS or method not in ("GET", "HEAD"):
                return response
            target = urljoin(url, response.header("location"))
            if urlsplit(target).scheme != "https":
                raise OSError(f"{urlsplit(url).netloc} redirects to {target.split('?')[0]}, which is not https")
            if urlsplit(target).netloc != urlsplit(url).netloc:
                headers = {name: value for name, value in headers.items() if name != "Authorization"}
                registry = False
            url = target
        raise OSError(f"{urlsplit(url).netloc} redirects more than {_MOST_REDIRECTS} times")

    def _send(
        self, method: str, url: str, headers: Mapping[str, str], body: Content, *, registry: bool
    ) -> RegistryResponse:
        """Sends one request, without redirects: to the replaced address, by proxy, or directly. Raises OSError."""
        parts = urlsplit(url)
        host, port = parts.hostname or "", parts.port or 443
        if registry and self._address:
            names = {"server_hostname": host}
            pool = self._direct.connection_from_host(*self._address, "https", pool_kwargs=names)
        else:
            manager = self._direct if urllib.request.proxy_bypass(parts.netloc) else self._proxied
            pool = manager.connection_from_host(host, port, "https")
        target = parts.path + (f"?{parts.query}" if parts.query else "")
        fields = {"Host": parts.netloc, **headers}
        try:
            response = pool.urlopen(method, target, body or None, fields, retries=False, redirect=False)
        except self._error as error:
            traceback.clear_frames(error.__traceback__)  # a frame holds the half-read response, and so the socket
            raise OSError(str(error)) from None
        received = {name.lower(): value for name, value in response.headers.items()}
        return RegistryResponse(response.status, received, response.data, url)


def _tls_context(ca_bundle: Path | None) -> ssl.SSLContext:
    """Returns a context that trusts this machine's certificates and the bundle's. Raises BadInput for a bad bundle."""
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
    """Parses HOST:PORT; returns None for an empty text. Raises BadInput without a host or a port of 1 to 65535."""
    host, _, port = text.rpartition(":")
    if not text:
        return None
    if not host or not port.isdecimal() or not 0 < int(port) < 65536:
        raise BadInput(f"{ADDRESS}={text}: must be HOST:PORT")
    return host, int(port)
