"""Weights & Biases and MLflow as they are, offline: a run's numbers arrive in both, through the writer of metrics."""

import json
import struct
from collections.abc import Iterator
from pathlib import Path

import pytest

from training.telemetry.metrics import AttemptInfo, MetricsLog, read_history
from training.telemetry.trackers import MlflowRun
from training.telemetry.writer import MetricsWriter

SETTINGS = {"train": {"steps": 10}, "seed": 1}


@pytest.mark.parametrize("failed", [False, True])
def test_offline_wandb_and_mlflow_record_a_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, failed: bool) -> None:
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    run, warnings = tmp_path / "run-1", list[str]()
    run.mkdir()

    def open_log() -> MetricsLog:
        return MetricsLog(
            AttemptInfo(str(run), 2, 40, "1a2b3c4d", settings=SETTINGS), trackers=("jsonl", "wandb", "mlflow")
        )

    writer = MetricsWriter(open_log, warnings.append)
    for step in (50, 60):
        writer.log(step, {"loss": 100.0 / step, "learning_rate": 0.1})
    writer.finish(120, failed=failed)
    assert warnings == []
    assert [line["step"] for line in read_history(str(run))] == [50, 60]

    from mlflow import MlflowClient

    client = MlflowClient(tracking_uri=(run / "mlflow").as_uri())
    [recorded] = client.search_runs([client.get_experiment_by_name("tpu-launch").experiment_id])
    assert recorded.info.status == ("FAILED" if failed else "FINISHED")
    assert recorded.data.params["train.steps"] == "10"
    assert recorded.data.tags["tpu-launch.run"] == "run-1"
    history = client.get_metric_history(recorded.info.run_id, "train/loss")
    assert [(metric.step, metric.value) for metric in history] == [(50, 2.0), (60, 100.0 / 60)]

    assert sent_to_wandb(run) == ({50: 2.0, 60: 100.0 / 60}, int(failed))


def test_a_record_is_continued_and_not_created_twice(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    opened = [MlflowRun(AttemptInfo(str(tmp_path), 0, 0, token)) for token in ("aa", "aa", "bb")]
    assert opened[0]._run_id == opened[1]._run_id != opened[2]._run_id


def sent_to_wandb(run: Path) -> tuple[dict[int, float], int]:
    """train/loss by step and the exit code, from the file that `wandb sync` would upload."""
    from wandb.proto import wandb_internal_pb2

    [path] = run.glob("wandb/offline-run-*-run-1-2-1a2b3c4d/run-run-1-2-1a2b3c4d.wandb")
    values_by_step, code = {}, -1
    for data in log_records(path.read_bytes()):
        record = wandb_internal_pb2.Record.FromString(data)
        if record.WhichOneof("record_type") == "history":
            items = record.history.item
            values = {item.key or "/".join(item.nested_key): json.loads(item.value_json) for item in items}
            values_by_step[values["_step"]] = values["train/loss"]
        elif record.WhichOneof("record_type") == "exit":
            code = record.exit.exit_code
    return values_by_step, code


def log_records(data: bytes, header: int = 7, block: int = 32768) -> Iterator[bytes]:
    """The records of a LevelDB log behind 7 bytes (https://github.com/google/leveldb/blob/main/doc/log_format.md)."""
    position, record = header, b""
    while position + header <= len(data):
        if block - position % block < header:  # too short for another record: padding
            position += block - position % block
            continue
        length, kind = struct.unpack_from("<HB", data, position + 4)
        record += data[position + header : position + header + length]
        position += header + length
        if kind in (1, 4):  # whole, or the last piece
            yield record
            record = b""
