"""The Cloud Storage side of `training.storage`: the unmodified client library, with our own patience.

The client's own retries are off, because their error at the end does not say which object, which range, and what was
tried. A call is repeated on 408, 429, any 5xx, and broken or silent connections, after a delay that doubles and is
drawn at random (so that the hosts of a slice do not come back together), until the deadline; then one StorageError
names the object and the last cause. A server that trickles bytes is cut off by the same deadline.

The client is not fork-safe and is made once a process. STORAGE_EMULATOR_HOST is honoured by the client itself.
"""

from __future__ import annotations

import base64
import contextlib
import io
import os
import random
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from training.storage.types import AlreadyExists, Changed, NoBucket, NotFound, Stat, StorageError, crc32c, split_remote

T = TypeVar("T")


@dataclass(frozen=True)
class Patience:
    """Seconds. `silence`: no byte for that long breaks an attempt. `deadline`: of the whole call, plus 1 s for each
    `rate` bytes."""

    connect: float = 10.0
    silence: float = 20.0
    deadline: float = 120.0
    rate: float = 2e6
    first_delay: float = 0.25
    longest_delay: float = 16.0

    def delay(self, attempt: int, chance: float) -> float:
        """Seconds before attempt number `attempt` (from 1), with `chance` drawn from [0, 1): full jitter, see
        https://aws.amazon.com/blogs/architecture/exponential-backoff-and-jitter/"""
        return chance * min(self.longest_delay, self.first_delay * 2.0**attempt)


patience = Patience()

_lock = threading.Lock()
_clients: dict[tuple[int, str | None], Any] = {}
_CONNECTIONS = 64
_LIMITS = (
    "quotaExceeded",
    "rateLimitExceeded",
    "userRateLimitExceeded",
    "dailyLimitExceeded",
    "accountDisabled",
    "notBillable",
)  # of a 403


def stat(url: str) -> Stat | None:
    bucket, name = _object(url)

    def call(timeout: tuple[float, float], _: float) -> Stat | None:
        blob = _client().bucket(bucket).get_blob(name, timeout=timeout, retry=None)
        return None if blob is None else _stat(url, blob)

    return _persist(url, "looking at", call)


def listing(folder: str) -> list[Stat]:
    bucket, name = split_remote(folder)
    prefix = name.rstrip("/") + "/" if name.strip("/") else ""

    def call(timeout: tuple[float, float], _: float) -> list[Stat]:
        blobs = _client().list_blobs(bucket, prefix=prefix, timeout=timeout, retry=None)
        return [_stat(f"gs://{bucket}/{blob.name}", blob) for blob in blobs if not blob.name.endswith("/")]

    return sorted(_persist(folder, "listing", call), key=lambda each: each.url)


def read(url: str, start: int, end: int | None, generation: int | None) -> bytes:
    bucket, name = _object(url)
    if end is not None and end <= start:
        return b""
    what = (
        "reading" if start == 0 and end is None else f"reading bytes {start} to {'the end' if end is None else end} of"
    )

    def call(timeout: tuple[float, float], until: float) -> bytes:
        blob = _client().bucket(bucket).blob(name)
        sink = io.BytesIO()
        with _Cut(until):
            blob.download_to_file(
                sink,
                start=start or None,
                end=None if end is None else end - 1,
                raw_download=True,
                checksum=None,
                if_generation_match=generation,
                timeout=timeout,
                retry=None,
            )
        return sink.getvalue()

    from google.cloud.exceptions import RequestRangeNotSatisfiable

    try:
        return _persist(url, what, call, size=0 if end is None else end - start, pinned=generation is not None)
    except RequestRangeNotSatisfiable:
        return b""  # beyond the end, as for a file


def write(url: str, data: bytes | memoryview, create_only: bool) -> Stat:
    def send(blob: Any, **options: Any) -> None:
        source = _Bytes(memoryview(data))
        blob.upload_from_file(source, size=len(data), content_type="application/octet-stream", **options)

    return _send(url, len(data), lambda: crc32c(data), send, create_only)


class _Bytes(io.RawIOBase):
    """Reads from memory without a copy of the whole."""

    def __init__(self, view: memoryview) -> None:
        self._view, self._at = view, 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._at

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        self._at = offset + (0, self._at, len(self._view))[whence]
        return self._at

    def readinto(self, place: Any) -> int:
        data = self._view[self._at : self._at + len(place)]
        place[: len(data)] = data
        self._at += len(data)
        return len(data)


