"""The whole training step in one view: forward, loss, backward, accumulation, clipping, learning rate, optimizer.

Few programs: everything that changes with the step (learning rate, the optimizer's scalars, the seed of dropout)
reaches the device as data, never as a constant. Weights and the optimizer's state are fp32; bf16 is autocast.

For every runtime of PyTorch. With torch_xla nothing here runs on a device: it records the operations, and `step_cache`
runs them as one program. Every tensor that is alive then becomes an output of the program. So gradients live in no
variable that outlasts a call.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Generic, Protocol, TypeVar

import numpy as np
import torch
from torch import Tensor

from training.backends.placement import Axes, rows_first
from training.backends.protocol import REPORT
from training.backends.torch.state import HostState
from training.batch import SUMS, Arrays, Signals
from training.config import TrainerConfig
from training.data.sampling.order import host_rows
from training.distributed.cluster import Cluster
from training.models.torch.dropout import row_keys
from training.optim.schedule import learning_rate, step_seed

_ROW_KEYS = "row_keys"  # beside a piece's arrays: what dropout draws from

# A task's half: (network, rows) -> the sums (3,) of training.batch.SUMS, and what else an evaluation counts.
TaskSums = Callable[[Any, dict[str, Tensor]], tuple[Tensor, Tensor | None]]

A = TypeVar("A")
B = TypeVar("B")


@dataclass(frozen=True)
class HostArray:
    """An array on this host, and its layout over the devices."""

    array: np.ndarray
    axes: Axes


def rows_of(array: np.ndarray) -> HostArray:
    """Returns (rows, ...) of this host, split by rows over all devices of all hosts."""
    return HostArray(array, rows_first(array.ndim))


def replicated(array: np.ndarray) -> HostArray:
    """Returns an array with the layout in which every device holds all of it."""
    return HostArray(array, (None,) * array.ndim)


def signal_rows(signals: Signals, devices: int) -> HostArray:
    """Returns (devices of this host, 5): rows whose sum over all hosts is zeros for the sums, then the number of hosts
    that raise each signal."""
    rows = np.zeros((devices, REPORT), dtype=np.float32)
    rows[0, len(SUMS) :] = [signals.stop, signals.save]
    return rows_of(rows)


class Layout(Protocol):
    """The devices that this process computes on."""

    device: Any  # a torch.device
    is_spmd: bool  # one program computes the rows of all processes
    local_devices: int  # of this process

    def set_seed(self, seed: int) -> None:
        """Seeds PyTorch's generator of the device."""

    def replicate_report(self, report: Tensor) -> Tensor:
        """Declares that every device holds all of the report, and returns it."""


@dataclass(frozen=True)
class StepInputs(Generic[A]):
    """Everything that a step reads beside the state: arrays on the host, then the same as tensors on the devices."""

    signals: A
    pieces: Sequence[Mapping[str, A]]  # the rows of each gradient accumulation; an evaluation has one
    scalars: tuple[A, ...] = ()  # of training: one vector, the learning rate and the optimizer's scalars

    def leaves(self) -> list[A]:
        """Returns all arrays: scalars, signals, then those of the pieces, as `with_leaves` takes them."""
        return [*self.scalars, self.signals, *(array for piece in self.pieces for array in piece.values())]

    def with_leaves(self, leaves: Iterable[B]) -> StepInputs[B]:
        """Returns inputs of the same structure around other arrays, given in the order of `leaves`."""
        values = iter(leaves)
        scalars = tuple(next(values) for _ in self.scalars)
        return StepInputs(next(values), [{name: next(values) for name in piece} for piece in self.pieces], scalars)


Trace = Callable[[StepInputs[Tensor]], Tensor]  # records the operations of a step, and returns its report


def sum_of_squares(tensors: Iterable[Tensor]) -> Tensor:
    return torch.stack([value.square().sum() for value in tensors]).sum()


