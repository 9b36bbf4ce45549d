"""Opens and tries the devices of a slice with TensorFlow, behind the protocol of `training.device_check.Devices`.

On a TPU slice of several hosts, host 0 drives all devices through a worker on every host, as in training (pod.py).
"""

import os
from typing import Any

import numpy as np
import tensorflow as tf

from training.backends.tensorflow import pod
from training.backends.tensorflow.replicas import Replicas
from training.distributed.cluster import Cluster
from training.distributed.rendezvous import Rendezvous
from training.distributed.tcp_allreduce import TcpAllReduce

_SIDE = 256
_SECONDS = 60.0


class TensorFlowDevices:
    def __init__(self, cluster: Cluster, rendezvous: Rendezvous) -> None:
        """Opens the devices; on a TPU slice of several hosts, also tries them all here and keeps the results for the
        methods, so that all hosts must call it. Raises TrainError."""
        self._wrong: int | None = None
        self._sum: float | None = None
        self._exchange: TcpAllReduce | None = None
        self._replicas: Replicas | None = None
        if cluster.hosts > 1 and os.environ.get("PJRT_DEVICE") == "TPU":
            self._use_workers(cluster, rendezvous)
            return
        self._replicas = Replicas()
        self.local = self._replicas.count
        self.total = self.local * cluster.hosts
        if cluster.hosts > 1:
            self._exchange = TcpAllReduce(cluster, rendezvous, _SECONDS)

    def _use_workers(self, cluster: Cluster, rendezvous: Rendezvous) -> None:
        """Tries all devices from host 0 while the workers of all hosts serve, and shares the results with all hosts.
        Raises TrainError."""
        port = int(os.environ.get("TPU_TASK_PORT") or pod.WORKER_PORT)
        results: dict[str, Any] = {}
        environment = {**pod.worker_environment(cluster), "TPU_LOAD_LIBRARY": "1"}
        with pod.worker(environment, port, _SECONDS):
            addresses = rendezvous.meet("workers", f"{cluster.addresses[cluster.worker]}:{port}")
            if cluster.is_first:
                os.environ["TPU_NAME"] = ",".join(f"grpc://{address}" for address in addresses)
                self._replicas = Replicas()
                names = [device.name for device in tf.config.list_logical_devices("TPU")]
                on_hosts = [sum(f"/task:{worker}/" in name for name in names) for worker in range(cluster.hosts)]
                results = {"hosts": on_hosts, "wrong": self.wrong_products(), "sum": self.sum_ones()}
            results = rendezvous.meet("devices tried", results)[0]
        self.local, self.total = results["hosts"][cluster.worker], sum(results["hosts"])
        self._wrong, self._sum = results["wrong"], results["sum"]

    def memory_bytes(self) -> int | None:
        return None  # TensorFlow does not report it

    def wrong_products(self) -> int:
        """Returns the number of wrong elements in matrix products, added up over all replicas. Repeats the number that
        was found when the devices were opened, if they were tried then."""
        if self._wrong is not None or self._replicas is None:
            return self._wrong or 0
        # Factors of -1, 0 and 1: the products are integers up to 256, which bfloat16 represents exactly.
        random = np.random.default_rng(0)
        rows = random.integers(-1, 2, (_SIDE, _SIDE)).astype(np.float32)
        columns = random.integers(-1, 2, (_SIDE, _SIDE)).astype(np.float32)
        replicas = self._replicas

        def multiply() -> Any:
            product = tf.cast(tf.cast(rows, tf.bfloat16) @ tf.cast(columns, tf.bfloat16), tf.float32)
            return replicas.sum(tf.reduce_sum(tf.cast(product != rows @ columns, tf.float32)))

        return int(replicas.run(tf.function(multiply)))

    def sum_ones(self) -> float:
        """Returns the sum of a 1 from each device of all hosts: by the strategy's all-reduce, CPU hosts by TCP."""
        if self._sum is not None or self._replicas is None:
            return self._sum or 0.0
        replicas = self._replicas

        def add() -> Any:
            return replicas.sum(tf.constant(1.0))

        total = float(replicas.run(tf.function(add)))
        if self._exchange:
            total = float(self._exchange.sum(np.array([total], np.float32))[0])
        return total
