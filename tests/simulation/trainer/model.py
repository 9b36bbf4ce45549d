"""The task and backend that simulated hosts train with: no framework, and a state that shows which records it saw.

The state after k steps is a pure function of k (`Curriculum`): how often each record was seen, and weights that depend
on the records in whole numbers, so that any number of hosts gives the same bits. A checkpoint, a restored state and the
end of a run are compared with it. As on real devices, a step is a collective of all hosts: without a peer it hangs.
"""

from __future__ import annotations

import math
from collections.abc import Generator, Iterator, Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from types import SimpleNamespace
from typing import Any

import numpy as np

from tests.packed_datasets import batch_records
from tests.plain_backend import PlainBackend
from tests.simulation.trainer import record_order
from training.batch import Arrays, HostBatch, Signals, StepResult
from training.checkpoint.tensors import TensorSpec
from training.data.sampling.order import host_rows, training_order

EVALUATION_BATCHES = 2
RECORD_BYTES = 64
State = dict[str, np.ndarray]


@lru_cache(maxsize=256)
class Curriculum:
    def __init__(self, records: int, batch: int, steps: int, seed: int, skipped: frozenset[int] = frozenset()) -> None:
        """`skipped`: steps that leave the state unchanged and have no loss."""
        self.records, self.batch, self.steps = records, batch, steps
        self.batches = [np.array(rows) for rows in record_order.batches(records, batch, steps, seed)]
        self.losses: list[float] = []
        state = {
            "model/weight": np.ones(6, np.float32),
            "model/bias": np.zeros(3, np.float32),
            "adam_m/weight": np.zeros(6, np.float32),
            "seen/records": np.zeros(records, np.int64),
        }
        self.states = [state]
        for number, batch_of_step in enumerate(self.batches):
            self.losses.append(loss_of(self.states[-1], batch_of_step))
            self.states.append(self.states[-1] if number in skipped else advance(self.states[-1], batch_of_step))
        self.figures = [figure_of(state) + np.mean(range(EVALUATION_BATCHES)) for state in self.states]


def advance(state: State, records: np.ndarray) -> State:
    """Returns the state after a step on these records."""
    total = np.float32(int(records.sum()) % 251)
    seen = state["seen/records"].copy()
    np.add.at(seen, records, 1)
    moment = state["adam_m/weight"] * np.float32(0.5) + total
    return {
        "model/weight": state["model/weight"] * np.float32(0.75) + moment * np.float32(0.125),
        "model/bias": state["model/bias"] + total,
        "adam_m/weight": moment,
        "seen/records": seen,
    }


def loss_of(state: State, records: np.ndarray) -> float:
    """Returns the loss of a batch before its step."""
    return float(abs(float(state["model/weight"][0])) + int(records[0]) % 7 + 1)


def figure_of(state: State) -> int:
    """Returns the loss of a state in an evaluation: of its first batch; each later one has 1 more."""
    return int(state["model/bias"][0]) * 7 % 11


SPECS = {
    name: TensorSpec({"f": "F32", "i": "I64"}[array.dtype.kind], array.shape, array.nbytes)
    for name, array in Curriculum(8, 2, 0, 0).states[0].items()
    if name != "seen/records"
}


class SimulatedTask:
    """A training.tasks.task.Task whose rows are record numbers."""

    shapes = 1
    labels = None
    figure_names = ("loss",)
    skipped = 0

    def __init__(self, host) -> None:
        self._host, self._curriculum = host, host.group.world.curriculum
        host.pass_time("opening the data", host.group.world.plan.compile_seconds)
        self.data = SimpleNamespace(
            train=SimpleNamespace(records=self._curriculum.records, url="gs://data/train"),
            evaluation=SimpleNamespace(records=4, url="gs://data/evaluation"),
            tokens=SimpleNamespace(vocabulary=64, pad=0, end=None),
            sequence_length=8,
            hashes=lambda: {"training data": "d1", "evaluation data": "d2", "tokenizer": "t"},
        )

    def identity(self) -> dict[str, Any]:
        return {"task": "mlm", "data.train": "d1"}

    def batches(self, start: int) -> Generator[HostBatch, None, None]:
        host = self._host
        plan = host.group.world.plan
        order = training_order(plan.records, RECORD_BYTES, seed=0, batch=plan.batch)
        first, last = host_rows(plan.batch, host.worker, host.group.size)
        for step in range(start, plan.steps):
            mine = batch_records(order, step)[1][first:last]
            yield HostBatch({"input_ids": mine.reshape(-1, 1)}, mine)

    def evaluation_batches(self) -> Iterator[HostBatch]:
        for number in range(EVALUATION_BATCHES):
            yield HostBatch({"input_ids": np.full((1, 1), number)}, np.array([number]))

    def figures(self, total: StepResult) -> dict[str, float]:
        return {"loss": total.loss}


