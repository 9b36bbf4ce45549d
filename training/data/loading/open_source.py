"""Opens the record source for a dataset's layout. `training.data.tf.open_source` is the same in TensorFlow."""

from __future__ import annotations

from pathlib import Path

from training.data.formats.dataset import Dataset
from training.data.loading.fixed_shards import FixedShards
from training.data.loading.recipe_shards import RecipeShards
from training.data.loading.record_source import OnCorrupt, RecordSource


def open_source(
    dataset: Dataset, *, vocabulary: int | None = None, on_corrupt: OnCorrupt = "stop", cache: Path | None = None
) -> RecordSource:
    """The record source of a dataset. The options are those of `FixedShards`. Raises BadInput."""
    if dataset.manifest.layout == "recipe":
        return RecipeShards(dataset, vocabulary=vocabulary, on_corrupt=on_corrupt, cache=cache)
    return FixedShards(dataset, vocabulary=vocabulary, on_corrupt=on_corrupt, cache=cache)
