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
import contextlib
import json
import os
import re
import shutil
from collections.abc import Iterable, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any, BinaryIO
from urllib.parse import quote

from launcher.emulator.bucket import Bucket, Buckets, StorageApiError, StoredObject, require_generation
from launcher.emulator.http_server import FileRegion, HttpRequest, HttpResponse, json_response, timestamp
from launcher.home import lock, write_private

NAMES = ("storage.googleapis.com", "www.googleapis.com")
_EXPECTED = "ifGenerationMatch"  # the parameter with the generation that the request expects
# Conditions and bounds of Cloud Storage that are refused: ignored, they would delete or list too much.
_NOT_EMULATED = {"endOffset", "ifGenerationNotMatch", "ifSourceGenerationNotMatch", "startOffset"}
_PREFIXES = {"storage": 2, "upload": 3, "download": 3, "resumable": 4}  # how many parts of the path come before "b"
_CHUNK = 256 * 1024  # all chunks of an upload but the last are multiples of it


def answer(buckets: Buckets, request: HttpRequest) -> HttpResponse:
    """Answers one request to the API; errors become responses in Google's shape. Raises Disconnected as `_answer`."""
    try:
        return _answer(buckets, request)
    except StorageApiError as error:
        return error_response(error, plain=request.query.get("alt") == "media")
    except (ValueError, KeyError, TypeError) as error:
        return error_response(StorageApiError(400, "invalid", f"Invalid request: {error!r}"))


def _answer(buckets: Buckets, request: HttpRequest) -> HttpResponse:
    """Answers one request. Raises StorageApiError; ValueError, KeyError or TypeError for a malformed one; Disconnected
    for a body that ends early or is too long to be held in memory."""
    query, parts = request.query, request.segments
    if refused := query.keys() & _NOT_EMULATED:
        raise StorageApiError(400, "invalid", f"not emulated: {', '.join(sorted(refused))}")
    kind = parts[0]
    if kind in _PREFIXES:
        parts = parts[_PREFIXES[kind] :]
    elif len(parts) > 1:  # a path of the XML API
        query["alt"] = "media"
        parts = ["b", kind, "o", "/".join(parts[1:])]
    match (request.method, parts):
        case (_, ["b", bucket, "o"]) if kind in ("upload", "resumable"):
            return _answer_upload(request, buckets.get(bucket))
        case _ if kind in ("upload", "resumable"):
            pass
        case ("GET", ["b"]):
            found = (bucket for bucket in buckets.all() if bucket.name.startswith(query.get("prefix", "")))
            items = [bucket_json(bucket, request) for bucket in found]
            return json_response({"kind": "storage#buckets", "items": items})
        case ("POST", ["b"]):
            body = request.json()
            return json_response(bucket_json(buckets.create(str(body.get("name", "")), body), request))
        case ("GET", ["b", bucket]):
            return json_response(bucket_json(buckets.get(bucket), request))
        case ("GET", ["b", bucket, "o"]):
            return _list(request, buckets.get(bucket))
        case ("GET" | "HEAD", ["b", bucket, "o", name]):
            return _show(request, buckets.get(bucket), name)
        case ("DELETE", ["b", bucket, "o", name]):
            buckets.get(bucket).delete(name, integer(query, "generation"), integer(query, _EXPECTED))
            return HttpResponse(204)
        case ("POST", ["b", bucket, "o", name, "rewriteTo", "b", target, "o", new_name]):
            return _rewrite(request, buckets.get(bucket), name, buckets.get(target), new_name)
    raise StorageApiError(404, "notFound", f"Not Found: {request.method} {request.path}")


# -- objects


def _show(request: HttpRequest, bucket: Bucket, name: str) -> HttpResponse:
    """Answers with an object's resource or, for alt=media, its bytes, or a range of them (416 beyond the end). Raises
    StorageApiError 404, or 412 if the object has another generation than the request expects."""
    generation, expected = integer(request.query, "generation"), integer(request.query, _EXPECTED)
    stored, file = bucket.open(name, generation, expected)
    if request.query.get("alt") != "media":
        file.close()
        return json_response(object_json(bucket, stored, request), headers={"ETag": etag(stored)})
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


