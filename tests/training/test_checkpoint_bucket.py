"""A run's folder in a bucket: saves, restores, metrics, the claim and the exported model. The server enforces
preconditions and can misbehave."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from launcher.emulator.http_server import HttpResponse
from training import storage
from training.checkpoint.format import committed_steps
from training.checkpoint.reader import restore
from training.checkpoint.retention import Keep
from training.checkpoint.safetensors_file import TensorSpec, decode
from training.checkpoint.snapshot import Snapshot
from training.checkpoint.writer import CheckpointWriter, RunDescription
from training.config import TrainerConfig
from training.distributed.cluster import Cluster
from training.distributed.fence import claim
from training.distributed.rendezvous import SingleHost
from training.errors import BadInput
from training.models import export
from training.storage import gcs as bucket
from training.telemetry import metrics

RUN = "gs://bucket/runs/r"
FOLDER = f"{RUN}/checkpoints"
TOKENIZER = {
    "added_tokens": [{"id": 0, "content": "[MASK]", "special": True}, {"id": 1, "content": "<pad>", "special": True}],
    "model": {"vocab": {"a": 2}},
}
CONFIG = {
    "model": {"name": "bert-tiny"},
    "data": {"train": "gs://bucket/data", "tokenizer": "gs://bucket/tokenizer"},
    "train": {"steps": 9, "global_batch_size": 8},
    "output": "gs://bucket/runs",
}


class State:
    def __init__(self, step: int) -> None:
        self.values = {
            "model/bert.embeddings.word_embeddings.weight": np.full((3, 128), step, np.float32),
            "adam_m/x": np.full(7, -step, np.float32),
        }

    def layout(self) -> dict[str, TensorSpec]:
        return {name: TensorSpec("F32", value.shape, value.nbytes) for name, value in self.values.items()}

    def copy(self, places: Mapping[str, memoryview]) -> Snapshot:
        return Snapshot(
            (np.frombuffer(place, np.float32), self.values[name].reshape(-1)) for name, place in places.items()
        )

    def accept(self, tensors: Mapping[str, tuple[TensorSpec, memoryview]]) -> None:
        for name, (info, data) in tensors.items():
            self.values[name] = np.frombuffer(bytes(data), np.float32).reshape(info.shape)


def save(*steps: int, keep: int = 2, token: str = "t") -> CheckpointWriter:
    config = TrainerConfig.model_validate(CONFIG).canonical()
    saver = CheckpointWriter(
        FOLDER,
        Cluster(0, ("h",), run_id="r"),
        SingleHost(),
        RunDescription({"seed": 1}, config, "code", token),
        Keep(keep),
    )
    for step in steps:
        saver.save(step, State(step).layout(), State(step).copy, {"first_loss": 1.5})
    saver.wait()
    return saver


class Patient(SingleHost):
    """Notes how long the hosts would wait for each other."""

    def __init__(self) -> None:
        self.seconds: dict[str, float | None] = {}

    def meet(self, name: str, payload: Any = None, seconds: float | None = None) -> list[Any]:
        self.seconds[name] = seconds
        return [payload]


def test_hosts_wait_for_each_other_longer_than_storage_waits_for_a_part(
    gcs: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At the rate at which storage gives up, this part takes 3,192 s: a host may have it written in 300 s, or not."""
    monkeypatch.setattr(bucket, "timeouts", replace(bucket.timeouts, rate=0.5))
    part = sum(value.nbytes for value in State(0).values.values())
    slowest = bucket.timeouts.deadline + part / 0.5
    hosts = Patient()
    saver = CheckpointWriter(
        FOLDER, Cluster(0, ("h",), run_id="r"), hosts, RunDescription({"seed": 1}, {}, "code", "t"), Keep(2),
        meeting_seconds=30,
    )  # fmt: skip
    saver.save(10, State(10).layout(), State(10).copy, {})
    saver.wait()
    restore(FOLDER, hosts, {"seed": 1}, State(0).accept, lambda warning: None, meeting_seconds=30)
    for name in ("checkpoint 10", "restore 10"):
        assert (hosts.seconds[name] or 0) >= 30 + slowest, name


def load() -> tuple[int, State, list[str]]:
    state, warnings = State(0), list[str]()
    restored = restore(FOLDER, SingleHost(), {"seed": 1}, state.accept, warnings.append)
    assert restored is not None
    return restored.manifest.step, state, warnings


