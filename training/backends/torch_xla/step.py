"""The whole training step in one view: forward, loss, backward, accumulation, clipping, learning rate, optimizer.

Few programs: everything that changes with the step (learning rate, the optimizer's scalars, the seed of dropout)
reaches the device as data, never as a constant. Weights and the optimizer's state are fp32; bf16 is autocast.

Nothing here runs on a device: torch_xla records the operations, and the next sync runs them as one program. Every
tensor that is alive at a sync becomes an output of its program. So gradients live in no variable that outlasts a call.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch
import torch_xla.core.xla_model as xm
from torch import Tensor

from training.backends.seeds import step_seed
from training.backends.torch_xla.dropout import row_keys
from training.backends.torch_xla.sharding import REPORT, DataParallel, HostArray, replicated, rows_of
from training.backends.torch_xla.state import State
from training.batch import SUMS, Arrays, Signals
from training.config import TrainerConfig
from training.data.sampling.order import host_rows
from training.distributed.cluster import Cluster
from training.optim.schedule import learning_rate

# Inputs of a step beside its batch's arrays, which are named <array>/<number of the accumulation>.
_ROW_KEYS = "row_keys"  # beside the arrays: what dropout draws from
SCALARS, _SIGNALS = "scalars", "signals"

# A task's half: (network, rows) -> the sums (3,) of training.batch.SUMS, and what else an evaluation counts.
TaskSums = Callable[[Any, dict[str, Tensor]], tuple[Tensor, Tensor | None]]


class TrainingStep:
    """The step of one run, as operations on its state."""

    def __init__(
        self, config: TrainerConfig, cluster: Cluster, state: State, sharding: DataParallel, task_sums: TaskSums
    ) -> None:
        """`task_sums`: of the configuration's task."""
        self._config, self._train, self._cluster = config, config.train, cluster
        self._state, self._sharding, self._task_sums = state, sharding, task_sums

    def inputs(self, number: int, batch: Arrays, signals: Signals) -> dict[str, HostArray]:
        """All that a step reads beside the state: what changes with its number (the learning rate, and the optimizer's
        scalars), the signals, and for each gradient accumulation its rows."""
        scalars = (learning_rate(self._train, number), *self._state.optimizer.step_scalars(number))
        pieces = self._pieces(self._with_row_keys(number, batch))
        return {
            SCALARS: replicated(np.array(scalars, dtype=np.float32)),
            _SIGNALS: self._sharding.signal_rows(signals),
            **{f"{name}/{index}": rows_of(array) for index, rows in enumerate(pieces) for name, array in rows.items()},
        }

    def seed(self, number: int) -> int:
        """Of PyTorch's generator in a step, for networks that use it."""
        return step_seed(self._config.seed, number, 0 if self._sharding.is_spmd else self._cluster.worker)

    def trace(self, number: int, inputs: Mapping[str, Tensor]) -> Tensor:
        """A step that has not run: its report (5 + 2,), and the state becomes what the step makes of it. `inputs`: on
        the devices."""
        gradients, report = self.gradients(number, inputs)
        update = self.update(gradients, report, inputs[SCALARS])
        return self._sharding.replicate_report(torch.cat([report, update]))

    def gradients(self, number: int, inputs: Mapping[str, Tensor]) -> tuple[list[Tensor], Tensor]:
        """Of the summed loss over this host's rows (under SPMD: over all rows), with the report: (5,)."""
        xm.set_rng_state(self.seed(number), self._sharding.device)
        parameters = list(self._state.parameters.values())
        gradients: list[Tensor] = []
        report = inputs[_SIGNALS].sum(0)
        for index in range(self._train.gradient_accumulation):
            piece = _rows_of_piece(inputs, index)
            if self._state.noise:
                self._state.noise.rows = piece.pop(_ROW_KEYS)
            with self._autocast():
                sums, _ = self._task_sums(self._state.network, piece)  # counts that nobody reads are not computed
            # On autograd's own thread the results would stay alive a little longer than here, sometimes beyond the
            # sync: another program.
            with torch.autograd.set_multithreading_enabled(False):
                more = torch.autograd.grad(sums[0], parameters, allow_unused=True, materialize_grads=True)
            gradients = [total + new for total, new in zip(gradients, more, strict=True)] if gradients else list(more)
            report = torch.cat([report[: len(SUMS)] + sums.detach(), report[len(SUMS) :]])
        return gradients, report

    def update(self, gradients: list[Tensor], report: Tensor, scalars: Tensor) -> Tensor:
        """Clips gradients of the summed loss, and lets the optimizer change the state. Returns what
        training.batch.UPDATE names: (2,)."""
        loss, weight = report[SUMS.index("loss")], report[SUMS.index("weight")]
        with torch.no_grad():
            scale = 1 / weight.clamp(min=1e-6)  # of the sum's gradient, to the mean's
            norm = torch.stack([gradient.square().sum() for gradient in gradients]).sum().sqrt() * scale
            if self._train.clip_norm is not None:
                scale = scale * (self._train.clip_norm / (norm + 1e-6)).clamp(max=1)
            if self._train.on_nonfinite == "stop":
                self._state.optimizer.update(self._state.parameters, gradients, scale, *scalars.unbind())
                return torch.stack([norm, torch.zeros_like(norm)])
            is_finite = torch.isfinite(norm) & torch.isfinite(loss / weight)
            before = [value.clone() for value in self._state.tensors().values()]
            self._state.optimizer.update(self._state.parameters, gradients, scale, *scalars.unbind())
            for value, old in zip(self._state.tensors().values(), before, strict=True):
                value.copy_(torch.where(is_finite, value, old))
            return torch.stack([norm, (~is_finite).to(norm.dtype)])

    def evaluation_inputs(self, batch: Arrays, signals: Signals) -> dict[str, HostArray]:
        """All that an evaluation reads beside the state."""
        rows = {f"{name}/0": rows_of(array) for name, array in batch.items()}
        return {_SIGNALS: self._sharding.signal_rows(signals), **rows}

    def trace_evaluation(self, inputs: Mapping[str, Tensor]) -> Tensor:
        """The report and the counts, (5 + counts,), of an evaluation that has not run. `inputs`: on the devices."""
        network = self._state.network
        network.eval()
        with torch.no_grad(), self._autocast():
            sums, counts = self._task_sums(network, _rows_of_piece(inputs, 0))
        network.train()
        report = inputs[_SIGNALS].sum(0)
        further = [] if counts is None else [counts.flatten()]
        return self._sharding.replicate_report(torch.cat([report[: len(SUMS)] + sums, report[len(SUMS) :], *further]))

    def flatten(self, gradients: list[Tensor], report: Tensor) -> Tensor:
        """(all parameters + 5,): what hosts add up."""
        return torch.cat([*(gradient.reshape(-1) for gradient in gradients), report])

    def unflatten(self, flat: Tensor) -> tuple[list[Tensor], Tensor]:
        """The gradients and the report that `flatten` has joined."""
        parameters = list(self._state.parameters.values())
        *pieces, report = flat.split([*(value.numel() for value in parameters), REPORT])
        return [piece.view_as(value) for piece, value in zip(pieces, parameters, strict=True)], report

    def _pieces(self, batch: Arrays) -> list[Arrays]:
        """The rows of each gradient accumulation, in order."""
        count = self._train.gradient_accumulation
        split = {name: np.array_split(array, count) for name, array in batch.items()}
        return [{name: parts[index] for name, parts in split.items()} for index in range(count)]

    def _with_row_keys(self, number: int, batch: Arrays) -> Arrays:
        """With a number for each of this host's rows of the global batch, for dropout."""
        if not self._state.noise:
            return batch
        worker, hosts = self._cluster.worker, self._cluster.hosts
        count = len(next(iter(batch.values()))) * hosts
        return {**batch, _ROW_KEYS: row_keys(self._config.seed, number, *host_rows(count, worker, hosts))}

    def _autocast(self) -> Any:
        return torch.autocast("xla", dtype=torch.bfloat16, enabled=self._train.precision == "bf16")


def _rows_of_piece(inputs: Mapping[str, Tensor], index: int) -> dict[str, Tensor]:
    ending = f"/{index}"
    return {name.removesuffix(ending): value for name, value in inputs.items() if name.endswith(ending)}
