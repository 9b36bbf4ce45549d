"""Runs of the loop: evaluations, steps that are not finite, damaged records, waiting for data, and the end."""

import itertools
import json
import math
import re
import time
import weakref
from collections.abc import Generator, Mapping
from pathlib import Path
from threading import Event
from types import SimpleNamespace
from typing import Any, cast
from unittest.mock import Mock

import google_crc32c
import numpy as np
import pytest

from tests.container import small_runs
from tests.container.small_runs import StopAfter
from tests.training.manual_clock import ManualClock
from tests.training.mutations import flip
from tests.training.numpy_backend import NumpyBackend, Runs, finished
from tests.training.test_agreement import Pair
from training import run_end, storage
from training.batch import SUMS, Arrays, HostBatch, Signals, StepResult
from training.checkpoint import writer
from training.checkpoint.format import committed_steps
from training.checkpoint.reader import verify
from training.checkpoint.snapshot import Snapshot
from training.checkpoint.tensors import NOT_SPLIT, HeldSlice, Slice, StateSlices, TensorSpec, key_in_part
from training.data.formats.recipe_layout import encode_shard
from training.distributed.cluster import Cluster
from training.distributed.rendezvous import SingleHost
from training.distributed.shutdown import ShutdownRequest
from training.errors import BadInput, NonFinite, StopRequested, TrainError
from training.evaluate import evaluate_all
from training.progress import MOST_STEPS_BACK, NonFiniteHistory
from training.run_end import compare_weights, weights_crc32c
from training.tasks.task import Task, open_data
from training.tasks.tokens import MaskedLanguageModeling
from training.telemetry.host_progress import PhaseTimer
from training.telemetry.metrics import read_history
from training.telemetry.report import NonFiniteStep, write_report
from training.trainer import StepRate

BATCHES = 7


@pytest.fixture
def runs(tmp_path: Path) -> Runs:
    return Runs(tmp_path)


def evaluate(in_flight: int, stop_at: int | None = None) -> tuple[StepResult, list[tuple[str, int]]]:
    """Evaluates BATCHES batches, one of whose results asks to stop. Returns the total, and all starts and reads."""
    events: list[tuple[str, int]] = []

    def start(batch: Arrays, _signals: Signals) -> Any:
        number = int(batch["number"][0])
        events.append(("start", number))

        def result() -> StepResult:
            events.append(("read", number))
            return StepResult({"loss": float(number), "weight": 1.0, "correct": 0.0}, Signals(stop=number == stop_at))

        return SimpleNamespace(result=result)

    numbers = map(np.atleast_1d, range(BATCHES))
    task: Any = SimpleNamespace(evaluation_batches=lambda: (HostBatch({"number": each}, each) for each in numbers))
    backend: Any = SimpleNamespace(in_flight=in_flight, evaluate=start)
    return evaluate_all(task, backend, SingleHost(), ShutdownRequest(), "evaluating"), events


@pytest.mark.parametrize("in_flight", [0, 1, 2, 20])
def test_as_many_batches_are_in_flight_as_the_backend_allows(in_flight: int) -> None:
    result, events = evaluate(in_flight)
    ahead = itertools.accumulate(1 if what == "start" else -1 for what, _ in events)
    assert max(ahead) == min(in_flight + 1, BATCHES)
    assert [number for what, number in events if what == "read"] == list(range(BATCHES))
    assert result.sums == {"loss": sum(range(BATCHES)), "weight": BATCHES, "correct": 0.0}


def test_a_stop_is_seen_by_the_result_that_carries_it_and_what_is_in_flight_is_read() -> None:
    result, events = evaluate(in_flight=2, stop_at=1)
    assert result.signals.stop
    # Batch 1's result is read when the third one after it would wait.
    assert [[number for what, number in events if what == kind] for kind in ("start", "read")] == [[0, 1, 2, 3]] * 2


def test_a_stop_of_the_command_evaluate_is_no_failure(runs: Runs, monkeypatch: pytest.MonkeyPatch) -> None:
    runs.train("r", 0, train__steps=10)
    monkeypatch.setattr("training.evaluate.open_backend", lambda config, *_: NumpyBackend(config, lambda _: None, 2.0))
    with pytest.raises(StopRequested, match="the evaluation was broken off"):
        small_runs.evaluate_here(small_runs.document(runs.folder), str(runs.path("r")), stopping=StopAfter(1))


