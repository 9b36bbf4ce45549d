"""`training.data.loading.fixed_shards.open_source` in TensorFlow operations."""

from __future__ import annotations

from training.data.formats.dataset import Dataset
from training.data.loading.record_source import OnCorrupt
from training.data.tf.fixed_shards import fixed_shards
from training.data.tf.recipe_shards import recipe_shards
from training.data.tf.record_source import RecordSource


def open_source(dataset: Dataset, *, vocabulary: int, on_corrupt: OnCorrupt, length: int | None = None) -> RecordSource:
    """The record source of a dataset.

    Args:
        dataset: opened, of either layout.
        vocabulary: ids from here on are refused.
        on_corrupt: what to do about a damaged record.
        length: only rows of that many tokens (default: the dataset's sequence length).

    Raises:
        BadInput: a shard is not as the manifest lists it.
    """
    if dataset.manifest.layout == "recipe":
        return recipe_shards(dataset, vocabulary=vocabulary, on_corrupt=on_corrupt)
    length = length or dataset.sequence_length
    return fixed_shards(dataset, length=length, vocabulary=vocabulary, on_corrupt=on_corrupt)
