"""Traces the programs that a run's devices would execute from the backend's own step, without executing them.

One process traces for any slice: it has one CPU device, and the backend's tracer simulates all devices of the slice.
"""

from __future__ import annotations

import os
import re
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from training.backends.protocol import BuildBackend
from training.batch import Arrays
from training.config import TrainerConfig
from training.distributed.cluster import Cluster
from training.distributed.rendezvous import SingleHost
from training.errors import Exit, TrainError
from training.models.hugging_face import ModelRequirements
from training.preflight.compiler import Program, require_versions
from training.preflight.shapes import DataFacts, Graph, empty_batch
from training.registry import BACKENDS, TASKS, load
from training.run_setup import prepare_framework


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

    def __init__(self, open_backend: BuildBackend, devices: int) -> None:
        """Raises CompilerUnavailable."""

    def open(self) -> Mapping[str, int]:
        """Builds the model, unless it is built. Returns the bytes of each tensor of the state."""

    def trace(self, kind: str, batch: Arrays) -> Program:
        """Returns the program of a step ("training") or of an "evaluation" on a global batch, without executing it."""

    def close(self) -> None:
        """Releases the model and its memory."""


def trace_programs(
    config: TrainerConfig,
    facts: DataFacts,
    graphs: Sequence[Graph],
    devices: int,
    now: Callable[[], float] = time.monotonic,
) -> list[TracedProgram]:
    """Traces each of `graphs` for a slice of `devices` devices, and returns the programs in their order.

    Raises:
        BadInput: the backend's framework is not installed, or the model can't be built.
        CompilerUnavailable: the installed versions are untested.
        Untraceable, DataDependentProgram: a step is not a single program.
    """
    os.environ["PJRT_DEVICE"] = "CPU"
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    require_versions()
    prepare_framework(config.backend)
    config = config.for_device("TPU")

    def open_backend(backend_class: Any) -> Any:
        longest = max((*facts.lengths, *facts.evaluation_lengths))
        head = TASKS[config.task].head
        requirements = ModelRequirements(facts.vocabulary, facts.pad, longest, head, facts.labels)
        return backend_class(config, Cluster(0, ("localhost",)), SingleHost(), requirements, "preflight")

    tracer: ProgramTracer = load(BACKENDS[config.backend].tracer)(open_backend, devices)
    programs = []
    # Trace evaluations first: they don't change the state, while a traced step may.
    for graph in sorted(graphs, key=lambda graph: graph.kind != "evaluation"):
        began = now()
        sizes = tracer.open()
        with _explain_errors(graph):
            program = tracer.trace(graph.kind, empty_batch(config, graph))
        resident = sum(sizes.values()) - sum(sizes[name] for name in program.arguments.values())
        programs.append(TracedProgram(graph, program, resident, now() - began))
    tracer.close()
    return sorted(programs, key=lambda traced: graphs.index(traced.graph))


@contextmanager
def _explain_errors(graph: Graph) -> Iterator[None]:
    """Turns an error of the model's own code into an Untraceable with its file and line."""
    try:
        yield
    except TrainError:
        raise
    except Exception as error:
        place = _model_place(error)
        raise Untraceable(f"the program of {graph} can't be built: {type(error).__name__}: {error}{place}") from None


def _model_place(error: BaseException) -> str:
    """Returns the innermost line of an error's traceback outside the frameworks and this package, or ""."""
    own_folder = str(Path(__file__).parent)
    for frame in reversed(traceback.extract_tb(error.__traceback__)):
        in_framework = re.search("site-packages/(torch|tensorflow|tf_keras)", frame.filename)
        if not in_framework and not frame.filename.startswith(own_folder):
            return f" ({frame.filename}:{frame.lineno}: {frame.line})"
    return ""