@dataclass
class Gathering:
    """One collective operation of a group, with each host's contribution."""

    kind: str
    seconds: float  # of each host in it
    brought: dict[int, tuple[np.ndarray, Signals]] = field(default_factory=dict)
    glitch: list[tuple[int, bool] | None] = field(default_factory=list)  # of the group, set with the first result


class SimulatedSnapshot:
    """A slow copy of the state."""

    def __init__(self, host, pairs: list[tuple[memoryview, np.ndarray]]) -> None:
        self.blocked_seconds = 0.0
        self._host, self._pairs = host, pairs
        self._task = host.scheduler.spawn(self._run, name="copy") if host.scheduler.current else None

    def _run(self) -> None:
        for buffer, array in self._pairs:
            self._host.pass_time("copying", 0.05)
            buffer[:] = array.tobytes()

    def wait(self) -> None:
        if self._task:
            self._task.join()

    def wait_before_mutation(self) -> None:
        began = self._host.scheduler.now
        self.wait()
        self.blocked_seconds += self._host.scheduler.now - began


class SimulatedBackend(PlainBackend):
    """A training.backends.protocol.Backend over the state above, with slow steps."""

    in_flight = 0  # the plan's, when it is open

    def __init__(self, host) -> None:
        self._host, self._world = host, host.group.world
        self.devices, self.in_flight = host.group.size, self._world.plan.in_flight
        self.state = {name: array.copy() for name, array in self._world.curriculum.states[0].items()}
        self._snapshot: SimulatedSnapshot | None = None
        self._compiled = self._entered = 0  # programs; collectives
        self.first_step = 0  # of this attempt
        self._steps_after_stop = 0
        self._is_poisoned = False  # the checkpoint it began from
        self._restored_generation = 0  # of that checkpoint
        self._done = -1  # steps whose results were read; -1 before training
        self.evaluated: set[int] = set()  # after these steps, here or before the restore; -1 before training
        self._evaluating: list[bool] = []  # whether the result of each batch of an evaluation told of no stop
        host.pass_time("loading the framework", self._world.plan.compile_seconds)

    def batches(self, task: SimulatedTask, start: int) -> Generator[HostBatch, None, None]:
        self.first_step, self._is_poisoned = start, self._world.is_poisoned(start)
        self._restored_generation, self._done = self._world.generation_of(start), start
        self._world.promises.state_is_right(self._host, start, self.state)
        self._world.promises.restored(self, start)
        return task.batches(start)

    def step(self, number: int, batch: Arrays, signals: Signals) -> SimpleNamespace:
        shutdown = self._host.shutdown
        self._steps_after_stop += bool(self._host.stops and shutdown and shutdown.requested)
        self._world.promises.a_stop_is_agreed_in_the_next_step(self._host, self._steps_after_stop - self.in_flight)
        self._world.promises.none_is_left_out(self._host, number)
        if not self._compiled:
            self._compiled = 1
            self._host.pass_time("compiling", self._world.plan.compile_seconds)
        return self._enter(f"step {number}", batch, signals, number)

    def evaluate(self, batch: Arrays, signals: Signals) -> SimpleNamespace:
        self._compiled = max(self._compiled, 2)
        self._evaluating = self._evaluating if batch["input_ids"][0, 0] else []
        return self._enter(f"evaluation {int(batch['input_ids'][0, 0])}", batch, signals, None)

    def _enter(self, kind: str, batch: Arrays, signals: Signals, number: int | None) -> SimpleNamespace:
        """Adds this host to its next collective; it must be the others' next, too. Returns a training.batch.Pending."""
        host, gatherings = self._host, self._host.group.gatherings
        place, self._entered = self._entered, self._entered + 1
        if place == len(gatherings):
            seconds = self._world.plan.step_seconds * (0.5 + self._world.random.random())
            gatherings.append(Gathering(kind, seconds))
        gathering = gatherings[place]
        if gathering.kind != kind:
            seen = f"host {host.worker} is in {kind}, where others are in {gathering.kind}"
            self._world.promises.broken("all hosts choose alike", seen)
        gathering.brought[host.worker] = (batch["input_ids"], signals)
        host.scheduler.wake_all(host.group.collective)
        return SimpleNamespace(result=lambda: self._finish(gathering, number))

    def _finish(self, gathering: Gathering, number: int | None) -> StepResult:
        """Waits for a collective, then updates the state."""
        host = self._host
        host.scheduler.sleep(gathering.seconds)
        host.pass_time("leaving a collective", 0.5)
        while len(gathering.brought) < len(host.group.hosts) or host.group.is_parted or host.group.is_blocked:
            host.scheduler.wait(host.group.collective, None, f"the other hosts in {gathering.kind}")
        signals = Signals()
        for _, given in gathering.brought.values():
            signals = signals.union(given)
        if number is None:
            loss = float(figure_of(self.state) + len(self._evaluating))
            self._evaluating.append(not signals.stop)
            if self._evaluating == [True] * EVALUATION_BATCHES:
                self.evaluated.add(self._done)
            return StepResult({"loss": loss, "weight": 1.0, "correct": 0.0}, signals)
        self._world.promises.little_work_is_at_risk(host)
        self._done = number + 1
        records = np.concatenate([gathering.brought[worker][0].ravel() for worker in range(host.group.size)])
        if self._snapshot:
            self._snapshot.wait_before_mutation()
            self._snapshot = None
        loss, norm, state = loss_of(self.state, records), 1.5, advance(self.state, records)
        if number in self._world.plan.skipped:
            loss, norm = (float("inf"), norm) if number % 2 else (loss, float("nan"))
        if not gathering.glitch:
            gathering.glitch.append(host.group.glitch)  # a later glitch does not affect this step
        glitch = gathering.glitch[0]
        if glitch and glitch[0] == number:
            state["model/weight"][0], host.group.has_glitched = np.nan, True
            norm = float("nan") if glitch[1] else norm
            if self.first_step == number > 0:
                self._world.suspects[self._restored_generation] = number
        if self.first_step == number and self._is_poisoned:
            loss = float("nan")
            self._world.notice_poison()
        skipped = self._world.plan.skip and not math.isfinite(loss + norm)
        self.state = self.state if skipped else state
        return StepResult({"loss": loss, "weight": 1.0, "correct": 0.0}, signals, gradient_norm=norm, skipped=skipped)

    def tensor_specs(self) -> dict[str, TensorSpec]:
        seen = self.state["seen/records"]
        return {**SPECS, "seen/records": TensorSpec("I64", seen.shape, seen.nbytes)}

    def snapshot_state(self, buffers: Mapping[str, memoryview]) -> SimulatedSnapshot:
        is_saved = self._world.generation_of(self._world.plan.steps) > 0
        if self._host.drifts and self._host.worker and is_saved and set(buffers) == {"model/weight", "model/bias"}:
            self._host.group.drifted = True
            self.state["model/weight"] = self.state["model/weight"] + np.float32(1)
        self._snapshot = SimulatedSnapshot(self._host, [(buffer, self.state[name]) for name, buffer in buffers.items()])
        return self._snapshot

    def compilations(self) -> tuple[int, float]:
        return self._compiled, 0.0
