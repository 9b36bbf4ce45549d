"""Classification of whole texts, and of their words: which labels can be, and the figures.

An evaluation adds up a confusion matrix over all hosts, entry [t, p] for the examples of class t that were taken for
class p; every figure but the loss follows from it, so it is exact over exactly the evaluation set.
"""

import contextlib
from collections.abc import Generator
from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt

from training.batch import HostBatch, StepResult
from training.config import TrainerConfig
from training.data.formats.dataset import Dataset
from training.data.loading.labelled_batches import LabelledBatch
from training.distributed.cluster import Cluster
from training.errors import BadInput
from training.tasks.labelled_rows import LabelledRows


class Classification(LabelledRows):
    has_labels = True
    label_dtype = np.int32
    least_labels = 2

    def __init__(self, config: TrainerConfig, cluster: Cluster) -> None:
        """Opens the data. Raises BadInput also for too few labels, a class weight of an unknown one, or an evaluation
        set with other labels."""
        super().__init__(config, cluster)
        self.labels = self.classes = tuple(self.data.train.manifest.labels)
        if len(self.classes) < self.least_labels:
            raise BadInput(
                f"{self.data.train.url} has {len(self.classes)} label(s), and {config.task} needs {self.least_labels} "
                "or more"
            )
        weights = self._config.train.class_weights
        if unknown := sorted(weights.keys() - set(self.classes)):
            raise BadInput(
                f"train.class_weights names {', '.join(unknown)}, and {self.data.train.url} has the labels: "
                f"{', '.join(self.classes)}"
            )
        self._class_weights = np.array([weights.get(name, 1) for name in self.classes], np.float32) if weights else None
        if self.data.evaluation:
            _require_same_labels(self.data.train, self.data.evaluation)

    def identity(self) -> dict[str, Any]:
        """Returns what a checkpoint must agree with, the labels among it."""
        return {**super().identity(), "labels": list(self.classes)}

    def check_batch(self, dataset: Dataset, batch: LabelledBatch) -> None:
        """Raises BadInput for a label that no class has."""
        check_labels(dataset.url, batch.labels, batch.records, len(self.classes), self._config.task)

    def batches(self, start: int) -> Generator[HostBatch, None, None]:
        """Yields the batches from step `start` on, weights multiplied by `train.class_weights`."""
        with contextlib.closing(super().batches(start)) as batches:
            for batch in batches:
                if self._class_weights is None:
                    yield batch
                    continue
                labels, weights = batch.arrays["labels"], batch.arrays["weights"]
                weights = weights * self._class_weights[np.maximum(labels, 0)]
                yield replace(batch, arrays={**batch.arrays, "weights": weights})

    def figures(self, total: StepResult) -> dict[str, float]:
        """Returns the loss, and the accuracy and the weighted F1 of the confusion matrix in the counts."""
        confusion = np.array(self.confusion(total.counts))
        return {"loss": total.loss, "accuracy": accuracy(confusion), "weighted_f1": weighted_f1(confusion)}

    def confusion(self, counts: npt.NDArray[Any] | None) -> list[list[float]] | None:
        rows: list[list[float]] | None = None if counts is None else counts.reshape(len(self.classes), -1).tolist()
        return rows


def check_labels(
    url: str, labels: npt.NDArray[Any], records: npt.NDArray[np.int64], classes: int, task: str = "classification"
) -> None:
    """Raises BadInput for a label that no class has: on a device it would be another row of the matrix, or nan.
    `labels`: (rows,), or (rows, numbers)."""
    for row, *place in np.argwhere((labels < 0) | (labels >= classes))[:1]:
        raise BadInput(
            f"{url}: record {records[row]} has label {labels[(row, *place)]}, and the dataset has {classes} labels, 0 "
            f"to {classes - 1}: write the shards again with `tpu-train shards --task {task}`"
        )


def accuracy(confusion: npt.NDArray[np.float64]) -> float:
    """Returns the share on the diagonal of (true, predicted) counts; nan without examples."""
    total = confusion.sum()
    return float(np.trace(confusion) / total) if total else float("nan")


def weighted_f1(confusion: npt.NDArray[np.float64]) -> float:
    """Returns the mean of the classes' F1 = 2 hits / (true + predicted), weighted by the number of examples of each
    class; nan without examples.

    A class that is neither present nor predicted counts 0, with weight 0. As scikit-learn's
    f1_score(average="weighted"): https://scikit-learn.org/stable/modules/generated/sklearn.metrics.f1_score.html"""
    true, predicted = confusion.sum(1), confusion.sum(0)  # (classes,) each
    f1 = 2 * np.diag(confusion) / np.maximum(true + predicted, 1)
    return float((f1 * true).sum() / true.sum()) if true.sum() else float("nan")


def micro_f1(hits: float, true: float, predicted: float) -> float:
    """Returns 2 hits / (true + predicted), of totals over all labels; nan if there is neither. As scikit-learn's
    f1_score(average="micro")."""
    return float(2 * hits / (true + predicted)) if true + predicted else float("nan")


def _require_same_labels(train: Dataset, other: Dataset) -> None:
    """Raises BadInput, naming the first difference, unless both datasets have the same labels in the same order."""
    first, second = train.manifest.labels, other.manifest.labels
    if first != second:
        place = next(
            (number for number, (a, b) in enumerate(zip(first, second, strict=False)) if a != b),
            min(len(first), len(second)),
        )
        shown = [names[place] if place < len(names) else "no more" for names in (first, second)]
        raise BadInput(
            f"{other.url} has {len(second)} labels and {train.url} {len(first)}; label {place} is {shown[1]!r} in the "
            f"one and {shown[0]!r} in the other: give both the same list (tpu-train shards --labels)"
        )
