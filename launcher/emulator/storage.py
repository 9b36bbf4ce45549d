"""The JSON API of Cloud Storage over bucket.py, as google-cloud-storage, TensorFlow and `gcloud storage` use it.

Not emulated: deletion of buckets, composed objects (`gcloud storage cp` makes one of a file of 150 MiB and more),
changes of an object's metadata, batches, versioning, permissions, notifications, customer-supplied keys, the XML API.

On an emulated host Google's own names lead here too, for TensorFlow's gs://, whose endpoints are compiled in (tsl's
gcs_file_system.cc). It reads whole objects by the XML API's paths (`GET /bucket/object`), and calls the JSON API
otherwise.

A resumable upload is `<bucket>/uploads/<id>.json` (the object's name, settings and expected generation) and `<id>.data`
(the bytes so far), so it continues after the server was killed. When it is complete, the JSON file holds the object
that it became, which answers a repeated last chunk or status query.
"""

import base64
import json
import os
import re
import threading
from collections.abc import Iterable, Mapping
from dataclasses import asdict
from typing import Any
from urllib.parse import quote
from weakref import WeakValueDictionary

from launcher.emulator.bucket import Bucket, Buckets, Incoming, StorageApiError, StoredObject, require_generation
from launcher.emulator.http_server import FileRegion, HttpRequest, HttpResponse, json_response, timestamp
from launcher.home import write_private

NAMES = ("storage.googleapis.com", "www.googleapis.com")
_EXPECTED = "ifGenerationMatch"  # the parameter with the generation that the request expects
# Conditions and bounds of Cloud Storage that are refused: ignored, they would delete or list too much.
_NOT_EMULATED = {"endOffset", "ifGenerationNotMatch", "ifSourceGenerationNotMatch", "startOffset"}
_PREFIXES = {"storage": 2, "upload": 3, "download": 3, "resumable": 4}  # how many parts of the path come before "b"
_CHUNK = 256 * 1024  # all chunks of an upload but the last are multiples of it
_Made = tuple[Bucket, StoredObject]


