"""All hosts begin with the same facts and output folder; of several starts of a run one commits, the newest."""

import contextlib
import itertools
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast
from unittest.mock import Mock

import pytest

from tests.container import small_runs
from tests.training.checkpoint_writers import IDENTITY, host_writer, save_step
from training import run_setup, storage
from training.checkpoint.format import committed_steps, read_manifest
from training.checkpoint.reader import verify
from training.checkpoint.writer import CheckpointWriter
from training.config import TrainerConfig
from training.distributed.agreement import Claim, agree, claim, disagreements, fence
from training.distributed.cluster import Cluster
from training.distributed.rendezvous import SingleHost
from training.errors import BadInput
from training.storage import StorageError


def test_all_hosts_that_differ_from_host_0_are_named() -> None:
    told = [{"code": code, "configuration": configuration} for code, configuration in ("ax", "ay", "bx")]
    assert disagreements(told) == ["code: host 0 has a, host 2 b", "configuration: host 0 has x, host 1 y"]
    assert disagreements(told[:1] * 3) == []


def test_hosts_that_agree_get_a_token() -> None:
    assert agree(SingleHost(), {"code": "a"}, 1) != agree(SingleHost(), {"code": "a"}, 1)


class Pair(SingleHost):
    """Two hosts, the other of which says what it is told to."""

    def __init__(self, other: Any) -> None:
        self.other = other

    def meet(self, name: str, payload: Any = None, seconds: float | None = None) -> list[Any]:
        return [payload, self.other]


def test_an_output_that_another_host_can_not_see_is_refused(tmp_path: Path) -> None:
    cluster = Cluster(0, ("a", "b"), attempt=3)
    claim(str(tmp_path), cluster, Pair(True), "t", {"config": {}})
    assert [each.name for each in (tmp_path / "attempts").iterdir()] == ["attempt-0003.t.json"]
    with pytest.raises(BadInput, match=r"not one folder for all hosts: .*and host 1 can't see it"):
        claim(str(tmp_path), cluster, Pair(False), "u", {"config": {}})


