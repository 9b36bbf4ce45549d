"""Labelled rows: length buckets, static shapes, nothing lost, and batches that do not depend on the number of hosts."""

import json
import random
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.training.mlm_rows import TOKENS
from tests.training.mutations import flip
from tests.training.test_pack import encode
from training import storage
from training.data.formats.dataset import Dataset, DatasetManifest, dump_manifest, load_manifest
from training.data.formats.verify import problems
from training.data.loading.batches import LabelledBatch, LabelledBatches, labelled_evaluation
from training.data.loading.record_source import HostSlice
from training.data.prepare import labelled_rows
from training.data.prepare.corpus import Corpus
from training.data.prepare.dataset_writer import DatasetPlan
from training.data.prepare.labelled_rows import LabelKind, LabelledText, select_columns, write_labelled_rows
from training.data.sampling.order import batch_of_step
from training.errors import BadInput

LABELS = ["card", "cash", "transfer"]
CLASSES = LabelKind(names=tuple(LABELS))
BUCKETS = (8, 16, 32)
record_counts = st.lists(st.integers(1, 500), min_size=1, max_size=5)


def rows(count: int, seed: int = 0) -> list[LabelledText]:
    """Texts of 3 to 40 tokens, [CLS] number ... [SEP], which are all different; most are short."""
    chance = random.Random(seed)
    texts = []
    for number in range(count):
        size = chance.choice((3, 5, 8, 8, 8, 12, 16, 20, 40))
        ids = [0, 5 + number % 90, *([5 + number // 90] * (size - 3)), 1]
        texts.append((" ".join(map(str, ids)), LABELS[number % 3]))
    return texts


def make(folder: Path | str, count: int, per_shard: int = 10) -> Dataset:
    plan = DatasetPlan("train", 32, "t", vocabulary=100, records_per_shard=per_shard)
    return write_labelled_rows(str(folder), plan, BUCKETS, CLASSES, lambda: rows(count), encode, pad=3).dataset


def batches(dataset: Dataset, *, seed: int = 1, **how: Any) -> LabelledBatches:
    return LabelledBatches(dataset, HostSlice(**{"tokenizer": TOKENS, "global_batch_size": 12, **how}), seed)


def contents(parts: list[LabelledBatch]) -> Counter[tuple[tuple[int, ...], int]]:
    """What rows hold, without padding."""
    counts: Counter[tuple[tuple[int, ...], int]] = Counter()
    for batch in parts:
        rows = zip(batch.input_ids, batch.attention_mask, batch.labels, batch.weights, strict=True)
        for ids, mask, label, weight in rows:
            if weight:
                counts[tuple(ids[mask > 0].tolist()), int(label)] += 1
    return counts


def expected(count: int) -> Counter[tuple[tuple[int, ...], int]]:
    counts: Counter[tuple[tuple[int, ...], int]] = Counter()
    for text, label in rows(count):
        ids = [int(word) for word in text.split()]
        counts[tuple(ids if len(ids) <= 32 else [*ids[:31], ids[-1]]), LABELS.index(label)] += 1
    return counts


@pytest.mark.parametrize(("count", "size", "hosts"), [(100, 12, 1), (100, 12, 3), (7, 12, 2), (1, 4, 4), (100, 120, 2)])
def test_evaluation_covers_each_row_once(tmp_path: Path, count: int, size: int, hosts: int) -> None:
    dataset = make(tmp_path, count)
    parts = [list(labelled_evaluation(dataset, HostSlice(TOKENS, size, host, hosts))) for host in range(hosts)]
    assert len({len(host_batches) for host_batches in parts}) == 1
    together = [part for host_batches in parts for part in host_batches]
    assert contents(together) == expected(count)
    records = sorted(int(record) for part in together for record in part.records if record >= 0)
    assert records == list(range(count))
    assert {len(part.records) for part in together} == {size // hosts}
    assert all((part.attention_mask.sum(axis=1) > 0).all() for part in together)


def test_a_small_bucket_is_joined_to_the_next_longer_one(tmp_path: Path) -> None:
    dataset = make(tmp_path, 100)
    assert batches(dataset, global_batch_size=40).lengths == (8, 32)
    assert batches(dataset, global_batch_size=100).lengths == (32,)
    assert batches(dataset, global_batch_size=200).lengths == (32,)


@pytest.mark.parametrize("batch", [12, 40, 100])
def test_every_row_is_seen_equally_often(tmp_path: Path, batch: int) -> None:
    """After some epochs each row was seen once an epoch, give or take the batches that span two."""
    training_batches, epochs = batches(make(tmp_path, 100), global_batch_size=batch), 12
    steps = -(-100 * epochs // batch)
    seen: Counter[int] = Counter()
    for k in range(steps):
        seen.update(training_batches.batch(k).records.tolist())
    assert len(seen) == 100
    assert max(abs(count - epochs) for count in seen.values()) <= 1


@given(record_counts, st.integers(1, 200), st.integers(0, 2**32), st.integers(0, 300))
def test_the_schedule_gives_each_bucket_batches_in_order(records: list[int], batch: int, seed: int, steps: int) -> None:
    taken: dict[int, list[int]] = {}
    for k in range(steps):
        bucket, number = batch_of_step(tuple(records), batch, seed, k)
        taken.setdefault(bucket, []).append(number)
    for bucket, numbers in taken.items():
        assert numbers == list(range(len(numbers)))
        share = steps * records[bucket] / sum(records)
        assert abs(len(numbers) - share) <= 2 + max(records) / batch + len(records)


@pytest.mark.parametrize("hosts", [2, 3, 4])
def test_batches_do_not_depend_on_the_number_of_hosts_or_on_what_was_read(tmp_path: Path, hosts: int) -> None:
    dataset = make(tmp_path, 300)
    alone = [batches(dataset).batch(k) for k in range(40)]
    several = [batches(dataset, host=host, hosts=hosts) for host in range(hosts)]
    for k in (39, 0, 7, 20):
        parts = [host.batch(k) for host in several]
        for name, values in vars(alone[k]).items():
            assert np.array_equal(np.concatenate([getattr(part, name) for part in parts]), values)


def test_a_damaged_row_is_replaced_alike_on_every_host(tmp_path: Path) -> None:
    dataset = make(tmp_path, 100, per_shard=1000)
    for shard in dataset.shards:
        flip(tmp_path / shard.name, 40)
    with pytest.raises(BadInput, match="record 0 at byte 0"):
        [batches(dataset).batch(k) for k in range(20)]
    alone = batches(dataset, on_corrupt="skip", global_batch_size=40)
    pair = [batches(dataset, on_corrupt="skip", global_batch_size=40, host=host, hosts=2) for host in (0, 1)]
    for k in range(10):
        batch, halves = alone.batch(k), [host.batch(k) for host in pair]
        for name, values in vars(batch).items():
            assert np.array_equal(np.concatenate([getattr(half, name) for half in halves]), values)
    replaced = [record for k in range(10) for record in alone.batch(k).records[alone.batch(k).replaced]]
    assert len(set(replaced)) == 3


def test_writing_again_does_nothing_and_other_labels_are_refused(tmp_path: Path) -> None:
    plan = DatasetPlan("train", 32, "t", vocabulary=100, records_per_shard=10)
    first = {stat.url: storage.read(stat.url) for stat in storage.listing(make(tmp_path, 50).url)}
    again = write_labelled_rows(str(tmp_path), plan, BUCKETS, CLASSES, lambda: 1 / 0, encode, pad=3)
    assert again.reused
    assert {stat.url: storage.read(stat.url) for stat in storage.listing(str(tmp_path))} == first
    two = LabelKind(names=tuple(LABELS[:2]))
    with pytest.raises(BadInput, match="label 'transfer' is not among the 2 labels"):
        write_labelled_rows(str(tmp_path / "x"), plan, BUCKETS, two, lambda: rows(50), encode, pad=3)


def test_rows_without_text_or_label_are_named() -> None:
    assert list(select_columns([{"text": "a", "label": 3}], "text", "label", "f")) == [("a", "3")]
    with pytest.raises(BadInput, match=r"f: row 2 has no 'label', it has: 'text'. Name the columns: --field, --label"):
        list(select_columns([{"text": "a", "label": "x"}, {"text": "a"}], "text", "label", "f"))
    with pytest.raises(BadInput, match="'text' is not text but int"):
        list(select_columns([{"text": 1, "label": "x"}], "text", "label", "f"))


@pytest.mark.parametrize(
    ("label", "message"),
    [
        ("", "f: row 2: label '' is empty"),
        (" \t", r"f: row 2: label ' \\t' is empty"),
        (" a", "f: row 2: label ' a' begins or ends with white space"),
        ("a\n", r"f: row 2: label 'a\\n' begins or ends with white space"),
        ("a\0b", r"f: row 2: label 'a\\x00b' has characters that can't be shown"),
        ("\ud800", r"f: row 2: label '\\ud800' has characters that can't be shown"),
        ([1], r"f: row 2: label \[1\] is neither text nor a number but list"),
        (json.loads("NaN"), "f: row 2: label nan is not a finite number: leave such rows out"),
        ({"a": 1}, "f: row 2: label .* is neither text nor a number but dict"),
    ],
)
def test_what_no_class_is_called_is_refused_with_its_row(label: object, message: str) -> None:
    corpus_rows: list[dict[str, Any]] = [{"text": "a", "label": "x"}, {"text": "b", "label": label}]
    with pytest.raises(BadInput, match=message):
        list(select_columns(corpus_rows, "text", "label", "f"))


@pytest.mark.parametrize(
    ("name", "text", "place"),
    [
        ("a.csv", 'text,label\n"two\nlines",1.5\nplain,high\n', r"a\.csv:4"),
        ("a.jsonl", '{"text": "a", "label": 1}\n{"text": "b", "label": "high"}\n', r"a\.jsonl:2"),
    ],
)
def test_a_label_that_is_no_number_is_named_with_its_place(tmp_path: Path, name: str, text: str, place: str) -> None:
    (tmp_path / name).write_text(text)
    corpus = Corpus(str(tmp_path / name))
    with pytest.raises(BadInput, match=rf"{place}: label 'high' is not a number: name the column with --label"):
        list(select_columns(corpus.rows(), "text", "label", corpus.name, LabelKind("number-labelled")))


VALUES = [(-1.0) ** number * number / 7 for number in range(90)]


def make_numbers(folder: Path, labels: list[Any] = VALUES) -> Dataset:
    plan = DatasetPlan("train", 16, "t", TOKENS.vocabulary, 30)
    texts = [f"0 {5 + number} {'5 ' * (number % 12)}1" for number in range(len(labels))]  # of 3 to 14 tokens
    rows = list(zip(texts, map(str, labels), strict=True))
    return write_labelled_rows(
        str(folder), plan, (8, 16), LabelKind("number-labelled"), lambda: rows, encode, TOKENS.pad
    ).dataset


@pytest.mark.parametrize("hosts", [1, 2])
def test_each_row_keeps_its_number(tmp_path: Path, hosts: int) -> None:
    dataset = make_numbers(tmp_path)
    seen = {}
    for host in range(hosts):
        for batch in labelled_evaluation(dataset, HostSlice(TOKENS, 24, host, hosts)):
            assert batch.labels.dtype == np.float32
            assert not batch.labels[batch.weights == 0].any()
            real = batch.weights > 0
            seen.update(zip((batch.input_ids[real, 1] - 5).tolist(), batch.labels[real].tolist(), strict=True))
    assert seen == {number: float(np.float32(value)) for number, value in enumerate(VALUES)}


@pytest.mark.parametrize("label", ["high", "nan", "inf", "1e60", ""])
def test_a_label_that_is_no_finite_number_is_refused(tmp_path: Path, label: str) -> None:
    with pytest.raises(BadInput, match=r"label '.*' is not a"):
        make_numbers(tmp_path, ["1.5", label])


def test_verify_finds_a_label_that_is_not_finite(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert list(problems(make_numbers(tmp_path / "good"))) == []
    monkeypatch.setattr(labelled_rows, "_parse_number", lambda label, place: float(label))
    [problem] = problems(make_numbers(tmp_path / "bad", ["0.5", "nan"]))
    assert problem.endswith("record 1 has label nan, which is not a finite number")


def test_a_manifest_whose_label_is_of_another_type_is_refused(tmp_path: Path) -> None:
    body = make_numbers(tmp_path).manifest.model_dump()
    body["features"]["label"]["dtype"] = "int32"
    with pytest.raises(BadInput, match="the label of number-labelled rows can't be int32"):
        load_manifest(dump_manifest(DatasetManifest.model_validate(body)), "x")


def test_rows_without_labels_are_not_labelled_rows(samples: Any, tmp_path: Path) -> None:
    with pytest.raises(BadInput, match="holds packed rows, which have no label"):
        LabelledBatches(samples.make(tmp_path / "mlm", 20), HostSlice(TOKENS, 4), 0)
