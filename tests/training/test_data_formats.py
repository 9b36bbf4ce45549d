"""Claims about the bytes of datasets; what does not fit is refused with its place.

What the bytes are is claimed by tests/golden/data.json (test_loading.py) and tests/tensorflow/test_data.py.
"""

import contextlib
import json
import os
import re
import struct
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import google_crc32c
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.training.mlm_rows import make_samples, mlm_batches, sample_ids
from tests.training.mutations import flip
from training import storage
from training.data.formats import dataset as manifests
from training.data.formats import example_codec, tfrecord, verify
from training.data.formats.dataset import Dataset, find_shards, tokenizer_hash
from training.data.formats.open_dataset import check_dataset, open_dataset
from training.data.formats.tfrecord import Corrupt
from training.data.loading.record_source import open_source
from training.errors import BadInput

some_records = st.lists(st.binary(max_size=20), min_size=1, max_size=5)
values = st.binary(max_size=9) | st.lists(st.integers(-(2**63), 2**63 - 1), max_size=9)
SHARD = {"name": "x", "length": 8, "records": 1, "bytes": 1, "crc32c": 1}
NUMBERED = {"input_ids": {"dtype": "uint16", "shape": ["length"]}, "label": {"dtype": "int32", "shape": []}}


@given(st.lists(st.binary(max_size=40), max_size=8))
def test_what_is_joined_is_walked(records: list[bytes]) -> None:
    shard = tfrecord.join(records)
    walked = list(tfrecord.walk(shard, "s"))
    assert [data for _, data in walked] == records
    assert tfrecord.index(shard, "s") == [offset for offset, _ in walked] + [len(shard)]


@given(some_records, st.data())
def test_every_flipped_bit_is_found_where_it_is(records: list[bytes], data: st.DataObject) -> None:
    shard = bytearray(tfrecord.join(records))
    position = data.draw(st.integers(0, len(shard) - 1))
    shard[position] ^= 1 << data.draw(st.integers(0, 7))
    starts = tfrecord.index(tfrecord.join(records), "s")
    broken = max(number for number, start in enumerate(starts[:-1]) if start <= position)
    with pytest.raises(Corrupt, match=f"gs://b/s-0: record {broken} at byte {starts[broken]}") as caught:
        list(tfrecord.walk(bytes(shard), "gs://b/s-0"))
    assert (caught.value.record, caught.value.offset) == (broken, starts[broken])


@given(some_records, st.data())
def test_a_shard_cut_inside_a_record_is_found(records: list[bytes], data: st.DataObject) -> None:
    shard = tfrecord.join(records)
    cut = data.draw(st.integers(0, len(shard) - 1))
    if cut in tfrecord.index(shard, "s"):  # between records only the manifest can tell
        assert len(list(tfrecord.walk(shard[:cut], "s"))) < len(records)
    else:
        with pytest.raises(Corrupt, match="the shard ends inside"):
            list(tfrecord.walk(shard[:cut], "s"))


def test_a_huge_length_is_refused_before_anything_is_allocated() -> None:
    size = struct.pack("<Q", 2**63)
    shard = size + struct.pack("<I", tfrecord.mask(google_crc32c.value(size))) + b"x" * 50
    with pytest.raises(Corrupt, match="ends inside this record"):
        list(tfrecord.walk(shard, "s"))


@given(st.dictionaries(st.text(max_size=5), values, max_size=4))
def test_decode_inverts_encode(features: dict[str, bytes | list[int]]) -> None:
    decoded = example_codec.decode(example_codec.encode(features))
    assert set(decoded) == set(features)
    for name, value in features.items():
        assert decoded[name] == [value] if isinstance(value, bytes) else decoded[name].tolist() == value


def test_unpacked_numbers_and_unknown_fields_are_read() -> None:
    one_by_one = bytes.fromhex("1a04 0801 0802")  # Int64List with two unpacked varints
    entry = b"\x0a\x01n\x12" + bytes([len(one_by_one)]) + one_by_one + b"\x3d\0\0\0\0"  # and an unknown fixed32 field 7
    features = b"\x0a" + bytes([len(entry)]) + entry
    assert example_codec.decode(b"\x0a" + bytes([len(features)]) + features)["n"].tolist() == [1, 2]


