"""Batches of labelled rows, of a few static lengths. `batch(k)` is a pure function, as in `training.data.loading.mlm`.

All rows of a global batch are of one bucket. Each bucket is an endless stream of epochs of its own records, cut into
full batches; nothing is dropped or repeated. Which bucket step k takes: in epoch e (counted over the whole dataset)
bucket b has as many batches as bring it to floor((e + 1) * N_b / B) in all, so each record is seen once an epoch, give
or take the batch that spans two; their order within the epoch is shuffled.

A bucket with fewer records than a batch would fill it with the same rows twice: it is joined to the next longer one,
and its rows are padded further.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np
import numpy.typing as npt

from training import storage
from training.data.formats.dataset import Dataset
from training.data.loading.host_slice import Reading
from training.data.loading.reader import Reader
from training.data.loading.shards import Arrays, FixedShards
from training.data.sampling.order import Ints, Sequential, Shuffled, geometry
from training.data.sampling.random_bits import stream


@dataclass(frozen=True)
class ClassificationBatch:
    """One host's rows of a global batch; their length is one of a few.

    input_ids, attention_mask: (rows, length) int32; labels: (rows,) int32; weights: (rows,) float32, 0 in a row that
    only fills an evaluation batch; records: (rows,) int64, -1 in such a row."""

    input_ids: npt.NDArray[np.int32]
    attention_mask: npt.NDArray[np.int32]
    labels: npt.NDArray[np.int32]
    weights: npt.NDArray[np.float32]
    records: npt.NDArray[np.int64]


class Padded:
    """Several buckets as one `training.data.loading.shards.Source`: the shorter ones first, all rows of the longest's
    length."""

    def __init__(self, parts: Sequence[FixedShards], pad: int) -> None:
        self.parts, self.pad = parts, pad
        self.length = parts[-1].length
        self.records = sum(part.records for part in parts)
        self.record_bytes, self.unit = parts[-1].record_bytes, 0

    def empty(self, count: int) -> Arrays:
        return self.parts[-1].empty(count)

    def skipped(self) -> int:
        return sum(part.skipped() for part in self.parts)

    def read(self, first: int, last: int, block: int) -> Arrays:
        if len(self.parts) == 1:
            return self.parts[0].read(first, last, block)
        result, start = self.empty(last - first), 0
        result["input_ids"][:] = self.pad
        for part in self.parts:
            # Block by block, so that a bad record's replacement does not depend on which blocks are read together.
            for begin in range(first, last, block):
                low, high = max(begin, start), min(begin + block, last, start + part.records)
                if low < high:
                    for name, values in part.read(low - start, high - start, block).items():
                        result[name][low - first : high - first, : values.shape[1]] = values
            start += part.records
        return result


class ClassificationBatches:
    """Endless training batches. `close` ends its threads."""

    def __init__(self, dataset: Dataset, how: Reading, seed: int) -> None:
        self.dataset, self.global_batch_size, self.seed = dataset, how.global_batch_size, seed
        self._pad = how.tokenizer.pad
        rows = how.rows(dataset, "classification")
        self._sources = _buckets(dataset, how)
        self.lengths = tuple(source.length for source in self._sources)
        self._starts = np.cumsum([0, *(source.records for source in self._sources)])
        self._readers = [
            # A bucket's own seed: otherwise buckets of one size would be shuffled alike.
            Reader(
                source,
                Shuffled(geometry(source.records, source.record_bytes), seed + source.length, self.global_batch_size),
                self.global_batch_size,
                *rows,
                threads=_threads(dataset),
            )
            for source in self._sources
        ]

    @property
    def steps_per_epoch(self) -> int:
        """Steps in which as many rows are read as there are records."""
        return -(-self.dataset.records // self.global_batch_size)

    @property
    def skipped(self) -> int:
        """Damaged records that this host has replaced (on_corrupt: skip)."""
        return sum(source.skipped() for source in self._sources)

    def batch(self, k: int) -> ClassificationBatch:
        """This host's rows of global batch k."""
        bucket, number = schedule(
            tuple(source.records for source in self._sources), self.global_batch_size, self.seed, k
        )
        _, records, arrays = self._readers[bucket].rows(
            number * self.global_batch_size, (number + 1) * self.global_batch_size
        )
        return _batch(arrays, records + self._starts[bucket], self._pad)

    def close(self) -> None:
        for reader in self._readers:
            reader.close()


def schedule(records: tuple[int, ...], batch: int, seed: int, k: int) -> tuple[int, int]:
    """Which bucket step k takes, and which of that bucket's batches it is. `records`: of each bucket."""
    epoch, place = epoch_of_step(records, batch, k)
    bucket = int(epoch_order(records, batch, seed, epoch)[place])
    return bucket, batches_before(records, batch, seed, epoch, place, bucket)


