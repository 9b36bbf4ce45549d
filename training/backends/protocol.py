"""What the training loop needs of a framework. Everything framework-specific is behind these methods; no module above
them imports a framework. The words of the signatures (batches, signals, results) are in `training.batch`."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator, Mapping
from typing import Any, Protocol

from training.batch import Arrays, HostBatch, Pending, Signals
from training.checkpoint.safetensors_file import TensorSpec
from training.checkpoint.snapshot import Snapshot
from training.config import TrainerConfig
from training.distributed.cluster import Cluster
from training.distributed.rendezvous import Rendezvous
from training.models.hugging_face import ModelRequirements
from training.tasks.task import Task


class Backend(Protocol):
    """A model with its optimizer on this slice's devices."""

    devices: int  # of all hosts
    # Steps to start before reading the result of the oldest: more than 0 where reading would stall the device.
    in_flight: int
    # What opening it took after the framework's import, by phase: devices, model.
    opening_seconds: Mapping[str, float]

    def batches(self, task: Task, start: int) -> Generator[HostBatch, None, None]:
        """The input iterator: the task's batches from step `start` on, as `step` takes them. To be closed in the
        end."""

    def evaluation_batches(self, task: Task) -> Iterator[HostBatch]:
        """The task's evaluation set, as `evaluate` takes its batches."""

    def step(self, number: int, batch: Arrays, signals: Signals) -> Pending:
        """Trains on this host's rows of batch `number`. What it does is a function of the state, `number` and the
        global batch alone."""

    def evaluate(self, batch: Arrays, signals: Signals) -> Pending:
        """Adds up the sums, and the task's counts, without changing anything. Called by all hosts with batches of one
        shape."""

    def tensor_specs(self) -> dict[str, TensorSpec]:
        """All tensors of the state: `model/<parameter>`, and for each name of the optimizer's state
        `<name>/<parameter>`."""

    def snapshot_state(self, buffers: Mapping[str, memoryview]) -> Snapshot:
        """Begins to copy the named tensors to host memory, as raw little-endian bytes. No step changes the state before
        that has ended."""

    def load_state(self, tensors: Mapping[str, tuple[TensorSpec, memoryview]]) -> None:
        """Replaces these tensors of the state, by copies: their memory is used again. Raises Damaged for one that has
        no place in it."""

    def compilations(self) -> tuple[int, float]:
        """How many programs were compiled for this run so far, and the seconds that took."""

    def counters(self) -> dict[str, int]:
        """What the framework counted for this run so far: "graphs" (different programs that it traced),
        "device_to_host_transfers", and "device_to_host_syncs" (those transfers that neither a result nor a snapshot
        asked for: the model's own, each of which stalls the device). A count that the framework does not have is
        absent."""

    def fallbacks(self) -> list[str]:
        """Operations that ran on the host because the device has none: each costs a round trip every step."""

    def preflight(self) -> str | None:
        """Whether it ran the programs that preflight had compiled, in a few words; None when none were."""

    def close(self) -> None:
        """Leaves the other hosts. The process may end without it."""


# A backend's class: (configuration, cluster, rendezvous, what the data needs of the model, the run's token) -> backend.
OpenBackend = Callable[[TrainerConfig, Cluster, Rendezvous, ModelRequirements, str], Backend]
# The class of a backend -> that backend for the run at hand: for whoever builds one of a kind of its own.
BuildBackend = Callable[[Any], Any]