class StorageApi:
    """Answers requests to the API."""

    def __init__(self, buckets: Buckets) -> None:
        self._buckets = buckets
        self._uploads = Uploads(buckets)

    def answer(self, request: HttpRequest) -> HttpResponse:
        """Answers one request; errors become responses in Google's shape."""
        try:
            return self._answer(request)
        except StorageApiError as error:
            return error_response(error, plain=request.query.get("alt") == "media")
        except (ValueError, KeyError, TypeError) as error:
            return error_response(StorageApiError(400, "invalid", f"Invalid request: {error!r}"))

    def _answer(self, request: HttpRequest) -> HttpResponse:
        """Answers one request. Raises StorageApiError; ValueError, KeyError or TypeError for a malformed one."""
        if refused := request.query.keys() & _NOT_EMULATED:
            raise StorageApiError(400, "invalid", f"not emulated: {', '.join(sorted(refused))}")
        base = _base(request)
        parts = request.segments
        kind = parts[0]
        if kind not in _PREFIXES and len(parts) > 1:  # a path of the XML API
            request.query["alt"] = "media"
            parts = ["b", kind, "o", "/".join(parts[1:])]
        else:
            parts = parts[_PREFIXES[kind] :]
        if kind in ("upload", "resumable"):
            if len(parts) != 3 or parts[0] != "b" or parts[2] != "o":
                raise _not_found(request)
            result = self._uploads.answer(request, parts[1], base)
            return result if isinstance(result, HttpResponse) else json_response(object_json(*result, base))
        match (request.method, parts):
            case ("GET", ["b"]):
                prefix = request.query.get("prefix", "")
                items = [bucket_json(bucket, base) for bucket in self._buckets.all() if bucket.name.startswith(prefix)]
                return json_response({"kind": "storage#buckets", "items": items})
            case ("POST", ["b"]):
                body = request.json()
                return json_response(bucket_json(self._buckets.create(str(body.get("name", "")), body), base))
            case ("GET", ["b", bucket]):
                return json_response(bucket_json(self._buckets.get(bucket), base))
            case ("GET", ["b", bucket, "o"]):
                return self._list(request, self._buckets.get(bucket), base)
            case (_, ["b", bucket, "o", name, *rest]):
                return self._object(request, self._buckets.get(bucket), name, rest, base)
        raise _not_found(request)

    def _object(self, request: HttpRequest, bucket: Bucket, name: str, rest: list[str], base: str) -> HttpResponse:
        """Answers with an object's resource or, for alt=media, bytes; deletes it; or copies it (`rest` of the path:
        rewriteTo/b/BUCKET/o/NAME). `base`: the server's URL. Raises StorageApiError, 404 for other methods."""
        generation = integer(request.query, "generation")
        expected = integer(request.query, _EXPECTED)
        match (request.method, rest):
            case ("GET" | "HEAD", []) if request.query.get("alt") == "media":
                return self._download(request, bucket, name, generation, expected)
            case ("GET" | "HEAD", []):
                stored = bucket.get(name, generation)
                require_generation(expected, stored)
                return json_response(object_json(bucket, stored, base), headers={"ETag": etag(stored)})
            case ("DELETE", []):
                bucket.delete(name, generation, expected)
                return HttpResponse(204)
            case ("POST", ["rewriteTo", "b", target, "o", new_name]):
                return self._rewrite(request, bucket, name, self._buckets.get(target), new_name, base)
        raise _not_found(request)

    def _download(
        self, request: HttpRequest, bucket: Bucket, name: str, generation: int | None, expected: int | None
    ) -> HttpResponse:
        """Answers with an object's bytes, or a range of them (416 beyond the end). Raises StorageApiError."""
        stored, file = bucket.open(name, generation, expected)
        headers = {
            "Content-Type": str(stored.settings.get("contentType", "application/octet-stream")),
            "Accept-Ranges": "bytes",
            "ETag": etag(stored),
            "X-Goog-Generation": str(stored.generation),
            "X-Goog-Metageneration": "1",
            "X-Goog-Hash": f"crc32c={stored.crc32c},md5={stored.md5}",
            "X-Goog-Stored-Content-Length": str(stored.size),
            "X-Goog-Stored-Content-Encoding": str(stored.settings.get("contentEncoding", "identity")),
            "X-Goog-Storage-Class": str(stored.settings.get("storageClass", "STANDARD")),
        }
        if "contentEncoding" in stored.settings:
            headers["Content-Encoding"] = str(stored.settings["contentEncoding"])
        requested = byte_range(request.headers.get("Range", ""), stored.size)
        if requested is None:
            return HttpResponse(200, FileRegion(file, 0, stored.size), headers)
        start, end = requested
        if start >= stored.size:
            file.close()
            headers = {"Content-Type": "text/html; charset=UTF-8", "Content-Range": f"bytes */{stored.size}"}
            return HttpResponse(416, b"Requested range not satisfiable", headers)
        headers["Content-Range"] = f"bytes {start}-{end - 1}/{stored.size}"
        return HttpResponse(206, FileRegion(file, start, end - start), headers)

    def _list(self, request: HttpRequest, bucket: Bucket, base: str) -> HttpResponse:
        """Answers with a page of objects and common prefixes, at most maxResults or 1000, and the next page's token."""
        query = request.query
        after = base64.urlsafe_b64decode(query.get("pageToken", "").encode()).decode()
        limit = min(integer(query, "maxResults") or 1000, 1000)
        items, prefixes, token = bucket.listing(query.get("prefix", ""), query.get("delimiter", ""), after, limit)
        value: dict[str, Any] = {"kind": "storage#objects"}
        if items:
            value["items"] = [object_json(bucket, item, base) for item in items]
        if prefixes:
            value["prefixes"] = prefixes
        if token:
            value["nextPageToken"] = base64.urlsafe_b64encode(token.encode()).decode()
        return json_response(value)

    def _rewrite(
        self, request: HttpRequest, bucket: Bucket, name: str, target: Bucket, new_name: str, base: str
    ) -> HttpResponse:
        """Copies an object to `new_name` in `target` in one call, with its settings changed by the request's. Raises
        StorageApiError 404, or 412 if either object has another generation than the request expects."""
        query = request.query
        source, file = bucket.open(name, integer(query, "sourceGeneration"), integer(query, "ifSourceGenerationMatch"))
        with target.incoming() as new, file:
            while data := file.read(1 << 20):
                new.write(data)
            settings = {**source.settings, **request.json()}
            copied = object_json(target, target.commit(new_name, new, settings, integer(query, _EXPECTED)), base)
        sizes = dict.fromkeys(("totalBytesRewritten", "objectSize"), str(source.size))
        return json_response({"kind": "storage#rewriteResponse", **sizes, "done": True, "resource": copied})


