"""The registry's protocol for one session: manifests by tag or digest, blobs, uploads.

What can fail half-way: every request may be repeated, and is, when the network or the registry fails for a moment. A
blob is there when its upload ended and its digest was right; a tag moves when its manifest, whose blobs must be there,
was accepted. An upload that breaks off is continued where the registry has it in pieces, else begun again. Google's
registries take a blob in one piece only (https://cloud.google.com/artifact-registry/docs/reference/docker-api).
"""

from __future__ import annotations

import hashlib
import http.client
import io
import json
import re
import time
import urllib.request
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import BinaryIO
from urllib.parse import quote, urlencode, urljoin

from launcher.errors import BadInput, Exit, LaunchError
from launcher.images.distribution.credentials import Credentials
from launcher.images.distribution.reference import is_google
from launcher.images.distribution.transport import Answer, Content, Transport

MANIFEST_TYPES = (
    "application/vnd.docker.distribution.manifest.v2+json",
    "application/vnd.docker.distribution.manifest.list.v2+json",
    "application/vnd.oci.image.manifest.v1+json",
    "application/vnd.oci.image.index.v1+json",
)
CHUNK_BYTES = 16 * 2**20  # of an upload in pieces
_BLOCK = 2**20
_TRIES = 5
_FIRST_PAUSE, _LONGEST_PAUSE = 0.5, 20.0  # seconds, between tries
_PASSING = (408, 429, 500, 502, 503, 504)
_STRICT = re.compile("Key Identifier|not marked critical|key usage")  # OpenSSL, of a certificate against RFC 5280
_LARGEST_DOCUMENT = 8 * 2**20  # manifests and configurations


@dataclass(frozen=True)
class Blob:
    """Bytes to be in a registry, and their name there."""

    digest: str
    """sha256:..."""

    size: int

    open: Callable[[], BinaryIO]
    """Opens them for reading from the start."""


@dataclass(frozen=True)
class Document:
    """A manifest as a registry has it."""

    media_type: str
    body: bytes

    @property
    def digest(self) -> str:
        """sha256:... of its bytes."""
        return sha256(self.body)


def sha256(data: bytes) -> str:
    """The digest of some bytes."""
    return f"sha256:{hashlib.sha256(data).hexdigest()}"


def blob_of(data: bytes) -> Blob:
    """Bytes in memory as a blob."""
    return Blob(sha256(data), len(data), lambda: io.BytesIO(data))


class _TryAgain(Exception):
    """The registry, or the network to it, failed in a way that may pass."""


