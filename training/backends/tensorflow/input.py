"""Training batches for `tf.distribute`: every host of the strategy reads its own rows with TensorFlow's ops alone, and
each of its devices gets its part.

The rows of replica r are those that `np.split` of the global batch would give it, so the training is that of any other
backend and number of devices. Nothing but ids, places and weights goes to the devices. Which records they are stays
unknown to the program's process, and so does how many were bad: `on_corrupt: skip` replaces them as everywhere, but the
summary of a run on several TPU hosts does not count them.
"""

from __future__ import annotations

from collections.abc import Generator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import tensorflow as tf

from training.backends.tensorflow.failures import translate_failures
from training.batch import HostBatch
from training.config import TrainerConfig
from training.data.tf.record_source import translate_errors
from training.registry import TASKS, load
from training.tasks.task import Data, task_class, training_slice


@dataclass(frozen=True)
class Distributed:
    """A global array whose rows are on the devices already."""

    value: Any  # what the strategy's programs take
    shape: tuple[int, ...]


def distributed(strategy: Any, config: TrainerConfig, data: Data, start: int) -> Generator[HostBatch, None, None]:
    """Global batch `start`, `start` + 1, ..., endless, read ahead by tf.data. Raises BadInput, StorageError,
    LostPeer, OutOfMemory."""
    per_replica = config.train.global_batch_size // strategy.num_replicas_in_sync
    names = tuple(task_class(config.task).empty_batch(config, 1, data.sequence_length))

    def of_host(context: Any) -> Any:
        rows = host_rows(config, data, context.input_pipeline_id, context.num_input_pipelines, start)
        arrays = rows.map(lambda batch: {name: batch[name] for name in names})
        parts = arrays.flat_map(
            lambda batch: tf.data.Dataset.from_tensor_slices(batch).batch(per_replica, drop_remainder=True)
        )
        return parts.apply(tf.data.experimental.assert_cardinality(tf.data.INFINITE_CARDINALITY)).prefetch(
            config.train.prefetch
        )

    with translate_failures(), translate_errors(data.train):
        batches = iter(strategy.distribute_datasets_from_function(of_host))
        while True:
            values: Mapping[str, Any] = next(batches)
            arrays: Any = {name: Distributed(value, _shape(strategy, value)) for name, value in values.items()}
            yield HostBatch(arrays, np.zeros(0, np.int64))


def host_rows(config: TrainerConfig, data: Data, host: int, hosts: int, start: int) -> Any:
    """The tf.data dataset of one host's rows of global batch `start`, `start` + 1, ... Raises BadInput."""
    return load(TASKS[config.task].tensorflow_rows)(config, training_slice(config, data, host, hosts), data, start)


def _shape(strategy: Any, value: Any) -> tuple[int, ...]:
    part = strategy.experimental_local_results(value)[0]
    return (part.shape[0] * strategy.num_replicas_in_sync, *part.shape[1:])
