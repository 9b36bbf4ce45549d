"""The dataset format: a folder (local or gs://) of TFRecord shards, and the manifest `dataset.json`.

    {
     "format": "tpu-launch dataset", "version": 2,
     "rows": "packed",                            or documents, (class-, number-, set-, token-)labelled
     "split": "train" | "evaluation",
     "sequence_length": 128,                      the longest row; shards of shorter rows are length buckets
     "features": {"input_ids": {"dtype": "uint16", "shape": ["length"]}},
     "tokenizer_hash": "...", "vocabulary": 2000, of the tokenizer that wrote the ids, see `training.data.tokenizer`
     "labels": [],                                labels other than numbers: the names of 0, 1, ...
     "origin": {...},                             the plan that made it: equal plans make equal datasets
     "shards": [{"name": "train-00000.tfrecord", "length": 128, "records": 9000, "bytes": 2682000, "crc32c": 1}, ...],
     "hash": "..."                                SHA-256 of everything above; identifies the content
    }

Each record is a `tf.train.Example` with one bytes value for each feature: the little-endian numbers of `dtype`. So all
records of a shard have the same size, record i starts at byte i * size, and TensorFlow reads a shard by itself:

    example = tf.io.parse_example(batch, {"input_ids": tf.io.FixedLenFeature([], tf.string)})
    input_ids = tf.cast(tf.io.decode_raw(example["input_ids"], tf.uint16), tf.int32)

Packed rows are full: documents side by side, cut at the row's end. Rows of documents hold whole ones, padded, with a
second feature `segments`, uint16: the number of each token's document in its row, counted from 1, and 0 at padding.
Rows of chats have a third, `targets`: 1 at the tokens of answers, which are learnt, else 0. A labelled row is one text,
padded, with a second feature `label`: of shape [], a class number (int32) or a float32; of shape [labels], 1 for each
label that the text has, else 0 (set-labelled, uint8); or of shape ["length"], the class number of each token, IGNORED
at those without one (token-labelled, int32). Tasks say which rows they need.

A shard with a `folder` lies in that of another dataset, and may be listed several times, as in a mixture
(`write_mixture` of `training.data.prepare.dataset_writer`).

Failure model: dataset.json is written last, and create-only. A folder without it is not a dataset, whatever shards it
holds. Its hash detects a changed byte of dataset.json; the size (`find_shards`) and the CRC of each record that is read
detect a replaced or truncated shard.

Imports neither a framework nor numpy: the launcher checks a dataset before a TPU is created.
"""

import hashlib
import itertools
import json
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from training import storage
from training.errors import BadInput
from training.storage import Stat

MANIFEST = "dataset.json"
FORMAT = "tpu-launch dataset"
VERSION = 2
UNKNOWN = ""  # tokenizer_hash of a dataset without a manifest

Dtype = Literal["uint8", "uint16", "int32", "float32", "int64"]
Layout = Literal["compact", "recipe"]
Rows = Literal["packed", "documents", "class-labelled", "number-labelled", "set-labelled", "token-labelled"]

LABEL = "label"  # the feature that holds a row's label
TYPES = "token_type_ids"  # the feature of rows of two texts: 1 at the tokens of the second one, else 0
IGNORED = -100  # the label of tokens that have none, as in transformers
SEGMENTS, TARGETS = "segments", "targets"  # the features of rows of documents
# The dtypes that a label may have, first the one that is written; none: rows have no label.
LABEL_DTYPES: Mapping[Rows, tuple[Dtype, ...]] = {
    "packed": (),
    "documents": (),
    "class-labelled": ("int32", "int64"),
    "number-labelled": ("float32",),
    "set-labelled": ("uint8",),
    "token-labelled": ("int32",),
}


def label_shape(rows: Rows, labels: int) -> list[Any]:
    """Returns the shape of LABEL: [`labels`] in set-labelled rows, ["length"] in token-labelled ones, else []."""
    return [labels] if rows == "set-labelled" else ["length"] if rows == "token-labelled" else []


class _Strict(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)


class Feature(_Strict):
    """One feature of every record. `shape` is [] for one number per record, ["length"] for one per token, or [n]."""

    dtype: Dtype
    shape: list[Literal["length"] | Annotated[int, Field(ge=1, le=1 << 20)]] = Field(max_length=1)

    def count(self, length: int) -> int:
        """Returns how many numbers of this feature a record of `length` tokens has."""
        return next((length if size == "length" else size for size in self.shape), 1)


class Shard(_Strict):
    """One file of records that all have `length` tokens."""

    name: Annotated[str, Field(pattern=r"^[A-Za-z0-9_][A-Za-z0-9._-]*$")]
    length: Annotated[int, Field(ge=1, le=1 << 20)]
    records: Annotated[int, Field(ge=0)]
    bytes: Annotated[int, Field(ge=0)]
    crc32c: Annotated[int, Field(ge=0, lt=1 << 32)]
    folder: str | None = None  # None: that of the dataset


