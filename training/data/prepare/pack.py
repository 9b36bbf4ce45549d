"""Packs documents into rows of one length: tokenizes, concatenates, cuts, and writes shards.

    documents --batches of about 1 MB--> ids (all cores, in the `tokenizers` library)
              --one endless stream--> rows of `length` ids --> shards

Ids that do not fill a row wait for the next batch of documents. Only the tail of a split, shorter than one row, is
dropped, and its size is reported. Memory does not grow with the corpus: it holds one batch of documents and one shard.
`training.data.prepare.documents` keeps documents whole instead: its stream is of finished rows.

Failure model: as of `training.data.prepare.dataset_writer`. An interrupted run continues after its last shard.
"""

import itertools
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from training.data.formats.dataset import Feature, Shard
from training.data.prepare import dataset_writer
from training.data.prepare.dataset_writer import DatasetPlan, Ids, Mark, WrittenDataset
from training.errors import BadInput

BATCH_CHARACTERS = 1 << 20
BATCH_DOCUMENTS = 4096

Encode = Callable[[list[str]], list[Ids]]


class RowKind(ABC):
    """How a batch of documents becomes a part of the stream, and how rows of it are stored."""

    units: int  # of the stream, in a row
    more: Mapping[str, Any]  # keys of the manifest
    features: Mapping[str, Feature]

    @abstractmethod
    def encode(self, documents: list[str]) -> Ids:
        """Returns a batch's part of the stream, (units, ...): a unit is a token, or a finished row."""

    @abstractmethod
    def write(self, url: str, number: int, units: Ids) -> Shard:
        """Writes the units of whole rows as shard `number` of the folder `url`. Returns the shard's manifest entry."""

    @abstractmethod
    def note(self, dropped: int) -> str:
        """Returns what the command prints about the rows. `dropped`: units at the end that fill no row."""


class PackedRows(RowKind):
    """Full rows, cut from one stream of ids, in the plan's layout."""

    def __init__(self, plan: DatasetPlan, encode: Encode) -> None:
        self.units, self.more, self.features = plan.length, dataset_writer.PACKED, dataset_writer.plan_features(plan)
        self._plan, self._encode = plan, encode

    def encode(self, documents: list[str]) -> Ids:
        """Returns the ids of all documents, one after the other."""
        return np.concatenate(self._encode(documents))

    def write(self, url: str, number: int, units: Ids) -> Shard:
        return dataset_writer.write_packed(url, self._plan, number, units.reshape(-1, self.units))

    def note(self, dropped: int) -> str:
        return f"{dropped} tokens at the end fill no row"


@dataclass(frozen=True)
class PackingProgress:
    """Documents read, rows and shards written of a split, including those of an earlier, interrupted run."""

    documents: int
    records: int
    shards: int


@dataclass
class _Stream:
    """The units (ids, or rows) that are not yet in a shard, batch after batch of documents. `used` maps the document at
    which a batch starts to the number of its units that are in shards."""

    used: dict[int, int]
    batches: list[tuple[int, Ids]] = field(default_factory=list)  # (first document, ids)

    def append(self, document: int, ids: Ids) -> None:
        """Adds the ids of the batch that starts at a document, except those already in a shard."""
        self.batches.append((document, ids[self.used.setdefault(document, 0) :]))

    def __len__(self) -> int:
        return sum(len(ids) for _, ids in self.batches)

    def take(self, count: int) -> tuple[Ids, int, int]:
        """Removes and returns the next `count` ids; also returns, of the batch in which they end, the number of its
        first document and how many of its ids are used now."""
        taken, missing = [], count
        for number, (document, ids) in enumerate(self.batches):
            part = ids[:missing]
            taken.append(part)
            missing -= len(part)
            self.used[document] += len(part)
            if not missing:
                self.batches = [(document, ids[len(part) :]), *self.batches[number + 1 :]]
                return np.concatenate(taken), document, self.used[document]
        raise AssertionError("the stream is shorter than its length")


def batches_of(documents: Iterable[str]) -> Iterator[list[str]]:
    """Yields batches of at most BATCH_DOCUMENTS documents, or about BATCH_CHARACTERS."""
    batch: list[str] = []
    size = 0
    for document in documents:
        batch.append(document)
        size += len(document)
        if size >= BATCH_CHARACTERS or len(batch) >= BATCH_DOCUMENTS:
            yield batch
            batch, size = [], 0
    if batch:
        yield batch


def write_rows(
    url: str,
    plan: DatasetPlan,
    documents: Callable[[], Iterable[str]],
    kind: RowKind,
    *,
    overwrite: bool = False,
    progress: Callable[[PackingProgress], None] = lambda _: None,
) -> WrittenDataset:
    """Writes the dataset of one split to the folder `url`, or continues where an interrupted run stopped.

    Returns a complete dataset of the same plan as it is, without reading the corpus. Drops the ids after the last full
    row. `documents` is called to read the corpus, and must give the same documents each time; `kind` turns them into
    rows; `progress` is called after each shard. Raises BadInput when the folder holds something else (unless
    `overwrite`), or there is too little text for a row; and StorageError."""
    existing = dataset_writer.find_existing(url, plan, overwrite)
    if existing is not None:
        return WrittenDataset(existing, reused=True)
    marks = dataset_writer.begin_dataset(url, plan)
    shards = [mark.shard for mark in marks]
    start, used = (marks[-1].document, marks[-1].tokens) if marks else (0, 0)
    per_shard = plan.records_per_shard * kind.units
    stream, documents_read = _Stream({start: used}), start
    for batch in batches_of(itertools.islice(documents(), start, None)):
        stream.append(documents_read, kind.encode(batch))
        documents_read += len(batch)
        while len(stream) >= per_shard:
            units, document, tokens = stream.take(per_shard)
            shards.append(kind.write(url, len(shards), units))
            dataset_writer.write_mark(url, Mark(len(shards) - 1, shards[-1], document, tokens))
            progress(_progress(documents_read, shards))
    count = len(stream)
    dropped = count % kind.units
    if count >= kind.units:
        units, _, _ = stream.take(count - dropped)
        shards.append(kind.write(url, len(shards), units))
    if not shards:
        raise BadInput(
            f"{url}: the {plan.split} split has {count} tokens in {documents_read} documents, less than one row of "
            f"{plan.length}: give more text, a shorter --sequence-length, or another --evaluation-percent"
        )
    progress(_progress(documents_read, shards))
    dataset = dataset_writer.finish_dataset(url, plan, kind.features, shards, kind.more)
    return WrittenDataset(dataset, f"from {documents_read} documents; {kind.note(dropped)}")


def _progress(documents: int, shards: list[Shard]) -> PackingProgress:
    """Returns the progress after so many documents and these shards."""
    return PackingProgress(documents, sum(shard.records for shard in shards), len(shards))