def batches_before(records: tuple[int, ...], batch: int, seed: int, epoch: int, place: int, bucket: int) -> int:
    """How many batches a bucket has given before the step at `place` of an epoch."""
    taken = epoch_order(records, batch, seed, epoch)[:place]
    return epoch * records[bucket] // batch + int(np.count_nonzero(taken == bucket))


def epoch_of_step(records: tuple[int, ...], batch: int, k: int) -> tuple[int, int]:
    """The epoch of step k, and the step's place in it."""
    epoch = max(0, k * batch // sum(records) - 1)
    while _first_step(records, batch, epoch + 1) <= k:
        epoch += 1
    while _first_step(records, batch, epoch) > k:
        epoch -= 1
    return epoch, k - _first_step(records, batch, epoch)


def _first_step(records: tuple[int, ...], batch: int, epoch: int) -> int:
    return sum(epoch * count // batch for count in records)


@lru_cache(maxsize=4)
def epoch_order(records: tuple[int, ...], batch: int, seed: int, epoch: int) -> Ints:
    """The bucket of each step of an epoch."""
    counts = [(epoch + 1) * count // batch - epoch * count // batch for count in records]
    order = np.repeat(np.arange(len(records)), counts)
    shuffled: Ints = order[np.argsort(stream(seed, "buckets", epoch, len(order)), kind="stable")]
    return shuffled


def evaluation(dataset: Dataset, how: Reading) -> Iterator[ClassificationBatch]:
    """All records once, bucket by bucket; the last batch of each is filled up with rows of weight 0 (record -1). Every
    host gets as many batches."""
    first, last = how.rows(dataset, "classification")
    start, step = 0, how.global_batch_size
    for source in _buckets(dataset, how):
        order = Sequential(geometry(source.records, source.record_bytes))
        with Reader(source, order, step, first, last, threads=_threads(dataset)) as reader:
            for place in range(0, source.records, step):
                _, records, arrays = reader.rows(place, min(place + step, source.records))
                yield _filled(_batch(arrays, records + start, how.tokenizer.pad), last - first, how.tokenizer.pad)
        start += source.records


def _buckets(dataset: Dataset, how: Reading) -> list[Padded]:
    """The buckets, joined until each has the records of a batch, as far as there are as many."""
    options: dict[str, Any] = {"vocabulary": how.tokenizer.vocabulary, "on_corrupt": how.on_corrupt}
    return [
        Padded([FixedShards(dataset, length=length, **options) for length in lengths], how.tokenizer.pad)
        for lengths in groups_of_lengths(dataset, how.global_batch_size)
    ]


def batch_lengths(dataset: Dataset, at_least: int) -> tuple[int, ...]:
    """The lengths of the batches of `at_least` rows that this dataset gives, from its manifest alone."""
    return tuple(group[-1] for group in groups_of_lengths(dataset, at_least))


def groups_of_lengths(dataset: Dataset, at_least: int) -> list[list[int]]:
    """Which lengths are one bucket: shorter ones are joined to longer ones until there are `at_least` records."""
    counts = dict.fromkeys(sorted(shard.length for shard in dataset.shards if shard.records), 0)
    for shard in dataset.shards:
        if shard.records:
            counts[shard.length] += shard.records
    groups: list[list[int]] = [[]]
    for length in counts:
        groups[-1].append(length)
        if sum(counts[each] for each in groups[-1]) >= at_least:
            groups.append([])
    rest = groups.pop()
    if rest and groups:
        groups[-1] += rest
    elif rest:
        groups = [rest]
    return groups


def _threads(dataset: Dataset) -> int:
    return 8 if storage.is_remote(dataset.url) else 1


def _batch(arrays: Arrays, records: Ints, pad: int) -> ClassificationBatch:
    ids = arrays["input_ids"].astype(np.int32)
    labels = arrays["label"][:, 0].astype(np.int32)
    return ClassificationBatch(ids, (ids != pad).astype(np.int32), labels, np.ones(len(ids), np.float32), records)


def _filled(batch: ClassificationBatch, count: int, pad: int) -> ClassificationBatch:
    missing = count - len(batch.records)
    if not missing:
        return batch
    length = batch.input_ids.shape[1]
    # One token of attention: a row without any would divide by zero in a softmax.
    mask = np.zeros((missing, length), np.int32)
    mask[:, 0] = 1
    return ClassificationBatch(
        np.concatenate([batch.input_ids, np.full((missing, length), pad, np.int32)]),
        np.concatenate([batch.attention_mask, mask]),
        np.concatenate([batch.labels, np.zeros(missing, np.int32)]),
        np.concatenate([batch.weights, np.zeros(missing, np.float32)]),
        np.concatenate([batch.records, np.full(missing, -1)]),
    )
