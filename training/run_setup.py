"""Before the first step: opens the data, makes all hosts agree on what they run, claims the run's folder, and opens the
framework's backend."""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from training import storage as default_storage
from training.backends.protocol import Backend, OpenBackend
from training.checkpoint.admin import has_checkpoint
from training.config import TrainerConfig, batch_mistake
from training.data.sampling.order import ORDER_VERSION
from training.distributed.agreement import agree, claim, code_hash, fence
from training.distributed.cluster import Cluster, device_kind, tensorflow_environment
from training.distributed.rendezvous import Rendezvous
from training.distributed.shutdown import ShutdownRequest
from training.errors import BadInput, TrainError, UnusableTpu
from training.machine import SYSTEM, Machine
from training.models.export import export_checkpoint
from training.models.hub import Push
from training.models.hugging_face import CONFIG, WEIGHTS, ModelRequirements, build_model_config
from training.profiler import Tracer, folder_of
from training.registry import BACKENDS, TASKS, load
from training.storage import Storage, join
from training.tasks.task import Task, task_class
from training.telemetry.console import Console
from training.telemetry.host_progress import HostProgress, PhaseTimer


@dataclass(frozen=True)
class Run:
    """One attempt of a run on this host."""

    config: TrainerConfig
    cluster: Cluster
    rendezvous: Rendezvous
    shutdown: ShutdownRequest
    timer: PhaseTimer
    host_progress: HostProgress
    console: Console
    task: Task
    code: str  # hash of the trainer's source
    token: str  # that only this group of processes has
    record_url: str  # of this attempt's record
    identity: Mapping[str, Any]  # data, network, seed, ...: what must equal a checkpoint's to continue from it
    fence: Callable[[], None]  # raises when this group of processes may commit no more
    dependencies: Dependencies

    @property
    def folder(self) -> str:
        return join(self.config.output, self.cluster.run_id)

    @property
    def model_folder(self) -> str:
        return join(self.folder, "model")

    @property
    def program(self) -> str:
        """Returns "<hash of configuration>.<hash of code>": equal for attempts that train in the same way."""
        return f"{self.config.hash}.{self.code}"

    @property
    def precision(self) -> str:
        """Returns the precision of matrix products on this host's devices, "fp32" or "bf16"."""
        return self.config.for_device(device_kind()).train.precision

    def model_config(self) -> dict[str, Any]:
        """Returns the values of config.json for the network that is trained, with the task's head. Downloads a
        model.path on the Hub. Raises BadInput and StorageError as `build_model_config`."""
        needs = model_requirements(self.config, self.task)
        return build_model_config(self.config.model, needs, self.config.train.dropout, self.task.data.tokens.end)

    def is_hurried(self) -> bool:
        """Returns whether this host was asked to stop: the machine is being taken away."""
        return self.shutdown.requested

    def step_seconds(self) -> float:
        """Returns the seconds that this attempt spent in steps and waiting for their batches."""
        return self.timer.seconds.get("step", 0.0) + self.timer.seconds.get("data_wait", 0.0)