def _list(request: HttpRequest, bucket: Bucket) -> HttpResponse:
    """Answers with a page of objects and common prefixes, at most maxResults or 1000, and the next page's token."""
    query = request.query
    after = base64.urlsafe_b64decode(query.get("pageToken", "").encode()).decode()
    limit = min(integer(query, "maxResults") or 1000, 1000)
    items, prefixes, token = bucket.listing(query.get("prefix", ""), query.get("delimiter", ""), after, limit)
    value: dict[str, Any] = {"kind": "storage#objects"}
    if items:
        value["items"] = [object_json(bucket, item, request) for item in items]
    if prefixes:
        value["prefixes"] = prefixes
    if token:
        value["nextPageToken"] = base64.urlsafe_b64encode(token.encode()).decode()
    return json_response(value)


def _rewrite(request: HttpRequest, bucket: Bucket, name: str, target: Bucket, new_name: str) -> HttpResponse:
    """Copies an object to `new_name` in `target` in one call, with its settings changed by the request's. Raises
    StorageApiError 404, or 412 if either object has another generation than the request expects."""
    query = request.query
    source, file = bucket.open(name, integer(query, "sourceGeneration"), integer(query, "ifSourceGenerationMatch"))
    with file, target.incoming() as new:
        shutil.copyfileobj(file, new)
        made = target.commit(new_name, new, {**source.settings, **request.json()}, integer(query, _EXPECTED))
    sizes = dict.fromkeys(("totalBytesRewritten", "objectSize"), str(source.size))
    resource = object_json(target, made, request)
    return json_response({"kind": "storage#rewriteResponse", **sizes, "done": True, "resource": resource})


# -- uploads


def _answer_upload(request: HttpRequest, bucket: Bucket) -> HttpResponse:
    """Answers a request below /upload/: stores a whole object, or begins (answers with a URL) or continues a resumable
    upload. Raises as `_answer`."""
    if "upload_id" in request.query:
        return _continue_upload(request, bucket, request.query["upload_id"])
    match request.query.get("uploadType"):
        case "media":
            settings = {"contentType": request.headers.get("Content-Type", "application/octet-stream")}
            return _store_whole(request, bucket, request.query["name"], settings, request.body.blocks())
        case "multipart":
            return _store_multipart(request, bucket)
        case "resumable":
            return _begin_upload(request, bucket)
    raise StorageApiError(400, "invalid", f"Invalid upload type: {request.query.get('uploadType')!r}")


def _store_multipart(request: HttpRequest, bucket: Bucket) -> HttpResponse:
    """Stores a multipart/related body, up to 1 GiB: JSON with an object's name and settings, then its bytes. Raises
    as `_answer`: StorageApiError for wrong parts, Disconnected for a longer body."""
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
    return _store_whole(request, bucket, name, settings, [content.removesuffix(newline)])


def _store_whole(
    request: HttpRequest, bucket: Bucket, name: str, settings: dict[str, Any], blocks: Iterable[bytes]
) -> HttpResponse:
    """Stores the blocks as an object. Discards them on any error, such as a wrong hash or a lost client."""
    with bucket.incoming() as file:
        file.writelines(blocks)
        expected = integer(request.query, _EXPECTED)
        made = bucket.commit(name, file, settings, expected, *_sent_checksums(request, settings))
    return json_response(object_json(bucket, made, request))


def _begin_upload(request: HttpRequest, bucket: Bucket) -> HttpResponse:
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
    location = f"{_base(request)}/upload/storage/v1/b/{bucket.name}/o?{query}"
    return HttpResponse(200, b"", {"Location": location, "X-GUploader-UploadID": identifier})