class Registry:
    """A session with one registry. Use it as a context manager.

    Its methods raise LaunchError: PERMISSION when the registry refuses the credentials, BAD_INPUT when a repository or
    image is not there, CLOUD_ERROR when it does not answer.
    """

    def __init__(
        self,
        host: str,
        credentials: Callable[[str], Credentials | None],
        *,
        writes: str | None = None,
        reads: Sequence[str] = (),
        ca_bundle: Path | None = None,
        chunk_bytes: int = CHUNK_BYTES,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        """Connects at the first request.

        Args:
            host: the registry.
            credentials: gives those of a registry, when it asks for them.
            writes: the repository that is pushed to.
            reads: repositories that are read.
            ca_bundle: more certificates to trust.
            chunk_bytes: a larger blob is uploaded in pieces where the registry takes them.
            sleep: waits between tries.
        """
        self.host = host
        self.bytes_sent = 0  # of blobs and manifests, those of failed tries too
        self._credentials, self._authorization = credentials, ""
        actions = {**dict.fromkeys(reads, "pull"), **({writes: "pull,push"} if writes else {})}
        self._scopes = [f"repository:{path}:{action}" for path, action in actions.items()]
        self._transport = Transport(ca_bundle)
        self._chunk_bytes, self._in_pieces = chunk_bytes, not is_google(host)
        self._sleep = sleep

    def __enter__(self) -> Registry:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._transport.close()

    # -- manifests

    def find_manifest(self, path: str, version: str) -> str | None:
        """The digest of a manifest; None when there is none of that tag or digest."""
        answer = self._ask("HEAD", f"{path}/manifests/{version}", (200, 404), {"Accept": ", ".join(MANIFEST_TYPES)})
        if answer.status == 404:
            return None
        if digest := answer.header("docker-content-digest"):
            return digest
        document = self.read_manifest(path, version)
        return document.digest if document else None

    def read_manifest(self, path: str, version: str) -> Document | None:
        """A manifest; None when there is none of that tag or digest. One that is named by digest is checked."""
        answer = self._ask("GET", f"{path}/manifests/{version}", (200, 404), {"Accept": ", ".join(MANIFEST_TYPES)})
        return None if answer.status == 404 else self._document(answer, path, version)

    def _document(self, answer: Answer, path: str, version: str) -> Document:
        document = Document(answer.header("content-type").partition(";")[0].strip(), answer.body)
        if ":" in version and document.digest != version:
            raise LaunchError(f"{self.host}/{path}@{version}: the registry sent another manifest, {document.digest}")
        return document

    def require_manifest(self, path: str, version: str) -> Document:
        """A manifest that must be there: BAD_INPUT, with the registry's words, when it isn't."""
        answer = self._ask("GET", f"{path}/manifests/{version}", (200,), {"Accept": ", ".join(MANIFEST_TYPES)})
        return self._document(answer, path, version)

    def write_manifest(self, path: str, version: str, document: Document) -> None:
        """Enters a manifest under a tag, or under its digest."""
        headers = {"Content-Type": document.media_type}
        self._ask("PUT", f"{path}/manifests/{version}", (200, 201, 202), headers, document.body)
        self.bytes_sent += len(document.body)

    # -- blobs

    def has_blob(self, path: str, digest: str) -> bool:
        """Whether a repository has a blob."""
        return self._ask("HEAD", f"{path}/blobs/{digest}", (200, 404)).status == 200

    def read_blob(self, path: str, digest: str, size: int) -> bytes:
        """A small blob, checked.

        Args:
            path: the repository.
            digest: of the blob.
            size: its bytes, as the manifest has it.
        """
        if size > _LARGEST_DOCUMENT:
            raise LaunchError(f"{self.host}/{path}@{digest}: {size} bytes are too many for an image's configuration")
        body = self._ask("GET", f"{path}/blobs/{digest}", (200,)).body
        if sha256(body) != digest:
            raise LaunchError(f"{self.host}/{path}@{digest}: the registry sent other bytes")
        return body

    def upload(self, path: str, blob: Blob, *, source: str | None = None) -> bool:
        """Sees to it that a repository has a blob; returns whether its bytes were sent.

        Args:
            path: the repository.
            blob: what it must have.
            source: another repository of this registry that has it: then it is entered without its bytes.
        """
        if self.has_blob(path, blob.digest):
            return False
        query = {"mount": blob.digest, "from": source} if source else {}
        target = f"{path}/blobs/uploads/" + (f"?{urlencode(query, safe=':/')}" if query else "")
        answer = self._ask("POST", target, (201, 202))
        if answer.status == 201:
            return False
        if self._in_pieces and blob.size > self._chunk_bytes:
            self._upload_pieces(path, blob, answer)
        else:
            self._upload_whole(path, blob, answer)
        return True

    def _upload_whole(self, path: str, blob: Blob, answer: Answer) -> None:
        begun = [answer]

        def send() -> Answer:
            location = (begun.pop() if begun else self._begin(path)).header("location")
            headers = {"Content-Type": "application/octet-stream", "Content-Length": str(blob.size)}
            with blob.open() as file:
                url = _with_digest(urljoin(answer.url, location), blob.digest)
                return self._request("PUT", url, headers, self._counted(file, blob.size))

        self._repeat(send, (201,))

    def _upload_pieces(self, path: str, blob: Blob, answer: Answer) -> None:
        """Sends pieces, and after a failure asks how much the registry has."""
        url, sent, certain = urljoin(answer.url, answer.header("location")), 0, True
        smallest = int(answer.header("oci-chunk-min-length") or 0)

        def send() -> Answer:
            nonlocal url, sent, certain
            if not certain:
                url, sent = self._resume(path, url)
            certain = False
            with blob.open() as file:
                while sent < blob.size:
                    length = min(max(self._chunk_bytes, smallest), blob.size - sent)
                    file.seek(sent)
                    headers = {
                        "Content-Type": "application/octet-stream",
                        "Content-Length": str(length),
                        "Content-Range": f"{sent}-{sent + length - 1}",
                    }
                    piece = self._request("PATCH", url, headers, self._counted(file, length))
                    if piece.status == 416:
                        raise _TryAgain("it has another number of bytes of the upload")
                    if piece.status != 202:
                        return piece
                    url, sent = urljoin(piece.url, piece.header("location") or url), sent + length
            return self._request("PUT", _with_digest(url, blob.digest), {})

        self._repeat(send, (201,))

    def _resume(self, path: str, url: str) -> tuple[str, int]:
        """Where an upload goes on, and after how many bytes; a new one when the registry does not know it any more."""
        answer = self._request("GET", url, {})
        if answer.status in _PASSING:
            raise _TryAgain(f"it answered {answer.status} when it was asked how much it has of an upload")
        if answer.status != 204:
            begun = self._begin(path)
            return urljoin(begun.url, begun.header("location")), 0
        stored = re.fullmatch(r"(?:bytes=)?0-(\d+)", answer.header("range"))
        # "0-0" is said of nothing and of one byte: a piece is never one byte, so it is nothing.
        return urljoin(url, answer.header("location") or url), int(stored[1]) + 1 if stored and stored[1] != "0" else 0

    def _begin(self, path: str) -> Answer:
        answer = self._request("POST", f"https://{self.host}/v2/{path}/blobs/uploads/", {})
        if answer.status != 202:
            raise _TryAgain(f"it answered {answer.status} to a new upload")
        return answer

    def _counted(self, file: BinaryIO, length: int) -> Iterator[bytes]:
        """`length` bytes of a file in blocks, counted as sent."""
        while length and (block := file.read(min(_BLOCK, length))):
            length -= len(block)
            self.bytes_sent += len(block)
            yield block

    # -- requests

    def _ask(
        self,
        method: str,
        target: str,
        good: Sequence[int],
        headers: Mapping[str, str] | None = None,
        body: bytes = b"",
    ) -> Answer:
        """A request below /v2/ whose status must be one of `good`."""
        url = f"https://{self.host}/v2/{quote(target, safe='/:@?=&%+,')}"
        return self._repeat(lambda: self._request(method, url, headers or {}, body), good)

    def _repeat(self, send: Callable[[], Answer], good: Sequence[int]) -> Answer:
        """Sends until the answer is one of `good`. Raises LaunchError."""
        for number in range(_TRIES):
            pause = min(_FIRST_PAUSE * 2**number, _LONGEST_PAUSE)
            try:
                answer = send()
                if answer.status in good:
                    return answer
                if answer.status not in _PASSING:
                    raise _refusal(self.host, answer)
                reason = f"it answered {answer.status}: {_error_text(answer)}"
                wait = answer.header("retry-after")
                pause = min(float(wait), _LONGEST_PAUSE) if wait.isdecimal() else pause
            except _TryAgain as error:
                reason = str(error)
            except (OSError, http.client.HTTPException) as error:
                reason = _network_reason(self.host, error)
            if number + 1 < _TRIES:
                self._sleep(pause)
        raise LaunchError(f"the registry {self.host} failed {_TRIES} times, at last because {reason}; try again")

    def _request(self, method: str, url: str, headers: Mapping[str, str], body: Content = b"") -> Answer:
        """One request with our authorization, which is got when the registry asks for it."""
        if self._authorization:
            headers = {**headers, "Authorization": self._authorization}
        answer = self._transport.request(method, url, headers, body)
        if answer.status != 401:
            return answer
        self._authorization = self._authorize(answer)
        if not isinstance(body, bytes):
            raise _TryAgain("its token expired during an upload")
        return self._transport.request(method, url, {**headers, "Authorization": self._authorization}, body)

    def _authorize(self, answer: Answer) -> str:
        """The Authorization that a registry's challenge (WWW-Authenticate) demands.

        https://distribution.github.io/distribution/spec/auth/token/
        """
        kind, _, rest = answer.header("www-authenticate").partition(" ")
        credentials = self._credentials(self.host)
        if kind.lower() == "basic" and credentials:
            return credentials.basic
        fields = dict(re.findall(r'(\w+)="([^"]*)"', rest))
        if kind.lower() != "bearer" or not fields.get("realm", "").startswith("https://"):
            raise _refusal(self.host, answer)
        query = [("service", fields["service"])] if "service" in fields else []
        query += [("scope", scope) for scope in self._scopes]
        separator = "&" if "?" in fields["realm"] else "?"
        url = f"{fields['realm']}{separator}{urlencode(query)}"
        headers = {"Authorization": credentials.basic} if credentials else {}
        token = self._transport.request("GET", url, headers)
        if token.status in _PASSING:
            raise _TryAgain(f"it answered {token.status} to a request for a token")
        try:
            found = json.loads(token.body)
            return f"Bearer {found.get('token') or found['access_token']}"
        except (ValueError, KeyError, AttributeError):
            raise _refusal(self.host, token) from None


def _with_digest(url: str, digest: str) -> str:
    return f"{url}{'&' if '?' in url else '?'}{urlencode({'digest': digest}, safe=':')}"


def _network_reason(host: str, error: Exception) -> str:
    """What a failed connection means, with what may help."""
    text = str(error) or type(error).__name__
    if "CERTIFICATE_VERIFY_FAILED" in text and _STRICT.search(text):
        raise BadInput(
            f"the registry {host} has a certificate that is not as RFC 5280 demands, and Python 3.13 verifies that "
            f"({text}): install tpu-launch with Python 3.12, or have the certificate of the company's proxy mended"
        ) from None
    if "CERTIFICATE_VERIFY_FAILED" in text:
        raise BadInput(
            f"the registry {host} has a certificate that this machine does not trust ({text}): behind a company's "
            "proxy, name its CA bundle as image.ca_bundle or in TPU_LAUNCH_CA_BUNDLE"
        ) from None
    proxy = " (through the proxy of https_proxy)" if urllib.request.getproxies().get("https") else ""
    return f"the connection failed{proxy}: {text}"


def _error_text(answer: Answer) -> str:
    """What a registry says of an error, in one line."""
    try:
        errors = json.loads(answer.body)["errors"]
        return "; ".join(" ".join(f"{error.get('message') or error.get('code')}".split()) for error in errors)
    except (ValueError, KeyError, TypeError, AttributeError):
        return " ".join(answer.body[:300].decode(errors="replace").split()) or "no reason given"


def _refusal(host: str, answer: Answer) -> LaunchError:
    """The error that a registry's refusal means."""
    text = _error_text(answer)
    if answer.status in (401, 403):
        return LaunchError(
            f"the registry {host} refuses these credentials ({answer.status}): {text}\n"
            "  it must let this account read and write (roles/artifactregistry.writer): `gcloud auth login`, or for "
            "another registry `docker login`",
            exit_code=Exit.PERMISSION,
        )
    if answer.status == 404:
        return BadInput(f"the registry {host} has no {answer.url.partition('/v2/')[2].partition('?')[0]}: {text}")
    return LaunchError(f"the registry {host} answered {answer.status} to {answer.url.partition('?')[0]}: {text}")
