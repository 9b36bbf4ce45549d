"""Training a Unigram vocabulary, the same one every time (Kudo 2018, https://arxiv.org/abs/1804.10959; as in
sentencepiece's trainer).

The `tokenizers` library's trainer walks through a hash table whose order is new in every process, so its scores differ
in the last digits and its choice of pieces with them. Here words are sorted, and everything is numpy over flat arrays
in a fixed order.

  words     sorted by count; all their characters stand one after the other, with one empty place after each word
  (places,) piece     a substring of up to LONGEST characters, named by where it first occurs
  edges     edges[place, n - 1] is the piece of n characters that starts at a place, or the last number, which is no
  piece  (places, LONGEST)

  1. Seeds: all frequent substrings, by count times length.
  2. Expectation: forward and backward sums over all segmentations of all words at once, character by character.
     Maximisation: log probabilities from the expected counts (with digamma, as a Bayesian with a sparse prior would).
  3. Drop the quarter of pieces whose loss costs the likelihood least; again from 2 until few enough are left.

Memory: the table of words grows with the number of different words; training looks at the WORDS most frequent ones.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import numpy.typing as npt

LONGEST = 16
WORDS = 1 << 18
WORD_CHARACTERS = 64
SEEDS_PER_PIECE = 30
SHRINK = 0.75
ROUNDS = 2

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]


def train(words: Mapping[str, int], size: int) -> list[tuple[str, float]]:
    """At most `size` (piece, log probability), best first; every character of the words is one. Raises ValueError when
    `size` is too small for them."""
    characters = sorted({character for word in words for character in word})
    if len(characters) > size:
        raise ValueError(f"the text has {len(characters)} different characters")
    text = _Text(words)
    pieces, scores = text.seeds(characters, max(size * SEEDS_PER_PIECE, 10_000))
    required = np.arange(len(pieces)) < len(characters)
    wanted = int(size * 1.1)
    while True:
        for _ in range(ROUNDS):
            counts = text.expected(pieces, scores)
            kept = required | (counts >= 0.5)
            pieces, counts, required = (
                [piece for piece, keep in zip(pieces, kept, strict=True) if keep],
                counts[kept],
                required[kept],
            )
            counts = np.maximum(counts, 0.1)
            scores = _digamma(counts) - _digamma(counts.sum(keepdims=True))
        if len(pieces) <= wanted:
            break
        loss = counts * (scores - _without_itself(pieces, scores))
        loss[required] = np.inf
        order = np.argsort(-loss, kind="stable")[: max(wanted, int(SHRINK * len(pieces)))]
        order.sort()
        pieces, scores, required = [pieces[number] for number in order], scores[order], required[order]
    found = sorted(
        zip(pieces, np.round(scores, 6).tolist(), required.tolist(), strict=True), key=lambda each: (-each[1], each[0])
    )
    spare = size - len(characters)
    chosen = [each for each in found if each[2]] + [each for each in found if not each[2]][:spare]
    return [(piece, score) for piece, score, _ in sorted(chosen, key=lambda each: (-each[1], each[0]))]


class _Text:
    """Words side by side."""

    def __init__(self, words: Mapping[str, int]) -> None:
        cut: dict[str, int] = {}
        for word, count in sorted(words.items(), key=lambda each: (-each[1], each[0]))[:WORDS]:
            for start in range(0, len(word), WORD_CHARACTERS):
                part = word[start : start + WORD_CHARACTERS]
                cut[part] = cut.get(part, 0) + count
        # Longest first: the words that have a character number j are then the first so many.
        ordered = sorted(cut.items(), key=lambda each: (-len(each[0]), -each[1], each[0]))
        self.strings = [word for word, _ in ordered]
        self.counts = np.array([count for _, count in ordered], np.float64)  # (words,)
        self.lengths = np.array([len(word) for word in self.strings])  # (words,)
        self.starts = np.concatenate([[0], np.cumsum(self.lengths + 1)[:-1]])  # (words,)
        self.flat = "\0".join(self.strings) + "\0"
        self.codes = np.frombuffer(self.flat.encode("utf-32-le", "surrogatepass"), np.uint32).astype(
            np.uint64
        )  # (places,)
        self.weight = np.repeat(self.counts, self.lengths + 1)  # (places,)
        self.left = np.repeat(self.starts + self.lengths, self.lengths + 1) - np.arange(
            len(self.codes)
        )  # characters up to the word's end

    def hashes(self) -> list[npt.NDArray[np.uint64]]:
        """For n = 1 .. LONGEST the hash of the n characters that start at each place; places beyond the end of the text
        count as zeros."""
        state = np.zeros(len(self.codes), np.uint64)
        found = []
        for n in range(LONGEST):
            ahead = np.zeros(len(self.codes), np.uint64)
            ahead[: max(len(self.codes) - n, 0)] = self.codes[n:]
            state = (state ^ (ahead + np.uint64(0x9E3779B97F4A7C15))) * np.uint64(0xBF58476D1CE4E5B9)
            state ^= state >> np.uint64(29)
            found.append(state)
        return found

    def seeds(self, characters: list[str], count: int) -> tuple[list[str], Floats]:
        """All characters, then the substrings with the highest count times length; and their log probabilities."""
        places, lengths, weights = [], [], []
        for n, keys in enumerate(self.hashes(), 1):
            inside = np.flatnonzero(self.left >= n)
            if n == 1 or not len(inside):
                continue
            _, first, which = np.unique(keys[inside], return_index=True, return_inverse=True)
            total = np.bincount(which, weights=self.weight[inside])
            frequent = total >= 2
            places.append(inside[first[frequent]])
            weights.append(total[frequent] * n)
            lengths.append(np.full(int(frequent.sum()), n))
        single = dict.fromkeys(characters, 0.0)
        for word, total in zip(self.strings, self.counts.tolist(), strict=True):
            for character in word:
                single[character] += total
        pieces, weight = list(single), np.maximum(np.array(list(single.values())), 1)
        if places:
            place, length, value = np.concatenate(places), np.concatenate(lengths), np.concatenate(weights)
            order = np.lexsort((place, length, -value))[:count]
            pieces += [
                self.flat[at : at + n] for at, n in zip(place[order].tolist(), length[order].tolist(), strict=True)
            ]
            weight = np.concatenate([weight, value[order]])
        return pieces, np.log(weight) - np.log(weight.sum())

    def edges(self, pieces: list[str]) -> npt.NDArray[np.int32]:
        """(places, LONGEST)"""
        table = np.full((len(self.codes), LONGEST), len(pieces), np.int32)
        by_length: dict[int, list[int]] = {}
        for number, piece in enumerate(pieces):
            by_length.setdefault(len(piece), []).append(number)
        for n, keys in enumerate(self.hashes(), 1):
            numbers = by_length.get(n)
            if not numbers:
                continue
            known = _Pieces([pieces[number] for number in numbers]).hash(n)
            order = np.argsort(known, kind="stable")
            at = np.minimum(np.searchsorted(known[order], keys), len(order) - 1)
            hit = (known[order][at] == keys) & (self.left >= n)
            table[hit, n - 1] = np.array(numbers)[order[at[hit]]]
        return table

    def expected(self, pieces: list[str], scores: Floats) -> Floats:
        """How often each piece is used, over all segmentations of all words by their probability. (pieces,)"""
        edges = self.edges(pieces)
        value = np.append(scores, -np.inf)
        forward, backward = _sums(self, edges, value)
        total = np.repeat(forward[self.starts + self.lengths], self.lengths + 1)  # (places,)
        counts = np.zeros(len(pieces) + 1)
        for n in range(1, LONGEST + 1):
            place = np.flatnonzero(edges[:, n - 1] < len(pieces))
            piece = edges[place, n - 1]
            share = np.exp(forward[place] + value[piece] + backward[place + n] - total[place]) * self.weight[place]
            counts += np.bincount(piece, weights=share, minlength=len(counts))
        return counts[:-1]


class _Pieces(_Text):
    """Pieces as a text of words that each occur once, in their own order."""

    def __init__(self, pieces: list[str]) -> None:
        self.strings = pieces
        self.counts = np.ones(len(pieces))
        self.lengths = np.array([len(piece) for piece in pieces])
        self.starts = np.concatenate([[0], np.cumsum(self.lengths + 1)[:-1]])
        self.flat = "\0".join(pieces) + "\0"
        self.codes = np.frombuffer(self.flat.encode("utf-32-le", "surrogatepass"), np.uint32).astype(np.uint64)
        self.left = np.repeat(self.starts + self.lengths, self.lengths + 1) - np.arange(len(self.codes))

    def hash(self, n: int) -> npt.NDArray[np.uint64]:
        """Hashes of pieces that all have n characters. (pieces,)"""
        found: npt.NDArray[np.uint64] = self.hashes()[n - 1][self.starts]
        return found


def _sums(text: _Text, edges: npt.NDArray[np.int32], value: Floats) -> tuple[Floats, Floats]:
    """Log sums over all segmentations of what stands before and after each place. (places,), (places,)"""
    forward = np.full(len(text.codes), -np.inf)
    backward = np.full(len(text.codes), -np.inf)
    forward[text.starts] = 0
    backward[text.starts + text.lengths] = 0
    ends = text.starts + text.lengths
    for j in range(1, int(text.lengths.max()) + 1):
        active = int(np.searchsorted(-text.lengths, -j, side="right"))  # words are sorted, longest first
        back = np.arange(1, min(j, LONGEST) + 1)
        place = text.starts[:active, None] + j - back  # (active, back)
        forward[text.starts[:active] + j] = _log_sum(forward[place] + value[edges[place, back - 1]])
        place = ends[:active] - j  # (active,)
        backward[place] = _log_sum(backward[place[:, None] + back] + value[edges[place, : len(back)]])
    return forward, backward


def _without_itself(pieces: list[str], scores: Floats) -> Floats:
    """The best log probability of each piece's characters as other pieces. (pieces,)"""
    order = np.argsort([-len(piece) for piece in pieces], kind="stable")
    text = _Pieces([pieces[number] for number in order])
    edges = text.edges(pieces)
    whole = np.arange(len(pieces))
    edges[text.starts[whole], text.lengths - 1] = len(pieces)
    value = np.append(scores, -np.inf)
    best = np.full(len(text.codes), -np.inf)
    best[text.starts] = 0
    for j in range(1, int(text.lengths.max()) + 1):
        active = int(np.searchsorted(-text.lengths, -j, side="right"))
        back = np.arange(1, min(j, LONGEST) + 1)
        place = text.starts[:active, None] + j - back
        best[text.starts[:active] + j] = (best[place] + value[edges[place, back - 1]]).max(axis=1)
    found = np.empty(len(pieces))
    found[order] = best[text.starts + text.lengths]
    return found


def _log_sum(values: Floats) -> Floats:
    """log(sum(exp(values))) along rows that have a finite value: (n, m) -> (n,)"""
    highest = values.max(axis=1, keepdims=True)
    highest[~np.isfinite(highest)] = 0
    with np.errstate(divide="ignore"):
        total: Floats = np.log(np.exp(values - highest).sum(axis=1)) + highest[:, 0]
    return total


def _digamma(x: Floats) -> Floats:
    """Bernardo 1976 (AS 103): recurrence up to 6, then the asymptotic series."""
    x = x.copy()
    result = np.zeros_like(x)
    while (small := x < 6).any():
        result[small] -= 1 / x[small]
        x[small] += 1
    inverse = 1 / (x * x)
    return result + np.log(x) - 0.5 / x - inverse * (1 / 12 - inverse * (1 / 120 - inverse / 252))
