"""`training.data.sampling.random_bits` in TensorFlow ops on unsigned 64-bit integers: the same numbers. For the host's
CPU; TPUs have no such integers."""

from __future__ import annotations

from typing import Any

import numpy as np
import tensorflow as tf

from training.data.sampling import random_bits as mixing

_HIGHEST = 2**63


def number(value: int) -> Any:
    """A uint64 scalar; negative numbers and those beyond 64 bits wrap."""
    return tf.constant(np.uint64(value & (2**64 - 1)), tf.uint64)


def mix(z: Any) -> Any:
    """As `mixing.mix`, for a uint64 tensor of any shape."""
    xor, right = tf.bitwise.bitwise_xor, tf.bitwise.right_shift
    z = xor(z, right(z, number(30))) * number(mixing.FIRST)
    z = xor(z, right(z, number(27))) * number(mixing.SECOND)
    return xor(z, right(z, number(31)))


def keys(state: Any, numbers: Any) -> Any:
    """`mixing.key` with one more number: an int64 tensor of any shape (of 0 and more, or -1), or a Python integer.
    state: uint64, broadcast"""
    numbers = tf.cast(
        tf.convert_to_tensor(numbers, tf.int64), tf.uint64
    )  # two's complement, as mixing.mix_int takes negative ones
    return mix(state + mix(numbers + number(mixing.GOLDEN)))


def counted(state: Any, index: Any) -> Any:
    """As `mixing.counted`: both uint64, broadcast."""
    return mix(state + (index + number(1)) * number(mixing.GOLDEN))


def stream(seed: int, purpose: str, epoch: Any, count: Any, place: Any = 0) -> Any:
    """As `mixing.stream`; epoch, count and place may be int64 tensors. (count,) uint64"""
    state = keys(keys(number(mixing.key(seed, purpose)), epoch), place)
    return counted(state, tf.cast(tf.range(tf.cast(count, tf.int64)), tf.uint64))


def in_order(values: Any) -> Any:
    """uint64 values as int64 ones that sort in the same order: TensorFlow sorts no unsigned integers."""
    return tf.bitcast(tf.bitwise.bitwise_xor(values, number(_HIGHEST)), tf.int64)
