"""A session with one registry over HTTPS (urllib3): manifests by tag or digest, blobs, uploads.

Every request may be repeated, and is repeated when the network or the registry fails for a moment. A blob exists once
its upload has ended with the right digest; a tag moves once its manifest was accepted, whose blobs must exist. A
blob is sent in one piece, as Google's registries require
(https://cloud.google.com/artifact-registry/docs/reference/docker-api): an interrupted upload starts again.

Certificates are checked against those of this machine, of SSL_CERT_FILE and of a CA bundle. Proxies are those of the
environment (https_proxy, no_proxy). TPU_LAUNCH_REGISTRY_ADDRESS=HOST:PORT replaces the address of every registry, which
must still present its own certificate: for a tunnel, or an emulated slice's registry.
"""

from __future__ import annotations

import functools
import hashlib
import io
import json
import os
import re
import ssl
import time
import traceback
import urllib.request
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO
from urllib.parse import quote, unquote, urlencode, urljoin, urlsplit

from launcher.errors import BadInput, Exit, LaunchError
from launcher.images.repositories import RegistryCredentials

DOCKER_MANIFEST = "application/vnd.docker.distribution.manifest.v2+json"
OCI_MANIFEST = "application/vnd.oci.image.manifest.v1+json"
INDEXES = ("application/vnd.docker.distribution.manifest.list.v2+json", "application/vnd.oci.image.index.v1+json")
_ACCEPT = {"Accept": ", ".join((DOCKER_MANIFEST, OCI_MANIFEST, *INDEXES))}
ADDRESS = "TPU_LAUNCH_REGISTRY_ADDRESS"
_SECONDS = 60.0  # for a connection, and between two pieces of a response
_REDIRECTS = (301, 302, 303, 307, 308)
_MOST_REDIRECTS = 5
_FIRST_PAUSE, _LONGEST_PAUSE = 0.5, 20.0  # seconds, between tries
_PASSING = (408, 429, 500, 502, 503, 504)
_STRICT = re.compile("Key Identifier|not marked critical|key usage")  # OpenSSL, about a breach of RFC 5280
_LARGEST_DOCUMENT = 8 * 2**20  # manifests and configurations

Content = bytes | BinaryIO  # what is sent in blocks has its Content-Length among the headers


@dataclass(frozen=True)
class Blob:
    """Bytes that a registry stores under their digest."""

    data: bytes

    @functools.cached_property
    def digest(self) -> str:
        return sha256(self.data)


@dataclass(frozen=True)
class ManifestDocument:
    """A manifest as a registry stores it."""

    media_type: str
    body: bytes

    @property
    def digest(self) -> str:
        return sha256(self.body)


def sha256(data: bytes) -> str:
    """Returns the digest "sha256:..."."""
    return f"sha256:{hashlib.sha256(data).hexdigest()}"


class _PassingError(Exception):
    """The registry or the network failed in a way that may pass."""


