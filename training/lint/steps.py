"""Runs a few steps on the CPU and checks them by `training.lint.rules`, for `tpu-train check`."""

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
from training.lint.rules import HOST, LintFinding, Shapes, StepChecker, StepTrace, merge_findings
from training.registry import BACKENDS, load
from training.run_setup import open_backend, open_task, prepare_framework
from training.tasks.task import Task

ROWS = 2  # of a batch, for each gradient accumulation: the rules do not depend on it


class StepWatcher(Protocol):
    """Records the operations of steps, for one framework: `step_watcher` of a backend's entry in the registry."""

    def __init__(self, backend: Backend) -> None: ...

    def step(self) -> AbstractContextManager[StepTrace]:
        """Records the step that runs in the block. The trace is complete when the block has ended."""


class CountingWatcher:
    """Watches a framework that traces a step once, by the backend's own counts: compilations, operations on the host.

    PyTorch's watcher sees more (training/backends/torch_xla/lint.py).
    """

    def __init__(self, backend: Backend) -> None:
        self._backend = backend

    @contextmanager
    def step(self) -> Iterator[StepTrace]:
        trace, compiled, known = StepTrace(), self._backend.compilations()[0], set(self._backend.fallbacks())
        yield trace
        trace.compilations = self._backend.compilations()[0] - compiled
        trace.findings += [LintFinding(HOST, "", name) for name in self._backend.fallbacks() if name not in known]


def check_configuration(config: TrainerConfig, steps: int) -> list[LintFinding]:
    """Runs the first `steps` steps of a configuration, and of its evaluation, with small batches on the CPU; returns
    the findings of both. Sets PJRT_DEVICE. Raises BadInput if the data or the model can't be opened."""
    os.environ["PJRT_DEVICE"] = "CPU"
    config = _with_small_batches(config)
    task = open_task(config, cluster := Cluster(0, ("localhost",), run_id="check"))
    backend = open_backend(config, cluster, SingleHost(), task)
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


def check_user_module(module: str, inputs: str, steps: int, shapes: int) -> list[LintFinding]:
    """Runs the first `steps` training steps of a user's own PyTorch module on the CPU; sets PJRT_DEVICE.

    Args:
        module: FILE:FUNCTION; the function returns the module.
        inputs: FILE:FUNCTION; the function returns its batches, which may have `shapes` different shapes.

    Raises:
        BadInput: a function does not exist, or its code fails.
    """
    os.environ["PJRT_DEVICE"] = "CPU"
    prepare_framework("torch-xla")
    from training.backends.torch_xla.lint import check_module

    with _report_user_line(module, inputs):
        build, batches = _load_function("--module", module), _load_function("--inputs", inputs)
        return check_module(build, batches, steps, shapes)


def _with_small_batches(config: TrainerConfig) -> TrainerConfig:
    """Returns the configuration with `ROWS` rows a gradient accumulation, and jit_compile only for TensorFlow."""
    rows = ROWS * config.train.gradient_accumulation
    changes = {
        "global_batch_size": rows,
        "prefetch": 1,
        "jit_compile": config.backend == "tensorflow",  # without XLA, TensorFlow runs what a TPU refuses
    }
    evaluation = config.evaluation.model_copy(update={"batch_size": rows})
    return config.model_copy(update={"train": config.train.model_copy(update=changes), "evaluation": evaluation})


def _evaluation_batches(config: TrainerConfig, task: Task, steps: int) -> Iterator[HostBatch]:
    """Returns the first `steps` evaluation batches; none if the configuration has no evaluation data."""
    return islice(task.evaluation_batches(), steps) if config.data.evaluation else iter(())


def _shapes_of(batch: HostBatch) -> Shapes:
    return {name: np.shape(array) for name, array in batch.arrays.items()}


@contextmanager
def _report_user_line(*functions: str) -> Iterator[None]:
    """Turns an exception into BadInput with the innermost line of the code in these FILE:FUNCTIONs."""
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
    """Imports FILE and returns its FUNCTION. Raises BadInput, naming `option`, if either does not exist."""
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
    """Imports a file, with its folder on sys.path as for a script; once, even if both options name it."""
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
