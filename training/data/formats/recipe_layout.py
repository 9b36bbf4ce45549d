"""The public recipe's layout: a folder of `<name>-<i>-<count>.tfrecord` without a manifest.

transformers' examples/tensorflow/language-modeling-tpu/prepare_tfrecord_shards.py writes it: each record is a
`tf.train.Example` with int64 `input_ids` and `attention_mask`. File names and the first record supply what a manifest
would say, but nothing says which tokenizer wrote the ids. Records vary in size: `training.data.loading.record_source`
has to read each shard once to find where its records start. `tpu-train shards` writes a layout without that cost.

Rows are full: every token is attended to, as the recipe's script packs them. Padded rows are refused, because training
would predict their padding. So are shards of two names, such as `train-*` and `eval-*`, in one folder.
"""

import hashlib
import itertools
import re
from typing import Any

import google_crc32c
import numpy as np
import numpy.typing as npt
from pydantic import ValidationError

from training import storage
from training.data.formats import example_codec, tfrecord
from training.data.formats.dataset import UNKNOWN, Dataset, DatasetManifest, Feature, Shard
from training.errors import BadInput
from training.storage import Stat

NAME = re.compile(r"\A(?P<name>.+)-(?P<number>\d+)-(?P<records>\d+)\.tfrecord\Z")
_FIRST_READ_BYTES = 1 << 20
_END_BYTES = 64 << 10
PADDED = (
    "has padding (its attention_mask is not all 1), which training would predict: write the shards again with full "
    "rows, as `tpu-train shards` and the recipe's script with packed texts do"
)


def shard_name(split: str, number: int, records: int) -> str:
    return f"{split}-{number}-{records}.tfrecord"


def features() -> dict[str, Feature]:
    """Returns the features of this layout's records, input_ids and attention_mask: one int64 per token."""
    return {name: Feature(dtype="int64", shape=["length"]) for name in ("input_ids", "attention_mask")}


def encode_shard(rows: npt.NDArray[np.integer]) -> bytes:
    """Encodes rows (n, length) as a shard in which every token is attended to."""
    attention_mask = [1] * rows.shape[1]
    return tfrecord.join(example_codec.encode({"input_ids": row, "attention_mask": attention_mask}) for row in rows)


def open_folder(url: str) -> Dataset | None:
    """Opens the dataset in a folder without a manifest; None without a file named like a recipe's shard. Its manifest
    says no tokenizer (hash UNKNOWN, vocabulary 1). Reads the first record, and the ends of local shards. Raises
    StorageError, and BadInput for shards of several names or of one number, no record, or a first one that is damaged
    or has no ids."""
    stats = [(NAME.match(storage.name_of(stat.url)), stat) for stat in storage.files(url)]
    named = sorted(
        ((match, stat) for match, stat in stats if match), key=lambda pair: (pair[0]["name"], int(pair[0]["number"]))
    )
    if not named:
        return None
    names = sorted({match["name"] for match, _ in named})
    if len(names) > 1:
        raise BadInput(
            f"{url} has shards of several names ({', '.join(f'{name}-*' for name in names[:5])}), and a folder is one "
            "dataset: give each a folder of its own"
        )
    for (match, _), (other, _) in itertools.pairwise(named):
        if int(match["number"]) == int(other["number"]):
            raise BadInput(f"{url} has {match[0]} and {other[0]}, shards of one number: keep those of one preparation")
    first = next((stat for match, stat in named if int(match["records"])), None)
    if first is None:
        raise BadInput(f"{url}: no shard has a record, by their names")
    length = _read_length(first)
    shards = [_shard(match, stat, length) for match, stat in named]
    manifest = DatasetManifest(
        rows="packed",
        layout="recipe",
        split=named[0][0]["name"],
        sequence_length=length,
        features=features(),
        tokenizer_hash=UNKNOWN,
        vocabulary=1,
        shards=shards,
    )
    return Dataset(url, manifest, hashlib.sha256(manifest.model_dump_json().encode()).hexdigest())


def decode_ids(
    framed: bytes, url: str, number: int, offset: int, length: int, vocabulary: int
) -> npt.NDArray[np.int32]:
    """Decodes the input_ids, (length,), of one record with its framing; `url`, `number` and `offset` say where it is,
    for messages. Raises BadInput when the record is damaged (Corrupt), has no int64 ids, another length, padding (an
    attention_mask, if any, that is not all 1), or an id outside [0, vocabulary)."""
    [(_, payload)] = tfrecord.walk(framed, url, first=number, offset=offset)
    try:
        features = example_codec.decode(payload)
    except example_codec.NotAnExample as error:
        raise tfrecord.Corrupt(url, number, offset, f"it is not a tf.train.Example: {error}") from None
    ids, attended = features.get("input_ids"), features.get("attention_mask")
    if not isinstance(ids, np.ndarray) or ids.dtype != np.int64 or len(ids) != length:
        raise BadInput(
            f"{url}: record {number} at byte {offset} has no int64 input_ids of {length} numbers as the first record "
            "has"
        )
    if attended is not None and (not isinstance(attended, np.ndarray) or not np.array_equal(attended, [1] * length)):
        raise BadInput(f"{url}: record {number} at byte {offset} {PADDED}")
    if len(wrong := ids[(ids < 0) | (ids >= vocabulary)]):
        raise BadInput(
            f"{url}: record {number} has token id {wrong[0]}, and the tokenizer has {vocabulary} ids: "
            "give the one it was made with"
        )
    return ids.astype(np.int32)


def _shard(match: re.Match[str], stat: Stat, length: int) -> Shard:
    """Returns a shard's manifest entry, with the bucket's CRC or, for a local file, one of its size and two ends.
    Raises BadInput for a name that a manifest can't hold, StorageError."""
    # The CRC of a local file would need a read of all of it: take the CRC of its size and its two ends instead.
    crc32c = stat.stored_crc32c
    if crc32c is None:
        ends = [storage.read(stat.url, max(start, 0), start + _END_BYTES) for start in (0, stat.size - _END_BYTES)]
        crc32c = google_crc32c.value(b"".join([str(stat.size).encode(), *ends]))
    name, records = storage.name_of(stat.url), int(match["records"])
    try:
        return Shard(name=name, length=length, records=records, bytes=stat.size, crc32c=crc32c)
    except ValidationError:
        raise BadInput(f"{stat.url}: a shard's name has letters, digits, '.', '_' and '-' only: rename it") from None


def _read_length(stat: Stat) -> int:
    """Returns the number of ids in a shard's first record. Raises BadInput without int64 input_ids, or for damage
    (Corrupt), which a record longer than 1 MB seems to have; StorageError."""
    data = storage.read(stat.url, 0, _FIRST_READ_BYTES, generation=stat.generation)
    if data.startswith(b"\x1f\x8b\x08"):
        raise BadInput(f"{stat.url} is compressed (gzip), so records have no places: decompress it")
    _, payload = next(tfrecord.walk(data, stat.url), (0, b""))
    try:
        ids: Any = example_codec.decode(payload).get("input_ids")
    except example_codec.NotAnExample as error:
        raise tfrecord.Corrupt(stat.url, 0, 0, f"it is not a tf.train.Example: {error}") from None
    if not isinstance(ids, np.ndarray) or ids.dtype != np.int64 or not 0 < len(ids) <= 1 << 20:
        raise BadInput(
            f"{stat.url}: its first record has no int64 feature input_ids, so it is not a dataset in the public "
            "recipe's layout"
        )
    return len(ids)