def test_saves_are_kept_deleted_and_restored(gcs: Any) -> None:
    assert save(10, 20, 30).committed == 30
    assert committed_steps(FOLDER) == [30, 20]
    assert [stat.url for stat in storage.listing(f"{FOLDER}/step-00000010")] == []
    step, state, warnings = load()
    assert (step, warnings) == (30, [])
    assert state.values["adam_m/x"].tolist() == [-30.0] * 7


def test_a_part_that_was_replaced_is_noticed(gcs: Any) -> None:
    save(10, 20)
    part = next(stat.url for stat in storage.listing(f"{FOLDER}/step-00000020") if "part-" in stat.url)
    storage.write(part, storage.read(part)[:-1] + b"\1")
    step, _, warnings = load()
    assert step == 10
    assert "crc32c" in warnings[0]


def test_a_manifest_is_written_by_exactly_one_of_two_trainers(gcs: Any) -> None:
    save(10)
    url = f"{RUN}/checkpoints/step-00000010/manifest.json"
    manifest = storage.read(url)
    save(10, token="other")
    assert storage.read(url) == manifest
    assert load()[0] == 10


def test_a_bucket_that_answers_503_for_a_while_costs_nothing(gcs: Any) -> None:

    answers = iter(range(1000))
    gcs.fault = lambda request: HttpResponse(503, b"") if next(answers) % 3 == 0 else None
    save(10, 20)
    assert load()[0] == 20


def test_the_claim_says_that_there_is_no_such_bucket(gcs: Any) -> None:
    with pytest.raises(BadInput, match="bucket gs://nowhere does not exist"):
        claim("gs://nowhere/runs/r", Cluster(0, ("a",)), SingleHost(), "t", {})
    claim(RUN, Cluster(0, ("a",)), SingleHost(), "t", {"hosts": ["a"]})
    assert json.loads(storage.read(f"{RUN}/attempts/attempt-0000.t.json")) == {"hosts": ["a"], "after": []}


def test_metrics_grow_in_small_objects(gcs: Any) -> None:
    log = metrics.MetricsLog(RUN, 0, 0)
    log.log(1, {"loss": 2.5})
    log.finish()
    assert storage.read(f"{RUN}/metrics.jsonl") == b'{"step": 1, "loss": 2.5}\n'


def test_a_checkpoint_becomes_a_model_folder(gcs: Any) -> None:
    storage.write("gs://bucket/tokenizer/tokenizer.json", json.dumps(TOKENIZER).encode())
    save(10, 20)
    assert export.export_checkpoint(RUN, "gs://bucket/model") == 20
    config = json.loads(storage.read("gs://bucket/model/config.json"))
    assert (config["model_type"], config["vocab_size"], config["pad_token_id"]) == ("bert", 3, 1)
    weights = decode(storage.read("gs://bucket/model/model.safetensors"))
    assert list(weights) == ["bert.embeddings.word_embeddings.weight"]
    assert storage.read("gs://bucket/model/tokenizer.json") == json.dumps(TOKENIZER).encode()
    assert export.export_checkpoint(RUN, "gs://bucket/model10", step=10) == 10
    with pytest.raises(BadInput, match="no committed step 15; it has 20, 10"):
        export.export_checkpoint(RUN, "gs://bucket/model", step=15)


def test_without_the_right_to_delete_saves_go_on_and_old_checkpoints_stay(gcs: Any) -> None:
    warnings: list[str] = []
    refused = HttpResponse(
        403,
        b'{"error": {"code": 403, "message": "no storage.objects.delete access"}}',
        {"Content-Type": "application/json"},
    )
    gcs.fault = lambda request: refused if request.method == "DELETE" else None
    saver = CheckpointWriter(
        FOLDER,
        Cluster(0, ("h",), run_id="r"),
        SingleHost(),
        RunDescription({}, {}, "c", "t"),
        Keep(1),
        warn=warnings.append,
    )
    for step in (10, 20, 30):
        saver.save(step, State(step).layout(), State(step).copy, {})
    saver.wait()
    assert committed_steps(FOLDER) == [30, 20, 10]
    assert len(warnings) == 1, "warned once"
    assert "old checkpoints stay where they are" in warnings[0]
    assert "storage.objects.delete" in warnings[0]
    gcs.fault = lambda request: None
    saver.save(40, State(40).layout(), State(40).copy, {})
    saver.wait()
    assert committed_steps(FOLDER) == [40]
