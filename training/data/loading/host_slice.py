"""How one host reads any of a run's datasets: what every source of batches takes, numpy's and TensorFlow's alike."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from training.data.formats.dataset import Dataset
from training.data.loading.shards import OnCorrupt
from training.data.sampling.masking import SpecialTokens
from training.data.sampling.order import rows
from training.errors import BadInput


@dataclass(frozen=True)
class Reading:
    """The rows of a global batch that are this host's, and what becomes of bad records."""

    tokenizer: SpecialTokens
    global_batch_size: int
    host: int = 0
    hosts: int = 1
    on_corrupt: OnCorrupt = "stop"
    cache: Path | None = None  # for the shards of a bucket; only masked language modelling, read with numpy, has one

    def rows(self, dataset: Dataset, kind: str) -> tuple[int, int]:
        """The rows [first, last) of each global batch that this host holds. Raises BadInput for a dataset of another
        kind or a size that can't be shared."""
        assert 0 <= self.host < self.hosts
        dataset.require(kind=kind)
        if self.global_batch_size < 1 or self.global_batch_size % self.hosts:
            raise BadInput(
                f"the global batch size {self.global_batch_size} can't be divided among {self.hosts} hosts: use a multiple of {self.hosts}"
            )
        return rows(self.global_batch_size, self.host, self.hosts)
