"""Claims about what `dataset preview` shows."""

import json

import click
import numpy as np

from training.data.loading import preview
from training.data.loading.batches import LabelledBatch, MlmBatch
from training.data.sampling.masking import SpecialTokens

PIECES = ["[CLS]", "[SEP]", "<unk>", "<pad>", "[MASK]", "▁the", "▁cat", "s", "▁sat", "▁dog"]
TOKENS = SpecialTokens(mask=4, pad=3, special=frozenset(range(5)), vocabulary=10)


def tokenizer(pieces: list[str], kind: str) -> bytes:
    added = [{"id": number, "content": pieces[number], "special": True} for number in range(5)]
    scores, numbers = [[piece, 0.0] for piece in pieces], {piece: number for number, piece in enumerate(pieces)}
    model = {"type": kind, "continuing_subword_prefix": "##", "vocab": scores if kind == "Unigram" else numbers}
    return json.dumps({"added_tokens": added, "model": model}).encode()


def test_hidden_replaced_and_kept_words_are_told_apart() -> None:
    ids, positions, labels = (np.array([row], np.int32) for row in ([0, 5, 4, 7, 9, 5, 1], [2, 4, 5, 0], [6, 8, 5, 0]))
    batch = MlmBatch(ids, positions, labels, np.array([[1, 1, 1, 0]], np.float32), np.array([42]), np.array([False]))
    heading, text = map(click.unstyle, preview.render(batch, TOKENS, preview.pieces(tokenizer(PIECES, "Unigram"))))
    assert heading == "record 42: 7 tokens, 3 to predict (1 hidden, 1 replaced, 1 left)"
    assert text == "[CLS] the [cat]s [sat~dog] [the=] [SEP]"


def test_wordpieces_are_joined() -> None:
    piece = preview.pieces(tokenizer([*PIECES[:5], "play", "##ing"], "WordPiece"))
    assert "".join(space + word for space, word in map(piece, (0, 5, 6, 5, 1))) == " [CLS] playing play [SEP]"


def test_a_labelled_row_is_shown_without_padding() -> None:
    ids = np.array([[0, 5, 6, 1, 3, 3]], np.int32)
    labels, weights, records = np.array([1], np.int32), np.ones(1, np.float32), np.array([7])
    batch = LabelledBatch(ids, (ids != 3).astype(np.int32), labels, weights, records, np.array([False]))
    shown = preview.render_labelled(batch, 5, TOKENS, preview.pieces(tokenizer(PIECES, "Unigram")), ["dog", "cat"])
    assert list(map(click.unstyle, shown)) == ["record 7: cat, 4 tokens", "[CLS] the cat [SEP]"]


def test_a_label_that_is_a_number_is_shown_as_one() -> None:
    ids = np.array([[0, 5, 6, 1]], np.int32)
    labels, records, replaced = np.array([-2.5], np.float32), np.array([0]), np.array([False])
    batch = LabelledBatch(ids, np.ones((1, 4), np.int32), labels, np.ones(1, np.float32), records, replaced)
    heading, _ = preview.render_labelled(batch, 1, TOKENS, preview.pieces(tokenizer(PIECES, "Unigram")), [])
    assert click.unstyle(heading) == "record 0: -2.5, 4 tokens"
