"""Masked language modelling: its batches, what must stay the same for a run to go on, and its figures."""

from __future__ import annotations

import contextlib
from collections.abc import Generator, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from training import report
from training.backends.protocol import Arrays, Outcome
from training.cluster import Cluster
from training.config import TrainerConfig
from training.data import tokenizer as tokenizers
from training.data.batches import MlmBatch, MlmBatches, evaluation, prefetch
from training.data.dataset import open_dataset
from training.data.manifest import Dataset, find_shards
from training.data.masking import Masking


@dataclass(frozen=True)
class HostBatch:
    """This host's rows, and which records they are, for messages."""

    arrays: Arrays
    records: np.ndarray


class Mlm:
    """The data of one run. Opening it reads manifests only. Raises BadInput for anything that does not fit together."""

    def __init__(self, config: TrainerConfig, cluster: Cluster) -> None:
        self._config = config
        tokenizer = tokenizers.read(config.data.tokenizer)
        self.tokens, tokenizer_hash = tokenizer.special, tokenizer.hash
        self.train = self._open(config.data.train, tokenizer_hash, None)
        self.evaluation = self._open(config.data.evaluation, tokenizer_hash, self.train.sequence_length) if config.data.evaluation else None
        self.sequence_length = self.train.sequence_length
        self.vocabulary, self.pad = self.tokens.vocabulary, self.tokens.pad
        self._masking = Masking(config.data.masking.percent, config.data.masking.predictions)
        self._reading: dict[str, Any] = {
            "tokenizer": self.tokens,
            "masking": self._masking,
            "host": cluster.worker,
            "hosts": cluster.hosts,
            "on_corrupt": config.data.on_corrupt,
        }
        # Both look at every shard now: a missing one is found before the first step, not at the first evaluation.
        self._source = MlmBatches(self.train, seed=config.seed, global_batch_size=config.train.global_batch_size, **self._reading)
        if self.evaluation:
            find_shards(self.evaluation)

    def _open(self, url: str, tokenizer_hash: str, sequence_length: int | None) -> Dataset:
        dataset = open_dataset(url)
        dataset.require(kind="mlm", tokenizer_hash=tokenizer_hash, sequence_length=sequence_length)
        return dataset

    def identity(self) -> dict[str, Any]:
        """What a checkpoint must agree with to be continued on this data."""
        return {
            "task": "mlm",
            "data.train": self.train.hash,
            "tokenizer": self.train.tokenizer_hash,
            "masking": f"{self._masking.percent} % at {self._masking.places(self.sequence_length)} places",
        }

    def hashes(self) -> dict[str, str]:
        """What all hosts must see alike."""
        return {
            "training data": self.train.hash,
            "evaluation data": self.evaluation.hash if self.evaluation else "none",
            "tokenizer": self.train.tokenizer_hash,
        }

    def batches(self, start: int) -> Generator[HostBatch, None, None]:
        """This host's rows of batch `start`, `start` + 1, ..., read ahead in the background once the first is asked for. Close it in the end."""
        with contextlib.closing(self._source):
            yield from prefetch(lambda number: _host_batch(self._source.batch(number)), start, self._config.train.prefetch)

    def evaluation_batches(self) -> Iterator[HostBatch]:
        """This host's rows of the whole evaluation set, in record order; the same masks each time."""
        assert self.evaluation is not None
        return map(_host_batch, evaluation(self.evaluation, global_batch_size=self._config.evaluation_batch_size, **self._reading))

    @property
    def skipped(self) -> int:
        """Damaged training records that this host has replaced (data.on_corrupt: skip)."""
        return self._source.skipped

    def figures(self, total: Outcome) -> dict[str, float]:
        """Over exactly the evaluation set."""
        weight = total.sums["weight"] or float("nan")
        return {"loss": total.loss, "perplexity": report.perplexity(total.loss), "accuracy": total.sums["correct"] / weight}


def _host_batch(batch: MlmBatch) -> HostBatch:
    arrays = {"input_ids": batch.input_ids, "positions": batch.positions, "labels": batch.labels, "weights": batch.weights}
    return HostBatch(arrays, batch.records)
