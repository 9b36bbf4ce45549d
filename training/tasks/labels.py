"""Tasks on labelled rows: batches of a few lengths, each row with its label, or its labels.

A task says which labels can be, checks them, and turns the totals of an evaluation over all hosts into figures, which
are therefore exact over exactly the evaluation set.
"""

import math
from abc import abstractmethod
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt

from training.batch import Arrays, HostBatch, StepResult
from training.config import TrainerConfig
from training.data.formats.dataset import Dataset
from training.data.loading.batches import LabelledBatch, LabelledBatches, labelled_evaluation
from training.data.loading.record_source import HostSlice
from training.distributed.cluster import Cluster
from training.errors import BadInput
from training.registry import TASKS
from training.tasks.task import Task

OUTSIDE = "O"  # the label of words in no entity, which micro_f1 leaves out


class LabelledRows(Task):
    """The data half of a task on labelled rows."""

    has_lengths = True
    label_dtype: npt.DTypeLike

    def __init__(self, config: TrainerConfig, cluster: Cluster) -> None:
        """Opens the data and starts the reader's threads. Raises BadInput if data and configuration do not fit;
        StorageError."""
        super().__init__(config, cluster)
        self.source = LabelledBatches(self.data.train, self._slice, self._config.seed)

    @classmethod
    def empty_batch(cls, config: TrainerConfig, rows: int, length: int, labels: int = 0) -> Arrays:
        """Returns zeros as `Task.empty_batch`, without `token_type_ids`. Labels are one a row or token, or for
        multi-label `labels` a row: only there, the number counts."""
        kind = TASKS[config.task].rows
        of_tokens, of_sets = kind == "token-labelled", kind == "set-labelled"
        shape = (rows, length) if of_tokens else (rows, labels) if of_sets else (rows,)
        return {
            "input_ids": np.zeros((rows, length), np.int32),
            "attention_mask": np.zeros((rows, length), np.int32),
            "labels": np.zeros(shape, cls.label_dtype),
            "weights": np.zeros(shape if of_tokens else rows, np.float32),
        }

    @abstractmethod
    def check_batch(self, dataset: Dataset, batch: LabelledBatch) -> None:
        """Raises BadInput for a label that the task can't have."""

    def host_batch(self, dataset: Dataset, batch: LabelledBatch) -> HostBatch:
        """Returns what a step takes of a batch. Raises BadInput for a label that the task can't have."""
        self.check_batch(dataset, batch)
        return super().host_batch(dataset, batch)

    def evaluation_of(self, dataset: Dataset, host_slice: HostSlice) -> Iterator[LabelledBatch]:
        return labelled_evaluation(dataset, host_slice)


class Classification(LabelledRows):
    """Classes of whole texts. An evaluation adds up a confusion matrix: entry [t, p] counts the examples of class t
    that were taken for class p. Every figure but the loss follows from it."""

    has_labels = True
    label_dtype = np.int32
    least_labels = 2
    labels: tuple[str, ...]

    def __init__(self, config: TrainerConfig, cluster: Cluster) -> None:
        """Opens the data. Raises BadInput also for too few labels, or a class weight of an unknown one."""
        super().__init__(config, cluster)
        self.labels = tuple(self.data.train.manifest.labels)
        if len(self.labels) < self.least_labels:
            raise BadInput(
                f"{self.data.train.url} has {len(self.labels)} label(s), and {config.task} needs {self.least_labels} "
                "or more"
            )
        weights = self._config.train.class_weights
        if unknown := sorted(weights.keys() - set(self.labels)):
            raise BadInput(
                f"train.class_weights names {', '.join(unknown)}, and {self.data.train.url} has the labels: "
                f"{', '.join(self.labels)}"
            )
        self._class_weights = np.array([weights.get(name, 1) for name in self.labels], np.float32) if weights else None

    def identity(self) -> dict[str, Any]:
        """Returns what a checkpoint must agree with, the labels among it."""
        return {**super().identity(), "labels": list(self.labels)}

    @property
    def label_values(self) -> int:
        """Returns how many values a label can have, from 0 on."""
        return len(self.labels)

    def check_batch(self, dataset: Dataset, batch: LabelledBatch) -> None:
        """Raises BadInput for a label outside 0 to `label_values` - 1. Those of weight 0 are not checked (tokens
        without a label, rows that fill a batch), except in sets of labels."""
        counts = batch.weights > 0 if batch.weights.ndim == batch.labels.ndim else True
        labels = np.where(counts, batch.labels, 0)
        check_labels(dataset.url, labels, batch.records, self.label_values, self._config.task)

    def training_batch(self, batch: LabelledBatch) -> HostBatch:
        """Returns what a step takes of a training batch, with weights multiplied by `train.class_weights`. Raises as
        `host_batch`."""
        found = super().training_batch(batch)
        if self._class_weights is None:
            return found
        weights = found.arrays["weights"] * self._class_weights[np.maximum(found.arrays["labels"], 0)]
        return replace(found, arrays={**found.arrays, "weights": weights})

    def figures(self, total: StepResult) -> dict[str, float]:
        """Returns loss, and of the confusion matrix accuracy and weighted_f1; nan without examples."""
        confusion = np.array(self.confusion(total.counts))
        return {"loss": total.loss, "accuracy": accuracy(confusion), "weighted_f1": weighted_f1(confusion)}

    def confusion(self, counts: npt.NDArray[Any] | None) -> list[list[float]] | None:
        """Returns `counts` as the rows (true classes) of the confusion matrix; None for None."""
        rows: list[list[float]] | None = None if counts is None else counts.reshape(len(self.labels), -1).tolist()
        return rows


