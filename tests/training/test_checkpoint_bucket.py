"""A run's folder in a bucket that can misbehave: saves, restores, metrics, the claim and the exported model."""

import json
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from launcher.emulator.http_server import json_response
from tests.training.checkpoint_writers import IDENTITY, State, host_writer, save_step
from training import storage
from training.checkpoint.format import committed_steps
from training.checkpoint.reader import restore
from training.checkpoint.tensors import decode
from training.config import TrainerConfig
from training.distributed.agreement import claim
from training.distributed.cluster import Cluster
from training.distributed.rendezvous import SingleHost
from training.errors import BadInput
from training.models import export
from training.storage import gcs as bucket

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


class ModelState(State):
    """Tensors that can be exported as a model."""

    def __init__(self, step: int) -> None:
        weight, moment = np.full((3, 128), step, np.float32), np.full(7, -step, np.float32)
        self.values = {"model/bert.embeddings.word_embeddings.weight": weight, "adam_m/x": moment}


def save(*steps: int) -> None:
    saver = host_writer(FOLDER, config=TrainerConfig.model_validate(CONFIG).canonical())
    for step in steps:
        saver.save(step, ModelState(step).layout(), ModelState(step).copy, {"first_loss": 1.5})
    saver.wait()


class Patient(SingleHost):
    """Notes how long the hosts would wait for each other."""

    def __init__(self) -> None:
        self.seconds: dict[str, float | None] = {}

    def meet(self, name: str, payload: Any = None, seconds: float | None = None) -> list[Any]:
        self.seconds[name] = seconds
        return [payload]


def test_hosts_wait_for_each_other_longer_than_storage_for_a_part(gcs: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """At the rate at which storage gives up, this part takes 512 s: a host may have it written in 300 s, or not."""
    monkeypatch.setattr(bucket, "timeouts", replace(bucket.timeouts, rate=0.5))
    part = sum(value.nbytes for value in State(0).values.values())
    slowest = bucket.timeouts.deadline + part / 0.5
    hosts = Patient()
    save_step(host_writer(FOLDER, rendezvous=hosts, meeting_seconds=30), 10)
    restore(FOLDER, hosts, IDENTITY, State(0).accept, lambda warning: None, meeting_seconds=30)
    for name in ("checkpoint 10", "restore 10"):
        assert (hosts.seconds[name] or 0) >= 30 + slowest, name
    hosts.seconds.clear()
    storage.write(f"{FOLDER}/step-00000010/manifest.json", b"damaged for this host")
    with pytest.raises(BadInput):
        restore(FOLDER, hosts, IDENTITY, State(0).accept, lambda warning: None, meeting_seconds=30)
    assert (hosts.seconds["restore 10"] or 0) >= 30 + slowest, "the others read it meanwhile"


def test_the_claim_says_that_there_is_no_such_bucket(gcs: Any) -> None:
    with pytest.raises(BadInput, match="bucket gs://nowhere does not exist"):
        claim("gs://nowhere/runs/r", Cluster(0, ("a",)), SingleHost(), "t", {})
    claim(RUN, Cluster(0, ("a",)), SingleHost(), "t", {"hosts": ["a"]})
    assert json.loads(storage.read(f"{RUN}/attempts/attempt-0000.t.json")) == {"hosts": ["a"], "after": []}


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