@given(st.binary(max_size=60))
def test_any_bytes_are_an_example_or_not_but_nothing_else(data: bytes) -> None:
    with contextlib.suppress(example_codec.NotAnExample):
        example_codec.decode(data)


def test_data_for_another_use_is_refused(tmp_path: Path) -> None:
    dataset = make_samples(tmp_path, 5)
    with pytest.raises(BadInput, match="holds packed rows, and the task needs class-labelled ones"):
        dataset.require(rows="class-labelled")
    with pytest.raises(BadInput, match=r"has rows of 8 tokens, and .* of 4 tokens: write both with the same --seq"):
        dataset.require_like(replace(dataset, manifest=dataset.manifest.model_copy(update={"sequence_length": 4})))


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
        ({"rows": "number-labelled", "features": NUMBERED}, "the label of number-labelled rows can't be int32"),
        ({"shards": [{**SHARD, "name": "../x"}]}, r"shards\.0\.name"),
        ({"shards": [{**SHARD, "records": -1}]}, r"shards\.0\.records"),
        ({"shards": [SHARD, SHARD]}, "a shard is listed twice"),
        ({"hash": "0" * 64}, "its hash does not match its content; was it edited"),
    ],
)
def test_an_impossible_or_edited_manifest_is_refused(tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    make_samples(tmp_path, 5)
    path = tmp_path / "dataset.json"
    body = {**json.loads(path.read_bytes()), **changes}
    right_hash = manifests._hash({key: value for key, value in body.items() if key != "hash"})
    path.write_text(json.dumps({**body, "hash": changes.get("hash", right_hash)}))
    with pytest.raises(BadInput, match=rf"{path} .*{message}"):
        open_dataset(str(tmp_path))


@pytest.mark.parametrize(
    ("name", "damage", "message"),
    [
        ("dataset.json", Path.unlink, r"does not exist.*run the same command again"),
        ("train-00001.tfrecord", Path.unlink, r"is missing: dataset.json lists it with 10 records"),
        ("train-00001.tfrecord", partial(os.truncate, length=0), r"is empty, and dataset.json .* \d+ bytes \(10 rec"),
        ("train-00001.tfrecord", partial(os.truncate, length=100), r"has 100 bytes, and dataset.json says \d+ bytes"),
    ],
)
def test_a_file_that_is_missing_or_short_is_named(
    tmp_path: Path, name: str, damage: Callable[[Path], None], message: str
) -> None:
    make_samples(tmp_path, 25)
    damage(tmp_path / name)
    with pytest.raises(BadInput, match=f"{tmp_path / name} {message}"):
        find_shards(open_dataset(str(tmp_path)))


def test_another_shard_of_the_same_size_is_found_in_a_bucket_without_reading_it(gcs: Any) -> None:
    dataset = make_samples("gs://bucket/data", 25)
    storage.write("gs://bucket/data/train-00001.tfrecord", bytes(dataset.shards[1].bytes))
    gcs.requests.clear()
    with pytest.raises(BadInput, match=r"data/train-00001\.tfrecord is not the shard that dataset\.json lists"):
        find_shards(dataset)
    assert not [path for _, path, _ in gcs.requests if path.startswith("/download/")]


def test_a_run_is_checked_against_its_data_before_anything_is_rented(gcs: Any) -> None:
    content = {"model": {"type": "WordLevel", "vocab": {}}, "added_tokens": [], "truncation": None}
    storage.write("gs://bucket/tokenizer/tokenizer.json", json.dumps(content).encode())
    right = tokenizer_hash(json.dumps({**content, "truncation": {"max_length": 5}}).encode())
    dataset = make_samples("gs://bucket/data", 25, tokenizer_hash=right)
    check = partial(check_dataset, rows="packed", tokenizer="gs://bucket/tokenizer")
    assert check(dataset.url).shards == dataset.shards
    with pytest.raises(BadInput, match="gs://bucket/nothing is not a tokenizer folder"):
        check(dataset.url, tokenizer="gs://bucket/nothing")
    with pytest.raises(BadInput, match="was written with another tokenizer"):
        check(make_samples("gs://bucket/others", 25).url)
    storage.delete("gs://bucket/data/train-00002.tfrecord")
    with pytest.raises(BadInput, match=r"train-00002.tfrecord is missing"):
        check(dataset.url)


def read_all(dataset: Dataset, **options: Any) -> Any:
    return open_source(dataset, vocabulary=100, **options).read(0, dataset.records, dataset.records)["input_ids"]


def row(ids: Any, *, padding: int = 0) -> bytes:
    """A record as the public recipe's script writes them."""
    return example_codec.encode({"input_ids": ids, "attention_mask": [1] * (8 - padding) + [0] * padding})


def publish(folder: Path, ids: Any, *counts: int, name: str = "wikitext-103") -> Dataset:
    """Writes shards as the public recipe's script does."""
    for number, part in enumerate(np.split(ids, np.cumsum(counts)[:-1])):
        (folder / f"{name}-{number}-{len(part)}.tfrecord").write_bytes(tfrecord.join(map(row, part)))
    return open_dataset(str(folder))


GOOD = row([5] * 8)


@pytest.mark.parametrize(
    ("files", "message"),
    [
        ({"train-0-1": [GOOD], "eval-0-1": [GOOD]}, r" has shards of several names \(eval-\*, train-\*\)"),
        ({"a-0-1": [GOOD], "a-00-2": [GOOD, GOOD]}, " has a-0-1.tfrecord and a-00-2.tfrecord, shards of one number"),
        ({"data-0-1": b"\x1f\x8b\x08"}, r"/data-0-1.tfrecord is compressed \(gzip\)"),
        ({"data-0-1": [example_codec.encode({"a": b"1" * 0x8B08})]}, ".*first record has no int64 feature"),
        ({"data-0-2": [GOOD]}, "/data-0-2.tfrecord holds 1 records, and its name says 2"),
        ({"data-0-1": [example_codec.encode({"input_ids": b"12"})]}, ".*first record has no int64 feature input_ids"),
        ({"data-0-1": [example_codec.encode({"tokens": [1, 2]})]}, ".*first record has no int64 feature input_ids"),
        ({"data-0-2": [GOOD, row([5, 6])]}, r"/data-0-2.* record 1 at byte \d+ has no int64 input_ids of 8 numbers"),
        ({"my data-0-1": [GOOD]}, "/my data-0-1.tfrecord: a shard's name has letters, digits"),
        ({"data-0-1": [row([-7] + [5] * 7)]}, "/data-0-1.* record 0 has token id -7, and the tokenizer has 100 ids"),
        ({"data-0-2": [GOOD, row([700] * 8)]}, "/data-0-2.* record 1 has token id 700, and the tokenizer has 100 ids"),
    ],
)
def test_what_is_not_in_the_public_layout_is_refused(tmp_path: Path, files: dict[str, Any], message: str) -> None:
    for name, records in files.items():
        (tmp_path / f"{name}.tfrecord").write_bytes(records if isinstance(records, bytes) else tfrecord.join(records))
    with pytest.raises(BadInput, match=f"^{tmp_path}{message}"):
        read_all(open_dataset(str(tmp_path)))


@pytest.mark.parametrize("on_corrupt", ["stop", "skip"])
def test_padded_public_rows_are_refused_with_their_place(tmp_path: Path, on_corrupt: str) -> None:
    (tmp_path / "data-0-2.tfrecord").write_bytes(tfrecord.join([GOOD, row([5] * 8, padding=2)]))
    dataset = open_dataset(str(tmp_path))
    message = r"data-0-2\.tfrecord: record 1 at byte \d+ has padding \(its attention_mask is not all 1\)"
    with pytest.raises(BadInput, match=message):
        read_all(dataset, on_corrupt=on_corrupt)
    assert [re.search(message, problem) is not None for problem in verify.problems(dataset)] == [True]


def test_a_public_dataset_is_the_same_after_touch_and_another_with_other_ends(tmp_path: Path) -> None:
    before = publish(tmp_path, sample_ids(20), 10, 10).hash
    for path in tmp_path.iterdir():
        os.utime(path, (1, 1))
    assert open_dataset(str(tmp_path)).hash == before
    assert publish(tmp_path, sample_ids(21)[1:], 10, 10).hash != before


def test_all_read_a_public_shard_whole_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    dataset = publish(tmp_path, sample_ids(160), *[20] * 8)
    whole: list[str] = []
    read = storage.read

    def slow_read(url: str, start: int = 0, end: int | None = None, **options: Any) -> bytes:
        if end is not None and start == 0 and end == os.path.getsize(url):
            whole.append(url)
            time.sleep(0.02)  # the others come meanwhile
        return read(url, start, end, **options)

    monkeypatch.setattr(storage, "read", slow_read)
    sources = [open_source(dataset, vocabulary=100) for _ in range(2)]
    with ThreadPoolExecutor(16) as threads:
        list(threads.map(lambda number: sources[number % 2].read(number * 10, number * 10 + 10, 10), range(16)))
    assert sorted(whole) == sorted(map(dataset.shard_url, dataset.shards))


def test_a_folder_in_the_public_layout_is_read_without_a_manifest(tmp_path: Path) -> None:
    ids, counts = sample_ids(130), (40, 40, 0, *[2] * 8, 34)  # the tenth comes after the ninth
    (tmp_path / "README.md").write_text("not a shard")
    dataset = publish(tmp_path, ids, *counts)
    assert (dataset.records, dataset.sequence_length, len(dataset.shards)) == (130, 8, 12)
    dataset.require(rows="packed", tokenizer_hash="any")
    assert np.array_equal(read_all(dataset), ids)
    seen = np.concatenate([mlm_batches(dataset).batch(k).records for k in range(9)])
    assert sorted(seen[:130].tolist()) == list(range(130))


def test_damage_in_the_public_layout_is_found_or_replaced(tmp_path: Path) -> None:
    dataset = publish(tmp_path, sample_ids(20), 20)
    [path] = tmp_path.iterdir()
    offsets = tfrecord.index(path.read_bytes(), "s")
    flip(path, offsets[7] + 30)
    dataset = open_dataset(str(tmp_path))
    with pytest.raises(Corrupt, match=rf"{path}: record 7 at byte {offsets[7]}: its checksum"):
        read_all(dataset)
    assert np.array_equal(read_all(dataset, on_corrupt="skip"), sample_ids(20)[[*range(7), 8, *range(8, 20)]])


@pytest.mark.parametrize("layout", ["compact", "recipe"])
def test_verify_names_everything_that_is_wrong(tmp_path: Path, layout: str) -> None:
    dataset = make_samples(tmp_path, 50, layout=layout)
    assert list(verify.problems(dataset)) == []
    names = [shard.name for shard in dataset.shards]
    (tmp_path / names[0]).unlink()
    (tmp_path / names[1]).write_bytes(b"")
    flip(tmp_path / names[2], dataset.shards[2].bytes // 2)
    (tmp_path / names[4]).write_bytes((tmp_path / names[3]).read_bytes())
    (tmp_path / "stray.tfrecord").write_bytes(b"")
    problems = "\n".join(verify.problems(dataset))
    wrong = ("{} is missing", "{} has 0 bytes", "{}: record ", "", "{}: its checksum (CRC-32C) is ")
    assert all(each.format(name) in problems for each, name in zip(wrong, names, strict=False)), problems
    assert "stray.tfrecord is not listed" in problems
    assert names[3] not in problems
    fewer = replace(dataset, manifest=dataset.manifest.model_copy(update={"vocabulary": 50}))
    assert "and the tokenizer has 50 ids" in "\n".join(verify.problems(fewer))


def test_verify_finds_swapped_records_and_foreign_ids(tmp_path: Path) -> None:
    dataset = make_samples(tmp_path, 10)
    path, size = tmp_path / "train-00000.tfrecord", dataset.shards[0].bytes // 10
    data = path.read_bytes()
    path.write_bytes(data[size : 2 * size] + data[:size] + data[2 * size :])
    [problem] = verify.problems(dataset)
    assert "its checksum (CRC-32C) is" in problem
    assert any("has token id" in problem for problem in verify.problems(dataset, vocabulary=50))
