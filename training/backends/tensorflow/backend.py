"""TensorFlow behind `protocol.Backend`: one program over all devices of a TPU slice, or one process a CPU host.

On a TPU the process is the slice's only client: `TPUStrategy` over the chips of this host (`local`), or over those of
the gRPC workers that TPU_NAME lists. On CPUs every host runs this process; CPU_NUM_DEVICES above 1 makes logical
devices of its CPU, under `MirroredStrategy`, which is TPUStrategy's path through this code. Between CPU hosts the
gradients are summed over TCP, in a fixed order: two programs a step instead of one. (MultiWorkerMirroredStrategy would
sum them too, but after a peer's death it waits for heartbeats, or ends the process with an exit code of its own.)

The training step itself is in `step.py`, devices in `replicas.py`, the network in `model.py`.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Generator, Mapping
from typing import Any

import numpy as np
import numpy.typing as npt
import tensorflow as tf

from training.backends.protocol import Backend, PendingReport
from training.backends.tensorflow.calls import StepCalls
from training.backends.tensorflow.input import RowQueues
from training.backends.tensorflow.model import KerasNetwork, Parameter, build
from training.backends.tensorflow.replicas import Replicas, Upcoming, translate_failures
from training.backends.tensorflow.step import TensorFlowStep
from training.batch import SUMS, Arrays, HostBatch, Signals
from training.checkpoint.snapshot import Snapshot
from training.checkpoint.tensors import Damaged, TensorSpec
from training.config import TrainerConfig
from training.distributed.cluster import Cluster
from training.distributed.rendezvous import Rendezvous
from training.distributed.tcp_allreduce import TcpAllReduce
from training.models.hugging_face import ModelRequirements
from training.preflight.checked_programs import CheckedPrograms
from training.registry import OPTIMIZERS, TASKS, load
from training.tasks.task import Task
from training.telemetry.console import warn


class TensorFlow(Backend):
    """A model and its optimizer on a slice's devices. Methods raise OutOfMemory, and LostPeer if a worker is gone."""

    @translate_failures()
    def __init__(
        self,
        config: TrainerConfig,
        cluster: Cluster,
        rendezvous: Rendezvous,
        requirements: ModelRequirements,
        *,
        replicas: Replicas | None = None,
    ) -> None:
        """Opens the devices, unless preflight gives its own `replicas`, connects the hosts and builds the model. Raises
        UnusableTpu, OutOfMemory, BadInput, LostPeer, and TrainError if host 0 can't listen."""
        # Without this a TPU rounds the factors of fp32 products to bf16.
        tf.config.experimental.enable_tensor_float_32_execution(False)
        self._config = config
        self._checked = CheckedPrograms(os.environ, comparable=False, warn=warn)
        began = time.monotonic()
        self._replicas = replicas or Replicas()
        opened = time.monotonic()
        self.devices = cluster.hosts * self._replicas.count
        self._exchange = TcpAllReduce(cluster, rendezvous, config.rendezvous.seconds) if cluster.hosts > 1 else None
        self._calls = StepCalls(self._run_steps, config.train.steps_per_call)
        rendezvous.set_phase("building the model")
        network, optimizer = _build_model(config, requirements, self._replicas)
        self._parameters, self._optimizer = network.parameters, optimizer
        reference = TASKS[config.task].tensorflow
        assert reference is not None, "the configuration refuses it"
        self.step_programs = step = TensorFlowStep(config, cluster, network, optimizer, self._replicas, load(reference))
        # On a TPU the whole program is compiled anyway.
        compiled = config.train.jit_compile and self._replicas.count == 1 and not self._replicas.is_tpu
        self._programs: dict[str, Any] = {
            name: tf.function(function, jit_compile=compiled or None, autograph=False)
            for name, function in (
                ("train", step.train_program),
                ("train next", step.train_next_program),
                ("train several", step.train_several_program),
                ("gradients", step.gradients_program),
                ("update", step.update_program),
                ("evaluate", step.evaluation_program),
            )
        }
        self._tracing_seconds = 0.0
        self.opening_seconds = {"devices": opened - began, "model": time.monotonic() - opened}

    # --- steps

    @property
    def in_flight(self) -> int:
        """Returns how many steps' results the loop may leave unread. On a TPU one call runs while the next is queued;
        on a CPU a call has ended when it returns."""
        return 2 * self._calls.length if self._replicas.is_tpu else self._calls.length - 1

    def batches(self, task: Task, start: int) -> Generator[HostBatch, None, None]:
        """Yields this host's rows of batch `start`, `start` + 1, ...: `Upcoming` ones, so that a call can take several
        steps, if this process drives several devices, there are no other CPU hosts, and all batches have one shape.
        Raises as `Task.batches`, OutOfMemory and LostPeer."""
        if self._replicas.count == 1 or self._exchange or task.shapes > 1:
            yield from task.batches(start)
            return
        example = task.training_batch(task.source.batch(start)).arrays
        with (
            translate_failures(),
            contextlib.closing(RowQueues(self._replicas.strategy, example)) as queues,
            contextlib.closing(task.batches(start, queues.send)) as batches,
        ):
            yield from batches

    @translate_failures()
    def step(self, number: int, batch: Arrays, signals: Signals) -> PendingReport:
        """Queues the step in `StepCalls` if its rows are upcoming and calls may take several steps, else runs it; with
        other CPU hosts waits for the sum of all gradients. `signals`: this host's; the report has those of all hosts.
        Raises OutOfMemory and LostPeer, as reading the report does, and as `TcpAllReduce.sum`."""
        rows = self._replicas.send_rows(batch)
        upcoming = isinstance(next(iter(batch.values())), Upcoming)
        if upcoming and self._config.train.steps_per_call != 1:
            return _pending(self._calls.add(rows, *self.step_programs.scalar_values(number)), signals, trains=True)
        seed, scalars = self.step_programs.scalars(number)
        if not self._exchange:
            program = "train next" if upcoming else "train"
            return _pending(self._call(program, rows, seed, scalars), signals, trains=True)
        gradients = self._call("gradients", rows, seed).numpy()
        total = self._exchange.sum(np.concatenate([gradients, _signals_array(signals)]))
        update = self._call("update", tf.constant(total[: -len(_signals_array(signals))]), scalars).numpy()
        return _pending(np.concatenate([total[len(gradients) - len(SUMS) :], update]), trains=True)

    def _run_steps(self, batches: Any, seeds: npt.NDArray[np.int32], scalars: npt.NDArray[np.float32], due: int) -> Any:
        """Runs the first `due` steps of these seeds and scalars; returns their results, (due, 5)."""
        return self._call("train several", batches, tf.constant(seeds), tf.constant(scalars), tf.constant(due))

    @translate_failures()
    def evaluate(self, batch: Arrays, signals: Signals) -> PendingReport:
        """Starts queued training steps, then an evaluation; with other CPU hosts, waits for the sums of all. Raises
        as `step`."""
        self._calls.flush()
        sums = self._call("evaluate", self._replicas.send_rows(batch))
        if not self._exchange:
            return _pending(sums, signals, trains=False)
        values = sums.numpy()
        report = np.concatenate([values[: len(SUMS)], _signals_array(signals), values[len(SUMS) :]])
        return _pending(self._exchange.sum(report), trains=False)

    def _call(self, name: str, *arguments: Any) -> Any:
        """Runs program `name` and returns its result. Adds the seconds of a call that traces to `_tracing_seconds`."""
        program = self._programs[name]
        traces_before, began = program.experimental_get_tracing_count(), time.monotonic()
        result = program(*arguments)
        if program.experimental_get_tracing_count() > traces_before:
            self._tracing_seconds += time.monotonic() - began
        return result

    # --- state

    def state_variables(self) -> dict[str, tuple[Parameter, Any]]:
        """Returns the state's names in a checkpoint -> (parameter, variable): the variable, in TensorFlow's layout, is
        the parameter's own or one of its optimizer's; the parameter converts it to PyTorch's layout."""
        groups = {"model": [parameter.variable for parameter in self._parameters], **self._optimizer.state()}
        return {
            f"{group}/{parameter.name}": (parameter, variable)
            for group, variables in groups.items()
            for parameter, variable in zip(self._parameters, variables, strict=True)
        }

    def tensor_specs(self) -> dict[str, TensorSpec]:
        return {
            name: TensorSpec("F32", parameter.shape, 4 * int(np.prod(parameter.shape)))
            for name, (parameter, _) in self.state_variables().items()
        }

    @translate_failures()
    def snapshot_state(self, buffers: Mapping[str, memoryview]) -> Snapshot:
        """Starts queued steps and copies the tensors named in `buffers` into them. Returns a Snapshot that is already
        complete. Raises OutOfMemory, LostPeer."""
        self._calls.flush()
        variables = self.state_variables()
        for name, buffer in buffers.items():
            parameter, variable = variables[name]
            np.frombuffer(buffer, dtype=np.float32)[:] = parameter.read(variable).reshape(-1)
        return Snapshot()

    @translate_failures()
    def load_state(self, tensors: Mapping[str, tuple[TensorSpec, memoryview]]) -> None:
        """Sets the variables named. Raises Damaged, and changes nothing, for an unknown name, type or shape;
        OutOfMemory, LostPeer."""
        variables, specs = self.state_variables(), self.tensor_specs()
        for name, (spec, _) in tensors.items():
            if specs.get(name) != spec:
                raise Damaged(f"tensor {name} is {spec.dtype} {list(spec.shape)}, which has no place in this model")

        def value_of(name: str) -> tuple[Any, np.ndarray]:
            parameter, variable = variables[name]
            spec, data = tensors[name]
            # Copy, because a variable may keep the memory of the array.
            return variable, parameter.array_of(np.frombuffer(data, np.float32).reshape(spec.shape).copy())

        self._replicas.assign(map(value_of, tensors))

    # --- what the framework counted

    def compilations(self) -> tuple[int, float]:
        """Returns how often programs were traced (once for each shape of rows), and the seconds of these calls."""
        count = sum(program.experimental_get_tracing_count() for program in self._programs.values())
        return count, self._tracing_seconds

    def counters(self) -> dict[str, int]:
        return {"graphs": self.compilations()[0]}

    def preflight(self) -> str | None:
        return self._checked.summary()


