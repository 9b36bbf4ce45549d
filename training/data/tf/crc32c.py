"""Computes CRC-32C with TensorFlow operations; TensorFlow has none for it.

The CRC of a message is linear in its bits: it is the exclusive-or, over all bytes, of a number that depends on the byte
and its distance from the end, and of a number that depends on the length only.
(https://www.rfc-editor.org/rfc/rfc3720#appendix-B.4 has the polynomial.)
"""

from typing import Any

import google_crc32c
import numpy as np
import numpy.typing as npt
import tensorflow as tf

from training.data.formats.tfrecord import MASK_DELTA

_POLYNOMIAL = 0x82F63B78  # Castagnoli's, reflected
_BYTE_VALUES = 256


class Crc32c:
    """Masked CRCs, as TFRecord stores them, of messages of up to `longest` bytes."""

    def __init__(self, longest: int) -> None:
        self._longest = longest
        # (longest * 256 + 1,): the last entry is for positions outside of a message.
        table = np.append(_byte_table(longest).reshape(-1), np.uint32(0))
        self._table = tf.constant(table)
        self._no_byte = len(table) - 1
        of_zeros = [google_crc32c.value(bytes(length)) for length in range(longest + 1)]
        self._of_zeros = tf.constant(np.array(of_zeros, np.uint32))  # (longest + 1,)

    def of_equal_lengths(self, reversed_bytes: Any) -> Any:
        """Returns the CRCs, (n,) uint32, of messages (n, longest) uint8, given last byte first."""
        entries = tf.cast(reversed_bytes, tf.int32) + _BYTE_VALUES * tf.range(self._longest)  # (n, longest)
        return _mask(_xor(self._of_zeros[-1], self._fold(entries)))

    def match(self, flat: Any, start: Any, lengths: Any) -> Any:
        """Returns, (n,) bool, whether each message flat[start : start + length] is followed by its CRC. flat: (bytes,)
        uint8; start, lengths: (n,) int64."""
        distance = tf.range(self._longest, dtype=tf.int64)  # (longest,) from the end
        position = (start + lengths)[:, None] - 1 - distance  # (n, longest)
        inside = distance < lengths[:, None]  # (n, longest)
        values = tf.cast(tf.gather(flat, tf.where(inside, position, 0)), tf.int32)
        entries = values + tf.cast(_BYTE_VALUES * distance, tf.int32)
        folded = self._fold(tf.where(inside, entries, self._no_byte))
        crcs = _mask(_xor(tf.gather(self._of_zeros, lengths), folded))  # (n,)
        return tf.cast(crcs, tf.uint64) == read_numbers(flat, start + lengths, 4)

    def _fold(self, entries: Any) -> Any:
        """Returns the exclusive-or of the table's entries along each row. (n, longest) -> (n,)"""
        width = 1 << max(0, (self._longest - 1).bit_length())
        padding = [[0, 0], [0, width - self._longest]]
        values = tf.gather(self._table, tf.pad(entries, padding, constant_values=self._no_byte))  # (n, width)
        while width > 1:
            width //= 2
            values = _xor(values[:, :width], values[:, width:])
        return values[:, 0]


def read_numbers(flat: Any, start: Any, size: int) -> Any:
    """Returns the little-endian numbers, (n,) uint64, of `size` bytes at `start` (n,) of flat (bytes,) uint8."""
    values = tf.cast(tf.gather(flat, start[:, None] + tf.range(size, dtype=tf.int64)), tf.uint64)  # (n, size)
    shifts = tf.cast(8 * tf.range(size), tf.uint64)
    return tf.bitcast(tf.reduce_sum(tf.bitcast(tf.bitwise.left_shift(values, shifts), tf.int64), axis=1), tf.uint64)


def _byte_table(longest: int) -> npt.NDArray[np.uint32]:
    """Returns (longest, 256): entry [d, b] is the CRC register, started at 0, after byte b and d zero bytes."""
    one_byte = np.arange(_BYTE_VALUES, dtype=np.uint32)
    for _ in range(8):
        one_byte = (one_byte >> np.uint32(1)) ^ np.where(one_byte & 1, np.uint32(_POLYNOMIAL), np.uint32(0))
    table = np.empty((longest, _BYTE_VALUES), np.uint32)
    register = one_byte
    for distance in range(longest):
        table[distance] = register
        register = one_byte[register & np.uint32(255)] ^ (register >> np.uint32(8))
    return table


def _mask(crc: Any) -> Any:
    """Applies `tfrecord.mask` to a uint32 tensor."""
    right, left = tf.bitwise.right_shift, tf.bitwise.left_shift
    rotated = tf.bitwise.bitwise_or(right(crc, tf.constant(15, tf.uint32)), left(crc, tf.constant(17, tf.uint32)))
    return rotated + tf.constant(MASK_DELTA, tf.uint32)


def _xor(one: Any, other: Any) -> Any:
    return tf.bitwise.bitwise_xor(one, other)