def upload(path: Path, url: str, create_only: bool) -> Stat:
    def send(blob: Any, **options: Any) -> None:
        blob.upload_from_filename(str(path), content_type="application/octet-stream", **options)

    size = path.stat().st_size
    return _send(url, size, lambda: Stat(str(path), size, 0).crc32c, send, create_only)


def delete(url: str) -> None:
    bucket, name = _object(url)

    def call(timeout: tuple[float, float], _: float) -> None:
        _client().bucket(bucket).blob(name).delete(timeout=timeout, retry=None)

    try:
        _persist(url, "deleting", call)
    except NotFound:
        if not _bucket_exists(bucket):
            raise


def _send(url: str, size: int, sum_of: Callable[[], int], send: Callable[..., None], create_only: bool) -> Stat:
    bucket, name = _object(url)
    attempts = 0

    def call(timeout: tuple[float, float], _: float) -> Stat:
        from google.api_core.exceptions import PreconditionFailed

        nonlocal attempts
        attempts += 1
        blob = _client().bucket(bucket).blob(name)
        try:
            send(blob, checksum="crc32c", if_generation_match=0 if create_only else None, timeout=timeout, retry=None)
        except PreconditionFailed:
            there = stat(url) if attempts > 1 else None  # our own earlier attempt, whose answer was lost?
            if there and there.size == size and there.crc32c == sum_of():
                return there
            raise AlreadyExists(f"{url} already exists") from None
        return _stat(url, blob)

    return _persist(url, "writing", call, size=size)


class _Cut:
    """Cuts this thread's download off at a moment, however slowly bytes trickle in: socket time-outs begin anew with
    every byte."""

    _current = threading.local()

    def __init__(self, until: float) -> None:
        self._timer = threading.Timer(max(until - time.monotonic(), 0.1), self._cut)
        self._timer.daemon = True
        self._response: Any = None
        self._over = False

    @classmethod
    def saw(cls, response: Any) -> None:
        """The response that this thread is about to read."""
        current: _Cut | None = getattr(cls._current, "cut", None)
        if current:
            current._response = response

    def _cut(self) -> None:
        self._over = True
        if self._response is not None:
            with contextlib.suppress(ValueError, RuntimeError, OSError):  # it has ended by itself
                self._response.raw.shutdown()

    def __enter__(self) -> None:
        self._current.cut = self
        self._timer.start()

    def __exit__(self, kind: object, error: BaseException | None, _: object) -> None:
        self._current.cut = None
        self._timer.cancel()
        if self._over and self._response is not None and isinstance(error, Exception):
            raise TimeoutError("bytes still trickled in at the deadline") from error


def _persist(
    url: str, what: str, call: Callable[[tuple[float, float], float], T], *, size: int = 0, pinned: bool = False
) -> T:
    """Repeats `call(timeout, until)` while its failures may pass, then explains."""
    limits = patience
    begin = time.monotonic()
    allowed = limits.deadline + size / limits.rate
    for attempt in range(1, 1_000_000):
        left = begin + allowed - time.monotonic()
        try:
            return call((min(limits.connect, max(left, 0.1)), min(limits.silence, max(left, 0.1))), begin + allowed)
        except StorageError:
            raise
        except Exception as error:
            _raise_final(url, what, error, pinned)
            delay = limits.delay(attempt, random.random())
            if time.monotonic() + delay > begin + allowed:
                raise StorageError(
                    f"{url}: {what} it failed for {time.monotonic() - begin:.0f} s, {attempt} times; last: {_cause(error)}. "
                    "Check the bucket's status and this host's network, then start again"
                ) from error
            time.sleep(delay)
    raise AssertionError("unreachable")