class Registry:
    """A session with one registry; a context manager.

    Its methods raise LaunchError: PERMISSION when the registry refuses the credentials, BAD_INPUT when a repository or
    image does not exist, CLOUD_ERROR when the registry does not answer.
    """

    def __init__(
        self,
        host: str,
        credentials: Callable[[str], RegistryCredentials | None],
        *,
        writes: str | None = None,
        reads: Sequence[str] = (),
        ca_bundle: Path | None = None,
        sleep: Callable[[float], None] = time.sleep,
        tries: int = 5,
    ) -> None:
        """Connects at the first request. `credentials`: called when the registry requires them; `writes`, `reads`: the
        repositories to push to and to read; `ca_bundle`: more certificates to trust; `sleep`: waits between `tries`."""
        self.host = host
        self.bytes_sent = 0  # of blobs and manifests, including failed tries
        self._credentials, self._authorization = credentials, ""
        actions = {**dict.fromkeys(reads, "pull"), **({writes: "pull,push"} if writes else {})}
        self._scopes = [f"repository:{path}:{action}" for path, action in actions.items()]
        self._transport = Transport(ca_bundle)
        self._sleep, self._tries = sleep, tries

    def __enter__(self) -> Registry:
        return self

    def __exit__(self, *error: object) -> None:
        self._transport.close()

    # -- manifests

    def find_manifest(self, path: str, version: str) -> str | None:
        """Returns the digest of the manifest with `version`, a tag or digest, in repository `path`; None for none.
        Raises LaunchError for something else than a manifest, such as a proxy's page."""
        response = self._ask("HEAD", f"{path}/manifests/{version}", (200, 404), _ACCEPT)
        if response.status == 404:
            return None
        if digest := response.header("docker-content-digest"):
            return digest
        document = self.require_manifest(path, version)
        if document.media_type not in (DOCKER_MANIFEST, OCI_MANIFEST, *INDEXES):
            kind = document.media_type or "no type"
            raise LaunchError(f"{self.host}/{path}: the answer about {version} is no manifest (it has {kind})")
        return document.digest

    def read_manifest(self, path: str, version: str) -> ManifestDocument | None:
        """Returns the manifest with `version`, a tag or digest, in the repository `path`; None when there is none.
        Raises LaunchError."""
        response = self._ask("GET", f"{path}/manifests/{version}", (200, 404), _ACCEPT)
        return None if response.status == 404 else self._check_manifest(response, path, version)

    def require_manifest(self, path: str, version: str) -> ManifestDocument:
        """Returns the manifest with a tag or digest. Raises BadInput with the registry's message when there is none,
        LaunchError when the registry fails."""
        return self._check_manifest(self._ask("GET", f"{path}/manifests/{version}", (200,), _ACCEPT), path, version)

    def _check_manifest(self, response: RegistryResponse, path: str, version: str) -> ManifestDocument:
        """Returns the manifest in a response. Raises LaunchError if `version` is the digest of another one."""
        document = ManifestDocument(response.header("content-type").partition(";")[0].strip(), response.body)
        if ":" in version and document.digest != version:
            raise LaunchError(f"{self.host}/{path}@{version}: the registry sent another manifest, {document.digest}")
        return document

    def write_manifest(self, path: str, version: str, document: ManifestDocument) -> None:
        """Stores a manifest under a tag or its digest, after its blobs were uploaded. Raises LaunchError."""
        headers = {"Content-Type": document.media_type}
        self._ask("PUT", f"{path}/manifests/{version}", (200, 201, 202), headers, document.body)
        self.bytes_sent += len(document.body)

    # -- blobs

    def has_blob(self, path: str, digest: str) -> bool:
        return self._ask("HEAD", f"{path}/blobs/{digest}", (200, 404)).status == 200

    def read_blob(self, path: str, digest: str, size: int) -> bytes:
        """Returns a blob. Raises LaunchError if `size`, as the manifest says, is over 8 MiB, or the registry fails or
        sends other bytes; BadInput, a LaunchError, if it has no such blob."""
        if size > _LARGEST_DOCUMENT:
            raise LaunchError(f"{self.host}/{path}@{digest}: {size} bytes are too many for an image's configuration")
        body = self._ask("GET", f"{path}/blobs/{digest}", (200,)).body
        if sha256(body) != digest:
            raise LaunchError(f"{self.host}/{path}@{digest}: the registry sent other bytes")
        return body

    def mount(self, path: str, digest: str, *, source: str) -> bool:
        """Adds a blob of the repository `source` to the repository `path`, without its bytes. Returns whether it is
        there: a registry may refuse. Raises LaunchError."""
        query = urlencode({"mount": digest, "from": source}, safe=":/")
        return self.has_blob(path, digest) or (
            self._ask("POST", f"{path}/blobs/uploads/?{query}", (201, 202)).status == 201
        )

    def upload(self, path: str, blob: Blob) -> None:
        """Uploads a blob in one piece, unless the repository `path` has it. Each further try begins another upload.
        Raises LaunchError."""
        if self.has_blob(path, blob.digest):
            return
        headers = {"Content-Type": "application/octet-stream", "Content-Length": str(len(blob.data))}

        def send() -> RegistryResponse:
            """Begins an upload and sends the blob; returns the last response."""
            begun = self._request("POST", f"https://{self.host}/v2/{path}/blobs/uploads/", {})
            if begun.status != 202:
                return begun
            url = urljoin(begun.url, begun.header("location"))
            url += f"{'&' if '?' in url else '?'}{urlencode({'digest': blob.digest}, safe=':')}"
            self.bytes_sent += len(blob.data)
            return self._request("PUT", url, headers, io.BytesIO(blob.data))

        self._repeat(send, (201,))

    # -- requests

    def _ask(
        self,
        method: str,
        target: str,
        expected: Sequence[int],
        headers: Mapping[str, str] | None = None,
        body: bytes = b"",
    ) -> RegistryResponse:
        """Sends a request below /v2/, several times if it fails for a moment, until its status is one of `expected`.
        Raises LaunchError, at once for a status that a further try does not change: BadInput for 404."""
        url = f"https://{self.host}/v2/{quote(target, safe='/:@?=&%+,')}"
        return self._repeat(lambda: self._request(method, url, headers or {}, body), expected)

    def _repeat(self, send: Callable[[], RegistryResponse], expected: Sequence[int]) -> RegistryResponse:
        """Calls `send` until its status is expected, with pauses, `tries` times at most. Raises LaunchError then, and
        at once for a status that a further try does not change; BadInput for a certificate that is not accepted."""
        for number in range(self._tries):
            pause = min(_FIRST_PAUSE * 2**number, _LONGEST_PAUSE)
            try:
                response = send()
                if response.status in expected:
                    return response
                if response.status not in _PASSING:
                    raise _refusal(self.host, response)
                reason = f"it answered {response.status}: {_error_text(response)}"
                wait = response.header("retry-after")
                pause = min(float(wait), _LONGEST_PAUSE) if wait.isdecimal() else pause
            except _PassingError as error:
                reason = str(error)
            except OSError as error:
                reason = _network_reason(self.host, error)
            if number + 1 < self._tries:
                self._sleep(pause)
        raise LaunchError(f"the registry {self.host} failed {self._tries} times, at last because {reason}; try again")

    def _request(self, method: str, url: str, headers: Mapping[str, str], body: Content = b"") -> RegistryResponse:
        """Sends one request; on 401 again with a new authorization, or raises _PassingError if the body is a stream.
        Only the registry's own host, and the realm that it names, get an authorization: an upload or a redirect may
        lead elsewhere. Returns other statuses; raises OSError, and as `_authorize`."""
        own = urlsplit(url).netloc == self.host
        if own and self._authorization:
            headers = {**headers, "Authorization": self._authorization}
        response = self._transport.request(method, url, headers, body, registry=own)
        if response.status != 401 or urlsplit(response.url).netloc != self.host:
            return response
        self._authorization = self._authorize(response)
        if not isinstance(body, bytes):
            raise _PassingError("its token expired during an upload")
        return self._transport.request(method, url, {**headers, "Authorization": self._authorization}, body)

    def _authorize(self, response: RegistryResponse) -> str:
        """Returns the Authorization header that a registry's challenge requires, after fetching a token for it if it is
        a bearer's (https://distribution.github.io/distribution/spec/auth/token/). Raises LaunchError if refused,
        _PassingError if the server of tokens fails for a moment."""
        kind, _, rest = response.header("www-authenticate").partition(" ")
        credentials = self._credentials(self.host)
        if kind.lower() == "basic" and credentials:
            return credentials.basic
        fields = dict(re.findall(r'(\w+)="([^"]*)"', rest))
        if kind.lower() != "bearer" or not fields.get("realm", "").startswith("https://"):
            raise _refusal(self.host, response)
        query = [("service", fields["service"])] if "service" in fields else []
        query += [("scope", scope) for scope in self._scopes]
        separator = "&" if "?" in fields["realm"] else "?"
        url = f"{fields['realm']}{separator}{urlencode(query)}"
        token = self._transport.request("GET", url, {"Authorization": credentials.basic} if credentials else {})
        if token.status in _PASSING:
            raise _PassingError(f"it answered {token.status} to a request for a token")
        try:
            found = json.loads(token.body)
            return f"Bearer {found.get('token') or found['access_token']}"
        except (ValueError, KeyError, AttributeError):
            raise _refusal(self.host, token) from None


