"""Dropout without a generator: what is dropped is a pure function of (seed, step, row of the global batch, place in the
network, element).

So it depends on no number of hosts, devices or pieces of a batch, a resumed run drops the same, and what is computed
again backwards drops the same.

It is arithmetic of 32-bit integers that every device does for its own rows. PyTorch's generator draws, under SPMD, the
numbers of the whole global batch on every device, and they are kept for the backward pass. Random numbers are mixed for
each line and each column of a matrix only, and an element is kept when

    ((((a ^ c) + b) ^ d) + e) ^ f        a, b, e of its line; c, d, f of its column; all of them of this row, head,
    place and step

is at least the rate's share of all numbers. Only additions and exclusive-ors touch an element, each value once: a
multiplication there, or a value that is used twice, costs the TPU compiler seconds for each layer. Rates are exact, and
any two elements are independent; four in the corners of a rectangle are not quite (0.005 at a rate of 0.1), which is
the price. tests/container/test_dropout.py looks at all that.
"""

from __future__ import annotations

import math

import numpy as np
import torch
from torch import Tensor

from training.data.sampling import random_bits


def row_keys(seed: int, step: int, first: int, last: int) -> np.ndarray:
    """Returns what dropout draws from for rows [first, last) of a step's global batch: (last - first,) int32."""
    return _upper(random_bits.keys(random_bits.key(seed, "dropout", step), np.arange(first, last)))


def _upper(numbers: random_bits.UInts) -> np.ndarray:
    """Returns the upper 32 bits of numbers of 64, as int32."""
    return (numbers >> np.uint64(32)).astype(np.uint32).view(np.int32)


class DropoutNoise:
    """The random numbers that all dropouts of a network draw from."""

    rows: Tensor  # (rows,) int32, of `row_keys`: of the rows that the network is about to see

    def __init__(self, size: int) -> None:
        """Makes the table of `size` random numbers: the most lines, or columns, of all matrices of a row together."""
        self.table = torch.from_numpy(_upper(random_bits.stream(0, "dropout", 0, size)))

    def kept(self, shape: torch.Size, rate: float, place: int) -> Tensor:
        """Returns which elements stay at dropout number `place` of the network, bool of this shape: (rows, ..., lines,
        columns), or (rows, columns). The caller sets `rows` to `row_keys` first."""
        rows, *matrices, columns = shape
        lines = matrices.pop() if matrices else 1

        def mixed(number: int, count: int) -> Tensor:
            """Returns (rows, matrices * count): a number for each line or each column."""
            at = self.table[: math.prod(matrices) * count]
            return ((self.rows.unsqueeze(1) * _odd(place, number)) ^ at) * _odd(place, (number - 1) % 6)

        a, b, e = (mixed(number, lines).view(rows, *matrices, lines, 1) for number in (0, 1, 2))
        c, d, f = (mixed(number, columns).view(rows, *matrices, 1, columns) for number in (3, 4, 5))
        numbers = ((((a ^ c) + b) ^ d) + e) ^ f
        # A number of Python would be int64, and so the comparison.
        least = torch.tensor(int(rate * 2**32) - 2**31, dtype=torch.int32, device=numbers.device)
        return (numbers >= least).view(shape)


def _odd(place: int, number: int) -> int:
    """Returns an odd int32 number, random but a function of (place, number) alone."""
    return int(np.uint32(random_bits.key(0, "dropout", place, number) >> 32 | 1).view(np.int32))


class Dropout(torch.nn.Module):  # type: ignore[misc]  # torch is not here when types are checked
    """Replaces torch.nn.Dropout, for arrays whose first axis is the rows of the batch."""

    def __init__(self, rate: float, place: int, noise: DropoutNoise) -> None:
        """Drops a share of `rate` in training. `place`: the number of this dropout in its network."""
        super().__init__()
        self.rate, self.place, self.noise = rate, place, noise

    def forward(self, values: Tensor) -> Tensor:
        """Drops values in training and divides the rest by 1 - rate; else returns them as they are."""
        if not self.training or not self.rate:
            return values
        kept = self.noise.kept(values.shape, self.rate, self.place)
        return torch.where(
            kept, values * (1 / (1 - self.rate)), torch.zeros((), dtype=values.dtype, device=values.device)
        )
