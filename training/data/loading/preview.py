"""Renders rows of a training batch as text, with their masks, labels or documents, for `tpu-train dataset preview`."""

import contextlib
import json
from collections.abc import Callable, Iterator, Sequence
from functools import partial

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

Piece = Callable[[int], tuple[str, str]]  # id -> (space before it, word), of `pieces`


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
    piece, special, shown = pieces(tokenizer.content), tokenizer.special, min(rows, len(batch.records))
    of_all = f"{shown} of {host_slice.global_batch_size} rows"
    show: Callable[[int], tuple[str, str]]
    if isinstance(batch, DocumentBatch):
        heading = f"the first {of_all}; | begins a document, dim is not learnt"
        show = partial(show_documents, batch, piece)
    elif isinstance(batch, MlmBatch):
        heading, show = f"the first {of_all}; {LEGEND}", partial(show_masked, batch, special, piece)
    else:
        heading = f"{of_all} of {batch.input_ids.shape[1]} tokens"
        show = partial(show_labelled, batch, special, piece, dataset.manifest.labels)
    yield f"batch {step} of seed {seed}, {heading}"
    for row in range(shown):
        summary, text = show(row)
        yield click.style(f"record {batch.records[row]}: {summary}", bold=True)
        yield text.strip()


def show_masked(batch: MlmBatch, tokens: SpecialTokens, piece: Piece, row: int) -> tuple[str, str]:
    """Returns a summary of a row, and its text, in a terminal's colours, with the tokens to predict as LEGEND says."""
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
    kinds = ", ".join(f"{count} {kind}" for kind, count in counts.items())
    return f"{len(batch.input_ids[row])} tokens, {used.sum()} to predict ({kinds})", text


def show_documents(batch: DocumentBatch, piece: Piece, row: int) -> tuple[str, str]:
    """Returns a summary of a row, and its text, in a terminal's colours, without padding and documents of one token. A
    bar begins a document; tokens that are not learnt (its first, and in chats all but the answers) are dim."""
    text, learnt = "", 0
    for place, id in enumerate(batch.input_ids[row].tolist()):
        begins = batch.position_ids[row, place] == 0
        is_learnt = place > 0 and batch.weights[row, place - 1] > 0
        if begins and not batch.position_ids[row, place + 1 : place + 2].any():
            continue  # padding, or a document of one token
        space, word = piece(id)
        learnt += is_learnt
        text += (" | " if begins else "") + space + (word if is_learnt else click.style(word, dim=True))
    return f"{len(batch.input_ids[row])} tokens, {learnt} to predict", text


def show_labelled(
    batch: LabelledBatch, tokens: SpecialTokens, piece: Piece, labels: Sequence[str], row: int
) -> tuple[str, str]:
    """Returns a summary of a row with its label, and its text, in a terminal's colours, without padding, with the
    labels of words after their first tokens. `labels` names the classes, and is empty for labels that are numbers."""
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
    return f"{label}, {len(ids)} tokens", text


def pieces(content: bytes) -> Piece:
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
        name = names.get(id, f"[{id}]")  # ids may have gaps, which masking inserts as it does others
        if id in special:
            return " ", name
        if continuing_prefix is not None:  # WordPiece marks the pieces that continue a word
            inside = name.startswith(continuing_prefix)
            return ("", name.removeprefix(continuing_prefix)) if inside else (" ", name)
        return (" ", name[1:]) if name[:1] in ("▁", "Ġ") else ("", name)  # others mark the start of a word

    return piece