def _network_reason(host: str, error: Exception) -> str:
    """Returns what a failed connection means. Raises BadInput, with advice, for a certificate that is not accepted."""
    text = str(error) or type(error).__name__
    if "CERTIFICATE_VERIFY_FAILED" in text and _STRICT.search(text):
        raise BadInput(
            f"the certificate of the registry {host} breaks RFC 5280, which Python 3.13 verifies ({text}): install "
            "tpu-launch with Python 3.12, or have the certificate of the company's proxy corrected"
        ) from None
    if "CERTIFICATE_VERIFY_FAILED" in text:
        raise BadInput(
            f"the registry {host} has a certificate that this machine does not trust ({text}): behind a company's "
            "proxy, name its CA bundle as image.ca_bundle or in TPU_LAUNCH_CA_BUNDLE"
        ) from None
    proxy = " (through the proxy of https_proxy)" if urllib.request.getproxies().get("https") else ""
    return f"the connection failed{proxy}: {text}"


def _error_text(response: RegistryResponse) -> str:
    """Returns a registry's error messages in one line, else the response's first 300 bytes or "no reason given"."""
    try:
        errors = json.loads(response.body)["errors"]
        return "; ".join(" ".join(f"{error.get('message') or error.get('code')}".split()) for error in errors)
    except (ValueError, KeyError, TypeError, AttributeError):
        return " ".join(response.body[:300].decode(errors="replace").split()) or "no reason given"


