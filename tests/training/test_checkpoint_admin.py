"""Checks the commands for a run's checkpoints, and a run's folder in a bucket that can misbehave."""

import contextlib
import json
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest

from launcher.emulator.http_server import json_response
from tests.container import small_runs
from tests.training.checkpoint_writers import IDENTITY, State, host_writer, save_step
from tests.training.mutations import flip
from tests.training.numpy_backend import Runs
from training import storage
from training.checkpoint import admin as inspect
from training.checkpoint import reader as restoring
from training.checkpoint.config import Best
from training.checkpoint.format import committed_steps
from training.checkpoint.reader import restore, verify
from training.checkpoint.tensors import Damaged, decode
from training.distributed.agreement import claim
from training.distributed.cluster import Cluster
from training.distributed.rendezvous import SingleHost
from training.errors import BadInput
from training.models import export
from training.storage import gcs as bucket


def saved(run: Path, figures: dict[int, float | None], keep_last: int, mode: str = "min") -> list[int]:
    """Saves after these steps, each evaluated to its figure just before. Returns the steps that are left."""
    saver = host_writer(run / "checkpoints", keep_last=keep_last)
    best: dict[str, Any] | None = None
    for step, value in figures.items():
        if value is not None and Best(metric="loss", mode=mode).better(value, best["value"] if best else None):
            best = {"step": step, "metric": "loss", "value": value}
        save_step(saver, step, run_state={"best": best})
    return committed_steps(str(run / "checkpoints"))


def test_the_best_checkpoint_is_kept_listed_and_found(tmp_path: Path) -> None:
    assert saved(tmp_path, {10: 5.0, 20: 3.0, 30: 4.0, 40: float("nan"), 50: 3.0, 60: None}, 2) == [60, 50, 20]
    assert inspect.best_saved_step(str(tmp_path)) == 20
    lines = {line.split()[0]: line for line in inspect.render_table(str(tmp_path)).splitlines()}
    assert lines["20"].endswith("best loss: 3.00000")
    assert "best" not in lines["50"] + lines["60"]


def test_one_that_was_the_best_goes_when_there_is_a_better_one(tmp_path: Path) -> None:
    saved(tmp_path / "checkpoints", {35: None}, 1)  # set aside in a subfolder: it does not count
    assert saved(tmp_path, {10: 1.0, 20: 2.0, 30: 1.5, 40: 1.7, 50: 1.8}, 1, mode="max") == [50, 20]
    assert inspect.best_saved_step(str(tmp_path)) == 20


def test_without_a_policy_there_is_no_best(tmp_path: Path) -> None:
    saved(tmp_path, {10: None}, 1)
    with pytest.raises(BadInput, match=r"no best checkpoint is known; the run needs checkpoint\.best"):
        inspect.best_saved_step(str(tmp_path))


@pytest.mark.parametrize("name", ["checkpoints/step-00000010", "checkpoints", ""])
def test_a_checkpoint_is_copied_and_another_run_goes_on_from_it(tmp_path: Path, name: str) -> None:
    saved(tmp_path / "a", {10: None, 20: None}, 2)
    target, step, state = tmp_path / "b" / "checkpoints", 10 if "step" in name else 20, State(-1)
    assert inspect.copy_to_run(str(tmp_path / "a" / name), str(target.parent), None) == step
    assert committed_steps(str(target)) == [step]
    verify(str(target), step)
    assert restore(str(target), SingleHost(), IDENTITY, state.accept, print).manifest.step == step
    assert state.is_of(step)
    with pytest.raises(BadInput, match="has checkpoints already"):
        inspect.copy_to_run(str(tmp_path / "a"), str(target.parent), 10)
    with contextlib.chdir(target):
        assert inspect.find_checkpoints(f"step-{step:08}") == (".", [step])


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
    before, after = State(10), State(-1)
    before.values["model/empty"] = np.zeros((0, 3), np.float32)
    save_step(host_writer(tmp_path), 10, before)
    assert restore(str(tmp_path), SingleHost(), IDENTITY, after.accept, print) is not None
    assert after.values.pop("model/empty").shape == (0, 3)
    assert after.is_of(10)
    [part] = tmp_path.glob("step-*/part-*")
    whole = part.read_bytes()
    for place in range(0, len(whole), 3):
        part.write_bytes(whole[:place] + bytes([whole[place] ^ 0x41]) + whole[place + 1 :])
        with pytest.raises(Damaged, match="part part-0-of-1"):
            verify(str(tmp_path), 10)


