"""The step cache: cached steps have the bits of traced ones, and a step that varies beside its inputs is traced always,
with a warning."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.container import small_runs
from tests.nightly import others_at_night
from training.batch import HostBatch, Signals
from training.config import TrainerConfig, from_document
from training.distributed.rendezvous import SingleHost
from training.run_setup import open_backend, open_task
from training.yaml_file import Document

STEPS = 6
FIRST_TWO = 2


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return small_runs.prepare(tmp_path_factory.mktemp("runs"))


def settings(folder: Path, **changes: Any) -> TrainerConfig:
    changes = {"model__layers": 1, "model__hidden_size": 16, **changes}
    return from_document(Document("test", small_runs.document(folder, **changes), {}))


def open_run(config: TrainerConfig) -> tuple[Any, list[HostBatch], list[HostBatch]]:
    """A backend, and its first batches of training and of evaluation."""
    cluster = small_runs.this_host()
    task = open_task(config, cluster)
    backend: Any = open_backend(config, cluster, SingleHost(), task, "token")
    return backend, list(islice(task.batches(0), STEPS)), list(islice(task.evaluation_batches(), 2))


def train(
    config: TrainerConfig, prepare: Callable[[Any], None] = lambda backend: None
) -> tuple[list[Any], list[bytes]]:
    """The results of six steps, with an evaluation after the third and the fifth; and the state at the end."""
    backend, batches, evaluation = open_run(config)
    if prepare:
        prepare(backend)
    results = []
    for number, batch in enumerate(batches):
        results.append(backend.step(number, batch.arrays, Signals()).result())
        if number in (2, 4):
            results += [backend.evaluate(part.arrays, Signals()).result() for part in evaluation * 2]
    specs = backend.tensor_specs()
    buffers = {name: bytearray(spec.size) for name, spec in specs.items()}
    backend.snapshot_state({name: memoryview(buffer) for name, buffer in buffers.items()}).wait()
    return results, [bytes(buffer) for buffer in buffers.values()]


def trace_always(backend: Any) -> None:
    backend.trace_always()


@contextmanager
def count_traces(backend: Any) -> Iterator[list[str]]:
    """The kinds of the steps that are traced in this block."""
    seen: list[str] = []
    step, evaluation = backend._step.trace, backend._step.trace_evaluation
    backend._step.trace = lambda *arguments: seen.append("training") or step(*arguments)
    backend._step.trace_evaluation = lambda *arguments: seen.append("evaluation") or evaluation(*arguments)
    yield seen
    backend._step.trace, backend._step.trace_evaluation = step, evaluation


CASES: dict[str, dict[str, Any]] = {
    "plain": {},
    "accumulation, bf16, remat, skip": {
        "train__gradient_accumulation": 2,
        "train__precision": "bf16",
        "train__remat": "layers",
        "train__on_nonfinite": "skip",
    },
}


@pytest.mark.parametrize("case", others_at_night(CASES, set(CASES) - {"plain"}))
def test_cached_steps_have_the_bits_of_traced_ones(case: str, folder: Path) -> None:
    config = settings(folder, **CASES[case])
    results, state = train(config)
    traced_results, traced_state = train(config, trace_always)
    assert results == traced_results
    assert state == traced_state


def test_only_the_first_two_batches_of_a_shape_are_traced(folder: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """With one program compiled for each kind of step. A new shape is traced again, and said."""
    backend, batches, evaluation = open_run(settings(folder, model__hidden_size=24))  # no other test has these programs
    with count_traces(backend) as traced:
        for number, batch in enumerate(batches):
            backend.step(number, batch.arrays, Signals()).result()
        for _ in range(2):
            for part in evaluation:
                backend.evaluate(part.arrays, Signals()).result()
        assert traced == ["training"] * FIRST_TWO + ["evaluation"] * FIRST_TWO
        assert backend.compilations()[0] == backend.counters()["graphs"] == 2
        assert backend.counters()["device_to_host_syncs"] == 0
        half = {name: array[:4] for name, array in batches[0].arrays.items()}
        for number in range(STEPS, STEPS + 3):
            backend.step(number, half, Signals()).result()
        assert traced[4:] == ["training"] * FIRST_TWO
    said = [line for line in capfd.readouterr().err.splitlines() if "tracing the" in line]
    assert len(said) == 3
    assert said[0].startswith("tpu-train: tracing the training step for input_ids [8, 32]")
    assert said[2].startswith("tpu-train: tracing the training step for input_ids [4, 32]")


@pytest.mark.nightly
def test_a_step_that_varies_beside_its_inputs_is_traced_always_with_one_warning(
    folder: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """The network multiplies by another number of Python in each call: torch_xla makes it an argument."""

    def vary(backend: Any) -> None:
        calls = iter(range(1000))
        network = backend._state.network
        forward = network.base_model.embeddings.forward

        def changing(*arguments: Any, **keywords: Any) -> torch.Tensor:
            return forward(*arguments, **keywords) * (1.5 + next(calls) / 64)

        network.base_model.embeddings.forward = changing

    config = settings(folder, evaluation__at_end=False)

    def vary_and_trace(backend: Any) -> None:
        vary(backend)
        backend.trace_always()

    results, state = train(config, vary)
    warnings = [line for line in capfd.readouterr().err.splitlines() if "can't be cached" in line]
    traced_results, traced_state = train(config, vary_and_trace)
    assert results == traced_results
    assert state == traced_state
    assert [line.split()[3] for line in warnings] == ["training", "evaluation"]
    assert all("a value of shape [] in it is another" in line for line in warnings)