def _refusal(host: str, response: RegistryResponse) -> LaunchError:
    """Returns the error for a refused request, by its status: credentials, a name that is missing, or another."""
    text = _error_text(response)
    if response.status in (401, 403):
        return LaunchError(
            f"the registry {host} refuses these credentials ({response.status}): {text}\n"
            "  it must let this account read and write (roles/artifactregistry.writer): `gcloud auth login`, or for "
            "another registry `docker login`",
            exit_code=Exit.PERMISSION,
        )
    if response.status == 404:
        return BadInput(f"the registry {host} has no {response.url.partition('/v2/')[2].partition('?')[0]}: {text}")
    return LaunchError(f"the registry {host} answered {response.status} to {response.url.partition('?')[0]}: {text}")


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
            try:
                parts = urlsplit(proxy if "//" in proxy else f"http://{proxy}")
                host, port = parts.hostname or "", parts.port or 3128
            except ValueError:  # its text may show a password
                host = ""
            if not host:
                raise BadInput("https_proxy: must be http://[USER:PASSWORD@]HOST:PORT, a / in the password being %2F")
            if parts.scheme not in ("http", "https"):
                raise BadInput(f"https_proxy={parts.scheme}://...: only http and https proxies are supported")
            address = f"{parts.scheme}://{f'[{host}]' if ':' in host else host}:{port}"
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
        """Sends one request and reads its whole response; follows redirects of GET and HEAD, without Authorization to
        other servers. `registry`: whether TPU_LAUNCH_REGISTRY_ADDRESS applies to the server. Raises OSError."""
        for _ in range(_MOST_REDIRECTS + 1):
            parts = urlsplit(url)
            host, port = parts.hostname or "", parts.port or 443
            if registry and self._address:
                names = {"server_hostname": host}
                pool = self._direct.connection_from_host(*self._address, "https", pool_kwargs=names)
            else:
                manager = self._direct if urllib.request.proxy_bypass(parts.netloc) else self._proxied
                pool = manager.connection_from_host(host, port, "https")
            path = parts.path + (f"?{parts.query}" if parts.query else "")
            fields = {"Host": parts.netloc, **headers}
            try:
                response = pool.urlopen(method, path, body or None, fields, retries=False, redirect=False)
            except self._error as error:
                traceback.clear_frames(error.__traceback__)  # a frame holds the half-read response, and so the socket
                raise OSError(str(error)) from None
            received = {name.lower(): value for name, value in response.headers.items()}
            if response.status not in _REDIRECTS or method not in ("GET", "HEAD"):
                return RegistryResponse(response.status, received, response.data, url)
            target = urlsplit(urljoin(url, received.get("location", "")))
            if target.scheme != "https":
                shown = target._replace(query="", fragment="").geturl()
                raise OSError(f"{parts.netloc} redirects to {shown}, which is not https")
            if target.netloc != parts.netloc:
                headers = {name: value for name, value in headers.items() if name != "Authorization"}
                registry = False
            url = target.geturl()
        raise OSError(f"{parts.netloc} redirects more than {_MOST_REDIRECTS} times")


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
