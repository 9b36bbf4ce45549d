"""Writes a dataset step by step: plan, shards, manifest. Used by all code that makes datasets.

Failure model: each shard is written whole or not at all, followed by a small `.preparing/<shard>.json` that says where
in the corpus it ends (`Mark`). An interrupted command continues after the last of them when it runs again, and the
result is the same byte for byte. dataset.json comes last; then `.preparing/` is removed. `.preparing/plan.json` holds
the plan, so that another corpus, tokenizer or length is refused instead of mixed in. Two concurrent writers write the
same bytes to the same names.

A mixture (`write_mixture`) is a dataset.json that lists the shards of other datasets, some of them several times. It is
read like any dataset: its order is a pure function of the step, and masks differ between the copies of a record. Its
dataset.json is written once, create-only. A part that changes later is refused as a changed dataset is.
"""

import contextlib
import json
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

import google_crc32c
import numpy as np
import numpy.typing as npt
from pydantic import BaseModel

from training import storage
from training.data.formats import fixed_records, recipe_layout
from training.data.formats.dataset import (
    MANIFEST,
    Dataset,
    DatasetManifest,
    Feature,
    Layout,
    Shard,
    dump_manifest,
    load_manifest,
)
from training.data.formats.open_dataset import open_dataset
from training.errors import BadInput

PREPARING = ".preparing"
PLAN = "plan.json"
PACKED = {"rows": "packed"}
SHARD_BYTES = 64 << 20

Ids = npt.NDArray[np.int32]


@dataclass(frozen=True)
class DatasetPlan:
    """The inputs and options of a dataset. Equal plans make equal bytes; field names are part of the format."""

    split: str  # "train" or "evaluation"
    length: int  # tokens of the longest row
    tokenizer_hash: str
    vocabulary: int  # number of ids of that tokenizer
    records_per_shard: int
    layout: Layout = "compact"
    origin: dict[str, Any] = field(default_factory=dict)  # corpus and options, as JSON values


class Mark(BaseModel):
    """The end of shard `number`: after `tokens` ids of the batch of documents that starts at document `document`."""

    number: int
    shard: Shard
    document: int
    tokens: int


@dataclass(frozen=True)
class WrittenDataset:
    """A split's dataset. `note` reports what was left out; `reused`: the dataset was already there."""

    dataset: Dataset
    note: str = ""
    reused: bool = False


def id_features(vocabulary: int) -> dict[str, Feature]:
    """Returns the feature of rows of token ids, input_ids, of `id_dtype` for so many ids."""
    return {"input_ids": Feature(dtype=fixed_records.id_dtype(vocabulary), shape=["length"])}


def plan_features(plan: DatasetPlan) -> dict[str, Feature]:
    """Returns the features of packed rows in the plan's layout."""
    return recipe_layout.features() if plan.layout == "recipe" else id_features(plan.vocabulary)


def records_per_shard(length: int, vocabulary: int) -> int:
    """Returns how many records of `length` ids, without labels, make a shard of about SHARD_BYTES, 64 MiB."""
    return SHARD_BYTES // fixed_records.record_layout(id_features(vocabulary), length).size


def find_existing(url: str, plan: DatasetPlan, overwrite: bool) -> Dataset | None:
    """Returns the dataset in a folder if its plan is this one, without a look at its shards; with `overwrite`, only if
    each has the manifest's size and CRC-32C, for which it reads local ones. None if it has to be made, or continued.
    Raises BadInput when the folder holds something else: other files, a damaged or another dataset, or the beginning
    of one; with `overwrite`, instead deletes its manifest, .tfrecord files and `.preparing/`, but no other file, and
    returns None."""
    mistake: str | None = None
    try:
        dataset = load_manifest(storage.read(storage.join(url, MANIFEST)), url)
    except storage.NotFound:
        mistake = _unfinished_mistake(url, plan)
        if mistake is None:
            return None
    except BadInput:
        if not overwrite:
            raise
    else:
        if dataset.manifest.origin.get("plan") == json.loads(_dump_plan(plan)):
            stats = _stats_by_name(url) if overwrite else {}
            if not overwrite or all(_is_intact(shard, stats) for shard in dataset.shards):
                return dataset
        mistake = f"{url} holds another dataset ({dataset.records} records of {dataset.sequence_length} tokens)"
    if not overwrite:
        raise BadInput(f"{mistake}: use another --out, or --overwrite to replace it")
    _clear(url)
    return None


