"""The Cloud Storage side of `training.storage`: the unmodified client library, with our own time-outs and messages.

Failure model. `google.api_core.retry` repeats a call on 408, 429, any 5xx, broken or silent connections, and while the
metadata server gives no token, until the deadline. The delay doubles and is random, so that the hosts of a slice do not
return together. Then one StorageError names the object and the last cause. The client's own retries are off: their
final error does not say which object, which range and what was tried, and each has its own deadline. A server that
sends a few bytes now and then never reaches a socket's time-out; such a download is given up at the deadline.

The client is not fork-safe, so each process makes its own. It honours STORAGE_EMULATOR_HOST itself.
"""

import base64
import io
import os
import threading
import time
from collections.abc import Callable
from concurrent.futures import wait
from dataclasses import dataclass, replace
from email.utils import parsedate_to_datetime
from typing import Any, TypeVar

from training.machine import SYSTEM
from training.storage.types import (
    AlreadyExists,
    Changed,
    NoBucket,
    NotAllowed,
    NotFound,
    RangedFile,
    Stat,
    StorageError,
    crc32c,
    split_remote,
)

T = TypeVar("T")


@dataclass(frozen=True)
class Timeouts:
    """Time-outs in seconds. `connect` and `silence` (no byte for so long) end one attempt; `deadline`, plus 1 s for
    each `rate` bytes, the whole call. Delays between attempts start at up to twice `first_delay`."""

    connect: float = 10.0
    silence: float = 20.0
    deadline: float = 120.0
    rate: float = 2e6
    first_delay: float = 0.25
    longest_delay: float = 16.0

    def seconds(self, size: int) -> float:
        """Returns the limit for a call that transfers `size` bytes, retries included."""
        return self.deadline + size / self.rate


timeouts = Timeouts()

_lock = threading.Lock()
_clients: dict[tuple[int, str | None], Any] = {}
_CONNECTIONS = 64
_ONE_REQUEST = 8 << 20  # bytes up to which the client sends an object in one request
# Reasons of a 403 that a permission would not remove:
# https://cloud.google.com/storage/docs/json_api/v1/status-codes
_QUOTA_REASONS = (
    *("quotaExceeded", "rateLimitExceeded", "userRateLimitExceeded", "dailyLimitExceeded"),
    *("accountDisabled", "notBillable"),
)

# One attempt, with the client's (connect, read) time-outs and the moment of its deadline.
Attempt = Callable[[tuple[float, float], float], T]


def stat(url: str) -> Stat | None:
    """Returns size, generation, CRC-32C and age of an object; None if there is none, or no such bucket. Raises
    StorageError, BadInput."""
    bucket, name = _object(url)

    def attempt(timeout: tuple[float, float], _: float) -> Stat | None:
        """Asks once. The age is by the Date of the server's answer; None without one."""
        blob = _client().bucket(bucket).get_blob(name, timeout=timeout, retry=None)
        if blob is None or not (date := getattr(_this_thread, "date", "")):
            return None if blob is None else _stat(url, blob)
        return replace(_stat(url, blob), age=(parsedate_to_datetime(date) - blob.updated).total_seconds())

    return _retry(url, "looking at", attempt)


def listing(folder: str) -> list[Stat]:
    """Lists all objects below a folder, sorted by URL, but those named like a folder (`a/`); [] if there is none.
    Raises NoBucket, StorageError."""
    return sorted(_list(folder, None)[0], key=lambda stat: stat.url)


def folders(folder: str) -> list[str]:
    """Returns the names of the direct subfolders, sorted; [] if there is none. Raises NoBucket, StorageError."""
    return sorted(_list(folder, "/")[1])


def _list(folder: str, delimiter: str | None) -> tuple[list[Stat], list[str]]:
    """Returns all objects below a folder but those named like one; or, with the delimiter "/", those directly in it,
    and the names of its direct subfolders. Raises NoBucket, StorageError, BadInput."""
    bucket, name = split_remote(folder)
    prefix = name.rstrip("/") + "/" if name.strip("/") else ""

    def attempt(timeout: tuple[float, float], _: float) -> tuple[list[Stat], list[str]]:
        """Asks for all pages; any that fails is a failure of them all."""
        blobs = _client().list_blobs(bucket, prefix=prefix, delimiter=delimiter, timeout=timeout, retry=None)
        stats = [_stat(f"gs://{bucket}/{blob.name}", blob) for blob in blobs if not blob.name.endswith("/")]
        return stats, [each[len(prefix) :].rstrip("/") for each in blobs.prefixes]

    return _retry(folder, "listing", attempt)


