"""Which programs a run has: one for each shape of a training batch and of an evaluation batch. Pure, except that it
reads manifests.

A checkpoint adds none: its state is copied from the device, and nothing is computed.
"""

from __future__ import annotations

from dataclasses import dataclass

from training import storage
from training.backends.protocol import Arrays
from training.config import TrainerConfig
from training.data import tokenizer as tokenizers
from training.data.formats.open_dataset import open_dataset
from training.data.sampling.bucket_schedule import batch_lengths
from training.data.sampling.masking import Masking
from training.errors import BadInput
from training.tasks.classification import task as classification
from training.tasks.mlm import task as mlm


@dataclass(frozen=True)
class DataFacts:
    """What the shapes and the model depend on beside the configuration."""

    vocabulary: int
    pad: int
    lengths: tuple[int, ...]  # of training batches, ascending
    evaluation_lengths: tuple[int, ...]  # none without evaluation
    labels: tuple[str, ...] | None  # of a task that has some


@dataclass(frozen=True)
class Graph:
    """One program of a run."""

    kind: str  # "training" or "evaluation"
    rows: int  # of the global batch
    length: int

    def __str__(self) -> str:
        return f"{self.kind}, {self.rows} x {self.length}"


def read_facts(config: TrainerConfig) -> DataFacts:
    """Reads the manifests of the datasets and the tokenizer, and no record. Raises BadInput."""
    try:
        tokens = tokenizers.read(config.data.tokenizer).special
        train = open_dataset(config.data.train)
        evaluation = open_dataset(config.data.evaluation) if config.data.evaluation else None
        for dataset in (train, evaluation):
            if dataset is not None:
                dataset.require(kind=config.task)
    except (BadInput, storage.StorageError) as error:
        more = " --labels" if config.task == "classification" else ""
        raise BadInput(
            f"{error}\n  Before there is data, say what it will be: --vocabulary and --sequence-length"
            f"{' and' + more if more else ''}"
        ) from None
    if config.task == "mlm":
        return DataFacts(
            tokens.vocabulary,
            tokens.pad,
            (train.sequence_length,),
            (evaluation.sequence_length,) if evaluation else (),
            None,
        )
    return DataFacts(
        tokens.vocabulary,
        tokens.pad,
        batch_lengths(train.records_of_length, config.train.global_batch_size),
        batch_lengths(evaluation.records_of_length, config.evaluation_batch_size) if evaluation else (),
        tuple(train.manifest.labels),
    )


def assume_facts(config: TrainerConfig, vocabulary: int, lengths: tuple[int, ...], labels: int | None) -> DataFacts:
    """What the user says of data that is not there yet. Raises BadInput when it does not fit the task."""
    if config.task == "classification" and labels is None:
        raise BadInput("--labels says how many labels there will be: task is classification")
    if config.task == "mlm" and (labels is not None or len(lengths) > 1):
        raise BadInput("task is mlm: it has one --sequence-length, and no --labels")
    names = None if labels is None else tuple(f"label {number}" for number in range(labels))
    return DataFacts(vocabulary, 0, lengths, lengths if config.data.evaluation else (), names)


def list_graphs(config: TrainerConfig, facts: DataFacts) -> list[Graph]:
    """All programs that a run compiles, the training steps first, longest first."""
    train = [Graph("training", config.train.global_batch_size, length) for length in reversed(facts.lengths)]
    return train + [
        Graph("evaluation", config.evaluation_batch_size, length) for length in reversed(facts.evaluation_lengths)
    ]


def empty_batch(config: TrainerConfig, graph: Graph) -> Arrays:
    """A global batch of that shape, filled with zeros."""
    if config.task == "classification":
        return classification.blank(graph.rows, graph.length)
    return mlm.blank(
        graph.rows,
        graph.length,
        Masking(config.data.masking.percent, config.data.masking.predictions).places(graph.length),
    )
