"""Claims about training a Unigram vocabulary: probabilities are right, every character is a piece, and nothing depends
on chance or order."""

from __future__ import annotations

import math
import random
from collections.abc import Iterator
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from training.data.prepare import unigram
from training.data.prepare.tokenizer_training import count_words

TEXT = [
    "▁the",
    "▁cat",
    "▁sat",
    "▁on",
    "▁the",
    "▁mat",
    "▁and",
    "▁the",
    "▁cats",
    "▁sat",
    "▁there",
    "▁then",
    "▁other",
    "▁mothers",
    "▁gather",
]
WORDS = {word: 3 + len(word) for word in TEXT}


def segmentations(word: str) -> Iterator[list[str]]:
    for cuts in range(1 << (len(word) - 1)):
        borders = [0, *(place for place in range(1, len(word)) if cuts >> (place - 1) & 1), len(word)]
        yield [word[start:stop] for start, stop in pairwise(borders)]


def test_expected_counts_are_those_of_summing_over_all_segmentations() -> None:
    words = {"abab": 2, "ba": 3, "cab": 1}
    pieces = ["a", "b", "c", "ab", "ba", "aba"]
    scores = np.log([0.2, 0.2, 0.1, 0.25, 0.15, 0.1])
    probability = dict(zip(pieces, np.exp(scores), strict=True))
    expected = dict.fromkeys(pieces, 0.0)
    for word, count in words.items():
        ways = [(way, math.prod(probability.get(piece, 0) for piece in way)) for way in segmentations(word)]
        total = sum(chance for _, chance in ways)
        for way, chance in ways:
            for piece in way:
                if chance:
                    expected[piece] += count * chance / total
    counts = unigram._Text(words).expected(pieces, scores)
    assert counts == pytest.approx([expected[piece] for piece in pieces])


def test_the_best_other_segmentation_of_a_piece_is_found() -> None:
    pieces, scores = ["a", "b", "ab", "aba"], np.array([-1.0, -2.0, -2.5, -9.0])
    assert unigram._without_itself(pieces, scores).tolist() == [-np.inf, -np.inf, -3.0, -3.5]


@settings(deadline=None, max_examples=25)
@given(
    st.dictionaries(st.text("abcdé▁𝔘", min_size=1, max_size=90), st.integers(1, 50), min_size=1, max_size=12),
    st.integers(7, 40),
)
def test_every_character_is_a_piece_and_the_size_is_kept(words: dict[str, int], size: int) -> None:
    pieces = unigram.train(words, size)
    assert len(pieces) <= size
    assert len({piece for piece, _ in pieces}) == len(pieces)
    assert {character for word in words for character in word} <= {piece for piece, _ in pieces}
    assert all(score <= 0 for _, score in pieces)
    assert [score for _, score in pieces] == sorted((score for _, score in pieces), reverse=True)


def test_the_order_of_words_does_not_matter() -> None:
    shuffled = list(WORDS.items())
    random.Random(0).shuffle(shuffled)
    assert unigram.train(dict(shuffled), 30) == unigram.train(WORDS, 30)


def test_frequent_words_become_pieces() -> None:
    pieces = dict(unigram.train({"▁the": 500, "▁then": 3, "▁cat": 200, "▁a": 100}, 15))
    assert max(pieces, key=lambda piece: pieces[piece]) == "▁the"
    assert "▁cat" in pieces


def test_a_size_below_the_number_of_characters_is_refused() -> None:
    with pytest.raises(ValueError, match="13 different characters"):
        unigram.train(WORDS, 12)


def test_digamma() -> None:
    # Abramowitz and Stegun, table 6.1: psi(1) = -Euler's constant, psi(1.5), psi(2); psi(10) from the recurrence
    values = unigram._digamma(np.array([1, 1.5, 2, 10.0]))
    assert values == pytest.approx([-0.5772156649, 0.0364899740, 0.4227843351, 2.2517525890], abs=1e-8)


def test_words_begin_with_their_space_and_special_tokens_are_not_words() -> None:
    assert count_words(["the cat", "the  ``cat''", "a[MASK]b", ""]) == {
        "▁the": 2,
        "▁cat": 1,
        "▁": 1,
        '▁"cat"': 1,
        "▁a": 1,
        "▁b": 1,
    }


def test_equally_frequent_words_are_a_sample_of_all_and_the_same_each_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """Text without spaces: each sentence is a word that occurs once."""
    monkeypatch.setattr(unigram, "WORDS", 300)
    letters = "abcdefghijklmnopqrstuvwxyz"
    once = [f"{letters[number % 26]}{letters[number // 26 % 26]}{number}" for number in range(3000)]
    often = ["zzz", "yyy"]
    words = dict.fromkeys(once, 1) | dict.fromkeys(often, 5)
    sample = [word for word, _ in unigram._most_frequent(words)]
    assert set(often) < set(sample)
    assert len(sample) == len(set(sample)) == 300
    first_letters = [sum(word[0] == letter for word in sample) for letter in letters]
    assert min(first_letters) >= 3, "the first of the alphabet would be words with a alone"
    reversed_words = dict(reversed(words.items()))
    assert {word for word, _ in unigram._most_frequent(reversed_words)} == set(sample)
    assert unigram.train(words, 60) == unigram.train(reversed_words, 60)


def test_fewer_words_than_the_limit_give_the_vocabulary_that_they_always_gave() -> None:
    words = {"▁the": 9, "▁cat": 4, "▁mat": 4, "▁rat": 1, "▁tea": 1}
    assert sorted(unigram._most_frequent(words)) == sorted(words.items())
