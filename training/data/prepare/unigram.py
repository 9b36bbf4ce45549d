"""Trains a Unigram vocabulary, with the same result every time (Kudo 2018, https://arxiv.org/abs/1804.10959; as
sentencepiece's trainer does it).

The `tokenizers` library's trainer iterates over a hash table whose order is new in every process, so its scores differ
in the last digits, and its choice of pieces with them. Here words are sorted, and everything is numpy over flat arrays
in a fixed order.

  words     sorted by length, then by count; their characters are concatenated, with one empty position after each
            word (positions,)
  piece     a substring of up to LONGEST characters
  edges     edges[position, n - 1] is the number of the piece of n characters that starts at a position, or the number
            of pieces where there is none (positions, LONGEST)

  1. Seeds: all frequent substrings, by count times length.
  2. Expectation: forward and backward sums over all segmentations of all words at once, character by character.
     Maximisation: log probabilities from the expected counts (with digamma, as a Bayesian with a sparse prior would).
  3. Drop the quarter of pieces whose loss costs the likelihood least; repeat from 2 until few enough are left.

Memory grows with the number of different words: training uses the WORDS most frequent ones (`_most_frequent`).
"""

from __future__ import annotations

import hashlib
import heapq
from collections.abc import Mapping

import numpy as np
import numpy.typing as npt

LONGEST = 16  # characters of a piece
WORDS = 1 << 18  # the most frequent words are used
WORD_CHARACTERS = 64  # longer words are cut
SEEDS_PER_PIECE = 30
SHRINK = 0.75  # of the pieces are kept when some are dropped
ROUNDS = 2  # of expectation and maximisation before pieces are dropped

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]


def train(words: Mapping[str, int], size: int) -> list[tuple[str, float]]:
    """Trains a vocabulary.

    Args:
        words: word -> how often it occurs.
        size: the largest number of pieces.

    Returns:
        (piece, log probability), best first. Every character of the words is a piece.

    Raises:
        ValueError: the words have more than `size` different characters.
    """
    characters = sorted({character for word in words for character in word})
    if len(characters) > size:
        raise ValueError(f"the text has {len(characters)} different characters")
    text = _Text(words)
    pieces, scores = text.seeds(characters, max(size * SEEDS_PER_PIECE, 10_000))
    required = np.arange(len(pieces)) < len(characters)  # (pieces,) single characters are never dropped
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
    return _best(pieces, np.round(scores, 6).tolist(), required.tolist(), size - len(characters))


def _best(pieces: list[str], scores: list[float], required: list[bool], spare: int) -> list[tuple[str, float]]:
    """The required pieces and the `spare` best of the others, best first."""
    ranked = sorted(zip(pieces, scores, required, strict=True), key=lambda entry: (-entry[1], entry[0]))
    optional = [(piece, score) for piece, score, needed in ranked if not needed][:spare]
    chosen = [(piece, score) for piece, score, needed in ranked if needed] + optional
    return sorted(chosen, key=lambda entry: (-entry[1], entry[0]))


def _most_frequent(words: Mapping[str, int]) -> list[tuple[str, int]]:
    """The WORDS most frequent words. Among equally frequent ones a hash decides: in text without spaces a sentence is
    one word, which occurs once, and the first of the alphabet would be a sample of few characters."""
    if len(words) <= WORDS:
        return list(words.items())

    def rank(entry: tuple[str, int]) -> tuple[int, bytes]:
        word, count = entry
        return -count, hashlib.blake2b(word.encode("utf-8", "surrogatepass"), digest_size=16).digest()

    return heapq.nsmallest(WORDS, words.items(), key=rank)


