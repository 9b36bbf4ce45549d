"""The devices of a slice in TensorFlow: places arrays on them, translates their errors, and tries them.

Each device of a tf.distribute strategy is a replica of the model with its rows of the batch. Data parallelism is the
only layout; another one belongs here. Operations run asynchronously, so an error surfaces in the next call that waits:
for a step, a batch, a copy of the state."""

import os
import re
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import tensorflow as tf

from training.backends.tensorflow import pod
from training.batch import Arrays
from training.distributed.cluster import Cluster
from training.distributed.rendezvous import Rendezvous
from training.distributed.tcp_allreduce import TcpAllReduce
from training.errors import LostPeer, OutOfMemory, UnusableTpu

_SIDE = 256  # of the matrices that try the devices
_SECONDS = 60.0  # to try them

# gRPC's messages for a lost worker; TensorFlow passes them on under various codes.
_NO_CONNECTION = re.compile(r"socket closed|connection (reset|refused)|failed to connect|broken pipe", re.IGNORECASE)
_LOST = (tf.errors.UnavailableError, tf.errors.AbortedError, tf.errors.CancelledError)


@contextmanager
def translate_failures() -> Iterator[None]:
    """Translates errors of a block that waits for operations: to OutOfMemory if a device or a host is out of memory, to
    LostPeer if the worker of a host of this slice is gone. Other errors pass unchanged."""
    try:
        yield
    except tf.errors.ResourceExhaustedError as error:
        raise OutOfMemory(error.message) from None
    except tf.errors.OpError as error:
        if not _is_lost_worker(error):
            raise
        first, *_ = (error.message or "no message").splitlines()
        raise LostPeer(f"a worker of this slice is gone: {first[:300]}") from None


@contextmanager
def translate_tpu_failures() -> Iterator[None]:
    """Translates errors of TensorFlow, RuntimeError and ValueError of a block that initialises the TPU to UnusableTpu.
    Other errors, and that of a lost worker, pass unchanged."""
    try:
        yield
    except (tf.errors.OpError, RuntimeError, ValueError) as error:
        if isinstance(error, tf.errors.OpError) and _is_lost_worker(error):
            raise
        raise describe_tpu_failure(str(error)) from None


def describe_tpu_failure(message: str) -> UnusableTpu:
    """Returns the error for TensorFlow's message about a TPU that it could not initialise: its reason is the first of
    several errors, and it names the host if the message names a worker."""
    worker = re.search(r"remote target /job:\w+/replica:\d+/task:(\d+)", message)
    first = re.search(r"^ *\(0\) (.*)$", message, re.MULTILINE)
    lines = [line.strip() for line in message.splitlines()]
    reason = first[1] if first else "\n".join(line for line in lines if line and not line.startswith("[["))
    host = f"host {worker[1]}" if worker else "a host of this slice" if _has_workers() else "this host"
    return UnusableTpu(re.sub(r"\{\{.*?\}\} *", "", reason), os.environ.get("TPU_ACCELERATOR_TYPE"), host)


def _is_lost_worker(error: tf.errors.OpError) -> bool:
    """Returns whether this process drives workers and, by its type or message, the error is that of a lost one."""
    return _has_workers() and (isinstance(error, _LOST) or _NO_CONNECTION.search(error.message or "") is not None)


def _has_workers() -> bool:
    """Returns whether TPU_NAME lists gRPC workers, rather than this host's own chips."""
    return os.environ.get("TPU_NAME", "local") != "local"


@dataclass(frozen=True)
class Upcoming:
    """A global array that the step's program itself will take from the strategy's iterator."""

    iterator: Any
    shape: tuple[int, ...]


class Replicas:
    """The devices that this process drives."""

    def __init__(self) -> None:
        """Opens a TPUStrategy if PJRT_DEVICE is TPU, else CPU_NUM_DEVICES (or 1) CPU devices. Raises UnusableTpu."""
        self.is_tpu = os.environ.get("PJRT_DEVICE") == "TPU"
        self.strategy = _tpu_strategy() if self.is_tpu else _cpu_strategy(int(os.environ.get("CPU_NUM_DEVICES") or 1))
        self.count: int = self.strategy.num_replicas_in_sync

    def run(self, function: Callable[..., Any], *arguments: Any) -> Any:
        """Runs a function on every replica and returns the first one's result; all results are equal."""
        return self.strategy.experimental_local_results(self.strategy.run(function, args=arguments))[0]

    def sum(self, values: Any) -> Any:
        """Returns tensors summed over all replicas. Must be called in a replica's context."""
        if self.count == 1:
            return values
        return tf.distribute.get_replica_context().all_reduce(tf.distribute.ReduceOp.SUM, values)

    def assign(self, values: Iterable[tuple[Any, np.ndarray]]) -> None:
        """Sets variables to arrays, on every replica.

        Sends an array once to each host, whose other devices copy it from the first. `variable.assign` would send it
        once to each replica: 1.3 GB of BERT-base with its moments, 32 times on a v3-32."""
        for variable, array in values:
            first_of_host: dict[str, Any] = {}
            for own in self.strategy.experimental_local_results(variable):
                host = own.device.rpartition("/device:")[0]
                if host in first_of_host:
                    own.assign(first_of_host[host].read_value())
                else:
                    own.assign(array)
                    first_of_host[host] = own

    def send_rows(self, batch: Arrays) -> Any:
        """Returns the argument of the step's program for a batch: the iterator of an upcoming one, else its rows by
        name, sent to the replicas."""
        upcoming = [array.iterator for array in batch.values() if isinstance(array, Upcoming)]
        if upcoming:
            return upcoming[0]
        if self.count == 1:
            return {name: tf.constant(array) for name, array in batch.items()}
        split = {name: np.split(array, self.count) for name, array in batch.items()}

        def replica_rows(context: Any) -> Any:
            return {name: tf.constant(arrays[context.replica_id_in_sync_group]) for name, arrays in split.items()}

        return self.strategy.experimental_distribute_values_from_function(replica_rows)


