"""Datasets of packed rows for tests, and their order."""

from collections.abc import Callable, Iterable
from typing import Any

import numpy as np

from training.data.prepare.dataset_writer import DatasetPlan, WrittenDataset
from training.data.prepare.pack import Encode, PackedRows, write_rows
from training.data.sampling.order import Ints, TrainingOrder, split_places


def pack_documents(
    url: str, plan: DatasetPlan, documents: Callable[[], Iterable[str]], encode: Encode, **options: Any
) -> WrittenDataset:
    """Packed rows; `encode` returns the ids of each text."""
    return write_rows(url, plan, documents, PackedRows(plan, encode), **options)


def batch_records(order: TrainingOrder, k: int) -> tuple[Ints, Ints]:
    """Returns epoch and record of every row of global batch k: (B,), (B,)."""
    ranges = split_places(order, k * order.batch, (k + 1) * order.batch)
    epochs = np.concatenate([np.full(cells.stop - cells.start, cells.epoch) for cells in ranges])
    records = np.concatenate([order.window(cells.epoch, cells.number)[cells.start : cells.stop] for cells in ranges])
    return epochs, records
