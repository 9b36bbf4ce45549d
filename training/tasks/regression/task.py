"""Regression of one number for each text: which labels can be, and the figures.

The loss is the squared error. An evaluation adds up the totals of `COUNTS` over all hosts, so its figures are of
exactly the evaluation set. Devices add up in float32: pearson is good to about 1e-5 where the mean of the labels is at
most ten of their standard deviations from 0, and loses two digits for each further factor of ten. Such labels are
learnt slowly too: shift and scale them first.
"""

import math

import numpy as np
import numpy.typing as npt

from training.batch import StepResult
from training.data.formats.dataset import Dataset
from training.data.loading.labelled_batches import LabelledBatch
from training.errors import BadInput
from training.tasks.labelled_rows import LabelledRows

# Totals of an evaluation over rows, in this order: the absolute error, prediction p and label l, their squares and
# product.
COUNTS = ("absolute", "p", "l", "pp", "ll", "pl")


class Regression(LabelledRows):
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
        return {
            "loss": total.loss,
            "mse": total.loss,
            "mae": float(total.counts[0] / count) if count else float("nan"),
            "pearson": pearson(count, total.counts[1:]),
        }


def pearson(count: float, totals: npt.NDArray[np.float64]) -> float:
    """Returns the correlation of predictions and labels, between -1 and 1; 0 if either is constant. `count`: of rows;
    `totals`: (5,), of the last five of `COUNTS`."""
    p, label, pp, ll, pl = totals.tolist()
    spread = (count * pp - p * p) * (count * ll - label * label)
    return max(-1.0, min(1.0, (count * pl - p * label) / math.sqrt(spread))) if spread > 0 else 0.0
