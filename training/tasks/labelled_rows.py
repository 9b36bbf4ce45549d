"""The data half of tasks on labelled rows: batches of a few lengths, each row with its label.

A subclass says what a label is, checks it, and turns totals into figures.
"""

import math
from collections.abc import Callable, Generator, Iterator

import numpy as np
import numpy.typing as npt

from training.batch import Arrays, HostBatch
from training.config import TrainerConfig
from training.data.formats.dataset import Dataset
from training.data.loading.labelled_batches import LabelledBatch, LabelledBatches, labelled_evaluation
from training.data.sampling import bucket_schedule
from training.distributed.cluster import Cluster
from training.errors import BadInput
from training.registry import TASKS
from training.tasks.task import Task, evaluation_slice, host_batch, read_ahead


class LabelledRows(Task):
    """Labelled rows of one run."""

    has_lengths = True
    label_dtype: npt.DTypeLike

    def __init__(self, config: TrainerConfig, cluster: Cluster) -> None:
        """Opens the data and starts the reader's threads. Raises BadInput if data and configuration do not fit."""
        super().__init__(config, cluster)
        train, evaluation = self.data.train, self.data.evaluation
        if evaluation and evaluation.has_pairs != train.has_pairs:
            texts = {False: "one text", True: "two texts"}
            raise BadInput(
                f"{evaluation.url} has rows of {texts[evaluation.has_pairs]}, and {train.url} of "
                f"{texts[train.has_pairs]}: write both with the same --text-pair"
            )
        self._source = LabelledBatches(self.data.train, self._slice, self._config.seed)
        self.shapes = len(self._source.lengths)

    @staticmethod
    def batch_lengths(dataset: Dataset, rows: int) -> tuple[int, ...]:
        return bucket_schedule.batch_lengths(dataset.records_of_length, rows)

    @classmethod
    def empty_batch(cls, config: TrainerConfig, rows: int, length: int, labels: int = 0) -> Arrays:
        kind = TASKS[config.task].rows
        of_tokens, of_sets = kind == "token-labelled", kind == "set-labelled"
        shape = (rows, length) if of_tokens else (rows, labels) if of_sets else (rows,)
        return {
            "input_ids": np.zeros((rows, length), np.int32),
            "attention_mask": np.zeros((rows, length), np.int32),
            "labels": np.zeros(shape, cls.label_dtype),
            "weights": np.zeros(shape if of_tokens else rows, np.float32),
        }

    def batches(self, start: int) -> Generator[HostBatch, None, None]:
        return read_ahead(self._source, self._converter(self.data.train), start, self._config.train.prefetch)

    def evaluation_batches(self) -> Iterator[HostBatch]:
        """Yields this host's rows of the whole evaluation set, bucket by bucket, in record order."""
        assert self.data.evaluation is not None
        batches = labelled_evaluation(self.data.evaluation, evaluation_slice(self._config, self._slice))
        return map(self._converter(self.data.evaluation), batches)

    @property
    def evaluation_batch_count(self) -> int:
        assert self.data.evaluation is not None
        records, size = self.data.evaluation.records_of_length, self._config.evaluation_batch_size
        groups = bucket_schedule.group_lengths(records, size)
        return sum(math.ceil(sum(records[length] for length in lengths) / size) for lengths in groups)

    def check_batch(self, dataset: Dataset, batch: LabelledBatch) -> None:
        """Raises BadInput for a label that the task can't have; without an override, for none."""

    def _converter(self, dataset: Dataset) -> Callable[[LabelledBatch], HostBatch]:
        """Returns the function that checks the labels of a dataset's batch and makes a HostBatch of it."""

        def convert(batch: LabelledBatch) -> HostBatch:
            self.check_batch(dataset, batch)
            return host_batch(batch)

        return convert
