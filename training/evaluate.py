"""Evaluates a model over a whole evaluation set: between the steps of a run, and for `tpu-train evaluate`.

Each record counts once, on any number of hosts: totals are added over batches and hosts, and only then divided.
"""

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from training import storage
from training.backends.protocol import Backend
from training.batch import SUMS, Pending, Signals, StepResult
from training.checkpoint.admin import choose_step, find_checkpoints
from training.checkpoint.format import Manifest, read_manifest
from training.checkpoint.reader import load_tensors
from training.checkpoint.tensors import Damaged
from training.config import Model, TrainerConfig, restore
from training.data import tokenizer as tokenizers
from training.distributed.agreement import agree
from training.distributed.cluster import Cluster
from training.distributed.rendezvous import Rendezvous
from training.distributed.shutdown import ShutdownRequest
from training.errors import BadInput, StopRequested
from training.models.hugging_face import WEIGHTS, has_weights, read_config, read_labels
from training.registry import TASKS, task_of_model
from training.run_setup import open_backend, open_task
from training.storage.hub import model_folder
from training.tasks.task import Task, task_class
from training.telemetry.console import warn
from training.telemetry.metrics import finite_or_none


@dataclass(frozen=True)
class Evaluated:
    """The figures of a model over a dataset."""

    model: str  # a checkpoint's folder, or a model folder
    step: int | None
    data: str
    examples: int
    figures: dict[str, float]
    confusion: list[list[float]] | None  # of a classifier, in the order of the dataset's labels
    labels: tuple[str, ...] | None

    def as_json(self) -> dict[str, Any]:
        """Returns one flat JSON object: model, step, data, examples, the figures by name (null for one that is not
        finite, whose name is in "not_finite"), and for a classifier labels and confusion matrix."""
        figures = finite_or_none(self.figures)
        lost = [name for name, value in figures.items() if value is None]
        values = {"model": self.model, "step": self.step, "data": self.data, "examples": self.examples, **figures}
        if lost:
            values["not_finite"] = lost
        return {**values, "labels": self.labels, "confusion": self.confusion} if self.confusion else values


def evaluate_all(
    task: Task,
    backend: Backend,
    rendezvous: Rendezvous,
    shutdown: ShutdownRequest,
    phase: str,
    on_batch: Callable[[], None] = lambda: None,
) -> StepResult:
    """Returns the totals over the evaluation set, or a part of it if all hosts stopped early (`signals.stop`); all call
    it. Warns of replaced damaged records. Other hosts see `phase` meanwhile; `on_batch` is called before each batch.
    Raises BadInput, StorageError, LostPeer, StopRequested, and the backend's errors."""
    total, replaced = StepResult(dict.fromkeys(SUMS, 0.0), Signals()), 0
    in_flight: deque[Pending] = deque()
    for number, batch in enumerate(task.evaluation_batches()):
        rendezvous.set_phase(f"{phase}, batch {number}")
        on_batch()
        replaced += batch.replaced
        in_flight.append(backend.evaluate(batch.arrays, Signals(stop=shutdown.requested)))
        if len(in_flight) > backend.in_flight:
            total = total.plus(in_flight.popleft().result())
        rendezvous.check()
        if total.signals.stop:
            break
    for pending in in_flight:
        total = total.plus(pending.result())
    if replaced:
        assert task.data.evaluation is not None
        warn(
            f"{phase}: {replaced} damaged records of this host's part of {task.data.evaluation.url} were replaced by "
            "others (data.on_corrupt: skip), so the figures are not exact; write its shards again"
        )
    return total


