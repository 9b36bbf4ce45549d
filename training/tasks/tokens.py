"""Tasks that predict tokens, over rows of one length: hidden tokens of packed rows, and the next token of documents."""

import math
from collections.abc import Iterator
from typing import Any

import numpy as np

from training.batch import Arrays, StepResult
from training.config import TrainerConfig
from training.data.formats.dataset import Dataset
from training.data.loading.batches import DocumentBatches, MlmBatches, document_evaluation, mlm_evaluation
from training.data.loading.record_source import HostSlice
from training.data.sampling.masking import Masking
from training.distributed.cluster import Cluster
from training.tasks.task import Task


class TokenPrediction(Task):
    """A task on rows of one length."""

    has_labels = False
    has_lengths = False

    def figures(self, total: StepResult) -> dict[str, float]:
        """Returns the loss, the perplexity (inf for a loss from 700 on) and the accuracy (nan without predictions)."""
        weight = total.sums["weight"] or float("nan")
        perplexity = math.inf if total.loss >= 700 else math.exp(total.loss)  # exp overflows above 709
        return {"loss": total.loss, "perplexity": perplexity, "accuracy": total.sums["correct"] / weight}


class MaskedLanguageModeling(TokenPrediction):
    """Predicts tokens of packed rows that are hidden by masks, which a seed decides."""

    def __init__(self, config: TrainerConfig, cluster: Cluster) -> None:
        super().__init__(config, cluster)
        self._masking = masking_of(config)
        self.source = MlmBatches(self.data.train, self._slice, self._masking, self._config.seed)

    @classmethod
    def empty_batch(cls, config: TrainerConfig, rows: int, length: int, labels: int = 0) -> Arrays:
        """Returns zeros as `Task.empty_batch`. The entries `positions` and `labels`, (rows, masked places), are the
        same array. Ignores the argument `labels`."""
        places = np.zeros((rows, masking_of(config).places(length)), np.int32)
        ids = np.zeros((rows, length), np.int32)
        return {"input_ids": ids, "positions": places, "labels": places, "weights": places.astype(np.float32)}

    def identity(self) -> dict[str, Any]:
        """Returns what a checkpoint must agree with, the share and number of masked places among it."""
        masking = f"{self._masking.percent} % at {self._masking.places(self.data.sequence_length)} places"
        return {**super().identity(), "masking": masking}

    def evaluation_of(self, dataset: Dataset, host_slice: HostSlice) -> Iterator[Any]:
        return mlm_evaluation(dataset, host_slice, self._masking)


class CausalLanguageModeling(TokenPrediction):
    """Predicts each token of a document from those before it. Rows hold whole documents."""

    def __init__(self, config: TrainerConfig, cluster: Cluster) -> None:
        super().__init__(config, cluster)
        self.source = DocumentBatches(self.data.train, self._slice, self._config.seed)

    @classmethod
    def empty_batch(cls, config: TrainerConfig, rows: int, length: int, labels: int = 0) -> Arrays:
        """Returns zeros as `Task.empty_batch`; all integer entries are the same array. Ignores `labels`."""
        ids = np.zeros((rows, length), np.int32)
        return {"input_ids": ids, "position_ids": ids, "labels": ids, "weights": ids.astype(np.float32)}

    def evaluation_of(self, dataset: Dataset, host_slice: HostSlice) -> Iterator[Any]:
        return document_evaluation(dataset, host_slice)


def masking_of(config: TrainerConfig) -> Masking:
    """Returns the masking that the section data.masking describes."""
    return Masking(config.data.masking.percent, config.data.masking.predictions)
