"""All hosts begin with the same facts and output folder; of several starts of a run one commits, the newest."""

import itertools
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast
from unittest.mock import MagicMock, Mock

import pytest

from tests.container import small_runs
from tests.training.checkpoint_writers import IDENTITY, host_writer, save_step
from training import run_setup, storage
from training.checkpoint.format import Manifest, committed_steps, read_manifest
from training.checkpoint.reader import verify
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
    host = MagicMock()
    host.open_devices.return_value = SimpleNamespace(devices=1)
    monkeypatch.setattr(run_setup, "prepare_framework", lambda _: None)
    monkeypatch.setattr(run_setup, "load", lambda _: host.open_devices)
    monkeypatch.setenv("PJRT_DEVICE", "CPU")
    monkeypatch.setattr(run_setup, "set_device_environment", lambda *_: None)
    config = TrainerConfig.model_validate(small_runs.document(Path("none"), rendezvous={"start_seconds": 7}))
    data = SimpleNamespace(tokens=SimpleNamespace(vocabulary=9, pad=0, end=None), sequence_length=8)
    run_setup.open_backend(config, Cluster(0, ("a",)), host, cast(Any, SimpleNamespace(data=data, labels=None)))
    calls = [name for name, *_ in host.mock_calls]
    assert calls == ["limit", "limit().__enter__", "open_devices", "limit().__exit__"]
    host.limit.assert_called_once_with("opening the devices", 7)


CLUSTER = Cluster(0, ("h",), run_id="r")


@pytest.fixture
def run(tmp_path: Path) -> str:
    return str(tmp_path / "r")


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


def without_listing(url: str) -> list[storage.Stat]:
    return []


# Of starts at the same moment, none sees the others' claims.
BLIND: Any = SimpleNamespace(**{**vars(storage), "listing": without_listing})


@pytest.mark.parametrize("names", list(itertools.permutations(["aa", "bb", "cc"])))
def test_of_starts_at_the_same_moment_exactly_one_commits(run: str, names: tuple[str, ...]) -> None:
    starts = [start(run, token, BLIND) for token in names]
    assert [own.name for own in starts if may_commit(run, own)] == ["attempt-0000.cc.json"]
    assert [may_commit(run, own) for own in (*starts, start(run, "00"))] == [False, False, False, True]


def test_of_three_starts_one_commits_though_only_two_were_after_each_other(run: str) -> None:
    first = start(run, "cc")
    second = start(run, "aa")
    third = start(run, "bb", BLIND)  # listed at the same moment as `first`, and was written after `second` had listed
    assert [may_commit(run, own) for own in (first, second, third)] == [False, True, False]


@pytest.mark.parametrize("content", [b'{"hosts": []}', b'{"ho'])
def test_a_claim_that_can_not_be_read_is_newer(run: str, content: bytes) -> None:
    own = start(run, "bb")
    storage.write(f"{run}/attempts/attempt-0000.aa.json", content)
    assert not may_commit(run, own)


class Saver:
    """A start's writer, and what it warned of. `own`: the claim that lets it commit; without one it always may."""

    def __init__(self, run: str, token: str, own: Claim | None = None, **options: Any) -> None:
        self.warnings, self.folder = list[str](), f"{run}/checkpoints"
        check = fence(run, CLUSTER, own) if own else lambda: None
        self.writer = host_writer(self.folder, token=token, fence=check, warn=self.warnings.append, **options)

    def save(self, step: int) -> Manifest:
        """Saves a step, which must be whole then. Returns its manifest, which may be another's."""
        save_step(self.writer, step)
        verify(self.folder, step)
        return read_manifest(self.folder, step)


def test_a_late_commit_of_an_older_start_is_kept_by_the_newest(run: str) -> None:
    zombie = Saver(run, "aa")  # its look at the fence was before the newer start
    newer = Saver(run, "bb", start(run, "bb"))
    assert zombie.save(10) == newer.save(10)
    assert newer.warnings == ["step 10 was committed by attempt 0 meanwhile: that is kept"]
    newer.save(20)
    assert committed_steps(newer.folder) == [20, 10]
    verify(newer.folder, 10)


def test_a_late_commit_of_another_identity_is_replaced_by_the_newest(run: str) -> None:
    Saver(run, "aa", identity={"seed": 2}).save(10)
    assert Saver(run, "bb", start(run, "bb")).save(10).identity == IDENTITY


def test_a_commit_whose_parts_are_gone_is_replaced_by_the_newest(run: str) -> None:
    Saver(run, "aa").save(10)
    [part] = Path(run).glob("*/*/part-*.aa.*")
    part.unlink()
    newer = Saver(run, "bb", start(run, "bb"))
    newer.save(10)
    assert newer.warnings == []


def test_a_commit_whose_answer_was_lost_counts_as_own(run: str) -> None:
    """A retried request is told that the name is taken."""

    def write(url: str, data: bytes | memoryview, *, create_only: bool = False) -> storage.Stat:
        written = storage.write(url, data, create_only=create_only)
        return storage.write(url, data, create_only=True) if create_only else written

    saver = Saver(run, "aa", storage=SimpleNamespace(**{**vars(storage), "write": write}))
    saver.save(10)
    assert saver.warnings == []


@pytest.mark.parametrize("looks", [4, 5], ids=["after the commit", "after the listing"])
def test_another_look_at_the_fence_that_fails_warns_and_deletes_nothing(run: str, looks: int) -> None:
    saver = Saver(run, "t", keep_last=1)
    saver.writer._fence = Mock(side_effect=[*[None] * looks, StorageError("503"), *[None] * 9])
    for step in (10, 20):
        saver.save(step)
    assert (saver.writer.committed, committed_steps(saver.folder)) == (20, [20, 10])
    assert saver.warnings == ["old checkpoints stay where they are: 503"]
    saver.save(30)
    assert committed_steps(saver.folder) == [30]


def test_storage_that_fails_does_not_hide_a_newer_start(run: str, monkeypatch: pytest.MonkeyPatch) -> None:
    saver = Saver(run, "t")
    manifest = saver.save(10)
    monkeypatch.setattr(saver.writer, "_fence", Mock(side_effect=BadInput("a newer attempt runs")))
    monkeypatch.setattr(saver.writer, "_read_committed", Mock(side_effect=StorageError("503")))
    with pytest.raises(BadInput, match="a newer attempt runs"):
        saver.writer._check_fence_again(manifest)
