"""Writes datasets of labelled rows: one text and its label per row, in shards by length.

A row is padded to the shortest of a few lengths (buckets) that holds it, so that a batch of short texts is not computed
at the length of the longest; texts longer than the longest bucket are cut, and counted. Shards have one feature more
than those of `training.data.prepare.pack`, `label`:

  ClassLabels   class numbers of named classes (int32, class-labelled rows)
  FloatLabels   finite numbers (float32, number-labelled rows)

Failure model: an interrupted run starts again from the beginning, and writes the same bytes; such datasets are small.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, ClassVar

import numpy as np

from training.data.formats import fixed_records
from training.data.formats.dataset import LABEL, Dataset, Dtype, Feature, Rows, Shard
from training.data.prepare import dataset_writer
from training.data.prepare.corpus import text_of
from training.data.prepare.dataset_writer import DatasetPlan, Ids
from training.data.prepare.pack import Encode
from training.errors import BadInput

BATCH_ROWS = 4096

LabelledText = tuple[str, str]  # text, label as it is written in the corpus


@dataclass(frozen=True)
class ClassLabels:
    """Named classes; a class's number is its place in `names`."""

    names: tuple[str, ...]
    rows: ClassVar[Rows] = "class-labelled"
    dtype: ClassVar[Dtype] = "int32"

    @cached_property
    def _numbers(self) -> dict[str, int]:
        return {name: number for number, name in enumerate(self.names)}

    def encode(self, label: str, place: str) -> float:
        """Returns the number of a label. Raises BadInput, with `place` before the message, for an unknown one."""
        number = self._numbers.get(label)
        if number is None:
            raise BadInput(
                f"{place}: label {label!r} is not among the {len(self.names)} labels ({', '.join(self.names[:5])}, ...)"
            )
        return number


@dataclass(frozen=True)
class FloatLabels:
    """Numbers, stored as float32."""

    rows: ClassVar[Rows] = "number-labelled"
    dtype: ClassVar[Dtype] = "float32"
    names: ClassVar[tuple[str, ...]] = ()

    def encode(self, label: str, place: str) -> float:
        """Returns the number of a label. Raises BadInput, with `place` before the message, unless it is a finite
        float32."""
        try:
            number = float(label)
        except ValueError:
            raise BadInput(f"{place}: label {label!r} is not a number: name the column with --label") from None
        if not math.isfinite(number) or abs(number) > float(np.finfo(np.float32).max):
            raise BadInput(f"{place}: label {label!r} is not a finite float32: leave such rows out of the corpus")
        return number


LabelKind = ClassLabels | FloatLabels


@dataclass(frozen=True)
class LengthBuckets:
    """Row lengths, ascending. The longest is the dataset's sequence length."""

    lengths: tuple[int, ...]

    def of(self, tokens: int) -> int:
        """Returns the shortest length that holds a text of so many tokens; the longest if none does."""
        return next((length for length in self.lengths if tokens <= length), self.lengths[-1])


@dataclass(frozen=True)
class LabelledDataset:
    """A written dataset. `cut`: texts longer than the longest bucket; `reused`: the dataset was already there."""

    dataset: Dataset
    cut: int
    reused: bool = False


