"""Claims about `training.storage` on local files; tests/training/test_bucket.py makes them for gs://."""

import errno
import os
import threading
from pathlib import Path

import google_crc32c
import pytest

from training import storage


def test_a_written_object_is_read_back_with_its_size_and_checksum(tmp_path: Path) -> None:
    url = storage.join(str(tmp_path), "a", "b")
    stat = storage.write(url, b"hello")
    assert storage.read(url) == b"hello"
    assert (stat.size, stat.crc32c) == (5, google_crc32c.value(b"hello"))
    assert storage.stat(url) == stat
    assert storage.stat(url).crc32c == stat.crc32c


def test_a_range_is_cut_at_the_end_of_the_object(tmp_path: Path) -> None:
    url = str(tmp_path / "x")
    storage.write(url, b"0123456789")
    assert storage.read(url, 2, 5) == b"234"
    assert storage.read(url, 8, 50) == b"89"
    assert storage.read(url, 50) == b""
    assert storage.read(url, 3, 3) == b""


def test_create_only_refuses_what_exists_and_keeps_it(tmp_path: Path) -> None:
    url = str(tmp_path / "x")
    storage.write(url, b"first", create_only=True)
    with pytest.raises(storage.AlreadyExists, match="x already exists"):
        storage.write(url, b"second", create_only=True)
    assert storage.read(url) == b"first"


def test_of_many_create_only_writers_one_wins(tmp_path: Path) -> None:
    url, wins = str(tmp_path / "x"), []

    def race(number: int) -> None:
        try:
            storage.write(url, b"%d" % number, create_only=True)
            wins.append(number)
        except storage.AlreadyExists:
            pass

    threads = [threading.Thread(target=race, args=(number,)) for number in range(16)]
    [thread.start() for thread in threads]
    [thread.join() for thread in threads]
    assert len(wins) == 1
    assert storage.read(url) == b"%d" % wins[0]


def test_a_failed_write_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    storage.write(str(tmp_path / "x"), b"old")
    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(storage.StorageError, match="x: No space left on device"):
        storage.write(str(tmp_path / "x"), b"new")
    assert os.listdir(tmp_path) == ["x"]
    assert storage.read(str(tmp_path / "x")) == b"old"


def test_a_replaced_file_is_not_read_under_its_old_generation(tmp_path: Path) -> None:
    url = str(tmp_path / "x")
    old = storage.write(url, b"old")
    os.utime(url, ns=(1, old.generation + 1_000_000))
    with pytest.raises(storage.Changed, match="x was changed"):
        storage.read(url, generation=old.generation)


def test_listing_is_recursive_sorted_and_without_partial_files(tmp_path: Path) -> None:
    for name in ("b/2", "a", "b/1"):
        storage.write(str(tmp_path / name), b"")
    (tmp_path / ".a.0123.partial").write_bytes(b"half")
    assert [stat.url for stat in storage.listing(str(tmp_path))] == [
        str(tmp_path / name) for name in ("a", "b/1", "b/2")
    ]
    assert storage.listing(str(tmp_path / "missing")) == []


def test_what_is_missing_is_named(tmp_path: Path) -> None:
    with pytest.raises(storage.NotFound, match="nothing does not exist"):
        storage.read(str(tmp_path / "nothing"))
    assert storage.stat(str(tmp_path / "nothing")) is None
    assert storage.stat(str(tmp_path)) is None
    storage.delete(str(tmp_path / "nothing"))


def test_upload_and_download_copy_a_file(tmp_path: Path) -> None:
    source = tmp_path / "source"
    source.write_bytes(os.urandom(100_000))
    stat = storage.upload(source, str(tmp_path / "copy"), create_only=True)
    assert stat.crc32c == google_crc32c.value(source.read_bytes())
    storage.download(str(tmp_path / "copy"), tmp_path / "back" / "again")
    assert (tmp_path / "back" / "again").read_bytes() == source.read_bytes()
    with pytest.raises(storage.AlreadyExists):
        storage.upload(source, str(tmp_path / "copy"), create_only=True)


@pytest.mark.parametrize(
    ("url", "remote"), [("gs://b/x", True), ("./gs", False), ("gs", False), ("/gs://b", False), ("./logs", False)]
)
def test_only_the_scheme_makes_a_url_remote(url: str, remote: bool) -> None:
    assert storage.is_remote(url) is remote


@pytest.mark.parametrize(
    ("parts", "joined"),
    [
        (("gs://b", "x"), "gs://b/x"),
        (("gs://b/", "/x/", "y"), "gs://b/x/y"),
        (("/", "x"), "/x"),
        (("a/",), "a"),
        (("a", ""), "a"),
    ],
)
def test_join(parts: tuple[str, ...], joined: str) -> None:
    assert storage.join(*parts) == joined


@pytest.mark.parametrize("code", [errno.EPERM, errno.ENOSYS, errno.ENOTSUP])
def test_a_mounted_bucket_without_hard_links_is_named_with_what_to_do(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int
) -> None:
    """Cloud Storage FUSE has none."""

    def refuse(*_: object) -> None:
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(os, "link", refuse)
    with pytest.raises(
        storage.StorageError, match=rf"^{tmp_path}/x: this file system has no hard links \(.*write to gs://"
    ):
        storage.write(str(tmp_path / "x"), b"1", create_only=True)
    assert not list(tmp_path.iterdir()), "nothing is left"
    storage.write(str(tmp_path / "x"), b"1")