@pytest.mark.parametrize("changes", [{}, {"checkpoint__best": {"metric": "loss", "mode": "min"}}])
def test_an_evaluation_broken_off_does_not_count_and_is_repeated(runs: Runs, changes: dict[str, Any]) -> None:
    changes = {"train__steps": 30, "evaluation__every": 10, **changes}

    def evaluated() -> list[int]:
        return [line["step"] for line in read_history(str(runs.path("r"))) if "eval_loss" in line]

    with pytest.raises(StopRequested, match="stopped after step 10"):
        runs.train("r", 0, shutdown=StopAfter(12), **changes)  # at the start, in 10 steps, and in the first batch of 3
    assert evaluated() == []
    runs.train("r", 1, **changes)
    assert evaluated() == [10, 20, 30]


def test_figures_of_nothing_finite_are_nan() -> None:
    """A loss that overflows exp is no nan, and a nan is no large loss."""
    for loss, perplexity in ((1.0, math.e), (800.0, math.inf), (math.inf, math.inf), (math.nan, math.nan)):
        total = StepResult({"loss": loss, "weight": 1.0, "correct": 0.0}, Signals())
        figures = MaskedLanguageModeling.figures(cast(Any, None), total)
        assert figures["perplexity"] == pytest.approx(perplexity, nan_ok=True)


def steps(runs: Runs, run_id: str) -> list[int]:
    """The committed steps, newest first, each of which is whole and finite."""
    folder = str(runs.path(run_id) / "checkpoints")
    committed = committed_steps(folder)
    for step in committed:
        verify(folder, step)
    return committed


@pytest.mark.parametrize("bad_step", [19, 39])
def test_an_update_that_is_not_finite_is_not_committed_but_the_save_in_progress_is(runs: Runs, bad_step: int) -> None:
    """Its own loss is finite: only the gradient norm tells. Step 19 is the one before a save, 39 the run's last."""
    started = Event()
    newest = f"step-{bad_step - 9:08}/part"

    def write(url: str, *values: Any, **options: Any) -> Any:
        if newest in url:
            assert started.wait(60)
            time.sleep(0.3)  # longer than the loop needs from the step's start to the end of the attempt
        return storage.write(url, *values, **options)

    runs.storage = cast(Any, SimpleNamespace(**{**vars(storage), "write": write}))
    with pytest.raises(NonFinite, match=rf"the gradient norm of step {bad_step} is nan.*No later step is saved"):
        runs.train("r", 0, lambda number: started.set() or "update" if number == bad_step else None)
    assert steps(runs, "r")[0] == bad_step - 9
    assert (runs.train("r", 1)["steps"], steps(runs, "r")[0]) == (40, 40)


def test_the_same_step_twice_is_an_end_that_no_attempt_changes(runs: Runs) -> None:
    why = r"loss of step 35 is nan; the last finite one was \d.*Records .*: \d"
    for error in (NonFinite, BadInput, BadInput):
        with pytest.raises(error, match=why) as raised:
            runs.train("r", 0, lambda number: "loss" if number == 35 else None)
    assert "trying again changes nothing" in str(raised.value)
    assert steps(runs, "r")[0] == 30
    assert "loss of step 35 is nan" in (runs.path("r") / "report.html").read_text()
    # Another configuration may do better.
    assert runs.train("r", 1, train__learning_rate=0.001)["steps"] == 40