def _stats_by_name(url: str) -> dict[str, storage.Stat]:
    return {storage.name_of(stat.url): stat for stat in storage.files(url)}


def _is_intact(shard: Shard, stats: Mapping[str, storage.Stat]) -> bool:
    """Returns whether a shard's file among these, by name, has its size and CRC-32C. Reads a local file."""
    stat = stats.get(shard.name)
    return stat is not None and stat.size == shard.bytes and stat.crc32c == shard.crc32c


def _unfinished_mistake(url: str, plan: DatasetPlan) -> str | None:
    """Returns why the planned dataset can't be made in a folder without a manifest; None if it is empty, or holds the
    beginning of this dataset."""
    plan_url = storage.join(url, PREPARING, PLAN)
    try:
        stored_plan = storage.read(plan_url)
    except storage.NotFound:
        others = [stat.url for stat in storage.listing(url)]
        return f"{url} is not empty ({others[0]}) and not a dataset" if others else None
    return None if stored_plan == _dump_plan(plan) else f"{url} holds the beginning of another dataset ({plan_url})"


def _clear(url: str) -> None:
    """Deletes the manifest, the folder's .tfrecord files and `.preparing/`, and no other file: a subfolder may hold
    another dataset. The manifest goes first, so that a half-deleted dataset is not a dataset."""
    storage.delete(storage.join(url, MANIFEST))
    for stat in storage.files(url):
        if stat.url.endswith(".tfrecord"):
            storage.delete(stat.url)
    _remove_preparing(url)


def _remove_preparing(url: str) -> None:
    """Deletes a dataset's folder `.preparing/`, if it exists, but unfinished local files. Raises StorageError."""
    for stat in storage.listing(storage.join(url, PREPARING)):
        storage.delete(stat.url)
    if not storage.is_remote(url):
        # Buckets have no folders; delete empty local ones.
        for parent, _, _ in os.walk(storage.join(url, PREPARING), topdown=False):
            with contextlib.suppress(OSError):
                os.rmdir(parent)


def begin_dataset(url: str, plan: DatasetPlan) -> list[Mark]:
    """Writes `.preparing/plan.json`, over any there: `find_existing`, called first, refuses another plan. Returns
    the marks that an interrupted run left, from shard 0 to the first gap, or the first whose shard is absent or has
    another size or CRC-32C, for which it reads local shards; deletes none. Raises StorageError."""
    storage.write(storage.join(url, PREPARING, PLAN), _dump_plan(plan))
    stats = _stats_by_name(url)
    kept = [stat.url for stat in storage.listing(storage.join(url, PREPARING)) if stat.url.endswith(".tfrecord.json")]
    found = [Mark.model_validate_json(storage.read(mark_url)) for mark_url in kept]
    marks: list[Mark] = []
    for mark in sorted(found, key=lambda mark: mark.number):
        if mark.number != len(marks) or not _is_intact(mark.shard, stats):
            break
        marks.append(mark)
    return marks


def write_mark(url: str, mark: Mark) -> None:
    """Writes the mark of a shard, written before, to `.preparing/` of the folder `url`: another run continues after it.
    Raises StorageError."""
    storage.write(storage.join(url, PREPARING, f"{mark.shard.name}.json"), mark.model_dump_json().encode())


def write_packed(url: str, plan: DatasetPlan, number: int, rows: Ids) -> Shard:
    """Writes packed rows (n, length) as shard `number` of the folder `url`, in the plan's layout, over a file of that
    name. Raises BadInput for an id beyond the vocabulary; StorageError."""
    if plan.layout != "recipe":
        return write_columns(url, plan, id_features(plan.vocabulary), f"{number:05d}", {"input_ids": rows})
    name = recipe_layout.shard_name(plan.split, number, len(rows))
    return _write_shard(url, plan, name, rows, recipe_layout.encode_shard(rows))


def write_columns(
    url: str, plan: DatasetPlan, features: Mapping[str, Feature], name: str, columns: Mapping[str, npt.NDArray[Any]]
) -> Shard:
    """Writes rows of the compact layout as <split>-<name>.tfrecord in the folder `url`, over any such file. `columns`:
    feature -> (n, count) or (n,), converted to the feature's dtype; those that are no feature are left out. Raises
    BadInput for an id beyond the vocabulary; StorageError."""
    ids = columns["input_ids"]
    layout = fixed_records.record_layout(features, ids.shape[1])
    values = {name: columns[name].astype(feature.dtype) for name, feature in features.items()}
    data = fixed_records.encode_records(layout, values)
    return _write_shard(url, plan, f"{plan.split}-{name}.tfrecord", ids, data)


