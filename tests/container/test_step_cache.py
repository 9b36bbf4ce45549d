"""Cached steps have the bits of traced ones; a step that varies beside its inputs is traced always, with a warning."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import count, islice
from pathlib import Path
from typing import Any

import pytest
import torch
import torch_xla

from tests.container import small_runs
from tests.nightly import others_at_night
from training.backends.torch_xla.step_cache import FIRST_TRACED, Step, read_plain_values
from training.batch import HostBatch, Signals
from training.config import TrainerConfig, from_document
from training.distributed.rendezvous import SingleHost
from training.errors import TrainError
from training.run_setup import open_backend, open_task
from training.yaml_file import Document

STEPS = 6


def settings(folder: Path, **changes: Any) -> TrainerConfig:
    changes = {"model__layers": 1, "model__hidden_size": 16, **changes}
    return from_document(Document("test", small_runs.document(folder, **changes), {}))


def open_run(config: TrainerConfig) -> tuple[Any, list[HostBatch], list[HostBatch]]:
    """A backend, and its first batches of training and of evaluation."""
    cluster = small_runs.this_host()
    task = open_task(config, cluster)
    backend: Any = open_backend(config, cluster, SingleHost(), task)
    return backend, list(islice(task.batches(0), STEPS)), list(islice(task.evaluation_batches(), 2))


def train(
    config: TrainerConfig, prepare: Callable[[Any], None] = lambda backend: None, steps: int = STEPS
) -> tuple[list[Any], list[bytes]]:
    """The results of all steps, with evaluations after the third and fifth; the states after the fifth and the last."""
    backend, batches, evaluation = open_run(config)
    prepare(backend)
    results, states = [], []
    for number in range(steps):
        results.append(backend.step(number, batches[number % STEPS].arrays, Signals()).result())
        if number in (2, 4):
            results += [backend.evaluate(part.arrays, Signals()).result() for part in evaluation * 2]
        if number in (4, steps - 1):
            states += save(backend)
    return results, states


def save(backend: Any) -> list[bytes]:
    buffers = {name: bytearray(spec.size) for name, spec in backend.tensor_specs().items()}
    backend.snapshot_state({name: memoryview(buffer) for name, buffer in buffers.items()}).wait()
    return [bytes(buffer) for buffer in buffers.values()]


def trace_always(backend: Any) -> None:
    """Makes `torch_xla.sync` run every step, which is traced."""

    def run(step: Step) -> torch.Tensor:
        with backend.state.recording(changes=step.seed is not None):
            report = step.trace(step.inputs)
        torch_xla.sync()
        return report

    backend._training.run = backend._evaluation.run = run


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
        "train__gradient_accumulation": 2, "train__precision": "bf16", "train__remat": "layers",
        "train__on_nonfinite": "skip",
    },
}  # fmt: skip


@pytest.mark.parametrize("case", others_at_night(CASES, set(CASES) - {"plain"}))
def test_cached_steps_have_the_bits_of_traced_ones(case: str, folder: Path) -> None:
    config = settings(folder, **CASES[case])
    assert train(config) == train(config, trace_always)


def test_only_the_first_batches_of_a_shape_are_traced(folder: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """With one program compiled for each kind of step. A new shape is traced again, and said."""
    backend, batches, evaluation = open_run(settings(folder, model__hidden_size=24))  # no other test has these programs
    with count_traces(backend) as traced:
        for number, batch in enumerate(batches):
            backend.step(number, batch.arrays, Signals()).result()
        for part in evaluation * 3:
            backend.evaluate(part.arrays, Signals()).result()
        assert traced == ["training"] * FIRST_TRACED + ["evaluation"] * FIRST_TRACED
        assert backend.compilations()[0] == backend.counters()["graphs"] == 2
        assert backend.counters()["device_to_host_syncs"] == 0
        half = {name: array[:4] for name, array in batches[0].arrays.items()}
        for number in range(STEPS, STEPS + 9):
            backend.step(number, half, Signals()).result()
        assert traced[2 * FIRST_TRACED :] == ["training"] * (FIRST_TRACED + 1), "the eighth too"
    said = [line for line in capfd.readouterr().err.splitlines() if "tracing the" in line]
    assert len(said) == 3
    assert said[0].startswith("tpu-train: tracing the training step for input_ids [8, 32]")
    assert said[2].startswith("tpu-train: tracing the training step for input_ids [4, 32]")


def multiply(backend: Any, factor: Callable[[], Any]) -> None:
    """Makes the network multiply by a number of Python, a constant of its program, or by a tensor, an argument."""
    embeddings = backend.state.network.base_model.embeddings
    forward = embeddings.forward
    embeddings.forward = lambda *arguments, **keywords: forward(*arguments, **keywords) * factor()


def vary(backend: Any, call: int) -> None:
    """Makes that number another one from this call on, the first being 1."""
    calls = count(1)
    multiply(backend, lambda: 1.5 if next(calls) < call else 1.75)


@pytest.mark.parametrize("call", others_at_night((2, FIRST_TRACED, 9), (9,)))
def test_counting_calls_means_tracing_and_a_warning(call: int, folder: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """So that the number changes where it would if nothing was cached, and the state saved after ten steps is right."""
    config = settings(folder, evaluation__at_end=False)

    def vary_and_trace(backend: Any) -> None:
        vary(backend, call)
        trace_always(backend)

    results_and_states = train(config, lambda backend: vary(backend, call), steps=10)
    warnings = [line for line in capfd.readouterr().err.splitlines() if "can't be cached" in line]
    assert results_and_states == train(config, vary_and_trace, steps=10)
    assert "training" in warnings[0]
    assert len(warnings) == 2, "training and evaluation"
    assert "it changes a value of Python in the model from 2 to 3" in warnings[0]


def test_a_memo_of_tensors_is_watched_by_its_keys() -> None:
    assert set(read_plain_values({"first": torch.zeros(1)}, {2: [3]})) == {"first", 2, 3}


@pytest.mark.parametrize(("changed_at", "noticed_at"), [(9, 10), (5, 8)], ids=["a save", "the eighth batch"])
def test_a_step_that_varies_later_ends_the_run_and_is_not_saved(changed_at: int, noticed_at: int, folder: Path) -> None:
    backend, batches, _ = open_run(settings(folder))
    numbers, noticed = [1.5], list[int]()
    multiply(backend, lambda: torch.tensor(numbers).to("xla") if changed_at == 9 else numbers[-1])

    def run() -> None:
        for number in range(1, 11):
            numbers[:] = [1.5 if number < changed_at else 1.75]
            noticed.append(number)
            backend.step(number - 1, batches[number % STEPS].arrays, Signals())
        save(backend)

    another = r"a value of shape \[1\] in it is another" if changed_at == 9 else "it is another program"
    with pytest.raises(TrainError, match=f"the training step .* batches {another}"):
        run()
    assert noticed[-1] == noticed_at
