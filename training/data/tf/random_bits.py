"""`training.data.sampling.random_bits` in TensorFlow operations on unsigned 64-bit integers: the same numbers.

For the host's CPU: TPUs have no such integers.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import tensorflow as tf

from training.data.sampling import random_bits

_HIGHEST = 2**63


def number(value: int) -> Any:
    """A uint64 scalar; negative numbers and those beyond 64 bits wrap."""
    return tf.constant(np.uint64(value & (2**64 - 1)), tf.uint64)


def mix(z: Any) -> Any:
    """The twin of `random_bits.mix`, for a uint64 tensor of any shape."""
    xor, right = tf.bitwise.bitwise_xor, tf.bitwise.right_shift
    z = xor(z, right(z, number(30))) * number(random_bits.FIRST)
    z = xor(z, right(z, number(27))) * number(random_bits.SECOND)
    return xor(z, right(z, number(31)))


def keys(state: Any, numbers: Any) -> Any:
    """The twin of `random_bits.keys`: a key with one more number.

    Args:
        state: uint64; broadcasts.
        numbers: an int64 tensor of any shape, each 0 or more, or -1; or a Python integer.
    """
    # Two's complement, as random_bits.mix_int wraps negative numbers.
    numbers = tf.cast(tf.convert_to_tensor(numbers, tf.int64), tf.uint64)
    return mix(state + mix(numbers + number(random_bits.GOLDEN)))


def counted(state: Any, index: Any) -> Any:
    """The twin of `random_bits.counted`: both uint64; they broadcast."""
    return mix(state + (index + number(1)) * number(random_bits.GOLDEN))


def stream(seed: int, purpose: str, epoch: Any, count: Any, window: Any = 0) -> Any:
    """The twin of `random_bits.stream`; epoch, count and window may be int64 tensors. (count,) uint64"""
    state = keys(keys(number(random_bits.key(seed, purpose)), epoch), window)
    return counted(state, tf.cast(tf.range(tf.cast(count, tf.int64)), tf.uint64))


def sortable(values: Any) -> Any:
    """uint64 values as int64 ones that sort in the same order: TensorFlow sorts no unsigned integers."""
    return tf.bitcast(tf.bitwise.bitwise_xor(values, number(_HIGHEST)), tf.int64)
