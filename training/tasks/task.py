"""What the training loop needs of a task, and what the tasks have in common: opening their data, and reading ahead."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Generator, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol, TypeVar, cast

from training.batch import Arrays, HostBatch, StepResult
from training.config import TrainerConfig
from training.data import tokenizer as tokenizers
from training.data.formats.dataset import Dataset, find_shards, open_dataset
from training.data.loading.prefetch import prefetch
from training.data.loading.record_source import HostSlice
from training.data.sampling.masking import SpecialTokens
from training.distributed.cluster import Cluster
from training.registry import TASKS, load

B = TypeVar("B", covariant=True)


class Task(Protocol):
    """The data of one run, and the figures of its evaluations. Opening it reads manifests only."""

    data: Data
    shapes: int  # how many different shapes its training batches have: each is compiled once
    labels: tuple[str, ...] | None  # names of the classes, of a task that has some
    figure_names: tuple[str, ...]  # of an evaluation

    def identity(self) -> dict[str, Any]:
        """What a checkpoint must agree with to be continued on this data."""

    def batches(self, start: int) -> Generator[HostBatch, None, None]:
        """This host's rows of batch `start`, `start` + 1, ..., read ahead in the background once the first is asked
        for. To be closed in the end."""

    def evaluation_batches(self) -> Iterator[HostBatch]:
        """This host's rows of the whole evaluation set, each record once and the same each time."""

    @property
    def evaluation_batch_count(self) -> int:
        """How many `evaluation_batches` gives."""

    def figures(self, total: StepResult) -> dict[str, float]:
        """Over exactly the evaluation set."""


class TaskClass(Protocol):
    """What a task's class says before there is data."""

    has_labels: bool  # its data names classes
    has_lengths: bool  # its batches have several lengths; otherwise all have the dataset's sequence length

    def __call__(self, config: TrainerConfig, cluster: Cluster) -> Task:
        """Opens the data. Raises BadInput for anything that does not fit together."""

    def batch_lengths(self, dataset: Dataset, rows: int) -> tuple[int, ...]:
        """The lengths of the batches of `rows` rows that a dataset gives, ascending, from its manifest alone."""

    def empty_batch(self, config: TrainerConfig, rows: int, length: int) -> Arrays:
        """The arrays of a batch, as zeros: for whoever needs no more than their names, shapes and types."""


def task_class(name: str) -> TaskClass:
    """The data half of a registered task."""
    return cast(TaskClass, load(TASKS[name].data))


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
        """What must be the same on all hosts."""
        return {
            "training data": self.train.hash,
            "evaluation data": self.evaluation.hash if self.evaluation else "none",
            "tokenizer": self.train.tokenizer_hash,
        }


def open_data(config: TrainerConfig) -> Data:
    """Reads manifests, and looks at every shard of the evaluation set: a missing one is found before the first step,
    not at the first evaluation. Raises BadInput for anything that does not fit together."""
    tokenizer = tokenizers.read(config.data.tokenizer)

    def open_one(url: str, sequence_length: int | None) -> Dataset:
        dataset = open_dataset(url)
        dataset.require(rows=TASKS[config.task].rows, tokenizer_hash=tokenizer.hash, sequence_length=sequence_length)
        return dataset

    train = open_one(config.data.train, None)
    evaluation = open_one(config.data.evaluation, train.sequence_length) if config.data.evaluation else None
    if evaluation:
        find_shards(evaluation)
    return Data(train, evaluation, tokenizer.special)


def training_slice(config: TrainerConfig, data: Data, host: int, hosts: int) -> HostSlice:
    """The rows of each training batch that one host reads, and how."""
    cache = Path(config.data.cache) if config.data.cache else None
    batch_size, on_corrupt = config.train.global_batch_size, config.data.on_corrupt
    return HostSlice(data.tokens, batch_size, host, hosts, on_corrupt, cache)


def evaluation_slice(config: TrainerConfig, training: HostSlice) -> HostSlice:
    """The same for the batches of an evaluation."""
    return replace(training, global_batch_size=config.evaluation_batch_size)


class Source(Protocol[B]):
    """Endless training batches, as in `training.data.loading.mlm_batches`."""

    def batch(self, k: int) -> B:
        """This host's rows of global batch k."""

    def close(self) -> None:
        """Ends its threads."""


def read_ahead(
    source: Source[B], convert: Callable[[B], HostBatch], start: int, depth: int
) -> Generator[HostBatch, None, None]:
    """Batch `start`, `start` + 1, ..., `depth` of them ahead; closing it closes the source."""
    with contextlib.closing(source):
        yield from prefetch(lambda number: convert(source.batch(number)), start, depth)
