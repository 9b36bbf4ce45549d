"""Masked language modelling: its batches, what must stay the same for a run to go on, and its figures."""

from __future__ import annotations

from collections.abc import Generator, Iterator
from dataclasses import replace
from typing import Any

import numpy as np

from training.backends.protocol import Arrays, Outcome
from training.config import TrainerConfig
from training.data.loading.mlm_batches import MlmBatch, MlmBatches, mlm_evaluation
from training.data.sampling.masking import Masking
from training.distributed.cluster import Cluster
from training.tasks.task import HostBatch, open_data, read_ahead, reading
from training.telemetry import text as report


class Mlm:
    """The data of one run. Opening it reads manifests only. Raises BadInput for anything that does not fit together."""

    shapes = 1
    labels: tuple[str, ...] | None = None
    figure_names: tuple[str, ...] = ("loss", "perplexity", "accuracy")

    def __init__(self, config: TrainerConfig, cluster: Cluster) -> None:
        self._config = config
        self.data = open_data(config)
        self._masking = Masking(config.data.masking.percent, config.data.masking.predictions)
        self._reading = reading(config, cluster, self.data)
        self._source = MlmBatches(self.data.train, self._reading, self._masking, config.seed)

    def identity(self) -> dict[str, Any]:
        return {
            "task": "mlm",
            "data.train": self.data.train.hash,
            "tokenizer": self.data.train.tokenizer_hash,
            "masking": f"{self._masking.percent} % at {self._masking.places(self.data.sequence_length)} places",
        }

    def batches(self, start: int) -> Generator[HostBatch, None, None]:
        return read_ahead(self._source, _host_batch, start, self._config.train.prefetch)

    def evaluation_batches(self) -> Iterator[HostBatch]:
        """In record order, with the same masks each time."""
        assert self.data.evaluation is not None
        how = replace(self._reading, global_batch_size=self._config.evaluation_batch_size)
        return map(_host_batch, mlm_evaluation(self.data.evaluation, how, self._masking))

    @property
    def skipped(self) -> int:
        return self._source.skipped

    def figures(self, total: Outcome) -> dict[str, float]:
        weight = total.sums["weight"] or float("nan")
        return {
            "loss": total.loss,
            "perplexity": report.perplexity(total.loss),
            "accuracy": total.sums["correct"] / weight,
        }


def _host_batch(batch: MlmBatch) -> HostBatch:
    arrays = {
        "input_ids": batch.input_ids,
        "positions": batch.positions,
        "labels": batch.labels,
        "weights": batch.weights,
    }
    return HostBatch(arrays, batch.records)


def blank(rows: int, length: int, places: int) -> Arrays:
    """The arrays of a batch, empty: for whoever needs no more than their shapes."""
    ints = {
        name: np.zeros((rows, size), np.int32)
        for name, size in (("input_ids", length), ("positions", places), ("labels", places))
    }
    return {**ints, "weights": np.zeros((rows, places), np.float32)}
