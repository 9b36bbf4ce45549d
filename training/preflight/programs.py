"""The programs that a run's devices would execute, traced from the backend's own step and never run.

One process traces for any slice: it has one CPU device, and simulates all devices of the slice
(`training.backends.torch_xla.tracing.simulate_devices`).
"""

from __future__ import annotations

import ctypes
import gc
import os
import re
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from training.batch import Signals
from training.config import TrainerConfig
from training.distributed.cluster import Cluster
from training.distributed.rendezvous import SingleHost
from training.errors import Exit, TrainError
from training.models.hugging_face import ModelRequirements
from training.preflight.compiler import (
    COMPILER_VERSIONS,
    TRACING_VERSIONS,
    Program,
    hash_hlo,
    require_versions,
)
from training.preflight.shapes import DataFacts, Graph, empty_batch
from training.registry import TASKS
from training.run_setup import import_backend, prepare_framework


class Untraceable(TrainError):
    """The step can't be had as one program: the message says why, and where in the model's code."""

    exit_code = Exit.DOES_NOT_FIT


@dataclass(frozen=True)
class TracedProgram:
    """A program of the run, and what else is in HBM while it runs."""

    graph: Graph
    program: Program
    resident_bytes: int  # state that is not among its arguments
    seconds: float


def trace_programs(
    config: TrainerConfig,
    facts: DataFacts,
    graphs: list[Graph],
    devices: int,
    now: Callable[[], float] = time.monotonic,
) -> list[TracedProgram]:
    """The program of each graph for so many devices, in their order. Raises Untraceable, BadInput,
    CompilerUnavailable."""
    os.environ["PJRT_DEVICE"] = "CPU"
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    trace = _trace_tensorflow if config.backend == "tensorflow" else _trace_torch_xla
    return trace(config, facts, graphs, devices, now)


def _trace_torch_xla(
    config: TrainerConfig, facts: DataFacts, graphs: list[Graph], devices: int, now: Callable[[], float]
) -> list[TracedProgram]:
    """One program for all devices, which the compiler partitions."""
    require_versions({**COMPILER_VERSIONS, **TRACING_VERSIONS})
    open_backend = import_backend(config.backend)
    from training.backends.torch_xla import tracing

    tracing.simulate_devices(devices)
    programs, backend = [], None
    # An evaluation leaves the state alone; a traced step leaves it uncomputed. So a step comes last on its backend.
    for graph in sorted(graphs, key=lambda graph: graph.kind != "evaluation"):
        began = now()
        backend = backend or _open_backend(config, facts, open_backend)
        with _explained(graph):
            program = _trace_step(backend, config, graph)
        sizes = {name: info.size for name, info in backend.tensor_specs().items()}
        resident = sum(sizes.values()) - sum(sizes[name] for name in program.arguments.values())
        programs.append(TracedProgram(graph, program, resident, now() - began))
        if graph.kind == "training":
            backend = None
            _release_memory()
    backend = None
    _release_memory()
    return sorted(programs, key=lambda traced: graphs.index(traced.graph))


def _trace_step(backend: Any, config: TrainerConfig, graph: Graph) -> Program:
    from training.backends.torch_xla import tracing

    arrays, signals = empty_batch(config, graph), Signals()
    network = backend.upload()
    state = tracing.tensor_ids(backend.state_tensors())
    with tracing.record_module_names(network), tracing.forbid_data_dependence():
        if graph.kind == "training":
            sums = backend.trace_step(0, arrays, signals)
            outputs = [*backend.state_tensors().values(), sums]
        else:
            outputs = [backend.trace_evaluation(arrays, signals)]
        return tracing.extract_program(outputs, state)


def _release_memory() -> None:
    """Returns the memory of a deleted backend to the system, for the compiler; glibc would keep it."""
    gc.collect()
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)


def _trace_tensorflow(
    config: TrainerConfig, facts: DataFacts, graphs: list[Graph], devices: int, now: Callable[[], float]
) -> list[TracedProgram]:
    """One program, which each device runs on its own rows."""
    require_versions()
    prepare_framework(config.backend)
    from training.backends.tensorflow.lowered import Lowered

    backend, programs = _open_backend(config, facts, Lowered), []
    backend.stand_in_for(devices)
    sizes = {name: info.size for name, info in backend.tensor_specs().items()}
    for graph in graphs:
        began = now()
        with _explained(graph):
            text, hlo, state = backend.lower(graph.kind == "training", empty_batch(config, graph))
        donated = frozenset(state) if graph.kind == "training" else frozenset()
        program = Program(text, donated, state, hash_hlo(hlo), replicated=True)
        resident = sum(sizes.values()) - sum(sizes[name] for name in state.values())
        programs.append(TracedProgram(graph, program, resident, now() - began))
    return programs


def _open_backend(config: TrainerConfig, facts: DataFacts, opener: Any) -> Any:
    longest = max((*facts.lengths, *facts.evaluation_lengths))
    requirements = ModelRequirements(facts.vocabulary, facts.pad, longest, TASKS[config.task].head, facts.labels)
    return opener(config, Cluster(0, ("localhost",)), SingleHost(), requirements, "preflight")


@contextmanager
def _explained(graph: Graph) -> Iterator[None]:
    """Turns an error of the model's own code into one message with its place."""
    try:
        yield
    except TrainError:
        raise
    except Exception as error:
        place = _model_place(error)
        raise Untraceable(f"the program of {graph} can't be built: {type(error).__name__}: {error}{place}") from None


def _model_place(error: BaseException) -> str:
    """The innermost place of an error outside the frameworks and outside of this package."""
    own_folder = str(Path(__file__).parent)
    for frame in reversed(traceback.extract_tb(error.__traceback__)):
        in_framework = re.search("site-packages/(torch|tensorflow|tf_keras)", frame.filename)
        if not in_framework and not frame.filename.startswith(own_folder):
            return f" ({frame.filename}:{frame.lineno}: {frame.line})"
    return ""
