"""Masked language modelling: which tokens are hidden, as a pure function of (seed, epoch, record, position).

For each record, with all random numbers from `training.data.sampling.random_bits`:

  row key    keys(key(seed, "masking", epoch), record)
  rank       candidates (positions whose id is not special) are ordered by output `position` of the generator started at
  the row key, its lowest
             bits replaced by the position itself; the first n are predicted, n = candidates * percent / 100 rounded to
             the nearest, at least 1, at most `predictions`
  kind       output (length + position) of the same generator: its upper 32 bits times 10, divided by 2**32: 0 to 7 the
  id becomes the mask,
             8 it becomes a random ordinary id, 9 it stays (80/10/10; Devlin et al. 2019, section 3.1)
  random id  output (2 * length + position): its upper 32 bits times the number of ordinary ids, divided by 2**32,
  counts them in ascending order

An exact count, not a coin for each token: every row weighs the same, and `predictions` is a small static shape. A row's
positions are in ascending order; unused predictions stand at position 0 with label 0 and weight 0. Special tokens are
never chosen and never put in.

The same in TensorFlow: all of it is uint64 arithmetic (tf.bitwise.bitwise_xor, right_shift, *, +) and one tf.sort along
the row; see `training.data.tf.masking`, which is tested to give the same integers.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from training.data.sampling import random_bits as mixing
from training.errors import BadInput

Ids = npt.NDArray[np.int32]


@dataclass(frozen=True)
class SpecialTokens:
    """What masking must know of a tokenizer. `special` are ids that are never predicted; `vocabulary` counts all
    ids."""

    mask: int
    pad: int
    special: frozenset[int]
    vocabulary: int

    def ordinary(self) -> npt.NDArray[np.int64]:
        """All other ids, ascending."""
        return np.setdiff1d(np.arange(self.vocabulary), sorted(self.special))


def special_tokens(tokenizer: Mapping[str, Any], where: str) -> SpecialTokens:
    """From the content of a tokenizer.json. Raises BadInput when there is no mask or padding token."""
    added = {each["content"]: each["id"] for each in tokenizer.get("added_tokens", []) if each.get("special")}
    vocabulary = tokenizer["model"]["vocab"]
    ids = range(len(vocabulary)) if isinstance(vocabulary, list) else vocabulary.values()
    count = max([*ids, *(each["id"] for each in tokenizer.get("added_tokens", []))]) + 1

    def find(kind: str, names: tuple[str, ...]) -> int:
        for name in names:
            if name in added:
                return int(added[name])
        raise BadInput(
            f"{where}: the tokenizer has no {kind} token (one of {', '.join(names)}): make one with `tpu-train tokenizer`"
        )

    return SpecialTokens(
        find("mask", ("[MASK]", "<mask>")), find("padding", ("<pad>", "[PAD]")), frozenset(added.values()), count
    )


@dataclass(frozen=True)
class Masking:
    """`percent` of a row's tokens are predicted; `predictions` is the static number of places for them (default: what a
    full row needs)."""

    percent: int = 15
    predictions: int | None = None

    def __post_init__(self) -> None:
        if not 1 <= self.percent <= 100:
            raise BadInput(f"masking.percent must be 1 to 100, not {self.percent}")
        if self.predictions is not None and self.predictions < 1:
            raise BadInput(f"masking.predictions must be at least 1, not {self.predictions}")

    def places(self, length: int) -> int:
        """The static number of predictions for rows of `length` tokens."""
        return min(length, self.predictions or max(1, -(-length * self.percent // 100)))


@dataclass(frozen=True)
class Masked:
    """input_ids (n, length); positions, labels (n, places) int32; weights (n, places) float32"""

    input_ids: Ids
    positions: Ids
    labels: Ids
    weights: npt.NDArray[np.float32]


class Masker:
    """`Masking` for one tokenizer and seed. Calling it is a pure function; it is an object because its tables are made
    once."""

    def __init__(self, masking: Masking, tokens: SpecialTokens, seed: int) -> None:
        self.masking, self.tokens, self.seed = masking, tokens, seed
        self._ordinary = tokens.ordinary().astype(np.int32)
        self._special = np.isin(np.arange(tokens.vocabulary), sorted(tokens.special))
        if not len(self._ordinary):
            raise BadInput("the tokenizer has special tokens only")

    def __call__(self, input_ids: Ids, epoch: npt.ArrayLike, records: npt.NDArray[np.int64]) -> Masked:
        """Masks rows. input_ids: (n, length) int32, not changed; epoch: one for all, or (n,); records: (n,)"""
        count, length = input_ids.shape
        places = self.masking.places(length)
        row = self._row_keys(np.asarray(epoch), records)  # (n,)

        bits = np.uint64(max(1, (length - 1).bit_length()))
        position = np.arange(length, dtype=np.uint64)
        rank = mixing.counted(row[:, None], position)  # (n, length)
        rank >>= bits
        rank <<= bits
        rank |= position
        special = self._special[input_ids]  # (n, length)
        rank[special] = np.uint64(2**64 - 1)
        if places < length:
            rank.partition(places - 1, axis=1)
        first = np.sort(rank[:, :places], axis=1)  # (n, places) in the order of the draw
        candidates = length - np.count_nonzero(special, axis=1)
        wanted = np.clip((candidates * self.masking.percent + 50) // 100, 1, places)
        used = np.arange(places) < np.minimum(wanted, candidates)[:, None]

        chosen = np.where(used, (first & ((np.uint64(1) << bits) - np.uint64(1))).astype(np.int64), length)
        chosen.sort(axis=1)  # ascending, unused ones last
        used = chosen < length
        positions = np.where(used, chosen, 0)
        labels = np.where(used, np.take_along_axis(input_ids, positions, axis=1), 0).astype(np.int32)

        offset = positions.astype(np.uint64)
        kind = self._draw(row, offset + np.uint64(length), 10)
        random = self._ordinary[self._draw(row, offset + np.uint64(2 * length), len(self._ordinary))]
        replaced = np.where(kind < 8, np.int32(self.tokens.mask), np.where(kind == 8, random, labels))
        masked = input_ids.copy()
        flat = (positions + np.arange(count)[:, None] * length)[used]
        masked.reshape(-1)[flat] = replaced[used]
        return Masked(masked, positions.astype(np.int32), labels, used.astype(np.float32))

    def _row_keys(self, epochs: npt.NDArray[np.int64], records: npt.NDArray[np.int64]) -> mixing.UInts:
        if epochs.ndim == 0:
            return mixing.keys(mixing.key(self.seed, "masking", int(epochs)), records)
        row = np.empty(len(records), np.uint64)
        for epoch in np.unique(epochs):
            chosen = epochs == epoch
            row[chosen] = mixing.keys(mixing.key(self.seed, "masking", int(epoch)), records[chosen])
        return row

    def _draw(self, row: mixing.UInts, index: mixing.UInts, below: int) -> npt.NDArray[np.int64]:
        """Numbers in [0, below): (n, places)"""
        return ((mixing.counted(row[:, None], index) >> np.uint64(32)) * np.uint64(below) >> np.uint64(32)).astype(
            np.int64
        )
