"""One host's rows as tf.data datasets, of the same kind as the task's own."""

from typing import Any

from training.config import TrainerConfig
from training.data.loading.record_source import HostSlice
from training.data.tf.labelled_batches import labelled_batches, labelled_evaluation
from training.data.tf.mlm_batches import mlm_batches, mlm_evaluation
from training.tasks.packed_rows import MaskedRows, masking_of
from training.tasks.task import RunData, task_class


def training_rows(config: TrainerConfig, host_slice: HostSlice, data: RunData, start: int) -> Any:
    """Returns an endless tf.data dataset of one host's rows of global batches from `start` on. Raises BadInput."""
    if issubclass(task_class(config.task), MaskedRows):
        return mlm_batches(data.train, host_slice, masking_of(config), config.seed, start)
    return labelled_batches(data.train, host_slice, config.seed, start)


def evaluation_rows(config: TrainerConfig, host_slice: HostSlice, data: RunData) -> Any:
    """Returns a tf.data dataset of one host's rows of the evaluation set, each record once. Raises BadInput."""
    assert data.evaluation is not None
    if issubclass(task_class(config.task), MaskedRows):
        return mlm_evaluation(data.evaluation, host_slice, masking_of(config))
    return labelled_evaluation(data.evaluation, host_slice)
