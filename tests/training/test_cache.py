"""Claims about `data.cache`: it costs no syncing, never fills the disk, and nothing in it is believed unchecked."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from training.data.loading.cache import Cache

BLOCK = bytes(range(256)) * 1024  # 256 KB


def roomy(_: Path) -> tuple[int, int, int]:
    return 100 << 30, 0, 100 << 30


def test_a_block_comes_back_and_a_missing_one_or_one_of_another_size_does_not(tmp_path: Path) -> None:
    cache = Cache(tmp_path / "a", roomy)
    assert cache.get("x", len(BLOCK)) is None
    cache.put("x", BLOCK)
    assert Cache(tmp_path / "a", roomy).get("x", len(BLOCK)) == BLOCK
    assert cache.get("x", len(BLOCK) - 1) is None
    cache.drop("x")
    assert cache.get("x", len(BLOCK)) is None


@pytest.mark.parametrize("damage", ["flipped", "zeros", "cut", "empty"])
def test_what_a_crash_leaves_of_a_file_counts_as_missing(tmp_path: Path, damage: str) -> None:
    cache = Cache(tmp_path, roomy)
    cache.put("x", BLOCK)
    data = (tmp_path / "x").read_bytes()
    left = {"flipped": b"\xff" + data[1:], "zeros": bytes(len(data)), "cut": data[:1000], "empty": b""}[damage]
    (tmp_path / "x").write_bytes(left)
    assert cache.get("x", len(BLOCK)) is None


def test_a_block_is_not_synced_to_the_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    synced: list[int] = []
    monkeypatch.setattr(os, "fsync", synced.append)
    cache = Cache(tmp_path, roomy)
    for number in range(20):
        cache.put(str(number), BLOCK)
    assert not synced
    assert len(list(tmp_path.iterdir())) == 20


def test_the_cache_stops_before_the_disk_is_full(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    def nearly_full(folder: Path) -> tuple[int, int, int]:
        kept = sum(path.stat().st_size for path in folder.iterdir())
        return 10 << 30, 0, (1 << 30) + (80 << 20) - kept

    cache = Cache(tmp_path, nearly_full)
    for number in range(1000):
        cache.put(str(number), BLOCK)
    kept = sum(path.stat().st_size for path in tmp_path.iterdir())
    assert 60 << 20 < kept < 160 << 20, "it looks each 64 MB"
    assert capfd.readouterr().err.count("data.cache is full") == 1
