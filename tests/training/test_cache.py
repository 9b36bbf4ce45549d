"""Claims about `data.cache`: it costs no syncing, keeps its limit, and nothing in it is believed unchecked."""

import errno
import os
from pathlib import Path

import pytest

from training.data.loading.cache import Cache

BLOCK = bytes(range(256)) * 1024  # 256 KB
KEYS = [f"{number:016x}-8-10" for number in range(4)]


def roomy(_: Path) -> tuple[int, int, int]:
    return 100 << 30, 0, 100 << 30


def opened(folder: Path, blocks: int = 1000) -> Cache:
    """Returns a cache with room for so many blocks, and not for one more, on an empty disk."""
    return Cache(folder, blocks * (len(BLOCK) + 5), roomy)


def kept(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


def test_a_block_comes_back_and_a_missing_one_or_one_of_another_size_or_key_does_not(tmp_path: Path) -> None:
    cache = opened(tmp_path / "a")
    assert cache.get(KEYS[0], "x", len(BLOCK)) is None
    cache.put(KEYS[0], "x", BLOCK)
    assert opened(tmp_path / "a").get(KEYS[0], "x", len(BLOCK)) == BLOCK
    assert cache.get(KEYS[0], "x", len(BLOCK) - 1) is None
    assert cache.get(KEYS[1], "x", len(BLOCK)) is None


@pytest.mark.parametrize("damage", ["flipped", "zeros", "cut", "empty"])
def test_what_a_crash_leaves_of_a_file_counts_as_missing(tmp_path: Path, damage: str) -> None:
    cache = opened(tmp_path)
    cache.put(KEYS[0], "x", BLOCK)
    [file] = tmp_path.glob("*/x")
    data = file.read_bytes()
    file.write_bytes(
        {"flipped": b"\xff" + data[1:], "zeros": bytes(len(data)), "cut": data[:1000], "empty": b""}[damage]
    )
    assert cache.get(KEYS[0], "x", len(BLOCK)) is None


def test_a_block_is_not_synced_to_the_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    synced: list[int] = []
    monkeypatch.setattr(os, "fsync", synced.append)
    cache = opened(tmp_path)
    for number in range(20):
        cache.put(KEYS[0], str(number), BLOCK)
    assert not synced
    assert kept(tmp_path) == 20 * (len(BLOCK) + 4)


def test_the_cache_stops_before_the_disk_is_full(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    def nearly_full(folder: Path) -> tuple[int, int, int]:
        return 10 << 30, 0, (1 << 30) + (80 << 20) - kept(folder)

    cache = Cache(tmp_path, 100 << 30, nearly_full)
    for number in range(1000):
        cache.put(KEYS[0], str(number), BLOCK)
    assert (80 << 20) - 2 * len(BLOCK) < kept(tmp_path) <= 80 << 20
    assert capfd.readouterr().err.count("data.cache takes no more") == 1


def test_the_dataset_used_longest_ago_makes_room_and_none_that_is_in_use(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    def fill(cache: Cache, key: str, blocks: int) -> list[str]:
        for number in range(blocks):
            cache.put(key, str(number), BLOCK)
        return [name for name in map(str, range(blocks)) if cache.get(key, name, len(BLOCK))]

    (tmp_path / "results").mkdir()
    (tmp_path / "results" / "mine").write_bytes(BLOCK)
    for key, blocks in zip(KEYS[:3], (10, 15, 15), strict=True):
        fill(opened(tmp_path, 40), key, blocks)
    other = opened(tmp_path, 40)
    assert other.get(KEYS[0], "0", len(BLOCK)) == BLOCK, "in use from now on"
    for number, key in enumerate(KEYS[:3]):
        os.utime(tmp_path / f"tpu-launch-blocks-{key}", (number, number))
    cache = opened(tmp_path, 40)
    for blocks, rest in ((10, {"results", *KEYS} - {KEYS[1]}), (35, {"results", KEYS[0], KEYS[3]})):
        fitting = fill(cache, KEYS[3], blocks)
        assert fitting == [str(number) for number in range(min(blocks, 30))], "what is there stays, no more is kept"
        assert {path.name.removeprefix("tpu-launch-blocks-") for path in tmp_path.iterdir()} == rest
    assert other.get(KEYS[0], "9", len(BLOCK)) == BLOCK
    assert kept(tmp_path) == len(BLOCK) + 40 * (len(BLOCK) + 4)
    assert capfd.readouterr().err.count("it holds 0.0105 of 0.0105 GB (data.cache_gb)") == 1
    del other, cache
    assert len(fill(opened(tmp_path, 40), KEYS[0], 40)) == 40


def test_a_folder_that_can_not_be_made_and_a_disk_that_is_full_cost_the_cache_and_not_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    def refuse(*_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    (tmp_path / "file").write_text("")
    unusable, full = opened(tmp_path / "file" / "cache"), opened(tmp_path / "full")
    full.put(KEYS[0], "x", BLOCK)
    monkeypatch.setattr(os, "replace", refuse)
    for cache, kept_blocks, reason in ((unusable, 0, "Not a directory"), (full, 1, "No space left on device")):
        for name in "yz":
            cache.put(KEYS[0], name, BLOCK)
        assert [cache.get(KEYS[0], name, len(BLOCK)) for name in "xyz"] == [
            *[BLOCK] * kept_blocks,
            *[None] * (3 - kept_blocks),
        ]
        assert (
            capfd.readouterr().err.count(
                f"data.cache takes no more; blocks that it lacks are read from the bucket: {cache._folder}: {reason}"
            )
            == 1
        )
    assert kept(tmp_path / "full") == len(BLOCK) + 4
