"""TorchTPU: one process a chip, behind `protocol.Backend`. Each process is what a host is with other backends: it has
its rows of the global batch, and all of the state.

The step's gradients are summed over all processes by torch_tpu's process group, in one vector with the report.
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
from torch import Tensor

from training.backends.torch.network import build_network
from training.backends.torch.state import HostState
from training.backends.torch.step import HostArray, StepInputs, TrainingStep, read_report
from training.backends.torch_tpu import internals
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
from training.models.torch.move import move
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

    def sum(self, value: Tensor) -> None:
        """Replaces a tensor by its sum over all processes. Raises LostPeer."""
        try:
            dist.all_reduce(value)
        except RuntimeError as error:
            raise_lost_peer(self._rendezvous, "adding up gradients", error)

    def set_seed(self, seed: int) -> None:
        torch.manual_seed(seed)

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
        # Operations run as they come, and nothing merges a second computation with the first: no barrier.
        network, noise = build_network(config, requirements, remat="attention", barrier=lambda _tensors: None)
        for module in network.modules():
            if isinstance(module, torch.nn.LayerNorm):
                module.register_forward_pre_hook(_widen)
        self._state = HostState(network, load(OPTIMIZERS[config.train.optimizer].torch), config.train, noise)
        self._step = TrainingStep(config, cluster, self._state, self._chip, load(TASKS[config.task].torch))
        self.opening_seconds = {"devices": opened - began, "model": time.monotonic() - opened}

    # --- steps

    def batches(self, task: Task, start: int) -> Generator[HostBatch, None, None]:
        return task.batches(start)

    def evaluation_batches(self, task: Task) -> Iterator[HostBatch]:
        return task.evaluation_batches()

    def step(self, number: int, batch: Arrays, signals: Signals) -> _PendingReport:
        inputs = self._send(self._step.inputs(number, batch, signals))
        flat = self._step.flatten(*self._step.gradients(number, inputs))
        self._chip.sum(flat)
        gradients, report = self._step.unflatten(flat)
        update = self._step.update(gradients, report, inputs.scalars[0])
        return _PendingReport(torch.cat([report, update]), trains=True)

    def evaluate(self, batch: Arrays, signals: Signals) -> _PendingReport:
        report = self._step.trace_evaluation(self._send(self._step.evaluation_inputs(batch, signals)))
        self._chip.sum(report)
        return _PendingReport(report, trains=False)

    def _send(self, inputs: StepInputs[HostArray]) -> StepInputs[Tensor]:
        """Uploads a step's inputs, before the first step the state too."""
        self._upload()
        return inputs.with_leaves(self._chip.send(inputs.leaves()))

    def _upload(self) -> None:
        """Moves the state to the device; later calls do nothing."""
        if self._state.is_uploaded:
            return
        move(self._state.network, self._chip.device)
        self._state.name_parameters()
        self._state.optimizer.move_state(lambda value: value.to(self._chip.device))
        if self._state.noise:
            self._state.noise.table = self._state.noise.table.to(self._chip.device)
        self._state.is_uploaded = True

    # --- state

    def tensor_specs(self) -> dict[str, TensorSpec]:
        return self._state.tensor_specs()

    def state_slices(self) -> StateSlices:
        return {}

    def snapshot_state(self, buffers: Mapping[str, memoryview]) -> Snapshot:
        """Copies the tensors before it returns."""
        tensors = self._state.tensors()
        for name, buffer in buffers.items():
            np.frombuffer(buffer, np.float32)[:] = tensors[name].detach().cpu().numpy().reshape(-1)
        return Snapshot()

    def load_state(self, tensors: Mapping[str, tuple[TensorSpec, memoryview]]) -> None:
        self._state.load(tensors)

    # --- what the framework counted

    def compilations(self) -> tuple[int, float]:
        """Returns none: torch_tpu compiles the operations by themselves, and does not say how many."""
        return 0, 0.0

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

    def __init__(self, report: Tensor, *, trains: bool) -> None:
        self._report, self._trains = report, trains

    def result(self) -> StepResult:
        values: list[Any] = self._report.cpu().tolist()
        return read_report(values, trains=self._trains)