RUN, FOLDER = "gs://bucket/runs/r", "gs://bucket/runs/r/checkpoints"


def test_hosts_wait_for_each_other_longer_than_storage_for_a_part(gcs: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """At the rate at which storage gives up, this part takes 512 s: a host may have it written in 300 s, or not."""
    monkeypatch.setattr(bucket, "timeouts", replace(bucket.timeouts, rate=0.5))
    slowest = bucket.timeouts.deadline + sum(value.nbytes for value in State(0).values.values()) / 0.5
    hosts = Mock(wraps=SingleHost())
    save_step(host_writer(FOLDER, rendezvous=hosts, meeting_seconds=30), 10)
    restore(FOLDER, hosts, IDENTITY, State(0).accept, lambda warning: None, meeting_seconds=30)
    storage.write(f"{FOLDER}/step-00000010/manifest.json", b"damaged for this host")
    with pytest.raises(BadInput):
        restore(FOLDER, hosts, IDENTITY, State(0).accept, lambda warning: None, meeting_seconds=30)
    waits = [(name, seconds) for name, _, *seconds in (call.args for call in hosts.meet.mock_calls)]
    for name, times in (("checkpoint 10", 1), ("restore 10", 2)):  # the others read what is damaged for this host
        assert [seconds[0] >= 30 + slowest for other, seconds in waits if other == name] == [True] * times


def test_the_claim_says_that_there_is_no_such_bucket(gcs: Any) -> None:
    with pytest.raises(BadInput, match="bucket gs://nowhere does not exist"):
        claim("gs://nowhere/runs/r", Cluster(0, ("a",)), SingleHost(), "t", {})
    claim(RUN, Cluster(0, ("a",)), SingleHost(), "t", {"hosts": ["a"]})
    assert json.loads(storage.read(f"{RUN}/attempts/attempt-0000.t.json")) == {"hosts": ["a"], "after": []}


def test_a_checkpoint_becomes_a_model_folder(gcs: Any, tmp_path: Path) -> None:
    runs = Runs(tmp_path)
    runs.train("r", 0, train__steps=20)
    assert export.export_checkpoint(str(runs.path("r")), "gs://bucket/model") == 20
    config = json.loads(storage.read("gs://bucket/model/config.json"))
    assert (config["model_type"], config["vocab_size"], config["pad_token_id"]) == ("bert", small_runs.VOCABULARY, 3)
    assert list(decode(storage.read("gs://bucket/model/model.safetensors"))) == ["w"]
    tokenizer = (tmp_path / "tokenizer" / "tokenizer.json").read_bytes()
    assert storage.read("gs://bucket/model/tokenizer.json") == tokenizer
    assert export.export_checkpoint(str(runs.path("r")), "gs://bucket/model10", step=10) == 10
    with pytest.raises(BadInput, match="no committed step 15; it has 20, 10"):
        export.export_checkpoint(str(runs.path("r")), "gs://bucket/model", step=15)
    (tmp_path / "tokenizer" / "tokenizer.json").write_bytes(tokenizer.replace(b'"w1"', b'"other"'))
    with pytest.raises(BadInput, match=f"tokenizer in {tmp_path}/tokenizer is not the one that .* was trained with"):
        export.export_checkpoint(str(runs.path("r")), "gs://bucket/model")


@pytest.mark.parametrize(("method", "path"), [("DELETE", ""), ("GET", "/o")], ids=["deletion", "listing"])
def test_without_a_right_to_delete_or_list_saves_go_on_and_old_ones_stay(gcs: Any, method: str, path: str) -> None:
    warnings: list[str] = []
    refused = json_response({"error": {"code": 403, "message": "no such access"}}, 403)
    gcs.fault = lambda request: refused if request.method == method and request.path.endswith(path) else None
    saver = host_writer(FOLDER, keep_last=1, warn=warnings.append)
    for step in (10, 20, 30):
        save_step(saver, step)
    gcs.fault = lambda request: None
    assert committed_steps(FOLDER) == [30, 20, 10]
    assert len(warnings) == 1, "warned once"
    assert "old checkpoints stay where they are" in warnings[0]
    assert "no such access" in warnings[0]
    save_step(saver, 40)
    assert committed_steps(FOLDER) == [40]