class _Text:
    """Words side by side in flat arrays."""

    def __init__(self, words: Mapping[str, int]) -> None:
        cut: dict[str, int] = {}
        for word, count in _most_frequent(words):
            for start in range(0, len(word), WORD_CHARACTERS):
                part = word[start : start + WORD_CHARACTERS]
                cut[part] = cut.get(part, 0) + count
        # Longest first: the words that have a character number j are then a prefix.
        ordered = sorted(cut.items(), key=lambda entry: (-len(entry[0]), -entry[1], entry[0]))
        self.strings = [word for word, _ in ordered]
        self.counts = np.array([count for _, count in ordered], np.float64)  # (words,)
        self.lengths = np.array([len(word) for word in self.strings])  # (words,)
        self.starts = np.concatenate([[0], np.cumsum(self.lengths + 1)[:-1]])  # (words,)
        self.flat = "\0".join(self.strings) + "\0"
        # (positions,) code points; counts of each position's word; characters from each position to its word's end
        self.codes = np.frombuffer(self.flat.encode("utf-32-le", "surrogatepass"), np.uint32).astype(np.uint64)
        self.weight = np.repeat(self.counts, self.lengths + 1)
        self.left = np.repeat(self.starts + self.lengths, self.lengths + 1) - np.arange(len(self.codes))

    def hashes(self) -> list[npt.NDArray[np.uint64]]:
        """For n = 1 .. LONGEST, the hash of the n characters from each position on. (positions,) each

        Positions beyond the end of the text count as zeros.
        """
        state = np.zeros(len(self.codes), np.uint64)
        hashes = []
        for n in range(LONGEST):
            ahead = np.zeros(len(self.codes), np.uint64)
            ahead[: max(len(self.codes) - n, 0)] = self.codes[n:]
            state = (state ^ (ahead + np.uint64(0x9E3779B97F4A7C15))) * np.uint64(0xBF58476D1CE4E5B9)
            state ^= state >> np.uint64(29)
            hashes.append(state)
        return hashes

    def seeds(self, characters: list[str], count: int) -> tuple[list[str], Floats]:
        """The first pieces and their log probabilities.

        They are all characters, then the `count` substrings with the highest count times length.
        """
        positions, lengths, weights = [], [], []
        for n, keys in enumerate(self.hashes(), 1):
            inside = np.flatnonzero(self.left >= n)
            if n == 1 or not len(inside):
                continue
            _, first, substring = np.unique(keys[inside], return_index=True, return_inverse=True)
            total = np.bincount(substring, weights=self.weight[inside])
            frequent = total >= 2
            positions.append(inside[first[frequent]])
            weights.append(total[frequent] * n)
            lengths.append(np.full(int(frequent.sum()), n))
        single = dict.fromkeys(characters, 0.0)
        for word, total in zip(self.strings, self.counts.tolist(), strict=True):
            for character in word:
                single[character] += total
        pieces, weight = list(single), np.maximum(np.array(list(single.values())), 1)
        if positions:
            position, length, value = np.concatenate(positions), np.concatenate(lengths), np.concatenate(weights)
            order = np.lexsort((position, length, -value))[:count]
            pieces += [
                self.flat[start : start + n]
                for start, n in zip(position[order].tolist(), length[order].tolist(), strict=True)
            ]
            weight = np.concatenate([weight, value[order]])
        return pieces, np.log(weight) - np.log(weight.sum())

    def edges(self, pieces: list[str]) -> npt.NDArray[np.int32]:
        """The edges of the module's docstring. (positions, LONGEST)"""
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
            slot = np.minimum(np.searchsorted(known[order], keys), len(order) - 1)  # (positions,)
            matches = (known[order][slot] == keys) & (self.left >= n)
            table[matches, n - 1] = np.array(numbers)[order[slot[matches]]]
        return table

    def expected(self, pieces: list[str], scores: Floats) -> Floats:
        """The expected count of each piece over all segmentations of all words. scores: (pieces,). (pieces,)"""
        edges = self.edges(pieces)
        value = np.append(scores, -np.inf)
        forward, backward = _sums(self, edges, value)
        total = np.repeat(forward[self.starts + self.lengths], self.lengths + 1)  # (positions,)
        counts = np.zeros(len(pieces) + 1)
        for n in range(1, LONGEST + 1):
            start = np.flatnonzero(edges[:, n - 1] < len(pieces))  # (edges,) where a piece of n characters starts
            piece = edges[start, n - 1]  # (edges,)
            share = np.exp(forward[start] + value[piece] + backward[start + n] - total[start]) * self.weight[start]
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
        hashes: npt.NDArray[np.uint64] = self.hashes()[n - 1][self.starts]
        return hashes


def _sums(text: _Text, edges: npt.NDArray[np.int32], value: Floats) -> tuple[Floats, Floats]:
    """Log sums over all segmentations of the characters before and after each position. (positions,) each"""
    forward = np.full(len(text.codes), -np.inf)
    backward = np.full(len(text.codes), -np.inf)
    forward[text.starts] = 0
    backward[text.starts + text.lengths] = 0
    ends = text.starts + text.lengths
    for j in range(1, int(text.lengths.max()) + 1):
        active = int(np.searchsorted(-text.lengths, -j, side="right"))  # words are sorted, longest first
        back = np.arange(1, min(j, LONGEST) + 1)
        before = text.starts[:active, None] + j - back  # (active, back)
        forward[text.starts[:active] + j] = _log_sum(forward[before] + value[edges[before, back - 1]])
        position = ends[:active] - j  # (active,)
        backward[position] = _log_sum(backward[position[:, None] + back] + value[edges[position, : len(back)]])
    return forward, backward


def _without_itself(pieces: list[str], scores: Floats) -> Floats:
    """The best log probability of each piece's characters, made of other pieces. (pieces,)"""
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
        before = text.starts[:active, None] + j - back  # (active, back)
        best[text.starts[:active] + j] = (best[before] + value[edges[before, back - 1]]).max(axis=1)
    scores_without = np.empty(len(pieces))
    scores_without[order] = best[text.starts + text.lengths]
    return scores_without


def _log_sum(values: Floats) -> Floats:
    """log(sum(exp(values))) along rows that have a finite value: (n, m) -> (n,)"""
    highest = values.max(axis=1, keepdims=True)
    highest[~np.isfinite(highest)] = 0
    with np.errstate(divide="ignore"):
        total: Floats = np.log(np.exp(values - highest).sum(axis=1)) + highest[:, 0]
    return total


def _digamma(x: Floats) -> Floats:
    """The digamma function, for positive x (Bernardo 1976, AS 103): recurrence up to 6, then the asymptotic series."""
    x = x.copy()
    result = np.zeros_like(x)
    while (small := x < 6).any():
        result[small] -= 1 / x[small]
        x[small] += 1
    inverse = 1 / (x * x)
    return result + np.log(x) - 0.5 / x - inverse * (1 / 12 - inverse * (1 / 120 - inverse / 252))
