"""Everything that is wrong with a dataset, not only the first thing: each shard's size and checksum, each record's CRC
and layout, each id.

Reads all of it, in pieces, so memory does not grow with the dataset.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator

import google_crc32c
import numpy as np

from training import storage
from training.data.formats import recipe, tfrecord
from training.data.formats import records as form
from training.data.formats.dataset import MANIFEST, Dataset, Shard
from training.errors import TrainError
from training.storage import Stat

PIECE = 8 << 20


def problems(
    dataset: Dataset, vocabulary: int | None = None, progress: Callable[[Shard], None] = lambda _: None
) -> Iterator[str]:
    """One line for each thing that is wrong. `vocabulary`: ids from there on are wrong too (default: what the manifest
    says)."""
    there = {storage.name_of(each.url): each for each in storage.listing(dataset.url)}
    for shard in dataset.shards:
        progress(shard)
        stat = there.pop(shard.name, None)
        if stat is None:
            yield f"{storage.join(dataset.url, shard.name)} is missing"
        elif stat.size != shard.bytes:
            yield f"{stat.url} has {stat.size} bytes, and {MANIFEST} says {shard.bytes}"
        elif dataset.manifest.layout == "recipe":
            yield from _recipe(dataset, shard, stat, vocabulary)
        else:
            yield from _compact(dataset, shard, stat, vocabulary or dataset.manifest.vocabulary)
    for stranger in sorted(name for name in there if name.endswith(".tfrecord")):
        yield f"{there[stranger].url} is not listed in {MANIFEST}"


def _compact(dataset: Dataset, shard: Shard, stat: Stat, vocabulary: int) -> Iterator[str]:
    unit, layout = dataset.manifest.member_records, form.layout(dataset.manifest.features, shard.length)
    if not unit and shard.records * layout.size != shard.bytes:
        yield f"{stat.url}: {shard.bytes} bytes can't be {shard.records} records of {layout.size}"
        return
    offsets = [0, *itertools.accumulate(shard.members)]
    crc, per_piece = 0, max(1, PIECE // layout.size // (unit or 1)) * (unit or 1)
    for first in range(0, shard.records, per_piece):
        last = min(first + per_piece, shard.records)
        start, end = (
            (offsets[first // unit], offsets[-(-last // unit)]) if unit else (first * layout.size, last * layout.size)
        )
        try:
            stored = storage.read(stat.url, start, end, generation=stat.generation)
        except TrainError as error:
            yield str(error)
            return
        crc = google_crc32c.extend(crc, stored)
        data = (
            _expanded(stored, shard.members[first // unit : -(-last // unit)], unit, last - first, layout.size)
            if unit
            else stored
        )
        bad = form.broken(layout, data)
        for row in bad:
            offset = offsets[(first + row) // unit] if unit else (first + row) * layout.size
            yield f"{stat.url}: record {first + row} at byte {offset}: its checksum (CRC-32C) or framing does not match"
        ids = form.column(layout, data, "input_ids").astype(np.int64)
        for row in map(int, np.flatnonzero(((ids >= vocabulary) | (ids < 0)).any(axis=1))):
            if row not in bad:
                yield f"{stat.url}: record {first + row} has token id {int(ids[row].max())}, and the tokenizer has {vocabulary} ids"
    if crc != shard.crc32c:
        yield f"{stat.url}: its checksum (CRC-32C) is {crc:08x}, and {MANIFEST} says {shard.crc32c:08x}"


def _expanded(stored: bytes, members: list[int], unit: int, records: int, size: int) -> bytes:
    starts = [0, *itertools.accumulate(members)]
    counts = [min(unit, records - number * unit) for number in range(len(members))]
    return b"".join(
        form.expand(stored[start:stop], count * size)
        for (start, stop), count in zip(itertools.pairwise(starts), counts, strict=True)
    )


def _recipe(dataset: Dataset, shard: Shard, stat: Stat, vocabulary: int | None) -> Iterator[str]:
    """This layout can't be cut into equal pieces, so one shard at a time is in memory."""
    try:
        data = storage.read(stat.url, generation=stat.generation)
        offsets = tfrecord.index(data, stat.url)
    except TrainError as error:
        yield str(error)
        return
    if len(offsets) - 1 != shard.records:
        yield f"{stat.url} holds {len(offsets) - 1} records, and its name says {shard.records}"
    for number, (start, stop) in enumerate(itertools.pairwise(offsets)):
        try:
            recipe.ids(data[start:stop], stat.url, number, start, dataset.sequence_length, vocabulary or 1 << 31)
        except TrainError as error:
            yield str(error)
