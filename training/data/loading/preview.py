"""Examples as a person would want to see them: text, with what is hidden and what the model is asked for. Pure
functions."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence

import click

from training.data.loading.classification import ClassificationBatch
from training.data.loading.mlm import MlmBatch
from training.data.sampling.masking import SpecialTokens

LEGEND = "[word] hidden behind the mask   [word~other] replaced by another   [word=] left as it is; all three are to be predicted"


def render(batch: MlmBatch, tokens: SpecialTokens, piece: Callable[[int], tuple[str, str]]) -> Iterator[str]:
    """A heading and a paragraph for each row. `piece` is what `pieces` gives."""
    for row, record in enumerate(batch.records):
        used = batch.weights[row] > 0
        answers = dict(zip(batch.positions[row][used].tolist(), batch.labels[row][used].tolist(), strict=True))
        counts = {"hidden": 0, "replaced": 0, "left": 0}
        text = ""
        for position, shown in enumerate(batch.input_ids[row].tolist()):
            space, word = piece(answers.get(position, shown))
            if position not in answers:
                text += space + (click.style(word, dim=True) if shown in tokens.special else word)
            elif shown == tokens.mask:
                counts["hidden"] += 1
                text += space + click.style(f"[{word}]", fg="yellow")
            elif shown == answers[position]:
                counts["left"] += 1
                text += space + click.style(f"[{word}=]", fg="green")
            else:
                counts["replaced"] += 1
                text += space + click.style(f"[{word}~{piece(shown)[1]}]", fg="red")
        summary = ", ".join(f"{count} {what}" for what, count in counts.items())
        yield click.style(
            f"record {record}: {len(batch.input_ids[row])} tokens, {used.sum()} to predict ({summary})", bold=True
        )
        yield text.strip()


def render_labelled(
    batch: ClassificationBatch,
    count: int,
    tokens: SpecialTokens,
    piece: Callable[[int], tuple[str, str]],
    labels: Sequence[str],
) -> Iterator[str]:
    """A heading with the label and a paragraph for each of the first `count` rows, without their padding."""
    for row, record in enumerate(batch.records[:count]):
        ids = batch.input_ids[row][batch.attention_mask[row] > 0].tolist()
        text = "".join(
            space + (click.style(word, dim=True) if id in tokens.special else word)
            for id, (space, word) in zip(ids, map(piece, ids), strict=True)
        )
        yield click.style(f"record {record}: {labels[batch.labels[row]]}, {len(ids)} tokens", bold=True)
        yield text.strip()


def pieces(content: bytes) -> Callable[[int], tuple[str, str]]:
    """id -> (space before it, word), from a tokenizer.json; good for reading, not for turning back into the exact
    text."""
    tokenizer = json.loads(content)
    vocabulary = tokenizer["model"]["vocab"]
    pairs = (
        enumerate(piece for piece, _ in vocabulary)
        if isinstance(vocabulary, list)
        else ((id, piece) for piece, id in vocabulary.items())
    )
    names = dict(pairs) | {each["id"]: each["content"] for each in tokenizer["added_tokens"]}
    special = {each["id"] for each in tokenizer["added_tokens"]}
    joined_by = (
        (tokenizer["model"].get("continuing_subword_prefix") or "")
        if tokenizer["model"].get("type") == "WordPiece"
        else None
    )

    def piece(id: int) -> tuple[str, str]:
        name = names[id]
        if id in special:
            return " ", name
        if joined_by is not None:  # a mark on what goes on with a word
            return ("", name.removeprefix(joined_by)) if name.startswith(joined_by) else (" ", name)
        return (" ", name[1:]) if name[:1] in ("▁", "Ġ") else ("", name)  # a mark on what begins a word

    return piece
