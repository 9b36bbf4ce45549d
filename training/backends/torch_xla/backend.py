"""PyTorch/XLA: one process a host, on TPU and on CPU, behind `protocol.Backend`.

On TPU (and with CPU_NUM_DEVICES above 1) the process is a member of an SPMD program (`sharding.py`). On a CPU there is
one device a process and no collective between processes (two processes would silently train apart), so the gradients
of the host batch come to the host, are added over TCP, and go back: two programs a step instead of one.

The training step itself is in `step.py`, its cached programs in `step_cache.py`, the state in `state.py`.
"""

from __future__ import annotations

import contextlib
import logging
import os
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import torch
import torch_xla
import torch_xla.core.xla_model as xm
import torch_xla.debug.metrics as xla_metrics
from torch import Tensor
from torch_xla.backends import set_mat_mul_precision
from torch_xla.debug import profiler

from training.accelerators import ACCELERATORS
from training.backends.compile_cache import open_cache
from training.backends.protocol import REPORT, Backend, PendingReport
from training.backends.torch.state import build_network
from training.backends.torch.step import HostArray, StepInputs, TrainingStep
from training.backends.torch_xla import internals
from training.backends.torch_xla.processor import describe_slow_products
from training.backends.torch_xla.sharding import DataParallel, has_tpu_cores, memory_of
from training.backends.torch_xla.splash import splash_attention
from training.backends.torch_xla.state import State
from training.backends.torch_xla.step_cache import Shapes, Step, StepCache
from training.batch import Arrays, Signals
from training.checkpoint.snapshot import Snapshot
from training.checkpoint.tensors import StateSlices, TensorSpec
from training.config import TrainerConfig
from training.distributed.cluster import Cluster
from training.distributed.rendezvous import Rendezvous
from training.distributed.tcp_allreduce import TcpAllReduce
from training.machine import tell
from training.models.hugging_face import ModelRequirements
from training.models.torch.layer_scan import choose_layers
from training.models.torch.long_attention import Kernel
from training.models.torch.network import slow_parts
from training.preflight.checked_programs import CheckedPrograms
from training.preflight.compiler import hash_hlo
from training.registry import OPTIMIZERS, TASKS, load
from training.telemetry.console import warn


