"""Batches, signals and the results of steps. Framework-free; only numpy is below it.

A *host batch* is this host's rows of a global batch, as numpy arrays. *Sums* are totals over the global batch, so that
every figure is a ratio of totals and exact on any number of hosts. *Signals* are one host's requests (stop, save).
They are exchanged inside the step: every host reads the same answer from the same step, so all hosts stop after the
same step without a separate barrier.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

import numpy as np

Arrays = Mapping[str, np.ndarray]

# Totals of every step over the global batch, in this order: the loss of each counted prediction times its weight,
# the weights, and the weights of correct predictions.
SUMS = ("loss", "weight", "correct")
# Figures of a training step's update, in this order: the norm of the gradient of the mean loss, before clipping;
# and 1 when the update was left out because the loss or that norm is not finite (train.on_nonfinite: skip), else 0.
UPDATE = ("gradient_norm", "skipped")


@dataclass(frozen=True)
class HostBatch:
    """This host's rows, and which records they are, for messages."""

    arrays: Arrays
    records: np.ndarray  # (rows,) int64
    replaced: int = 0  # rows in which another record has the place of a damaged one (data.on_corrupt: skip)


@dataclass(frozen=True)
class Signals:
    """Requests that all hosts learn of in the same step."""

    stop: bool = False
    save: bool = False

    def union(self, other: Signals) -> Signals:
        return Signals(self.stop or other.stop, self.save or other.save)


@dataclass(frozen=True)
class StepResult:
    """Totals of a step over all hosts."""

    sums: dict[str, float]  # by the names in SUMS
    signals: Signals  # of all hosts
    # float64; an evaluation's further totals, of a task that has some: for example the confusion matrix, row by row.
    counts: np.ndarray | None = None
    gradient_norm: float | None = None  # of a training step: before clipping
    skipped: bool = False  # the step has left the state as it was

    def plus(self, other: StepResult) -> StepResult:
        """Returns the totals and the signals of both steps; leaves out `gradient_norm` and `skipped`."""
        counts = [result.counts for result in (self, other) if result.counts is not None]
        return StepResult(
            {name: self.sums[name] + other.sums[name] for name in SUMS},
            self.signals.union(other.signals),
            sum(counts[1:], start=counts[0]) if counts else None,
        )

    @property
    def loss(self) -> float:
        """Returns the weighted mean loss over the global batch; nan if nothing was counted."""
        return self.sums["loss"] / self.sums["weight"] if self.sums["weight"] else float("nan")

    def nonfinite(self, step: int) -> str | None:
        """Returns a message if nothing was counted, or the loss or the gradient norm is NaN or infinite; else None.
        `step`, this result's training step, is only for the message."""
        if not self.sums["weight"]:
            return f"step {step} has no loss: all predictions of its batch have weight 0"
        if not math.isfinite(self.loss):
            return f"the loss of step {step} is {self.loss}"
        if self.gradient_norm is not None and not math.isfinite(self.gradient_norm):
            return f"the gradient norm of step {step} is {self.gradient_norm}"
        return None


class Pending(Protocol):
    """A step that may still be running on the devices."""

    def result(self) -> StepResult:
        """Waits for the step and returns its result. Raises the backend's errors, such as LostPeer, if it fails."""