class DatasetManifest(_Strict):
    """The content of dataset.json without `format`, `version` and `hash`."""

    rows: Rows
    layout: Layout = "compact"
    split: str
    sequence_length: Annotated[int, Field(ge=1, le=1 << 20)]
    features: dict[str, Feature]
    tokenizer_hash: str
    vocabulary: Annotated[int, Field(ge=1)]
    labels: list[str] = []
    origin: dict[str, Any] = {}
    shards: list[Shard]


@dataclass(frozen=True)
class Dataset:
    """A dataset with a consistent manifest. `find_shards` checks its shards."""

    url: str
    manifest: DatasetManifest
    hash: str

    @property
    def sequence_length(self) -> int:  # tokens of the longest row
        return self.manifest.sequence_length

    @property
    def records(self) -> int:
        return sum(shard.records for shard in self.manifest.shards)

    @property
    def records_of_length(self) -> dict[int, int]:
        """Returns row length -> number of records, ascending by length, without lengths that have no records."""
        counts: Counter[int] = Counter()
        for shard in self.manifest.shards:
            counts[shard.length] += shard.records
        return {length: count for length, count in sorted(counts.items()) if count}

    def shard_url(self, shard: Shard) -> str:
        """Returns the URL of a shard: in the folder of another dataset if it lies there, as in a mixture."""
        return storage.join(shard.folder or self.url, shard.name)

    @property
    def has_pairs(self) -> bool:  # a row is two texts
        return TYPES in self.manifest.features

    @property
    def shards(self) -> Sequence[Shard]:  # in the order in which records are numbered
        return self.manifest.shards

    def require(self, *, rows: str | None = None, tokenizer_hash: str | None = None) -> None:
        """Raises BadInput unless the dataset has records, the given kind of rows and tokenizer hash. None is not
        checked; a dataset whose tokenizer is unknown fits every hash."""
        manifest = self.manifest
        if rows is not None and manifest.rows != rows:
            raise BadInput(
                f"{self.url} holds {manifest.rows} rows, and the task needs {rows} ones: give another dataset or task"
            )
        if tokenizer_hash is not None and manifest.tokenizer_hash not in (tokenizer_hash, UNKNOWN):
            raise BadInput(
                f"{self.url} was written with another tokenizer (hash {manifest.tokenizer_hash[:12]}, the configured "
                f"one has {tokenizer_hash[:12]}): its ids mean other words. Give the tokenizer it was made with, or "
                "write the shards again"
            )
        if not self.records:
            raise BadInput(f"{self.url} holds no records")

    def require_like(self, train: "Dataset") -> None:
        """Raises BadInput unless this dataset, for evaluations of a model trained on `train`, has the same longest row,
        number of texts a row, and labels in the same order."""
        texts = ("one text", "two texts")
        for option, own, other in (
            ("sequence-length", f"{self.sequence_length} tokens", f"{train.sequence_length} tokens"),
            ("text-pair", texts[self.has_pairs], texts[train.has_pairs]),
        ):
            if own != other:
                raise BadInput(
                    f"{self.url} has rows of {own}, and {train.url} of {other}: write both with the same --{option}"
                )
        first, second = train.manifest.labels, self.manifest.labels
        if first != second:
            pairs = enumerate(itertools.zip_longest(first, second))  # None: it has no more
            place, pair = next((place, pair) for place, pair in pairs if pair[0] != pair[1])
            shown = ["no more" if name is None else name for name in pair]
            raise BadInput(
                f"{self.url} has {len(second)} labels and {train.url} {len(first)}; label {place} is {shown[1]!r} in "
                f"the one and {shown[0]!r} in the other: give both the same list (tpu-train shards --labels)"
            )

    def require_labels(self) -> None:
        """Raises BadInput unless the dataset has records, and its kind of rows has labels."""
        self.require()
        if not LABEL_DTYPES[self.manifest.rows]:
            raise BadInput(
                f"{self.url} holds {self.manifest.rows} rows, which have no label: give another dataset or task"
            )


def dump_manifest(manifest: DatasetManifest) -> bytes:
    """Encodes dataset.json, with its format, version and hash."""
    body = {"format": FORMAT, "version": VERSION, **manifest.model_dump(mode="json")}
    for shard in body["shards"]:
        if shard["folder"] is None:
            del shard["folder"]
    return (json.dumps({**body, "hash": _hash(body)}, indent=1) + "\n").encode()


