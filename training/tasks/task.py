"""The base of all tasks: opens their data, reads ahead, and evaluates."""

import contextlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Generator, Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, ClassVar

import numpy as np

from training.batch import Arrays, HostBatch, StepResult
from training.config import TrainerConfig
from training.data import tokenizer as tokenizers
from training.data.formats.dataset import Dataset, find_shards
from training.data.formats.open_dataset import open_dataset
from training.data.loading.batches import Batches
from training.data.loading.reader import prefetch
from training.data.loading.record_source import HostSlice
from training.data.sampling.masking import SpecialTokens
from training.data.sampling.order import batch_lengths
from training.distributed.cluster import Cluster
from training.registry import TASKS, load


class Task(ABC):
    """The data of one run, and the figures of its evaluations."""

    has_labels: ClassVar[bool]  # its data names classes
    has_lengths: ClassVar[bool]  # its batches have several lengths; otherwise all have the dataset's sequence length
    source: Batches[Any]  # of training batches; a subclass opens it
    labels: tuple[str, ...] | None = None  # names of the classes

    def __init__(self, config: TrainerConfig, cluster: Cluster) -> None:
        """Opens the data, as `open_data`, but not `source`. Raises BadInput for anything that does not fit together;
        StorageError."""
        self._config = config
        self.data = open_data(config)
        self._slice = HostSlice(
            self.data.tokens, config.train.global_batch_size, cluster.worker, cluster.hosts, config.data.on_corrupt
        )
        # How many different shapes its training batches have: each is compiled once.
        self.shapes = len(batch_lengths(self.data.train.records_of_length, config.train.global_batch_size))

    @classmethod
    @abstractmethod
    def empty_batch(cls, config: TrainerConfig, rows: int, length: int, labels: int = 0) -> Arrays:
        """Returns zeros with the names, shapes and types of a batch's arrays, for tracing: do not write to them, as one
        array may have several names. `labels`: number of the data's labels."""

    @property
    def figure_names(self) -> tuple[str, ...]:
        """Returns the names of the figures of an evaluation, in the order in which they are shown."""
        return tuple(TASKS[self._config.task].figures)

    def identity(self) -> dict[str, Any]:
        """Returns name -> value of what must equal a checkpoint's, for a run to continue from it on this data."""
        return {"task": self._config.task, "data.train": self.data.train.hash, "tokenizer": self.data.tokenizer_hash}

    def batches(
        self, start: int, send: Callable[[HostBatch], HostBatch] = lambda batch: batch
    ) -> Generator[HostBatch, None, None]:
        """Yields this host's rows of batch `start`, `start` + 1, ... without end, read ahead and passed through `send`
        by a thread once the first is asked for. Raises BadInput for a label that the task can't have, a bad shard or,
        with data.on_corrupt: stop, a damaged record; StorageError; and what `send` raises. Close it in the end; that
        closes `source`."""
        with contextlib.closing(self.source):
            depth = self._config.train.prefetch
            yield from prefetch(lambda number: send(self.training_batch(self.source.batch(number))), start, depth)

    def evaluation_batches(self) -> Iterator[HostBatch]:
        """Yields this host's rows of the whole evaluation set (only if there is one), each record once and the same
        each time; rows of weight 0 complete batches. Raises BadInput, StorageError."""
        assert self.data.evaluation is not None
        host_slice = replace(self._slice, global_batch_size=self._config.evaluation_batch_size)
        return map(partial(self.host_batch, self.data.evaluation), self.evaluation_of(self.data.evaluation, host_slice))

    @abstractmethod
    def evaluation_of(self, dataset: Dataset, host_slice: HostSlice) -> Iterator[Any]:
        """Yields this host's rows of each batch of an evaluation, in record order, the same each time."""

    def training_batch(self, batch: Any) -> HostBatch:
        """Returns what a step takes of a batch of `source`. Raises as `host_batch`."""
        return self.host_batch(self.data.train, batch)

    def host_batch(self, dataset: Dataset, batch: Any) -> HostBatch:
        """Returns what a step takes of a batch, one of the dataclasses of `training.data.loading`. Raises BadInput for
        a label that the task can't have."""
        arrays = {name: values for name, values in vars(batch).items() if name not in ("records", "replaced")}
        return HostBatch(arrays, batch.records, int(batch.replaced.sum()))

    @abstractmethod
    def figures(self, total: StepResult) -> dict[str, float]:
        """Returns name -> figure of an evaluation, from its totals over all hosts."""

    def confusion(self, counts: np.ndarray | None) -> list[list[float]] | None:
        """Returns the rows (true classes) of the confusion matrix in an evaluation's counts; None if it has none."""
        return None


def task_class(name: str) -> type[Task]:
    """Returns the class of the task with this name in training.registry.TASKS."""
    task: type[Task] = load(TASKS[name].data)
    return task


@dataclass(frozen=True)
class RunData:
    """A run's datasets and the tokenizer that wrote them."""

    train: Dataset
    evaluation: Dataset | None
    tokens: SpecialTokens
    tokenizer_hash: str

    @property
    def sequence_length(self) -> int:  # tokens of the longest row
        return self.train.sequence_length

    def hashes(self) -> dict[str, str]:
        """Returns name -> hash of the data and the tokenizer, which must be the same on all hosts."""
        return {
            "training data": self.train.hash,
            "evaluation data": self.evaluation.hash if self.evaluation else "none",
            "tokenizer": self.tokenizer_hash,
        }


def open_data(config: TrainerConfig) -> RunData:
    """Reads manifests and the tokenizer (from the Hub, if it is a name there), and lists the evaluation set's shards: a
    missing one is found before the first step, not at the first evaluation. Raises BadInput for a dataset or tokenizer
    that is absent, damaged, or does not fit the task and the others; StorageError."""
    rows = TASKS[config.task].rows
    tokenizer = tokenizers.read(config.data.tokenizer, rows)

    def open_one(url: str) -> Dataset:
        dataset = open_dataset(url)
        dataset.require(rows=rows, tokenizer_hash=tokenizer.hash)
        return dataset

    train = open_one(config.data.train)
    evaluation = open_one(config.data.evaluation) if config.data.evaluation else None
    if evaluation:
        evaluation.require_like(train)
        find_shards(evaluation)
    return RunData(train, evaluation, tokenizer.special, tokenizer.hash)
