"""Lists the programs of a run: one for each shape of a training batch and of an evaluation batch.

A checkpoint adds none: its state is copied from the device, and nothing is computed.
"""

from __future__ import annotations

from dataclasses import dataclass

from training import storage
from training.batch import Arrays
from training.config import TrainerConfig
from training.data import tokenizer as tokenizers
from training.data.formats.dataset import open_dataset
from training.errors import BadInput
from training.registry import TASKS
from training.tasks.task import task_class


@dataclass(frozen=True)
class DataFacts:
    """Facts of the data that determine the shapes and the model, beside the configuration."""

    vocabulary: int
    pad: int
    lengths: tuple[int, ...]  # of training batches, ascending
    evaluation_lengths: tuple[int, ...]  # empty without evaluation
    labels: tuple[str, ...] | None  # None if the task has none


@dataclass(frozen=True)
class Graph:
    """One program of a run."""

    kind: str  # "training" or "evaluation"
    rows: int  # of the global batch
    length: int

    def __str__(self) -> str:
        return f"{self.kind}, {self.rows} x {self.length}"


def read_facts(config: TrainerConfig) -> DataFacts:
    """Reads the facts from the manifests of the datasets and the tokenizer, without any record. Raises BadInput."""
    task = task_class(config.task)
    try:
        tokens = tokenizers.read(config.data.tokenizer).special
        train = open_dataset(config.data.train)
        evaluation = open_dataset(config.data.evaluation) if config.data.evaluation else None
        for dataset in (train, evaluation):
            if dataset is not None:
                dataset.require(rows=TASKS[config.task].rows)
    except (BadInput, storage.StorageError) as error:
        labels = " and --labels" if task.has_labels else ""
        raise BadInput(
            f"{error}\n  Before there is data, say what it will be: --vocabulary and --sequence-length{labels}"
        ) from None
    return DataFacts(
        tokens.vocabulary,
        tokens.pad,
        task.batch_lengths(train, config.train.global_batch_size),
        task.batch_lengths(evaluation, config.evaluation_batch_size) if evaluation else (),
        tuple(train.manifest.labels) if task.has_labels else None,
    )


def assume_facts(config: TrainerConfig, vocabulary: int, lengths: tuple[int, ...], labels: int | None) -> DataFacts:
    """Returns the facts of data that does not exist yet. Raises BadInput if they do not fit the task."""
    task = task_class(config.task)
    if task.has_labels and labels is None:
        raise BadInput(f"--labels says how many labels there will be: task is {config.task}")
    if not task.has_labels and labels is not None:
        raise BadInput(f"task is {config.task}: its data has no --labels")
    if not task.has_lengths and len(lengths) > 1:
        raise BadInput(f"task is {config.task}: it has one --sequence-length")
    names = None if labels is None else tuple(f"label {number}" for number in range(labels))
    return DataFacts(vocabulary, 0, lengths, lengths if config.data.evaluation else (), names)


def list_graphs(config: TrainerConfig, facts: DataFacts) -> list[Graph]:
    """Returns all programs that a run compiles, training steps first, longest first."""
    train = [Graph("training", config.train.global_batch_size, length) for length in reversed(facts.lengths)]
    return train + [
        Graph("evaluation", config.evaluation_batch_size, length) for length in reversed(facts.evaluation_lengths)
    ]


def empty_batch(config: TrainerConfig, graph: Graph) -> Arrays:
    """Returns a global batch of the program's shape, filled with zeros."""
    return task_class(config.task).empty_batch(config, graph.rows, graph.length)