def _continue_upload(request: HttpRequest, bucket: Bucket, identifier: str) -> HttpResponse:
    """Takes a chunk, a status query or a DELETE of a resumable upload. Answers with the object once it is complete,
    also to repeats; until then with 308 and the range of the bytes that arrived; with 499 to a DELETE. Deletes a
    complete upload that is refused (generation, checksum). Raises StorageApiError."""
    path = bucket.folder / "uploads" / f"{identifier}.json"
    unknown = StorageApiError(404, "notFound", "No such upload; begin again.")
    if not re.fullmatch(r"[0-9a-f]{32}", identifier):  # it could lead to another folder
        raise unknown
    with contextlib.ExitStack() as stack:
        try:
            lock(stack.enter_context(open(path, "r+")), path, wait=True)  # one request of an upload at a time
            session = json.loads(path.read_text())
        except FileNotFoundError:  # or it was deleted while this request waited
            raise unknown from None
        if session["made"] is not None:
            return json_response(object_json(bucket, StoredObject(**session["made"]), request))
        if request.method == "DELETE":
            _forget_upload(path)
            return HttpResponse(499)
        file, settings = stack.enter_context(open(path.with_suffix(".data"), "ab")), session["settings"]
        total = _receive(request, file)
        if total is None or file.tell() < total:
            return HttpResponse(308, b"", {"Range": f"bytes=0-{file.tell() - 1}"} if file.tell() else {})
        checksums = _sent_checksums(request, settings)
        try:
            made = bucket.commit(session["name"], file, settings, session["expected"], *checksums)
        except StorageApiError:
            _forget_upload(path)
            raise
        write_private(path, json.dumps({**session, "made": asdict(made)}))
        return json_response(object_json(bucket, made, request))


def _receive(request: HttpRequest, file: BinaryIO) -> int | None:
    """Appends to a file of an upload the request's bytes that had not arrived yet (none for a status query). Returns
    the object's size, None if it is unknown; without Content-Range the body is all of the rest. Raises StorageApiError
    for a bad Content-Range or chunk size, missing bytes before them, or too many; what arrived stays."""
    text, size = request.headers.get("Content-Range", ""), file.tell()
    match = re.fullmatch(r"bytes (?:(\d+)-(\d+)|\*)/(\d+|\*)", text.strip())
    if text and not match:
        raise StorageApiError(400, "invalid", f"Invalid Content-Range: {text}")
    total = int(match[3]) if match and match[3] != "*" else None
    if match and match[1] is None:  # a status query
        return total
    first = int(match[1]) if match else size
    if first > size:
        raise StorageApiError(503, "backendError", f"Bytes {size}-{first - 1} are missing.")
    skip = size - first
    # Keep what has arrived when the client disconnects: it will query the status.
    for block in request.body.blocks():
        file.write(block[skip:])
        skip = max(0, skip - len(block))
    if not match:
        return file.tell()
    if total is None and (int(match[2]) + 1 - first) % _CHUNK:
        raise StorageApiError(400, "invalid", f"Chunks but the last must be multiples of {_CHUNK} bytes.")
    if total is not None and file.tell() > total:
        raise StorageApiError(400, "invalid", f"More bytes than the {total} announced.")
    return total


def _forget_upload(path: Path) -> None:
    """Deletes a resumable upload, given its JSON file, and the bytes received."""
    path.with_suffix(".data").unlink(missing_ok=True)
    path.unlink()


def _sent_checksums(request: HttpRequest, settings: Mapping[str, Any]) -> tuple[str | None, str | None]:
    """Returns the CRC32C and MD5 (base64) that the client announced in the settings or else in the X-Goog-Hash header;
    None for one that it did not."""
    text = request.headers.get("X-Goog-Hash", "")
    sent = dict(part.strip().split("=", 1) for part in text.split(",") if "=" in part)
    return settings.get("crc32c") or sent.get("crc32c"), settings.get("md5Hash") or sent.get("md5")


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


def object_json(bucket: Bucket, stored: StoredObject, request: HttpRequest) -> dict[str, Any]:
    """Returns an object's resource, with URLs by which the request's client reaches it."""
    path = f"b/{quote(bucket.name, safe='')}/o/{quote(stored.name, safe='')}"
    return {
        "kind": "storage#object",
        "id": f"{bucket.name}/{stored.name}/{stored.generation}",
        "selfLink": f"{_base(request)}/storage/v1/{path}",
        "mediaLink": f"{_base(request)}/download/storage/v1/{path}?generation={stored.generation}&alt=media",
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


def bucket_json(bucket: Bucket, request: HttpRequest) -> dict[str, Any]:
    """Returns a bucket's resource, with the URL by which the request's client reaches it."""
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
        "selfLink": f"{_base(request)}/storage/v1/b/{bucket.name}",
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
