"""The programs that a run's devices would execute, from the backend's own step: traced, never run.

One process traces for any slice: it has one CPU device, and stands in for all devices of the slice
(`compiler.stand_in_for`).
"""

from __future__ import annotations

import ctypes
import gc
import os
import re
import time
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from training.backends.protocol import Asks
from training.config import TrainerConfig
from training.distributed.cluster import Cluster
from training.distributed.rendezvous import SingleHost
from training.errors import Exit, TrainError
from training.models.hugging_face import ModelRequirements
from training.preflight import compiler
from training.preflight.compiler import Program
from training.preflight.shapes import Facts, Graph, batch
from training.run_setup import require, torch_xla


class Untraceable(TrainError):
    """The step can't be had as one program: the message says why, and where in the model's code."""

    exit_code = Exit.DOES_NOT_FIT


@dataclass(frozen=True)
class Traced:
    """A program of the run, and what else is in HBM while it runs."""

    graph: Graph
    program: Program
    resident_bytes: int  # state that is not among its arguments
    seconds: float


def trace(config: TrainerConfig, facts: Facts, graphs: list[Graph], devices: int) -> list[Traced]:
    """Each graph's program for so many devices. Raises Untraceable, BadInput, NoCompiler."""
    os.environ["PJRT_DEVICE"] = "CPU"
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    if config.backend == "tensorflow":
        return _lowered(config, facts, graphs, devices)
    compiler.require({**compiler.SEEN_WITH, **compiler.SEEN_WITH_TORCH})
    compiler.stand_in_for(devices)
    found, backend = [], None
    # An evaluation leaves the state alone; a traced step leaves it as something that was not computed. So a step comes
    # last on its backend.
    for graph in sorted(graphs, key=lambda each: each.kind != "evaluation"):
        began = time.monotonic()
        backend = backend or _backend(config, facts, torch_xla())
        with _explained(graph):
            found.append(_trace(backend, config, graph, began))
        if graph.kind == "training":
            backend = None
            _give_back()
    backend = None
    _give_back()
    return sorted(found, key=lambda each: graphs.index(each.graph))


def _give_back() -> None:
    """The memory of a backend that is gone, which the compiler can use: glibc keeps it else."""
    gc.collect()
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)


def _lowered(config: TrainerConfig, facts: Facts, graphs: list[Graph], devices: int) -> list[Traced]:
    """TensorFlow's programs: each device's own."""
    compiler.require()
    require("tensorflow", "tensorflow")
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
    from training.backends.tensorflow.lowered import Lowered

    backend, found = _backend(config, facts, Lowered), []
    backend.slice_devices = devices
    sizes = {name: info.size for name, info in backend.layout().items()}
    for graph in graphs:
        began = time.monotonic()
        with _explained(graph):
            text, hlo, state = backend.lower(graph.kind == "training", batch(config, graph))
        donated = frozenset(state) if graph.kind == "training" else frozenset()
        program = Program(text, donated, state, compiler.graph_hash(hlo), replicated=True)
        resident = sum(sizes.values()) - sum(sizes[name] for name in state.values())
        found.append(Traced(graph, program, resident, time.monotonic() - began))
    return found


def _backend(config: TrainerConfig, facts: Facts, kind: Any) -> Any:
    needs = ModelRequirements(
        facts.vocabulary, facts.pad, max((*facts.lengths, *facts.evaluation_lengths)), facts.labels
    )
    return kind(config, Cluster(0, ("localhost",)), SingleHost(), needs, "preflight")


def _trace(backend: Any, config: TrainerConfig, graph: Graph, began: float) -> Traced:
    arrays, asks = batch(config, graph), Asks()
    network = backend.network()
    state = compiler.tensor_ids(backend.state())
    with compiler.named_operations(network), compiler.one_program():
        if graph.kind == "training":
            sums = backend.traced_step(0, arrays, asks)
            outputs = [*backend.state().values(), sums]
        else:
            outputs = [backend.traced_evaluation(arrays, asks)]
        program = compiler.program(outputs, state)
    sizes = {name: info.size for name, info in backend.layout().items()}
    resident = sum(sizes.values()) - sum(sizes[name] for name in program.arguments.values())
    return Traced(graph, program, resident, time.monotonic() - began)


@contextmanager
def _explained(graph: Graph) -> Iterator[None]:
    """Errors of the model's own code as one message with its place."""
    try:
        yield
    except TrainError:
        raise
    except Exception as error:
        raise Untraceable(
            f"the program of {graph} can't be built: {type(error).__name__}: {error}{_where(error)}"
        ) from None


def _where(error: BaseException) -> str:
    """The innermost place outside the frameworks."""
    for frame in reversed(traceback.extract_tb(error.__traceback__)):
        if not re.search("site-packages/(torch|tensorflow|tf_keras)", frame.filename) and not frame.filename.startswith(
            str(Path(__file__).parent)
        ):
            return f" ({frame.filename}:{frame.lineno}: {frame.line})"
    return ""