def read(url: str, start: int, end: int | None, generation: int | None) -> bytes:
    """Reads bytes [start, end) of an object, to its end without `end`; b"" beyond it, and for an empty range, unasked.
    Raises Changed if it is not of `generation`, when that is given, NotFound, StorageError and BadInput."""
    bucket, name = _object(url)
    if end is not None and end <= start:
        return b""
    whole = start == 0 and end is None
    activity = "reading" if whole else f"reading bytes {start} to {'the end' if end is None else end} of"

    def download(timeout: tuple[float, float]) -> bytes:
        """Downloads the range once. Raises PreconditionFailed if the object is not of `generation`."""
        blob = _client().bucket(bucket).blob(name)
        # Close the buffer after a failure: the errors of all attempts live until the last, with their frames.
        with io.BytesIO() as sink:
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

    def attempt(timeout: tuple[float, float], until: float) -> bytes:
        """Downloads in a thread, which is left to itself at the deadline: a socket's time-out starts again with every
        byte."""
        downloading = SYSTEM.threads.submit(download, timeout)
        if not wait([downloading], max(until - time.monotonic(), 0.1) + 1).done:  # it ends by itself if all are silent
            raise TimeoutError("bytes still trickled in at the deadline")
        return downloading.result()

    from google.cloud.exceptions import RequestRangeNotSatisfiable

    try:
        return _retry(url, activity, attempt, size=0 if end is None else end - start, pinned=generation is not None)
    except RequestRangeNotSatisfiable:
        return b""  # beyond the end, as for a file


def write(url: str, data: bytes | memoryview, generation: int | None) -> Stat:
    """Writes a whole object. Raises AlreadyExists when the object's generation is another one (0: there is none; None:
    any), unless a request of this call, whose answer was lost, wrote it; StorageError, BadInput. The client sends a
    large object in chunks and repeats a chunk that fails; the whole upload starts again only when its session is
    lost."""
    bucket, name = _object(url)
    sent = 0  # requests that may have written the object

    def should_retry(error: Exception) -> bool:
        """Returns whether the client sends a failed chunk again, and counts that."""
        nonlocal sent
        retry = _is_transient(error)
        sent += retry  # the client sends the chunk again
        return retry

    def attempt(timeout: tuple[float, float], until: float) -> Stat:
        """Uploads once. Turns a lost session into a ConnectionError, which begins a new upload, and recognises an
        object that an earlier request wrote."""
        from google.api_core import exceptions as api
        from google.api_core.retry import Retry

        nonlocal sent
        sent += 1
        blob = _client().bucket(bucket).blob(name)
        limits, left = timeouts, max(until - time.monotonic(), 0.1)
        chunks = Retry(should_retry, 2 * limits.first_delay, limits.longest_delay, 2, left)
        try:
            blob.upload_from_file(
                RangedFile(len(data), lambda start, end: memoryview(data)[start:end]),
                size=len(data),
                content_type="application/octet-stream",
                checksum="crc32c",
                if_generation_match=generation,
                timeout=timeout,
                retry=chunks if len(data) > _ONE_REQUEST else None,
            )
        except api.PreconditionFailed:
            # An earlier request of this call, whose answer was lost, may have written the object.
            present = stat(url) if sent > 1 else None
            if present and present.size == len(data) and present.crc32c == crc32c(data):
                return present
            problem = "was replaced by another writer" if generation else "already exists"
            raise AlreadyExists(f"{url} {problem}") from None
        except api.RetryError as error:
            raise error.cause or error from None
        except api.GoogleAPICallError as error:
            if error.code in (404, 410) and len(data) > _ONE_REQUEST and _bucket_exists(bucket):
                raise ConnectionError(f"the session of the upload is lost: {error.code}") from None
            raise
        return _stat(url, blob)

    return _retry(url, "writing", attempt, size=len(data))


