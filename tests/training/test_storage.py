"""Claims about `training.storage` on local files and on gs://, with the real client and servers that misbehave."""

import contextlib
import errno
import os
import random
import socket
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from email.utils import formatdate
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import google_crc32c
import pytest
from google.auth import compute_engine
from google.auth.credentials import Credentials
from google.auth.exceptions import RefreshError
from google.cloud.storage import Client

from launcher.emulator.http_server import Disconnected, HttpResponse, json_response
from tests.servers import LoopbackServer
from training import storage
from training.errors import BadInput, Exit
from training.storage import gcs as bucket

DATA = random.Random(0).randbytes(300_000)


@pytest.fixture(params=["gs://", "local"])
def folder(request: pytest.FixtureRequest, gcs: Any, tmp_path: Path) -> str:
    return "gs://bucket" if request.param == "gs://" else str(tmp_path / "folder")


def test_an_object_is_written_looked_at_listed_read_and_deleted(folder: str) -> None:
    stat = storage.write(f"{folder}/a/x", DATA)
    assert (stat.size, stat.crc32c) == (len(DATA), google_crc32c.value(DATA))
    assert storage.stat(f"{folder}/a/x") == stat
    assert storage.read(f"{folder}/a/x") == DATA
    assert storage.read(f"{folder}/a/x", 10, 200_000, generation=stat.generation) == DATA[10:200_000]
    for name in ("a/b/y", "ab"):
        storage.write(f"{folder}/{name}", b"")
    assert [stat.url for stat in storage.listing(f"{folder}/a")] == [f"{folder}/a/b/y", f"{folder}/a/x"]
    assert len(storage.listing(f"{folder}/")) == 3
    assert storage.listing(f"{folder}/missing") == []
    storage.delete(f"{folder}/a/x")
    storage.delete(f"{folder}/a/x")
    assert [storage.stat(f"{folder}/{name}") for name in ("a/x", "a")] == [None, None]


@pytest.mark.parametrize(
    ("start", "end"), [(0, None), (0, 4), (2, 4), (2, None), (8, 50), (10, 20), (50, 60), (50, None), (3, 3)]
)
def test_a_range_is_cut_at_the_end_of_the_object(folder: str, start: int, end: int | None) -> None:
    storage.write(f"{folder}/x", b"0123456789")
    assert storage.read(f"{folder}/x", start, end) == b"0123456789"[start:end]


def test_create_only_lets_one_of_many_writers_win(folder: str) -> None:
    wins = []

    def race(number: int) -> None:
        with contextlib.suppress(storage.AlreadyExists):
            storage.write(f"{folder}/x", b"%d" % number, create_only=True)
            wins.append(number)

    with ThreadPoolExecutor(8) as threads:
        list(threads.map(race, range(8)))
    assert [storage.read(f"{folder}/x")] == [b"%d" % number for number in wins]


def test_an_object_is_replaced_only_by_the_writer_that_knows_its_generation(gcs: Any) -> None:
    first = storage.write("gs://bucket/x", b"1", create_only=True)
    second = storage.write("gs://bucket/x", b"2", replaces=first.generation)
    with pytest.raises(storage.AlreadyExists, match="gs://bucket/x was replaced by another writer"):
        storage.write("gs://bucket/x", b"3", replaces=first.generation)
    assert storage.stat("gs://bucket/x") == second


def test_a_folder_of_a_bucket_has_subfolders(gcs: Any) -> None:
    for name in ("runs/b/launcher/run.json", "runs/a/x", "runs/a/y", "runs/file", "other/c/x"):
        storage.write(f"gs://bucket/{name}", b"")
    assert storage.folders("gs://bucket/runs") == storage.folders("gs://bucket/runs/") == ["a", "b"]
    assert storage.folders("gs://bucket/runs/c") == []