class TokenClassification(Classification):
    """Classes of words. Only the first token of a word has a label; others, and special tokens, have weight 0."""

    def figures(self, total: StepResult) -> dict[str, float]:
        """Returns loss, accuracy over all classes, and micro_f1 over all but OUTSIDE; nan for what has no tokens."""
        confusion = np.array(self.confusion(total.counts))
        inside = np.array([name != OUTSIDE for name in self.labels])
        true, predicted, hits = confusion[inside].sum(), confusion[:, inside].sum(), np.diag(confusion)[inside].sum()
        return {"loss": total.loss, "accuracy": accuracy(confusion), "micro_f1": micro_f1(hits, true, predicted)}


class MultiLabel(Classification):
    """Any number of labels for each text. The loss is the mean binary cross-entropy over texts and labels. Counts of an
    evaluation are totals over texts and labels, in this order: labels that were rightly predicted, that texts have,
    that were predicted."""

    least_labels = 1
    label_values = 2

    def figures(self, total: StepResult) -> dict[str, float]:
        """Returns loss, and micro_f1 over all texts and labels (nan if no label is true or predicted)."""
        assert total.counts is not None
        return {"loss": total.loss, "micro_f1": micro_f1(*total.counts.tolist())}

    def confusion(self, counts: npt.NDArray[Any] | None) -> list[list[float]] | None:
        """Returns None: texts of several labels have no confusion matrix."""
        return None


class Regression(LabelledRows):
    """One number for each text. The loss is the squared error. Counts of an evaluation are totals over rows, in this
    order: the absolute error, prediction p and label l, their squares pp and ll, their product pl.

    Devices add up in float32: pearson is good to about 1e-5 where the mean of the labels is at most ten of their
    standard deviations from 0, and loses two digits for each further factor of ten. Such labels are learnt slowly too:
    shift and scale them first."""

    has_labels = False
    label_dtype = np.float32

    def check_batch(self, dataset: Dataset, batch: LabelledBatch) -> None:
        """Raises BadInput for a label that is not finite."""
        for row in np.flatnonzero(~np.isfinite(batch.labels))[:1]:
            raise BadInput(
                f"{dataset.url}: record {batch.records[row]} has label {batch.labels[row]}: "
                "write the shards again with `tpu-train shards --task regression`"
            )

    def figures(self, total: StepResult) -> dict[str, float]:
        """Returns loss and mse, which are the same, mae (nan without rows) and pearson."""
        assert total.counts is not None
        count = total.sums["weight"]
        mae = float(total.counts[0] / count) if count else float("nan")
        return {"loss": total.loss, "mse": total.loss, "mae": mae, "pearson": pearson(count, total.counts[1:])}


def check_labels(
    url: str, labels: npt.NDArray[Any], records: npt.NDArray[np.int64], classes: int, task: str = "classification"
) -> None:
    """Raises BadInput for a label that no class has: on a device it would be another row of the matrix, or nan.
    `labels`: (rows,), or (rows, numbers); `url`, `records` and `task`: for the message."""
    for row, *place in np.argwhere((labels < 0) | (labels >= classes))[:1]:
        raise BadInput(
            f"{url}: record {records[row]} has label {labels[(row, *place)]}, which is none of 0 to {classes - 1}: "
            f"write the shards again with `tpu-train shards --task {task}`"
        )


def accuracy(confusion: npt.NDArray[np.float64]) -> float:
    """Returns the share on the diagonal of (true, predicted) counts; nan without examples."""
    total = confusion.sum()
    return float(np.trace(confusion) / total) if total else float("nan")


def weighted_f1(confusion: npt.NDArray[np.float64]) -> float:
    """Returns the mean of the classes' F1 = 2 hits / (true + predicted) of (true, predicted) counts, weighted by the
    number of examples of each class; nan without examples.

    A class that is neither present nor predicted counts 0, with weight 0. As scikit-learn's
    f1_score(average="weighted"): https://scikit-learn.org/stable/modules/generated/sklearn.metrics.f1_score.html"""
    true, predicted = confusion.sum(1), confusion.sum(0)  # (classes,) each
    f1 = 2 * np.diag(confusion) / np.maximum(true + predicted, 1)
    return float((f1 * true).sum() / true.sum()) if true.sum() else float("nan")


def micro_f1(hits: float, true: float, predicted: float) -> float:
    """Returns 2 hits / (true + predicted), of totals over all labels; nan if there is neither. As scikit-learn's
    f1_score(average="micro")."""
    return float(2 * hits / (true + predicted)) if true + predicted else float("nan")


def pearson(count: float, totals: npt.NDArray[np.float64]) -> float:
    """Returns the correlation of predictions and labels, between -1 and 1; 0 if either is constant, nan if a total is
    not finite. `count`: of rows; `totals`: (5,), of p, l, pp, ll and pl as in `Regression`."""
    if not np.isfinite(totals).all():
        return math.nan
    p, label, pp, ll, pl = totals.tolist()
    spread = (count * pp - p * p) * (count * ll - label * label)
    return max(-1.0, min(1.0, (count * pl - p * label) / math.sqrt(spread))) if spread > 0 else 0.0
