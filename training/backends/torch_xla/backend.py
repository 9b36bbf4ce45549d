"""PyTorch/XLA: one process a host, on TPU and on CPU, behind `protocol.Backend`.

On TPU (and with CPU_NUM_DEVICES above 1) the process is a member of an SPMD program (`sharding.py`). On a CPU there is
one device a process and no collective between processes (two processes would silently train apart), so the gradients
of the host batch come to the host, are added by gloo, and go back: two programs a step instead of one.

The training step itself is in `step.py`, the state in `state.py`, the network in `model.py`.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Generator, Iterator, Mapping
from typing import TYPE_CHECKING, Any

import numpy as np
import torch_xla
from torch import Tensor
from torch_xla.backends import set_mat_mul_precision

from training.backends.compile_cache.configured import open_cache
from training.backends.torch_xla import counters
from training.backends.torch_xla.model import build, patch_modules
from training.backends.torch_xla.programs.by_position import StepPrograms
from training.backends.torch_xla.sharding import REPORT, DataParallel, HostArray
from training.backends.torch_xla.state import State
from training.backends.torch_xla.step import SCALARS, TrainingStep
from training.backends.torch_xla.tracing import hash_program
from training.batch import SUMS, Arrays, HostBatch, Signals, StepResult
from training.checkpoint.safetensors_file import TensorSpec
from training.checkpoint.snapshot import Snapshot
from training.config import TrainerConfig
from training.distributed.cluster import Cluster
from training.distributed.rendezvous import Rendezvous
from training.machine.processor import describe_slow_products, read_flags
from training.models.hugging_face import ModelRequirements
from training.preflight.agreement import CheckedPrograms
from training.registry import OPTIMIZERS, TASKS, load
from training.tasks.task import Task
from training.telemetry.console import note, warn

if TYPE_CHECKING:
    from training.backends.torch_xla.gloo import Exchange


class TorchXla:
    """A model and its optimizer on the devices of this slice."""

    def __init__(
        self,
        config: TrainerConfig,
        cluster: Cluster,
        rendezvous: Rendezvous,
        requirements: ModelRequirements,
        token: str,
    ) -> None:
        """Opens the devices, connects the hosts and builds the model. `token`: of this group of processes."""
        # fp32 products are products of fp32; TPUs would round their factors to bf16. Products of bf16 stay as they are.
        logging.getLogger("torch_xla.backends").setLevel(logging.ERROR)  # it warns of every call
        set_mat_mul_precision("highest")
        began, environment = time.monotonic(), os.environ
        library = environment.get("TPU_LIBRARY_PATH") or environment.get("PTXLA_TPU_LIBRARY_PATH")
        self._cache = open_cache(environment, library, f"torch_xla {torch_xla.__version__}", warn)
        self._sharding = DataParallel(cluster)
        opened = time.monotonic()
        self.devices = self._sharding.devices
        self._exchange = None
        if cluster.hosts > 1 and not self._sharding.is_spmd:
            from training.backends.torch_xla.gloo import Exchange

            self._exchange = Exchange(cluster, rendezvous, token, config.rendezvous.seconds)
        self.in_flight = 0 if self._exchange else 2 if self._sharding.is_spmd else 1
        rendezvous.set_phase("building the model")
        network: Any = build(config.model, requirements, dropout=config.train.dropout, seed=config.seed)
        noise = patch_modules(network, config.train.remat, otherwise="attention" if self._sharding.is_spmd else "none")
        self._checked = CheckedPrograms(os.environ, comparable=self._sharding.is_spmd, warns=cluster.is_first)
        # What earlier runs in this process have counted.
        self._compiled_before, self._transfers_before = counters.compiled(), counters.transfers()
        self._fallbacks_before = counters.fallbacks()
        self._state = State(network, load(OPTIMIZERS[config.train.optimizer].torch), config.train, noise)
        self._stepped = False
        task_sums = load(TASKS[config.task].torch)
        self._step = TrainingStep(config, cluster, self._state, self._sharding, task_sums)
        say, warn_here = (note, warn) if cluster.is_first else (_silent, _silent)
        is_own = environment["PJRT_DEVICE"] == "CPU" and not self._sharding.is_spmd  # preflight traces for others
        if is_own and (slow := describe_slow_products(read_flags())):
            say(slow)
        self._training = StepPrograms("training", self._state, say, warn_here)
        self._evaluation = StepPrograms("evaluation", self._state, say, warn_here)
        if self._exchange:
            self.trace_always()
        self.opening_seconds = {"devices": opened - began, "model": time.monotonic() - opened}

    # --- steps

    def batches(self, task: Task, start: int) -> Generator[HostBatch, None, None]:
        return task.batches(start)

    def evaluation_batches(self, task: Task) -> Iterator[HostBatch]:
        return task.evaluation_batches()

    def step(self, number: int, batch: Arrays, signals: Signals) -> _PendingStep:
        inputs = self._send(self._step.inputs(number, batch, signals))
        if self._exchange:
            return self._step_of_hosts(number, inputs, self._exchange)

        def trace() -> Tensor:
            report = self._state.record(lambda: self._step.trace(number, inputs), trains=True)
            self._checked.compare(
                "training", _shapes(batch), lambda: hash_program([*self.state_buffers().values(), report])
            )
            return report

        report = self._training.run(_named_shapes(batch), inputs, self._step.seed(number), trace)
        if not self._stepped:
            self._sharding.require_replicated(self.state_buffers())
            self._stepped = True
        return _PendingStep(self._state, report, trains=True)

    def _step_of_hosts(self, number: int, inputs: Mapping[str, Tensor], exchange: Exchange) -> _PendingStep:
        """Two programs, traced every step, and between them the sum over all hosts."""
        flat = self._step.flatten(*self._step.gradients(number, inputs))
        torch_xla.sync()
        total = self._state.to_host(flat)
        exchange.sum(total)
        flat = total.to(self._sharding.device)
        update = self._step.update(*self._step.unflatten(flat), inputs[SCALARS])
        self._state.wait_before_mutation()
        torch_xla.sync()
        return _PendingStep(self._state, total[-REPORT:], update, trains=True)

    def evaluate(self, batch: Arrays, signals: Signals) -> _PendingStep:
        inputs = self._send(self._step.evaluation_inputs(batch, signals))

        def trace() -> Tensor:
            report = self._state.record(lambda: self._step.trace_evaluation(inputs), trains=False)
            self._checked.compare("evaluation", _shapes(batch), lambda: hash_program([report]))
            return report

        report = self._evaluation.run(_named_shapes(batch), inputs, None, trace)
        if self._exchange:
            report = self._state.to_host(report)
            self._exchange.sum(report)
        return _PendingStep(self._state, report, trains=False)

    def trace_step(self, number: int, batch: Arrays, signals: Signals) -> Tensor:
        """The report of a step that has not run: what a host without other hosts runs."""
        inputs = self._send(self._step.inputs(number, batch, signals))
        return self._state.record(lambda: self._step.trace(number, inputs), trains=True)

    def trace_evaluation(self, batch: Arrays, signals: Signals) -> Tensor:
        """The report and counts of an evaluation that has not run."""
        inputs = self._send(self._step.evaluation_inputs(batch, signals))
        return self._state.record(lambda: self._step.trace_evaluation(inputs), trains=False)

    def trace_always(self) -> None:
        """From here on every step records its operations, for whoever looks at them."""
        self._state.keep_apart()
        for programs in (self._training, self._evaluation):
            programs.trace_always()

    def _send(self, inputs: Mapping[str, HostArray]) -> dict[str, Tensor]:
        self._state.upload(self._sharding)
        return self._sharding.send(inputs)

    # --- state

    def tensor_specs(self) -> dict[str, TensorSpec]:
        return self._state.tensor_specs()

    def snapshot_state(self, buffers: Mapping[str, memoryview]) -> Snapshot:
        return self._state.snapshot(buffers, self._sharding)

    def load_state(self, tensors: Mapping[str, tuple[TensorSpec, memoryview]]) -> None:
        self._state.load(tensors)

    def state_buffers(self) -> dict[str, Tensor]:
        """What the devices hold of the state, by name: tensors, and stacks of vectors."""
        return self._state.buffers()

    def upload(self) -> Any:
        """Puts the state on the devices, and returns the network, for whoever looks at its programs."""
        self._state.upload(self._sharding)
        return self._state.network

    # --- what the framework counted

    def compilations(self) -> tuple[int, float]:
        (count, seconds), (count_before, seconds_before) = counters.compiled(), self._compiled_before
        return count - count_before, seconds - seconds_before

    def counters(self) -> dict[str, int]:
        own = {name: count - self._transfers_before[name] for name, count in counters.transfers().items()}
        cached = {"programs_from_cache": self._cache.loaded} if self._cache else {}
        syncs = own["device_to_host_transfers"] - self._state.planned_transfers
        return {**own, "device_to_host_syncs": syncs, **cached}

    def fallbacks(self) -> list[str]:
        now, before = counters.fallbacks(), self._fallbacks_before
        # Reading a number (a result) is counted as one, but is planned.
        return sorted(name for name in now if now[name] > before.get(name, 0) and name != "aten::_local_scalar_dense")

    def preflight(self) -> str | None:
        return self._checked.summary()

    def close(self) -> None:
        self._exchange = None


def _named_shapes(batch: Arrays) -> tuple[tuple[str, tuple[int, ...]], ...]:
    return tuple((name, array.shape) for name, array in batch.items())


def _silent(_line: str) -> None:
    """On other hosts than the first."""


def _shapes(batch: Arrays) -> list[tuple[int, ...]]:
    return [array.shape for array in batch.values()]


class _PendingStep:
    """A report in one or several tensors that may not have been computed yet. One of a step that `trains` ends with
    training.batch.UPDATE, others with the task's counts."""

    def __init__(self, state: State, *report: Tensor, trains: bool) -> None:
        self._state, self._report, self._trains = state, report, trains

    def result(self) -> StepResult:
        values = [value for tensor in self._report for value in self._state.to_host(tensor).tolist()]
        stop, save = values[len(SUMS) : REPORT]
        sums, signals = dict(zip(SUMS, values, strict=False)), Signals(stop > 0, save > 0)
        further = values[REPORT:]
        if self._trains:
            norm, skipped = further
            return StepResult(sums, signals, gradient_norm=norm, skipped=skipped > 0)
        return StepResult(sums, signals, np.array(further) if further else None)
