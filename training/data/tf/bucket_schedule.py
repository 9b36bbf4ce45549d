"""`training.data.sampling.bucket_schedule` in TensorFlow operations: the length bucket of every step."""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from training.data.tf.order import ENDLESS
from training.data.tf.random_bits import sortable, stream


def epoch_order(records: tuple[int, ...], batch: int, seed: int, epoch: Any) -> Any:
    """The bucket of each step of an epoch. records: of each bucket; epoch: int64 scalar. (steps,) int64"""
    numbers = tf.constant(records, tf.int64)
    counts = (epoch + 1) * numbers // batch - epoch * numbers // batch  # (buckets,)
    order = tf.repeat(tf.range(len(records), dtype=tf.int64), counts)  # (steps,)
    random = stream(seed, "buckets", epoch, tf.size(order, tf.int64))
    return tf.gather(order, tf.argsort(sortable(random), stable=True))


def buckets_of_steps(records: tuple[int, ...], batch: int, seed: int, epoch: int, index: int) -> Any:
    """The bucket of each step from step number `index` of `epoch` on: an endless `tf.data` dataset of int64 scalars."""

    def steps(epoch: Any) -> Any:
        return tf.data.Dataset.from_tensor_slices(epoch_order(records, batch, seed, epoch))

    return tf.data.Dataset.range(epoch, ENDLESS).flat_map(steps).skip(index)