# -- uploads


class Uploads:
    """Answers requests below /upload/ with the created object, or with how many bytes have arrived."""

    def __init__(self, buckets: Buckets) -> None:
        self._buckets = buckets
        self._open: dict[str, Incoming] = {}
        self._locks = WeakValueDictionary[str, threading.Lock]()  # of uploads that a thread works on
        self._lock = threading.Lock()

    def answer(self, request: HttpRequest, bucket_name: str, base: str) -> _Made | HttpResponse:
        """Returns the object that a request completed, or a response. `base`: server's URL. Raises StorageApiError."""
        bucket = self._buckets.get(bucket_name)
        if "upload_id" in request.query:
            return self._continue(request, bucket, request.query["upload_id"])
        match request.query.get("uploadType"):
            case "media":
                settings = {"contentType": request.headers.get("Content-Type", "application/octet-stream")}
                return self._whole(request, bucket, request.query["name"], settings, request.body.blocks())
            case "multipart":
                return self._multipart(request, bucket)
            case "resumable":
                return self._begin(request, bucket, base)
        raise StorageApiError(400, "invalid", f"Invalid upload type: {request.query.get('uploadType')!r}")

    def _multipart(self, request: HttpRequest, bucket: Bucket) -> _Made:
        """Stores a multipart/related body, up to 1 GiB: JSON with an object's name and settings, then its bytes."""
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
    ) -> _Made:
        """Stores the blocks as an object. Discards them on any error, such as a wrong hash or a lost client."""
        with bucket.incoming() as incoming:
            for block in blocks:
                incoming.write(block)
            _verify(request, incoming, settings)
            return bucket, bucket.commit(name, incoming, settings, integer(request.query, _EXPECTED))

    # -- resumable

    def _begin(self, request: HttpRequest, bucket: Bucket, base: str) -> HttpResponse:
        """Enters a resumable upload on disk; answers with its URL. Raises StorageApiError for a wrong generation."""
        settings = request.json()
        if kind := request.headers.get("X-Upload-Content-Type"):
            settings.setdefault("contentType", kind)
        name = request.query.get("name") or str(settings["name"])
        expected = integer(request.query, _EXPECTED)
        require_generation(expected, bucket.find(name))  # refuse early; checked again at the end
        identifier = os.urandom(16).hex()
        session = {"name": name, "settings": settings, "expected": expected, "made": None}
        write_private(bucket.folder / "uploads" / f"{identifier}.json", json.dumps(session))
        query = f"uploadType=resumable&name={quote(name, safe='')}&upload_id={identifier}"
        location = f"{base}/upload/storage/v1/b/{bucket.name}/o?{query}"
        return HttpResponse(200, b"", {"Location": location, "X-GUploader-UploadID": identifier})

    def _continue(self, request: HttpRequest, bucket: Bucket, identifier: str) -> _Made | HttpResponse:
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
            incoming = self._open.get(identifier) or Incoming(path.with_suffix(".data"))
            self._open[identifier] = incoming
            if request.method == "DELETE":
                self._forget(bucket, identifier)
                return HttpResponse(499)
            total = self._receive(request, incoming)
            if total is None or incoming.size < total:
                headers = {"Range": f"bytes=0-{incoming.size - 1}"} if incoming.size else {}
                return HttpResponse(308, b"", headers)
            return self._finish(request, bucket, identifier, session, incoming)

    def _receive(self, request: HttpRequest, incoming: Incoming) -> int | None:
        """Appends the request's bytes that had not arrived yet (none for a status query). Returns the object's size,
        None if it is unknown; without Content-Range the body is all of the rest. Raises StorageApiError for a bad
        Content-Range or chunk size, missing bytes before them, or too many; what arrived stays."""
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
    ) -> _Made:
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
        """Deletes a resumable upload and the bytes received."""
        if incoming := self._open.pop(identifier, None):
            incoming.discard()
        (bucket.folder / "uploads" / f"{identifier}.json").unlink(missing_ok=True)


def _verify(request: HttpRequest, incoming: Incoming, settings: Mapping[str, Any]) -> None:
    """Raises StorageApiError for bytes whose checksum is not that of the settings or else of the X-Goog-Hash header."""
    text = request.headers.get("X-Goog-Hash", "")
    sent = dict(part.strip().split("=", 1) for part in text.split(",") if "=" in part)
    incoming.verify(settings.get("crc32c") or sent.get("crc32c"), settings.get("md5Hash") or sent.get("md5"))


