"""The interface between the training loop and a framework: no module above it imports a framework. Batches, signals and
results are in `training.batch`."""

from collections.abc import Callable, Generator, Mapping
from typing import Any, Protocol

import numpy as np

from training.batch import SUMS, Arrays, HostBatch, Pending, Signals, StepResult
from training.checkpoint.snapshot import Snapshot
from training.checkpoint.tensors import NOT_SPLIT, Slice, StateSlices, TensorSpec, whole
from training.config import TrainerConfig
from training.distributed.cluster import Cluster
from training.distributed.rendezvous import Rendezvous
from training.models.hugging_face import ModelRequirements
from training.tasks.task import Task

REPORT = len(SUMS) + 2  # numbers that every step gives: the sums, and how many hosts raise each signal (stop, save)


class PendingReport:
    """The report of a step or an evaluation that may still run: the sums, the signals, and training.batch.UPDATE of a
    step that `trains`, or the task's counts. `read` waits for these numbers."""

    def __init__(self, read: Callable[[], list[float]], *, trains: bool) -> None:
        self._read, self._trains = read, trains

    def result(self) -> StepResult:
        """Waits for the numbers. Returns the sums, the signals that any host raised and, of a training step, the norm
        and whether it was skipped, of an evaluation its counts (None without any). Raises what `read` does."""
        values = self._read()
        stop, save = values[len(SUMS) : REPORT]
        sums, signals = dict(zip(SUMS, values, strict=False)), Signals(stop > 0, save > 0)
        further = values[REPORT:]
        if self._trains:
            norm, skipped = further
            return StepResult(sums, signals, gradient_norm=norm, skipped=skipped > 0)
        return StepResult(sums, signals, np.array(further) if further else None)


class Backend(Protocol):
    """A model with its optimizer on this slice's devices. Methods with a body do what most backends do."""

    devices: int  # of all hosts
    # Seconds of opening after the framework's import, by phase: devices, model.
    opening_seconds: Mapping[str, float]

    @property
    def in_flight(self) -> int:
        """Returns how many steps to start before reading the result of the oldest: more than 0 where reading would
        stall the device."""

    def batches(self, task: Task, start: int) -> Generator[HostBatch, None, None]:
        """Yields the training batches from step `start` on, as `step` takes them. The caller closes the generator."""
        return task.batches(start)

    def step(self, number: int, batch: Arrays, signals: Signals) -> Pending:
        """Starts training step `number` on this host's rows of its batch. The step is a function of the state, `number`
        and the global batch alone. `signals`: this host's; its result has those of all hosts."""

    def evaluate(self, batch: Arrays, signals: Signals) -> Pending:
        """Starts an evaluation of a batch, which changes no state; its result has the sums and the task's counts over
        all hosts' rows. All hosts call it with batches of one shape."""

    def tensor_specs(self) -> dict[str, TensorSpec]:
        """Returns all tensors of the state: `model/<parameter>`, and `<name>/<parameter>` for the optimizer's."""

    def state_slices(self) -> StateSlices:
        """Returns name -> slices and the hosts that hold them, of the tensors that are split over the devices."""
        return NOT_SPLIT

    def snapshot_state(self, buffers: Mapping[str, memoryview]) -> Snapshot:
        """Starts to copy tensors of the state, or slices that this host holds, into `buffers`: see `StartSnapshot`. No
        step changes the state before the copy has ended."""

    def slice_to_load(self, name: str, spec: TensorSpec) -> Slice:
        """Returns the slice of the tensor `name`, whose whole is `spec`, that `load_state` takes on this host. Raises
        Damaged if the state has no such tensor."""
        return whole(spec.shape)

    def load_state(self, tensors: Mapping[str, tuple[TensorSpec, memoryview]]) -> None:
        """Copies these tensors, or slices of them, into the state; their memory may be reused afterwards. Raises
        Damaged for one that has no place in it."""

    def compilations(self) -> tuple[int, float]:
        """Returns the number of programs that were compiled for this run so far, and the seconds they took."""

    def counters(self) -> dict[str, int]:
        """Returns the framework's counts for this run so far: "graphs" (different programs that it traced),
        "device_to_host_transfers", and "device_to_host_syncs" (transfers that neither a result nor a snapshot asked
        for: the model's own, each of which stalls the device). Counts that the framework does not keep are absent."""
        return {}

    def device_memory(self) -> tuple[int, int]:
        """Returns bytes in use and in total of one of this host's devices; 0, 0 where the framework does not tell."""
        return 0, 0

    def fallbacks(self) -> list[str]:
        """Returns operations of this run that ran on the host because the device lacks them, each a round trip a
        step."""
        return []

    def preflight(self) -> str | None:
        """Returns in a few words whether the run's programs are those of preflight; None without a preflight."""
        return None


# A backend's class: (configuration, cluster, rendezvous, what the data needs of the model) -> backend.
OpenBackend = Callable[[TrainerConfig, Cluster, Rendezvous, ModelRequirements], Backend]
# The class of a backend -> that backend for the run at hand, for callers that choose the class.
BuildBackend = Callable[[Any], Any]
