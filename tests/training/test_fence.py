"""Of several starts of a run one commits: the newest, and of two at the same moment exactly one. A host that slept
between its look and its write does no harm."""

import itertools
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.training.checkpoint_writers import IDENTITY, save_step, single_host_writer
from training import storage
from training.checkpoint.format import committed_steps, read_manifest
from training.checkpoint.reader import verify
from training.checkpoint.writer import CheckpointWriter
from training.distributed import fence as fences
from training.distributed.cluster import Cluster
from training.distributed.fence import Claim, claim, fence
from training.distributed.rendezvous import SingleHost
from training.errors import BadInput
from training.storage import StorageError

CHECKPOINTS = "runs/r/checkpoints"


class MemoryStorage:
    """Objects in a dictionary, as a simulation would keep them."""

    def __init__(self) -> None:
        self.objects: dict[str, bytes] = {}

    def stat(self, url: str) -> storage.Stat | None:
        data = self.objects.get(url)
        return None if data is None else storage.Stat(url, len(data), 0, storage.crc32c(data))

    def listing(self, folder: str) -> list[storage.Stat]:
        return [stat for url in sorted(self.objects) if url.startswith(f"{folder}/") and (stat := self.stat(url))]

    def read(self, url: str, start: int = 0, end: int | None = None, *, generation: int | None = None) -> bytes:
        if url not in self.objects:
            raise storage.NotFound(f"{url} does not exist")
        return self.objects[url][start:end]

    def read_into(self, url: str, start: int, place: memoryview) -> int:
        data = self.read(url, start, start + len(place))
        place[: len(data)] = data
        return len(data)

    def write(self, url: str, data: bytes | memoryview, *, create_only: bool = False) -> storage.Stat:
        if create_only and url in self.objects:
            raise storage.AlreadyExists(f"{url} already exists")
        self.objects[url] = bytes(data)
        return storage.Stat(url, len(data), 0, storage.crc32c(data))

    def delete(self, url: str) -> None:
        self.objects.pop(url, None)

    def remove_partial_files(self, folder: str, abandoned: Callable[[str], bool]) -> None:
        pass


def cluster(attempt: int = 0) -> Cluster:
    return Cluster(0, ("h",), run_id="r", attempt=attempt)


def start(folder: str, token: str, storage: MemoryStorage, attempt: int = 0) -> Claim:
    return claim(folder, cluster(attempt), SingleHost(), token, {}, storage)


def may_commit(folder: str, own: Claim, storage: MemoryStorage) -> bool:
    try:
        fence(folder, cluster(), own, storage)()
    except BadInput:
        return False
    return True


def test_the_newest_start_commits() -> None:
    storage = MemoryStorage()
    # The names do not say the order: a local run has only attempts 0, and tokens are random.
    starts = [start("runs/r", token, storage) for token in ("cc", "aa", "bb")]
    assert [may_commit("runs/r", own, storage) for own in starts] == [False, False, True]


class Interleaved(MemoryStorage):
    """Shows two starts the same list, however their requests are ordered."""

    def __init__(self, hidden: bool) -> None:
        super().__init__()
        self.hidden = hidden

    def listing(self, folder: str) -> list[object]:  # type: ignore[override]
        return [] if self.hidden else super().listing(folder)  # type: ignore[return-value]


@pytest.mark.parametrize("names", list(itertools.permutations(["aa", "bb", "cc"])))
def test_of_starts_at_the_same_moment_exactly_one_commits(names: tuple[str, ...]) -> None:
    storage = Interleaved(hidden=True)
    starts = [start("runs/r", token, storage) for token in names]
    storage.hidden = False
    allowed = [own.name for own in starts if may_commit("runs/r", own, storage)]
    assert allowed == ["attempt-0000.cc.json"]
    later = start("runs/r", "00", storage)
    assert [may_commit("runs/r", own, storage) for own in (*starts, later)] == [False, False, False, True]


def test_of_three_starts_one_commits_though_only_two_were_after_each_other() -> None:
    storage = MemoryStorage()
    first = start("runs/r", "cc", storage)
    second = start("runs/r", "aa", storage)
    # Listed at the same moment as `first`, and was written after `second` had listed.
    third = Claim("runs/r/attempts/attempt-0000.bb.json", frozenset())
    storage.write(third.url, b'{"after": []}')
    assert [may_commit("runs/r", own, storage) for own in (first, second, third)] == [False, True, False]


def test_a_claim_that_can_not_be_read_is_newer(tmp_path: Path) -> None:
    storage = MemoryStorage()
    own = start("runs/r", "bb", storage)
    storage.write("runs/r/attempts/attempt-0000.aa.json", b'{"hosts": []}')
    assert not may_commit("runs/r", own, storage)
    storage.write("runs/r/attempts/attempt-0000.aa.json", b'{"ho')
    assert not may_commit("runs/r", own, storage)


