"""Writes weighted mixtures of datasets: a dataset.json that lists the shards of others, some of them several times.

An epoch has each record of a part as often as the mixture says. A mixture is read like any dataset: its order is a pure
function of the step, for every kind of rows and with each backend, and masks differ between the copies of a record.

Failure model: dataset.json is written once, create-only. A part that changes later is refused as a changed dataset is.
"""

import os
from collections.abc import Mapping

from training import storage
from training.data.formats.dataset import MANIFEST, Dataset, dump_manifest, load_manifest
from training.data.formats.open_dataset import open_dataset
from training.errors import BadInput

# What parts of a mixture may differ in.
_OWN = {"origin", "shards"}


def parse_part(text: str) -> tuple[str, int]:
    """Parses FOLDER=TIMES. Raises BadInput."""
    folder, _, times = text.rpartition("=")
    if not folder or not times.isdecimal() or not 1 <= int(times) <= 1000:
        raise BadInput(f"--part {text}: expected FOLDER=TIMES with a number from 1 to 1000, for example data/train=2")
    return folder, int(times)


def write_mixture(url: str, parts: Mapping[str, int]) -> Dataset:
    """Writes and returns a mixture in the folder `url`; keeps one that is the same. `parts`: a dataset's folder -> how
    often an epoch has each of its records. Raises BadInput if there are fewer than two, they differ in rows, features,
    labels or tokenizers, have the public recipe's layout, or the folder holds another dataset; and StorageError."""
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
