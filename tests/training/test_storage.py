"""Claims about `training.storage` on local files; tests/training/test_bucket.py has what files and gs:// share."""

import errno
import os
from pathlib import Path
from unittest.mock import Mock

import pytest

from training import storage


def test_a_failed_write_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    storage.write(str(tmp_path / "x"), b"old")
    monkeypatch.setattr(os, "fsync", Mock(side_effect=OSError(28, "No space left on device")))
    with pytest.raises(storage.StorageError, match="x: No space left on device"):
        storage.write(str(tmp_path / "x"), b"new")
    assert os.listdir(tmp_path) == ["x"]
    assert storage.read(str(tmp_path / "x")) == b"old"


def test_listing_is_recursive_sorted_and_without_partial_files(tmp_path: Path) -> None:
    for name in ("b/2", "a", "b/1"):
        storage.write(str(tmp_path / name), b"")
    (tmp_path / ".a.0123.partial").write_bytes(b"half")
    listed = [stat.url for stat in storage.listing(str(tmp_path))]
    assert listed == [str(tmp_path / name) for name in ("a", "b/1", "b/2")]
    assert storage.listing(str(tmp_path / "missing")) == []


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
def test_a_mount_without_hard_links_gets_advice(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int) -> None:
    monkeypatch.setattr(os, "link", Mock(side_effect=OSError(code, os.strerror(code))))
    why = rf"^{tmp_path}/x: this file system has no hard links \(.*write to gs://"
    with pytest.raises(storage.StorageError, match=why):
        storage.write(str(tmp_path / "x"), b"1", create_only=True)
    assert not list(tmp_path.iterdir()), "nothing is left"
    storage.write(str(tmp_path / "x"), b"1")
