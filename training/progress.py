"""The training loop's own state: how far the run is, steps that were not finite, evaluations, and compilations.

No clock, and no I/O but the records of earlier attempts. A step is *started* when it was given to the backend, and
*finished* when its result was read; a few steps may be in between.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np

from training.backends.protocol import Backend
from training.batch import HostBatch, Signals, StepResult
from training.checkpoint.config import Best
from training.distributed.rendezvous import Rendezvous
from training.errors import BadInput, NonFinite, TrainError
from training.storage import Storage
from training.telemetry.host_progress import PhaseTimer
from training.telemetry.metrics import finite_or_none
from training.telemetry.report import NonFiniteStep, read_nonfinite

_SHOWN_RECORDS = 64  # of a batch, in the message about a loss that is not finite
MOST_SKIPPED = 50  # steps in a row whose update was left out: then training goes nowhere
MOST_STEPS_BACK = 2  # checkpoints that a run may pass over because the first step after them was not finite


@dataclass
class Progress:
    """Counts of steps, the first and the last loss, and the signals that all hosts know of."""

    step: int = 0  # steps of the run that were started
    finished: int = 0  # steps of the run whose result was read
    trained: int = 0  # steps that this attempt has started
    replaced: int = 0  # rows of this host and attempt in the place of damaged records (data.on_corrupt: skip)
    first_loss: float | None = None
    last_loss: float | None = None
    skipped: int = 0  # steps of the run whose update was left out (train.on_nonfinite: skip)
    skipped_in_a_row: int = 0
    signals: Signals = field(default_factory=Signals)

    def resume(self, step: int, state: Mapping[str, Any]) -> None:
        """Takes over the losses and the skipped steps of a checkpoint's `state`; sets the steps to `step`."""
        self.step = self.finished = step
        self.first_loss, self.last_loss = state["first_loss"], state["last_loss"]
        self.skipped = state["skipped_steps"]

    def start_step(self) -> None:
        """Counts a step that was given to the backend."""
        self.step, self.trained = self.step + 1, self.trained + 1

    def finish_step(self, result: StepResult, batch: HostBatch) -> None:
        """Counts a step as finished, called in the order of steps: its signals, replaced records, skipped update and
        loss. Raises NonFinite if loss or gradient norm are not finite and the update was not skipped, or if
        MOST_SKIPPED in a row were."""
        self.signals = self.signals.union(result.signals)
        self.replaced += batch.replaced
        problem = result.nonfinite(self.finished)
        if problem and not result.skipped:
            raise NonFinite(self.finished, f"{problem}; {self._describe(batch)}")
        self.finished += 1
        self.skipped += result.skipped
        self.skipped_in_a_row = self.skipped_in_a_row + 1 if result.skipped else 0
        if self.skipped_in_a_row == MOST_SKIPPED:
            raise NonFinite(
                self.finished - 1, f"{MOST_SKIPPED} steps in a row were skipped, and {problem}; {self._describe(batch)}"
            )
        if not result.skipped:
            self.first_loss = result.loss if self.first_loss is None else self.first_loss
            self.last_loss = result.loss

    def _describe(self, batch: HostBatch) -> str:
        """Returns the last finite loss and the first 64 records of this host's batch, for messages."""
        records = ", ".join(map(str, batch.records[:_SHOWN_RECORDS]))
        last = "none before was finite" if self.last_loss is None else f"the last finite one was {self.last_loss}"
        return f"{last}. Records of this host's batch: {records}"


@dataclass(frozen=True)
class NonFiniteHistory:
    """Steps of a run that were not finite in earlier attempts with the same configuration and code."""

    records: tuple[NonFiniteStep, ...] = ()

    @staticmethod
    def read(folder: str, program: str, rendezvous: Rendezvous, is_first: bool, storage: Storage) -> NonFiniteHistory:
        """Reads the history of a run's folder on host 0 and shares it with all hosts, which must all call this. Keeps
        the records of the same `program`: hashes of this attempt's configuration and code. Raises LostPeer,
        StopRequested, and on host 0 StorageError."""
        records = [asdict(record) for record in read_nonfinite(folder, storage)] if is_first else None
        shared = [NonFiniteStep(**record) for record in rendezvous.meet("nonfinite", records)[0]]
        return NonFiniteHistory(tuple(record for record in shared if record.program == program))

    @property
    def suspects(self) -> frozenset[str]:
        """Returns the names of checkpoints whose next step was not finite: the one before each is tried instead."""
        first_steps = (record for record in self.records if record.step == record.restored)
        return frozenset(record.checkpoint for record in first_steps if record.checkpoint)

    def judge(self, error: NonFinite, restored: int) -> TrainError:
        """Returns the error that ends an attempt which restored step `restored` (0: none): NonFinite, as another
        attempt may help; BadInput if the same step was not finite before, or too many checkpoints were passed over."""
        advice = "lower train.learning_rate or train.clip_norm, look at these records, or set train.on_nonfinite: skip"
        earlier = [record for record in self.records if record.step == error.step]
        if earlier:
            return BadInput(
                f"{error}. The same step was not finite in an earlier attempt that began at step "
                f"{earlier[-1].restored} (this one at step {restored}): trying again changes nothing; {advice}"
            )
        if not restored or error.step != restored:
            return NonFinite(error.step, f"{error}. No later step is saved; {advice}")
        if len(self.suspects) >= MOST_STEPS_BACK:
            return BadInput(
                f"{error}. The run has gone back {len(self.suspects)} checkpoints already, and the first step after "
                f"each was not finite: trying again changes nothing; {advice}"
            )
        return NonFinite(
            error.step,
            f"{error}. This is the first step after restoring: the next attempt goes back one "
            f"checkpoint, before step {restored}, where there is one",
        )


