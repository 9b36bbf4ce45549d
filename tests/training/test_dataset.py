"""Checks that what does not fit dataset.json is refused with a message that says where and what to do."""

import json
import os
from pathlib import Path
from typing import Any

import pytest

from tests.processes import run_python
from training import storage
from training.data.formats import dataset as manifests
from training.data.formats.dataset import (
    DatasetManifest,
    check_dataset,
    dump_manifest,
    find_shards,
    open_dataset,
    tokenizer_hash,
)
from training.errors import BadInput

SHARD = {"name": "x", "length": 8, "records": 1, "bytes": 1, "crc32c": 1}


def edit(folder: Path, **changes: Any) -> None:
    """Changes dataset.json and makes its hash right again, as a careful editor would."""
    body = {**json.loads((folder / "dataset.json").read_bytes()), **changes}
    body.pop("hash")
    (folder / "dataset.json").write_text(json.dumps({**body, "hash": manifests._hash(body)}))


def test_the_hash_names_the_content_and_not_the_place(samples: Any, tmp_path: Path) -> None:
    hashes = [samples.make(tmp_path / str(number), 25, seed=seed).hash for number, seed in enumerate((0, 0, 1))]
    assert hashes[0] == hashes[1] != hashes[2]


@pytest.mark.parametrize(
    ("wanted", "message"),
    [
        ({"rows": "class-labelled"}, "holds packed rows, and the task needs class-labelled ones"),
        ({"sequence_length": 512}, "has sequences of 8 tokens, and the configuration says 512"),
        ({"tokenizer_hash": "u" * 64}, "was written with another tokenizer"),
    ],
)
def test_data_for_another_use_is_refused(samples: Any, tmp_path: Path, wanted: dict[str, Any], message: str) -> None:
    with pytest.raises(BadInput, match=message):
        samples.make(tmp_path, 5).require(**wanted)


def test_a_folder_without_a_manifest_is_no_dataset(samples: Any, tmp_path: Path) -> None:
    samples.make(tmp_path, 25)
    (tmp_path / "dataset.json").unlink()
    with pytest.raises(BadInput, match=r"is not a dataset: .*dataset.json does not exist.*run the same command again"):
        open_dataset(str(tmp_path))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"format": "other"}, 'its "format" is not "tpu-launch dataset"'),
        ({"version": 1}, "has format version 1, and this program reads version 2"),
        ({"sequence_length": "8"}, "sequence_length: Input should be a valid integer"),
        ({"surprise": 1}, "surprise: Extra inputs are not permitted"),
        ({"sequence_length": 4}, "a shard has rows longer than sequence_length"),
        ({"sequence_length": 16}, "a shard has rows of another length"),
        ({"features": {}}, "no feature input_ids"),
        ({"rows": "class-labelled"}, "no feature label"),
        ({"shards": [{**SHARD, "name": "../x"}]}, r"shards\.0\.name"),
        ({"shards": [{**SHARD, "records": -1}]}, r"shards\.0\.records"),
        ({"shards": [SHARD, SHARD]}, "a shard is listed twice"),
    ],
)
def test_an_impossible_manifest_is_refused(samples: Any, tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    samples.make(tmp_path, 5)
    edit(tmp_path, **changes)
    with pytest.raises(BadInput, match=rf"{tmp_path}/dataset.json .*{message}"):
        open_dataset(str(tmp_path))


def test_an_edited_manifest_is_refused(samples: Any, tmp_path: Path) -> None:
    samples.make(tmp_path, 5)
    path = tmp_path / "dataset.json"
    path.write_text(path.read_text().replace('"sequence_length": 8', '"sequence_length": 9'))
    with pytest.raises(BadInput, match="its hash does not match its content; was it edited"):
        open_dataset(str(tmp_path))


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda path: path.unlink(), r"train-00001.tfrecord is missing: dataset.json lists it with 10 records"),
        (
            lambda path: path.write_bytes(b""),
            r"train-00001.tfrecord is empty, and dataset.json says \d+ bytes \(10 records\)",
        ),
        (lambda path: os.truncate(path, 100), r"train-00001.tfrecord has 100 bytes, and dataset.json says \d+ bytes"),
    ],
)
def test_a_shard_that_is_not_as_listed_is_named(samples: Any, tmp_path: Path, damage: Any, message: str) -> None:
    dataset = samples.make(tmp_path, 25)
    assert set(find_shards(dataset)) == {str(tmp_path / shard.name) for shard in dataset.shards}
    damage(tmp_path / "train-00001.tfrecord")
    with pytest.raises(BadInput, match=message):
        find_shards(dataset)


def test_another_shard_of_the_same_size_is_found_in_a_bucket_without_reading_it(samples: Any, gcs: Any) -> None:
    dataset = samples.make("gs://bucket/data", 25)
    storage.write("gs://bucket/data/train-00001.tfrecord", bytes(dataset.shards[1].bytes))
    gcs.requests.clear()
    why = "gs://bucket/data/train-00001.tfrecord is not the shard that dataset.json lists"
    with pytest.raises(BadInput, match=why):
        find_shards(dataset)
    assert not [path for _, path, _ in gcs.requests if path.startswith("/download/")]


def test_a_run_is_checked_against_its_data_before_anything_is_rented(samples: Any, gcs: Any) -> None:
    dataset = samples.make("gs://bucket/data", 25)
    content = {"model": {"type": "WordLevel", "vocab": {}}, "added_tokens": [], "truncation": None}
    storage.write("gs://bucket/tokenizer/tokenizer.json", json.dumps(content).encode())
    with pytest.raises(BadInput, match="was written with another tokenizer"):
        check_dataset("gs://bucket/data", rows="packed", tokenizer="gs://bucket/tokenizer")
    with pytest.raises(BadInput, match="gs://bucket/nothing is not a tokenizer folder"):
        check_dataset("gs://bucket/data", rows="packed", tokenizer="gs://bucket/nothing")
    hash = tokenizer_hash(json.dumps({**content, "truncation": {"max_length": 5}}).encode())
    body = {**json.loads(storage.read("gs://bucket/data/dataset.json")), "tokenizer_hash": hash}
    manifest = {key: value for key, value in body.items() if key not in ("format", "version", "hash")}
    storage.write("gs://bucket/data/dataset.json", dump_manifest(DatasetManifest.model_validate(manifest)))
    told = check_dataset("gs://bucket/data", rows="packed", tokenizer="gs://bucket/tokenizer", sequence_length=8)
    assert told.shards == dataset.shards
    storage.delete("gs://bucket/data/train-00002.tfrecord")
    with pytest.raises(BadInput, match=r"train-00002.tfrecord is missing"):
        check_dataset("gs://bucket/data", rows="packed", tokenizer="gs://bucket/tokenizer")


def test_a_manifest_is_checked_without_numpy_and_frameworks() -> None:
    """The launcher reads it on the workstation."""
    heavy = ("numpy", "torch", "google.cloud.storage")
    code = f"import sys, training.data.formats.dataset; print([name for name in {heavy} if name in sys.modules])"
    assert run_python("-c", code) == "[]\n"