def saver(storage: MemoryStorage, token: str, own: Claim | None, warnings: list[str]) -> CheckpointWriter:
    check = fence("runs/r", cluster(), own, storage) if own else lambda: None
    return single_host_writer(CHECKPOINTS, token=token, fence=check, storage=storage, warn=warnings.append)


def test_a_late_commit_of_an_older_start_is_kept_by_the_newest() -> None:
    storage, warnings = MemoryStorage(), list[str]()
    zombie = saver(storage, "aa", None, [])  # its look at the fence was before the newer start
    newer = saver(storage, "bb", start("runs/r", "bb", storage), warnings)
    save_step(zombie, 10)
    save_step(newer, 10)
    assert "part-0-of-1.aa.safetensors" in read_manifest(CHECKPOINTS, 10, storage).parts[0].name
    assert warnings == ["step 10 was committed by attempt 0 meanwhile: that is kept"]
    save_step(newer, 20)
    assert committed_steps(CHECKPOINTS, storage) == [20, 10]
    for step in (10, 20):
        verify(CHECKPOINTS, step, storage)


def test_a_late_commit_of_another_identity_is_replaced_by_the_newest() -> None:
    storage = MemoryStorage()
    save_step(single_host_writer(CHECKPOINTS, token="aa", storage=storage, identity={"seed": 2}), 10)
    save_step(saver(storage, "bb", start("runs/r", "bb", storage), []), 10)
    assert read_manifest(CHECKPOINTS, 10, storage).identity == IDENTITY
    verify(CHECKPOINTS, 10, storage)


def test_a_commit_whose_parts_are_gone_is_replaced_by_the_newest() -> None:
    storage, warnings = MemoryStorage(), list[str]()
    save_step(saver(storage, "aa", None, []), 10)
    [part] = [url for url in storage.objects if "/part-" in url]
    storage.delete(part)
    save_step(saver(storage, "bb", start("runs/r", "bb", storage), warnings), 10)
    verify(CHECKPOINTS, 10, storage)
    assert warnings == []


class LostAnswer(MemoryStorage):
    """Writes, and then says that the name is taken, as a retried request does."""

    def write(self, url: str, data: bytes | memoryview, *, create_only: bool = False):  # type: ignore[no-untyped-def]
        written = super().write(url, data, create_only=create_only)
        return super().write(url, data, create_only=True) if create_only else written


def test_a_commit_whose_answer_was_lost_counts_as_own() -> None:
    storage, warnings = LostAnswer(), list[str]()
    save_step(saver(storage, "aa", None, warnings), 10)
    verify(CHECKPOINTS, 10, storage)
    assert warnings == []


def test_an_old_start_does_not_delete_what_the_newest_has_committed() -> None:
    """It wakes up behind the fence after its parts were deleted, and the newest has replaced its manifest."""
    storage = MemoryStorage()
    old = start("runs/r", "aa", storage)
    zombie = saver(storage, "aa", None, [])
    newer = saver(storage, "bb", start("runs/r", "bb", storage), [])
    looks = iter([lambda: None, fence("runs/r", cluster(), old, storage)])

    def second_look() -> None:
        check = next(looks)
        if check.__name__ == "check":
            [part] = [url for url in storage.objects if "/part-" in url and ".aa." in url]
            storage.delete(part)
            save_step(newer, 10)
        check()

    zombie._fence = second_look
    with pytest.raises(BadInput, match="only the newest start may commit"):
        save_step(zombie, 10)
    verify(CHECKPOINTS, 10, storage)
    assert "bb" in read_manifest(CHECKPOINTS, 10, storage).parts[0].name


@pytest.mark.parametrize("looks", [4, 5], ids=["after the commit", "after the listing"])
def test_another_look_at_the_fence_that_fails_is_a_warning_and_deletes_nothing(looks: int) -> None:
    storage, warnings = MemoryStorage(), list[str]()
    writer = single_host_writer(CHECKPOINTS, keep_last=1, storage=storage, warn=warnings.append)
    failures = iter([*[None] * looks, StorageError("503")])

    def look() -> None:
        if error := next(failures, None):
            raise error

    writer._fence = look
    for step in (10, 20):
        save_step(writer, step)
    assert (writer.committed, committed_steps(CHECKPOINTS, storage)) == (20, [20, 10])
    assert warnings == ["old checkpoints stay where they are: 503"]
    save_step(writer, 30)
    assert committed_steps(CHECKPOINTS, storage) == [30]


def test_names_of_claims_differ_from_other_records() -> None:
    assert fences._CLAIM.fullmatch("attempt-0002.9f31c2d4.json")
    assert not fences._CLAIM.fullmatch("attempt-0002.9f31c2d4.end.json")
    assert not fences._CLAIM.fullmatch("attempt-0002.9f31c2d4.nonfinite.json")
