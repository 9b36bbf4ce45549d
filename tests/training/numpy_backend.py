"""A backend of a few numbers, so that the real loop, `training.trainer.train`, trains in milliseconds and without a
framework: one weight vector, moved by each batch's records. Steps can be told to be not finite."""

from collections.abc import Callable, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np

from tests.container import small_runs
from tests.plain_backend import PlainBackend
from training import storage as default_storage
from training.batch import Arrays, Signals, StepResult
from training.checkpoint.snapshot import Snapshot
from training.checkpoint.tensors import TensorSpec
from training.config import TrainerConfig, from_document
from training.distributed.rendezvous import SingleHost
from training.distributed.shutdown import ShutdownRequest
from training.run_setup import Dependencies
from training.storage import Storage
from training.telemetry.host_progress import PhaseTimer
from training.trainer import train
from training.yaml_file import Document

# What of a step is not finite: "loss" and its update, or the "update" alone.
Fault = Callable[[int], str | None]


def finished(value: StepResult) -> Any:
    return SimpleNamespace(result=lambda: value)


class NumpyBackend(PlainBackend):
    """`training.backends.protocol.Backend` of one device."""

    in_flight = 2

    def __init__(self, config: TrainerConfig, fault: Fault, evaluation_loss: float) -> None:
        self.config, self.fault, self.evaluation_loss = config, fault, evaluation_loss
        self.state = {"model/w": np.full(4, 9.0, np.float32), "adam_m/w": np.zeros(4, np.float32)}

    def step(self, number: int, batch: Arrays, signals: Signals) -> Any:
        fault, loss, norm = self.fault(number), float(np.abs(self.state["model/w"]).mean()), 0.5
        if fault:
            norm = float("nan")
            loss = float("nan") if fault == "loss" else loss
        skipped = fault is not None and self.config.train.on_nonfinite == "skip"
        if not skipped:
            for value in self.state.values():
                value[...] = value * 0.98 + (np.nan if fault else 1e-3 * (int(batch["input_ids"].sum()) % 7))
        sums = {"loss": loss, "weight": 1.0, "correct": 0.0}
        return finished(StepResult(sums, signals, gradient_norm=norm, skipped=skipped))

    def evaluate(self, batch: Arrays, signals: Signals) -> Any:
        return finished(StepResult({"loss": self.evaluation_loss, "weight": 1.0, "correct": 0.0}, signals))

    def tensor_specs(self) -> dict[str, TensorSpec]:
        return {name: TensorSpec("F32", value.shape, value.nbytes) for name, value in self.state.items()}

    def snapshot_state(self, buffers: Mapping[str, memoryview]) -> Snapshot:
        for name, buffer in buffers.items():
            buffer[:] = self.state[name].tobytes()
        return Snapshot()


class Runs:
    """Runs in one folder; each call of `train` is an attempt."""

    def __init__(self, folder: Path, storage: Storage = default_storage) -> None:
        self.folder, self.storage = small_runs.prepare(folder), storage

    def train(
        self,
        run_id: str,
        attempt: int,
        fault: Fault = lambda number: None,
        *,
        evaluation_loss: float = 2.0,
        shutdown: ShutdownRequest | None = None,
        timer: PhaseTimer | None = None,
        **changes: Any,
    ) -> dict[str, Any]:
        changes = {"train__steps": 40, "checkpoint__every_steps": 10, "export__at_end": False, **changes}
        settings = from_document(Document("test", small_runs.document(self.folder, **changes), {}))
        dependencies = Dependencies(
            storage=self.storage,
            trackers=("jsonl",),
            open_backend=lambda config, *others: NumpyBackend(config, fault, evaluation_loss),
            profiles=lambda _: None,
        )
        host, stop = small_runs.this_host(run_id, attempt), shutdown or ShutdownRequest()
        return train(settings, host, SingleHost(), stop, timer or PhaseTimer(), dependencies)

    def path(self, run_id: str) -> Path:
        return self.folder / "runs" / run_id