@translate_tpu_failures()
def _tpu_strategy() -> Any:
    """Initialises the chips of this host, or of the gRPC workers in TPU_NAME (grpc://10.0.0.2:8470,grpc://...), and
    returns a TPUStrategy over them. Raises UnusableTpu."""
    name = os.environ.get("TPU_NAME") or "local"
    resolver = tf.distribute.cluster_resolver.TPUClusterResolver(tpu=name)
    if name != "local":
        tf.config.experimental_connect_to_cluster(resolver)
    tf.tpu.experimental.initialize_tpu_system(resolver)
    return tf.distribute.TPUStrategy(resolver)


def _cpu_strategy(devices: int) -> Any:
    """Returns the default strategy for one device, else a MirroredStrategy over as many logical devices of the CPU."""
    if devices == 1:
        return tf.distribute.get_strategy()
    [cpu] = tf.config.list_physical_devices("CPU")
    tf.config.set_logical_device_configuration(cpu, [tf.config.LogicalDeviceConfiguration()] * devices)
    return tf.distribute.MirroredStrategy([f"/cpu:{index}" for index in range(devices)])


class TensorFlowDevices:
    """Tries the devices, behind the protocol of `training.device_check.Devices`. On a TPU slice of several hosts,
    host 0 drives all of them through a worker on every host, as in training (pod.py)."""

    def __init__(self, cluster: Cluster, rendezvous: Rendezvous) -> None:
        """Opens the devices; on a TPU slice of several hosts, also tries them all here and keeps the results for the
        methods, so that all hosts must call it. Raises BadInput, TrainError."""
        self._results: dict[str, Any] = {}
        self._exchange: TcpAllReduce | None = None
        if cluster.hosts > 1 and os.environ.get("PJRT_DEVICE") == "TPU":
            self._results = _try_by_workers(cluster, rendezvous)
            self.local, self.total = self._results["hosts"][cluster.worker], sum(self._results["hosts"])
            return
        self._replicas = Replicas()
        self.local = self._replicas.count
        self.total = self.local * cluster.hosts
        if cluster.hosts > 1:
            self._exchange = TcpAllReduce(cluster, rendezvous, _SECONDS)

    def memory_bytes(self) -> int | None:
        return None  # TensorFlow does not report it

    def wrong_products(self) -> int:
        """Returns the number of wrong elements in matrix products of all devices of a TPU slice, or of a CPU host."""
        return self._results["wrong"] if self._results else _count_wrong_products(self._replicas)

    def sum_ones(self) -> float:
        """Returns the sum of a 1 from each device of all hosts: by the strategy's all-reduce, CPU hosts by TCP; on a
        TPU slice of several hosts the one found by `__init__`."""
        if self._results:
            return self._results["sum"]
        total = _sum_ones(self._replicas)
        return float(self._exchange.sum(np.array([total], np.float32))[0]) if self._exchange else total


def _try_by_workers(cluster: Cluster, rendezvous: Rendezvous) -> dict[str, Any]:
    """Tries all devices from host 0 while a worker process serves on every host. Returns on all hosts the number of
    devices of each ("hosts"), of wrong elements ("wrong") and the sum of ones ("sum"). Sets TPU_NAME on host 0. Raises
    BadInput, and TrainError: no worker within 60 s, an unusable TPU, a lost host."""
    port = int(os.environ.get("TPU_TASK_PORT") or pod.WORKER_PORT)
    environment = {**pod.worker_environment(cluster), "TPU_LOAD_LIBRARY": "1"}
    results: dict[str, Any] = {}
    with pod.worker(environment, port, _SECONDS):
        addresses = rendezvous.meet("workers", f"{cluster.addresses[cluster.worker]}:{port}")
        if cluster.is_first:
            os.environ["TPU_NAME"] = ",".join(f"grpc://{address}" for address in addresses)
            replicas = Replicas()
            names = [device.name for device in tf.config.list_logical_devices("TPU")]
            on_hosts = [sum(f"/task:{worker}/" in name for name in names) for worker in range(cluster.hosts)]
            results = {"hosts": on_hosts, "wrong": _count_wrong_products(replicas), "sum": _sum_ones(replicas)}
        return rendezvous.meet("devices tried", results)[0]


def _count_wrong_products(replicas: Replicas) -> int:
    """Multiplies bf16 matrices on every replica; returns the number of wrong elements of all."""
    # Factors of -1, 0 and 1: the products are integers up to 256, which bfloat16 represents exactly.
    random = np.random.default_rng(0)
    rows = random.integers(-1, 2, (_SIDE, _SIDE)).astype(np.float32)
    columns = random.integers(-1, 2, (_SIDE, _SIDE)).astype(np.float32)

    def multiply() -> Any:
        product = tf.cast(tf.cast(rows, tf.bfloat16) @ tf.cast(columns, tf.bfloat16), tf.float32)
        return replicas.sum(tf.reduce_sum(tf.cast(product != rows @ columns, tf.float32)))

    return int(replicas.run(tf.function(multiply)))


def _sum_ones(replicas: Replicas) -> float:
    """Returns the sum of a 1 from each device that this process drives, by the strategy's all-reduce."""

    def add() -> Any:
        return replicas.sum(tf.constant(1.0))

    return float(replicas.run(tf.function(add)))
