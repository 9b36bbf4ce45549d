"""Reading gives the right rows or the right message, never a wrong row; batches are those of tests/golden/data.json."""

import json
import threading
import time
from collections.abc import Iterable, Iterator
from concurrent.futures import CancelledError
from dataclasses import replace
from functools import reduce
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import click
import google_crc32c
import numpy as np
import pytest

from tests.packed_datasets import pack_rows
from tests.training.mlm_rows import TOKENS, make_samples, mlm_batches, sample_ids, unmask
from tests.training.mutations import flip
from tests.training.test_pack import encode
from training import storage
from training.data.formats import example_codec, tfrecord
from training.data.formats.dataset import Dataset
from training.data.formats.tfrecord import Corrupt
from training.data.loading import batches, preview
from training.data.loading.batches import LabelledBatches, MlmBatches, labelled_evaluation, mlm_evaluation
from training.data.loading.reader import DaemonPool
from training.data.loading.record_source import FixedShards, HostSlice
from training.data.prepare.dataset_writer import DatasetPlan
from training.data.prepare.labelled_rows import LabelKind, write_labelled_rows
from training.data.sampling import order
from training.data.sampling.masking import Masking, SpecialTokens
from training.errors import BadInput

PIECES = ["[CLS]", "[SEP]", "<unk>", "<pad>", "[MASK]", "▁the", "▁cat", "s", "▁sat", "▁dog"]


def rows(dataset: Dataset, **options: Any) -> Any:
    return FixedShards(dataset, **options).read(0, dataset.records, dataset.records)["input_ids"]


def size_of(dataset: Dataset) -> int:
    return dataset.shards[0].bytes // dataset.shards[0].records


def test_any_range_of_records_is_read_across_shards(tmp_path: Path) -> None:
    dataset, expected = make_samples(tmp_path, 35), sample_ids(35)
    source = FixedShards(dataset)
    for first in range(35):
        for last in range(first + 1, 36):
            assert np.array_equal(source.read(first, last, 64)["input_ids"], expected[first:last])


def test_wide_ids_are_kept(tmp_path: Path) -> None:
    ids = np.arange(99_920, 100_000, dtype=np.int32).reshape(10, 8)
    dataset = pack_rows(tmp_path, DatasetPlan("train", 8, "t", 100_000, records_per_shard=4), ids)
    assert dataset.manifest.features["input_ids"].dtype == "int32"
    assert np.array_equal(rows(dataset), ids)


def test_every_flipped_byte_is_found_with_shard_record_and_offset(tmp_path: Path) -> None:
    dataset, shard = make_samples(tmp_path, 25), tmp_path / "train-00001.tfrecord"
    size = size_of(dataset)
    for offset in range(10 * size):
        flip(shard, offset, 1 << offset % 8)
        place = f"{shard}: record {offset // size} at byte {offset // size * size}: "
        with pytest.raises(Corrupt, match=place) as caught:
            rows(dataset)
        assert caught.value.exit_code == 2
        flip(shard, offset, 1 << offset % 8)
    assert np.array_equal(rows(dataset), sample_ids(25))


def test_a_replaced_record_of_an_evaluation_counts_once_on_any_number_of_hosts(tmp_path: Path) -> None:
    dataset = make_samples(tmp_path, 150, per_shard=50)
    flip(tmp_path / "train-00001.tfrecord", 20)  # record 50
    for hosts in (1, 2, 4):
        slices = [HostSlice(TOKENS, 8, host, hosts, on_corrupt="skip") for host in range(hosts)]
        counts = [sum(int(batch.replaced.sum()) for batch in mlm_evaluation(dataset, how, Masking())) for how in slices]
        assert sum(counts) == 1


def test_a_dataset_without_a_good_record_stops_every_batch_and_does_not_advise_to_skip(tmp_path: Path) -> None:
    dataset = make_samples(tmp_path, 5)
    (tmp_path / "train-00000.tfrecord").write_bytes(bytes(dataset.shards[0].bytes))
    for on_corrupt, more in (("stop", ""), ("skip", ".* skip does not help, because the dataset has no good record")):
        training_batches = mlm_batches(dataset, on_corrupt=on_corrupt)
        for _ in range(3):
            with pytest.raises(Corrupt, match=f"record 0 at byte 0{more}"):  # the first of five
                training_batches.batch(0)


