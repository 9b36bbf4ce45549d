"""TorchTPU: one process a chip, behind `protocol.Backend`. Each process is what a host is with other backends: it has
its rows of the global batch, and all of the state or, with `train.mesh.fsdp`, a slice. A step is one compiled program,
with the sums over all processes in it.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from training.backends.protocol import Backend
from training.backends.torch.network import build_network
from training.backends.torch.state import HostState, no_place
from training.backends.torch.step import HostArray, StepInputs, TrainingStep, read_report
from training.backends.torch_tpu import internals
from training.backends.torch_tpu.processes import Chip
from training.backends.torch_tpu.program import DeviceState, StepProgram
from training.batch import Arrays, Signals, StepResult
from training.checkpoint.safetensors_file import TensorSpec
from training.checkpoint.slices import Slice, StateSlices, key_in_part
from training.checkpoint.snapshot import Snapshot
from training.config import TrainerConfig
from training.distributed.cluster import Cluster
from training.distributed.rendezvous import Rendezvous
from training.models.hugging_face import ModelRequirements
from training.registry import OPTIMIZERS, TASKS, load


class TorchTpu(Backend):
    """A model and its optimizer on this process's chip."""

    in_flight = 1

    def __init__(
        self, config: TrainerConfig, cluster: Cluster, rendezvous: Rendezvous, requirements: ModelRequirements
    ) -> None:
        """Opens the device, connects the processes and builds the model. Raises UnusableTpu and BadInput."""
        began = time.monotonic()
        self._chip = Chip(cluster, rendezvous, config.rendezvous.seconds, config.train.mesh.fsdp)
        self.devices = self._chip.devices
        opened = time.monotonic()
        rendezvous.set_phase("building the model")
        network, noise = build_network(config, requirements, remat="attention", barrier=internals.barrier)
        for module in network.modules():
            if isinstance(module, torch.nn.LayerNorm):
                module.register_forward_pre_hook(_widen)
        shapes = self._chip.split_matrices(network)
        self._host = HostState(network, load(OPTIMIZERS[config.train.optimizer].torch), config.train, noise, shapes)
        self._state = DeviceState(self._host)
        self._step = TrainingStep(config, cluster, self._host, self._chip, load(TASKS[config.task].torch))
        self._training = StepProgram(self._state, self._host, self._trace_step, changes=True)
        self._evaluation = StepProgram(self._state, self._host, self._trace_evaluation, changes=False)
        self.opening_seconds = {"devices": opened - began, "model": time.monotonic() - opened}

    # --- steps

    def step(self, number: int, batch: Arrays, signals: Signals) -> _PendingReport:
        inputs = self._send(self._step.inputs(number, batch, signals))
        torch.manual_seed(self._step.seed(number))
        return _PendingReport(self._training.run(inputs), self._chip, trains=True)

    def evaluate(self, batch: Arrays, signals: Signals) -> _PendingReport:
        inputs = self._send(self._step.evaluation_inputs(batch, signals))
        return _PendingReport(self._evaluation.run(inputs), self._chip, trains=False)

    def _trace_step(self, inputs: StepInputs[Tensor]) -> Tensor:
        """Records a step. Returns its report, (5 + 2,)."""
        gradients, report = self._step.gradients(0, inputs)
        named = dict(zip(self._host.trained, gradients, strict=True))
        gradients, report, squares = self._chip.add_up(named, report)
        return torch.cat([report, self._step.update(gradients, report, inputs.scalars[0], squares)])

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

    def state_bytes(self) -> dict[str, int]:
        """Returns the bytes of this process's part of each tensor, which are the first arguments of every program."""
        self._state.upload(self._chip.device)
        return {name: value.numel() * 4 for name, value in self._state.tensors.items()}

    def state_slices(self) -> StateSlices:
        slices = {name: self._chip.slices(name, spec.shape) for name, spec in self._host.tensor_specs().items()}
        return {name: held for name, held in slices.items() if held}

    def snapshot_state(self, buffers: Mapping[str, memoryview]) -> Snapshot:
        """Copies tensors, or this process's slices, to host memory. The returned snapshot is complete."""
        self._state.upload(self._chip.device)
        held = {}  # key in a checkpoint's part -> tensor
        for name, value in self._state.tensors.items():
            shape = self._host.tensor_specs()[name].shape
            held[key_in_part(name, self._chip.own_slice(name, shape), shape)] = value
        for key, buffer in buffers.items():
            np.frombuffer(buffer, np.float32)[:] = held[key].cpu().numpy().reshape(-1)
        return Snapshot()

    def slice_to_load(self, name: str, spec: TensorSpec) -> Slice:
        if self.tensor_specs().get(name) != spec:
            raise no_place(name, spec)
        return self._chip.own_slice(name, spec.shape)

    def load_state(self, tensors: Mapping[str, tuple[TensorSpec, memoryview]]) -> None:
        self._host.load(tensors)

    # --- what the framework counted

    def compilations(self) -> tuple[int, float]:
        return self._training.count + self._evaluation.count, self._training.seconds + self._evaluation.seconds


def _widen(_norm: Any, inputs: tuple[Tensor]) -> tuple[Tensor]:
    """Returns a normalization's input in fp32: autocast leaves it in bf16 on this device, and torch_tpu 0.2.0 can't
    compile a normalization whose weights are of another type."""
    return (inputs[0].float(),)


class _PendingReport:
    """A report that may not have been computed yet."""

    def __init__(self, report: Tensor, chip: Chip, *, trains: bool) -> None:
        self._report, self._chip, self._trains = report, chip, trains

    def result(self) -> StepResult:
        """Waits for the report and returns its sums, signals, and update or counts. Raises LostPeer."""
        values = self._chip.read(self._report)
        return read_report(values, trains=self._trains)
