"""Before the first step: all hosts agree on what they run, and the framework's backend is opened."""

from __future__ import annotations

import glob
import hashlib
import importlib.util
import json
import os
import re
import secrets
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, cast

from training import storage
from training.backends.protocol import Backend, OpenBackend
from training.checkpoint.admin import has_checkpoint
from training.config import TrainerConfig, batch_mistake
from training.distributed.cluster import Cluster
from training.distributed.rendezvous import Rendezvous
from training.errors import BadInput
from training.models.export import export_checkpoint
from training.models.hugging_face import CONFIG, WEIGHTS, ModelRequirements
from training.registry import BACKENDS, TASKS, load
from training.tasks.task import Task, task_class

_CLAIM = re.compile(r"attempt-\d+\.[0-9a-f]+\.json")


def open_task(config: TrainerConfig, cluster: Cluster) -> Task:
    """The task that the configuration names, with its data. Raises BadInput."""
    task = task_class(config.task)(config, cluster)
    best = config.checkpoint.best
    if best is not None and best.metric not in task.figure_names:
        raise BadInput(
            f"checkpoint.best.metric: an evaluation of task {config.task} has no {best.metric}; it has {', '.join(task.figure_names)}"
        )
    return task


def code_hash() -> str:
    """A hash of the trainer's source: what a checkpoint was written by, and what all hosts must have alike."""
    digest = hashlib.sha256()
    folder = Path(__file__).parent
    for path in sorted(folder.rglob("*.py")):
        digest.update(str(path.relative_to(folder)).encode() + b"\0" + path.read_bytes() + b"\0")
    return digest.hexdigest()[:16]


def agree(rendezvous: Rendezvous, facts: Mapping[str, str], start_seconds: float) -> str:
    """Meets all hosts, compares what each is about to run, and returns a token that only this group of processes has.
    Raises BadInput."""
    told = rendezvous.meet("start", {"facts": dict(facts), "token": secrets.token_hex(4)}, start_seconds)
    found = disagreements([each["facts"] for each in told])
    if found:
        raise BadInput("the hosts are not about to run the same thing:\n  " + "\n  ".join(found))
    token: str = told[0]["token"]
    return token


def claim(folder: str, cluster: Cluster, rendezvous: Rendezvous, token: str, record: Mapping[str, Any]) -> str:
    """Writes what this attempt is to the run's folder, and makes sure that all hosts have that folder in common: their
    parts go there.

    So an output that can't be written, or that every host has for itself, is found before the first step. Returns where
    it was written. Raises BadInput.
    """
    url = storage.join(folder, "attempts", f"attempt-{cluster.attempt:04d}.{token}.json")
    if cluster.is_first:
        try:
            storage.write(url, json.dumps(record, indent=1).encode() + b"\n")
        except storage.StorageError as error:
            if isinstance(error, storage.NotFound) or not storage.is_remote(url):
                raise BadInput(f"output: {error}") from None
            raise
    rendezvous.meet("claimed")
    blind = [worker for worker, sees in enumerate(rendezvous.meet("seen", storage.stat(url) is not None)) if not sees]
    if blind:
        raise BadInput(
            f"output {folder} is not one folder for all hosts: host 0 wrote {url}, and host {', host '.join(map(str, blind))} can't see it; "
            "use gs://, or a folder that all hosts share"
        )
    return url


def fence(folder: str, cluster: Cluster) -> Callable[[], None]:
    """What host 0 calls before each commit: raises BadInput when the run was started again after this attempt. So of
    two trainers of one run, whether by two launchers or because a host of an old attempt woke up, the one that was
    started last goes on, and it went on from what the other had committed."""
    attempts = storage.join(folder, "attempts")

    def claims() -> set[str]:
        return {each.url for each in storage.listing(attempts) if _CLAIM.fullmatch(storage.name_of(each.url))}

    known = claims() if cluster.is_first else set()

    def check() -> None:
        later = sorted(claims() - known)
        if later:
            raise BadInput(
                f"run {cluster.run_id} was started again while this attempt {cluster.attempt} was training ({later[0]}); only the newest start may commit. "
                "If both were meant, give one of them another run id or output"
            )

    return check


