"""What the loop asks of a framework. Everything framework-specific is behind these methods; no other module imports
one.

Words: a *host batch* is this host's rows of a global batch, as numpy arrays. *Sums* are totals over the global batch,
so that every figure is a ratio of totals and exact on any number of hosts. *Asks* are this host's wishes (stop, save);
a result tells whether any host had one, and every host reads the same answer from the same step, which is how all hosts
stop after the same step without a meeting.
"""

from __future__ import annotations

from collections.abc import Generator, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from training.checkpoint.safetensors_file import TensorSpec
from training.checkpoint.snapshot import Snapshot

Arrays = Mapping[str, np.ndarray]

# What every step adds up over the global batch, in this order: the loss of each counted prediction times its weight,
# the weights, and the weights of predictions that were right.
SUMS = ("loss", "weight", "correct")


@dataclass(frozen=True)
class Asks:
    """Wishes that all hosts learn of in the same step."""

    stop: bool = False
    save: bool = False


@dataclass(frozen=True)
class Outcome:
    """What a step did, over all hosts."""

    sums: dict[str, float]
    asked: Asks
    counts: np.ndarray | None = (
        None  # float64; an evaluation's further totals, of a task that has some: the confusion matrix, row by row
    )

    @staticmethod
    def nothing() -> Outcome:
        """Before any step."""
        return Outcome(dict.fromkeys(SUMS, 0.0), Asks())

    def plus(self, other: Outcome) -> Outcome:
        """The totals of both."""
        asked = Asks(self.asked.stop or other.asked.stop, self.asked.save or other.asked.save)
        counts = (
            other.counts if self.counts is None else self.counts if other.counts is None else self.counts + other.counts
        )
        return Outcome({name: self.sums[name] + other.sums[name] for name in SUMS}, asked, counts)

    @property
    def loss(self) -> float:
        """The weighted mean loss over the global batch; nan when nothing was counted."""
        return self.sums["loss"] / self.sums["weight"] if self.sums["weight"] else float("nan")


class Pending(Protocol):
    """A step that may still be running."""

    def outcome(self) -> Outcome:
        """Waits for it."""


class Backend(Protocol):
    """A model with its optimizer on this slice's devices."""

    devices: int  # of all hosts
    in_flight: (
        int  # steps to start before reading the outcome of the oldest: more than 0 where reading would stall the device
    )

    def feed(self, task: Any, start: int) -> Generator[Any, None, None]:
        """The HostBatches of a training.tasks.task.Task (which imports this module) from step `start` on, as `step`
        takes them; to be closed in the end."""

    def step(self, number: int, batch: Arrays, asks: Asks) -> Pending:
        """Trains on this host's rows of batch `number`. What it does is a function of the state, `number` and the
        global batch alone."""

    def evaluate(self, batch: Arrays, asks: Asks) -> Pending:
        """Adds up the sums, and the task's counts, without changing anything. Called by all hosts with batches of one
        shape."""

    def layout(self) -> dict[str, TensorSpec]:
        """All tensors of the state: `model/...`, and the optimizer's moments `adam_m/...` and `adam_v/...`."""

    def copy(self, places: Mapping[str, memoryview]) -> Snapshot:
        """Begins to copy the named tensors to host memory, as raw little-endian bytes. No step changes the state before
        that has ended."""

    def accept(self, tensors: Mapping[str, tuple[TensorSpec, memoryview]]) -> None:
        """Replaces these tensors of the state, by copies: their memory is used again. Raises Damaged for one that has
        no place in it."""

    def compilations(self) -> tuple[int, float]:
        """How many programs were compiled for this run so far, and the seconds that took."""

    def counters(self) -> dict[str, int]:
        """What the framework counted for this run so far: "graphs" (different programs that it traced),
        "device_to_host_transfers", and "device_to_host_syncs" (those transfers that neither an outcome nor a copy of
        the state asked for: the model's own, each of which stalls the device). A count that the framework does not have
        is absent."""

    def fallbacks(self) -> list[str]:
        """Operations that ran on the host because the device has none: each costs a round trip every step."""

    def preflight(self) -> str | None:
        """Whether it ran the programs that preflight had compiled, in a few words; None when none were."""

    def close(self) -> None:
        """Leaves the other hosts. The process may end without it."""