class TorchXla(Backend):
    """A model and its optimizer on the devices of this slice."""

    in_flight: int = 0

    def __init__(
        self,
        config: TrainerConfig,
        cluster: Cluster,
        rendezvous: Rendezvous,
        requirements: ModelRequirements,
        *,
        only_traces: bool = False,
    ) -> None:
        """Opens the devices, connects the hosts and builds the model; one that `only_traces` without weights, if it
        can. Raises UnusableTpu, BadInput and TrainError."""
        # fp32 products are products of fp32; TPUs would round their factors to bf16. Products of bf16 stay as they are.
        logging.getLogger("torch_xla.backends").disabled = True  # it warns of every call
        set_mat_mul_precision("highest")
        logging.getLogger("torch_xla.backends").disabled = False
        began, environment = time.monotonic(), os.environ
        library = environment.get("TPU_LIBRARY_PATH") or environment.get("PTXLA_TPU_LIBRARY_PATH")
        self._cache = open_cache(environment, library, f"torch_xla {torch_xla.__version__}", warn)
        self.sharding = DataParallel(cluster, config.train.mesh.fsdp)
        opened = time.monotonic()
        self.devices = self.sharding.devices
        self._exchange = None
        if cluster.hosts > 1 and not self.sharding.is_spmd:
            self._exchange = TcpAllReduce(cluster, rendezvous, config.rendezvous.seconds)
        self.in_flight = 0 if self._exchange else 2 if self.sharding.is_spmd else 1
        rendezvous.set_phase("building the model")
        network, noise = build_network(
            config, requirements, remat="attention" if self.sharding.is_spmd else "none", only_traces=only_traces,
            barrier=xm.optimization_barrier_, loop=internals.loop_over,
            kernel=self._find_kernel(config, cluster, only_traces),
        )  # fmt: skip
        say, warn_here = (tell, warn) if cluster.is_first else (lambda _line: None,) * 2
        self._checked = CheckedPrograms(os.environ, comparable=self.sharding.is_spmd, warn=warn_here)
        # What earlier runs in this process have counted.
        self._before = read_counts()
        layers = choose_layers(network, config.train) if self.sharding.is_spmd else None
        self.state = State(network, load(OPTIMIZERS[config.train.optimizer]["torch"]), config.train, noise, layers)
        self._stepped = False
        task_sums = load(TASKS[config.task].torch)
        self._step = TrainingStep(config, cluster, self.state, self.sharding, task_sums)
        is_fast = noise is not None or layers is not None or network.attention_note is not None
        is_own = environment["PJRT_DEVICE"] == "CPU" and not self.sharding.is_spmd  # preflight traces for others
        slow = describe_slow_products() if is_own else None
        for line in filter(None, (network.attention_note, slow_parts(network, is_fast=is_fast), slow)):
            say(line)
        self._training = StepCache("training", self.state, partial(self._compare, "training"), say, warn_here)
        self._evaluation = StepCache("evaluation", self.state, partial(self._compare, "evaluation"), say, warn_here)
        self.opening_seconds = {"devices": opened - began, "model": time.monotonic() - opened}

    def _find_kernel(self, config: TrainerConfig, cluster: Cluster, only_traces: bool) -> Kernel | str:
        """Returns the kernel for attention over long rows, or why there is none."""
        target = ACCELERATORS.get(cluster.accelerator_type or "")
        if not (only_traces or has_tpu_cores()) or (target and not target.generation.runs_kernels):
            return "the Pallas kernel needs a TPU of generation v4 or newer"
        if config.train.precision == "fp32":
            return "the Pallas kernel multiplies in bf16, and train.precision is fp32"
        return splash_attention(self.sharding)

    # --- steps

    def step(self, number: int, batch: Arrays, signals: Signals) -> PendingReport:
        """Starts the step; with other CPU hosts, waits for the sum of all gradients. Raises TrainError as
        `StepCache.run`, and after the first step if the compiler may place the state otherwise than declared."""
        inputs = self._send(self._step.inputs(number, batch, signals))
        if self._exchange:
            return self._step_of_hosts(number, inputs, self._exchange)
        trace = partial(self._step.trace, number)
        report = self._training.run(Step(_shapes(batch), inputs, self._step.seed(number), trace))
        if not self._stepped:
            self.sharding.require_declared(self.state.buffers())
            self._stepped = True
        return self._pending(report, trains=True)

    def _step_of_hosts(self, number: int, inputs: StepInputs[Tensor], exchange: TcpAllReduce) -> PendingReport:
        """Runs two programs, traced every step, and between them the sum over all hosts."""
        with self.state.recording(changes=False):
            flat = self._step.flatten(*self._step.gradients(number, inputs))
        torch_xla.sync()
        total = torch.from_numpy(exchange.sum(self.state.to_host(flat).numpy()))
        flat = total.to(self.sharding.device)
        update = self._step.update(*self._step.unflatten(flat), inputs.scalars[0])
        self.state.wait_before_mutation()
        torch_xla.sync()
        return self._pending(total[-REPORT:], update, trains=True)

    def evaluate(self, batch: Arrays, signals: Signals) -> PendingReport:
        """Starts the evaluation; with other CPU hosts, waits for the sums of all."""
        inputs = self._send(self._step.evaluation_inputs(batch, signals))
        report = self._evaluation.run(Step(_shapes(batch), inputs, None, self._step.trace_evaluation))
        if self._exchange:
            report = torch.from_numpy(self._exchange.sum(self.state.to_host(report).numpy()))
        return self._pending(report, trains=False)

    def _pending(self, *report: Tensor, trains: bool) -> PendingReport:
        """Returns a report of one or several tensors; reading it proves the programs that the cache has just loaded.
        Raises an interrupt that came while one was compiled."""
        proofs = self._cache.take_proofs() if self._cache else []

        def read() -> list[float]:
            """Waits for the numbers, counts each copy as planned, and proves the programs."""
            values = [value for tensor in report for value in self.state.to_host(tensor).tolist()]
            for prove in proofs:
                prove()
            return values

        return PendingReport(read, trains=trains)

    def trace(self, kind: str, batch: Arrays) -> Tensor:
        """Uploads inputs and, at first, the state; records the first step of a single host (`kind` is "training"), or
        an evaluation. Returns its report, uncomputed."""
        trains = kind == "training"
        signals = Signals()
        inputs = self._step.inputs(0, batch, signals) if trains else self._step.evaluation_inputs(batch, signals)
        sent = self._send(inputs)
        with self.state.recording(changes=trains):
            return self._step.trace(0, sent) if trains else self._step.trace_evaluation(sent)

    def _send(self, inputs: StepInputs[HostArray]) -> StepInputs[Tensor]:
        """Uploads a step's inputs, before the first step the state too."""
        self.upload()
        return inputs.with_leaves(self.sharding.send(inputs.leaves()))

    def _compare(self, kind: str, shapes: Shapes, outputs: Any) -> None:
        """Compares the program of `outputs()`, not yet run, with preflight's: see `CheckedPrograms.compare`."""
        self._checked.compare(kind, [shape for _, shape in shapes], lambda: self.hash_program(outputs()))

    def hash_program(self, outputs: Sequence[Tensor]) -> str:
        """Returns a hash of the program that would compute these outputs over this mesh, the same in every process."""
        return hash_hlo(f"{self.sharding.mesh_shape}\n{internals.program_text(outputs)}")

    # --- state

    def tensor_specs(self) -> dict[str, TensorSpec]:
        return self.state.tensor_specs()

    def state_slices(self) -> StateSlices:
        """Returns name -> slices, each with the hosts that hold it, of the tensors that are split."""
        specs = self.state.tensor_specs()
        split = {name: self.sharding.slices(name, spec.shape) for name, spec in specs.items()}
        return {name: slices for name, slices in split.items() if slices}

    def snapshot_state(self, buffers: Mapping[str, memoryview]) -> Snapshot:
        """Traces the newest cached steps again, then copies the state, or starts to, as `State.snapshot`. Raises
        TrainError, and copies nothing, if a trace differs from the step that ran."""
        for cache in (self._training, self._evaluation):
            cache.verify()
        return self.state.snapshot(buffers, self.sharding)

    def load_state(self, tensors: Mapping[str, tuple[TensorSpec, memoryview]]) -> None:
        """Replaces whole tensors, others stay; only before the first step. Raises Damaged for an unknown name, type or
        shape: tensors named before it are changed then."""
        self.state.load(tensors)

    def upload(self) -> None:
        """Moves the state to the devices, unless it is there."""
        self.state.upload(self.sharding)

    # --- what the framework counted

    def _count(self) -> Counter[str]:
        """Returns what `read_counts` has counted since this backend was opened."""
        return read_counts() - self._before

    def compilations(self) -> tuple[int, float]:
        """Returns the number of programs compiled, or taken from the cache, and the seconds of both."""
        counts = read_compilations() - self._before  # these alone: the loop asks several times a step
        return counts[COMPILATIONS], counts[_NANOSECONDS] / 1e9

    def counters(self) -> dict[str, int]:
        """Returns the counts of `Backend`, and "programs_from_cache" if there is a compile cache."""
        counts = self._count()
        syncs = counts[TRANSFERS] - self.state.planned_transfers
        own = {"graphs": counts["graphs"], TRANSFERS: counts[TRANSFERS], "device_to_host_syncs": syncs}
        return {**own, "programs_from_cache": self._cache.loaded} if self._cache else own

    def device_memory(self) -> tuple[int, int]:
        return memory_of(self.sharding)

    def fallbacks(self) -> list[str]:
        """Returns the operations, sorted, that ran on the host since this backend was opened; no reads of numbers."""
        operations = {name for name in self._count() if name.startswith(_ATEN)}
        return sorted(operations - {f"{_ATEN}_local_scalar_dense"})  # the read of a number (a result), which is planned

    def preflight(self) -> str | None:
        return self._checked.summary()


