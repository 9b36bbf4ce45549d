"""Chooses the length bucket of every step, for labelled rows. Pure functions of (records of each bucket, batch size,
seed, step).

In epoch e, counted over the whole dataset, bucket b gives as many batches as bring it to floor((e + 1) * N_b / B) in
all, where N_b are its records and B the global batch size. So each record is seen once per epoch, except for the batch
that spans two epochs. The order of an epoch's batches is shuffled.

Numbers of batches: a *step* k counts the batches of all buckets; a bucket's *batch number* counts its own.
`training.data.tf.order` gives the same steps in TensorFlow operations.
"""

from collections.abc import Mapping
from functools import lru_cache

import numpy as np

from training.data.sampling.random_bits import Ints, stream


def group_lengths(records_of_length: Mapping[int, int], at_least: int) -> list[list[int]]:
    """Joins row lengths to buckets: shorter ones to longer ones until a bucket has `at_least` records.
    `records_of_length` (row length -> records) is ascending; the longest lengths join the bucket before when they have
    fewer. Returns the lengths of each bucket, ascending. A bucket's rows are padded to its last length."""
    groups: list[list[int]] = [[]]
    for length in records_of_length:
        groups[-1].append(length)
        if sum(records_of_length[member] for member in groups[-1]) >= at_least:
            groups.append([])
    rest = groups.pop()
    if rest and groups:
        groups[-1] += rest
    elif rest:
        groups = [rest]
    return groups


def batch_lengths(records_of_length: Mapping[int, int], at_least: int) -> tuple[int, ...]:
    """Returns the row lengths of batches, ascending: the longest of each group of `group_lengths`."""
    return tuple(group[-1] for group in group_lengths(records_of_length, at_least))


def batch_of_step(records: tuple[int, ...], batch: int, seed: int, k: int) -> tuple[int, int]:
    """Returns the bucket of step k, and the number of that bucket's batch. records: of each bucket."""
    epoch, index = epoch_of_step(records, batch, k)
    bucket = int(epoch_order(records, batch, seed, epoch)[index])
    return bucket, batches_before(records, batch, seed, epoch, index, bucket)


def batches_before(records: tuple[int, ...], batch: int, seed: int, epoch: int, index: int, bucket: int) -> int:
    """Counts the batches that a bucket has given before step number `index` of an epoch."""
    taken = epoch_order(records, batch, seed, epoch)[:index]
    return epoch * records[bucket] // batch + int(np.count_nonzero(taken == bucket))


def epoch_of_step(records: tuple[int, ...], batch: int, k: int) -> tuple[int, int]:
    """Returns the epoch of step k, and the step's index in it."""
    epoch = max(0, k * batch // sum(records) - 1)
    while _first_step(records, batch, epoch + 1) <= k:
        epoch += 1
    while _first_step(records, batch, epoch) > k:
        epoch -= 1
    return epoch, k - _first_step(records, batch, epoch)


@lru_cache(maxsize=4)
def epoch_order(records: tuple[int, ...], batch: int, seed: int, epoch: int) -> Ints:
    """Returns the bucket of each step of an epoch, shuffled; records that fill no batch go to the next. (steps,)"""
    counts = [(epoch + 1) * count // batch - epoch * count // batch for count in records]
    order = np.repeat(np.arange(len(records)), counts)  # (steps,)
    shuffled: Ints = order[np.argsort(stream(seed, "buckets", epoch, len(order)), kind="stable")]
    return shuffled


def _first_step(records: tuple[int, ...], batch: int, epoch: int) -> int:
    """Returns the first step of an epoch."""
    return sum(epoch * count // batch for count in records)
