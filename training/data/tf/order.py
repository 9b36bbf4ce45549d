"""`training.data.sampling.order` and `bucket_schedule` in TensorFlow operations: the same windows and buckets.

Numbers of the dataset, the seed and the batch are Python values; epoch and window are tensors.
"""

from typing import Any

import tensorflow as tf

from training.data.sampling.order import EvaluationOrder, Order, TrainingOrder
from training.data.tf.random_bits import number as uint64
from training.data.tf.random_bits import sortable, stream

ENDLESS = 2**62


def block_permutation(order: Order, epoch: Any) -> Any:
    """Returns the permutation of an epoch's blocks, (blocks,) int64; empty for an evaluation."""
    if isinstance(order, EvaluationOrder):
        return tf.zeros(0, tf.int64)
    random = stream(order.seed, "blocks", epoch, order.blocks)
    return tf.cast(tf.argsort(sortable(random), stable=True), tf.int64)


def bounds(order: Order, epoch: Any, number: Any) -> tuple[Any, Any]:
    """Returns the first index of a window in its epoch and its number of cells, as `Order.bounds`: int64 scalars."""
    if isinstance(order, EvaluationOrder):
        start = number * order.window_size
        return start, tf.minimum(tf.constant(order.window_size, tf.int64), order.records - start)
    uneven, cells = _uneven(order, epoch), order.lanes * order.block
    start, stop = (
        border * order.blocks_per_lane // order.windows * cells
        + tf.where(border > uneven, _int64(order.leftover_records), 0)
        for border in (number, number + 1)
    )
    return start, stop - start


def window(order: Order, permuted: Any, epoch: Any, number: Any) -> Any:
    """Returns the records of a window, (cells,) int64, as `Order.window`. permuted: `block_permutation` of the epoch;
    epoch, number: int64 scalars."""
    if isinstance(order, TrainingOrder):
        return _shuffled_window(order, permuted, epoch, number)
    start, size = bounds(order, epoch, number)
    return start + tf.range(size)


def rows_of_window(
    order: Order, permuted: Any, batch: int, epoch: Any, number: Any, first: int, last: int, start: Any
) -> Any:
    """Returns a window's records in rows [first, last) of their batches, from place `start` on, (n,) int64. The
    counterpart of `cells_of_rows`. permuted, epoch, number: as for `window`."""
    records = window(order, permuted, epoch, number)
    begin, size = bounds(order, epoch, number)
    place = epoch * order.records + begin + tf.range(size)
    row = place % batch
    return tf.boolean_mask(records, (row >= first) & (row < last) & (place >= start))


def buckets_of_epoch(records: tuple[int, ...], batch: int, seed: int, epoch: Any) -> Any:
    """Returns each step's bucket as `epoch_order`, (steps,) int64. `records`: of each bucket; `epoch`: int64 scalar."""
    numbers = tf.constant(records, tf.int64)
    counts = (epoch + 1) * numbers // batch - epoch * numbers // batch  # (buckets,)
    order = tf.repeat(tf.range(len(records), dtype=tf.int64), counts)  # (steps,)
    random = stream(seed, "buckets", epoch, tf.size(order, tf.int64))
    return tf.gather(order, tf.argsort(sortable(random), stable=True))


def buckets_of_steps(records: tuple[int, ...], batch: int, seed: int, epoch: int, index: int) -> Any:
    """Returns an endless `tf.data` dataset of int64 scalars: the bucket of each step from `index` of `epoch` on."""

    def steps(epoch: Any) -> Any:
        return tf.data.Dataset.from_tensor_slices(buckets_of_epoch(records, batch, seed, epoch))

    return tf.data.Dataset.range(epoch, ENDLESS).flat_map(steps).skip(index)


def _shuffled_window(order: TrainingOrder, permuted: Any, epoch: Any, number: Any) -> Any:
    """Computes `window` for training, as the function of that name in `sampling.order`."""
    start, size = bounds(order, epoch, number)
    steps, longer = size // order.batch, size % order.batch
    begin = (epoch * order.records + start) % order.batch  # the row of cell 0

    def ranks(row: Any) -> Any:
        around = tf.minimum(row, tf.maximum(begin + longer - order.batch, 0))
        return row * steps + tf.clip_by_value(row - begin, 0, longer) + around

    cell = tf.range(size)  # (cells,)
    rank = ranks((begin + cell % order.batch) % order.batch) + cell // order.batch  # (cells,)

    if order.windows == 1:
        lane = tf.zeros_like(cell)
    else:
        borders = ranks(tf.range(order.lanes + 1, dtype=tf.int64) * order.rows_per_lane)  # (lanes + 1,) ranks
        lane = tf.repeat(tf.range(order.lanes, dtype=tf.int64), borders[1:] - borders[:-1])  # (cells,), of each rank
    shuffled = _shuffle_within(lane, stream(order.seed, "lanes", epoch, size, number))
    position = tf.gather(shuffled, rank)  # (cells,) in the window's sequence of permuted blocks

    # From that sequence to records. The last, shorter block follows the full blocks of the uneven window.
    uneven = _uneven(order, epoch)
    dealt = number * order.blocks_per_lane // order.windows * order.lanes
    first = dealt + tf.where(number > uneven, _int64(order.leftover_blocks), 0)
    full = permuted[first : first + size // order.block]  # (blocks of the window,)
    full = tf.concat([full, [_int64(order.blocks)]], 0)
    return tf.gather(full, position // order.block) * order.block + position % order.block


def _uneven(order: TrainingOrder, epoch: Any) -> Any:
    """Returns `TrainingOrder.uneven_window`, an int64 scalar."""
    random = tf.bitwise.right_shift(stream(order.seed, "uneven", epoch, 1)[0], uint64(1))
    return tf.cast(random, tf.int64) % order.windows


def _shuffle_within(group: Any, random: Any) -> Any:
    """Returns numpy's lexsort((random, group)), (cells,) int64: one stable sort after the other."""
    by_random = tf.argsort(sortable(random), stable=True)
    order = tf.argsort(tf.gather(group, by_random), stable=True)
    return tf.cast(tf.gather(by_random, order), tf.int64)


def _int64(value: int) -> Any:
    return tf.constant(value, tf.int64)
