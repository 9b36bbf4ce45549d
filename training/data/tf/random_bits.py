"""`training.data.sampling.random_bits` in TensorFlow operations on unsigned 64-bit integers: the same numbers.

For the host's CPU: TPUs have no such integers.
"""

from typing import Any

import numpy as np
import tensorflow as tf

from training.data.sampling import random_bits

_HIGHEST = 2**63


def number(value: int) -> Any:
    """Returns a uint64 scalar; negative numbers and those beyond 64 bits wrap."""
    return tf.constant(np.uint64(value & (2**64 - 1)), tf.uint64)


def mix(z: Any) -> Any:
    """Applies `random_bits.mix` to a uint64 tensor of any shape."""
    xor, right = tf.bitwise.bitwise_xor, tf.bitwise.right_shift
    z = xor(z, right(z, number(30))) * number(random_bits.FIRST)
    z = xor(z, right(z, number(27))) * number(random_bits.SECOND)
    return xor(z, right(z, number(31)))


def keys(state: Any, numbers: Any) -> Any:
    """Returns `random_bits.keys`: uint64 keys that depend on one more number. state: uint64; broadcasts. numbers: an
    int64 tensor of any shape, each 0 or more, or -1; or a Python integer."""
    # Two's complement, as random_bits.mix_int wraps negative numbers.
    numbers = tf.cast(tf.convert_to_tensor(numbers, tf.int64), tf.uint64)
    return mix(state + mix(numbers + number(random_bits.GOLDEN)))


def counted(state: Any, index: Any) -> Any:
    """Returns `random_bits.counted` of uint64 tensors, which broadcast."""
    return mix(state + (index + number(1)) * number(random_bits.GOLDEN))


def stream(seed: int, purpose: str, epoch: Any, count: Any, window: Any = 0) -> Any:
    """Returns `random_bits.stream`, (count,) uint64; epoch, count and window may be int64 tensors."""
    state = keys(keys(number(random_bits.key(seed, purpose)), epoch), window)
    return counted(state, tf.cast(tf.range(tf.cast(count, tf.int64)), tf.uint64))


def sortable(values: Any) -> Any:
    """Returns int64 values that sort in the order of the uint64 `values`, which TensorFlow can't sort."""
    return tf.bitcast(tf.bitwise.bitwise_xor(values, number(_HIGHEST)), tf.int64)
