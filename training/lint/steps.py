"""The procedure of `tpu-train check`: runs a few steps on the CPU, and checks them by `training.lint.rules`."""

from __future__ import annotations

import importlib.util
import os
import sys
import traceback
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, closing, contextmanager
from itertools import islice
from pathlib import Path
from types import ModuleType
from typing import Any, Protocol

import numpy as np

from training.backends.protocol import Backend
from training.batch import HostBatch, Signals
from training.config import TrainerConfig
from training.distributed.cluster import Cluster
from training.distributed.rendezvous import SingleHost
from training.errors import BadInput, TrainError
from training.lint.rules import Finding, Shapes, StepChecker, StepTrace, merge_findings
from training.registry import BACKENDS, load
from training.run_setup import open_backend, open_task, prepare_framework
from training.tasks.task import Task

ROWS = 2  # of a batch, for each gradient accumulation: the rules do not depend on it


class StepWatcher(Protocol):
    """Records what steps do, for one framework: `step_watcher` of a backend's entry in the registry."""

    def __init__(self, backend: Backend) -> None:
        """Watches the steps of `backend`."""

    def step(self) -> AbstractContextManager[StepTrace]:
        """Watches the step that runs in the block; the trace is complete when the block has ended."""


def check_configuration(config: TrainerConfig, steps: int) -> list[Finding]:
    """Runs the first steps of this configuration with small batches, and a part of its evaluation. Raises BadInput."""
    os.environ["PJRT_DEVICE"] = "CPU"
    config = _with_small_batches(config)
    task = open_task(config, cluster := Cluster(0, ("localhost",), run_id="check"))
    backend = open_backend(config, cluster, SingleHost(), task, "check")
    watcher: StepWatcher = load(BACKENDS[config.backend].step_watcher)(backend)
    training, evaluation = StepChecker(task.shapes), StepChecker(task.shapes)
    with closing(task.batches(0)) as batches:
        for number, batch in enumerate(islice(batches, steps)):
            with watcher.step() as trace:
                pending = backend.step(number, batch.arrays, Signals())
            pending.result()
            training.add_step(number, _shapes_of(batch), trace)
    for number, batch in enumerate(_evaluation_batches(config, task, steps)):
        with watcher.step() as trace:
            pending = backend.evaluate(batch.arrays, Signals())
        pending.result()
        evaluation.add_step(number, _shapes_of(batch), trace)
    return merge_findings(training.findings(), evaluation.findings())


def check_user_module(module: str, inputs: str, steps: int, shapes: int) -> list[Finding]:
    """Runs the first training steps of a user's own PyTorch module.

    Args:
        module: FILE:FUNCTION; the function returns the module.
        inputs: FILE:FUNCTION; the function returns its batches.
        steps: how many to run.
        shapes: how many different shapes the batches may have.

    Raises:
        BadInput: a function is not there, or its code fails.
    """
    os.environ["PJRT_DEVICE"] = "CPU"
    prepare_framework("torch-xla")
    from training.backends.torch_xla.lint import check_module

    with _place_in_user_code(module, inputs):
        build, batches = _load_function("--module", module), _load_function("--inputs", inputs)
        return check_module(build, batches, steps, shapes)


def _with_small_batches(config: TrainerConfig) -> TrainerConfig:
    rows = ROWS * config.train.gradient_accumulation
    changes = {
        "global_batch_size": rows,
        "prefetch": 1,
        "jit_compile": config.backend == "tensorflow",  # without XLA, TensorFlow runs what a TPU refuses
    }
    evaluation = config.evaluation.model_copy(update={"batch_size": rows})
    return config.model_copy(update={"train": config.train.model_copy(update=changes), "evaluation": evaluation})


def _evaluation_batches(config: TrainerConfig, task: Task, steps: int) -> Iterator[HostBatch]:
    return islice(task.evaluation_batches(), steps) if config.data.evaluation else iter(())


def _shapes_of(batch: HostBatch) -> Shapes:
    return {name: np.shape(array) for name, array in batch.arrays.items()}


@contextmanager
def _place_in_user_code(*functions: str) -> Iterator[None]:
    """Turns an exception of the code in these FILE:FUNCTIONs into BadInput with the innermost of its own lines."""
    try:
        yield
    except TrainError:
        raise
    except Exception as error:
        folders = tuple(str(Path(function.rpartition(":")[0]).resolve().parent) for function in functions)
        frames = traceback.extract_tb(error.__traceback__)
        user_frames = [frame for frame in frames if frame.filename.startswith(folders)] or frames
        place = f"{user_frames[-1].filename}:{user_frames[-1].lineno}"
        raise BadInput(f"{place}: {type(error).__name__}: {error}") from None


def _load_function(option: str, reference: str) -> Callable[[], Any]:
    """The function that FILE:FUNCTION names. Raises BadInput."""
    file, _, name = reference.rpartition(":")
    if not file or not name:
        raise BadInput(f"{option} is {reference!r}, and must be FILE:FUNCTION, for example my_model.py:build")
    path = Path(file).resolve()
    if not path.is_file():
        raise BadInput(f"{option}: {file}: no such file")
    function = getattr(_load_module(option, file, path), name, None)
    if not callable(function):
        raise BadInput(f"{option}: {file} has no function {name}")
    loaded: Callable[[], Any] = function
    return loaded


def _load_module(option: str, file: str, path: Path) -> ModuleType:
    """Imports a file as a script would: files beside it can be imported too. Imported once for both options."""
    sys.path.insert(0, str(path.parent))
    spec = importlib.util.spec_from_file_location(path.stem, path)
    if spec is None or spec.loader is None:
        raise BadInput(f"{option}: {file} is not a Python file")
    loaded = sys.modules.get(path.stem)
    if loaded is not None and getattr(loaded, "__file__", None) == str(path):
        return loaded
    module = sys.modules[path.stem] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
