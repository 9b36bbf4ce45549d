"""TorchTPU: one process a chip, behind `protocol.Backend`. Each process is what a host is with other backends: it has
its rows of the global batch, and all of the state.

A step is one compiled program (`program.py`); gradients are summed over all processes in it, in one vector with the
report.
"""

from __future__ import annotations

import os
import time
import warnings
from collections.abc import Generator, Iterator, Mapping
from datetime import timedelta
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
from torch import Tensor

from training.backends.torch.network import build_network
from training.backends.torch.state import HostState
from training.backends.torch.step import HostArray, StepInputs, TrainingStep, read_report
from training.backends.torch_tpu import internals
from training.backends.torch_tpu.program import DeviceState, Program
from training.batch import Arrays, HostBatch, Signals, StepResult
from training.checkpoint.safetensors_file import TensorSpec
from training.checkpoint.slices import StateSlices
from training.checkpoint.snapshot import Snapshot
from training.config import TrainerConfig
from training.distributed.cluster import Cluster
from training.distributed.rendezvous import Rendezvous
from training.distributed.tcp_allreduce import raise_lost_peer
from training.distributed.torch_tpu import trainer_environment
from training.errors import UnusableTpu
from training.models.hugging_face import ModelRequirements
from training.registry import OPTIMIZERS, TASKS, load
from training.tasks.task import Task


class Chip:
    """This process's device, and the process group of all."""

    is_spmd, local_devices = False, 1

    def __init__(self, cluster: Cluster, rendezvous: Rendezvous, seconds: float) -> None:
        """Opens the device and connects all processes, which must all call it. A sum takes at most `seconds`. Raises
        BadInput in a process that has not TorchTPU's variables, and UnusableTpu."""
        trainer_environment(cluster, os.environ)
        # torch_tpu reads `.grad` of every operation's inputs, and warns of its own variables.
        warnings.filterwarnings("ignore", r"The \.grad attribute|<TorchTpu")
        torch.set_float32_matmul_precision("highest")  # products of fp32; products of bf16 stay as they are
        self._rendezvous = rendezvous
        try:
            internals.open_device()
            self.device = torch.device(internals.DEVICE)
            rendezvous.set_phase("connecting the processes")
            dist.init_process_group(internals.PROCESS_GROUP, timeout=timedelta(seconds=seconds))
        except RuntimeError as error:
            raise UnusableTpu(str(error), cluster.accelerator_type) from None
        self.devices: int = dist.get_world_size()

    def send(self, arrays: list[HostArray]) -> list[Tensor]:
        """Uploads arrays of this process."""
        return [torch.from_numpy(np.ascontiguousarray(value.array)).to(self.device) for value in arrays]

    def sum(self, value: Tensor) -> Tensor:
        """Records the sum of a tensor over all processes."""
        return functional.all_reduce(value, "sum", dist.group.WORLD)

    def read(self, report: Tensor) -> list[float]:
        """Waits for the numbers of a report. Raises LostPeer if the sum over all processes fails."""
        try:
            return report.cpu().tolist()  # type: ignore[no-any-return]
        except RuntimeError as error:
            raise_lost_peer(self._rendezvous, "adding up gradients", error)

    def set_seed(self, seed: int) -> None:
        """Does nothing: a program starts with the generator's state, which `TorchTpu.step` sets before."""

    def replicate_report(self, report: Tensor) -> Tensor:
        return report