def open_run(
    config: TrainerConfig,
    cluster: Cluster,
    rendezvous: Rendezvous,
    shutdown: ShutdownRequest,
    timer: PhaseTimer,
    host_progress: HostProgress,
    dependencies: Dependencies,
) -> Run:
    """Opens the data, makes sure that all hosts run the same configuration, code and data, and writes this attempt's
    record to the run's folder, after which older starts may not commit. All hosts call it. Raises BadInput if hosts
    differ, the data does not fit together, the folder is not shared, or a tracker is not installed; StorageError,
    LostPeer, StopRequested."""
    machine, storage = dependencies.machine, dependencies.storage
    require_trackers(config.telemetry.trackers)
    with timer.phase("dataset"):
        rendezvous.set_phase("opening the data")
        task = dependencies.open_task(config, cluster)
    with timer.phase("start"):
        code = code_hash()
        facts = {"configuration": config.hash, "code": code, **task.data.hashes()}
        token = agree(rendezvous, facts, config.rendezvous.start_seconds, machine)
        record = {
            "run_id": cluster.run_id,
            "attempt": cluster.attempt,
            "began": round(machine.clock.time(), 3),
            "accelerator": cluster.accelerator_type if device_kind() == "TPU" else None,
            "hosts": cluster.all_addresses,
            "code": code,
            "config": config.canonical(),
        }
        folder = join(config.output, cluster.run_id)
        own = claim(folder, cluster, rendezvous, token, record, storage)
        identity = {
            **task.identity(),
            **model_identity(config),
            "data.order": ORDER_VERSION,
            "seed": config.seed,
            "train.global_batch_size": config.train.global_batch_size,
        }
        return Run(
            config, cluster, rendezvous, shutdown, timer, host_progress, Console(cluster.is_first), task, code, token,
            own.url, identity, fence(folder, cluster, own, storage), dependencies,
        )  # fmt: skip


def require_trackers(names: Sequence[str]) -> None:
    """Raises BadInput for a tracker whose package is not installed here."""
    for name in names:
        if importlib.util.find_spec(name) is None:
            raise BadInput(
                f"telemetry.trackers: {name} is not installed here: install it in your image, or leave it out"
            )


def open_task(config: TrainerConfig, cluster: Cluster) -> Task:
    """Opens the data of the task that the configuration names, and starts the threads that read it, which the task's
    `source.close()` ends. Raises BadInput if data is absent, damaged or does not fit together; StorageError."""
    return task_class(config.task)(config, cluster)


def model_identity(config: TrainerConfig) -> dict[str, Any]:
    """Returns the settings of the network that must equal a checkpoint's for a resume: `model.path` with LoRA's
    settings but `merge`, or the values of `model.config`, or family, sizes and vocabulary."""
    model = config.model
    if model.path is not None:
        lora = {} if config.lora is None else {"lora": config.lora.model_dump(exclude={"merge"})}
        return {"model.path": model.path, **lora}
    if model.config is not None:
        return {"model.config": model.config}
    names = ("hidden_size", "layers", "heads", "intermediate_size", "max_positions")
    return {
        "model": model.family,
        **{f"model.{name}": value for name, value in zip(names, model.shape, strict=True)},
        "model.vocabulary_size": model.vocabulary_size,
    }


def with_starting_model(config: TrainerConfig, folder: str, cluster: Cluster, rendezvous: Rendezvous) -> TrainerConfig:
    """Returns the configuration, unchanged unless `model.path` is another run's folder or one checkpoint in it: then
    host 0 writes that model to `start` in this run's `folder`, the new `model.path`, unless an earlier attempt did, and
    all hosts wait for it. All hosts call it. Raises BadInput for a damaged checkpoint; StorageError; LostPeer, on other
    hosts also if host 0 needs longer than rendezvous.start_seconds; StopRequested."""
    path, start = config.model.path, join(folder, "start")
    if path is None or default_storage.stat(join(path, CONFIG)) is not None:
        return config
    is_written = default_storage.stat(join(start, WEIGHTS)) is not None  # the other run may be gone since
    if not is_written and not has_checkpoint(path):
        return config
    if cluster.is_first and not is_written:
        export_checkpoint(path, start, merge=True)
    rendezvous.meet("starting model", None, config.rendezvous.start_seconds)
    return config.model_copy(update={"model": config.model.model_copy(update={"path": start})})


def model_requirements(config: TrainerConfig, task: Task) -> ModelRequirements:
    """Returns what the data and the task demand of a model: vocabulary, sequence length, head, labels."""
    tokens, head = task.data.tokens, TASKS[config.task].head
    return ModelRequirements(tokens.vocabulary, tokens.pad, task.data.sequence_length, head, task.labels)


