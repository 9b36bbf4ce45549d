"""Cloud Storage as the unmodified library sees it: generations, preconditions, ranges, uploads, listings, restarts."""

import base64
import os
from typing import Any
from unittest.mock import patch

import google_crc32c
import pytest
import requests
from google.api_core.exceptions import BadRequest, Conflict, NotFound, PreconditionFailed
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

all_names = st.sets(st.text("ab/", min_size=1, max_size=5), max_size=12)


def refused(error: type[Exception], function: Any, *arguments: Any, **named: Any) -> str:
    with pytest.raises(error) as caught:
        function(*arguments, **named)
    return str(caught.value)


def test_a_bucket_is_made_once(client: Any, bucket: Any) -> None:
    refused(Conflict, client.create_bucket, bucket.name)
    refused(BadRequest, client.create_bucket, "Not-A-Name")
    assert [each.name for each in client.list_buckets()] == ["bucket", bucket.name]


def test_generations_rise_and_a_replaced_one_is_gone(bucket: Any) -> None:
    blob = bucket.blob("x")
    blob.upload_from_string(b"old")
    old = blob.generation
    blob.upload_from_string(b"new", if_generation_match=old)
    assert blob.generation > old
    refused(NotFound, bucket.blob("x", generation=old).download_as_bytes)
    refused(PreconditionFailed, bucket.blob("x").delete, if_generation_match=old)
    refused(PreconditionFailed, bucket.blob("x").download_as_bytes, if_generation_match=old)
    bucket.blob("x").delete(if_generation_match=blob.generation)
    refused(NotFound, bucket.blob("x").delete)


@pytest.mark.parametrize("given", ["ifGenerationMatch=x", "ifGenerationNotMatch=0", "startOffset=b"])
def test_a_condition_that_can_not_be_kept_is_refused(storage: Any, bucket: Any, given: str) -> None:
    assert requests.get(f"{storage.url}/storage/v1/b/{bucket.name}/o/x?{given}", timeout=10).status_code == 400


@pytest.mark.parametrize(
    ("header", "status", "body", "told"),
    [
        ("bytes=2-4", 206, b"cde", "bytes 2-4/10"),
        ("bytes=7-", 206, b"hij", "bytes 7-9/10"),
        ("bytes=-3", 206, b"hij", "bytes 7-9/10"),
        ("bytes=-30", 206, b"abcdefghij", "bytes 0-9/10"),
        ("bytes=10-", 416, None, "bytes */10"),
        ("bytes=5-2", 200, b"abcdefghij", None),
        ("bytes=1-2,4-5", 200, b"abcdefghij", None),
    ],
)
def test_ranges(storage: Any, bucket: Any, header: str, status: int, body: bytes | None, told: str | None) -> None:
    bucket.blob("x").upload_from_string(b"abcdefghij")
    url = f"{storage.url}/download/storage/v1/b/{bucket.name}/o/x?alt=media"
    answer = requests.get(url, headers={"Range": header}, timeout=10)
    assert (answer.status_code, answer.headers.get("Content-Range")) == (status, told)
    if body is not None:
        assert answer.content == body
        checksum = google_crc32c.value(b"abcdefghij").to_bytes(4, "big")  # the whole object's, as on Google's service
        assert base64.b64encode(checksum).decode() in answer.headers["X-Goog-Hash"]


def test_an_open_download_is_not_torn_by_a_new_generation(storage: Any, bucket: Any) -> None:
    old, new = os.urandom(8 << 20), os.urandom(8 << 20)
    bucket.blob("x").upload_from_string(old)
    answer = requests.get(f"{storage.url}/download/storage/v1/b/{bucket.name}/o/x?alt=media", stream=True, timeout=10)
    first = answer.raw.read(1000)
    bucket.blob("x").upload_from_string(new)
    assert first + answer.raw.read() == old
    assert bucket.blob("x").download_as_bytes() == new


def test_bytes_that_do_not_match_their_checksum_are_refused(storage: Any, bucket: Any) -> None:
    url = f"{storage.url}/upload/storage/v1/b/{bucket.name}/o?uploadType=media&name=x"
    for header in ("crc32c=AAAAAA==", "md5=AAAAAAAAAAAAAAAAAAAAAA=="):
        answer = requests.post(url, b"data", headers={"X-Goog-Hash": header}, timeout=10)
        assert (answer.status_code, "doesn't match calculated" in answer.json()["error"]["message"]) == (400, True)
    assert not bucket.blob("x").exists()


class Resumable:
    """A resumable upload, request by request."""

    def __init__(self, storage: Any, bucket: Any, **query: str) -> None:
        url = f"{storage.url}/upload/storage/v1/b/{bucket.name}/o"
        begun = requests.post(url, params={"uploadType": "resumable", "name": "x", **query}, json={}, timeout=10)
        assert begun.status_code == 200, begun.text
        self.url = begun.headers["Location"]

    def put(self, content_range: str, data: bytes = b"") -> Any:
        return requests.put(self.url, data, headers={"Content-Range": content_range}, timeout=10)


CHUNK = 256 * 1024


