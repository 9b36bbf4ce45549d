"""Which reader a dataset needs."""

from __future__ import annotations

from typing import Any

from training.data.formats.dataset import Dataset
from training.data.formats.recipe import RecipeShards
from training.data.loading.shards import FixedShards, Source


def open_source(dataset: Dataset, **options: Any) -> Source:
    """The source for a dataset's layout; options as of FixedShards."""
    if dataset.manifest.layout == "recipe":
        return RecipeShards(dataset, **options)
    return FixedShards(dataset, **options)
