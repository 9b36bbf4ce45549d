"""TorchTPU: one process a chip, behind `protocol.Backend`. Each process is what a host is with other backends: it has
its rows of the global batch, and all of the state or, with `train.mesh.fsdp`, a slice.

A step is one compiled program: forward, backward, the sum over all processes, clipping and the optimizer's update. It
is traced once for each shape of its batch, as a pure function of the state, of constants (the network's buffers and
dropout's table) and of the step's inputs. torch_tpu compiles it, and the program runs on the newest tensors of the
state, whose memory it reuses for the updated ones. All other Python values that the network reads become constants of
the program, as they were when it was traced."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn.utils import stateless

from training.backends.protocol import Backend, PendingReport
from training.backends.torch.state import HostState, build_network, no_place
from training.backends.torch.step import HostArray, StepInputs, Trace, TrainingStep
from training.backends.torch_tpu import internals
from training.backends.torch_tpu.processes import Chip
from training.batch import Arrays, Signals
from training.checkpoint.snapshot import Snapshot
from training.checkpoint.tensors import Slice, StateSlices, TensorSpec, key_in_part
from training.config import TrainerConfig
from training.distributed.cluster import Cluster
from training.distributed.rendezvous import Rendezvous
from training.models.hugging_face import ModelRequirements
from training.models.torch.network import move
from training.registry import OPTIMIZERS, TASKS, load

Shapes = tuple[tuple[int, ...], ...]  # of a step's inputs


class TorchTpu(Backend):
    """A model and its optimizer on this process's chip."""

    in_flight = 1

    def __init__(
        self, config: TrainerConfig, cluster: Cluster, rendezvous: Rendezvous, requirements: ModelRequirements
    ) -> None:
        """Opens the device, connects the processes (all call it) and builds the model. Raises UnusableTpu, BadInput."""
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
        self._host = HostState(network, load(OPTIMIZERS[config.train.optimizer]["torch"]), config.train, noise, shapes)
        self._state = DeviceState(self._host)
        self._step = TrainingStep(config, cluster, self._host, self._chip, load(TASKS[config.task].torch))
        self._training = StepProgram(self._state, self._host, self._trace_step, changes=True)
        self._evaluation = StepProgram(self._state, self._host, self._trace_evaluation, changes=False)
        self.opening_seconds = {"devices": opened - began, "model": time.monotonic() - opened}

    # --- steps

    def step(self, number: int, batch: Arrays, signals: Signals) -> PendingReport:
        """Uploads the state before the first step; starts a step, without waiting. All processes must call it."""
        inputs = self._send(self._step.inputs(number, batch, signals))
        torch.manual_seed(self._step.seed(number))
        return PendingReport(partial(self._chip.read, self._training.run(inputs)), trains=True)

    def evaluate(self, batch: Arrays, signals: Signals) -> PendingReport:
        """Uploads the state before the first call; starts an evaluation, without waiting. All processes call it."""
        inputs = self._send(self._step.evaluation_inputs(batch, signals))
        return PendingReport(partial(self._chip.read, self._evaluation.run(inputs)), trains=False)

    def _trace_step(self, inputs: StepInputs[Tensor]) -> Tensor:
        """Records a step, with the sums over all processes, which changes the state. Returns its report, (5 + 2,)."""
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
        """Uploads the state. Returns the bytes of this process's part of each tensor, the programs' first arguments."""
        self._state.upload(self._chip.device)
        return {name: value.numel() * 4 for name, value in self._state.tensors.items()}

    def state_slices(self) -> StateSlices:
        """Returns name -> slices, each with the processes that hold it, of the tensors that are split."""
        slices = {name: self._chip.slices(name, spec.shape) for name, spec in self._host.tensor_specs().items()}
        return {name: held for name, held in slices.items() if held}

    def snapshot_state(self, buffers: Mapping[str, memoryview]) -> Snapshot:
        """Uploads the state, and copies the tensors or slices that `buffers` names, as `key_in_part` does, into them.
        Returns a Snapshot that is already complete."""
        self._state.upload(self._chip.device)
        held = {}  # key in a checkpoint's part -> tensor
        for name, value in self._state.tensors.items():
            shape = self._host.tensor_specs()[name].shape
            held[key_in_part(name, self._chip.own_slice(name, shape), shape)] = value
        for key, buffer in buffers.items():
            np.frombuffer(buffer, np.float32)[:] = held[key].cpu().numpy().reshape(-1)
        return Snapshot()

    def slice_to_load(self, name: str, spec: TensorSpec) -> Slice:
        """Returns this process's slice of a tensor, or all of it. Raises Damaged for an unknown name, type or shape."""
        if self.tensor_specs().get(name) != spec:
            raise no_place(name, spec)
        return self._chip.own_slice(name, spec.shape)

    def load_state(self, tensors: Mapping[str, tuple[TensorSpec, memoryview]]) -> None:
        """Replaces tensors, or slices, others stay; only before the first step. Raises Damaged for an unknown name,
        type or shape: tensors named before it are changed then."""
        self._host.load(tensors)

    # --- what the framework counted

    def compilations(self) -> tuple[int, float]:
        """Returns the number of compiled programs, of steps and evaluations, and their seconds, with tracing."""
        seconds = self._training.seconds + self._evaluation.seconds
        return len(seconds), sum(seconds)