def default_lengths(longest: int) -> tuple[int, ...]:
    """Returns the longest length, its half, and so on down to 16 (a shorter bucket is not worth a compilation)."""
    lengths = [longest]
    while lengths[0] // 2 >= 16:
        lengths.insert(0, lengths[0] // 2)
    return tuple(lengths)


def labelled_features(vocabulary: int, labels: LabelKind) -> dict[str, Feature]:
    """Returns the features of labelled rows."""
    return {**dataset_writer.id_features(vocabulary), LABEL: Feature(dtype=labels.dtype, shape=[])}


def select_columns(
    rows: Iterable[Mapping[str, Any]], text: str, label: str, corpus: str, labels: LabelKind | None = None
) -> Iterator[LabelledText]:
    """Yields the text and the label of each row of a corpus.

    Args:
        rows: column -> value.
        text: the column with the text.
        label: the column with the label: text, a number or a truth value, which is converted to text.
        corpus: the corpus's name, for messages.
        labels: checks each label; None: any printable label is allowed.

    Raises:
        BadInput: a row lacks one of the columns, its text is not text, or its label is impossible. The message begins
            with file:line, or with the corpus and the number of the row.
    """
    for number, row in enumerate(rows, 1):
        place = getattr(row, "place", None) or f"{corpus}: row {number}"
        for name in (text, label):
            if row.get(name) is None:
                columns = ", ".join(map(repr, row))
                raise BadInput(f"{place} has no {name!r}, it has: {columns}. Name the columns with --field and --label")
        if not isinstance(row[label], str | int | float):
            raise BadInput(
                f"{place}: label {row[label]!r:.80} is neither text nor a number but {type(row[label]).__name__}: name "
                "the column with --label"
            )
        name = str(row[label])
        if isinstance(row[label], float) and not math.isfinite(row[label]):
            raise BadInput(f"{place}: label {name} is not a finite number: leave such rows out of the corpus")
        if labels is not None:
            labels.encode(name, place)
        elif mistake := label_mistake(name):
            raise BadInput(f"{place}: label {name!r:.80} {mistake}")
        yield text_of(row, text, place), name


def label_mistake(name: str) -> str | None:
    """Returns why a text can't be the name of a class; None if it can."""
    if not name.strip():
        return "is empty: leave such rows out of the corpus"
    if name != name.strip():
        return "begins or ends with white space, so that it would be a class beside the one without: remove it"
    if not name.isprintable():
        return "has characters that can't be shown: remove them"
    return None


def write_labelled_rows(
    url: str,
    plan: DatasetPlan,
    buckets: LengthBuckets,
    labels: LabelKind,
    rows: Callable[[], Iterable[LabelledText]],
    encode: Encode,
    pad: int,
    *,
    overwrite: bool = False,
) -> LabelledDataset:
    """Writes a dataset of labelled rows to the folder `url`. Returns a complete dataset of the same plan as it is.

    `plan.length` is the longest bucket; a longer text is cut, but keeps its final token. `rows` is called to read the
    corpus, and must give the same rows each time; `encode` returns the ids of each text, with special tokens around
    them. Raises BadInput when the folder holds something else (unless `overwrite`), a label is impossible, or there is
    no row; and StorageError.
    """
    assert plan.length == buckets.lengths[-1]
    existing = dataset_writer.find_existing(url, plan, overwrite)
    if existing is not None:
        return LabelledDataset(existing, 0, reused=True)
    dataset_writer.begin_dataset(url, plan)
    waiting: dict[int, list[tuple[Ids, float]]] = {length: [] for length in buckets.lengths}
    shards: dict[int, list[Shard]] = {length: [] for length in buckets.lengths}
    cut = 0

    def flush(length: int) -> None:
        shards[length].append(_write_rows(url, plan, labels, length, len(shards[length]), waiting[length], pad))
        waiting[length] = []

    for batch in _batches(rows()):
        for (_, label), ids in zip(batch, encode([text for text, _ in batch]), strict=True):
            number = labels.encode(label, url)
            if len(ids) > plan.length:
                cut += 1
                ids = np.append(ids[: plan.length - 1], ids[-1:])  # keep the final special token
            length = buckets.of(len(ids))
            waiting[length].append((ids, number))
            if len(waiting[length]) == plan.records_per_shard:
                flush(length)
    for length in buckets.lengths:
        if waiting[length]:
            flush(length)
    ordered = [shard for length in buckets.lengths for shard in shards[length]]
    if not ordered:
        raise BadInput(f"{url}: the {plan.split} split has no rows: give another --corpus or --evaluation-percent")
    more = {"rows": labels.rows, "labels": list(labels.names)}
    features = labelled_features(plan.vocabulary, labels)
    return LabelledDataset(dataset_writer.finish_dataset(url, plan, features, ordered, more), cut)


def _write_rows(
    url: str,
    plan: DatasetPlan,
    labels: LabelKind,
    length: int,
    number: int,
    rows: Sequence[tuple[Ids, float]],
    pad: int,
) -> Shard:
    """Writes some rows, (ids, label) each, filled up with `pad`, as shard `number` of one length."""
    ids = np.full((len(rows), length), pad, np.int32)  # (n, length)
    for row, (row_ids, _) in enumerate(rows):
        ids[row, : len(row_ids)] = row_ids
    layout = fixed_records.record_layout(labelled_features(plan.vocabulary, labels), length)
    values = {
        "input_ids": ids.astype(fixed_records.id_dtype(plan.vocabulary)),  # (n, length)
        LABEL: np.array([label for _, label in rows], labels.dtype),  # (n,)
    }
    data = fixed_records.encode_records(layout, values)
    name = f"{plan.split}-of{length}-{number:05d}.tfrecord"
    return dataset_writer.write_shard(url, name, length, len(rows), data)


def _batches(rows: Iterable[LabelledText]) -> Iterator[list[LabelledText]]:
    """Yields the rows in lists of at most BATCH_ROWS."""
    iterator = iter(rows)
    while batch := list(itertools.islice(iterator, BATCH_ROWS)):
        yield batch