@dataclass
class Evaluations:
    """The last evaluation, and the best one."""

    rule: Best | None  # which evaluation is the best, where checkpoint.best or train.early_stopping says so
    data: str = ""  # hash of the evaluation data
    step: int = -1  # steps that were done at the last evaluation
    figures: dict[str, float] = field(default_factory=dict)  # of the last evaluation
    counts: np.ndarray | None = None  # the task's further totals of the last evaluation
    best: dict[str, Any] | None = None  # its "step", "metric", "mode" and "value"
    patience: int | None = None  # of train.early_stopping
    since_best: int = 0  # evaluations in a row that were not the best one

    def resume(self, state: Mapping[str, Any]) -> None:
        """Restores the evaluations that a checkpoint's `state` holds; does nothing if later ones could not be compared
        with them, because the data, the metric or the mode has changed."""
        best, rule = state.get("best"), self.rule
        if best and rule and (best["metric"], best.get("mode", rule.mode)) != (rule.metric, rule.mode):
            return
        if state.get("evaluation_data", self.data) != self.data:
            return
        self.best, self.step = best, state.get("evaluated", -1)
        self.since_best = state.get("since_best", 0)
        figures = state.get("figures") or {}
        self.figures = {name: math.nan if value is None else value for name, value in figures.items()}

    def record(self, step: int, figures: dict[str, float], counts: np.ndarray | None) -> None:
        """Keeps the figures of the evaluation after `step` steps. If there is a `rule`, keeps them as the best too
        where it finds them better, else counts one more in a row that was not. `counts`: the task's further totals, if
        any."""
        self.step, self.figures, self.counts = step, figures, counts
        if self.rule:
            value = figures[self.rule.metric]
            self.since_best += 1
            if self.rule.better(value, self.best["value"] if self.best else None):
                self.since_best = 0
                self.best = {"step": step, "metric": self.rule.metric, "mode": self.rule.mode, "value": value}

    @property
    def ends_training(self) -> bool:
        """Returns whether train.early_stopping ends training after the last evaluation."""
        return self.patience is not None and self.since_best >= self.patience

    @property
    def nonfinite(self) -> list[str]:
        """Returns the names of the figures of the last evaluation that are NaN or infinite."""
        return [name for name, value in self.figures.items() if not math.isfinite(value)]

    def is_best(self, step: int) -> bool:
        """Returns whether the last evaluation was after `step` steps, and is the best one."""
        return self.best is not None and self.best["step"] == step == self.step

    def state(self, step: int) -> dict[str, Any]:
        """Returns the values that a checkpoint of `step` keeps; the figures only if they are of this step."""
        return {
            "evaluated": self.step,
            "evaluation_data": self.data,
            "figures": finite_or_none(self.figures) if self.step == step else None,
            "best": self.best,
            "since_best": self.since_best,
        }


@dataclass
class Compilations:
    """Counts programs and their seconds of compiling, and finds steps after the first of a shape that compile again."""

    backend: Backend
    timer: PhaseTimer
    shapes: int  # of training batches: how many different ones
    strict: bool  # raise an error if a step compiles one more program, instead of calling `warn`
    warn: Callable[[str], None]
    _training: int = 0  # programs of training steps
    _evaluation: int = 0  # programs of evaluations
    _known: set[tuple[tuple[int, ...], ...]] = field(default_factory=set)  # shapes of training batches so far

    @contextlib.contextmanager
    def timed(self, phase: str) -> Iterator[None]:
        """Times the block as a phase; the seconds that it spends compiling count as "compile"."""
        seconds = self.backend.compilations()[1]
        try:
            with self.timer.phase(phase):
                yield
        finally:
            self.timer.move(phase, "compile", self.backend.compilations()[1] - seconds)

    @contextlib.contextmanager
    def evaluation(self) -> Iterator[None]:
        """Times the block as an evaluation, and does not count its programs as the training's."""
        count = self.backend.compilations()[0]
        with self.timed("evaluation"):
            yield
        self._evaluation += self.backend.compilations()[0] - count

    def check_step(self, number: int, batch: HostBatch) -> None:
        """Warns, or with train.strict raises TrainError, if step `number`, which was just started, compiled a program.
        The first step of each expected shape may compile one; a shape beyond the expected number may not."""
        shape = tuple(array.shape for array in batch.arrays.values())
        is_first = shape not in self._known and len(self._known) < self.shapes
        self._known.add(shape)
        before, self._training = self._training, self.backend.compilations()[0] - self._evaluation
        if self._training > before and not is_first:
            shapes = ", ".join(f"{name} {list(array.shape)}" for name, array in batch.arrays.items())
            programs = f"another program (training has {self._training} now)"
            message = f"step {number} compiled {programs}; its arrays were {shapes}"
            if self.strict:
                raise TrainError(f"{message} (train.strict)")
            self.warn(message)
