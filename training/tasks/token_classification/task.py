"""Classification of words: which labels can be, and the figures.

Only the first token of a word has a label; others, and special tokens, have weight 0. Figures are of words.
"""

import numpy as np

from training.batch import StepResult
from training.data.formats.dataset import Dataset
from training.data.loading.labelled_batches import LabelledBatch
from training.tasks.classification.task import Classification, accuracy, check_labels, micro_f1

OUTSIDE = "O"  # the label of words in no entity, which micro_f1 leaves out


class TokenClassification(Classification):
    def check_batch(self, dataset: Dataset, batch: LabelledBatch) -> None:
        """Raises BadInput for a label that no class has."""
        labels = np.where(batch.weights > 0, batch.labels, 0)
        check_labels(dataset.url, labels, batch.records, len(self.classes), self._config.task)

    def figures(self, total: StepResult) -> dict[str, float]:
        """Returns the loss, the accuracy over all classes, and the micro F1 over all but OUTSIDE."""
        confusion = np.array(self.confusion(total.counts))
        inside = np.array([name != OUTSIDE for name in self.classes])
        true, predicted, hits = confusion[inside].sum(), confusion[:, inside].sum(), np.diag(confusion)[inside].sum()
        return {"loss": total.loss, "accuracy": accuracy(confusion), "micro_f1": micro_f1(hits, true, predicted)}
