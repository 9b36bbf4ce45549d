"""Figures over a whole evaluation set: between the steps of a run, and with `tpu-train evaluate` of a checkpoint or of
a model folder.

Each record counts once, on any number of hosts: totals are added over batches and hosts, and only then divided.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from training import storage
from training.backends.protocol import Backend
from training.batch import Signals, StepResult
from training.checkpoint.admin import find_checkpoints
from training.checkpoint.format import Manifest
from training.checkpoint.reader import load_tensors
from training.checkpoint.safetensors_file import Damaged
from training.checkpoint.store import read_manifest
from training.config import Model, TrainerConfig
from training.data import tokenizer as tokenizers
from training.distributed.cluster import Cluster
from training.distributed.rendezvous import Rendezvous
from training.distributed.shutdown import ShutdownRequest
from training.errors import BadInput, TrainError
from training.models.hugging_face import WEIGHTS, read_config, read_labels
from training.registry import task_of_model
from training.run_setup import agree, open_backend, open_task
from training.storage.hub import model_folder
from training.tasks.task import Task, task_class


@dataclass(frozen=True)
class Evaluated:
    """Of what, over what, and the figures."""

    model: str  # a checkpoint's folder, or a model folder
    step: int | None
    data: str
    examples: int
    figures: dict[str, float]
    confusion: list[list[float]] | None  # of a classifier, in the order of the dataset's labels
    labels: tuple[str, ...] | None

    def as_json(self) -> dict[str, Any]:
        told = {"model": self.model, "step": self.step, "data": self.data, "examples": self.examples, **self.figures}
        return {**told, "labels": self.labels, "confusion": self.confusion} if self.confusion else told


def over_all(task: Task, backend: Backend, rendezvous: Rendezvous, stopping: ShutdownRequest, doing: str) -> StepResult:
    """The totals over the evaluation set. When its `signals.stop` is set, all hosts have broken off: the totals are of a
    part."""
    total = StepResult.empty()
    for number, batch in enumerate(task.evaluation_batches()):
        rendezvous.set_phase(f"{doing}, batch {number}")
        total = total.plus(backend.evaluate(batch.arrays, Signals(stop=stopping.requested)).result())
        rendezvous.check()
        if total.signals.stop:
            break
    return total


def evaluate(
    place: str,
    config: TrainerConfig,
    cluster: Cluster,
    rendezvous: Rendezvous,
    stopping: ShutdownRequest,
    step: int | None = None,
) -> Evaluated:
    """`place` is a run's folder (its newest checkpoint, unless `step` is given), a model folder in Hugging Face's
    layout, or a name on the Hub.

    The network is built as it says; data, batch size and precision are the configuration's. Called by all hosts. Raises
    BadInput for what does not fit together."""
    if config.data.evaluation is None:
        raise BadInput("there is nothing to evaluate on: set data.evaluation")
    place = model_folder(place)
    folder = storage.stat(storage.join(place, WEIGHTS)) is not None
    if folder and step is not None:
        raise BadInput(f"{place} is a model folder, and has no steps: leave out --step")
    checkpoint = None if folder else _checkpoint(place, step)
    config = config.model_copy(update={"model": checkpoint[1].model if checkpoint else Model(path=place)})
    task = open_task(config, cluster)
    assert task.data.evaluation is not None
    facts = {"configuration": config.hash, "model": _name(place, checkpoint), **task.data.hashes()}
    token = agree(rendezvous, facts, config.rendezvous.start_seconds)
    _require_alike(place, task, checkpoint)
    backend = open_backend(config, cluster, rendezvous, task, token)
    if checkpoint:
        _load(checkpoint, backend)
    stopping.nothing_to_save = False
    total = over_all(task, backend, rendezvous, stopping, "evaluation")
    if total.signals.stop:
        raise TrainError("asked to stop: the evaluation was broken off")
    counts = (
        None if total.counts is None or task.labels is None else total.counts.reshape(len(task.labels), -1).tolist()
    )
    evaluation = task.data.evaluation
    return Evaluated(
        _name(place, checkpoint), checkpoint[2].step if checkpoint else None, evaluation.url, evaluation.records, task.figures(total), counts, task.labels
    )  # fmt: skip


Checkpoint = tuple[str, TrainerConfig, Manifest]  # the folder of checkpoints, what the run was, what the checkpoint is


def _checkpoint(place: str, step: int | None) -> Checkpoint:
    try:
        below, steps = find_checkpoints(place)
    except BadInput as error:
        raise BadInput(f"{place} is neither a model folder (it has no {WEIGHTS}) nor a run's: {error}") from None
    chosen = steps[0] if step is None else step
    if chosen not in steps:
        raise BadInput(f"{below} has no committed step {chosen}; it has {', '.join(map(str, steps))}")
    try:
        manifest = read_manifest(below, chosen)
    except Damaged as error:
        raise BadInput(f"{below}: step {chosen} is damaged: {error}; choose another with --step") from None
    return below, TrainerConfig.model_validate(manifest.config), manifest


def _name(place: str, checkpoint: Checkpoint | None) -> str:
    return f"{checkpoint[0]}, step {checkpoint[2].step}" if checkpoint else place


def _require_alike(place: str, task: Task, checkpoint: Checkpoint | None) -> None:
    """The model must have been made for this tokenizer and these labels: otherwise the figures would mean nothing."""
    if checkpoint:
        identity = checkpoint[2].identity
        kind, labels, tokenizer = identity.get("task"), identity.get("labels"), identity.get("tokenizer")
    else:
        values = read_config(place)
        kind = task_of_model(values)
        labels = read_labels(values) if task_class(kind).has_labels else None
        tokenizer = tokenizers.read(place).hash if storage.stat(storage.join(place, "tokenizer.json")) else None
    wanted = task.identity()
    for what, have, want in (
        ("task", kind, wanted["task"]),
        ("labels", _list(labels), _list(task.labels)),
        ("tokenizer", tokenizer or wanted["tokenizer"], wanted["tokenizer"]),
    ):
        if have != want:
            raise BadInput(
                f"{place} can't be evaluated on {task.data.train.url}: the {what} of the model: {have}; of the data: {want}"
            )


def _list(labels: Sequence[str] | None) -> str:
    return "none" if labels is None else ", ".join(labels)


def _load(checkpoint: Checkpoint, backend: Backend) -> None:
    below, _, manifest = checkpoint
    try:
        load_tensors(
            below,
            manifest,
            lambda tensors: backend.load_state(
                {name: value for name, value in tensors.items() if name.startswith("model/")}
            ),
        )
    except Damaged as error:
        raise BadInput(f"{below}: step {manifest.step} can't be used: {error}") from None