def test_a_resumable_upload_survives_the_server(storage: Any, bucket: Any) -> None:
    data = os.urandom(CHUNK + 5)
    upload = Resumable(storage, bucket)
    answer = upload.put(f"bytes 0-{CHUNK - 1}/*", data[:CHUNK])
    assert (answer.status_code, answer.headers["Range"]) == (308, f"bytes=0-{CHUNK - 1}")
    storage.restart()
    status = upload.put(f"bytes */{len(data)}")
    assert (status.status_code, status.headers["Range"]) == (308, f"bytes=0-{CHUNK - 1}")
    assert not bucket.blob("x").exists()
    with patch("launcher.emulator.bucket.write_private", side_effect=OSError("a full disk")):
        assert upload.put(f"bytes {CHUNK}-{len(data) - 1}/{len(data)}", data[CHUNK:]).status_code == 500
    done = upload.put(f"bytes {CHUNK}-{len(data) - 1}/{len(data)}", data[CHUNK:])
    assert (done.status_code, done.json()["size"]) == (200, str(len(data)))
    # A client that lost that answer asks again, even of the next server.
    storage.restart()
    assert upload.put(f"bytes */{len(data)}").json()["generation"] == done.json()["generation"]
    assert bucket.blob("x").download_as_bytes() == data


def test_a_repeated_chunk_is_taken_once_and_a_missing_one_is_noticed(storage: Any, bucket: Any) -> None:
    data = os.urandom(2 * CHUNK)
    upload = Resumable(storage, bucket)
    upload.put(f"bytes 0-{CHUNK - 1}/*", data[:CHUNK])
    upload.put(f"bytes 0-{CHUNK - 1}/*", data[:CHUNK])
    assert upload.put(f"bytes {CHUNK + 5}-{2 * CHUNK - 1}/{2 * CHUNK}", data[CHUNK + 5 :]).status_code == 503
    assert upload.put(f"bytes {CHUNK}-{2 * CHUNK - 1}/{2 * CHUNK}", data[CHUNK:]).status_code == 200
    assert bucket.blob("x").download_as_bytes() == data


def test_chunks_but_the_last_are_multiples_of_256_kib(storage: Any, bucket: Any) -> None:
    assert Resumable(storage, bucket).put("bytes 0-99/*", b"x" * 100).status_code == 400


def test_the_precondition_of_a_resumable_upload_holds_at_its_end(storage: Any, bucket: Any) -> None:
    upload = Resumable(storage, bucket, ifGenerationMatch="0")
    bucket.blob("x").upload_from_string(b"faster")
    assert upload.put("bytes 0-3/4", b"slow").status_code == 412
    assert bucket.blob("x").download_as_bytes() == b"faster"


def test_an_abandoned_upload_is_forgotten(storage: Any, bucket: Any) -> None:
    upload = Resumable(storage, bucket)
    assert requests.delete(upload.url, timeout=10).status_code == 499
    assert upload.put("bytes */*").status_code == 404


def test_an_upload_is_not_looked_for_in_another_folder(storage: Any, bucket: Any) -> None:
    upload = Resumable(storage, bucket)
    upload.url = upload.url.replace("upload_id=", f"upload_id=../../{bucket.name}/uploads/")
    assert upload.put("bytes 0-3/4", b"data").status_code == 404
    assert not bucket.blob("x").exists()


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=25)
@given(names=all_names, prefix=st.sampled_from(["", "a", "a/", "b//"]), page=st.integers(1, 4))
def test_pages_are_the_listing_in_order(client: Any, bucket: Any, names: set[str], prefix: str, page: int) -> None:
    for blob in client.list_blobs(bucket):
        blob.delete()
    for name in names:
        bucket.blob(name).upload_from_string(b"")
    matching = sorted(name for name in names if name.startswith(prefix))
    assert [blob.name for blob in client.list_blobs(bucket, prefix=prefix, page_size=page)] == matching
    rolled = client.list_blobs(bucket, prefix=prefix, delimiter="/", page_size=page)
    rest = {name: name[len(prefix) :] for name in matching}
    assert [blob.name for blob in rolled] == [name for name in matching if "/" not in rest[name]]
    assert rolled.prefixes == {prefix + rest[name].split("/")[0] + "/" for name in matching if "/" in rest[name]}


def test_a_rewritten_object_has_the_bytes_of_its_source(storage: Any, client: Any, bucket: Any) -> None:
    one, copied = bucket.blob("one"), client.create_bucket("other-bucket").blob("copy")
    one.upload_from_string(b"1", content_type="text/x")
    copied.rewrite(one, if_generation_match=0)
    copied.reload()
    assert (copied.download_as_bytes(), copied.content_type) == (b"1", "text/x")
    refused(PreconditionFailed, copied.rewrite, one, if_generation_match=0)
    assert not list((storage.folder / "other-bucket" / "incoming").iterdir())


def test_objects_survive_the_server_and_half_written_ones_do_not(storage: Any, client: Any, bucket: Any) -> None:
    blob = bucket.blob("x")
    blob.upload_from_string(b"first")
    blob.upload_from_string(b"second")
    folder = storage.folder / bucket.name
    # What a kill leaves: bytes without a name, an upload that had only begun, an older generation not removed yet.
    (folder / "data" / "1").write_bytes(b"torn")
    (folder / "incoming" / "abc").write_bytes(b"torn")
    stale = (folder / "objects" / f"{blob.generation}.json").read_text().replace(str(blob.generation), "1")
    (folder / "objects" / "1.json").write_text(stale)
    storage.restart()
    stored = bucket.get_blob("x")
    assert (stored.download_as_bytes(), stored.generation) == (b"second", blob.generation)
    assert [path.name for path in (folder / "data").iterdir()] == [str(blob.generation)]
    assert not list((folder / "incoming").iterdir())
    blob.upload_from_string(b"third", if_generation_match=stored.generation)
    assert blob.generation > stored.generation