def _raise_final(url: str, what: str, error: Exception, pinned: bool) -> None:
    """Raises unless `error` may pass."""
    from google.api_core import exceptions as api
    from google.auth import exceptions as auth

    bucket = split_remote(url)[0]
    if isinstance(error, api.RequestRangeNotSatisfiable):
        raise error
    if isinstance(error, api.NotFound):
        if pinned and (there := stat(url)):
            raise Changed(
                f"{url} was replaced (generation {there.generation}) while it was in use: start again"
            ) from None
        raise (
            NotFound(f"{url} does not exist")
            if _bucket_exists(bucket)
            else NoBucket(f"bucket gs://{bucket} does not exist")
        ) from None
    if isinstance(error, api.PreconditionFailed):
        raise Changed(
            f"{url} was replaced while it was in use: don't write to data that is being read; start again"
        ) from None
    if isinstance(error, api.Forbidden | api.Unauthorized):
        said, reason = _said(error)
        if reason in _LIMITS:
            raise StorageError(
                f"{url}: {what} it was refused: {said} ({reason}). See to the quotas and the billing of the bucket's project"
            ) from None
        raise StorageError(
            f"{url}: {what} it is not allowed: {said}. Grant this service account a role such as roles/storage.objectUser on gs://{bucket}"
        ) from None
    if isinstance(error, auth.DefaultCredentialsError):
        raise StorageError(
            f"{url}: no Google credentials: run `gcloud auth application-default login`, or give the TPU's service account access to gs://{bucket}"
        ) from None
    if (
        isinstance(error, api.GoogleAPICallError)
        and error.code is not None
        and error.code not in (408, 429)
        and error.code < 500
    ):
        raise StorageError(f"{url}: {what} it was refused: {error.code} {_said(error)[0]}") from error
    if not _may_pass(error):
        raise error


def _said(error: Any) -> tuple[str, str]:
    """The server's own words in an answer, and its reason:
    https://cloud.google.com/storage/docs/json_api/v1/status-codes. Google's library puts the whole request and the
    whole answer into its message."""
    try:
        told = error.response.json()["error"]
        words, reason = str(told["message"]), str((told.get("errors") or [{}])[0].get("reason", ""))
    except (AttributeError, ValueError, KeyError, TypeError, IndexError):
        words, reason = str(error.message), ""
    return " ".join(words.split()).removesuffix(".")[:500], reason


def _may_pass(error: Exception) -> bool:
    import requests
    import urllib3
    from google.api_core import exceptions as api
    from google.auth import exceptions as auth
    from google.cloud.storage import exceptions as storage

    if isinstance(error, storage.InvalidResponse):
        status = getattr(error.response, "status_code", 500)
        return status in (308, 408, 429) or status >= 500
    broken = (
        OSError,
        requests.exceptions.RequestException,
        urllib3.exceptions.HTTPError,
        auth.TransportError,
        storage.DataCorruption,
    )
    return isinstance(error, (api.GoogleAPICallError, *broken))


def _cause(error: Exception) -> str:
    text = " ".join(str(error).split())
    return f"{type(error).__name__}: {text[:300]}"


def _bucket_exists(bucket: str) -> bool:
    from google.api_core.exceptions import GoogleAPICallError

    try:
        return bool(_client().bucket(bucket).exists(timeout=patience.silence, retry=None))
    except (GoogleAPICallError, OSError):
        return True  # can't tell (reading objects does not include the right to look at the bucket)


def _object(url: str) -> tuple[str, str]:
    bucket, name = split_remote(url)
    if not name:
        raise StorageError(f"{url} names a bucket, not an object")
    return bucket, name


def _stat(url: str, blob: Any) -> Stat:
    stored = int.from_bytes(base64.b64decode(blob.crc32c), "big") if blob.crc32c else None
    return Stat(url, int(blob.size), int(blob.generation), stored)


def _client() -> Any:
    key = (os.getpid(), os.environ.get("STORAGE_EMULATOR_HOST"))
    with _lock:
        if key not in _clients:
            from google.cloud import storage
            from requests.adapters import HTTPAdapter

            class Adapter(HTTPAdapter):  # type: ignore[misc]  # requests has no types here
                def send(self, *arguments: Any, **options: Any) -> Any:
                    response = super().send(*arguments, **options)
                    _Cut.saw(response)
                    return response

            client = storage.Client()
            for scheme in ("https://", "http://"):  # the default keeps 10 connections; a reader has more in flight
                client._http.mount(scheme, Adapter(pool_connections=4, pool_maxsize=_CONNECTIONS))
            _clients[key] = client
        return _clients[key]
