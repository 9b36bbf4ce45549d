"""Lists the programs of a run, one for each shape of a training batch and of an evaluation batch, and traces them from
the backend's own step without executing them. A checkpoint adds no program: its state is only copied.

One process traces for any slice: it has one CPU device, and the backend's tracer simulates all devices of the slice.
"""

import contextlib
import os
import time
import traceback
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

import numpy as np

from training import storage
from training.accelerators import Accelerator
from training.backends.protocol import BuildBackend
from training.batch import Arrays
from training.config import TrainerConfig
from training.data import tokenizer as tokenizers
from training.data.formats.dataset import TYPES
from training.data.formats.open_dataset import open_dataset
from training.data.sampling.order import batch_lengths
from training.distributed.cluster import Cluster
from training.distributed.rendezvous import SingleHost
from training.errors import BadInput, Exit, TrainError
from training.models.hugging_face import ModelRequirements
from training.preflight.compiler import Program, model_place, require_versions
from training.registry import BACKENDS, TASKS, load
from training.run_setup import prepare_framework
from training.tasks.task import task_class


@dataclass(frozen=True)
class DataFacts:
    """Facts of the data that determine the shapes and the model, beside the configuration."""

    vocabulary: int
    pad: int
    lengths: tuple[int, ...]  # of training batches, ascending
    evaluation_lengths: tuple[int, ...]  # empty without evaluation
    labels: tuple[str, ...] | None  # None if the task has none
    has_pairs: bool = False  # rows are two texts


@dataclass(frozen=True)
class Graph:
    """One program of a run."""

    kind: str  # "training" or "evaluation"
    rows: int  # of the global batch
    length: int

    def __str__(self) -> str:
        return f"{self.kind}, {self.rows} x {self.length}"


def read_facts(config: TrainerConfig) -> DataFacts:
    """Reads the facts from the manifests of the datasets and the tokenizer, without any record. Raises BadInput if one
    is missing or unreadable, or a dataset has rows of another task."""
    task = task_class(config.task)
    try:
        tokens = tokenizers.read(config.data.tokenizer, TASKS[config.task].rows).special
        train = open_dataset(config.data.train)
        evaluation = open_dataset(config.data.evaluation) if config.data.evaluation else None
        for dataset in (train, evaluation):
            if dataset is not None:
                dataset.require(rows=TASKS[config.task].rows)
    except (BadInput, storage.StorageError) as error:
        labels = " and --labels" if task.has_labels else ""
        raise BadInput(
            f"{error}\n  Before there is data, say what it will be: --vocabulary and --sequence-length{labels}"
        ) from None
    return DataFacts(
        tokens.vocabulary,
        tokens.pad,
        batch_lengths(train.records_of_length, config.train.global_batch_size),
        batch_lengths(evaluation.records_of_length, config.evaluation_batch_size) if evaluation else (),
        tuple(train.manifest.labels) if task.has_labels else None,
        train.has_pairs,
    )


def assume_facts(config: TrainerConfig, vocabulary: int, lengths: tuple[int, ...], labels: int | None) -> DataFacts:
    """Returns facts of data that does not exist yet, with padding id 0 and `labels` names (None: the task has none).
    `lengths`: of batches, ascending. Raises BadInput if `labels` or `lengths` do not fit the task."""
    task = task_class(config.task)
    if task.has_labels and labels is None:
        raise BadInput(f"--labels says how many labels there will be: task is {config.task}")
    if not task.has_labels and labels is not None:
        raise BadInput(f"task is {config.task}: its data has no --labels")
    if not task.has_lengths and len(lengths) > 1:
        raise BadInput(f"task is {config.task}: it has one --sequence-length")
    names = None if labels is None else tuple(f"label {number}" for number in range(labels))
    return DataFacts(vocabulary, 0, lengths, lengths if config.data.evaluation else (), names)