def _shapes(batch: Arrays) -> Shapes:
    return tuple((name, array.shape) for name, array in batch.items())


# --- torch_xla's own counts, since the start of the process

COMPILATIONS, TRANSFERS, _NANOSECONDS = "compilations", "device_to_host_transfers", "nanoseconds of compilations"
_ATEN = "aten::"


def read_compilations() -> Counter[str]:
    """Returns how many programs this process compiled or took from the cache, and the nanoseconds of both."""
    compiled = xla_metrics.metric_data("CompileTime") or (0, 0)
    return Counter({COMPILATIONS: int(compiled[0]), _NANOSECONDS: int(compiled[1])})


def read_counts() -> Counter[str]:
    """Returns torch_xla's counts in this process: those of `read_compilations` and `count_fallbacks`, "graphs", and
    transfers to the host."""
    moved = xla_metrics.metric_data("TransferFromDeviceTime") or (0, 0)
    counts = {**read_compilations(), TRANSFERS: int(moved[0])}
    return Counter({**counts, "graphs": xla_metrics.counter_value("UncachedCompile") or 0, **count_fallbacks()})


def count_fallbacks() -> dict[str, int]:
    """Returns how often each operation that the device lacks, or a number's read, ran on the host in this process."""
    return {name: xla_metrics.counter_value(name) for name in xla_metrics.counter_names() if name.startswith(_ATEN)}


class TorchProfiler:
    """torch_xla's profiler, behind the protocol of `training.profiler.Tracer`."""

    def start(self, folder: str) -> None:
        profiler.start_trace(folder)

    def stop(self) -> None:
        profiler.stop_trace()

    def scope(self, name: str, **facts: int) -> contextlib.AbstractContextManager[Any]:
        return internals.trace_event(name, **facts)