def disagreements(told: list[Mapping[str, str]]) -> list[str]:
    """A line for each fact in which hosts differ from host 0, naming them. `told` is in worker order."""
    lines = []
    for what, value in told[0].items():
        others = {worker: facts.get(what) for worker, facts in enumerate(told) if facts.get(what) != value}
        if others:
            lines.append(
                f"{what}: host 0 has {value}, "
                + ", ".join(f"host {worker} {other}" for worker, other in others.items())
            )
    return lines


def model_identity(config: TrainerConfig) -> dict[str, Any]:
    """The network, as far as a checkpoint must agree with it."""
    model = config.model
    if model.path is not None:
        return {"model.path": model.path}
    names = ("hidden_size", "layers", "heads", "intermediate_size", "max_positions")
    return {
        "model": model.family,
        **{f"model.{name}": value for name, value in zip(names, model.shape, strict=True)},
        "model.vocabulary_size": model.vocabulary_size,
    }


def with_starting_model(config: TrainerConfig, folder: str, cluster: Cluster, rendezvous: Rendezvous) -> TrainerConfig:
    """Where `model.path` is a run's folder, or one checkpoint in it: host 0 writes that model to `start` in this run's
    folder, and it is read there.

    Later attempts find it there, whatever has become of the other run. Raises BadInput.
    """
    path = config.model.path
    if path is None or storage.stat(storage.join(path, CONFIG)) is not None or not has_checkpoint(path):
        return config
    start = storage.join(folder, "start")
    if cluster.is_first and storage.stat(storage.join(start, WEIGHTS)) is None:
        export_checkpoint(path, start)
    rendezvous.meet("starting model")
    return config.model_copy(update={"model": config.model.model_copy(update={"path": start})})


def device_kind() -> str:
    """TPU or CPU: what PJRT_DEVICE says, or else whether this machine shows TPU chips."""
    return os.environ.get("PJRT_DEVICE") or (
        "TPU" if glob.glob("/dev/accel[0-9]*") or glob.glob("/dev/vfio/[0-9]*") else "CPU"
    )


def open_backend(config: TrainerConfig, cluster: Cluster, rendezvous: Rendezvous, task: Task, token: str) -> Backend:
    """Imports the framework and builds the model. Raises BadInput when the batch does not divide over the devices that
    there are."""
    os.environ["PJRT_DEVICE"] = device_kind()
    if os.environ["PJRT_DEVICE"] == "TPU":
        os.environ.update(load(BACKENDS[config.backend].tpu_environment)(cluster, os.environ))
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    tokens = task.data.tokens
    requirements = ModelRequirements(
        tokens.vocabulary, tokens.pad, task.data.sequence_length, TASKS[config.task].head, task.labels
    )
    backend = import_backend(config.backend)(config, cluster, rendezvous, requirements, token)
    mistake = batch_mistake(config, cluster.hosts, backend.devices)
    if mistake:
        raise BadInput(mistake)
    return backend


def import_backend(name: str) -> OpenBackend:
    """The class of a registered backend, its framework imported. Raises BadInput where that is not installed."""
    prepare_framework(name)
    return cast(OpenBackend, load(BACKENDS[name].backend))


def prepare_framework(name: str) -> None:
    """Sets the environment in which a backend's framework is to be imported. Raises BadInput where it is not
    installed."""
    entry = BACKENDS[name]
    if importlib.util.find_spec(entry.requires) is None:
        raise BadInput(
            f"backend: {name} needs {entry.requires}, which is not installed here: run in the image of that backend"
        )
    for variable, value in entry.defaults.items():
        os.environ.setdefault(variable, value)
