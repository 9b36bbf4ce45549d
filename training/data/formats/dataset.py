"""What a dataset is: a folder (local or gs://) of TFRecord shards, and the `dataset.json` that makes it one.

    {
     "format": "tpu-launch dataset", "version": 1,
     "kind": "mlm" | "classification",  "split": "train" | "evaluation",
     "sequence_length": 128,                      the longest row; shards of shorter rows are length buckets
     "features": {"input_ids": {"dtype": "uint16", "shape": ["length"]}},
     "tokenizer_hash": "...", "vocabulary": 2000, what wrote the ids, see `training.data.tokenizer`
     "labels": [],                                classification: the names of labels 0, 1, ...
     "origin": {...},                             how it was made: for people, and to see whether it is the same work
     "compression": "none" | "gzip",  "member_records": 0,
     "shards": [{"name": "train-00000.tfrecord", "length": 128, "records": 9000, "bytes": 2682000, "crc32c": 1,
                 "members": []}, ...],
     "hash": "..."                                SHA-256 of everything above: names this very content
    }

Each record is a `tf.train.Example` with one bytes value a feature: the little-endian numbers of `dtype`. So all records
of a shard have one size, record i starts at i * size, and TensorFlow reads a shard with no code of ours:

    example = tf.io.parse_example(batch, {"input_ids": tf.io.FixedLenFeature([], tf.string)})
    input_ids = tf.cast(tf.io.decode_raw(example["input_ids"], tf.uint16), tf.int32)

With gzip a shard is a gzip file of many members (RFC 1952, section 2.2), `member_records` records in each, whose sizes
in bytes are `members`. Any gzip program and `tf.data.TFRecordDataset(..., compression_type="GZIP")` read it whole; our
reader goes to a member directly.

What can fail half-way: dataset.json is written last, and create-only. Without it a folder is no dataset, whatever
shards it holds. A changed byte of dataset.json is found by its hash, a replaced or cut shard by its size here and by
the CRC of each record in the reader.

Framework-free, and without numpy: the launcher checks a dataset before a TPU is rented.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from training import storage
from training.errors import BadInput
from training.storage import Stat

MANIFEST = "dataset.json"
FORMAT = "tpu-launch dataset"
VERSION = 1
UNKNOWN = ""  # tokenizer_hash of a dataset without a manifest

Dtype = Literal["uint16", "int32", "float32", "int64"]


class _Strict(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)


class Feature(_Strict):
    """`shape` is [] for one number a record, ["length"] for one a token."""

    dtype: Dtype
    shape: list[Literal["length"]] = Field(max_length=1)


class Shard(_Strict):
    name: Annotated[str, Field(pattern=r"^[A-Za-z0-9_][A-Za-z0-9._-]*$")]
    length: Annotated[int, Field(ge=1, le=1 << 20)]
    records: Annotated[int, Field(ge=0)]
    bytes: Annotated[int, Field(ge=0)]
    crc32c: Annotated[int, Field(ge=0, lt=1 << 32)]
    members: list[Annotated[int, Field(ge=1)]] = []


class Manifest(_Strict):
    """dataset.json without its first and last lines (format, version, hash)."""

    kind: Literal["mlm", "classification"]
    layout: Literal["compact", "recipe"] = "compact"
    compression: Literal["none", "gzip"] = "none"
    member_records: Annotated[int, Field(ge=0)] = 0
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
    """A dataset that was opened: its manifest is whole and consistent; its shards have not been looked at (see
    `find_shards`)."""

    url: str
    manifest: Manifest
    hash: str

    @property
    def sequence_length(self) -> int:
        return self.manifest.sequence_length

    @property
    def records(self) -> int:
        return sum(shard.records for shard in self.manifest.shards)

    @property
    def tokenizer_hash(self) -> str:
        return self.manifest.tokenizer_hash

    @property
    def shards(self) -> Sequence[Shard]:
        return self.manifest.shards

    def require(
        self, *, kind: str | None = None, tokenizer_hash: str | None = None, sequence_length: int | None = None
    ) -> None:
        """Raises BadInput where the dataset is not what the run's configuration says."""
        found = self.manifest
        if kind is not None and found.kind != kind:
            raise BadInput(
                f"{self.url} holds {found.kind} records, and the task needs {kind}: give another dataset or task"
            )
        if sequence_length is not None and found.sequence_length != sequence_length:
            raise BadInput(
                f"{self.url} has sequences of {found.sequence_length} tokens, and the configuration says {sequence_length}: "
                f"change one of them (tpu-train shards --sequence-length {sequence_length})"
            )
        if tokenizer_hash is not None and found.tokenizer_hash not in (tokenizer_hash, UNKNOWN):
            raise BadInput(
                f"{self.url} was written with another tokenizer (hash {found.tokenizer_hash[:12]}, the configured one has "
                f"{tokenizer_hash[:12]}): its ids mean other words. Give the tokenizer it was made with, or write the shards again"
            )
        if not self.records:
            raise BadInput(f"{self.url} holds no records")