class TrainingStep:
    """The step of one run, as operations on its state."""

    def __init__(
        self, config: TrainerConfig, cluster: Cluster, state: HostState, sharding: Layout, task_sums: TaskSums
    ) -> None:
        self._config, self._train, self._cluster = config, config.train, cluster
        self._state, self._sharding, self._task_sums = state, sharding, task_sums

    def inputs(self, number: int, batch: Arrays, signals: Signals) -> StepInputs[HostArray]:
        """Returns what training step `number` reads, from this host's rows of the batch."""
        scalars = (learning_rate(self._train, number), *self._state.optimizer.step_scalars(number))
        return StepInputs(
            signal_rows(signals, self._sharding.local_devices),
            [_rows_of_all(piece) for piece in self._pieces(self._with_row_keys(number, batch))],
            (replicated(np.array(scalars, dtype=np.float32)),),
        )

    def seed(self, number: int) -> int:
        """Returns the seed of PyTorch's generator in a step, for networks that use it: each host's own, but under
        SPMD."""
        return step_seed(self._config.seed, number, 0 if self._sharding.is_spmd else self._cluster.worker)

    def trace(self, number: int, inputs: StepInputs[Tensor]) -> Tensor:
        """Records a step of a process that sums with no other (SPMD: the step of all hosts), which changes the state.
        Returns its report, with the update's figures: (5 + 2,)."""
        gradients, report = self.gradients(number, inputs)
        update = self.update(gradients, report, inputs.scalars[0])
        return self._sharding.replicate_report(torch.cat([report, update]))

    def gradients(self, number: int, inputs: StepInputs[Tensor]) -> tuple[list[Tensor], Tensor]:
        """Calls the layout's `set_seed` for step `number`. Returns the gradients of the summed loss over this host's
        rows (SPMD: over all), and the report, (5,). Changes no parameter."""
        self._sharding.set_seed(self.seed(number))
        parameters = list(self._state.trained.values())
        gradients: list[Tensor] = []
        report = inputs.signals.sum(0)
        for rows in inputs.pieces:
            piece = dict(rows)
            if self._state.noise:
                self._state.noise.rows = piece.pop(_ROW_KEYS)
            with self._autocast():
                sums, _ = self._task_sums(self._state.network, piece)  # unread counts are not computed
            # On autograd's own thread the results would stay alive a little longer than here, sometimes beyond the
            # start of the program: another program.
            with torch.autograd.set_multithreading_enabled(False):
                more = torch.autograd.grad(sums[0], parameters, allow_unused=True, materialize_grads=True)
            gradients = [total + new for total, new in zip(gradients, more, strict=True)] if gradients else list(more)
            report = torch.cat([report[: len(SUMS)] + sums.detach(), report[len(SUMS) :]])
        return gradients, report

    def update(self, gradients: list[Tensor], report: Tensor, scalars: Tensor, squares: Tensor | None = None) -> Tensor:
        """Clips gradients of the summed loss, and lets the optimizer change the state; with train.on_nonfinite: skip,
        only if loss and norm are finite. Returns the figures that training.batch.UPDATE names, (2,). `report`: with the
        sums of all rows; `scalars`: the learning rate, then the optimizer's; `squares`: the sum of the squares of all
        gradients, if these are slices."""
        loss, weight = report[SUMS.index("loss")], report[SUMS.index("weight")]
        with torch.no_grad():
            scale = 1 / weight.clamp(min=1e-6)  # from the sum's gradient to the mean's
            if squares is None:
                squares = sum_of_squares(gradients)
            norm = squares.sqrt() * scale
            if self._train.clip_norm is not None:
                scale = scale * (self._train.clip_norm / (norm + 1e-6)).clamp(max=1)
            if self._train.on_nonfinite == "stop":
                self._state.optimizer.update(self._state.trained, gradients, scale, *scalars.unbind())
                return torch.stack([norm, torch.zeros_like(norm)])
            is_finite = torch.isfinite(norm) & torch.isfinite(loss / weight)
            before = [value.clone() for value in self._state.tensors().values()]
            self._state.optimizer.update(self._state.trained, gradients, scale, *scalars.unbind())
            for value, old in zip(self._state.tensors().values(), before, strict=True):
                value.copy_(torch.where(is_finite, value, old))
            return torch.stack([norm, (~is_finite).to(norm.dtype)])

    def evaluation_inputs(self, batch: Arrays, signals: Signals) -> StepInputs[HostArray]:
        """Returns what an evaluation reads, from this host's rows."""
        return StepInputs(signal_rows(signals, self._sharding.local_devices), [_rows_of_all(batch)])

    def trace_evaluation(self, inputs: StepInputs[Tensor]) -> Tensor:
        """Records an evaluation. Returns its report and the task's counts, (5 + counts,)."""
        network = self._state.network
        network.eval()
        with torch.no_grad(), self._autocast():
            sums, counts = self._task_sums(network, dict(inputs.pieces[0]))
        network.train()
        report = inputs.signals.sum(0)
        further = [] if counts is None else [counts.flatten()]
        return self._sharding.replicate_report(torch.cat([report[: len(SUMS)] + sums, report[len(SUMS) :], *further]))

    def flatten(self, gradients: list[Tensor], report: Tensor) -> Tensor:
        """Joins gradients and report to the vector that hosts add up: (all parameters + 5,)."""
        return torch.cat([*(gradient.reshape(-1) for gradient in gradients), report])

    def unflatten(self, flat: Tensor) -> tuple[list[Tensor], Tensor]:
        """Returns the gradients and the report that `flatten` joined."""
        parameters = list(self._state.trained.values())
        *pieces, report = flat.split([*(value.numel() for value in parameters), REPORT])
        return [piece.view_as(value) for piece, value in zip(pieces, parameters, strict=True)], report

    def _pieces(self, batch: Arrays) -> list[Arrays]:
        """Returns the batch cut evenly by rows, in their order, into one part for each gradient accumulation."""
        count = self._train.gradient_accumulation
        split = {name: np.array_split(array, count) for name, array in batch.items()}
        return [{name: parts[index] for name, parts in split.items()} for index in range(count)]

    def _with_row_keys(self, number: int, batch: Arrays) -> Arrays:
        """Adds a key for each of this host's rows of the global batch, if the network's dropout draws from them."""
        if not self._state.noise:
            return batch
        worker, hosts = self._cluster.worker, self._cluster.hosts
        count = len(next(iter(batch.values()))) * hosts
        return {**batch, _ROW_KEYS: row_keys(self._config.seed, number, *host_rows(count, worker, hosts))}

    def _autocast(self) -> Any:
        """Returns a block whose matrix products are in bf16 if `train.precision` says so, else in fp32."""
        kind, is_bf16 = self._sharding.device.type, self._train.precision == "bf16"
        return torch.autocast(kind, dtype=torch.bfloat16, enabled=is_bf16)


def _rows_of_all(batch: Arrays) -> dict[str, HostArray]:
    """Returns each array with the layout of `rows_of`."""
    return {name: rows_of(array) for name, array in batch.items()}
