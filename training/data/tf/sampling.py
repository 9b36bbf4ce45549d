"""`training.data.sampling` in TensorFlow operations: the same random numbers, orders, buckets and masks.

For `tf.data` on the host's CPU: TPUs have no unsigned 64-bit integers. Numbers of the dataset, the seed and the batch
are Python values; epoch and window are tensors.
"""

from typing import Any

import numpy as np
import tensorflow as tf

from training.data.sampling import random_bits
from training.data.sampling.masking import Masking, SpecialTokens
from training.data.sampling.order import EvaluationOrder, Order, TrainingOrder


def uint64(value: int) -> Any:
    """Returns a uint64 scalar; negative numbers and those beyond 64 bits wrap."""
    return tf.constant(np.uint64(value & (2**64 - 1)), tf.uint64)


def mix(z: Any) -> Any:
    """Applies `random_bits.mix` to a uint64 tensor of any shape."""
    xor, right = tf.bitwise.bitwise_xor, tf.bitwise.right_shift
    z = xor(z, right(z, uint64(30))) * uint64(random_bits.FIRST)
    z = xor(z, right(z, uint64(27))) * uint64(random_bits.SECOND)
    return xor(z, right(z, uint64(31)))


def keys(state: Any, numbers: Any) -> Any:
    """Returns `random_bits.keys`: uint64 keys that depend on one more number. state: uint64; broadcasts. numbers: an
    int64 tensor of any shape, each 0 or more, or -1; or a Python integer."""
    # Two's complement, as random_bits.mix_int wraps negative numbers.
    numbers = tf.cast(tf.convert_to_tensor(numbers, tf.int64), tf.uint64)
    return mix(state + mix(numbers + uint64(random_bits.GOLDEN)))


def counted(state: Any, index: Any) -> Any:
    """Returns `random_bits.counted` of uint64 tensors, which broadcast."""
    return mix(state + (index + uint64(1)) * uint64(random_bits.GOLDEN))


def stream(seed: int, purpose: str, epoch: Any, count: Any, window: Any = 0) -> Any:
    """Returns `random_bits.stream`, (count,) uint64; epoch, count and window may be int64 tensors."""
    state = keys(keys(uint64(random_bits.key(seed, purpose)), epoch), window)
    return counted(state, tf.cast(tf.range(tf.cast(count, tf.int64)), tf.uint64))


def sortable(values: Any) -> Any:
    """Returns int64 values that sort in the order of the uint64 `values`, which TensorFlow can't sort."""
    return tf.bitcast(tf.bitwise.bitwise_xor(values, uint64(2**63)), tf.int64)


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


def buckets_of_steps(records: tuple[int, ...], batch: int, seed: int, epoch: int, index: int) -> Any:
    """Returns an endless `tf.data` dataset of int64 scalars: the bucket of each step from `index` of `epoch` on.
    `records`: of each bucket."""

    def steps(epoch: Any) -> Any:  # as `epoch_order`
        numbers = tf.constant(records, tf.int64)
        counts = (epoch + 1) * numbers // batch - epoch * numbers // batch  # (buckets,)
        order = tf.repeat(tf.range(len(records), dtype=tf.int64), counts)  # (steps,)
        random = stream(seed, "buckets", epoch, tf.size(order, tf.int64))
        return tf.data.Dataset.from_tensor_slices(tf.gather(order, tf.argsort(sortable(random), stable=True)))

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
    # numpy's lexsort((random, lane)): one stable sort after the other.
    by_random = tf.argsort(sortable(stream(order.seed, "lanes", epoch, size, number)), stable=True)
    by_lane = tf.argsort(tf.gather(lane, by_random), stable=True)
    shuffled = tf.cast(tf.gather(by_random, by_lane), tf.int64)  # (cells,)
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


def _int64(value: int) -> Any:
    return tf.constant(value, tf.int64)


def mask(
    input_ids: Any, epoch: Any, records: Any, *, seed: int, masking: Masking, tokens: SpecialTokens
) -> dict[str, Any]:
    """Masks rows, as `Masker` does. Returns the fields of `Masked`. input_ids: (n, length) int32 tensor of static
    length; epoch: one for all rows, or (n,) int64; records: (n,) int64."""
    right = tf.bitwise.right_shift
    length = int(input_ids.shape[1])
    places = masking.places(length)
    ordinary = tf.constant(tokens.ordinary().astype(np.int32))
    is_special = tf.constant(np.isin(np.arange(tokens.vocabulary), sorted(tokens.special)))  # (vocabulary,)
    special = tf.gather(is_special, input_ids)  # (n, length)

    row = keys(keys(uint64(random_bits.key(seed, "masking")), epoch), records)[:, None]  # (n, 1)
    bits = max(1, (length - 1).bit_length())
    position = tf.range(length, dtype=tf.int64)[None, :]  # (1, length)
    # (n, length) random bits above the position
    rank = tf.bitwise.left_shift(right(counted(row, tf.cast(position, tf.uint64)), uint64(bits)), uint64(bits))
    rank = tf.where(special, uint64(2**64 - 1), tf.bitwise.bitwise_or(rank, tf.cast(position, tf.uint64)))
    # (n, places); the highest bit, which `sortable` inverts, is masked away below
    first = tf.bitcast(tf.sort(sortable(rank), axis=1)[:, :places], tf.uint64)

    # (n,) candidates and predictions; (n, places) which places are used
    candidates = length - tf.reduce_sum(tf.cast(special, tf.int64), axis=1)
    wanted = tf.clip_by_value((candidates * masking.percent + 50) // 100, 1, places)
    used = tf.range(places, dtype=tf.int64)[None, :] < tf.minimum(wanted, candidates)[:, None]
    # (n, places) positions, ascending, unused ones last
    chosen = tf.where(
        used, tf.cast(tf.bitwise.bitwise_and(first, uint64(2**bits - 1)), tf.int64), tf.constant(length, tf.int64)
    )
    chosen = tf.sort(chosen, axis=1)
    used = chosen < length
    positions = tf.where(used, chosen, 0)
    labels = tf.where(used, tf.gather(input_ids, positions, batch_dims=1), 0)

    def draw(offset: int, below: int) -> Any:
        index = tf.cast(positions, tf.uint64) + uint64(offset)
        return tf.cast(right(right(counted(row, index), uint64(32)) * uint64(below), uint64(32)), tf.int32)

    kind = draw(length, 10)
    random = tf.gather(ordinary, draw(2 * length, int(ordinary.shape[0])))
    replaced = tf.where(kind < 8, tokens.mask, tf.where(kind == 8, random, labels))
    # (predictions, 2) row and position of each
    indices = tf.stack([tf.where(used)[:, 0], tf.boolean_mask(positions, used)], axis=1)
    masked = tf.tensor_scatter_nd_update(input_ids, indices, tf.boolean_mask(replaced, used))
    return {
        "input_ids": masked, "positions": tf.cast(positions, tf.int32), "labels": labels,
        "weights": tf.cast(used, tf.float32),
    }  # fmt: skip
