"""From documents to a dataset: tokenize in parallel, concatenate, cut into rows, write shards.

    documents --batches of about 1 MB--> ids (all cores, in the `tokenizers` library) --one endless stream--> rows of
    `length` --> shards

Nothing is lost between batches of documents: what does not fill a row waits for the next ones. Only the tail of a
split, shorter than one row, is dropped, and its size is reported. Memory does not grow with the corpus: one batch of
documents and one shard are held.

What can fail half-way: shards are written one by one, each whole or not at all, and for each a small
`.preparing/<shard>.json` that says where in the corpus its end is. When the same command runs again it takes up after
the last of them, and the result is the same byte for byte. dataset.json comes last; then `.preparing/` is removed.
`.preparing/plan.json` says what is being made, so another corpus, tokenizer or length is refused instead of mixed in.
Two writers at once would write the same bytes to the same names.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

import google_crc32c
import numpy as np
import numpy.typing as npt

from training import storage
from training.data.formats import recipe
from training.data.formats import records as form
from training.data.formats.dataset import MANIFEST, Dataset, Feature, Manifest, Shard, dumps, loads
from training.errors import BadInput

PREPARING = ".preparing"
MLM = {"kind": "mlm"}
BATCH_CHARACTERS = 1 << 20
BATCH_DOCUMENTS = 4096
SHARD_BYTES = 64 << 20  # before compression
MEMBER_RECORDS = 256

Ids = npt.NDArray[np.int32]
Encode = Callable[[list[str]], list[Ids]]


@dataclass(frozen=True)
class Plan:
    """What is to be made. Equal plans make equal bytes."""

    split: str
    length: int
    tokenizer_hash: str
    vocabulary: int
    records_per_shard: int
    layout: str = "compact"
    compression: str = "none"
    origin: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Progress:
    """How far a split is: documents read, rows and shards written (those of an earlier, interrupted run included)."""

    documents: int
    records: int
    shards: int


@dataclass(frozen=True)
class Made:
    """The result: `dropped` ids of the tail are in no row; `reused` is True when the dataset was already there."""

    dataset: Dataset
    documents: int
    dropped: int
    reused: bool = False


@dataclass(frozen=True)
class _Mark:
    """Where in the corpus shard `number` ends: `tokens` into the batch of documents that starts at document
    `document`."""

    number: int
    shard: Shard
    document: int
    tokens: int


def records_per_shard(length: int, vocabulary: int) -> int:
    """How many records make a shard of about SHARD_BYTES: whole members, and at least one."""
    return max(1, SHARD_BYTES // form.layout(features(vocabulary), length).size // MEMBER_RECORDS) * MEMBER_RECORDS


def features(vocabulary: int) -> dict[str, Feature]:
    """The features of masked language modelling: ids only; masks are made when they are read."""
    return {"input_ids": Feature.model_validate({"dtype": form.feature_dtype(vocabulary), "shape": ["length"]})}


def batches_of(documents: Iterable[str]) -> Iterator[list[str]]:
    """Documents in batches of a bounded number of characters."""
    batch: list[str] = []
    size = 0
    for document in documents:
        batch.append(document)
        size += len(document)
        if size >= BATCH_CHARACTERS or len(batch) >= BATCH_DOCUMENTS:
            yield batch
            batch, size = [], 0
    if batch:
        yield batch


def make(
    url: str,
    plan: Plan,
    documents: Callable[[], Iterable[str]],
    encode: Encode,
    *,
    overwrite: bool = False,
    progress: Callable[[Progress], None] = lambda _: None,
) -> Made:
    """Writes the dataset of one split to `url`, or goes on where an interrupted run stopped. Raises BadInput,
    StorageError."""
    done = existing(url, plan, overwrite)
    if done is not None:
        return Made(done, 0, 0, reused=True)
    marks = begin(url, plan)
    write = writer(plan)
    shards = [mark.shard for mark in marks]
    read, dropped = 0, 0
    waiting: list[tuple[int, Ids]] = []  # (document at which its batch starts, ids not yet in a row)
    per_shard = plan.records_per_shard * plan.length
    start = marks[-1].document if marks else 0
    skip = marks[-1].tokens if marks else 0
    used: dict[int, int] = {start: skip}  # ids of a batch that are already in a shard
    for first, ids in _encoded(documents, encode, start):
        read = first[1]
        waiting.append((first[0], ids[used.setdefault(first[0], 0) :]))
        while sum(len(each) for _, each in waiting) >= per_shard:
            rows, waiting, mark = _take(waiting, used, per_shard)
            shards.append(write(url, len(shards), rows.reshape(-1, plan.length)))
            _put(url, _Mark(len(shards) - 1, shards[-1], *mark))
            progress(Progress(read, sum(shard.records for shard in shards), len(shards)))
    rest = np.concatenate([each for _, each in waiting]) if waiting else np.zeros(0, np.int32)
    dropped = len(rest) % plan.length
    if len(rest) >= plan.length:
        shards.append(write(url, len(shards), rest[: len(rest) - dropped].reshape(-1, plan.length)))
    if not shards:
        refuse_empty(url, plan, len(rest), read)
    progress(Progress(read, sum(shard.records for shard in shards), len(shards)))
    return Made(finish(url, plan, columns(plan), shards), read, dropped)


def refuse_empty(url: str, plan: Plan, tokens: int, documents: int) -> None:
    """Raises BadInput when there is not even one row."""
    if tokens < plan.length:
        raise BadInput(
            f"{url}: the {plan.split} split has {tokens} tokens in {documents} documents, less than one row of {plan.length}: give more text, "
            "a shorter --sequence-length, or another --evaluation-percent"
        )


def columns(plan: Plan) -> dict[str, Feature]:
    """The features of the planned dataset."""
    return recipe.features() if plan.layout == "recipe" else features(plan.vocabulary)


def existing(url: str, plan: Plan, overwrite: bool) -> Dataset | None:
    """The dataset at `url` if it is the planned one. Raises BadInput if it is another; with `overwrite` removes
    that."""
    where = storage.join(url, MANIFEST)
    unfinished = storage.join(url, PREPARING, "plan.json")
    refuse = "use another --out, or --overwrite to replace it"
    try:
        dataset = loads(storage.read(where), url)
    except storage.NotFound:
        try:
            begun = storage.read(unfinished)
        except storage.NotFound:
            strangers = [each.url for each in storage.listing(url)]
            if strangers and not overwrite:
                raise BadInput(f"{url} is not empty ({strangers[0]}) and not a dataset: {refuse}") from None
            _clear(url)
            return None
        if begun != _dump(plan):
            if not overwrite:
                raise BadInput(f"{url} holds the beginning of another dataset ({unfinished}): {refuse}") from None
            _clear(url)
        return None
    except BadInput:
        if not overwrite:
            raise
    else:
        if dataset.manifest.origin.get("plan") == json.loads(_dump(plan)):
            return dataset
        if not overwrite:
            raise BadInput(
                f"{url} holds another dataset ({dataset.records} records of {dataset.sequence_length} tokens): {refuse}"
            )
    _clear(url)
    return None


def _clear(url: str) -> None:
    """Removes what this program writes; the manifest first, so that a half-removed dataset is none."""
    storage.delete(storage.join(url, MANIFEST))
    _remove(url, lambda name: name.endswith(".tfrecord") or f"/{PREPARING}/" in name)


def _remove(url: str, chosen: Callable[[str], bool]) -> None:
    for each in storage.listing(url):
        if chosen(each.url):
            storage.delete(each.url)
    if not storage.is_remote(url):
        for parent, _, _ in os.walk(
            storage.join(url, PREPARING), topdown=False
        ):  # only local folders are left when they are empty
            with contextlib.suppress(OSError):
                os.rmdir(parent)


def begin(url: str, plan: Plan) -> list[_Mark]:
    """The marks of an interrupted run, as far as their shards are really there."""
    storage.write(storage.join(url, PREPARING, "plan.json"), _dump(plan))
    there = {storage.name_of(each.url): each for each in storage.listing(url)}
    values = [json.loads(storage.read(each.url)) for name, each in there.items() if name.endswith(".tfrecord.json")]
    marks: list[_Mark] = []
    for value in sorted(values, key=lambda value: int(value["number"])):
        mark = _Mark(value["number"], Shard.model_validate(value["shard"]), value["document"], value["tokens"])
        stat = there.get(mark.shard.name)
        if (
            mark.number != len(marks)
            or stat is None
            or stat.size != mark.shard.bytes
            or stat.crc32c != mark.shard.crc32c
        ):
            break
        marks.append(mark)
    return marks


def _put(url: str, mark: _Mark) -> None:
    value = {"number": mark.number, "shard": mark.shard.model_dump(), "document": mark.document, "tokens": mark.tokens}
    storage.write(storage.join(url, PREPARING, f"{mark.shard.name}.json"), json.dumps(value).encode())


def finish(
    url: str, plan: Plan, names: dict[str, Feature], shards: list[Shard], more: Mapping[str, Any] = MLM
) -> Dataset:
    """Writes dataset.json, which makes the shards a dataset, and clears up. `more`: other keys of the manifest"""
    manifest = Manifest.model_validate(
        {
            **more,
            "layout": plan.layout,
            "compression": plan.compression,
            "member_records": MEMBER_RECORDS if plan.compression == "gzip" else 0,
            "split": plan.split,
            "sequence_length": plan.length,
            "features": {name: feature.model_dump() for name, feature in names.items()},
            "tokenizer_hash": plan.tokenizer_hash,
            "vocabulary": plan.vocabulary,
            "origin": {"plan": json.loads(_dump(plan))},
            "shards": [shard.model_dump() for shard in shards],
        }
    )
    data = dumps(manifest)
    storage.write(storage.join(url, MANIFEST), data, create_only=True)
    _remove(url, lambda name: f"/{PREPARING}/" in name)
    return loads(data, url)


def _encoded(
    documents: Callable[[], Iterable[str]], encode: Encode, start: int
) -> Iterator[tuple[tuple[int, int], Ids]]:
    """((first document, first one after it), all ids) of each batch of documents from document `start` on, which began
    a batch earlier."""
    at = start
    for batch in batches_of(itertools.islice(documents(), start, None)):
        yield (at, at + len(batch)), np.concatenate(encode(batch))
        at += len(batch)


def _take(
    waiting: list[tuple[int, Ids]], used: dict[int, int], count: int
) -> tuple[Ids, list[tuple[int, Ids]], tuple[int, int]]:
    """The next `count` ids, what is left, and where that begins: (document, tokens into its batch)."""
    taken, left = [], count
    for number, (document, ids) in enumerate(waiting):
        part = ids[:left]
        taken.append(part)
        left -= len(part)
        used[document] += len(part)
        if not left:
            return (
                np.concatenate(taken),
                [(document, ids[len(part) :]), *waiting[number + 1 :]],
                (document, used[document]),
            )
    raise AssertionError("fewer ids wait than were counted")


def writer(plan: Plan) -> Callable[[str, int, Ids], Shard]:
    """Writes rows (n, length) as shard `number` of a folder: (url, number, rows)"""
    compact = form.layout(features(plan.vocabulary), plan.length)

    def write(url: str, number: int, rows: Ids) -> Shard:
        if int(rows.max()) >= plan.vocabulary:
            raise BadInput(
                f"the tokenizer gave id {int(rows.max())}, beyond its own vocabulary of {plan.vocabulary}: its tokenizer.json is damaged"
            )
        if plan.layout == "recipe":
            name, data = recipe.name(plan.split, number, len(rows)), recipe.encode(rows)
        else:
            name = f"{plan.split}-{number:05d}.tfrecord"
            data = form.encode(compact, {"input_ids": rows.astype(compact.columns[0].dtype)})
        members = form.compress(compact, data, MEMBER_RECORDS) if plan.compression == "gzip" else []
        data = b"".join(members) or data
        storage.write(storage.join(url, name), data)
        return Shard(
            name=name,
            length=plan.length,
            records=len(rows),
            bytes=len(data),
            crc32c=google_crc32c.value(data),
            members=[len(each) for each in members],
        )

    return write


def _dump(plan: Plan) -> bytes:
    return json.dumps(asdict(plan), sort_keys=True, indent=1).encode()