def _widen(_norm: Any, inputs: tuple[Tensor]) -> tuple[Tensor]:
    """Returns a normalization's input in fp32: autocast leaves it in bf16 on this device, and torch_tpu 0.2.0 can't
    compile a normalization whose weights are of another type."""
    return (inputs[0].float(),)


class DeviceState:
    """The state of a run, on the device after `upload`. The tensors of the network are then stale: `tensors` has the
    newest ones."""

    def __init__(self, host: HostState) -> None:
        self._host = host
        self.tensors = host.tensors()
        self._trained = {f"model/{name}" for name in host.trained}
        self.changed = [name for name in self.tensors if name in self._trained or not name.startswith("model/")]

    def upload(self, device: Any) -> None:
        """Moves the state to the device; later calls do nothing."""
        host = self._host
        if host.is_uploaded:
            return
        move(host.network, device)
        host.name_parameters()
        host.optimizer.move_state(lambda _name, value: value.to(device))
        if host.noise:
            host.noise.table = host.noise.table.to(device)
        self.tensors = {name: value.detach() for name, value in host.tensors().items()}
        self._buffers = dict(host.network.named_buffers())
        host.is_uploaded = True

    def leaves(self) -> list[Tensor]:
        """Returns the first arguments of every program: state, buffers, and dropout's table. Call `upload` before."""
        table = [self._host.noise.table] if self._host.noise else []
        return [*self.tensors.values(), *self._buffers.values(), *table]

    @contextmanager
    def replaced(self, leaves: Sequence[Tensor]) -> Iterator[None]:
        """Makes network, optimizer and dropout use `leaves`, in the order of `leaves()`, within the block."""
        host, values = self._host, iter(leaves)
        own = host.tensors()
        new = {name: next(values).detach().requires_grad_(name in self._trained) for name in own}
        model = {name: new[f"model/{name}"] for name in host.parameters}
        model |= {name: next(values) for name in self._buffers}
        with stateless._reparametrize_module(host.network, model, tie_weights=True):
            host.name_parameters()
            host.optimizer.move_state(lambda name, _value: new[name])
            if host.noise:
                table, host.noise.table = host.noise.table, next(values)
            try:
                yield
            finally:
                host.optimizer.move_state(lambda name, _value: own[name])
                if host.noise:
                    host.noise.table = table
        host.name_parameters()


class StepProgram:
    """One kind of step, compiled for each shape of its inputs."""

    def __init__(self, state: DeviceState, host: HostState, trace: Trace, *, changes: bool) -> None:
        """Compiles nothing yet. `trace`: records the step; `changes`: whether the step changes the state."""
        self._state, self._host, self._trace = state, host, trace
        self._changed = state.changed if changes else []
        self._compiled: dict[Shapes, Callable[..., Sequence[Tensor]]] = {}
        self.seconds: list[float] = []  # of each compilation

    def run(self, inputs: StepInputs[Tensor]) -> Tensor:
        """Starts a step, compiled first for new shapes, keeps its new state, and returns its report without waiting."""
        arguments = [*self._state.leaves(), *inputs.leaves()]
        shapes = tuple(tuple(value.shape) for value in inputs.leaves())
        if shapes not in self._compiled:
            began = time.monotonic()
            self._compiled[shapes] = self._compile(arguments, inputs)
            self.seconds.append(time.monotonic() - began)
        *values, report = self._compiled[shapes](arguments)
        self._state.tensors.update(zip(self._changed, values, strict=True))
        return report

    def _compile(self, arguments: Sequence[Tensor], inputs: StepInputs[Tensor]) -> Callable[..., Sequence[Tensor]]:
        """Traces and compiles the step for the shapes of `arguments`. The program returned takes such arguments, reuses
        the memory of the tensors that it changes, and returns their new values, then the report."""
        first = len(arguments) - len(inputs.leaves())

        def step(*leaves: Tensor) -> list[Tensor]:
            """Returns the new values of the changed tensors, then the report, for the leaves of state and inputs."""
            with self._state.replaced(leaves[:first]):
                report = self._trace(inputs.with_leaves(leaves[first:]))
                tensors = self._host.tensors()
                return [*(tensors[name].detach() for name in self._changed), report]

        graph = make_fx(step, {torch.ops.aten.cumsum.default: _cumsum}, tracing_mode="fake")(*arguments)
        names = list(self._state.tensors)
        return internals.compile_graph(graph, arguments, [names.index(name) for name in self._changed])


def _cumsum(values: Tensor, dim: int, *, dtype: Any = None) -> Tensor:
    """Returns the cumulative sum along the last axis, as masked sums over all values; NotImplemented for other axes.
    torch_tpu's own aborts the compiler behind a virtual TPU. transformers finds borders of documents with it."""
    if dim not in (-1, values.ndim - 1):
        return NotImplemented
    place = torch.arange(values.shape[-1], device=values.device)
    return torch.where(place <= place.unsqueeze(-1), values.unsqueeze(-2), 0).sum(-1, dtype=dtype)
