"""Claims about the bytes of datasets, against bytes worked out by hand; what does not fit is refused with its place."""

import contextlib
import json
import os
import re
import struct
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import google_crc32c
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.processes import run_python
from tests.training.mlm_rows import mlm_batches
from tests.training.mutations import flip
from training import storage
from training.data.formats import dataset as manifests
from training.data.formats import example_codec, recipe_layout, tfrecord, verify
from training.data.formats.dataset import Dataset, DatasetManifest, dump_manifest, find_shards, tokenizer_hash
from training.data.formats.open_dataset import check_dataset, open_dataset
from training.data.formats.tfrecord import Corrupt
from training.data.loading.record_source import open_source
from training.errors import BadInput


def test_a_frame_is_length_crc_data_crc() -> None:
    # crc32c("123456789") = 0xe3069283 (RFC 3720's check value), rotated by 15: 0x2507c60d, plus 0xa282ead8: 0xc78ab0e5
    framed = tfrecord.frame(b"123456789")
    assert framed[:8] == b"\x09" + b"\0" * 7
    assert framed[12:-4] == b"123456789"
    assert framed[-4:] == bytes.fromhex("e5b08ac7")
    assert len(framed) == 9 + tfrecord.HEADER + tfrecord.FOOTER


@given(st.lists(st.binary(max_size=40), max_size=8))
def test_what_is_joined_is_walked(records: list[bytes]) -> None:
    shard = tfrecord.join(records)
    walked = list(tfrecord.walk(shard, "s"))
    assert [data for _, data in walked] == records
    assert tfrecord.index(shard, "s") == [offset for offset, _ in walked] + [len(shard)]


@given(st.lists(st.binary(max_size=20), min_size=1, max_size=5), st.data())
def test_every_flipped_bit_is_found_where_it_is(records: list[bytes], data: st.DataObject) -> None:
    shard = bytearray(tfrecord.join(records))
    position = data.draw(st.integers(0, len(shard) - 1))
    shard[position] ^= 1 << data.draw(st.integers(0, 7))
    starts = tfrecord.index(tfrecord.join(records), "s")
    broken = max(number for number, start in enumerate(starts[:-1]) if start <= position)
    with pytest.raises(tfrecord.Corrupt) as caught:
        list(tfrecord.walk(bytes(shard), "gs://b/s-0"))
    assert (caught.value.record, caught.value.offset) == (broken, starts[broken])
    assert f"gs://b/s-0: record {broken} at byte {starts[broken]}" in str(caught.value)


@given(st.lists(st.binary(max_size=20), min_size=1, max_size=5), st.data())
def test_a_shard_cut_inside_a_record_is_found(records: list[bytes], data: st.DataObject) -> None:
    shard = tfrecord.join(records)
    cut = data.draw(st.integers(0, len(shard) - 1))
    if cut in tfrecord.index(shard, "s"):  # between records only the manifest can tell
        assert len(list(tfrecord.walk(shard[:cut], "s"))) < len(records)
    else:
        with pytest.raises(tfrecord.Corrupt, match="the shard ends inside"):
            list(tfrecord.walk(shard[:cut], "s"))


def test_a_huge_length_is_refused_before_anything_is_allocated() -> None:
    size = struct.pack("<Q", 2**63)
    shard = size + struct.pack("<I", tfrecord.mask(google_crc32c.value(size))) + b"x" * 50
    with pytest.raises(tfrecord.Corrupt, match="ends inside this record"):
        list(tfrecord.walk(shard, "s"))


# {"a": bytes "xy"}: Example{1: Features{1: entry{1: "a", 2: Feature{1: BytesList{1: "xy"}}}}}, a tag is field << 3 | 2
BYTES_EXAMPLE = bytes.fromhex("0a0d 0a0b 0a0161 1206 0a04 0a02 7879")
# {"n": [1, 300, -1]}: Feature{3: Int64List{1: packed 01, ac 02, ff*9 01}}
INTS_EXAMPLE = bytes.fromhex("0a18 0a16 0a016e 1211 1a0f 0a0d 01 ac02 ffffffffffffffffff01")
integers = st.integers(-(2**63), 2**63 - 1)


def test_an_example_is_encoded_byte_for_byte() -> None:
    assert example_codec.encode({"a": b"xy"}) == BYTES_EXAMPLE
    assert example_codec.encode({"n": [1, 300, -1]}) == INTS_EXAMPLE
    assert example_codec.decode(BYTES_EXAMPLE) == {"a": [b"xy"]}
    assert example_codec.decode(INTS_EXAMPLE)["n"].tolist() == [1, 300, -1]


