"""Hosts, here threads, save together; whatever is killed or damaged, restoring gives a whole checkpoint."""

import functools
import gc
import os
import re
import threading
import time
import weakref
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.training.checkpoint_writers import IDENTITY, State, host_writer, save_step
from tests.training.mutations import flip
from training import storage
from training.checkpoint import admin as inspect
from training.checkpoint import format as form
from training.checkpoint import writer as saving
from training.checkpoint.format import committed_steps
from training.checkpoint.reader import Restored, restore, verify
from training.checkpoint.snapshot import Snapshot, find_nonfinite
from training.checkpoint.tensors import Damaged, TensorSpec
from training.distributed.cluster import Cluster
from training.distributed.rendezvous import Rendezvous, SingleHost
from training.errors import BadInput, LostPeer, NonFinite, TrainError


class Meeting:
    """A rendezvous of threads with a short time-out."""

    def __init__(self, hosts: int) -> None:
        self.barriers: dict[str, tuple[threading.Barrier, dict[int, Any]]] = {}
        self.hosts = hosts

    def of(self, worker: int) -> Rendezvous:
        host = SingleHost()
        host.meet = functools.partial(self.meet, worker)  # type: ignore[method-assign]
        return host

    def meet(self, worker: int, name: str, payload: Any = None, seconds: float | None = None) -> list[Any]:
        barrier, payloads = self.barriers.setdefault(name, (threading.Barrier(self.hosts, timeout=1), {}))
        payloads[worker] = payload
        try:
            barrier.wait()
        except threading.BrokenBarrierError:
            raise LostPeer(f"{name}: not everyone came") from None
        return [payloads[host] for host in range(self.hosts)]


def on_all(hosts: int, work: Callable[[int], Any]) -> list[Any]:
    """What `work` returns or raises on each host."""
    with ThreadPoolExecutor(hosts) as threads:
        results = [threads.submit(work, worker) for worker in range(hosts)]
    return [result.exception() or result.result() for result in results]


def save(folder: Path, steps: list[int], hosts: int = 2, token: str = "t", damaged: tuple[int, ...] = ()) -> list[Any]:
    meeting = Meeting(hosts)

    def work(worker: int) -> int | None:
        saver = host_writer(folder, worker, hosts, meeting.of(worker), token=token)
        saver.continue_from(0, damaged)
        for step in steps:
            save_step(saver, step, run_state={"first_loss": 9.5})
        return saver.committed

    return on_all(hosts, work)


def load(folder: Path, hosts: int = 1, identity: Mapping[str, Any] = IDENTITY) -> tuple[Restored, State, list[str]]:
    meeting, warnings = Meeting(hosts), list[str]()
    states = [State(-1) for _ in range(hosts)]

    def work(worker: int) -> Restored | None:
        return restore(str(folder), meeting.of(worker), identity, states[worker].accept, warnings.append)

    results = on_all(hosts, work)
    for result in results:
        if isinstance(result, Exception):
            raise result
    return results[0], states[0], warnings


@pytest.mark.parametrize("writers", [1, 2, 5])
@pytest.mark.parametrize("readers", [1, 3])
def test_what_some_hosts_wrote_any_number_of_hosts_reads(tmp_path: Path, writers: int, readers: int) -> None:
    assert save(tmp_path, [10, 20], writers) == [20] * writers
    restored, state, warnings = load(tmp_path, readers)
    assert (restored.manifest.step, restored.manifest.state, warnings) == (20, {"first_loss": 9.5}, [])
    assert state.is_of(20)
    assert len(restored.manifest.parts) == writers


def test_hosts_write_their_parts_at_the_same_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    all_write, real = threading.Barrier(4, timeout=10), storage.write

    def write(url: str, *arguments: Any, **options: Any) -> storage.Stat:
        if "part-" in url:
            all_write.wait()
        return real(url, *arguments, **options)

    monkeypatch.setattr(storage, "write", write)
    assert save(tmp_path, [10], hosts=4) == [10] * 4


def part(step: Path, number: int) -> Path:
    [path] = step.glob(f"part-{number}-*")
    return path


def change_step(step: Path) -> None:
    manifest = step / form.MANIFEST
    manifest.write_bytes(manifest.read_bytes().replace(b'"step": 20', b'"step": 21'))