def dumps(manifest: Manifest) -> bytes:
    """dataset.json."""
    body = {"format": FORMAT, "version": VERSION, **manifest.model_dump(mode="json")}
    return (json.dumps({**body, "hash": _hash(body)}, indent=1) + "\n").encode()


def loads(data: bytes, url: str) -> Dataset:
    """The dataset at `url` whose dataset.json is `data`. Raises BadInput."""
    where = storage.join(url, MANIFEST)
    broken = f"{where} is damaged ({{}}): write the dataset again with tpu-train shards --overwrite"
    try:
        body = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise BadInput(broken.format(f"not JSON: {error}")) from None
    if not isinstance(body, dict) or body.get("format") != FORMAT:
        raise BadInput(f'{where} is not a dataset of this program: its "format" is not "{FORMAT}"')
    if body.get("version") != VERSION:
        version = body.get("version")
        raise BadInput(
            f"{where} has format version {version!r}, and this program reads version {VERSION}: use the program that wrote it"
        )
    found = body.pop("hash", None)
    if found != _hash(body):
        raise BadInput(broken.format("its hash does not match its content; was it edited?"))
    try:
        manifest = Manifest.model_validate(
            {key: value for key, value in body.items() if key not in ("format", "version")}
        )
    except ValidationError as error:
        first = error.errors()[0]
        raise BadInput(broken.format(f"{'.'.join(map(str, first['loc']))}: {first['msg']}")) from None
    names = [shard.name for shard in manifest.shards]
    if len(set(names)) != len(names):
        raise BadInput(broken.format("a shard is listed twice"))
    if any(shard.length > manifest.sequence_length for shard in manifest.shards):
        raise BadInput(broken.format("a shard has rows longer than sequence_length"))
    if manifest.kind == "mlm" and any(shard.length != manifest.sequence_length for shard in manifest.shards):
        raise BadInput(broken.format("a shard has rows of another length"))
    if missing := {"mlm": {"input_ids"}, "classification": {"input_ids", "label"}}[manifest.kind] - set(
        manifest.features
    ):
        raise BadInput(broken.format(f"no feature {missing.pop()}"))
    unit = manifest.member_records
    if (manifest.compression == "gzip") != bool(unit):
        raise BadInput(broken.format("member_records and compression do not fit together"))
    for shard in manifest.shards:
        if unit and (sum(shard.members) != shard.bytes or len(shard.members) != -(-shard.records // unit)):
            raise BadInput(broken.format(f"the members of {shard.name} do not add up to its bytes and records"))
    return Dataset(url, manifest, str(found))


def find_shards(dataset: Dataset) -> Mapping[str, Stat]:
    """Shard name -> what stands in storage now, checked against the manifest (size; on gs:// also the crc32c, which
    costs nothing there).

    Raises BadInput for a missing, cut, empty, or replaced shard."""
    there = {storage.name_of(each.url): each for each in storage.listing(dataset.url)}
    again = "copy it again, or write the dataset again with tpu-train shards --overwrite"
    for shard in dataset.shards:
        stat = there.get(shard.name)
        url = storage.join(dataset.url, shard.name)
        if stat is None:
            raise BadInput(f"{url} is missing: {MANIFEST} lists it with {shard.records} records; {again}")
        if stat.size != shard.bytes:
            how = "is empty" if not stat.size else f"has {stat.size} bytes"
            raise BadInput(f"{url} {how}, and {MANIFEST} says {shard.bytes} bytes ({shard.records} records): {again}")
        if stat.stored_crc32c not in (None, shard.crc32c):
            raise BadInput(f"{url} is not the shard that {MANIFEST} lists: its checksum (CRC-32C) differs; {again}")
    return {shard.name: there[shard.name] for shard in dataset.shards}


def tokenizer_hash(content: bytes) -> str:
    """Names what turns text into ids: tokenizer.json without the truncation and padding that `save_pretrained` may have
    left in it."""
    parsed = {key: value for key, value in json.loads(content).items() if key not in ("truncation", "padding")}
    return hashlib.sha256(json.dumps(parsed, sort_keys=True, separators=(",", ":")).encode()).hexdigest()


def _hash(body: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(body, sort_keys=True, separators=(",", ":")).encode()).hexdigest()
