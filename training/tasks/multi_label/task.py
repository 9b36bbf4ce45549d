"""Any number of labels for each text: which labels can be, and the figures.

The loss is the mean binary cross-entropy over texts and labels. An evaluation adds up `COUNTS` over all hosts.
"""

from typing import Any

import numpy.typing as npt

from training.batch import StepResult
from training.data.formats.dataset import Dataset
from training.data.loading.labelled_batches import LabelledBatch
from training.tasks.classification.task import Classification, check_labels, micro_f1

# Totals over texts and labels, in this order: labels that were rightly predicted, that texts have, that were predicted.
COUNTS = ("hits", "true", "predicted")


class MultiLabel(Classification):
    least_labels = 1

    def check_batch(self, dataset: Dataset, batch: LabelledBatch) -> None:
        """Raises BadInput for a number that is neither 0 nor 1."""
        check_labels(dataset.url, batch.labels, batch.records, 2, self._config.task)

    def figures(self, total: StepResult) -> dict[str, float]:
        """Returns the loss and the micro F1 over all texts and labels."""
        assert total.counts is not None
        return {"loss": total.loss, "micro_f1": micro_f1(*total.counts.tolist())}

    def confusion(self, counts: npt.NDArray[Any] | None) -> list[list[float]] | None:
        """Returns None: texts of several labels have no confusion matrix."""
        return None