def evaluate(
    place: str,
    config: TrainerConfig,
    cluster: Cluster,
    rendezvous: Rendezvous,
    shutdown: ShutdownRequest,
    step: int | None = None,
) -> Evaluated:
    """Evaluates the model of `place`: a run's folder (its checkpoint of `step`, None: the newest), a model folder in
    Hugging Face's layout, or a name on the Hub. `config` decides data, batch size and precision. All hosts call it.
    Raises BadInput when model and data are absent or do not fit together, StopRequested when a host was asked to stop,
    LostPeer when one is lost; UnusableTpu, StorageError. Ends the process if opening the devices takes longer than
    rendezvous.start_seconds."""
    if config.data.evaluation is None:
        raise BadInput("there is nothing to evaluate on: set data.evaluation")
    place = model_folder(place)
    is_model_folder = has_weights(place)
    if is_model_folder and step is not None:
        raise BadInput(f"{place} is a model folder, and has no steps: leave out --step")
    folder, manifest = (place, None) if is_model_folder else _open_checkpoint(place, step)
    name, network = place, dict[str, Any](model=Model(path=place), lora=None)
    if manifest:
        name = f"{folder}, step {manifest.step}"
        trained = restore(manifest.config, name)
        network = {"model": trained.model, "lora": trained.lora}
    config = config.model_copy(update=network)
    task = open_task(config, cluster)
    assert task.data.evaluation is not None
    facts = {"configuration": config.hash, "model": name, **task.data.hashes()}
    agree(rendezvous, facts, config.rendezvous.start_seconds)
    _require_same_task(place, task, manifest)
    backend = open_backend(config, cluster, rendezvous, task)
    if manifest:
        _load_weights(folder, manifest, backend)
    shutdown.nothing_to_save = False
    total = evaluate_all(task, backend, rendezvous, shutdown, "evaluation")
    if total.signals.stop:
        raise StopRequested("asked to stop: the evaluation was broken off")
    return Evaluated(
        model=name,
        step=manifest.step if manifest else None,
        data=task.data.evaluation.url,
        examples=task.data.evaluation.records,
        figures=task.figures(total),
        confusion=task.confusion(total.counts),
        labels=task.labels,
    )


def _load_weights(folder: str, manifest: Manifest, backend: Backend) -> None:
    """Gives the backend a checkpoint's weights, not the optimizer's state. Raises BadInput if they are damaged."""
    try:
        load_tensors(
            folder, manifest, backend.load_state,
            choose=lambda name, spec: backend.slice_to_load(name, spec) if name.startswith("model/") else None,
        )  # fmt: skip
    except Damaged as error:
        raise BadInput(f"{folder}: step {manifest.step} can't be used: {error}") from None


def _open_checkpoint(place: str, step: int | None) -> tuple[str, Manifest]:
    """Returns the checkpoint folder of a run (`place`: as for `find_checkpoints`), and the manifest of `step` (None:
    the newest). Raises BadInput if there is none, or it is damaged."""
    try:
        folder, steps = find_checkpoints(place)
    except BadInput as error:
        raise BadInput(f"{place} is neither a model folder (it has no {WEIGHTS}) nor a run's: {error}") from None
    chosen = choose_step(folder, steps, step)
    try:
        return folder, read_manifest(folder, chosen)
    except Damaged as error:
        raise BadInput(f"{folder}: step {chosen} is damaged: {error}; choose another with --step") from None


def _require_same_task(place: str, task: Task, manifest: Manifest | None) -> None:
    """Raises BadInput unless the model was made for this task, tokenizer and labels: figures would mean nothing.
    Without a manifest, reads config.json and, if present, the tokenizer of the model folder `place`. Raises
    StorageError."""
    if manifest:
        identity = manifest.identity
        kind, labels, tokenizer = identity.get("task"), identity.get("labels"), identity.get("tokenizer")
    else:
        values = read_config(place)
        kind = task_of_model(values)
        labels = read_labels(values) if task_class(kind).has_labels else None
        rows = TASKS[kind].rows
        tokenizer = tokenizers.read(place, rows).hash if storage.stat(storage.join(place, "tokenizer.json")) else None
    data = task.identity()
    for name, of_model, of_data in (
        ("task", kind, data["task"]),
        ("labels", _join(labels), _join(task.labels)),
        ("tokenizer", tokenizer or data["tokenizer"], data["tokenizer"]),
    ):
        if of_model != of_data:
            raise BadInput(
                f"{place} can't be evaluated on {task.data.train.url}: the {name} of the model: {of_model}; "
                f"of the data: {of_data}"
            )


def _join(labels: Sequence[str] | None) -> str:
    """Returns labels in one line for messages; "none" for None."""
    return "none" if labels is None else ", ".join(labels)
