"""Verifies a whole dataset and lists all problems, not only the first.

Checks each shard's size and checksum, each record's CRC and layout, each token id and each label. Reads the dataset in
pieces, so memory does not grow with it.
"""

import itertools
from collections.abc import Iterator

import google_crc32c
import numpy as np
import numpy.typing as npt

from training import storage
from training.data.formats import fixed_records, recipe_layout, tfrecord
from training.data.formats.dataset import IGNORED, LABEL, MANIFEST, UNKNOWN, Dataset, DatasetManifest, Shard
from training.data.formats.fixed_records import RecordLayout
from training.errors import BadInput, TrainError
from training.storage import Stat

PIECE_BYTES = 8 << 20


def problems(dataset: Dataset, vocabulary: int | None = None) -> Iterator[str]:
    """Yields a line for each problem of a dataset, also for a shard that is missing, can't be read, or is not in the
    manifest. Reads every shard that has the manifest's size. Ids of `vocabulary` or more are a problem; the default is
    the manifest's, and no limit without one. Raises BadInput for a mixture, and StorageError if the folder
    can't be listed, both when the first line is asked for."""
    if any(shard.folder for shard in dataset.shards):
        raise BadInput(f"{dataset.url} is a mixture: verify its parts, which `tpu-train dataset show` names")
    stats = {storage.name_of(stat.url): stat for stat in storage.files(dataset.url)}
    for shard in dataset.shards:
        stat = stats.pop(shard.name, None)
        if stat is None:
            yield f"{storage.join(dataset.url, shard.name)} is missing"
        elif stat.size != shard.bytes:
            yield f"{stat.url} has {stat.size} bytes, and {MANIFEST} says {shard.bytes}"
        elif dataset.manifest.layout == "recipe":
            yield from _recipe_problems(dataset, shard, stat, vocabulary)
        else:
            yield from _compact_problems(dataset, shard, stat, vocabulary or dataset.manifest.vocabulary)
    for name in sorted(name for name in stats if name.endswith(".tfrecord")):
        yield f"{stats[name].url} is not listed in {MANIFEST}"


def _compact_problems(dataset: Dataset, shard: Shard, stat: Stat, vocabulary: int) -> Iterator[str]:
    """Yields the problems of a shard of fixed-size records: its size, its CRC, records, values. Reads it in pieces."""
    manifest = dataset.manifest
    layout = fixed_records.record_layout(manifest.features, shard.length)
    if shard.records * layout.size != shard.bytes:
        yield f"{stat.url}: {shard.bytes} bytes can't be {shard.records} records of {layout.size}"
        return
    crc, records_per_piece = 0, max(1, PIECE_BYTES // layout.size)
    for first in range(0, shard.records, records_per_piece):
        last = min(first + records_per_piece, shard.records)
        try:
            data = storage.read(stat.url, first * layout.size, last * layout.size, generation=stat.generation)
        except TrainError as error:
            yield str(error)
            return
        crc = google_crc32c.extend(crc, data)
        broken = fixed_records.find_broken(layout, data)
        for row in broken:
            offset = (first + row) * layout.size
            yield f"{stat.url}: record {first + row} at byte {offset}: its checksum (CRC-32C) or framing does not match"
        for row, problem in _value_problems(layout, data, manifest, vocabulary):
            if row not in broken:
                yield f"{stat.url}: record {first + row} has {problem}"
    yield from _checksum_problems(shard, stat, crc)


def _checksum_problems(shard: Shard, stat: Stat, crc: int) -> Iterator[str]:
    if crc != shard.crc32c:
        yield f"{stat.url}: its checksum (CRC-32C) is {crc:08x}, and {MANIFEST} says {shard.crc32c:08x}"


def _value_problems(
    layout: RecordLayout, data: bytes, manifest: DatasetManifest, vocabulary: int
) -> Iterator[tuple[int, str]]:
    """Yields (row, problem) for each row of `data`, whole records, with a token id that the tokenizer lacks, then for
    each with a label that is no class, or no finite number."""
    ids = fixed_records.read_column(layout, data, "input_ids").astype(np.int64)  # (n, length)
    unknown = (ids >= vocabulary) | (ids < 0)
    for row in map(int, np.flatnonzero(unknown.any(axis=1))):
        yield row, f"token id {ids[row][unknown[row]][0]}, and the tokenizer has {vocabulary} ids"
    if LABEL in manifest.features:
        labels: npt.NDArray[np.generic] = fixed_records.read_column(layout, data, LABEL)  # (n, numbers)
        if np.issubdtype(labels.dtype, np.floating):
            wrong, expected = ~np.isfinite(labels.astype(np.float64)), "a finite number"
        else:
            numbers = labels.astype(np.int64)
            classes = 2 if manifest.rows == "set-labelled" else len(manifest.labels)
            wrong, expected = (numbers < 0) | (numbers >= classes), f"one of 0 to {classes - 1}"
            wrong &= (numbers != IGNORED) | (manifest.rows != "token-labelled")
        for row in map(int, np.flatnonzero(wrong.any(axis=1))):
            yield row, f"label {labels[row][wrong[row]][0]}, which is not {expected}"


def _recipe_problems(dataset: Dataset, shard: Shard, stat: Stat, vocabulary: int | None) -> Iterator[str]:
    """Yields the problems of a shard in the recipe's layout, read whole. `vocabulary` None: the manifest's, if any."""
    try:
        data = storage.read(stat.url, generation=stat.generation)
        offsets = tfrecord.index(data, stat.url)
    except TrainError as error:
        yield str(error)
        return
    limit = vocabulary or 1 << 31
    if dataset.manifest.tokenizer_hash != UNKNOWN:  # of a manifest that was written, which knows more than names say
        limit = vocabulary or dataset.manifest.vocabulary
        yield from _checksum_problems(shard, stat, google_crc32c.value(data))
    if len(offsets) - 1 != shard.records:
        yield f"{stat.url} holds {len(offsets) - 1} records, and its name says {shard.records}"
    for number, (start, stop) in enumerate(itertools.pairwise(offsets)):
        try:
            recipe_layout.decode_ids(data[start:stop], stat.url, number, start, dataset.sequence_length, limit)
        except TrainError as error:
            yield str(error)
