"""TensorFlow behind `protocol.Backend`: one program over all devices of a TPU slice, or one process a CPU host.

On a TPU the process is the slice's only client: `TPUStrategy` over the chips of this host (`local`), or over those of
the gRPC workers that TPU_NAME lists. On CPUs every host runs this process; CPU_NUM_DEVICES above 1 makes logical
devices of its CPU, under `MirroredStrategy`, which is TPUStrategy's path through this code. Between CPU hosts the
gradients are added by `exchange`, in a fixed order: two programs a step instead of one. (MultiWorkerMirroredStrategy
would add them too, but after a peer's death it waits for heartbeats, or ends the process with a code of its own.)

Everything that changes with the step (learning rate, bias corrections, the seed of dropout) reaches the program as
data. Weights and moments are fp32; bf16 is Keras' mixed_bfloat16 policy.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Generator, Mapping
from typing import Any

import numpy as np
import numpy.typing as npt
import tensorflow as tf

from training.backends.protocol import SUMS, Arrays, Asks, Outcome
from training.backends.tensorflow.input import Distributed, distributed
from training.backends.tensorflow.model import SUMS_OF, Noise, Parameter, build
from training.checkpoint.safetensors_file import Damaged, TensorSpec
from training.checkpoint.snapshot import Snapshot
from training.config import TrainerConfig
from training.distributed.cluster import Cluster
from training.distributed.rendezvous import Rendezvous
from training.distributed.tcp_allreduce import TcpAllReduce
from training.models.hugging_face import ModelRequirements
from training.optim.schedule import adam_numbers, step_seed
from training.preflight.agreement import CheckedPrograms
from training.tasks.task import HostBatch, Task

Host = npt.NDArray[np.float32]


class TensorFlow:
    """A model and its AdamW on the devices of this slice."""

    def __init__(
        self,
        config: TrainerConfig,
        cluster: Cluster,
        rendezvous: Rendezvous,
        needs: ModelRequirements,
        token: str,
    ) -> None:
        self._config, self._train, self._cluster = config, config.train, cluster
        self._agreement = CheckedPrograms(os.environ, comparable=False, talks=cluster.is_first)
        on_tpu = os.environ.get("PJRT_DEVICE") == "TPU"
        self._strategy = _tpu_strategy() if on_tpu else _cpu_strategy(int(os.environ.get("CPU_NUM_DEVICES") or 1))
        self._replicas: int = self._strategy.num_replicas_in_sync
        self.devices = cluster.hosts * self._replicas
        self._exchange = (
            TcpAllReduce(cluster, rendezvous, token, config.rendezvous.seconds) if cluster.hosts > 1 else None
        )
        self.in_flight = 2 if on_tpu else 0
        rendezvous.set_phase("building the model")
        self._noise = Noise()
        policy = tf.keras.mixed_precision.global_policy()
        tf.keras.mixed_precision.set_global_policy("mixed_bfloat16" if self._train.precision == "bf16" else "float32")
        try:
            with self._strategy.scope():
                self._network, self._parameters = build(
                    config.model, needs, dropout=self._train.dropout, seed=config.seed, noise=self._noise
                )
                self._moments = [
                    [tf.Variable(tf.zeros_like(each.variable), trainable=False) for each in self._parameters]
                    for _ in range(2)
                ]
        finally:
            tf.keras.mixed_precision.set_global_policy(policy)
        self._sums = SUMS_OF[config.task]
        # Not on a TPU, where the whole program is compiled anyway.
        compiled = self._train.jit_compile and self._replicas == 1 and not on_tpu
        self._programs: dict[str, Any] = {
            name: tf.function(function, jit_compile=compiled or None, autograph=False)
            for name, function in (
                ("train", self._train_program),
                ("gradients", self._gradients_program),
                ("update", self._update_program),
                ("evaluate", self._evaluate_program),
            )
        }
        self._tracing_seconds = 0.0

    # --- steps

    def step(self, number: int, batch: Arrays, asks: Asks) -> _PendingStep:
        numbers = tf.constant(np.array(adam_numbers(self._train, number), np.float32))
        seed = tf.constant(step_seed(self._config.seed, number, self._cluster.worker), tf.int32)
        rows = self._rows(batch)
        if not self._exchange:
            return _PendingStep(self._call("train", rows, seed, numbers), asks)
        gradients = self._call("gradients", rows, seed).numpy()
        total = self._exchange.sum(np.concatenate([gradients, _as_array(asks)]))
        self._call("update", tf.constant(total[: -len(_as_array(asks))]), numbers)
        return _PendingStep(total[len(gradients) - len(SUMS) :])

    def evaluate(self, batch: Arrays, asks: Asks) -> _PendingStep:
        sums = self._call("evaluate", self._rows(batch))
        if not self._exchange:
            return _PendingStep(sums, asks)
        values = sums.numpy()
        return _PendingStep(
            self._exchange.sum(np.concatenate([values[: len(SUMS)], _as_array(asks), values[len(SUMS) :]]))
        )

    def _call(self, name: str, *arguments: Any) -> Any:
        """Runs a program on every replica and returns what the first gives: they give the same. Counts the seconds of
        calls that trace."""
        program = self._programs[name]
        before, begun = program.experimental_get_tracing_count(), time.monotonic()
        result = program(*arguments)
        if program.experimental_get_tracing_count() > before:
            self._tracing_seconds += time.monotonic() - begun
        return result

    # --- programs: traced once for each shape of rows

    def _train_program(self, rows: Any, seed: Any, numbers: Any) -> Any:
        def replica(rows: Any) -> Any:
            return self._apply(*self._gradients(rows, seed), numbers)

        return self._everywhere(replica, rows)

    def _gradients_program(self, rows: Any, seed: Any) -> Any:
        """(all parameters + 3,): what hosts add up."""

        def replica(rows: Any) -> Any:
            gradients, sums = self._gradients(rows, seed)
            return tf.concat([*(tf.reshape(gradient, [-1]) for gradient in gradients), sums], 0)

        return self._everywhere(replica, rows)

    def _update_program(self, flat: Any, numbers: Any) -> Any:
        def replica() -> Any:
            *pieces, sums = tf.split(
                flat, [*(each.variable.shape.num_elements() for each in self._parameters), len(SUMS)]
            )
            shaped = [
                tf.reshape(piece, each.variable.shape) for piece, each in zip(pieces, self._parameters, strict=True)
            ]
            return self._apply(shaped, sums, numbers)

        return self._everywhere(replica)

    def _evaluate_program(self, rows: Any) -> Any:
        """(3 + the task's counts,)."""

        def replica(rows: Any) -> Any:
            sums, counts = self._sums(self._network, rows, False)
            flat = sums if counts is None else tf.concat([sums, tf.reshape(counts, [-1])], 0)
            return self._over_replicas(flat)

        return self._everywhere(replica, rows)

    def _everywhere(self, replica: Callable[..., Any], *arguments: Any) -> Any:
        return self._strategy.experimental_local_results(self._strategy.run(replica, args=arguments))[0]

    def _over_replicas(self, values: Any) -> Any:
        return (
            tf.distribute.get_replica_context().all_reduce(tf.distribute.ReduceOp.SUM, values)
            if self._replicas > 1
            else values
        )

    def _gradients(self, rows: Mapping[str, Any], seed: Any) -> tuple[list[Any], Any]:
        """Of the summed loss over the rows of all replicas of this host, with the sums: (3,)."""
        replica = tf.distribute.get_replica_context().replica_id_in_sync_group
        variables = [each.variable for each in self._parameters]
        gradients: list[Any] = []
        sums = tf.zeros([len(SUMS)])
        for number in range(self._train.gradient_accumulation):
            # One after the other: pieces that run at the same time need the memory of all.
            with tf.control_dependencies(gradients):
                piece = {name: _piece(array, number, self._train.gradient_accumulation) for name, array in rows.items()}
                self._noise.seed = tf.stack(
                    [seed, tf.cast(replica, tf.int32) * self._train.gradient_accumulation + number]
                )
                with tf.GradientTape() as tape:
                    each, _ = self._sums(self._network, piece, True)
                    loss = each[SUMS.index("loss")]
                # Dense: a lookup's gradient comes as rows.
                more = [tf.convert_to_tensor(gradient) for gradient in tape.gradient(loss, variables)]
                gradients = [have + new for have, new in zip(gradients, more, strict=True)] if gradients else more
                sums += each
        self._noise.seed = None
        *gradients, sums = self._over_replicas([*gradients, sums])
        return gradients, sums

    def _apply(self, gradients: list[Any], sums: Any, numbers: Any) -> Any:
        """AdamW (https://arxiv.org/abs/1711.05101) on gradients of the summed loss. Returns the sums."""
        train = self._train
        rate, correction1, correction2 = tf.unstack(numbers)
        scale = 1 / tf.maximum(sums[SUMS.index("weight")], 1e-6)
        if train.clip_norm is not None:
            norm = tf.sqrt(tf.add_n([tf.reduce_sum(tf.square(gradient)) for gradient in gradients])) * scale
            scale = scale * tf.minimum(train.clip_norm / (norm + 1e-6), 1)

        def update(strategy: Any, gradients: list[Any], *numbers: Any) -> None:
            for each, first, second, gradient in zip(self._parameters, *self._moments, gradients, strict=True):
                strategy.extended.update(
                    each.variable, self._change(each.decayed), args=(first, second, gradient, *numbers)
                )

        tf.distribute.get_replica_context().merge_call(update, args=(gradients, scale, rate, correction1, correction2))
        return sums

    def _change(self, decayed: bool) -> Callable[..., None]:
        """Adam's rule for one variable and its moments, on one device."""
        train = self._train
        decay = train.weight_decay if decayed else 0.0

        def change(
            value: Any,
            first: Any,
            second: Any,
            gradient: Any,
            scale: Any,
            rate: Any,
            correction1: Any,
            correction2: Any,
        ) -> None:
            gradient = gradient * scale
            m = first.assign(train.adam_beta1 * first + (1 - train.adam_beta1) * gradient)
            v = second.assign(train.adam_beta2 * second + (1 - train.adam_beta2) * gradient * gradient)
            step = (m / correction1) / (tf.sqrt(v / correction2) + train.adam_epsilon)
            value.assign_sub(rate * (step + decay * value))

        return change

    # --- arrays to devices

    def feed(self, task: Task, start: int) -> Generator[HostBatch, None, None]:
        """The hosts of the strategy read for their devices. With one device, with hosts outside the strategy, or to
        count skipped records here, the loop's own batches."""
        if (
            self._replicas == 1
            or self._exchange
            or (self._config.data.on_corrupt == "skip" and not os.environ.get("TPU_NAME"))
        ):
            return task.batches(start)
        return distributed(self._strategy, self._config, task.data, start)

    def _rows(self, batch: Arrays) -> Any:
        """This host's rows; with more than one replica, the rows of each."""
        there = {name: array.value for name, array in batch.items() if isinstance(array, Distributed)}
        if there:
            return there
        if self._replicas == 1:
            return {name: tf.constant(array) for name, array in batch.items()}
        split = {name: np.split(array, self._replicas) for name, array in batch.items()}

        def of(context: Any) -> Any:
            return {name: tf.constant(arrays[context.replica_id_in_sync_group]) for name, arrays in split.items()}

        return self._strategy.experimental_distribute_values_from_function(of)

    # --- state

    def layout(self) -> dict[str, TensorSpec]:
        return {
            name: TensorSpec("F32", each.shape, 4 * int(np.prod(each.shape)))
            for name, (each, _) in self._state().items()
        }

    def copy(self, places: Mapping[str, memoryview]) -> Snapshot:
        state = self._state()
        for name, place in places.items():
            each, variable = state[name]
            np.frombuffer(place, dtype=np.float32)[:] = each.of(variable).reshape(-1)
        return Snapshot()

    def accept(self, tensors: Mapping[str, tuple[TensorSpec, memoryview]]) -> None:
        state, layout = self._state(), self.layout()
        for name, (info, data) in tensors.items():
            if layout.get(name) != info:
                raise Damaged(f"tensor {name} is {info.dtype} {list(info.shape)}, which has no place in this model")
            each, variable = state[name]
            each.put(
                variable, np.frombuffer(data, np.float32).reshape(info.shape).copy()
            )  # a variable may keep the memory that it is given

    def _state(self) -> dict[str, tuple[Parameter, Any]]:
        groups = (
            ("model", [each.variable for each in self._parameters]),
            ("adam_m", self._moments[0]),
            ("adam_v", self._moments[1]),
        )
        return {
            f"{group}/{each.name}": (each, variable)
            for group, variables in groups
            for each, variable in zip(self._parameters, variables, strict=True)
        }

    def compilations(self) -> tuple[int, float]:
        return sum(
            program.experimental_get_tracing_count() for program in self._programs.values()
        ), self._tracing_seconds

    def counters(self) -> dict[str, int]:
        return {"graphs": self.compilations()[0]}

    def fallbacks(self) -> list[str]:
        return []  # a program is refused as a whole when the device lacks an operation

    def preflight(self) -> str | None:
        return self._agreement.summary()

    def close(self) -> None:
        if self._exchange:
            self._exchange.close()


def _tpu_strategy() -> Any:
    """Over the chips of this host, or of the gRPC workers that TPU_NAME lists:
    grpc://10.0.0.2:8470,grpc://10.0.0.3:8470."""
    name = os.environ.get("TPU_NAME") or "local"
    resolver = tf.distribute.cluster_resolver.TPUClusterResolver(tpu=name)
    if name != "local":
        tf.config.experimental_connect_to_cluster(resolver)
    tf.tpu.experimental.initialize_tpu_system(resolver)
    return tf.distribute.TPUStrategy(resolver)


def _cpu_strategy(devices: int) -> Any:
    if devices == 1:
        return tf.distribute.get_strategy()
    [cpu] = tf.config.list_physical_devices("CPU")
    tf.config.set_logical_device_configuration(cpu, [tf.config.LogicalDeviceConfiguration()] * devices)
    return tf.distribute.MirroredStrategy([f"/cpu:{index}" for index in range(devices)])


def _piece(array: Any, number: int, pieces: int) -> Any:
    """The rows of one gradient accumulation."""
    rows = array.shape[0] // pieces
    return array[number * rows : (number + 1) * rows]


def _as_array(asks: Asks) -> Host:
    return np.array([asks.stop, asks.save], np.float32)


class _PendingStep:
    """`sums` are of this host alone when `asks` are given: then there is no other."""

    def __init__(self, sums: Any, asks: Asks | None = None) -> None:
        self._sums, self._asks = sums, asks

    def outcome(self) -> Outcome:
        values: list[float] = np.asarray(self._sums).tolist()
        further = values[len(SUMS) :]
        asked = self._asks
        if asked is None:
            stop, save, *further = further
            asked = Asks(stop > 0, save > 0)
        return Outcome(dict(zip(SUMS, values, strict=False)), asked, np.array(further) if further else None)
