"""Places arrays on the devices of a tf.distribute strategy: each device is a replica of the model with its rows of the
batch. Data parallelism is the only layout; another one belongs here.
"""

import os
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
import tensorflow as tf

from training.backends.tensorflow.failures import translate_tpu_failures
from training.backends.tensorflow.input import Distributed, Upcoming
from training.batch import Arrays


class Replicas:
    """The devices that this process drives."""

    def __init__(self) -> None:
        """Opens a TPUStrategy if PJRT_DEVICE is TPU, else CPU_NUM_DEVICES (or 1) of the CPU. Raises UnusableTpu."""
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
        """Sends the rows of a batch to the replicas and returns the argument of the step's program: for an upcoming
        batch, the iterator."""
        upcoming = [array.iterator for array in batch.values() if isinstance(array, Upcoming)]
        if upcoming:
            return upcoming[0]
        on_devices = {name: array.value for name, array in batch.items() if isinstance(array, Distributed)}
        if on_devices:
            return on_devices
        if self.count == 1:
            return {name: tf.constant(array) for name, array in batch.items()}
        split = {name: np.split(array, self.count) for name, array in batch.items()}

        def replica_rows(context: Any) -> Any:
            return {name: tf.constant(arrays[context.replica_id_in_sync_group]) for name, arrays in split.items()}

        return self.strategy.experimental_distribute_values_from_function(replica_rows)


@translate_tpu_failures()
def _tpu_strategy() -> Any:
    """Initialises the chips of this host, or of the gRPC workers in TPU_NAME (grpc://10.0.0.2:8470,grpc://...), and
    returns a TPUStrategy over them."""
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
