"""Claims about the public recipe's layout, whose batches are those of the compact one, and about `dataset verify`."""

import os
import re
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.training.damage import flip
from tests.training.mlm_rows import mlm_batches
from training import storage
from training.data.formats import example_codec, recipe_layout, tfrecord, verify
from training.data.formats.dataset import Dataset, open_dataset
from training.data.formats.tfrecord import Corrupt
from training.data.loading.record_source import open_source
from training.errors import BadInput


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
