"""Batches for `tf.distribute`: every host of the strategy reads its own rows with TensorFlow's operations alone.

Replica r gets the rows that `np.split` of the global batch would give it, so training is the same as with any other
backend or number of devices. Only the arrays of the batch go to the devices, not the numbers of the records or of
replaced ones: `on_corrupt: skip` works, but the summary of a run on several TPU hosts does not count replaced records.
"""

from collections.abc import Callable, Generator, Iterator, Mapping
from itertools import islice
from typing import Any

import numpy as np
import tensorflow as tf

from training.backends.tensorflow.replicas import Distributed, Upcoming, translate_failures
from training.batch import Arrays, HostBatch
from training.config import TrainerConfig
from training.data.formats.dataset import TYPES, Dataset
from training.data.tf.record_source import translate_errors
from training.tasks.task import RunData, Task, evaluation_slice, task_class, training_slice
from training.tasks.tf import evaluation_rows, training_rows


def dataset_of(batch: Arrays) -> Dataset | None:
    """Returns the dataset of a batch whose rows the step's program takes from the iterator itself; None for others."""
    return next((array.dataset for array in batch.values() if isinstance(array, Upcoming)), None)


def distributed(strategy: Any, config: TrainerConfig, data: RunData, start: int) -> Generator[HostBatch, None, None]:
    """Yields global batches from `start` on, endless, read ahead by tf.data. Raises BadInput, StorageError, LostPeer,
    OutOfMemory; if batches are `Upcoming`, the step's program raises them instead."""

    def read_rows(host: int, hosts: int) -> Any:
        return host_rows(config, data, host, hosts, start)

    yield from _distribute_batches(strategy, config, data.train, read_rows, config.train.global_batch_size)


def distributed_evaluation(strategy: Any, config: TrainerConfig, task: Task) -> Iterator[HostBatch]:
    """Yields the global batches of the evaluation set (there is one), each record once. Raises as `distributed`."""
    data, batch_size = task.data, config.evaluation_batch_size
    assert data.evaluation is not None

    def read_rows(host: int, hosts: int) -> Any:
        return evaluation_rows(config, evaluation_slice(config, training_slice(config, data, host, hosts)), data)

    return islice(
        _distribute_batches(strategy, config, data.evaluation, read_rows, batch_size), task.evaluation_batch_count
    )


def _distribute_batches(
    strategy: Any, config: TrainerConfig, dataset: Dataset, read_rows: Callable[[int, int], Any], batch_size: int
) -> Generator[HostBatch, None, None]:
    """Yields global batches and never ends by itself: the caller must stop before the rows run out. `read_rows`: (host,
    hosts) -> the tf.data dataset of that host's rows. Raises BadInput, StorageError, OutOfMemory, LostPeer."""
    per_replica = batch_size // strategy.num_replicas_in_sync
    arrays = task_class(config.task).empty_batch(config, 1, dataset.sequence_length)
    names = (*arrays, *([TYPES] if dataset.has_pairs else []))

    def host_dataset(context: Any) -> Any:
        rows = read_rows(context.input_pipeline_id, context.num_input_pipelines)
        arrays = rows.map(lambda batch: {name: batch[name] for name in names})
        parts = arrays.flat_map(
            lambda batch: tf.data.Dataset.from_tensor_slices(batch).batch(per_replica, drop_remainder=True)
        )
        return parts.apply(tf.data.experimental.assert_cardinality(tf.data.INFINITE_CARDINALITY)).prefetch(
            config.train.prefetch
        )

    with translate_failures(), translate_errors(dataset):
        batches = iter(strategy.distribute_datasets_from_function(host_dataset))
        upcoming = _upcoming_arrays(strategy, batches, dataset)
        while True:
            yield HostBatch(upcoming or _next_batch(strategy, batches), np.zeros(0, np.int64))


def _upcoming_arrays(strategy: Any, batches: Any, dataset: Dataset) -> Any:
    """Returns `Upcoming` arrays, the same for every batch, if all batches have the same shapes, else None. The step's
    program takes rows from their iterator: `next(batches)` in Python would cost a call for each replica and step."""
    shapes = {
        name: tf.nest.flatten(spec, expand_composites=True)[0].shape for name, spec in batches.element_spec.items()
    }
    if not all(shape.is_fully_defined() for shape in shapes.values()):
        return None
    replicas = strategy.num_replicas_in_sync
    return {name: Upcoming(batches, (shape[0] * replicas, *shape[1:]), dataset) for name, shape in shapes.items()}


def _next_batch(strategy: Any, batches: Any) -> Any:
    """Returns the arrays of the next global batch, read to the devices, where batches have several shapes."""
    values: Mapping[str, Any] = next(batches)
    replicas, own = strategy.num_replicas_in_sync, strategy.experimental_local_results
    shapes = {name: own(value)[0].shape for name, value in values.items()}  # of the part on the first replica
    return {name: Distributed(values[name], (shape[0] * replicas, *shape[1:])) for name, shape in shapes.items()}


def host_rows(config: TrainerConfig, data: RunData, host: int, hosts: int, start: int) -> Any:
    """Returns the tf.data dataset of one host's rows of global batches from `start` on. Raises BadInput."""
    return training_rows(config, training_slice(config, data, host, hosts), data, start)