# -- requests and resources


def integer(query: Mapping[str, str], name: str) -> int | None:
    """Returns a number of a query, None if it is absent or empty. Raises StorageApiError when it is not a number."""
    text = query.get(name)
    if not text:
        return None
    try:
        return int(text)
    except ValueError:
        raise StorageApiError(400, "invalidParameter", f"Invalid value for {name}: {text!r}") from None


def byte_range(text: str, size: int) -> tuple[int, int] | None:
    """Returns [start, end) of a Range header for an object of `size` bytes, whose start may be beyond the end; None for
    a missing or bad header: Google then sends the whole object."""
    match = re.fullmatch(r"bytes=(\d*)-(\d*)", text.strip())
    if not match or match.groups() == ("", ""):
        return None
    first, last = match.groups()
    if not first:
        return max(0, size - int(last)), size
    if last and int(last) < int(first):
        return None
    return int(first), min(int(last) + 1, size) if last else size


def object_json(bucket: Bucket, stored: StoredObject, base: str) -> dict[str, Any]:
    """Returns an object's resource. `base` is the server's URL."""
    path = f"b/{quote(bucket.name, safe='')}/o/{quote(stored.name, safe='')}"
    return {
        "kind": "storage#object",
        "id": f"{bucket.name}/{stored.name}/{stored.generation}",
        "selfLink": f"{base}/storage/v1/{path}",
        "mediaLink": f"{base}/download/storage/v1/{path}?generation={stored.generation}&alt=media",
        "name": stored.name,
        "bucket": bucket.name,
        "generation": str(stored.generation),
        "metageneration": "1",
        "storageClass": "STANDARD",
        "size": str(stored.size),
        "crc32c": stored.crc32c,
        "etag": etag(stored),
        "timeCreated": timestamp(stored.created),
        "updated": timestamp(stored.created),
        "timeStorageClassUpdated": timestamp(stored.created),
        "md5Hash": stored.md5,
        **stored.settings,
    }


def bucket_json(bucket: Bucket, base: str) -> dict[str, Any]:
    """Returns a bucket's resource. `base` is the server's URL."""
    created = timestamp(float(bucket.settings["timeCreated"]))
    return {
        "location": "US",
        "locationType": "multi-region",
        "storageClass": "STANDARD",
        "metageneration": "1",
        "etag": "CAE=",
        **bucket.settings,
        "kind": "storage#bucket",
        "id": bucket.name,
        "timeCreated": created,
        "updated": created,
        "selfLink": f"{base}/storage/v1/b/{bucket.name}",
    }


def etag(stored: StoredObject) -> str:
    return base64.b64encode(f"{stored.generation}/1".encode()).decode()


def refuse_buckets(request: HttpRequest) -> HttpResponse | None:
    """Returns the refusal (403) that a user with the role Storage Object User gets for a request about a bucket itself,
    or all buckets; None for a request about objects. Source:
    https://cloud.google.com/storage/docs/access-control/iam-roles (no storage.buckets.get)."""
    match request.segments:
        case ["storage", _, "b", bucket] | ["storage", _, "b", bucket, "iam", *_]:
            lacking = f"storage.buckets.get access to the Google Cloud Storage bucket {bucket}"
        case ["storage", _, "b"]:
            lacking = "storage.buckets.list access to the Google Cloud project"
        case _:
            return None
    return error_response(StorageApiError(403, "forbidden", f"me@example.com does not have {lacking}."))


def error_response(error: StorageApiError, *, plain: bool = False) -> HttpResponse:
    """Returns the error in Google's shape: JSON, or text where the client requested bytes."""
    if plain:
        return HttpResponse(error.status, str(error).encode(), {"Content-Type": "text/html; charset=UTF-8"})
    detail = {"message": str(error), "domain": "global", "reason": error.reason}
    return json_response({"error": {"code": error.status, "message": str(error), "errors": [detail]}}, error.status)


def _base(request: HttpRequest) -> str:
    """Returns the server's URL, with the request's login: google-cloud-storage follows the URLs of its responses
    without any other authorization."""
    user, password = request.login
    host = request.headers.get("Host", "127.0.0.1")
    return f"{'https' if host in NAMES else 'http'}://{f'{user}:{password}@' if password else ''}{host}"


def _not_found(request: HttpRequest) -> StorageApiError:
    return StorageApiError(404, "notFound", f"Not Found: {request.method} {request.path}")
