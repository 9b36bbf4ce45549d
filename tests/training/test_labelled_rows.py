"""Labelled rows: length buckets, static shapes, nothing lost, and batches that do not depend on the number of hosts."""

import random
from collections import Counter
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.training.mlm_rows import TOKENS, make_samples, require_alike_on_hosts
from tests.training.mutations import flip
from tests.training.test_pack import encode
from training.data.formats.dataset import Dataset
from training.data.formats.verify import problems
from training.data.loading.batches import LabelledBatch, LabelledBatches, labelled_evaluation
from training.data.loading.record_source import HostSlice
from training.data.prepare import labelled_rows
from training.data.prepare.corpus import Corpus
from training.data.prepare.dataset_writer import DatasetPlan, WrittenDataset
from training.data.prepare.labelled_rows import LabelKind, LabelledText, select_columns, write_labelled_rows
from training.data.sampling.order import batch_of_step
from training.errors import BadInput

LABELS = ("card", "cash", "transfer")
CLASSES, NUMBERS = LabelKind(names=LABELS), LabelKind("number-labelled")
BUCKETS = (8, 16, 32)
VALUES = [(-1.0) ** number * number / 7 for number in range(90)]
record_counts = st.lists(st.integers(1, 500), min_size=1, max_size=5)


def rows(count: int) -> list[LabelledText]:
    """Texts of 3 to 40 tokens, [CLS] number ... [SEP], which are all different; most are short."""
    chance = random.Random(0)
    texts = []
    for number in range(count):
        size = chance.choice((3, 5, 8, 8, 8, 12, 16, 20, 40))
        ids = [0, 5 + number % 90, *([5 + number // 90] * (size - 3)), 1]
        texts.append((" ".join(map(str, ids)), LABELS[number % 3]))
    return texts


def write(
    folder: Path | str,
    labelled: list[LabelledText],
    kind: LabelKind = CLASSES,
    lengths: Sequence[int] = BUCKETS,
    per_shard: int = 10,
) -> WrittenDataset:
    plan = DatasetPlan("train", lengths[-1], "t", TOKENS.vocabulary, per_shard)
    return write_labelled_rows(str(folder), plan, lengths, kind, lambda: labelled, encode, TOKENS.pad)


def make(folder: Path | str, count: int, per_shard: int = 10) -> Dataset:
    return write(folder, rows(count), per_shard=per_shard).dataset


def batches(dataset: Dataset, **how: Any) -> LabelledBatches:
    return LabelledBatches(dataset, HostSlice(**{"tokenizer": TOKENS, "global_batch_size": 12, **how}), seed=1)


def contents(parts: list[LabelledBatch]) -> Counter[tuple[tuple[int, ...], int]]:
    """What rows hold, without padding."""
    return Counter(
        (tuple(ids[mask > 0].tolist()), int(label))
        for batch in parts
        for ids, mask, label, weight in zip(
            batch.input_ids, batch.attention_mask, batch.labels, batch.weights, strict=True
        )
        if weight
    )


def expected(count: int) -> Counter[tuple[tuple[int, ...], int]]:
    ids = [([int(word) for word in text.split()], LABELS.index(label)) for text, label in rows(count)]
    return Counter((tuple(each if len(each) <= 32 else [*each[:31], each[-1]]), label) for each, label in ids)


@pytest.mark.parametrize(("count", "size", "hosts"), [(100, 12, 1), (100, 12, 3), (7, 12, 2), (1, 4, 4), (100, 120, 2)])
def test_evaluation_covers_each_row_once(tmp_path: Path, count: int, size: int, hosts: int) -> None:
    dataset = make(tmp_path, count)
    parts = [list(labelled_evaluation(dataset, HostSlice(TOKENS, size, host, hosts))) for host in range(hosts)]
    assert len({len(host_batches) for host_batches in parts}) == 1
    together = [part for host_batches in parts for part in host_batches]
    assert contents(together) == expected(count)
    assert sorted(record for part in together for record in part.records if record >= 0) == list(range(count))
    assert {len(part.records) for part in together} == {size // hosts}
    assert all((part.attention_mask.sum(axis=1) > 0).all() for part in together)


def test_a_small_bucket_is_joined_to_the_next_longer_one(tmp_path: Path) -> None:
    dataset = make(tmp_path, 100)
    assert [batches(dataset, global_batch_size=size).lengths for size in (40, 100, 200)] == [(8, 32), (32,), (32,)]


@pytest.mark.parametrize("batch", [12, 40, 100])
def test_every_row_is_seen_equally_often(tmp_path: Path, batch: int) -> None:
    """After some epochs each row was seen once an epoch, give or take the batches that span two."""
    training_batches, epochs = batches(make(tmp_path, 100), global_batch_size=batch), 12
    seen = Counter(record for k in range(-(-100 * epochs // batch)) for record in training_batches.batch(k).records)
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
        assert abs(len(numbers) - steps * records[bucket] / sum(records)) <= 2 + max(records) / batch + len(records)


@pytest.mark.parametrize("hosts", [2, 3, 4])
def test_batches_do_not_depend_on_hosts_or_on_what_was_read_even_if_damaged(tmp_path: Path, hosts: int) -> None:
    dataset = make(tmp_path, 100, per_shard=1000)
    for shard in dataset.shards:
        flip(tmp_path / shard.name, 40)
    with pytest.raises(BadInput, match="record 0 at byte 0"):
        [batches(dataset).batch(k) for k in range(20)]
    skipping = partial(batches, dataset, on_corrupt="skip")
    require_alike_on_hosts(skipping, hosts, (39, 0, 7, 20))
    replaced = {record for batch in map(skipping().batch, range(20)) for record in batch.records[batch.replaced]}
    assert len(replaced) == 3


def test_writing_again_does_nothing(tmp_path: Path) -> None:
    make(tmp_path, 50)
    first = {path: path.read_bytes() for path in tmp_path.iterdir()}
    assert write(tmp_path, cast(Any, None)).reused, "and no row is read"
    assert {path: path.read_bytes() for path in tmp_path.iterdir()} == first


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({}, "has no 'label', it has: 'text'. Name the columns: --field, --label"),
        ({"label": "x", "text": 1}, ": 'text' is not text but int"),
        ({"label": ""}, ": label '' is empty"),
        ({"label": " \t"}, r": label ' \\t' is empty"),
        ({"label": " a"}, ": label ' a' begins or ends with white space"),
        ({"label": "a\n"}, r": label 'a\\n' begins or ends with white space"),
        ({"label": "a\0b"}, r": label 'a\\x00b' has characters that can't be shown"),
        ({"label": "\ud800"}, r": label '\\ud800' has characters that can't be shown"),
        ({"label": [1]}, r": label \[1\] is neither text nor a number but list"),
        ({"label": float("nan")}, ": label nan is not a finite number: leave such rows out"),
        ({"label": {"a": 1}}, ": label .* is neither text nor a number but dict"),
    ],
)
def test_rows_without_a_text_and_a_printable_label_are_refused(row: dict[str, Any], message: str) -> None:
    selected = select_columns([{"text": "a", "label": 3}, {"text": "b", **row}], "text", "label", "f")
    assert next(selected) == ("a", "3")
    with pytest.raises(BadInput, match=f"^f: row 2 ?{message}"):
        next(selected)


def test_an_integer_is_a_number_where_the_corpus_numbers_its_classes() -> None:
    kind, rows = LabelKind(names=("0", "1"), numbers=("1", "0")), [{"text": "a", "label": x} for x in (0, 1, "1", -1)]
    selected = select_columns(rows, "text", "label", "f", kind)
    assert [next(selected)[1] for _ in range(3)] == ["1", "0", "1"]
    with pytest.raises(BadInput, match="f: row 4: label -1 is no class's number, 0 to 1"):
        next(selected)


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("a.csv", 'text,label\n"two\nlines",1.5\nplain,high\n', r"a\.csv:4: label 'high' is not a number: name the"),
        ("a.jsonl", '{"text": "a", "label": 1}\n{"text": "b", "label": "high"}\n', r"a\.jsonl:2: label 'high' is not"),
        ("a.csv", "text,label\na,nan\n", r"a\.csv:2: label 'nan' is not a finite float32"),
        ("a.csv", "text,label\na,-inf\n", r"a\.csv:2: label '-inf' is not a finite float32"),
        ("a.csv", "text,label\na,1e60\n", r"a\.csv:2: label '1e60' is not a finite float32"),
    ],
)
def test_a_label_that_is_no_number_is_named_with_its_place(tmp_path: Path, name: str, text: str, message: str) -> None:
    (tmp_path / name).write_text(text)
    corpus = Corpus(str(tmp_path / name))
    with pytest.raises(BadInput, match=message):
        list(select_columns(corpus.rows(), "text", "label", corpus.name, NUMBERS))


def make_numbers(folder: Path, labels: list[Any] = VALUES) -> Dataset:
    texts = [f"0 {5 + number} {'5 ' * (number % 12)}1" for number in range(len(labels))]  # of 3 to 14 tokens
    return write(folder, list(zip(texts, map(str, labels), strict=True)), NUMBERS, (8, 16), 30).dataset


def test_each_row_keeps_its_number(tmp_path: Path) -> None:
    [*parts] = labelled_evaluation(make_numbers(tmp_path), HostSlice(TOKENS, 24))
    seen = [row for part in parts for row in zip(part.input_ids[:, 1] - 5, part.labels, part.weights, strict=True)]
    found = {int(number): float(label) for number, label, weight in seen if weight}
    assert found == {number: float(np.float32(value)) for number, value in enumerate(VALUES)}
    assert {float(label) for _, label, weight in seen if not weight} == {0.0}


def test_verify_finds_a_label_that_is_not_finite(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert list(problems(make_numbers(tmp_path / "good"))) == []
    monkeypatch.setattr(labelled_rows, "_parse_number", lambda label, place: float(label))
    [problem] = problems(make_numbers(tmp_path / "bad", ["0.5", "nan"]))
    assert problem.endswith("record 1 has label nan, which is not a finite number")


def test_rows_without_labels_are_not_labelled_rows(tmp_path: Path) -> None:
    with pytest.raises(BadInput, match="holds packed rows, which have no label"):
        batches(make_samples(tmp_path, 20))
