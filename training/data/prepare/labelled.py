"""From labelled texts to a classification dataset: one example a row, in shards by length.

A row is padded to the shortest of a few lengths (buckets) that holds it, so that a batch of short texts is not computed
at the longest one's length; texts longer than the longest bucket are cut, and counted. Shards are those of
`training.data.formats.dataset` with one more feature, `label`, the number of the label in the manifest's `labels`. Such
datasets are small: an interrupted run starts again, and writes the same bytes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import google_crc32c
import numpy as np
import numpy.typing as npt

from training import storage
from training.data.formats import records as form
from training.data.formats.dataset import Dataset, Feature, Shard
from training.data.prepare import pack as prepare
from training.errors import BadInput

BATCH = 4096

Ids = npt.NDArray[np.int32]
Row = tuple[str, str]  # text, label


@dataclass(frozen=True)
class Buckets:
    """Row lengths, ascending. The longest is the dataset's sequence length."""

    lengths: tuple[int, ...]

    def of(self, tokens: int) -> int:
        """The bucket for a text of so many tokens."""
        return next((length for length in self.lengths if tokens <= length), self.lengths[-1])


def default_lengths(longest: int) -> tuple[int, ...]:
    """The longest, its half, ... down to 16: at most half of a row is padding (below 16 it is not worth a
    compilation)."""
    lengths = [longest]
    while lengths[0] // 2 >= 16:
        lengths.insert(0, lengths[0] // 2)
    return tuple(lengths)


def features(vocabulary: int) -> dict[str, Feature]:
    """The features of a classification dataset."""
    return {**prepare.features(vocabulary), "label": Feature(dtype="int32", shape=[])}


def rows_of(rows: Iterable[Mapping[str, Any]], text: str, label: str, where: str) -> Iterator[Row]:
    """The columns that matter. Raises BadInput for a row without them."""
    for number, row in enumerate(rows, 1):
        for name in (text, label):
            if row.get(name) is None:
                raise BadInput(
                    f"{where}: row {number} has no {name!r}, it has: {', '.join(row)}. Name the columns with --field and --label"
                )
        if not isinstance(row[text], str):
            raise BadInput(
                f"{where}: row {number}: {text!r} is not text but {type(row[text]).__name__}. Name the text with --field"
            )
        yield row[text], str(row[label])


@dataclass(frozen=True)
class Examples:
    """The result: `cut` texts were longer than the longest bucket."""

    dataset: Dataset
    cut: int
    reused: bool = False


def make(
    url: str,
    plan: prepare.Plan,
    buckets: Buckets,
    labels: Sequence[str],
    rows: Callable[[], Iterable[Row]],
    encode: prepare.Encode,
    pad: int,
    *,
    overwrite: bool = False,
) -> Examples:
    """Writes a classification dataset. `plan.length` is the longest bucket. Raises BadInput, StorageError."""
    assert plan.length == buckets.lengths[-1]
    done = prepare.existing(url, plan, overwrite)
    if done is not None:
        return Examples(done, 0, reused=True)
    prepare.begin(url, plan)
    number_of = {label: number for number, label in enumerate(labels)}
    waiting: dict[int, list[tuple[Ids, int]]] = {length: [] for length in buckets.lengths}
    shards: dict[int, list[Shard]] = {length: [] for length in buckets.lengths}
    cut = 0

    def flush(length: int) -> None:
        shards[length].append(_write(url, plan, length, len(shards[length]), waiting[length], pad))
        waiting[length] = []

    for batch in _batches(rows()):
        for (_, label), ids in zip(batch, encode([text for text, _ in batch]), strict=True):
            if label not in number_of:
                raise BadInput(
                    f"{url}: label {label!r} is not among the {len(labels)} labels ({', '.join(labels[:5])}, ...)"
                )
            if len(ids) > plan.length:
                cut += 1
                ids = np.append(ids[: plan.length - 1], ids[-1:])
            length = buckets.of(len(ids))
            waiting[length].append((ids, number_of[label]))
            if len(waiting[length]) == plan.records_per_shard:
                flush(length)
    for length in buckets.lengths:
        if waiting[length]:
            flush(length)
    ordered = [shard for length in buckets.lengths for shard in shards[length]]
    if not ordered:
        raise BadInput(f"{url}: the {plan.split} split has no rows: give another --corpus or --evaluation-percent")
    manifest = {"kind": "classification", "labels": list(labels)}
    return Examples(prepare.finish(url, plan, features(plan.vocabulary), ordered, manifest), cut)


def _write(url: str, plan: prepare.Plan, length: int, number: int, rows: Sequence[tuple[Ids, int]], pad: int) -> Shard:
    ids = np.full((len(rows), length), pad, np.int32)
    for row, (values, _) in enumerate(rows):
        ids[row, : len(values)] = values
    layout = form.layout(features(plan.vocabulary), length)
    labels = np.array([label for _, label in rows], np.int32)
    data = form.encode(layout, {"input_ids": ids.astype(form.feature_dtype(plan.vocabulary)), "label": labels})
    name = f"{plan.split}-of{length}-{number:05d}.tfrecord"
    storage.write(storage.join(url, name), data)
    return Shard(name=name, length=length, records=len(rows), bytes=len(data), crc32c=google_crc32c.value(data))


def _batches(rows: Iterable[Row]) -> Iterator[list[Row]]:
    batch: list[Row] = []
    for row in rows:
        batch.append(row)
        if len(batch) == BATCH:
            yield batch
            batch = []
    if batch:
        yield batch
