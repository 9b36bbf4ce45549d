"""Masked language modelling: its batches, what must stay the same for a run to be continued, and its figures."""

from __future__ import annotations

import math
from collections.abc import Generator, Iterator
from typing import Any

import numpy as np

from training.batch import Arrays, HostBatch, StepResult
from training.config import TrainerConfig
from training.data.formats.dataset import Dataset
from training.data.loading.mlm_batches import MlmBatch, MlmBatches, mlm_evaluation
from training.data.sampling.masking import Masking
from training.distributed.cluster import Cluster
from training.registry import TASKS
from training.tasks.task import evaluation_slice, open_data, read_ahead, training_slice


class MaskedLanguageModeling:
    """The data of one run."""

    has_labels = False
    has_lengths = False
    shapes = 1
    labels: tuple[str, ...] | None = None
    figure_names: tuple[str, ...] = tuple(TASKS["mlm"].figures)

    def __init__(self, config: TrainerConfig, cluster: Cluster) -> None:
        """Raises BadInput for anything that does not fit together."""
        self._config = config
        self.data = open_data(config)
        self._masking = masking_of(config)
        self._slice = training_slice(config, self.data, cluster.worker, cluster.hosts)
        self._source = MlmBatches(self.data.train, self._slice, self._masking, self._config.seed)

    @staticmethod
    def batch_lengths(dataset: Dataset, rows: int) -> tuple[int, ...]:
        return (dataset.sequence_length,)

    @staticmethod
    def empty_batch(config: TrainerConfig, rows: int, length: int) -> Arrays:
        places = masking_of(config).places(length)
        return {
            "input_ids": np.zeros((rows, length), np.int32),
            "positions": np.zeros((rows, places), np.int32),
            "labels": np.zeros((rows, places), np.int32),
            "weights": np.zeros((rows, places), np.float32),
        }

    def identity(self) -> dict[str, Any]:
        return {
            "task": self._config.task,
            "data.train": self.data.train.hash,
            "tokenizer": self.data.train.tokenizer_hash,
            "masking": f"{self._masking.percent} % at {self._masking.places(self.data.sequence_length)} places",
        }

    def batches(self, start: int) -> Generator[HostBatch, None, None]:
        return read_ahead(self._source, _host_batch, start, self._config.train.prefetch)

    def evaluation_batches(self) -> Iterator[HostBatch]:
        """In record order, with the same masks each time."""
        assert self.data.evaluation is not None
        return map(
            _host_batch,
            mlm_evaluation(self.data.evaluation, evaluation_slice(self._config, self._slice), self._masking),
        )

    @property
    def evaluation_batch_count(self) -> int:
        assert self.data.evaluation is not None
        return math.ceil(self.data.evaluation.records / self._config.evaluation_batch_size)

    def figures(self, total: StepResult) -> dict[str, float]:
        weight = total.sums["weight"] or float("nan")
        return {
            "loss": total.loss,
            "perplexity": _perplexity(total.loss),
            "accuracy": total.sums["correct"] / weight,
        }


def masking_of(config: TrainerConfig) -> Masking:
    """What data.masking says."""
    return Masking(config.data.masking.percent, config.data.masking.predictions)


def _host_batch(batch: MlmBatch) -> HostBatch:
    arrays = {name: getattr(batch, name) for name in ("input_ids", "positions", "labels", "weights")}
    return HostBatch(arrays, batch.records, int(batch.replaced.sum()))


def _perplexity(loss: float) -> float:
    """exp(loss); infinite where that overflows."""
    return math.exp(loss) if loss < 700 else math.inf