def open_backend(config: TrainerConfig, cluster: Cluster, rendezvous: Rendezvous, task: Task) -> Backend:
    """Sets the device's environment variables, imports the framework, opens the devices and builds the model. Ends the
    process if that takes longer than rendezvous.start_seconds. Raises BadInput, for a framework that is not installed
    or a batch that does not divide over the real devices for instance, UnusableTpu, and StorageError."""
    set_device_environment(config.backend, cluster)
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    requirements = model_requirements(config, task)
    config = config.for_device(device_kind())
    with rendezvous.limit("opening the devices", config.rendezvous.start_seconds):
        try:
            prepare_framework(config.backend)
            backend_class: OpenBackend = load(BACKENDS[config.backend].backend)
        except Exception as error:  # importing TensorFlow may open the TPU
            if isinstance(error, ImportError | TrainError) or os.environ["PJRT_DEVICE"] != "TPU":
                raise
            raise UnusableTpu(str(error), cluster.accelerator_type) from None
        backend = backend_class(config, cluster, rendezvous, requirements)
    if mistake := batch_mistake(config, cluster.hosts, backend.devices):
        raise BadInput(mistake)
    return backend


def prepare_devices(name: str, cluster: Cluster) -> None:
    """Sets the environment for importing the framework of the backend `name` without a run, for `check-devices`. Raises
    BadInput if it is not installed, or the accelerator is unknown or has another number of hosts."""
    if name == "tensorflow" and cluster.hosts > 1 and device_kind() == "TPU":
        os.environ["PJRT_DEVICE"] = "TPU"
        os.environ.update(tensorflow_environment(cluster, {"TPU_NAME": "grpc"}))  # workers have the chips
    else:
        set_device_environment(name, cluster)
    prepare_framework(name)


def set_device_environment(name: str, cluster: Cluster) -> None:
    """Sets PJRT_DEVICE (if unset), and on a TPU the variables that the framework of the backend `name` needs, else adds
    its flags for CPUs to XLA_FLAGS; before the framework is imported. Raises BadInput if the accelerator is not given,
    unknown or has another number of hosts, or TensorFlow is not the wheel for TPUs."""
    os.environ["PJRT_DEVICE"] = device_kind()
    if os.environ["PJRT_DEVICE"] == "TPU":
        os.environ.update(load(BACKENDS[name].tpu_environment)(cluster, os.environ))
    elif (flags := BACKENDS[name].cpu_flags) not in (given := os.environ.get("XLA_FLAGS", "")):
        os.environ["XLA_FLAGS"] = f"{given} {flags}".strip()


def open_tracer(backend: str) -> Tracer:
    """Imports and opens a backend's profiler, which does not record yet. Raises BadInput if it has none."""
    reference = BACKENDS[backend].profiler
    if reference is None:
        raise BadInput(f"backend: {backend} has no profiles yet: --set backend=torch-xla has them")
    tracer: Tracer = load(reference)()
    return tracer


def prepare_framework(name: str) -> None:
    """Sets unset environment variables that the framework of the backend `name` reads at its import. Raises BadInput if
    it is not installed."""
    entry = BACKENDS[name]
    if importlib.util.find_spec(entry.requires) is None:
        raise BadInput(
            f"backend: {name} needs {entry.requires}, which is not installed here: run in the image of that backend"
        )
    for variable, value in entry.defaults.items():
        os.environ.setdefault(variable, value)


@dataclass(frozen=True)
class Dependencies:
    """The machine, storage and services that a run uses. A simulation gives others."""

    machine: Machine = SYSTEM
    storage: Storage = default_storage  # where the run's folder is
    trackers: tuple[str, ...] = ("jsonl", "tensorboard")  # where its numbers go
    push: Callable[[Sequence[str]], Push] = Push  # starts an upload to the Hub
    profiles: Callable[[int], Path | None] = folder_of  # where a worker's trainer is asked for them, if at all
    open_task: Callable[[TrainerConfig, Cluster], Task] = open_task
    open_backend: Callable[[TrainerConfig, Cluster, Rendezvous, Task], Backend] = open_backend