def store_nan(step: Path) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(saving, "find_nonfinite", lambda tensors: None)
        not_finite = {name: np.full_like(value, np.nan) for name, value in State().values.items()}
        patch.setattr(State, "__init__", lambda state, step: setattr(state, "values", not_finite))
        save(step.parent, [20], damaged=(20,), token="n")


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (
            lambda step: flip(part(step, 1), -1),
            r"damaged: part part-1-of-2.t.*: the slice \[0:5,0:3\] of model/4 has a",
        ),
        (lambda step: flip(part(step, 1), 8), "damaged: part part-1-of-2.t.safetensors has another header"),
        (lambda step: os.truncate(part(step, 0), 100), "damaged: part part-0-of-2.t.safetensors has"),
        (lambda step: part(step, 1).unlink(), "damaged: part part-1-of-2.t.safetensors is missing"),
        (change_step, "damaged: manifest.json has a wrong crc32c"),
        (store_nan, r"not finite: part part-\d-of-2.n.safetensors: tensor model/\d has a NaN or an infinity"),
    ],
    ids=["last byte", "header", "cut", "missing", "manifest", "not finite"],
)
def test_damage_is_told_and_skipped(tmp_path: Path, damage: Callable[[Path], None], message: str) -> None:
    save(tmp_path, [10, 20])
    damage(tmp_path / "step-00000020")
    restored, state, warnings = load(tmp_path, 2)
    assert (restored.manifest.step, restored.damaged) == (10, (20,))
    assert state.is_of(10)
    assert re.search(message.partition(": ")[2], warnings[0])
    text, good = inspect.verify_checkpoints(str(tmp_path), None)
    assert not good
    assert re.fullmatch(rf"step 20: {message}.*\nstep 10: good, finite, 652 bytes in 2 part\(s\)", text)
    assert save(tmp_path, [20], damaged=restored.damaged, token="u") == [20, 20]
    assert load(tmp_path)[1].is_of(20)


def test_when_nothing_verifies_the_run_is_not_started_over(tmp_path: Path) -> None:
    save(tmp_path, [10])
    flip(part(tmp_path / "step-00000010", 1), -1)
    with pytest.raises(BadInput, match="none of the checkpoints of steps 10 can be used"):
        load(tmp_path)


def test_a_checkpoint_of_something_else_is_refused_with_the_differences(tmp_path: Path) -> None:
    save(tmp_path, [10])
    told = r"undo the change:\n  b: the checkpoint has None, this run 4\n  model\.layers: the checkpoint has 2, .* 3$"
    with pytest.raises(BadInput, match=told):
        load(tmp_path, 1, {"seed": 1, "model.layers": 3, "b": 4})


def test_without_a_manifest_nothing_is_committed_and_the_next_commit_clears_it_away(tmp_path: Path) -> None:
    save(tmp_path, [10, 20])
    (tmp_path / "step-00000020" / form.MANIFEST).unlink()
    restored, state, warnings = load(tmp_path)
    assert (restored.manifest.step, warnings) == (10, [])
    assert state.is_of(10)
    save(tmp_path, [30], token="u")
    assert not (tmp_path / "step-00000020").exists()


def test_what_killed_writers_left_hidden_goes_with_the_next_commit(tmp_path: Path) -> None:
    save(tmp_path, [10])
    name = ".part-0-of-2.old.safetensors.0123.partial"
    older, other, newer = (tmp_path / f"step-000000{step}" / name for step in (10, 15, 30))
    for partial in (older, other, newer):
        partial.parent.mkdir(exist_ok=True)
        partial.write_bytes(b"half")
    (tmp_path / "notes").mkdir()
    save(tmp_path, [20], token="u")
    left = sorted(path.name for path in tmp_path.iterdir())
    assert left == ["notes", "step-00000010", "step-00000020", "step-00000030"]
    assert not older.exists()
    assert newer.exists(), "another process may still write it"
    assert committed_steps(str(tmp_path)) == [20, 10]


def test_a_failed_save_is_raised_by_the_next_look_and_only_once(tmp_path: Path) -> None:
    (tmp_path / "step-00000010").write_text("a file where a folder has to be")
    saver = host_writer(tmp_path)
    with pytest.raises(TrainError):
        save_step(saver, 10)
    saver.check()
    assert saver.committed is None


def test_a_save_slower_than_its_interval_is_counted_and_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(saving, "_LATE", 0.02)
    real = storage.write

    def slow(*arguments: Any, **options: Any) -> storage.Stat:
        time.sleep(0.05)
        return real(*arguments, **options)

    monkeypatch.setattr(storage, "write", slow)
    warnings: list[str] = []
    saver = host_writer(tmp_path, warn=warnings.append)
    for step in (10, 20, 30, 40, 50):
        saver.save(step, State(step).layout(), State(step).copy, {})
        assert saver.committed == (step - 10 or None), "at most one save is under way"
    saver.wait()
    assert saver.blocked_seconds > 4 * 0.05
    [told] = warnings
    assert "for the one of step 20 before that of step 30 could begin; save less often (checkpoint.every_steps" in told