def test_ids_that_the_tokenizer_does_not_have_are_refused(tmp_path: Path) -> None:
    dataset = make_samples(tmp_path, 25)
    with pytest.raises(
        BadInput, match=r"train-0000\d.tfrecord: record \d has token id \d\d, and the tokenizer has 50 "
    ):
        rows(dataset, vocabulary=50)
    with pytest.raises(BadInput, match="was written with a tokenizer of 100 ids, and the given one has 50"):
        mlm_batches(dataset, tokenizer=SpecialTokens(4, 3, frozenset(range(5)), 50))


def test_a_valid_record_of_another_layout_is_refused(tmp_path: Path) -> None:
    """Right framing and right CRC, but the numbers would stand elsewhere."""
    dataset = make_samples(tmp_path, 1)
    framed = tfrecord.frame(example_codec.encode({"input_idz": bytes(16)}))
    assert len(framed) == dataset.shards[0].bytes
    (tmp_path / "train-00000.tfrecord").write_bytes(framed)
    with pytest.raises(Corrupt):
        rows(dataset)


@pytest.mark.parametrize("place", ["local", "gs://bucket/data"])
def test_a_shard_replaced_or_removed_during_a_run_stops_it(tmp_path: Path, gcs: Any, place: str) -> None:
    url = f"{tmp_path if place == 'local' else place}/train-00001.tfrecord"
    dataset = make_samples(url.rpartition("/")[0], 25)
    before, between = mlm_batches(dataset), mlm_batches(dataset)
    time.sleep(0.01)
    storage.write(url, storage.read(url))
    changed = rf"{url} was (changed|replaced) while it was in use.*\(while reading record \d+ of this shard\)"
    with pytest.raises(BadInput, match=changed):
        before.batch(0)
    storage.delete(url)
    with pytest.raises(BadInput, match=f"{url} does not exist"):
        between.batch(0)


def downloads(gcs: Any) -> list[str]:
    """The ranges of bytes that were read from the bucket."""
    return [byte_range for _, path, byte_range in gcs.requests if path.startswith("/download/")]


def test_neighbouring_blocks_are_read_in_large_requests(gcs: Any) -> None:
    training_batches = mlm_batches(make_samples("gs://bucket/data", 5000, per_shard=5000))
    gcs.requests.clear()
    [training_batches.batch(k) for k in range(0, 300, 60)]
    assert len(downloads(gcs)) == 1


