"""The data half of tasks on rows of documents: whole documents, packed into rows of one length.

A subclass turns totals into figures.
"""

from __future__ import annotations

import math
from collections.abc import Generator, Iterator

import numpy as np

from training.batch import Arrays, HostBatch
from training.config import TrainerConfig
from training.data.formats.dataset import Dataset
from training.data.loading.document_batches import DocumentBatch, DocumentBatches, document_evaluation
from training.distributed.cluster import Cluster
from training.tasks.task import Task, evaluation_slice, read_ahead


class DocumentRows(Task):
    """Rows of documents of one run."""

    has_labels = False
    has_lengths = False
    shapes = 1

    def __init__(self, config: TrainerConfig, cluster: Cluster) -> None:
        super().__init__(config, cluster)
        self._source = DocumentBatches(self.data.train, self._slice, self._config.seed)

    @staticmethod
    def batch_lengths(dataset: Dataset, rows: int) -> tuple[int, ...]:
        return (dataset.sequence_length,)

    @classmethod
    def empty_batch(cls, config: TrainerConfig, rows: int, length: int, labels: int = 0) -> Arrays:
        ids = np.zeros((rows, length), np.int32)
        return {"input_ids": ids, "position_ids": ids, "labels": ids, "weights": ids.astype(np.float32)}

    def batches(self, start: int) -> Generator[HostBatch, None, None]:
        return read_ahead(self._source, _convert, start, self._config.train.prefetch)

    def evaluation_batches(self) -> Iterator[HostBatch]:
        """Yields in record order."""
        assert self.data.evaluation is not None
        return map(_convert, document_evaluation(self.data.evaluation, evaluation_slice(self._config, self._slice)))

    @property
    def evaluation_batch_count(self) -> int:
        assert self.data.evaluation is not None
        return math.ceil(self.data.evaluation.records / self._config.evaluation_batch_size)


def _convert(batch: DocumentBatch) -> HostBatch:
    """Returns the arrays that a step takes, their records, and how many rows replace damaged ones."""
    arrays = {name: getattr(batch, name) for name in ("input_ids", "position_ids", "labels", "weights")}
    return HostBatch(arrays, batch.records, int(batch.replaced.sum()))
