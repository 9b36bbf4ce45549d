"""The rows of training steps for `tf.distribute`: this process reads them, and a queue on each host of the strategy
holds them until the step's program takes its part.

Replica r gets the rows that `np.split` of the global batch would give it, so training is the same as with any other
backend or number of devices."""

from __future__ import annotations

from typing import Any

import numpy as np
import tensorflow as tf

from training.backends.tensorflow.replicas import Upcoming
from training.batch import Arrays, HostBatch

_UNLIMITED = -1


class RowQueues:
    """Sends global batches, all of the same shapes, to the hosts of a strategy. The caller limits how many are on the
    way: the queues have no limit, because an operation that waits for room on a worker would keep others from it."""

    def __init__(self, strategy: Any, example: Arrays) -> None:
        """Opens a queue on every host, and the strategy's iterator over them. `example`: the arrays of a batch."""
        self._queues: list[Any] = []  # of the hosts, in the order of their replicas
        replicas = strategy.num_replicas_in_sync
        shapes = [(len(array) // replicas, *array.shape[1:]) for array in example.values()]
        types = [tf.as_dtype(array.dtype) for array in example.values()]

        def host_dataset(_context: Any) -> Any:
            """Makes a queue on a host, and returns an endless dataset of what is taken from it."""
            queue = tf.queue.FIFOQueue(_UNLIMITED, types, shapes, names=list(example))
            self._queues.append(queue)
            return tf.data.Dataset.range(1).repeat().map(lambda _: queue.dequeue())

        batches = iter(strategy.distribute_datasets_from_function(host_dataset))
        self._replicas = replicas
        self._upcoming: Any = {name: Upcoming(batches, array.shape) for name, array in example.items()}

    def send(self, batch: HostBatch) -> HostBatch:
        """Sends a batch's rows to the queues, and returns it with `Upcoming` arrays. TensorFlow's error for a lost
        host is raised here or by a later step."""
        for number, queue in enumerate(self._queues):
            host_rows = {name: np.split(array, len(self._queues))[number] for name, array in batch.arrays.items()}
            replicas = self._replicas // len(self._queues)  # of a host
            queue.enqueue_many(
                {name: tf.constant(np.stack(np.split(rows, replicas))) for name, rows in host_rows.items()}
            )
        return HostBatch(self._upcoming, batch.records, batch.replaced)

    def close(self) -> None:
        """Closes the queues on all hosts, which ends the threads that read them ahead of the program."""
        for queue in self._queues:
            queue.close()
