"""Renders rows of a training batch as text, with their masks, labels or documents, for `tpu-train dataset preview`."""

import contextlib
import json
from collections.abc import Callable, Iterator, Sequence

import click
import numpy as np

from training.data.formats.dataset import IGNORED, Dataset
from training.data.loading.batches import (
    DocumentBatch,
    DocumentBatches,
    LabelledBatch,
    LabelledBatches,
    MlmBatch,
    MlmBatches,
)
from training.data.loading.record_source import HostSlice
from training.data.sampling.masking import Masking, SpecialTokens
from training.data.tokenizer import Tokenizer

LEGEND = (
    "[word] hidden behind the mask   [word~other] replaced by another   [word=] left as it is; all three are to be "
    "predicted"
)


def preview_batch(
    dataset: Dataset, tokenizer: Tokenizer, step: int, rows: int, host_slice: HostSlice, *, seed: int, percent: int
) -> Iterator[str]:
    """Reads the batch of one step, of the host of `host_slice`; yields a heading and the lines for its first rows, at
    most `rows`. `percent` of the tokens of packed rows are masked. Raises BadInput, StorageError."""
    source: DocumentBatches | MlmBatches | LabelledBatches
    if dataset.manifest.rows == "documents":
        source = DocumentBatches(dataset, host_slice, seed)
    elif dataset.manifest.rows == "packed":
        source = MlmBatches(dataset, host_slice, Masking(percent), seed)
    else:
        source = LabelledBatches(dataset, host_slice, seed)
    with contextlib.closing(source):
        batch = source.batch(step)
    heading, of_all = f"batch {step} of seed {seed}", f"of {host_slice.global_batch_size} rows"
    piece, special, shown = pieces(tokenizer.content), tokenizer.special, min(rows, len(batch.records))
    if isinstance(batch, DocumentBatch):
        yield f"{heading}, the first {rows} {of_all}; | begins a document, dim is not learnt"
        yield from render_documents(batch, rows, piece)
    elif isinstance(batch, MlmBatch):
        yield f"{heading}, the first {shown} {of_all}; {LEGEND}"
        yield from render(MlmBatch(*(values[:rows] for values in vars(batch).values())), special, piece)
    else:
        yield f"{heading}, {shown} {of_all} of {batch.input_ids.shape[1]} tokens"
        yield from render_labelled(batch, rows, special, piece, dataset.manifest.labels)


def render(batch: MlmBatch, tokens: SpecialTokens, piece: Callable[[int], tuple[str, str]]) -> Iterator[str]:
    """Yields two strings for each row: a heading, and the text, with the tokens to predict as LEGEND says, in a
    terminal's colours. `piece` is the result of `pieces`."""
    for row, record in enumerate(batch.records):
        used = batch.weights[row] > 0
        label_at = dict(zip(batch.positions[row][used].tolist(), batch.labels[row][used].tolist(), strict=True))
        counts = {"hidden": 0, "replaced": 0, "left": 0}
        text = ""
        for position, shown in enumerate(batch.input_ids[row].tolist()):
            space, word = piece(label_at.get(position, shown))
            if position not in label_at:
                text += space + (click.style(word, dim=True) if shown in tokens.special else word)
            elif shown == tokens.mask:
                counts["hidden"] += 1
                text += space + click.style(f"[{word}]", fg="yellow")
            elif shown == label_at[position]:
                counts["left"] += 1
                text += space + click.style(f"[{word}=]", fg="green")
            else:
                counts["replaced"] += 1
                text += space + click.style(f"[{word}~{piece(shown)[1]}]", fg="red")
        summary = ", ".join(f"{count} {kind}" for kind, count in counts.items())
        yield click.style(
            f"record {record}: {len(batch.input_ids[row])} tokens, {used.sum()} to predict ({summary})", bold=True
        )
        yield text.strip()


def render_documents(batch: DocumentBatch, count: int, piece: Callable[[int], tuple[str, str]]) -> Iterator[str]:
    """Yields a heading and a paragraph, in a terminal's colours, for each of the first `count` rows. Leaves out padding
    and documents of one token; a bar begins a document; tokens that are not learnt (its first, and in chats all but the
    answers) are dim. `piece` is the result of `pieces`."""
    for row, record in enumerate(batch.records[:count]):
        text, learnt = "", 0
        for place, id in enumerate(batch.input_ids[row].tolist()):
            begins = batch.position_ids[row, place] == 0
            is_learnt = place > 0 and batch.weights[row, place - 1] > 0
            if begins and not batch.position_ids[row, place + 1 : place + 2].any():
                continue  # padding, or a document of one token
            space, word = piece(id)
            learnt += is_learnt
            text += (" | " if begins else "") + space + (word if is_learnt else click.style(word, dim=True))
        yield click.style(f"record {record}: {len(batch.input_ids[row])} tokens, {learnt} to predict", bold=True)
        yield text.strip()


def render_labelled(
    batch: LabelledBatch,
    count: int,
    tokens: SpecialTokens,
    piece: Callable[[int], tuple[str, str]],
    labels: Sequence[str],
) -> Iterator[str]:
    """Yields a heading with the label and a paragraph for each of the first `count` rows, without their padding, with
    the labels of words after their first tokens. `piece` is the result of `pieces`; `labels` names the classes, and is
    empty for labels that are numbers."""
    for row, record in enumerate(batch.records[:count]):
        ids, own = batch.input_ids[row][batch.attention_mask[row] > 0].tolist(), batch.labels[row]
        marks = [""] * len(ids)  # after each token
        if batch.weights.ndim > 1:
            label = f"{int(batch.weights[row].sum())} words"
            marks = [f"/{labels[number]}" if number != IGNORED else "" for number in own[: len(ids)].tolist()]
        elif own.ndim:
            label = ", ".join(labels[number] for number in np.flatnonzero(own).tolist()) or "no label"
        else:
            label = labels[int(own)] if labels else f"{own:g}"
        text = "".join(
            space + (click.style(word, dim=True) if id in tokens.special else word) + click.style(mark, fg="green")
            for id, (space, word), mark in zip(ids, map(piece, ids), marks, strict=True)
        )
        yield click.style(f"record {record}: {label}, {len(ids)} tokens", bold=True)
        yield text.strip()


def pieces(content: bytes) -> Callable[[int], tuple[str, str]]:
    """Returns a function id -> (space before it, word) of a tokenizer.json's content; for display, not exact."""
    tokenizer = json.loads(content)
    vocabulary = tokenizer["model"]["vocab"]
    pairs = (
        enumerate(piece for piece, _ in vocabulary)
        if isinstance(vocabulary, list)
        else ((id, piece) for piece, id in vocabulary.items())
    )
    names = dict(pairs) | {token["id"]: token["content"] for token in tokenizer["added_tokens"]}
    special = {token["id"] for token in tokenizer["added_tokens"]}
    continuing_prefix = (
        (tokenizer["model"].get("continuing_subword_prefix") or "")
        if tokenizer["model"].get("type") == "WordPiece"
        else None
    )

    def piece(id: int) -> tuple[str, str]:
        """Returns the space before a token, at the start of a word or before an added token, else ""; and its text."""
        name = names[id]
        if id in special:
            return " ", name
        if continuing_prefix is not None:  # WordPiece marks the pieces that continue a word
            inside = name.startswith(continuing_prefix)
            return ("", name.removeprefix(continuing_prefix)) if inside else (" ", name)
        return (" ", name[1:]) if name[:1] in ("▁", "Ġ") else ("", name)  # others mark the start of a word

    return piece
