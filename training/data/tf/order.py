"""`training.data.sampling.order` in TensorFlow operations: the same windows.

Numbers of the dataset, the seed and the batch are Python values; epoch and window are tensors.
"""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from training.data.sampling.order import GROUP_BLOCKS, Geometry, Order, Sequential
from training.data.tf.random_bits import sortable, stream

ENDLESS = 2**62


def window(order: Order, epoch: Any, number: Any) -> Any:
    """`Shuffled.window` and `Sequential.window`. epoch, number: int64 scalars. (cells,) int64"""
    shape = order.geometry
    start = number * shape.window
    size = tf.minimum(tf.constant(shape.window, tf.int64), shape.records - start)
    cell = tf.range(size)  # (cells,)
    if isinstance(order, Sequential):
        return start + cell

    # Down the columns.
    steps, longer = size // order.batch, size % order.batch
    step, row = cell // order.batch, cell % order.batch  # (cells,), (cells,)
    column = row * steps + tf.minimum(row, longer) + step  # (cells,)

    # Permute within groups: numpy's lexsort is one stable sort after the other. (cells,) each
    by_random = tf.argsort(sortable(stream(order.seed, "records", epoch, size, number)), stable=True)
    group = tf.gather(cell // (GROUP_BLOCKS * shape.block), by_random)
    shuffled = tf.gather(by_random, tf.argsort(group, stable=True))
    position = start + tf.cast(tf.gather(shuffled, column), tf.int64)

    # From the sequence of permuted blocks (blocks,) to records (cells,).
    permuted = tf.cast(tf.argsort(sortable(stream(order.seed, "blocks", epoch, shape.blocks)), stable=True), tf.int64)
    missing = shape.blocks * shape.block - shape.records
    short = tf.where(permuted == shape.blocks - 1)[0, 0]
    position = tf.where(position < (short + 1) * shape.block - missing, position, position + missing)
    return tf.gather(permuted, position // shape.block) * shape.block + position % shape.block


def rows_of_window(order: Order, batch: int, epoch: Any, number: Any, first: int, last: int, start: Any) -> Any:
    """The records of a window in rows [first, last) of their batches, from place `start` on. (n,) int64

    The twin of `cells_of_rows`. epoch, number: int64 scalars.
    """
    records = window(order, epoch, number)
    place = epoch * order.geometry.records + number * order.geometry.window + tf.range(tf.size(records, tf.int64))
    row = place % batch
    return tf.boolean_mask(records, (row >= first) & (row < last) & (place >= start))


def window_of_place(geometry: Geometry, place: int) -> int:
    """The window of a place, counted through all epochs."""
    epoch, index = divmod(place, geometry.records)
    return epoch * geometry.windows + index // geometry.window
