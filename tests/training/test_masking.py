"""Claims about masked language modelling: what is hidden follows from (seed, epoch, record, position) alone."""

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis.strategies import integers

from tests.training.mlm_rows import unmask
from training.data.sampling import random_bits
from training.data.sampling.masking import Masker, Masking, SpecialTokens, special_tokens
from training.errors import BadInput

TOKENS = SpecialTokens(mask=4, pad=3, special=frozenset(range(5)), vocabulary=1000)


def rows(count: int, length: int, seed: int = 0) -> Any:
    rows = np.random.default_rng(seed).integers(0, 1000, (count, length)).astype(np.int32)
    rows[:, 0], rows[:, -1] = 0, 1
    return rows


def test_splitmix64_gives_its_published_numbers() -> None:
    # Seed 1234567: https://rosettacode.org/wiki/Pseudo-random_numbers/Splitmix64
    expected = [
        6457827717110365317, 3203168211198807973, 9817491932198370423, 4593380528125082431, 16408922859458223821,
    ]  # fmt: skip
    assert random_bits.counted(np.uint64(1234567), np.arange(5, dtype=np.uint64)).tolist() == expected
    assert random_bits.mix_int(1234567 + random_bits.GOLDEN) == expected[0]


@given(integers(1, 8), integers(2, 80), integers(1, 100), integers(0, 2**63), integers(-1, 50), integers(0, 9))
def test_labels_restore_the_row(count: int, length: int, percent: int, seed: int, epoch: int, data: int) -> None:
    ids = rows(count, length, data)
    masked = Masker(Masking(percent), TOKENS, seed)(ids, epoch, np.arange(count))
    assert np.array_equal(unmask(masked), ids)
    used = masked.weights > 0
    special = np.isin(ids, list(TOKENS.special))
    assert not special[np.nonzero(used)[0], masked.positions[used]].any(), "special tokens are never predicted"
    candidates = (~special).sum(axis=1)
    wanted = np.minimum(np.clip((candidates * percent + 50) // 100, 1, Masking(percent).places(length)), candidates)
    assert used.sum(axis=1).tolist() == wanted.tolist()
    assert (masked.labels[~used] == 0).all()
    assert (masked.positions[~used] == 0).all()


@given(integers(1, 20), integers(0, 2**63))
def test_a_row_is_masked_alike_in_any_company(place: int, seed: int) -> None:
    ids, masker = rows(21, 32), Masker(Masking(), TOKENS, seed)
    together = masker(ids, np.arange(21) % 3, np.arange(100, 121))
    alone = masker(ids[place : place + 1], place % 3, np.array([100 + place]))
    for one, other in zip(vars(together).values(), vars(alone).values(), strict=True):
        assert np.array_equal(one[place], other[0])


def test_80_percent_mask_10_percent_random_10_percent_kept() -> None:
    masked = Masker(Masking(), TOKENS, 1)(rows(4000, 128), 0, np.arange(4000))
    used = masked.weights > 0
    shown, count = masked.input_ids[np.nonzero(used)[0], masked.positions[used]], used.sum()
    assert abs((shown == TOKENS.mask).mean() - 0.8) < 4 * (0.16 / count) ** 0.5
    assert abs((shown == masked.labels[used]).mean() - 0.1) < 4 * (0.09 / count) ** 0.5 + 0.001
    random = shown[(shown != TOKENS.mask) & (shown != masked.labels[used])]
    assert len(np.unique(random)) == 995, "random ids are all ordinary ids"
    assert not np.isin(random, list(TOKENS.special)).any()


def test_each_position_is_as_likely_as_any_other() -> None:
    masked = Masker(Masking(), TOKENS, 3)(np.full((20_000, 40), 500, np.int32), 0, np.arange(20_000))
    counts = np.bincount(masked.positions[masked.weights > 0], minlength=40)
    expected = 20_000 * 6 / 40
    assert ((counts - expected) ** 2 / expected).sum() < 80  # chi-squared with 39 degrees: p < 0.0001 above


def test_no_rows_are_no_rows() -> None:
    masked = Masker(Masking(), TOKENS, 3)(np.zeros((0, 16), np.int32), 0, np.zeros(0, np.int64))
    assert masked.positions.shape == (0, 3)


def test_special_tokens_come_from_tokenizer_json() -> None:
    names = ["[CLS]", "[SEP]", "<unk>", "<pad>", "[MASK]"]
    added = [{"id": number, "content": name, "special": True} for number, name in enumerate(names)]
    content: dict[str, Any] = {"added_tokens": added, "model": {"type": "Unigram", "vocab": [["x", 0.0]] * 60}}
    assert special_tokens(content, "t") == SpecialTokens(4, 3, frozenset(range(5)), 60)
    content["model"] = {"type": "WordPiece", "vocab": {"a": 70}}
    assert special_tokens(content, "t").vocabulary == 71
    content["added_tokens"] = added[:4]
    with pytest.raises(BadInput, match=r"gs://b/t: the tokenizer has no mask token \(one of \[MASK\], <mask>\)"):
        special_tokens(content, "gs://b/t")
