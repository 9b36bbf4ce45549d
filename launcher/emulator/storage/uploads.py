"""Uploads to a bucket: media, multipart and resumable.

A resumable upload is `<bucket>/uploads/<id>.json` (the object's name, settings and expected generation) and `<id>.data`
(the bytes so far), so it continues after the server was killed. When it is complete, the JSON file holds the object
that it became, which answers a repeated last chunk or status query.
"""

import json
import os
import re
import threading
from collections.abc import Iterable, Mapping
from dataclasses import asdict
from typing import Any
from urllib.parse import quote
from weakref import WeakValueDictionary

from launcher.emulator.http_server import HttpRequest, HttpResponse
from launcher.emulator.storage.bucket import (
    Bucket,
    Buckets,
    Incoming,
    StorageApiError,
    StoredObject,
    require_generation,
)
from launcher.home import write_private

_CHUNK = 256 * 1024  # all chunks but the last are multiples of it
EXPECTED = "ifGenerationMatch"  # the parameter with the generation that the request expects
Made = tuple[Bucket, StoredObject]


class Uploads:
    """Answers requests below /upload/ with the created object, or with how many bytes have arrived."""

    def __init__(self, buckets: Buckets) -> None:
        self._buckets = buckets
        self._open: dict[str, Incoming] = {}
        self._locks = WeakValueDictionary[str, threading.Lock]()  # of uploads that a thread works on
        self._lock = threading.Lock()

    def answer(self, request: HttpRequest, bucket_name: str, base: str) -> Made | HttpResponse:
        """Returns the object that a request completed, or a response. `base`: server's URL. Raises StorageApiError."""
        bucket = self._buckets.get(bucket_name)
        if "upload_id" in request.query:
            return self._continue(request, bucket, request.query["upload_id"])
        match request.query.get("uploadType"):
            case "media":
                return self._media(request, bucket)
            case "multipart":
                return self._multipart(request, bucket)
            case "resumable":
                return self._begin(request, bucket, base)
        raise StorageApiError(400, "invalid", f"Invalid upload type: {request.query.get('uploadType')!r}")

    def _media(self, request: HttpRequest, bucket: Bucket) -> Made:
        settings = {"contentType": request.headers.get("Content-Type", "application/octet-stream")}
        return self._whole(request, bucket, request.query["name"], settings, request.body.blocks())

    def _multipart(self, request: HttpRequest, bucket: Bucket) -> Made:
        """Stores a small object of a multipart/related body: first JSON with name and settings, then the bytes."""
        match = re.search(r'boundary="?([^";]+)', request.headers.get("Content-Type", ""))
        if not match:
            raise StorageApiError(400, "badContent", "Multipart body without a boundary.")
        boundary = b"--" + match[1].strip().strip("'").encode()
        whole = request.body.read_all(limit=1 << 30)
        before, first, second, *after = [*whole.split(boundary), b"", b"", b""]
        if before.strip() or not after[0].startswith(b"--"):
            raise StorageApiError(400, "badContent", "Multipart body must have exactly two parts.")
        newline = b"\r\n" if first.startswith(b"\r\n") else b"\n"  # which gcloud ends lines with
        description, (head, _, content) = first.partition(newline * 2)[2], second.partition(newline * 2)
        kind = re.search(r"(?im)^content-type:\s*([^\r\n]+)", head.decode("latin-1"))
        settings = {"contentType": kind[1].strip() if kind else "application/octet-stream", **json.loads(description)}
        name = request.query.get("name") or str(settings["name"])
        return self._whole(request, bucket, name, settings, [content.removesuffix(newline)])

    def _whole(
        self, request: HttpRequest, bucket: Bucket, name: str, settings: dict[str, Any], blocks: Iterable[bytes]
    ) -> Made:
        """Stores the blocks as an object. Discards them on any error, such as a wrong hash or a lost client."""
        with bucket.incoming() as incoming:
            for block in blocks:
                incoming.write(block)
            _verify(request, incoming, settings)
            return bucket, bucket.commit(name, incoming, settings, integer(request.query, EXPECTED))

    # -- resumable

    def _begin(self, request: HttpRequest, bucket: Bucket, base: str) -> HttpResponse:
        """Enters a resumable upload on disk; answers with its URL. Raises StorageApiError for a wrong generation."""
        settings = request.json()
        if kind := request.headers.get("X-Upload-Content-Type"):
            settings.setdefault("contentType", kind)
        name = request.query.get("name") or str(settings["name"])
        expected = integer(request.query, EXPECTED)
        require_generation(expected, bucket.find(name))  # refuse early; checked again at the end
        identifier = os.urandom(16).hex()
        session = {"name": name, "settings": settings, "expected": expected, "made": None}
        write_private(bucket.folder / "uploads" / f"{identifier}.json", json.dumps(session))
        query = f"uploadType=resumable&name={quote(name, safe='')}&upload_id={identifier}"
        location = f"{base}/upload/storage/v1/b/{bucket.name}/o?{query}"
        return HttpResponse(200, b"", {"Location": location, "X-GUploader-UploadID": identifier})

    def _continue(self, request: HttpRequest, bucket: Bucket, identifier: str) -> Made | HttpResponse:
        """Takes a chunk, a status query or a DELETE of a resumable upload. Returns the object once it is complete;
        until then 308 with the range of the bytes that arrived; 499 after a DELETE. Raises StorageApiError."""
        path = bucket.folder / "uploads" / f"{identifier}.json"
        if not re.fullmatch(r"[0-9a-f]{32}", identifier) or not path.exists():
            raise StorageApiError(404, "notFound", "No such upload; begin again.")
        with self._lock:
            lock = self._locks.setdefault(identifier, threading.Lock())
        with lock:
            session = json.loads(path.read_text())
            if session["made"] is not None:
                return bucket, StoredObject(**session["made"])
            if request.method == "DELETE":
                self._forget(bucket, identifier)
                return HttpResponse(499)
            incoming = self._open.get(identifier) or Incoming(path.with_suffix(".data"))
            self._open[identifier] = incoming
            total = self._receive(request, incoming)
            if total is None or incoming.size < total:
                headers = {"Range": f"bytes=0-{incoming.size - 1}"} if incoming.size else {}
                return HttpResponse(308, b"", headers)
            return self._finish(request, bucket, identifier, session, incoming)

    def _receive(self, request: HttpRequest, incoming: Incoming) -> int | None:
        """Appends the request's bytes that had not arrived yet. Returns the object's size, None if it is unknown.
        Raises StorageApiError if bytes before them are missing, or there are too many."""
        text = request.headers.get("Content-Range", "")
        match = re.fullmatch(r"bytes (?:(\d+)-(\d+)|\*)/(\d+|\*)", text.strip())
        if text and not match:
            raise StorageApiError(400, "invalid", f"Invalid Content-Range: {text}")
        first = int(match[1]) if match and match[1] is not None else None if match else incoming.size
        total = int(match[3]) if match and match[3] != "*" else None
        if first is None:  # a status query
            return total
        if first > incoming.size:
            raise StorageApiError(503, "backendError", f"Bytes {incoming.size}-{first - 1} are missing.")
        skip = incoming.size - first
        # Keep what has arrived when the client disconnects: it will query the status.
        for block in request.body.blocks():
            if skip < len(block):
                incoming.write(block[skip:])
            skip = max(0, skip - len(block))
        if not match:
            return incoming.size
        if total is None and (int(match[2]) + 1 - first) % _CHUNK:
            raise StorageApiError(400, "invalid", f"Chunks but the last must be multiples of {_CHUNK} bytes.")
        if total is not None and incoming.size > total:
            raise StorageApiError(400, "invalid", f"More bytes than the {total} announced.")
        return total

    def _finish(
        self, request: HttpRequest, bucket: Bucket, identifier: str, session: dict[str, Any], incoming: Incoming
    ) -> Made:
        """Commits a whole upload; keeps its result for repeats. Forgets a refused one, and raises StorageApiError."""
        settings = session["settings"]
        try:
            _verify(request, incoming, settings)
            made = bucket.commit(session["name"], incoming, settings, session["expected"])
        except StorageApiError:
            self._forget(bucket, identifier)
            raise
        session["made"] = asdict(made)
        write_private(bucket.folder / "uploads" / f"{identifier}.json", json.dumps(session))
        self._open.pop(identifier, None)
        return bucket, made

    def _forget(self, bucket: Bucket, identifier: str) -> None:
        if incoming := self._open.pop(identifier, None):
            incoming.discard()
        (bucket.folder / "uploads" / f"{identifier}.json").unlink(missing_ok=True)


def _verify(request: HttpRequest, incoming: Incoming, settings: Mapping[str, Any]) -> None:
    """Raises StorageApiError for bytes whose checksum is not that of the settings or else of the X-Goog-Hash header."""
    text = request.headers.get("X-Goog-Hash", "")
    sent = dict(part.strip().split("=", 1) for part in text.split(",") if "=" in part)
    incoming.verify(settings.get("crc32c") or sent.get("crc32c"), settings.get("md5Hash") or sent.get("md5"))


def integer(query: Mapping[str, str], name: str) -> int | None:
    """Returns a number of a query, None when it is absent. Raises StorageApiError when it is not a number."""
    text = query.get(name)
    if not text:
        return None
    try:
        return int(text)
    except ValueError:
        raise StorageApiError(400, "invalidParameter", f"Invalid value for {name}: {text!r}") from None