def delete(url: str) -> None:
    """Deletes an object, if it exists. Raises NoBucket when its bucket does not, StorageError and BadInput."""
    bucket, name = _object(url)
    try:
        _retry(
            url, "deleting", lambda timeout, _: _client().bucket(bucket).blob(name).delete(timeout=timeout, retry=None)
        )
    except NotFound:
        if not _bucket_exists(bucket):
            raise


_this_thread = threading.local()  # its "date": of the server's last answer, in whole seconds; "" if it told none


def _retry(url: str, activity: str, attempt: Attempt[T], *, size: int = 0, pinned: bool = False) -> T:
    """Returns what `attempt` returns, repeating it while its failures are transient. Raises StorageErrors for refusals,
    a missing object and at the deadline; unknown errors pass. `activity` ("reading") and `url` are for messages; `size`
    bytes extend the deadline. With `pinned`, `attempt` asks for one generation: raises Changed for another."""
    from google.api_core.retry import exponential_sleep_generator, retry_target

    limits = timeouts
    # With full jitter: https://aws.amazon.com/blogs/architecture/exponential-backoff-and-jitter/
    delays = exponential_sleep_generator(2 * limits.first_delay, limits.longest_delay, multiplier=2)
    seconds = limits.seconds(size)
    began = time.monotonic()
    failures = 0
    final: Exception | None = None

    def call() -> T:
        """Makes one attempt, with time-outs of at most what is left of the deadline."""
        left = max(began + seconds - time.monotonic(), 0.1)
        return attempt((min(limits.connect, left), min(limits.silence, left)), began + seconds)

    def should_retry(error: Exception) -> bool:
        """Counts a failure. Returns whether it is transient; else keeps the error to raise."""
        nonlocal failures, final
        failures += 1
        final = _final_error(url, activity, error, pinned)
        return final is None

    def give_up(errors: list[Exception], _reason: object, _seconds: object) -> tuple[Exception, BaseException | None]:
        """Returns the error to raise in the end, and its cause."""
        if final is not None:
            return final, final.__cause__
        return StorageError(
            f"{url}: {activity} it failed for {time.monotonic() - began:.0f} s, {failures} times; last: "
            f"{_cause(errors[-1])}. Check the bucket's status and this host's network, then start again"
        ), errors[-1]

    result: T = retry_target(call, should_retry, delays, timeout=seconds, exception_factory=give_up)
    return result


def _final_error(url: str, activity: str, error: Exception, pinned: bool) -> Exception | None:
    """Returns the error to raise, `error` itself if it is unknown; None for a transient failure. May ask the server,
    and raises StorageError if that fails."""
    from google.api_core import exceptions as api
    from google.auth import exceptions as auth

    bucket = split_remote(url)[0]
    if isinstance(error, StorageError | api.RequestRangeNotSatisfiable):
        return error
    if _is_transient(error):
        return None
    if isinstance(error, api.NotFound):
        if pinned and (present := stat(url)):
            return Changed(f"{url} was replaced (generation {present.generation}) while it was in use: start again")
        if _bucket_exists(bucket):
            return NotFound(f"{url} does not exist")
        return NoBucket(f"bucket gs://{bucket} does not exist")
    if isinstance(error, api.PreconditionFailed):
        return Changed(f"{url} was replaced while it was in use: don't write to data that is being read; start again")
    if isinstance(error, api.Forbidden | api.Unauthorized):
        return _refusal(url, activity, error)
    if isinstance(error, auth.DefaultCredentialsError):
        return StorageError(
            f"{url}: no Google credentials: run `gcloud auth application-default login`, or give the TPU's service "
            f"account access to gs://{bucket}"
        )
    if isinstance(error, auth.GoogleAuthError):
        return StorageError(
            f"{url}: {activity} it failed because Google's credentials were refused: {_cause(error)}. Run `gcloud auth "
            "application-default login` again, or check the service account of this host"
        )
    if isinstance(error, api.GoogleAPICallError):
        return StorageError(f"{url}: {activity} it was refused: {error.code} {_answer(error)[0]}")
    return error


