"""What the loop asks of a task, and what the tasks have in common: opening their data, and reading it ahead."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Generator, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, TypeVar

import numpy as np

from training.backends.protocol import Arrays, Outcome
from training.config import TrainerConfig
from training.data import tokenizer as tokenizers
from training.data.formats.dataset import Dataset, find_shards
from training.data.formats.open_dataset import open_dataset
from training.data.loading.host_slice import HostSlice
from training.data.loading.prefetch import prefetch
from training.data.sampling.masking import SpecialTokens
from training.distributed.cluster import Cluster

B = TypeVar("B", covariant=True)


@dataclass(frozen=True)
class HostBatch:
    """This host's rows, and which records they are, for messages."""

    arrays: Arrays
    records: np.ndarray


class Task(Protocol):
    """The data of one run, and what is told of it."""

    data: Data
    shapes: int  # how many different shapes its training batches have: each is compiled once
    labels: tuple[str, ...] | None  # names of the classes, of a task that has some
    figure_names: tuple[str, ...]  # of an evaluation

    def identity(self) -> dict[str, Any]:
        """What a checkpoint must agree with to be continued on this data."""

    def batches(self, start: int) -> Generator[HostBatch, None, None]:
        """This host's rows of batch `start`, `start` + 1, ..., read ahead in the background once the first is asked
        for. Close it in the end."""

    def evaluation_batches(self) -> Iterator[HostBatch]:
        """This host's rows of the whole evaluation set, each record once and the same each time."""

    @property
    def skipped(self) -> int:
        """Damaged training records that this host has replaced (data.on_corrupt: skip)."""

    def figures(self, total: Outcome) -> dict[str, float]:
        """Over exactly the evaluation set."""


@dataclass(frozen=True)
class Data:
    """A run's datasets and the tokenizer that wrote them."""

    train: Dataset
    evaluation: Dataset | None
    tokens: SpecialTokens

    @property
    def sequence_length(self) -> int:
        """Of the longest row."""
        return self.train.sequence_length

    def hashes(self) -> dict[str, str]:
        """What all hosts must see alike."""
        return {
            "training data": self.train.hash,
            "evaluation data": self.evaluation.hash if self.evaluation else "none",
            "tokenizer": self.train.tokenizer_hash,
        }


def open_data(config: TrainerConfig) -> Data:
    """Reads manifests, and looks at every shard of the evaluation set: a missing one is found before the first step,
    not at the first evaluation. Raises BadInput for anything that does not fit together."""
    tokenizer = tokenizers.read(config.data.tokenizer)

    def opened(url: str, sequence_length: int | None) -> Dataset:
        dataset = open_dataset(url)
        dataset.require(kind=config.task, tokenizer_hash=tokenizer.hash, sequence_length=sequence_length)
        return dataset

    train = opened(config.data.train, None)
    evaluation = opened(config.data.evaluation, train.sequence_length) if config.data.evaluation else None
    if evaluation:
        find_shards(evaluation)
    return Data(train, evaluation, tokenizer.special)


def reading(config: TrainerConfig, cluster: Cluster, data: Data) -> HostSlice:
    """How this host reads its rows of the training batches."""
    cache = Path(config.data.cache) if config.data.cache else None
    return HostSlice(
        data.tokens, config.train.global_batch_size, cluster.worker, cluster.hosts, config.data.on_corrupt, cache
    )


class Source(Protocol[B]):
    """Endless training batches, as in `training.data.loading.mlm_batches`."""

    def batch(self, k: int) -> B: ...
    def close(self) -> None: ...


def read_ahead(
    source: Source[B], convert: Callable[[B], HostBatch], start: int, depth: int
) -> Generator[HostBatch, None, None]:
    """Batch `start`, `start` + 1, ...; closing it closes the source."""
    with contextlib.closing(source):
        yield from prefetch(lambda number: convert(source.batch(number)), start, depth)