def list_graphs(config: TrainerConfig, facts: DataFacts) -> list[Graph]:
    """Returns all programs that a run compiles, training steps first, longest first."""
    rows, evaluation_rows = config.train.global_batch_size, config.evaluation_batch_size
    evaluations = [Graph("evaluation", evaluation_rows, length) for length in reversed(facts.evaluation_lengths)]
    return [*(Graph("training", rows, length) for length in reversed(facts.lengths)), *evaluations]


def empty_batch(config: TrainerConfig, graph: Graph, facts: DataFacts) -> Arrays:
    """Returns a global batch of the program's shape, filled with zeros."""
    arrays = task_class(config.task).empty_batch(config, graph.rows, graph.length, len(facts.labels or ()))
    return {**arrays, TYPES: np.zeros_like(arrays["input_ids"])} if facts.has_pairs else arrays


class Untraceable(TrainError):
    """The step can't be traced as one program. The message says why, and where in the model's code."""

    exit_code = Exit.DOES_NOT_FIT


@dataclass(frozen=True)
class TracedProgram:
    """A traced program of the run."""

    graph: Graph
    program: Program
    resident_bytes: int  # state that is in HBM, but not among the program's arguments
    seconds: float  # that tracing took


class ProgramTracer(Protocol):
    """Traces the programs of one backend for a slice: `tracer` of a backend's entry in the registry."""

    def __init__(self, open_backend: BuildBackend, target: Accelerator) -> None:
        """Keeps `open_backend`, which `open` calls. Raises CompilerUnavailable for untested versions."""

    def open(self) -> Mapping[str, int]:
        """Builds the model, unless a usable one is built. Returns the bytes of each tensor of the state on a device."""

    def trace(self, kind: str, batch: Arrays) -> Program:
        """Returns the program of a step ("training") or of an "evaluation" on a global batch, without executing it."""

    def close(self) -> None:
        """Releases the model and its memory."""


def trace_programs(
    config: TrainerConfig, facts: DataFacts, graphs: Sequence[Graph], target: Accelerator
) -> list[TracedProgram]:
    """Traces `graphs` for a slice; returns the programs in this order. Sets PJRT_DEVICE to CPU. Raises BadInput if
    the framework is not installed or the model can't be built, CompilerUnavailable for untested versions, and
    Untraceable or DataDependentProgram for a step that is not a single program."""
    os.environ["PJRT_DEVICE"] = "CPU"
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    require_versions()
    tracer_class = load(BACKENDS[config.backend].tracer)
    prepare_framework(config.backend)
    config = config.for_device("TPU")
    tracer: ProgramTracer = tracer_class(partial(_open_backend, config, facts, target.name), target)
    programs = []
    with contextlib.closing(tracer):
        # Trace evaluations first: they don't change the state, while a traced step may.
        for graph in sorted(graphs, key=lambda graph: graph.kind != "evaluation"):
            began = time.monotonic()
            sizes = tracer.open()
            try:
                program = tracer.trace(graph.kind, empty_batch(config, graph, facts))
            except TrainError:
                raise
            except Exception as error:  # of the model's own code
                why = f"{type(error).__name__}: {error}{model_place(traceback.extract_tb(error.__traceback__))}"
                raise Untraceable(f"the program of {graph} can't be built: {why}") from None
            resident = sum(sizes.values()) - sum(sizes[name] for name in program.arguments.values())
            programs.append(TracedProgram(graph, program, resident, time.monotonic() - began))
    return sorted(programs, key=lambda traced: graphs.index(traced.graph))


def _open_backend(config: TrainerConfig, facts: DataFacts, accelerator_type: str, backend_class: Any) -> Any:
    """Returns a backend of this class, opened as the only host, with a model for data with these facts."""
    longest = max((*facts.lengths, *facts.evaluation_lengths))
    requirements = ModelRequirements(facts.vocabulary, facts.pad, longest, TASKS[config.task].head, facts.labels)
    return backend_class(config, Cluster(0, ("localhost",), accelerator_type), SingleHost(), requirements)
