"""`tpu-train checkpoint` and `tpu-train export --best` copy, find the best, and take one checkpoint by its folder."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.training.checkpoint_writers import IDENTITY, State, host_writer
from tests.training.damage import flip
from training.checkpoint import admin as inspect
from training.checkpoint import reader as restoring
from training.checkpoint.config import Best
from training.checkpoint.format import committed_steps
from training.checkpoint.reader import restore, verify
from training.checkpoint.tensors import Damaged
from training.distributed.rendezvous import SingleHost
from training.errors import BadInput


def saved(folder: Path, figures: dict[int, float | None], keep_last: int, mode: str = "min") -> None:
    """A run of one host that saved after these steps, and evaluated to these figures just before."""
    saver = host_writer(folder / "checkpoints", keep_last=keep_last)
    best: dict[str, Any] | None = None
    for step, value in figures.items():
        if value is not None and Best(metric="loss", mode=mode).better(value, best["value"] if best else None):
            best = {"step": step, "metric": "loss", "value": value}
        saver.save(step, State(step).layout(), State(step).copy, {"best": best})
    saver.wait()


def test_the_best_checkpoint_is_kept_listed_and_found(tmp_path: Path) -> None:
    saved(tmp_path, {10: 5.0, 20: 3.0, 30: 4.0, 40: float("nan"), 50: 3.0, 60: None}, 2)
    assert committed_steps(str(tmp_path / "checkpoints")) == [60, 50, 20]
    assert inspect.best_saved_step(str(tmp_path)) == 20
    lines = {line.split()[0]: line for line in inspect.render_table(str(tmp_path)).splitlines()}
    assert lines["20"].endswith("best loss: 3.00000")
    assert "best" not in lines["50"] + lines["60"]


def test_one_that_was_the_best_goes_when_there_is_a_better_one(tmp_path: Path) -> None:
    saved(tmp_path, {10: 1.0, 20: 2.0, 30: 1.5, 40: 1.7, 50: 1.8}, 1, mode="max")
    assert committed_steps(str(tmp_path / "checkpoints")) == [50, 20]
    assert inspect.best_saved_step(str(tmp_path)) == 20


def test_without_a_policy_there_is_no_best(tmp_path: Path) -> None:
    saved(tmp_path, {10: None}, 1)
    with pytest.raises(BadInput, match=r"no best checkpoint is known; the run needs checkpoint\.best"):
        inspect.best_saved_step(str(tmp_path))


@pytest.mark.parametrize("name", ["checkpoints/step-00000010", "checkpoints", ""])
def test_a_checkpoint_is_copied_and_another_run_goes_on_from_it(tmp_path: Path, name: str) -> None:
    saved(tmp_path / "a", {10: None, 20: None}, 2)
    assert inspect.copy_to_run(str(tmp_path / "a" / name), str(tmp_path / "b"), None) == (10 if "step" in name else 20)
    [step] = committed_steps(str(tmp_path / "b" / "checkpoints"))
    verify(str(tmp_path / "b" / "checkpoints"), step)
    state = State(-1)
    restored = restore(str(tmp_path / "b" / "checkpoints"), SingleHost(), IDENTITY, state.accept, print)
    assert restored.manifest.step == step
    assert state.is_of(step)
    with pytest.raises(BadInput, match="has checkpoints already"):
        inspect.copy_to_run(str(tmp_path / "a"), str(tmp_path / "b"), 10)


def test_a_failed_copy_leaves_nothing(tmp_path: Path) -> None:
    saved(tmp_path / "a", {10: None, 20: None}, 2)
    [part] = (tmp_path / "a" / "checkpoints" / "step-00000010").glob("part-*")
    flip(part, -1)
    with pytest.raises(BadInput, match=r"is damaged .*crc32c.*choose another"):
        inspect.copy_to_run(str(tmp_path / "a"), str(tmp_path / "b"), 10)
    assert committed_steps(str(tmp_path / "b" / "checkpoints")) == []


@pytest.mark.parametrize("bytes_a_request", [1, 5, 12, 1 << 20])
def test_any_flipped_byte_is_damage(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, bytes_a_request: int) -> None:
    """In the list of tensors as in the tensors: never another exception, never silence."""
    monkeypatch.setattr(restoring, "_RANGE", bytes_a_request)
    monkeypatch.setattr(restoring, "_HEAD", 16)
    before, after = State(10), State(-1)
    before.values["model/empty"] = np.zeros((0, 3), np.float32)
    saver = host_writer(tmp_path)
    saver.save(10, before.layout(), before.copy, {})
    saver.wait()
    assert restore(str(tmp_path), SingleHost(), IDENTITY, after.accept, print) is not None
    assert after.values.pop("model/empty").shape == (0, 3)
    assert after.is_of(10)
    [part] = tmp_path.glob("step-*/part-*")
    whole = part.read_bytes()
    for place in range(0, len(whole), 3):
        part.write_bytes(whole[:place] + bytes([whole[place] ^ 0x41]) + whole[place + 1 :])
        with pytest.raises(Damaged, match="part part-0-of-1"):
            verify(str(tmp_path), 10)
