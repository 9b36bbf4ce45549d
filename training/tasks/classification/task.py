"""Classification of whole texts: batches of a few lengths, what must stay the same for a run to go on, and its figures.

An evaluation adds up a confusion matrix over all hosts, entry [t, p] for the examples of class t that were taken for
class p; every figure but the loss follows from it, so it is exact over exactly the evaluation set.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt

from training.backends.protocol import Arrays, Outcome
from training.config import TrainerConfig
from training.data.formats.dataset import Dataset
from training.data.loading.labelled_batches import LabelledBatch, LabelledBatches, labelled_evaluation
from training.distributed.cluster import Cluster
from training.errors import BadInput
from training.tasks.task import HostBatch, open_data, read_ahead, reading


class Classification:
    """The data of one run. Opening it reads manifests only. Raises BadInput for anything that does not fit together."""

    figure_names: tuple[str, ...] = ("loss", "accuracy", "weighted_f1")

    def __init__(self, config: TrainerConfig, cluster: Cluster) -> None:
        self._config = config
        self.data = open_data(config)
        self.names = tuple(self.data.train.manifest.labels)
        if len(self.names) < 2:
            raise BadInput(
                f"{self.data.train.url} has {len(self.names)} label(s), and classification needs two or more"
            )
        self.labels: tuple[str, ...] | None = self.names
        if self.data.evaluation:
            _same_labels(self.data.train, self.data.evaluation)
        self._reading = reading(config, cluster, self.data)
        self._source = LabelledBatches(self.data.train, self._reading, config.seed)
        self.shapes = len(self._source.lengths)

    def identity(self) -> dict[str, Any]:
        return {
            "task": "classification",
            "data.train": self.data.train.hash,
            "tokenizer": self.data.train.tokenizer_hash,
            "labels": list(self.names),
        }

    def batches(self, start: int) -> Generator[HostBatch, None, None]:
        return read_ahead(self._source, self._host_batch(self.data.train), start, self._config.train.prefetch)

    def evaluation_batches(self) -> Iterator[HostBatch]:
        """Bucket by bucket, in record order."""
        assert self.data.evaluation is not None
        how = replace(self._reading, global_batch_size=self._config.evaluation_batch_size)
        return map(self._host_batch(self.data.evaluation), labelled_evaluation(self.data.evaluation, how))

    @property
    def skipped(self) -> int:
        return self._source.skipped

    def figures(self, total: Outcome) -> dict[str, float]:
        assert total.counts is not None
        confusion = total.counts.reshape(len(self.names), len(self.names))
        return {"loss": total.loss, "accuracy": accuracy(confusion), "weighted_f1": weighted_f1(confusion)}

    def _host_batch(self, dataset: Dataset) -> Callable[[LabelledBatch], HostBatch]:
        def convert(batch: LabelledBatch) -> HostBatch:
            check_labels(dataset.url, batch.labels, batch.records, len(self.names))
            arrays = {name: getattr(batch, name) for name in ("input_ids", "attention_mask", "labels", "weights")}
            return HostBatch(arrays, batch.records)

        return convert


def blank(rows: int, length: int) -> Arrays:
    """The arrays of a batch, empty: for whoever needs no more than their shapes."""
    ids = {name: np.zeros((rows, length), np.int32) for name in ("input_ids", "attention_mask")}
    return {**ids, "labels": np.zeros(rows, np.int32), "weights": np.zeros(rows, np.float32)}


def check_labels(url: str, labels: npt.NDArray[Any], records: npt.NDArray[np.int64], classes: int) -> None:
    """Raises BadInput for a label that no class has: on a device it would be another row of the matrix, or nan."""
    for row in np.flatnonzero((labels < 0) | (labels >= classes))[:1]:
        raise BadInput(
            f"{url}: record {records[row]} has label {labels[row]}, and the dataset has {classes} labels, 0 to {classes - 1}: "
            "write the shards again with `tpu-train shards --task classification`"
        )


def accuracy(confusion: npt.NDArray[np.float64]) -> float:
    """The share on the diagonal of (true, predicted) counts; nan without examples."""
    total = confusion.sum()
    return float(np.trace(confusion) / total) if total else float("nan")


def weighted_f1(confusion: npt.NDArray[np.float64]) -> float:
    """The mean of the classes' F1 = 2 hits / (true + predicted), weighted by how many examples each class has; nan
    without examples.

    A class that is neither present nor predicted counts 0, with weight 0. As scikit-learn's
    f1_score(average="weighted"): https://scikit-learn.org/stable/modules/generated/sklearn.metrics.f1_score.html
    """
    true, predicted = confusion.sum(1), confusion.sum(0)  # (classes,) each
    f1 = 2 * np.diag(confusion) / np.maximum(true + predicted, 1)
    return float((f1 * true).sum() / true.sum()) if true.sum() else float("nan")


def _same_labels(train: Dataset, other: Dataset) -> None:
    first, second = train.manifest.labels, other.manifest.labels
    if first != second:
        place = next(
            (number for number, (a, b) in enumerate(zip(first, second, strict=False)) if a != b),
            min(len(first), len(second)),
        )
        said = [names[place] if place < len(names) else "no more" for names in (first, second)]
        raise BadInput(
            f"{other.url} has {len(second)} labels and {train.url} {len(first)}; label {place} is {said[1]!r} in the one and {said[0]!r} in the other: "
            "give both the same list (tpu-train shards --labels)"
        )
