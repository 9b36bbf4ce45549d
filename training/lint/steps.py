"""`tpu-train check`: a few steps on the CPU, and which of the rules of `training.lint.rules` they break.

What a step's operations are is watched by the framework's module in training/backends.
"""

from __future__ import annotations

import importlib.util
import os
import sys
import traceback
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, closing, contextmanager
from itertools import islice
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from training.backends.protocol import Asks, Backend
from training.config import TrainerConfig
from training.distributed.cluster import Cluster
from training.distributed.rendezvous import SingleHost
from training.errors import BadInput, TrainError
from training.lint.rules import Finding, Judge, Shapes, Watched, merged
from training.run_setup import open_backend, open_task, require
from training.tasks.task import HostBatch, Task

ROWS = 2  # of a batch, for each gradient accumulation: what is checked does not depend on it


class Watch(Protocol):
    """A framework's eyes."""

    def step(self) -> AbstractContextManager[Watched]:
        """Watches what runs inside; complete when the block has ended."""


def check(config: TrainerConfig, steps: int) -> list[Finding]:
    """Runs the steps that this configuration would run, with small batches, and a part of its evaluation. Raises
    BadInput."""
    os.environ["PJRT_DEVICE"] = "CPU"
    rows = ROWS * config.train.gradient_accumulation
    # TensorFlow without XLA runs what a TPU refuses.
    train = config.train.model_copy(
        update={"global_batch_size": rows, "prefetch": 1, "jit_compile": config.backend == "tensorflow"}
    )
    config = config.model_copy(
        update={"train": train, "evaluation": config.evaluation.model_copy(update={"batch_size": rows})}
    )
    cluster = Cluster(0, ("localhost",), run_id="check")
    task = open_task(config, cluster)
    backend = open_backend(config, cluster, SingleHost(), task, "check")
    watch = open_watch(config.backend, backend)
    training, evaluating = Judge(task.shapes), Judge(task.shapes)
    with closing(task.batches(0)) as batches:
        for number, batch in enumerate(islice(batches, steps)):
            with watch.step() as watched:
                pending = backend.step(number, batch.arrays, Asks())
            pending.outcome()
            training.see(number, _shapes_of(batch), watched)
    for number, batch in enumerate(_evaluation(config, task, steps)):
        with watch.step() as watched:
            pending = backend.evaluate(batch.arrays, Asks())
        pending.outcome()
        evaluating.see(number, _shapes_of(batch), watched)
    return merged(training.findings(), evaluating.findings())


def check_files(module: str, inputs: str, steps: int, shapes: int) -> list[Finding]:
    """The same for a user's own PyTorch module. `module` and `inputs` are FILE:FUNCTION, as `torch_watch.check_module`
    takes the functions. Raises BadInput."""
    os.environ["PJRT_DEVICE"] = "CPU"
    require("torch_xla", "torch-xla")
    from training.backends.torch_xla.lint import check_module

    with _users_code(module, inputs):
        return check_module(_function("--module", module), _function("--inputs", inputs), steps, shapes)


@contextmanager
def _users_code(*files: str) -> Iterator[None]:
    """What goes wrong in there is named with its line."""
    try:
        yield
    except TrainError:
        raise
    except Exception as error:
        folders = tuple(str(Path(file.rpartition(":")[0]).resolve().parent) for file in files)
        frames = traceback.extract_tb(error.__traceback__)
        own = [frame for frame in frames if frame.filename.startswith(folders)] or frames
        raise BadInput(f"{own[-1].filename}:{own[-1].lineno}: {type(error).__name__}: {error}") from None


def _function(option: str, where: str) -> Callable[[], Any]:
    file, _, name = where.rpartition(":")
    if not file or not name:
        raise BadInput(f"{option} is {where!r}, and must be FILE:FUNCTION, for example my_model.py:build")
    path = Path(file).resolve()
    if not path.is_file():
        raise BadInput(f"{option}: {file}: no such file")
    sys.path.insert(0, str(path.parent))  # what stands beside it can be imported, as in a script
    spec = importlib.util.spec_from_file_location(path.stem, path)
    if spec is None or spec.loader is None:
        raise BadInput(f"{option}: {file} is not a Python file")
    loaded = sys.modules.get(path.stem) if getattr(sys.modules.get(path.stem), "__file__", None) == str(path) else None
    if loaded is None:
        loaded = sys.modules[path.stem] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(loaded)
    function = getattr(loaded, name, None)
    if not callable(function):
        raise BadInput(f"{option}: {file} has no function {name}")
    found: Callable[[], Any] = function
    return found


def open_watch(name: str, backend: Backend | None) -> Watch:
    """The eyes of a framework."""
    if name == "torch-xla":
        from training.backends.torch_xla.lint import TorchWatch

        return TorchWatch()
    from training.lint.counting import Counting

    assert backend is not None
    return Counting(backend)


def _evaluation(config: TrainerConfig, task: Task, steps: int) -> Iterator[HostBatch]:
    return islice(task.evaluation_batches(), steps) if config.data.evaluation else iter(())


def _shapes_of(batch: HostBatch) -> Shapes:
    return {name: np.shape(array) for name, array in batch.arrays.items()}
