"""`training.data.sampling.masking` in TensorFlow operations: the same integers, for `tf.data` on the host's CPU.

TPUs have no 64-bit unsigned integers: this is for the input pipeline, not for the model.
"""

from typing import Any

import numpy as np
import tensorflow as tf

from training.data.sampling import random_bits
from training.data.sampling.masking import Masking, SpecialTokens
from training.data.tf.random_bits import counted, keys, number, sortable


def mask(
    input_ids: Any, epoch: Any, records: Any, *, seed: int, masking: Masking, tokens: SpecialTokens
) -> tuple[Any, Any, Any, Any]:
    """Masks rows, as `Masker` does. Returns input_ids (n, length), positions (n, places), labels (n, places) int32 and
    weights (n, places) float32. input_ids: (n, length) int32 tensor of static length; epoch: one for all rows, or (n,)
    int64; records: (n,) int64."""
    right = tf.bitwise.right_shift

    length = int(input_ids.shape[1])
    places = masking.places(length)
    ordinary = tf.constant(tokens.ordinary().astype(np.int32))
    is_special = tf.constant(np.isin(np.arange(tokens.vocabulary), sorted(tokens.special)))  # (vocabulary,)
    special = tf.gather(is_special, input_ids)  # (n, length)

    row = keys(keys(number(random_bits.key(seed, "masking")), epoch), records)[:, None]  # (n, 1)
    bits = max(1, (length - 1).bit_length())
    position = tf.range(length, dtype=tf.int64)[None, :]  # (1, length)
    # (n, length) random bits above the position
    rank = tf.bitwise.left_shift(right(counted(row, tf.cast(position, tf.uint64)), number(bits)), number(bits))
    rank = tf.where(special, number(2**64 - 1), tf.bitwise.bitwise_or(rank, tf.cast(position, tf.uint64)))
    # (n, places); the highest bit, which `sortable` inverts, is masked away below
    first = tf.bitcast(tf.sort(sortable(rank), axis=1)[:, :places], tf.uint64)

    # (n,) candidates and predictions; (n, places) which places are used
    candidates = length - tf.reduce_sum(tf.cast(special, tf.int64), axis=1)
    wanted = tf.clip_by_value((candidates * masking.percent + 50) // 100, 1, places)
    used = tf.range(places, dtype=tf.int64)[None, :] < tf.minimum(wanted, candidates)[:, None]
    # (n, places) positions, ascending, unused ones last
    chosen = tf.where(
        used, tf.cast(tf.bitwise.bitwise_and(first, number(2**bits - 1)), tf.int64), tf.constant(length, tf.int64)
    )
    chosen = tf.sort(chosen, axis=1)
    used = chosen < length
    positions = tf.where(used, chosen, 0)
    labels = tf.where(used, tf.gather(input_ids, positions, batch_dims=1), 0)

    def draw(offset: int, below: int) -> Any:
        index = tf.cast(positions, tf.uint64) + number(offset)
        return tf.cast(right(right(counted(row, index), number(32)) * number(below), number(32)), tf.int32)

    kind = draw(length, 10)
    random = tf.gather(ordinary, draw(2 * length, int(ordinary.shape[0])))
    replaced = tf.where(kind < 8, tokens.mask, tf.where(kind == 8, random, labels))
    # (predictions, 2) row and position of each
    indices = tf.stack([tf.where(used)[:, 0], tf.boolean_mask(positions, used)], axis=1)
    masked = tf.tensor_scatter_nd_update(input_ids, indices, tf.boolean_mask(replaced, used))
    return masked, tf.cast(positions, tf.int32), labels, tf.cast(used, tf.float32)