@given(st.dictionaries(st.text(max_size=5), st.binary(max_size=9) | st.lists(integers, max_size=9), max_size=4))
def test_decode_inverts_encode(features: dict[str, bytes | list[int]]) -> None:
    decoded = example_codec.decode(example_codec.encode(features))
    assert set(decoded) == set(features)
    for name, value in features.items():
        assert decoded[name] == [value] if isinstance(value, bytes) else decoded[name].tolist() == value


def test_unpacked_numbers_and_unknown_fields_are_read() -> None:
    one_by_one = bytes.fromhex("1a04 0801 0802".replace(" ", ""))  # Int64List with two unpacked varints
    entry = b"\x0a\x01n\x12" + bytes([len(one_by_one)]) + one_by_one + b"\x3d\0\0\0\0"  # and an unknown fixed32 field 7
    features = b"\x0a" + bytes([len(entry)]) + entry
    assert example_codec.decode(b"\x0a" + bytes([len(features)]) + features)["n"].tolist() == [1, 2]


@given(st.binary(max_size=60))
def test_any_bytes_are_an_example_or_not_but_nothing_else(data: bytes) -> None:
    with contextlib.suppress(example_codec.NotAnExample):
        example_codec.decode(data)


SHARD = {"name": "x", "length": 8, "records": 1, "bytes": 1, "crc32c": 1}


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
    path = tmp_path / "dataset.json"
    body = {**json.loads(path.read_bytes()), **changes}
    body.pop("hash")
    path.write_text(json.dumps({**body, "hash": manifests._hash(body)}))  # as a careful editor does
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


def rows(dataset: Dataset) -> Any:
    return open_source(dataset, vocabulary=100).read(0, dataset.records, dataset.records)["input_ids"]


def test_batches_are_those_of_the_compact_layout(samples: Any, tmp_path: Path, gcs: Any) -> None:
    plain = samples.make(tmp_path, 300, per_shard=70)
    one, two = mlm_batches(plain), mlm_batches(samples.make("gs://bucket/data", 300, per_shard=70, layout="recipe"))
    for k in range(40):
        assert np.array_equal(one.batch(k).input_ids, two.batch(k).input_ids)


def publish(folder: Path, ids: Any, counts: list[int], *, name: str = "dataset", padded: tuple[int, ...] = ()) -> None:
    """Shards as the public recipe's script writes them. `padded`: records whose last two tokens are padding."""
    start = 0
    for number, count in enumerate(counts):
        framed = tfrecord.join(
            example_codec.encode({"input_ids": ids[row], "attention_mask": [1] * 6 + [row not in padded] * 2})
            for row in range(start, start + count)
        )
        (folder / f"{name}-{number}-{count}.tfrecord").write_bytes(framed)
        start += count


@pytest.mark.parametrize("on_corrupt", ["stop", "skip"])
def test_padded_public_rows_are_refused_with_their_place(samples: Any, tmp_path: Path, on_corrupt: str) -> None:
    publish(tmp_path, samples.ids(20), [10, 10], padded=(13,))
    dataset = open_dataset(str(tmp_path))
    message = r"dataset-1-10\.tfrecord: record 3 at byte \d+ has padding \(its attention_mask is not all 1\)"
    with pytest.raises(BadInput, match=message):
        mlm_batches(dataset, on_corrupt=on_corrupt).batch(0)
    assert [re.search(message, problem) is not None for problem in verify.problems(dataset)] == [True]


def test_two_datasets_in_one_folder_of_the_public_layout_are_refused(samples: Any, tmp_path: Path) -> None:
    publish(tmp_path, samples.ids(20), [10, 10], name="train")
    publish(tmp_path, samples.ids(10), [10], name="eval")
    with pytest.raises(BadInput, match=rf"^{tmp_path} has shards of several names \(eval-\*, train-\*\)"):
        open_dataset(str(tmp_path))


def test_a_public_dataset_is_the_same_after_touch_and_another_with_other_ends(samples: Any, tmp_path: Path) -> None:
    publish(tmp_path, samples.ids(20), [10, 10])
    before = open_dataset(str(tmp_path)).hash
    for path in tmp_path.iterdir():
        os.utime(path, (1, 1))
    assert open_dataset(str(tmp_path)).hash == before
    publish(tmp_path, samples.ids(21)[1:], [10, 10])
    assert open_dataset(str(tmp_path)).hash != before