def test_the_age_of_an_object_is_told_by_the_bucket_s_clock(gcs: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    storage.write("gs://bucket/x", b"")
    later = formatdate(time.time() + 100, usegmt=True)
    monkeypatch.setattr("launcher.emulator.http_server._Connection.date_time_string", lambda connection: later)
    assert 98 < storage.stat("gs://bucket/x").age < 150  # written before it


def test_a_replaced_or_deleted_object_is_not_read_under_its_old_generation(gcs: Any) -> None:
    old = storage.write("gs://bucket/x", b"old")
    storage.write("gs://bucket/x", b"new")
    with pytest.raises(storage.Changed, match="gs://bucket/x was replaced"):
        storage.read("gs://bucket/x", generation=old.generation)
    storage.delete("gs://bucket/x")
    with pytest.raises(storage.NotFound, match="gs://bucket/x does not exist"):
        storage.read("gs://bucket/x", generation=old.generation)


def test_a_missing_object_and_a_missing_bucket_are_told_apart(gcs: Any) -> None:
    with pytest.raises(storage.NotFound, match=r"^gs://bucket/x does not exist"):
        storage.read("gs://bucket/x")
    with pytest.raises(storage.NotFound, match=r"^bucket gs://other does not exist") as missing:
        storage.read("gs://other/x")
    assert missing.value.exit_code is Exit.BAD_INPUT, "no attempt would find it"
    for request in (storage.listing, lambda url: storage.write(url, b"")):
        with pytest.raises(storage.NotFound, match=r"^bucket gs://other does not exist"):
            request("gs://other/x")
    for url in ("gs:///x", "gs://bucket-/x"):
        with pytest.raises(BadInput, match="expected gs://bucket/name"):
            storage.read(url)


def test_write_and_download_copy_more_than_one_request(folder: str, tmp_path: Path) -> None:
    stat = storage.write(f"{folder}/x", DATA * 40, create_only=True)  # 12 MB: a resumable upload
    assert stat.crc32c == google_crc32c.value(DATA * 40)
    storage.download(f"{folder}/x", tmp_path / "new folder" / "copy")
    assert (tmp_path / "new folder" / "copy").read_bytes() == DATA * 40
    with pytest.raises(storage.AlreadyExists, match="x already exists"):
        storage.write(f"{folder}/x", DATA * 40, create_only=True)


@pytest.mark.parametrize("status", [408, 429, 500, 502, 503, 504])
def test_a_third_of_the_requests_failing_changes_nothing(gcs: Any, status: int) -> None:
    chance = random.Random(status)
    gcs.fault = lambda request: HttpResponse(status, b"later") if chance.random() < 1 / 3 else None
    for number in range(5):
        url = f"gs://bucket/{number}"
        assert storage.write(url, DATA, create_only=True).size == len(DATA)
        assert storage.read(url, 5, 100_000) == DATA[5:100_000]
        assert storage.stat(url).size == len(DATA)
    assert len(storage.listing("gs://bucket/")) == 5
    storage.delete("gs://bucket/0")


def fail(gcs: Any, when: Callable[[Any], bool], *answers: HttpResponse | None) -> list[HttpResponse | None]:
    """Answers the next such requests so; None: serves it, and loses the answer. Returns the answers that are left."""
    left = list(answers)

    def fault(request: Any) -> HttpResponse | None:
        if not left or not when(request):
            return None
        if answer := left.pop(0):
            return answer
        gcs.serve_storage(request)
        raise Disconnected

    gcs.fault = fault
    return left


@pytest.mark.parametrize("answer", [HttpResponse(503, b"busy"), None], ids=["refused", "lost answer"])
def test_only_a_failed_chunk_is_sent_again(gcs: Any, monkeypatch: pytest.MonkeyPatch, answer: Any) -> None:
    monkeypatch.setattr("google.cloud.storage.blob._DEFAULT_CHUNKSIZE", 1 << 20)
    content = DATA * 40  # 12 MB, 12 chunks
    left = fail(gcs, lambda request: request.headers.get("Content-Range", "").startswith("bytes 5242880-"), answer)
    stat = storage.write("gs://bucket/x", content, create_only=True)
    assert not left
    assert stat.crc32c == google_crc32c.value(content)
    assert storage.read("gs://bucket/x") == content
    assert [method for method, _, _ in gcs.requests].count("PUT") == 12 + 1


def test_an_upload_whose_session_is_lost_begins_anew(gcs: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("google.cloud.storage.blob._DEFAULT_CHUNKSIZE", 4 << 20)
    lost = (HttpResponse(status, b"no such upload") for status in (410, 404))
    left = fail(gcs, lambda request: request.method == "PUT", *lost)
    assert storage.write("gs://bucket/x", DATA * 40).crc32c == google_crc32c.value(DATA * 40)
    assert not left


def test_a_create_only_write_whose_answer_was_lost_counts_as_written(gcs: Any) -> None:
    left = fail(gcs, lambda request: request.method == "POST", None)
    assert storage.write("gs://bucket/x", b"data", create_only=True).size == 4
    assert not left
    fail(gcs, lambda request: request.method == "POST", None)
    with pytest.raises(storage.AlreadyExists):
        storage.write("gs://bucket/x", b"other", create_only=True)


@pytest.fixture
def one_second(gcs: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Requests to the bucket are given up after 0.2 s of silence or a second."""
    monkeypatch.setattr(bucket, "timeouts", bucket.Timeouts(silence=0.2, deadline=1, first_delay=0.01))


def trickle(connection: socket.socket) -> None:
    with contextlib.suppress(OSError):  # when the client gives up, or the server is closed
        connection.recv(65536)
        connection.sendall(b"HTTP/1.1 200 OK\r\nContent-Length: 100000\r\n\r\n")
        while True:
            connection.sendall(b"x")
            time.sleep(0.05)


@pytest.mark.usefixtures("one_second")
@pytest.mark.parametrize(
    ("failure", "why"),
    [
        ("busy", r"reading bytes 5 to 9 of it failed for \d s, \d+ times; last: ServiceUnavailable"),
        ("silent", r"reading bytes 5 to 9 of it failed for .* (ReadTimeout|ConnectionError)"),
        ("trickling", "reading bytes 5 to 9 of it failed for .* bytes still trickled in"),
    ],
)
def test_a_lasting_failure_names_the_object_and_ends_at_the_deadline(gcs: Any, failure: str, why: str) -> None:
    storage.write("gs://bucket/x", DATA)
    released, began = threading.Event(), time.monotonic()
    if failure == "trickling":
        gcs.serve = trickle
        bucket._clients.clear()  # whose connections were accepted before
    else:
        gcs.fault = lambda _: released.wait(20) and None if failure == "silent" else HttpResponse(503, b"busy")
    with pytest.raises(storage.StorageError, match=f"gs://bucket/x: {why}"):
        storage.read("gs://bucket/x", 5, 9)
    assert time.monotonic() - began < 20
    released.set()


def test_a_server_that_says_nothing_is_asked_again(gcs: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    storage.write("gs://bucket/x", b"data")
    monkeypatch.setattr(bucket, "timeouts", bucket.Timeouts(silence=0.2, deadline=5, first_delay=0.01))
    released, silent = threading.Event(), [20, 20]
    gcs.fault = lambda _: released.wait(silent.pop()) and None if silent else None
    assert storage.read("gs://bucket/x") == b"data"
    released.set()


FULL = {"message": "The project exceeded its quota.", "errors": [{"reason": "quotaExceeded"}]}


@pytest.mark.parametrize(
    ("error", "why"),
    [
        ({"message": "no access"}, r"it is not allowed: no access\. Grant .* roles/storage.objectUser on gs://bucket$"),
        (FULL, r"it was refused: The project exceeded its quota \(quotaExceeded\)\. Check the quotas"),
    ],
    ids=["no right", "full"],
)
def test_a_refusal_is_not_repeated_and_says_what_to_do(gcs: Any, error: dict[str, Any], why: str) -> None:
    gcs.fault = lambda request: json_response({"error": {"code": 403, **error}}, 403)
    with pytest.raises(storage.StorageError, match=f"^gs://bucket/x: reading {why}"):
        storage.read("gs://bucket/x")
    with pytest.raises(storage.StorageError, match=f"^gs://bucket/x: writing {why}"):
        storage.write("gs://bucket/x", b"1")
    assert len([path for _, path, _ in gcs.requests if path.startswith("/download/")]) == 1


@pytest.fixture
def faults(gcs: Any, monkeypatch: pytest.MonkeyPatch) -> Iterator[list[HttpResponse]]:
    """Gives the client the credentials of a VM, which ask the metadata server for a token before each request. Returns
    the answers that this server will give before right ones."""
    faults: list[HttpResponse] = []
    account = {"email": "tpu@project.iam.gserviceaccount.com", "scopes": ["storage"]}
    token = {"access_token": "token", "expires_in": 3600, "token_type": "Bearer"}

    def answer(request: Any) -> HttpResponse:
        is_token = request.path.partition("?")[0].endswith("/token")
        return faults.pop() if faults else json_response(token if is_token else account)

    server = LoopbackServer(answer)
    monkeypatch.setattr(compute_engine._metadata, "_GCE_METADATA_HOST", server.address)
    monkeypatch.setenv("GCE_METADATA_HOST", server.address)
    credentials = compute_engine.Credentials(universe_domain="googleapis.com")
    client = Client(project="project", credentials=credentials, client_options={"api_endpoint": gcs.url})
    monkeypatch.setitem(bucket._clients, (os.getpid(), gcs.url), client)
    yield faults
    server.close()


def test_a_metadata_server_that_answers_nonsense_for_a_moment_changes_nothing(faults: list[HttpResponse]) -> None:
    faults += [HttpResponse(200, b"{", {"Content-Type": "application/json"}), HttpResponse(404, b"not yet")]
    storage.write("gs://bucket/x", b"data")
    assert not faults
    assert storage.read("gs://bucket/x") == b"data"


@pytest.mark.usefixtures("one_second")
def test_a_lost_metadata_server_is_a_storage_error(faults: list[HttpResponse]) -> None:
    faults += [HttpResponse(404, b"no such service account")] * 1000
    why = r"^gs://bucket/x: reading it failed for \d s, \d+ times; last: RefreshError.*404"
    with pytest.raises(storage.StorageError, match=why):
        storage.read("gs://bucket/x")


class Revoked(Credentials):  # type: ignore[misc]  # google.auth has no types here
    """A user's credentials after `gcloud auth revoke`."""

    refreshed = 0

    def refresh(self, request: object) -> None:
        self.refreshed += 1
        raise RefreshError("invalid_grant: Token has been expired or revoked.")


def test_credentials_that_google_refuses_are_a_storage_error_at_once(gcs: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    revoked = Revoked()
    monkeypatch.setattr("google.auth.default", lambda **_: (revoked, None))  # without a default project, either
    monkeypatch.setattr(bucket, "_clients", {})
    monkeypatch.delenv("STORAGE_EMULATOR_HOST")
    with pytest.raises(storage.StorageError, match=r"^gs://bucket/x: reading it failed because .*invalid_grant.*login"):
        storage.read("gs://bucket/x")
    assert revoked.refreshed < 4, "trying again changes nothing"
    assert bucket._bucket_exists("bucket"), "as far as is known"


def test_a_failed_write_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    storage.write(str(tmp_path / "x"), b"old")
    monkeypatch.setattr(os, "fsync", Mock(side_effect=OSError(28, "No space left on device")))
    with pytest.raises(storage.StorageError, match="x: No space left on device"):
        storage.write(str(tmp_path / "x"), b"new")
    assert os.listdir(tmp_path) == ["x"]
    assert storage.read(str(tmp_path / "x")) == b"old"


def test_partial_files_are_not_listed_and_a_folder_that_cannot_be_read_is_an_error(tmp_path: Path) -> None:
    storage.write(str(tmp_path / "a"), b"")
    (tmp_path / ".a.0123.partial").write_bytes(b"half")
    assert [stat.url for stat in storage.listing(str(tmp_path))] == [str(tmp_path / "a")]
    (tmp_path / "loop").symlink_to("loop")
    with pytest.raises(storage.StorageError, match="/loop: Too many levels of symbolic links"):
        storage.listing(str(tmp_path / "loop"))


@pytest.mark.parametrize(
    ("parts", "joined"),
    [
        (("gs://b", "x"), "gs://b/x"), (("gs://b/", "/x/", "y"), "gs://b/x/y"), (("/", "x"), "/x"), (("a/",), "a"),
        (("a", ""), "a"),
    ],
)  # fmt: skip
def test_join(parts: tuple[str, ...], joined: str) -> None:
    assert storage.join(*parts) == joined


@pytest.mark.parametrize("code", [errno.EPERM, errno.ENOSYS, errno.ENOTSUP])
def test_a_mount_without_hard_links_gets_advice(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int) -> None:
    monkeypatch.setattr(os, "link", Mock(side_effect=OSError(code, os.strerror(code))))
    why = rf"^{tmp_path}/x: this file system has no hard links \(.*write to gs://"
    with pytest.raises(storage.StorageError, match=why):
        storage.write(str(tmp_path / "x"), b"1", create_only=True)
    assert not list(tmp_path.iterdir()), "nothing is left"
    storage.write(str(tmp_path / "x"), b"1")