class TorchTpu:
    """A model and its optimizer on this process's chip."""

    in_flight = 1

    def __init__(
        self,
        config: TrainerConfig,
        cluster: Cluster,
        rendezvous: Rendezvous,
        requirements: ModelRequirements,
    ) -> None:
        """Opens the device, connects the processes and builds the model."""
        began = time.monotonic()
        self._chip = Chip(cluster, rendezvous, config.rendezvous.seconds)
        self.devices = self._chip.devices
        opened = time.monotonic()
        rendezvous.set_phase("building the model")
        network, noise = build_network(config, requirements, remat="attention", barrier=internals.barrier)
        for module in network.modules():
            if isinstance(module, torch.nn.LayerNorm):
                module.register_forward_pre_hook(_widen)
        self._host = HostState(network, load(OPTIMIZERS[config.train.optimizer].torch), config.train, noise)
        self._state = DeviceState(self._host)
        self._step = TrainingStep(config, cluster, self._host, self._chip, load(TASKS[config.task].torch))
        self._training = Program(self._state, self._host, self._trace_step, changes=True)
        self._evaluation = Program(self._state, self._host, self._trace_evaluation, changes=False)
        self.opening_seconds = {"devices": opened - began, "model": time.monotonic() - opened}

    # --- steps

    def batches(self, task: Task, start: int) -> Generator[HostBatch, None, None]:
        return task.batches(start)

    def evaluation_batches(self, task: Task) -> Iterator[HostBatch]:
        return task.evaluation_batches()

    def step(self, number: int, batch: Arrays, signals: Signals) -> _PendingReport:
        inputs = self._send(self._step.inputs(number, batch, signals))
        torch.manual_seed(self._step.seed(number))
        return _PendingReport(self._training.run(inputs), self._chip, trains=True)

    def evaluate(self, batch: Arrays, signals: Signals) -> _PendingReport:
        inputs = self._send(self._step.evaluation_inputs(batch, signals))
        return _PendingReport(self._evaluation.run(inputs), self._chip, trains=False)

    def _trace_step(self, inputs: StepInputs[Tensor]) -> Tensor:
        """Records a step. Returns its report, (5 + 2,)."""
        flat = self._chip.sum(self._step.flatten(*self._step.gradients(0, inputs)))
        gradients, report = self._step.unflatten(flat)
        return torch.cat([report, self._step.update(gradients, report, inputs.scalars[0])])

    def _trace_evaluation(self, inputs: StepInputs[Tensor]) -> Tensor:
        """Records an evaluation. Returns its report and the task's counts, (5 + counts,)."""
        return self._chip.sum(self._step.trace_evaluation(inputs))

    def _send(self, inputs: StepInputs[HostArray]) -> StepInputs[Tensor]:
        """Uploads a step's inputs, before the first step the state too."""
        self._state.upload(self._chip.device)
        return inputs.with_leaves(self._chip.send(inputs.leaves()))

    # --- state

    def tensor_specs(self) -> dict[str, TensorSpec]:
        return self._host.tensor_specs()

    def state_slices(self) -> StateSlices:
        return {}

    def snapshot_state(self, buffers: Mapping[str, memoryview]) -> Snapshot:
        """Copies the tensors before it returns."""
        tensors = self._state.tensors
        for name, buffer in buffers.items():
            np.frombuffer(buffer, np.float32)[:] = tensors[name].detach().cpu().numpy().reshape(-1)
        return Snapshot()

    def load_state(self, tensors: Mapping[str, tuple[TensorSpec, memoryview]]) -> None:
        self._host.load(tensors)

    # --- what the framework counted

    def compilations(self) -> tuple[int, float]:
        return self._training.count + self._evaluation.count, self._training.seconds + self._evaluation.seconds

    def counters(self) -> dict[str, int]:
        return {}

    def device_memory(self) -> tuple[int, int]:
        return 0, 0  # not read: no documented call of torch_tpu tells it

    def fallbacks(self) -> list[str]:
        return []

    def preflight(self) -> str | None:
        return None


def _widen(_norm: Any, inputs: tuple[Tensor]) -> tuple[Tensor]:
    """Returns a normalization's input in fp32: autocast leaves it in bf16 on this device, and torch_tpu 0.2.0 can't
    compile a normalization whose weights are of another type."""
    return (inputs[0].float(),)


class _PendingReport:
    """A report that may not have been computed yet."""

    def __init__(self, report: Tensor, chip: Chip, *, trains: bool) -> None:
        self._report, self._chip, self._trains = report, chip, trains

    def result(self) -> StepResult:
        """Raises LostPeer."""
        values = self._chip.read(self._report)
        return read_report(values, trains=self._trains)