def test_all_read_a_public_shard_whole_once(samples: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    publish(tmp_path, samples.ids(160), [20] * 8)
    dataset = open_dataset(str(tmp_path))
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
    assert sorted(whole) == sorted({str(tmp_path / shard.name) for shard in dataset.shards})


def test_a_folder_in_the_public_layout_is_read_without_a_manifest(samples: Any, tmp_path: Path) -> None:
    ids = samples.ids(130)
    publish(tmp_path, ids, [40, 40, 0, 50])
    (tmp_path / "README.md").write_text("not a shard")
    dataset = open_dataset(str(tmp_path))
    assert (dataset.records, dataset.sequence_length, len(dataset.shards)) == (130, 8, 4)
    dataset.require(rows="packed", tokenizer_hash="any", sequence_length=8)
    assert np.array_equal(rows(dataset), ids)
    seen = np.concatenate([mlm_batches(dataset).batch(k).records for k in range(9)])
    assert sorted(seen[:130].tolist()) == list(range(130))


def test_the_tenth_public_shard_comes_after_the_ninth(samples: Any, tmp_path: Path) -> None:
    publish(tmp_path, samples.ids(24), [2] * 12)
    assert np.array_equal(rows(open_dataset(str(tmp_path))), samples.ids(24))


def test_a_public_shard_that_does_not_hold_what_its_name_says_is_refused(samples: Any, tmp_path: Path) -> None:
    publish(tmp_path, samples.ids(20), [10, 10])
    (tmp_path / "dataset-1-10.tfrecord").rename(tmp_path / "dataset-1-12.tfrecord")
    with pytest.raises(BadInput, match=r"dataset-1-12.tfrecord holds 10 records, and its name says 12"):
        rows(open_dataset(str(tmp_path)))


def test_damage_in_the_public_layout_is_found_or_replaced(samples: Any, tmp_path: Path) -> None:
    publish(tmp_path, samples.ids(20), [20])
    path = tmp_path / "dataset-0-20.tfrecord"
    offsets = tfrecord.index(path.read_bytes(), "s")
    flip(path, offsets[7] + 30)
    dataset = open_dataset(str(tmp_path))
    with pytest.raises(Corrupt, match=rf"dataset-0-20.tfrecord: record 7 at byte {offsets[7]}: its checksum"):
        rows(dataset)
    read_rows = open_source(dataset, on_corrupt="skip").read(0, 20, 20)["input_ids"]
    assert np.array_equal(read_rows, samples.ids(20)[[*range(7), 8, *range(8, 20)]])


@pytest.mark.parametrize("record", [{"input_ids": b"12"}, {"tokens": [1, 2]}])
def test_other_tfrecords_are_not_taken_for_the_public_layout(tmp_path: Path, record: Any) -> None:
    (tmp_path / "dataset-0-1.tfrecord").write_bytes(tfrecord.frame(example_codec.encode(record)))
    with pytest.raises(BadInput, match="its first record has no int64 feature input_ids"):
        open_dataset(str(tmp_path))


def test_public_records_of_other_lengths_and_ids_are_refused(tmp_path: Path) -> None:
    records = [{"input_ids": [5, 6, 7]}, {"input_ids": [5, 6]}, {"input_ids": [5, 6, 700]}]
    (tmp_path / "dataset-0-3.tfrecord").write_bytes(tfrecord.join(map(example_codec.encode, records)))
    source = open_source(open_dataset(str(tmp_path)), vocabulary=100)
    with pytest.raises(BadInput, match=r"record 1 at byte .* has no int64 input_ids of 3 numbers"):
        source.read(1, 2, 3)
    with pytest.raises(BadInput, match="record 2 has token id 700, and the tokenizer has 100 ids"):
        source.read(2, 3, 3)


@pytest.mark.parametrize("options", [{}, {"layout": "recipe"}])
def test_verify_names_everything_that_is_wrong(samples: Any, tmp_path: Path, options: dict[str, str]) -> None:
    dataset = samples.make(tmp_path, 40, **options)
    assert list(verify.problems(dataset)) == []
    names = [shard.name for shard in dataset.shards]
    (tmp_path / names[0]).unlink()
    (tmp_path / names[1]).write_bytes(b"")
    flip(tmp_path / names[2], dataset.shards[2].bytes // 2)
    (tmp_path / "stray.tfrecord").write_bytes(b"")
    problems = "\n".join(verify.problems(dataset))
    assert f"{names[0]} is missing" in problems
    assert f"{names[1]} has 0 bytes" in problems
    assert f"{names[2]}: record " in problems
    assert "stray.tfrecord is not listed" in problems
    assert names[3] not in problems


def test_verify_finds_swapped_records_and_foreign_ids(samples: Any, tmp_path: Path) -> None:
    dataset = samples.make(tmp_path, 10)
    path, size = tmp_path / "train-00000.tfrecord", dataset.shards[0].bytes // 10
    data = path.read_bytes()
    path.write_bytes(data[size : 2 * size] + data[:size] + data[2 * size :])
    [problem] = verify.problems(dataset)
    assert "its checksum (CRC-32C) is" in problem
    assert any("has token id" in problem for problem in verify.problems(dataset, vocabulary=50))


def test_names_of_the_public_layout() -> None:
    assert recipe_layout.shard_name("train", 3, 500) == "train-3-500.tfrecord"
    assert recipe_layout.NAME.match("wikitext-103-12-500.tfrecord")["number"] == "12"