def _refusal(url: str, activity: str, error: Any) -> StorageError:
    """Returns the error for a 401 or 403: StorageError for a quota or billing, NotAllowed for a missing permission."""
    message, reason = _answer(error)
    if reason in _QUOTA_REASONS:
        return StorageError(
            f"{url}: {activity} it was refused: {message} ({reason}). Check the quotas and the billing of the "
            "bucket's project"
        )
    return NotAllowed(
        f"{url}: {activity} it is not allowed: {message}. Grant this service account a role such as "
        f"roles/storage.objectUser on gs://{split_remote(url)[0]}"
    )


def _answer(error: Any) -> tuple[str, str]:
    """Returns the server's message and reason (https://cloud.google.com/storage/docs/json_api/v1/status-codes). The
    library's own message contains the whole request and answer."""
    try:
        body = error.response.json()["error"]
        message, reason = str(body["message"]), str((body.get("errors") or [{}])[0].get("reason", ""))
    except (AttributeError, ValueError, KeyError, TypeError, IndexError):
        message, reason = str(error.message), ""
    return " ".join(message.split()).removesuffix(".")[:500], reason


def _is_transient(error: Exception) -> bool:
    """Returns whether a retry may help: after any OSError (a broken connection), a wrong checksum, status 308, 408, 429
    or 5xx, or none, and passing failures of credentials."""
    import requests
    import urllib3
    from google.api_core import exceptions as api
    from google.auth import exceptions as auth
    from google.cloud.storage import exceptions as storage

    if isinstance(error, auth.GoogleAuthError):
        # Credentials of a VM turn the metadata server's TransportError into a RefreshError.
        broken_transport = (auth.TransportError, auth.TimeoutError, auth.ResponseError)
        return error.retryable or isinstance(error, broken_transport) or isinstance(error.__cause__, broken_transport)
    if isinstance(error, storage.InvalidResponse | api.GoogleAPICallError):
        code = error.code if isinstance(error, api.GoogleAPICallError) else getattr(error.response, "status_code", None)
        return code is None or code in (308, 408, 429) or code >= 500
    broken = (OSError, requests.exceptions.RequestException, urllib3.exceptions.HTTPError, storage.DataCorruption)
    return isinstance(error, broken)


def _cause(error: Exception) -> str:
    """Returns the error's type and the first 300 characters of its message, on one line."""
    text = " ".join(str(error).split())
    return f"{type(error).__name__}: {text[:300]}"


def _bucket_exists(bucket: str) -> bool:
    """Asks once whether a bucket exists; True when the answer is an error."""
    from google.api_core.exceptions import GoogleAPICallError
    from google.auth.exceptions import GoogleAuthError

    try:
        return bool(_client().bucket(bucket).exists(timeout=timeouts.silence, retry=None))
    except (GoogleAPICallError, GoogleAuthError, OSError):
        return True  # unknown: permission to read objects does not include permission to get the bucket


def _object(url: str) -> tuple[str, str]:
    """Splits an object's URL into bucket and name. Raises StorageError without a name, BadInput without a bucket."""
    bucket, name = split_remote(url)
    if not name:
        raise StorageError(f"{url} names a bucket, not an object")
    return bucket, name


def _stat(url: str, blob: Any) -> Stat:
    """Returns the state of the object whose properties the blob has loaded."""
    stored = int.from_bytes(base64.b64decode(blob.crc32c), "big") if blob.crc32c else None
    return Stat(url, int(blob.size), int(blob.generation), stored)


def _client() -> Any:
    """Returns the client of this process for the present STORAGE_EMULATOR_HOST, made at the first call. Raises
    google.auth's DefaultCredentialsError."""
    key = (os.getpid(), os.environ.get("STORAGE_EMULATOR_HOST"))
    with _lock:
        if key not in _clients:
            from google.cloud import storage
            from requests.adapters import HTTPAdapter

            class Adapter(HTTPAdapter):  # type: ignore[misc]  # requests has no types here
                def send(self, *arguments: Any, **options: Any) -> Any:
                    response = super().send(*arguments, **options)
                    _this_thread.date = response.headers.get("Date", "")
                    return response

            client = storage.Client(project=None)  # objects need none; a user may have no default project
            for scheme in ("https://", "http://"):  # the default keeps 10 connections; a reader has more in flight
                client._http.mount(scheme, Adapter(pool_connections=4, pool_maxsize=_CONNECTIONS))
            _clients[key] = client
        return _clients[key]
