"""The JSON API of Cloud Storage over bucket.py, as google-cloud-storage, TensorFlow and `gcloud storage` use it.

uploads.py answers uploads of all three kinds. Not emulated: deletion of buckets, composed objects (`gcloud storage cp`
makes one of a file of 150 MiB and more), changes of an object's metadata, batches, versioning, permissions,
notifications, customer-supplied keys, the XML API.
"""

import base64
import re
from typing import Any
from urllib.parse import quote

from launcher.emulator.http_server import FileRegion, HttpRequest, HttpResponse, json_response, timestamp
from launcher.emulator.storage.bucket import Bucket, Buckets, StorageApiError, StoredObject, require_generation
from launcher.emulator.storage.uploads import EXPECTED, Uploads, integer

# Conditions and bounds of Cloud Storage that are refused: ignored, they would delete or list too much.
_NOT_EMULATED = {"endOffset", "ifGenerationNotMatch", "ifSourceGenerationNotMatch", "startOffset"}
_PREFIXES = {"storage": 2, "upload": 3, "download": 3, "resumable": 4}  # how many parts of the path come before "b"


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
        """Reads, deletes or (`rest` of the path) copies an object. `base`: the server's URL. Raises StorageApiError."""
        generation = integer(request.query, "generation")
        expected = integer(request.query, EXPECTED)
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
        """Answers with a page of at most 1000 objects and common prefixes, and the token of the next page."""
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
            copied = object_json(target, target.commit(new_name, new, settings, integer(query, EXPECTED)), base)
        sizes = dict.fromkeys(("totalBytesRewritten", "objectSize"), str(source.size))
        return json_response({"kind": "storage#rewriteResponse", **sizes, "done": True, "resource": copied})


def byte_range(text: str, size: int) -> tuple[int, int] | None:
    """Returns [start, end) of a Range header for an object of `size` bytes; None for a missing or bad header: Google
    then sends the whole object."""
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
    """Returns the refusal that a user with the role Storage Object User gets for a request about a bucket itself; None
    for a request about objects. Source: https://cloud.google.com/storage/docs/access-control/iam-roles (no
    storage.buckets.get)."""
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
    return f"http://{f'{user}:{password}@' if password else ''}{request.headers.get('Host', '127.0.0.1')}"


def _not_found(request: HttpRequest) -> StorageApiError:
    return StorageApiError(404, "notFound", f"Not Found: {request.method} {request.path}")