def test_a_host_reads_only_what_its_rows_need(gcs: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"MIN_BLOCK": 4, "WINDOW_BLOCKS": 64, "BLOCK_BYTES": 430}.items():
        monkeypatch.setattr(order, name, value)  # several windows: what fits into one is read whole, once
    dataset = make_samples("gs://bucket/data", 2000, per_shard=500)
    gcs.requests.clear()
    training_batches = mlm_batches(dataset, global_batch_size=64, host=1, hosts=4)
    [training_batches.batch(k) for k in range(2000 // 64)]
    training_batches.close()
    ranges = [byte_range[6:].split("-") for byte_range in downloads(gcs)]
    epoch = ranges[: len(ranges) // 2 + 1]  # the next epoch was begun
    assert sum(int(end) - int(start) + 1 for start, end in epoch) < 0.5 * 2000 * size_of(dataset)


def test_a_dataset_that_fits_into_one_window_is_read_once(gcs: Any) -> None:
    dataset, expected = make_samples("gs://bucket/data", 300, per_shard=100), sample_ids(300)
    training_batches = mlm_batches(dataset)
    training_batches.batch(0)
    gcs.requests.clear()
    for k in range(100):
        batch = training_batches.batch(k)
        assert np.array_equal(unmask(batch), expected[batch.records])
    assert not downloads(gcs)


@pytest.mark.parametrize(
    ("bad", "expected"),
    [
        ({5}, [0, 1, 2, 3, 4, 6, 6, 7, 8, 9, 10]),
        ({7}, [0, 1, 2, 3, 4, 5, 6, 4, 8, 9, 10]),  # round the block
        ({8, 9}, [0, 1, 2, 3, 4, 5, 6, 7, 10, 10, 10]),
        ({0, 1, 2, 3}, [4, 5, 6, 7, 4, 5, 6, 7, 8, 9, 10]),  # the next block
        ({0, 1, 2, 3, 4, 6}, [5, 5, 7, 7, 5, 5, 7, 7, 8, 9, 10]),  # its good ones
        ({0, 1, 2, 3, 4, 5, 6, 7}, [8, 9, 10, 8, 8, 9, 10, 8, 8, 9, 10]),  # a shorter one, two blocks on
        ({8, 9, 10}, [0, 1, 2, 3, 4, 5, 6, 7, 0, 1, 2]),  # round the dataset
        ({4, 5, 6, 7, 8, 9, 10, 0}, [1, 1, 2, 3, 1, 1, 2, 3, 1, 1, 2]),
    ],
)
def test_bad_records_of_blocks_of_four_are_replaced(bad: set[int], expected: list[int]) -> None:
    """The same however many blocks are read together."""

    def load(first: int, last: int) -> Any:
        errors = {record - first: BadInput(str(record)) for record in bad if first <= record < last}
        numbers = np.arange(first, last)[:, None]
        return {"input_ids": numbers, "replaced": np.zeros_like(numbers)}, errors

    source: Any = object.__new__(FixedShards)
    source.records, source.on_corrupt, source.load = 11, "skip", load
    for length in (4, 8, 12):
        replaced_rows = [source.read(first, min(first + length, 11), 4) for first in range(0, 11, length)]
        assert np.concatenate([arrays["input_ids"] for arrays in replaced_rows])[:, 0].tolist() == expected
        assert set(np.flatnonzero(np.concatenate([arrays["replaced"] for arrays in replaced_rows]))) == bad


def test_closing_a_reader_cancels_the_requests_that_have_not_begun() -> None:
    workers, begun, release = DaemonPool(1, "reader"), threading.Event(), threading.Event()
    first = workers.submit(lambda: (begun.set(), release.wait(10)))
    second = workers.submit(lambda: None)
    assert begun.wait(10)
    workers.close()
    release.set()
    assert first.result(10) == (None, True)
    (late := DaemonPool(0, "reader"))._tasks = Mock(put=lambda _: setattr(late, "_is_closed", True))
    for not_begun in (second, workers.submit(lambda: None), late.submit(lambda: None)):
        with pytest.raises(CancelledError):
            not_begun.result(10)


def tokenizer(pieces: list[str], kind: str) -> bytes:
    added = [{"id": number, "content": pieces[number], "special": True} for number in range(5)]
    scores, numbers = [[piece, 0.0] for piece in pieces], {piece: number for number, piece in enumerate(pieces)}
    model = {"type": kind, "continuing_subword_prefix": "##", "vocab": scores if kind == "Unigram" else numbers}
    return json.dumps({"added_tokens": added, "model": model}).encode()


def test_hidden_replaced_and_kept_words_are_told_apart() -> None:
    ids, positions, labels = (np.array([row], np.int32) for row in ([0, 5, 4, 7, 9, 5, 1], [2, 4, 5, 0], [6, 8, 5, 0]))
    batch = batches.MlmBatch(ids, positions, labels, np.float32([[1, 1, 1, 0]]), np.array([42]), np.array([False]))
    summary, text = preview.show_masked(batch, TOKENS, preview.pieces(tokenizer(PIECES, "Unigram")), 0)
    assert summary == "7 tokens, 3 to predict (1 hidden, 1 replaced, 1 left)"
    assert click.unstyle(text) == " [CLS] the [cat]s [sat~dog] [the=] [SEP]"


def test_wordpieces_are_joined() -> None:
    piece = preview.pieces(tokenizer([*PIECES[:5], "play", "##ing"], "WordPiece"))
    assert "".join(space + word for space, word in map(piece, (0, 5, 6, 5, 1, 99))) == " [CLS] playing play [SEP] [99]"


@pytest.mark.parametrize(
    ("label", "names", "shown"), [(np.int32(1), ["dog", "cat"], "cat"), (np.float32(-2.5), [], "-2.5")]
)
def test_a_labelled_row_is_shown_without_padding(label: Any, names: list[str], shown: str) -> None:
    ids, one = np.array([[0, 5, 6, 1, 3, 3]], np.int32), np.ones(1, np.float32)
    batch = batches.LabelledBatch(ids, np.int32(ids != 3), np.array([label]), one, np.array([7]), np.array([False]))
    summary, text = preview.show_labelled(batch, TOKENS, preview.pieces(tokenizer(PIECES, "Unigram")), names, 0)
    assert (summary, click.unstyle(text)) == (f"{shown}, 4 tokens", " [CLS] the cat [SEP]")


GOLDEN: dict[str, dict[str, str]] = json.loads((Path(__file__).parents[1] / "golden" / "data.json").read_text())
GOLDEN_TOKENS = SpecialTokens(mask=4, pad=3, special=frozenset(range(5)), vocabulary=300)
GOLDEN_PLAN = DatasetPlan("train", 16, "t", GOLDEN_TOKENS.vocabulary, 250)
RECORDS, SEED, STEPS = 600, 7, 4
MASKING = Masking(20)
SLICES = {"alone": HostSlice(GOLDEN_TOKENS, 24), "second of two": HostSlice(GOLDEN_TOKENS, 24, 1, 2)}


def make_masked(folder: Path, layout: Any) -> Dataset:
    """A dataset for masked language modelling, with some special tokens in its rows."""
    rows = np.random.default_rng(0).integers(2, GOLDEN_TOKENS.vocabulary, (RECORDS, GOLDEN_PLAN.length))
    return pack_rows(folder, replace(GOLDEN_PLAN, layout=layout), rows.astype(np.int32))


def make_labelled(folder: Path) -> Dataset:
    """Texts of 3 to 20 tokens in buckets of 4, 8 and 16."""
    random, names = np.random.default_rng(1), ("card", "cash", "transfer")
    lengths = (random.integers(3, 21) for _ in range(RECORDS))
    texts = [random.integers(5, GOLDEN_TOKENS.vocabulary, length).astype(np.int32) for length in lengths]
    rows = [(" ".join(map(str, text)), names[len(text) % 3]) for text in texts]
    plan, kind = replace(GOLDEN_PLAN, records_per_shard=100), LabelKind(names=names)
    return write_labelled_rows(str(folder), plan, (4, 8, 16), kind, lambda: rows, encode, GOLDEN_TOKENS.pad).dataset


def checksum(parts: Iterable[bytes]) -> str:
    return f"{reduce(google_crc32c.extend, parts, 0):08x}"


def arrays(batches: Iterable[Any]) -> Iterator[bytes]:
    """Yields name, type, shape and bytes of all arrays of all batches, without `replaced`."""
    for batch in batches:
        for name in sorted(set(vars(batch)) - {"replaced"}):
            values = np.ascontiguousarray(getattr(batch, name))
            yield f"{name} {values.dtype} {values.shape}".encode() + values.tobytes()


@pytest.mark.parametrize("content", ["masked, compact", "masked, recipe", "labelled"])
def test_datasets_and_batches_are_the_golden_ones(content: str, tmp_path: Path) -> None:
    labelled = content == "labelled"
    dataset = make_labelled(tmp_path) if labelled else make_masked(tmp_path, content.removeprefix("masked, "))
    files = sorted(path for path in tmp_path.iterdir() if path.is_file())
    checksums = {"files": checksum(path.name.encode() + path.read_bytes() for path in files)}
    for name, how in SLICES.items():
        batches = LabelledBatches(dataset, how, SEED) if labelled else MlmBatches(dataset, how, MASKING, SEED)
        evaluation = labelled_evaluation(dataset, how) if labelled else mlm_evaluation(dataset, how, MASKING)
        for kind, first in (("batches", 0), ("far batches", 10**6)):
            checksums[f"{kind}, {name}"] = checksum(arrays(map(batches.batch, range(first, first + STEPS))))
        checksums[f"evaluation, {name}"] = checksum(arrays(evaluation))
        batches.close()
    assert checksums == GOLDEN[content]
