"""Datasets of packed rows for tests, and their order."""

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import numpy as np

from training.data.formats.dataset import Dataset
from training.data.prepare.dataset_writer import DatasetPlan, WrittenDataset
from training.data.prepare.pack import Encode, PackedRows, write_rows
from training.data.sampling.order import Ints, TrainingOrder, split_places


def pack_documents(
    url: str, plan: DatasetPlan, documents: Callable[[], Iterable[str]], encode: Encode, **options: Any
) -> WrittenDataset:
    """Packed rows; `encode` returns the ids of each text."""
    return write_rows(url, plan, documents, PackedRows(plan, encode), **options)


def pack_rows(folder: Path | str, plan: DatasetPlan, rows: Any) -> Dataset:
    """Returns a dataset whose records are rows of ids. (records, plan.length)"""
    numbers = list(map(str, range(len(rows))))
    return pack_documents(str(folder), plan, lambda: numbers, lambda texts: [rows[int(text)] for text in texts]).dataset


def batch_records(order: TrainingOrder, k: int) -> tuple[Ints, Ints]:
    """Returns epoch and record of every row of global batch k: (B,), (B,)."""
    ranges = list(split_places(order, k * order.batch, (k + 1) * order.batch))
    epochs = np.concatenate([np.full(stop - start, epoch) for epoch, _, start, stop in ranges])
    records = np.concatenate([order.window(epoch, number)[start:stop] for epoch, number, start, stop in ranges])
    return epochs, records