def test_a_checkpoint_before_a_step_not_finite_is_passed_over(runs: Runs, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(StopRequested):
        runs.train("r", 0, shutdown=StopAfter(21))
    assert steps(runs, "r")[0] > 20
    newest = steps(runs, "r")[0]
    with pytest.raises(NonFinite, match=f"the next attempt goes back one checkpoint, before step {newest}"):
        runs.train("r", 1, lambda number: "loss" if number == newest else None)
    summary = runs.train("r", 2)
    assert "going on from " + str(runs.path("r") / "checkpoints" / "step-00000020") in capsys.readouterr().out
    assert (summary["steps"], steps(runs, "r")[0]) == (40, 40)


def test_a_run_goes_back_a_few_checkpoints_and_not_for_ever() -> None:
    def record(step: int) -> NonFiniteStep:
        return NonFiniteStep(step, step, f"part-of-{step}", "p")

    records = tuple(record(step) for step in range(90, 90 - 10 * MOST_STEPS_BACK, -10))
    assert NonFiniteHistory(records).suspects == {"part-of-90", "part-of-80"}
    error = NonFinite(70, "the loss of step 70 is nan")
    assert isinstance(NonFiniteHistory(records[:1]).judge(error, 70), NonFinite)
    assert isinstance(NonFiniteHistory(records).judge(error, 70), BadInput)


def test_skipped_steps_leave_the_state_and_count_over_attempts(runs: Runs, capsys: pytest.CaptureFixture[str]) -> None:
    def fault(number: int) -> str | None:
        return {5: "loss", 25: "update"}.get(number)

    changes = {"train__on_nonfinite": "skip"}
    with pytest.raises(StopRequested):
        runs.train("r", 0, fault, shutdown=StopAfter(12), **changes)
    summary = runs.train("r", 1, fault, **changes)
    assert (summary["skipped_steps"], summary["steps"]) == (2, 40)
    lines = {line["step"]: line for line in read_history(str(runs.path("r"))) if "gradient_norm" in line}
    assert [lines[6][name] for name in ("loss", "gradient_norm")] == [None, None]
    assert lines[6]["not_finite"] == ["loss", "gradient_norm"]
    assert lines[26]["loss"] is not None
    assert [lines[step]["skipped_steps"] for step in (5, 6, 25, 26, 40)] == [0, 1, 1, 2, 2]
    assert lines[40]["gradient_norm"] == 0.5
    assert "the loss of step 5 is nan: its update was skipped (1 so far)" in capsys.readouterr().err
    page = Path(write_report(str(runs.path("r")))).read_text()
    assert "Gradient norm" in page
    assert "2 step(s) were skipped" in page


def test_an_evaluation_not_finite_is_named_and_all_stays_json(runs: Runs, capsys: pytest.CaptureFixture[str]) -> None:
    best = {"metric": "loss", "mode": "min"}  # so that saves come after evaluations, and know their figures
    changes = {"evaluation_loss": float("nan"), "evaluation__every": 10, "checkpoint__best": best}
    with pytest.raises(StopRequested):
        runs.train("r", 0, shutdown=StopAfter(20), **changes)
    summary = runs.train("r", 1, **changes)
    assert summary["eval_loss"] is None
    assert summary["not_finite"] == ["eval_loss", "eval_perplexity"]
    refuse = Mock(side_effect=AssertionError("a literal that is not JSON"))
    documents = [path for path in runs.path("r").rglob("*.json*") if path.is_file()]
    assert len(documents) > 5
    for path in documents:
        for text in path.read_text().splitlines() if path.suffix == ".jsonl" else [path.read_text()]:
            json.loads(text, parse_constant=refuse)
    assert "the evaluation after step 10 is not finite: loss, perplexity" in capsys.readouterr().err
    assert "not finite" in Path(write_report(str(runs.path("r")))).read_text()


def test_an_evaluation_that_counts_nothing_says_why(runs: Runs, capsys: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(NumpyBackend, "evaluate", lambda *_: finished(StepResult(dict.fromkeys(SUMS, 0.0), Signals())))
    runs.train("r", 0, train__steps=10, evaluation__every=10)
    assert "perplexity, accuracy; all predictions of its data have weight 0" in capsys.readouterr().err


def test_a_damaged_record_counts_once_and_evaluations_tell(runs: Runs, capsys: pytest.CaptureFixture[str]) -> None:
    for split in ("train", "evaluation"):
        shard = min((runs.folder / split).glob("*.tfrecord"))
        flip(shard, shard.stat().st_size // 2)
    changes = {"train__steps": 3 * 64 // 8, "train__global_batch_size": 8, "checkpoint__every_steps": None}
    summary = runs.train("r", 0, **changes, data__on_corrupt="skip")
    assert summary["skipped_records"] == 3, "once in each of three epochs"
    told = capsys.readouterr().err
    assert "1 damaged records of this host's part of" in told
    assert "so the figures are not exact" in told


SLOW_FROM = 20  # the batch whose loading takes three times as long as a step, as do all after it


def test_each_line_tells_the_data_wait_since_the_line_before(
    runs: Runs, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    clock = ManualClock()

    def take_a_second(_number: int) -> None:
        clock.seconds += 1.0

    def batches(self: NumpyBackend, task: Task, start: int) -> Generator[HostBatch, None, None]:
        for number, batch in enumerate(task.batches(start), start):
            clock.seconds += 3.0 if number >= SLOW_FROM else 0.0
            yield batch

    monkeypatch.setattr(NumpyBackend, "batches", batches)
    runs.train("slow", 0, take_a_second, timer=PhaseTimer(clock))
    lines = re.findall(r"step +(\d+)/.* (\d+)% data wait", capsys.readouterr().out)
    shown = {int(step): int(percent) / 100 for step, percent in lines}
    kept = {line["step"]: line["data_wait"] for line in read_history(str(runs.path("slow"))) if "data_wait" in line}
    assert shown == kept
    assert {kept[step] for step in range(1, SLOW_FROM - 3)} == {0.0}
    assert {kept[step] for step in range(SLOW_FROM + 4, 38)} == {0.75}


def test_it_is_a_share_where_a_framework_counts_more_compiling_than_the_clock_has() -> None:
    rate = StepRate()
    assert rate.update(seconds=1.0, waited=1.5, steps=1) == (1.0, 1.0)
    assert rate.update(seconds=0.5, waited=2.0, steps=2) == (-0.5, 0.0)


MIB = 1 << 20


class CountingState:
    """A backend's state of bytes that lists the calls which copied it. `split`: where tensors are cut."""

    def __init__(self, sizes: Mapping[str, int], split: StateSlices = NOT_SPLIT) -> None:
        values = np.random.default_rng(0).bytes(max(sizes.values()))
        self.tensors = {name: np.frombuffer(values[:size], np.uint8) for name, size in sizes.items()}
        self.tensor_specs = lambda: {name: TensorSpec("U8", (size,), size) for name, size in sizes.items()}
        self.state_slices = lambda: split
        self.held = dict(self.tensors)
        for name, held in split.items():
            for box in (each.box for each in held):
                self.held[key_in_part(name, box, (sizes[name],))] = self.tensors[name][box.offsets[0] : box.ends[0]]
        self.calls: list[list[str]] = []

    def snapshot_state(self, buffers: Mapping[str, memoryview]) -> Snapshot:
        self.calls.append(list(buffers))
        return Snapshot((np.frombuffer(buffer, np.uint8), self.held[key]) for key, buffer in buffers.items())


def compare(state: Any, other: Mapping[str, str]) -> tuple[str, int]:
    """Compares this host's weights with another's, which replaced 3 damaged records (this one: 2)."""
    run: Any = SimpleNamespace(rendezvous=Pair([other, 3]), cluster=Cluster(0, ("a", "b")))
    return compare_weights(run, state, 2, 1.0)


def test_a_run_knows_the_tokenizer_of_shards_that_name_none(tmp_path: Path) -> None:
    (tmp_path / "a-0-1.tfrecord").write_bytes(encode_shard(np.full((1, 8), 5)))
    data = Mock(train=str(tmp_path), evaluation=None, tokenizer=str(tmp_path))
    assert small_runs.write_tokenizer(tmp_path) == open_data(Mock(task="mlm", data=data)).hashes()["tokenizer"]


def test_weights_are_copied_in_few_calls_for_their_checksum() -> None:
    small = {f"model/{number:02}": 7 + number for number in range(90)}
    state: Any = CountingState({"model/b": 70 * MIB, "model/a": 40 * MIB, **small, "adam_m/a": 40 * MIB})
    weights = b"".join(state.tensors[name].tobytes() for name in (*sorted(small), "model/a", "model/b"))
    assert weights_crc32c(state, 0) == {"": f"{google_crc32c.value(weights):08x}"}, "in the order of their names"
    assert state.calls == [[*sorted(small), "model/a"], ["model/b"]], "64 MiB, or one tensor"


def test_hosts_that_end_with_different_weights_fail() -> None:
    state: Any = CountingState({"model/w": 8})
    same = weights_crc32c(state, 0)
    assert compare(state, same) == (same[""], 5)
    with pytest.raises(TrainError, match=f"different weights .crc32c by host: {same['']}, 00000000"):
        compare(state, {"": "00000000"})


def test_hosts_that_hold_other_slices_compare_what_both_hold() -> None:
    halves = [HeldSlice(Slice((4 * host,), (4,)), (host,)) for host in (0, 1)]
    state: Any = CountingState({"model/both": 8, "model/w": 8}, {"model/w": halves})
    first, second = (weights_crc32c(state, worker) for worker in (0, 1))
    assert (sorted(first), sorted(second)) == (["model/both", "model/w[0:4]"], ["model/both", "model/w[4:8]"])
    changed = compare(state, {**second, "model/w[4:8]": "00000000"})
    assert compare(state, second) != changed, "the checksum depends on every slice"
    with pytest.raises(TrainError, match="different weights"):
        compare(state, {**second, "model/both": "00000000"})


def test_a_run_frees_its_snapshots_before_it_copies_weights(runs: Runs, monkeypatch: pytest.MonkeyPatch) -> None:
    buffers: list[weakref.ref[Any]] = []
    make = writer._PartBuffer

    def make_buffer(*arguments: Any) -> Any:
        buffer = make(*arguments)
        buffers.append(weakref.ref(buffer))
        return buffer

    def compare(*arguments: Any) -> tuple[str, int]:
        assert [buffer() for buffer in buffers] == [None]
        return compare_weights(*arguments)

    monkeypatch.setattr(writer, "_PartBuffer", make_buffer)
    monkeypatch.setattr(run_end, "compare_weights", compare)
    assert runs.train("r", 0)["committed_step"] == 40
