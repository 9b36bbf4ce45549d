"""The data half of tasks on masked rows: packed tokens of one length, some of them hidden by masks that a run's seed
decides.

A subclass turns totals into figures.
"""

from __future__ import annotations

import math
from collections.abc import Generator, Iterator
from typing import Any

import numpy as np

from training.batch import Arrays, HostBatch
from training.config import TrainerConfig
from training.data.formats.dataset import Dataset
from training.data.loading.mlm_batches import MlmBatch, MlmBatches, mlm_evaluation
from training.data.sampling.masking import Masking
from training.distributed.cluster import Cluster
from training.tasks.task import Task, evaluation_slice, read_ahead


class MaskedRows(Task):
    """Masked rows of one run."""

    has_labels = False
    has_lengths = False
    shapes = 1

    def __init__(self, config: TrainerConfig, cluster: Cluster) -> None:
        super().__init__(config, cluster)
        self._masking = masking_of(config)
        self._source = MlmBatches(self.data.train, self._slice, self._masking, self._config.seed)

    @staticmethod
    def batch_lengths(dataset: Dataset, rows: int) -> tuple[int, ...]:
        return (dataset.sequence_length,)

    @classmethod
    def empty_batch(cls, config: TrainerConfig, rows: int, length: int, labels: int = 0) -> Arrays:
        places = masking_of(config).places(length)
        return {
            "input_ids": np.zeros((rows, length), np.int32),
            "positions": np.zeros((rows, places), np.int32),
            "labels": np.zeros((rows, places), np.int32),
            "weights": np.zeros((rows, places), np.float32),
        }

    def identity(self) -> dict[str, Any]:
        """Adds the share and the number of masked places to what a checkpoint must agree with."""
        masking = f"{self._masking.percent} % at {self._masking.places(self.data.sequence_length)} places"
        return {**super().identity(), "masking": masking}

    def batches(self, start: int) -> Generator[HostBatch, None, None]:
        return read_ahead(self._source, _convert, start, self._config.train.prefetch)

    def evaluation_batches(self) -> Iterator[HostBatch]:
        """Yields in record order, with the same masks each time."""
        assert self.data.evaluation is not None
        host_slice = evaluation_slice(self._config, self._slice)
        return map(_convert, mlm_evaluation(self.data.evaluation, host_slice, self._masking))

    @property
    def evaluation_batch_count(self) -> int:
        assert self.data.evaluation is not None
        return math.ceil(self.data.evaluation.records / self._config.evaluation_batch_size)


def masking_of(config: TrainerConfig) -> Masking:
    """Returns the masking that the section data.masking describes."""
    return Masking(config.data.masking.percent, config.data.masking.predictions)


def _convert(batch: MlmBatch) -> HostBatch:
    """Returns the arrays that a step takes, their records, and how many rows replace damaged ones."""
    arrays = {name: getattr(batch, name) for name in ("input_ids", "positions", "labels", "weights")}
    return HostBatch(arrays, batch.records, int(batch.replaced.sum()))