@pytest.mark.parametrize("worker", [0, 1])
@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_a_state_that_is_not_finite_on_one_host_is_committed_by_none(tmp_path: Path, worker: int, value: float) -> None:
    """The loop does not see it: a moment that overflowed, or a bit that flipped."""
    assert save(tmp_path, [10]) == [10, 10]
    meeting = Meeting(2)

    def work(host: int) -> None:
        state = State(20)
        names = saving._PartBuffer(state.layout(), {}, Cluster(worker, ("h",) * 2)).views
        state.values[max(names)][-1, -1] = value
        save_step(host_writer(tmp_path, host, 2, meeting.of(host), token="u"), 20, state)

    errors = on_all(2, work)
    assert [type(error) for error in errors] == [NonFinite, NonFinite]
    assert f"state after 20 steps is not finite (host {worker}: tensor model/" in str(errors[0])
    assert errors[0].step == 19
    assert committed_steps(str(tmp_path)) == [10]


def test_the_commands_show_list_and_verify(tmp_path: Path) -> None:
    save(tmp_path / "checkpoints", [10, 20])
    assert [line.split()[0] for line in inspect.render_table(str(tmp_path)).splitlines()] == ["step", "20", "10"]
    assert '"step": 10' in inspect.render_manifest(str(tmp_path), 10)
    good = [f"step {step}: good, finite, 652 bytes in 2 part(s)" for step in (20, 10)]
    assert inspect.verify_checkpoints(str(tmp_path), None) == ("\n".join(good), True)
    with pytest.raises(BadInput, match="no committed step 15; it has 20, 10"):
        inspect.render_manifest(str(tmp_path), 15)
    with pytest.raises(Damaged):
        verify(str(tmp_path / "checkpoints"), 15)


class Place:
    """Memory that can be written from a moment on."""

    def __init__(self) -> None:
        self.content, self.opened = np.zeros(3, np.float32), threading.Event()

    def __setitem__(self, key: Any, value: np.ndarray) -> None:
        assert self.opened.wait(10), "it was not opened"
        self.content[key] = value


def test_the_loop_goes_on_and_is_held_up_before_the_change() -> None:
    place, state = Place(), np.arange(3, dtype=np.float32)
    snapshot = Snapshot([(place, state)])  # type: ignore[list-item]
    assert not place.content.any()
    threading.Timer(0.2, place.opened.set).start()
    began = time.monotonic()
    snapshot.wait_before_mutation()
    waited = time.monotonic() - began
    state += 1
    assert list(place.content) == [0, 1, 2]
    assert 0.1 < snapshot.blocked_seconds <= waited
    before = snapshot.blocked_seconds
    snapshot.wait()  # the saver's thread: that costs the loop nothing
    assert snapshot.blocked_seconds == before


@pytest.mark.parametrize("place", [0, 1 << 18, -1])
@pytest.mark.parametrize(
    ("dtype", "unsigned", "one", "values"),
    [
        ("F32", np.uint32, 0x3F800000, (0x7FC00000, 0xFFC00001, 0x7F800000, 0xFF800000)),
        ("F16", np.uint16, 0x3C00, (0x7E00, 0x7C00, 0xFC00)),
        ("BF16", np.uint16, 0x3F80, (0x7FC0, 0xFFC0, 0x7F80, 0xFF80)),
    ],
)
def test_a_value_that_is_not_finite_is_found_anywhere_in_a_large_tensor(
    dtype: str, unsigned: type[np.unsignedinteger[Any]], one: int, values: tuple[int, ...], place: int
) -> None:
    tensor = np.full((1 << 19) + 1, one, unsigned)
    data = memoryview(tensor).cast("B")
    tensors = {"model/w": (TensorSpec(dtype, tensor.shape, data.nbytes), data)}
    assert find_nonfinite(tensors) is None
    for value in values:
        tensor[place] = value
        assert find_nonfinite(tensors) == "model/w"


def test_what_was_copied_is_let_go() -> None:
    """A reference to a device's memory that is kept costs the next step a copy of the state."""
    state = np.ones(3, np.float32)
    gone = weakref.ref(state)
    snapshot = Snapshot([(np.empty(3, np.float32), state)])
    snapshot.wait()
    del state
    gc.collect()
    assert gone() is None


def test_a_copy_that_fails_is_told_to_the_loop_and_to_the_saver() -> None:
    snapshot = Snapshot([(np.empty(2, np.float32), np.ones(3, np.float32))])
    for wait in (snapshot.wait_before_mutation, snapshot.wait):
        with pytest.raises(ValueError, match="could not broadcast"):
            wait()