def _build_model(
    config: TrainerConfig, requirements: ModelRequirements, replicas: Replicas
) -> tuple[KerasNetwork, Any]:
    """Builds network and optimizer in `train.precision`, and restores Keras' global policy. Raises as `build`."""
    train = config.train
    policy = tf.keras.mixed_precision.global_policy()
    tf.keras.mixed_precision.set_global_policy("mixed_bfloat16" if train.precision == "bf16" else "float32")
    try:
        with replicas.strategy.scope():
            network = build(config, requirements, replicas.assign)
            names = [parameter.name for parameter in network.parameters]
            variables = [parameter.variable for parameter in network.parameters]
            optimizer = load(OPTIMIZERS[train.optimizer]["tensorflow"])(train, names, variables)
    finally:
        tf.keras.mixed_precision.set_global_policy(policy)
    return network, optimizer


def _signals_array(signals: Signals) -> npt.NDArray[np.float32]:
    """Returns (2,): 1 for a requested stop and for a requested save, else 0."""
    return np.array([signals.stop, signals.save], np.float32)


def _pending(sums: Any, signals: Signals | None = None, *, trains: bool) -> PendingReport:
    """Returns the report in `sums`, a program's result. `signals`: of the only host, to be put between the sums and the
    rest; None if `sums` has them."""

    @translate_failures()
    def read() -> list[float]:
        values: list[float] = np.asarray(sums).tolist()
        if signals:
            values[len(SUMS) : len(SUMS)] = _signals_array(signals).tolist()
        return values

    return PendingReport(read, trains=trains)


class TensorFlowProfiler:
    """TensorFlow's profiler, behind the protocol of `training.profiler.Tracer`."""

    def start(self, folder: str) -> None:
        tf.profiler.experimental.start(folder)

    def stop(self) -> None:
        tf.profiler.experimental.stop()

    def scope(self, name: str, **facts: int) -> contextlib.AbstractContextManager[Any]:
        return tf.profiler.experimental.Trace(name, **facts)