def load_manifest(data: bytes, url: str) -> Dataset:
    """Returns the dataset at `url` whose dataset.json is `data`. Raises BadInput for damage or another version."""
    manifest_url = storage.join(url, MANIFEST)
    try:
        body = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise _damaged(url, f"not JSON: {error}") from None
    if not isinstance(body, dict) or body.get("format") != FORMAT:
        raise BadInput(f'{manifest_url} is not a dataset of this program: its "format" is not "{FORMAT}"')
    if body.get("version") != VERSION:
        raise BadInput(
            f"{manifest_url} has format version {body.get('version')!r}, and this program reads version {VERSION}: "
            "use the program that wrote it"
        )
    stored_hash = body.pop("hash", None)
    if stored_hash != _hash(body):
        raise _damaged(url, "its hash does not match its content; was it edited?")
    try:
        manifest = DatasetManifest.model_validate(
            {key: value for key, value in body.items() if key not in ("format", "version")}
        )
    except ValidationError as error:
        first = error.errors()[0]
        raise _damaged(url, f"{'.'.join(map(str, first['loc']))}: {first['msg']}") from None
    if reason := _inconsistency(manifest):
        raise _damaged(url, reason)
    return Dataset(url, manifest, str(stored_hash))


def _damaged(url: str, reason: str) -> BadInput:
    """Returns the error for a damaged dataset.json in the folder `url`."""
    return BadInput(
        f"{storage.join(url, MANIFEST)} is damaged ({reason}): "
        "write the dataset again with tpu-train shards --overwrite"
    )


def _inconsistency(manifest: DatasetManifest) -> str | None:
    """Returns why the parts of a manifest contradict each other; None if they do not."""
    names = [shard.name for shard in manifest.shards if shard.folder is None]
    if len(set(names)) != len(names):
        return "a shard is listed twice"
    lengths, label_dtypes = {shard.length for shard in manifest.shards}, LABEL_DTYPES[manifest.rows]
    if any(length > manifest.sequence_length for length in lengths):
        return "a shard has rows longer than sequence_length"
    if not label_dtypes and lengths - {manifest.sequence_length}:
        return "a shard has rows of another length"
    needed = ["input_ids", LABEL] if label_dtypes else ["input_ids"]
    for name in [*needed, SEGMENTS] if manifest.rows == "documents" else needed:
        if name not in manifest.features:
            return f"no feature {name}"
    if label_dtypes and manifest.features[LABEL].dtype not in label_dtypes:
        return f"the label of {manifest.rows} rows can't be {manifest.features[LABEL].dtype}"
    if label_dtypes and manifest.features[LABEL].shape != label_shape(manifest.rows, len(manifest.labels)):
        return f"the label of {manifest.rows} rows can't have the shape {manifest.features[LABEL].shape}"
    return None


def find_shards(dataset: Dataset) -> Mapping[str, Stat]:
    """Lists the folders of a dataset's shards and returns each shard's URL -> its state in storage. Raises
    StorageError, and BadInput for a mixture's part that changed, and a shard that is missing, truncated, empty or
    replaced: compares sizes, and on gs:// also the CRC-32C, which the listing contains."""
    for part in dataset.manifest.origin.get("mixture", ()):
        url = storage.join(part["url"], MANIFEST)
        if storage.stat(url) and load_manifest(storage.read(url), part["url"]).hash != part["hash"]:
            raise BadInput(f"{part['url']} was written again since {dataset.url} was mixed: mix again, to a new --out")
    places = {shard.folder or dataset.url for shard in dataset.shards}
    stats = {storage.join(place, storage.name_of(stat.url)): stat for place in places for stat in storage.files(place)}
    again = "copy it again, or write the dataset again with tpu-train shards --overwrite"
    for shard in dataset.shards:
        url = dataset.shard_url(shard)
        stat = stats.get(url)
        if stat is None:
            raise BadInput(f"{url} is missing: {MANIFEST} lists it with {shard.records} records; {again}")
        if stat.size != shard.bytes:
            size = "is empty" if not stat.size else f"has {stat.size} bytes"
            raise BadInput(f"{url} {size}, and {MANIFEST} says {shard.bytes} bytes ({shard.records} records): {again}")
        if stat.stored_crc32c not in (None, shard.crc32c):
            raise BadInput(f"{url} is not the shard that {MANIFEST} lists: its checksum (CRC-32C) differs; {again}")
    return {url: stats[url] for url in map(dataset.shard_url, dataset.shards)}


def tokenizer_hash(content: bytes) -> str:
    """Returns the SHA-256, in hex, of a tokenizer.json without its truncation and padding, which `save_pretrained` may
    add. Raises ValueError, AttributeError or RecursionError if it is no JSON object."""
    parsed = {key: value for key, value in json.loads(content.decode()).items() if key not in ("truncation", "padding")}
    return hashlib.sha256(json.dumps(parsed, sort_keys=True, separators=(",", ":")).encode()).hexdigest()


def _hash(body: Mapping[str, Any]) -> str:
    """Returns the SHA-256, in hex, of `body`: a dataset.json's values, already without their hash."""
    return hashlib.sha256(json.dumps(body, sort_keys=True, separators=(",", ":")).encode()).hexdigest()