def _write_shard(url: str, plan: DatasetPlan, name: str, ids: Ids, data: bytes) -> Shard:
    """Writes the bytes of a shard with `ids`, (n, length), to the file `name` of a folder. Returns the shard's entry in
    the manifest. Raises BadInput for an id beyond the plan's vocabulary; StorageError."""
    if int(ids.max()) >= plan.vocabulary:
        raise BadInput(
            f"the tokenizer gave id {int(ids.max())}, beyond its own vocabulary of {plan.vocabulary}: "
            "its tokenizer.json is damaged"
        )
    storage.write(storage.join(url, name), data)
    crc32c = google_crc32c.value(data)
    return Shard(name=name, length=ids.shape[1], records=len(ids), bytes=len(data), crc32c=crc32c)


def finish_dataset(
    url: str, plan: DatasetPlan, features: Mapping[str, Feature], shards: list[Shard], more: Mapping[str, Any] = PACKED
) -> Dataset:
    """Writes dataset.json, which commits the dataset, removes `.preparing/`, and returns the dataset. `more`: other
    keys of the manifest, `rows` and, if labelled, `labels`. Raises AlreadyExists when there is a dataset.json;
    StorageError."""
    manifest = DatasetManifest(
        **more,
        layout=plan.layout,
        split=plan.split,
        sequence_length=plan.length,
        features=dict(features),
        tokenizer_hash=plan.tokenizer_hash,
        vocabulary=plan.vocabulary,
        origin={"plan": json.loads(_dump_plan(plan))},
        shards=shards,
    )
    data = dump_manifest(manifest)
    storage.write(storage.join(url, MANIFEST), data, create_only=True)
    _remove_preparing(url)
    return load_manifest(data, url)


def _dump_plan(plan: DatasetPlan) -> bytes:
    """Encodes plan.json; equal plans are equal bytes."""
    return json.dumps(asdict(plan), sort_keys=True, indent=1).encode()


# What parts of a mixture may differ in.
_OWN = {"origin", "shards"}


def parse_part(text: str) -> tuple[str, int]:
    """Parses FOLDER=TIMES into (folder, times). Raises BadInput unless times is 1 to 1000."""
    folder, _, times = text.rpartition("=")
    if not folder or not times.isdecimal() or not 1 <= int(times) <= 1000:
        raise BadInput(f"--part {text}: expected FOLDER=TIMES with a number from 1 to 1000, for example data/train=2")
    return folder, int(times)


def write_mixture(url: str, parts: Mapping[str, int]) -> Dataset:
    """Writes the dataset.json of a mixture to the folder `url`; keeps one that is the same. Returns the mixture. It
    lists its parts' shards, where they lie: none is copied or checked. `parts`: a dataset's folder -> how often an
    epoch has each record. Raises BadInput if there are fewer than two, one is no dataset or of the public recipe's
    layout, they differ in more than origin and shards, or the folder holds another dataset; StorageError."""
    if len(parts) < 2:
        raise BadInput("a mixture has at least two different parts: give --part again")
    folders = [folder if storage.is_remote(folder) else os.path.abspath(folder) for folder in parts]
    datasets = [open_dataset(folder) for folder in folders]
    first, *others = datasets
    if first.manifest.layout != "compact":
        raise BadInput(f"{first.url} has the public recipe's layout: write it with `tpu-train shards` to mix it")
    for other in others:
        theirs = other.manifest.model_dump(exclude=_OWN)
        for key, value in first.manifest.model_dump(exclude=_OWN).items():
            if theirs[key] != value:
                raise BadInput(f"{other.url} and {first.url} differ in {key}: prepare them the same way to mix them")
    mixed = list(zip(datasets, parts.values(), strict=True))
    shards = [
        shard.model_copy(update={"folder": shard.folder or part.url})
        for part, times in mixed
        for shard in [*part.shards] * times
    ]
    origin = [{"url": part.url, "times": times, "records": part.records, "hash": part.hash} for part, times in mixed]
    manifest = first.manifest.model_copy(update={"shards": shards, "origin": {"mixture": origin}})
    data, place = dump_manifest(manifest), storage.join(url, MANIFEST)
    try:
        storage.write(place, data, create_only=True)
    except storage.AlreadyExists:
        if storage.read(place) != data:
            raise BadInput(f"{url} holds another dataset: give another --out") from None
    return load_manifest(data, url)