def test_an_output_that_can_not_be_written_is_refused_at_the_start(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(BadInput, match="output: "):
        claim(str(tmp_path / "file"), Cluster(0, ("a",)), SingleHost(), "t", {})


def test_a_framework_opens_the_devices_within_the_limit_of_the_start(monkeypatch: pytest.MonkeyPatch) -> None:
    """TensorFlow connects to the other hosts there, and initialises their devices; torch_xla opens its own."""
    limits: list[tuple[str, float]] = []

    class Limited(SingleHost):
        @contextlib.contextmanager
        def limit(self, what: str, seconds: float) -> Iterator[None]:
            limits.append((what, seconds))
            yield
            limits.clear()

    def open_devices(*_: object) -> Any:
        opened.extend(limits)
        return SimpleNamespace(devices=1)

    opened: list[tuple[str, float]] = []
    monkeypatch.setattr(run_setup, "prepare_framework", lambda _: None)
    monkeypatch.setattr(run_setup, "load", lambda _: open_devices)
    monkeypatch.setenv("PJRT_DEVICE", "CPU")
    monkeypatch.setattr(run_setup, "set_device_environment", lambda *_: None)
    config = TrainerConfig.model_validate(small_runs.document(Path("none"), rendezvous={"start_seconds": 7}))
    data = SimpleNamespace(tokens=SimpleNamespace(vocabulary=9, pad=0, end=None), sequence_length=8)
    run_setup.open_backend(config, Cluster(0, ("a",)), Limited(), cast(Any, SimpleNamespace(data=data, labels=None)))
    assert opened == [("opening the devices", 7)]


CLUSTER = Cluster(0, ("h",), run_id="r")


@pytest.fixture
def run(tmp_path: Path) -> str:
    return str(tmp_path / "r")


@pytest.fixture
def checkpoints(run: str) -> str:
    return f"{run}/checkpoints"


def start(run: str, token: str, store: Any = storage) -> Claim:
    return claim(run, CLUSTER, SingleHost(), token, {}, store)


def may_commit(run: str, own: Claim) -> bool:
    try:
        fence(run, CLUSTER, own)()
    except BadInput:
        return False
    return True


def test_the_newest_start_commits(run: str) -> None:
    # The names do not say the order: a local run has only attempts 0, and tokens are random.
    starts = [start(run, token) for token in ("cc", "aa", "bb")]
    for other in ("end", "nonfinite"):
        storage.write(f"{run}/attempts/attempt-0009.aa.{other}.json", b"no claim")
    assert [may_commit(run, own) for own in starts] == [False, False, True]


class Blind:
    """Storage that lists nothing: of starts at the same moment, none sees the others' claims."""

    def __getattr__(self, name: str) -> Any:
        return getattr(storage, name)

    def listing(self, folder: str) -> list[storage.Stat]:
        return []


@pytest.mark.parametrize("names", list(itertools.permutations(["aa", "bb", "cc"])))
def test_of_starts_at_the_same_moment_exactly_one_commits(run: str, names: tuple[str, ...]) -> None:
    starts = [start(run, token, Blind()) for token in names]
    assert [own.name for own in starts if may_commit(run, own)] == ["attempt-0000.cc.json"]
    assert [may_commit(run, own) for own in (*starts, start(run, "00"))] == [False, False, False, True]


def test_of_three_starts_one_commits_though_only_two_were_after_each_other(run: str) -> None:
    first = start(run, "cc")
    second = start(run, "aa")
    third = start(run, "bb", Blind())  # listed at the same moment as `first`, and was written after `second` had listed
    assert [may_commit(run, own) for own in (first, second, third)] == [False, True, False]


@pytest.mark.parametrize("content", [b'{"hosts": []}', b'{"ho'])
def test_a_claim_that_can_not_be_read_is_newer(run: str, content: bytes) -> None:
    own = start(run, "bb")
    storage.write(f"{run}/attempts/attempt-0000.aa.json", content)
    assert not may_commit(run, own)


def saver(run: str, token: str, own: Claim | None = None, warn: Callable[[str], None] = print) -> CheckpointWriter:
    check = fence(run, CLUSTER, own) if own else lambda: None
    return host_writer(f"{run}/checkpoints", token=token, fence=check, warn=warn)


def test_a_late_commit_of_an_older_start_is_kept_by_the_newest(run: str, checkpoints: str) -> None:
    warnings = list[str]()
    zombie = saver(run, "aa")  # its look at the fence was before the newer start
    newer = saver(run, "bb", start(run, "bb"), warnings.append)
    save_step(zombie, 10)
    save_step(newer, 10)
    assert "part-0-of-1.aa.safetensors" in read_manifest(checkpoints, 10).parts[0].name
    assert warnings == ["step 10 was committed by attempt 0 meanwhile: that is kept"]
    save_step(newer, 20)
    assert committed_steps(checkpoints) == [20, 10]
    for step in (10, 20):
        verify(checkpoints, step)


def test_a_late_commit_of_another_identity_is_replaced_by_the_newest(run: str, checkpoints: str) -> None:
    save_step(host_writer(checkpoints, token="aa", identity={"seed": 2}), 10)
    save_step(saver(run, "bb", start(run, "bb")), 10)
    assert read_manifest(checkpoints, 10).identity == IDENTITY
    verify(checkpoints, 10)


def test_a_commit_whose_parts_are_gone_is_replaced_by_the_newest(run: str, checkpoints: str) -> None:
    warnings = list[str]()
    save_step(saver(run, "aa"), 10)
    [part] = Path(checkpoints).glob("*/part-*.aa.*")
    part.unlink()
    save_step(saver(run, "bb", start(run, "bb"), warnings.append), 10)
    verify(checkpoints, 10)
    assert warnings == []


class LostAnswer(Blind):
    """Storage that writes, and then says that the name is taken, as a retried request does."""

    def listing(self, folder: str) -> list[storage.Stat]:
        return storage.listing(folder)

    def write(self, url: str, data: bytes | memoryview, *, create_only: bool = False) -> storage.Stat:
        written = storage.write(url, data, create_only=create_only)
        return storage.write(url, data, create_only=True) if create_only else written


def test_a_commit_whose_answer_was_lost_counts_as_own(checkpoints: str) -> None:
    warnings = list[str]()
    save_step(host_writer(checkpoints, token="aa", storage=LostAnswer(), warn=warnings.append), 10)
    verify(checkpoints, 10)
    assert warnings == []


@pytest.mark.parametrize("looks", [4, 5], ids=["after the commit", "after the listing"])
def test_another_look_at_the_fence_that_fails_warns_and_deletes_nothing(run: str, checkpoints: str, looks: int) -> None:
    warnings = list[str]()
    writer = host_writer(checkpoints, keep_last=1, warn=warnings.append)
    failures = iter([*[None] * looks, StorageError("503")])

    def look() -> None:
        if error := next(failures, None):
            raise error

    writer._fence = look
    for step in (10, 20):
        save_step(writer, step)
    assert (writer.committed, committed_steps(checkpoints)) == (20, [20, 10])
    assert warnings == ["old checkpoints stay where they are: 503"]
    save_step(writer, 30)
    assert committed_steps(checkpoints) == [30]


def test_storage_that_fails_does_not_hide_a_newer_start(checkpoints: str, monkeypatch: pytest.MonkeyPatch) -> None:
    writer = host_writer(checkpoints)
    save_step(writer, 10)
    monkeypatch.setattr(writer, "_fence", Mock(side_effect=BadInput("a newer attempt runs")))
    monkeypatch.setattr(writer, "_read_committed", Mock(side_effect=StorageError("503")))
    with pytest.raises(BadInput, match="a newer attempt runs"):
        writer._check_fence_again(read_manifest(checkpoints, 10))
