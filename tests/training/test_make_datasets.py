"""`tpu-train shards` and `dataset mix`: which corpus each split gets, how often a record is in an epoch."""

import json
import shutil
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner

from tests.packed_datasets import pack_rows
from tests.training import test_labelled_rows as labelled
from training.cli.main import tpu_train
from training.data.formats.dataset import Dataset
from training.data.formats.open_dataset import check_dataset, open_dataset
from training.data.loading.batches import MlmBatches, labelled_evaluation
from training.data.loading.record_source import HostSlice
from training.data.prepare import make_datasets as procedure
from training.data.prepare.dataset_writer import DatasetPlan, write_mixture
from training.data.prepare.make_datasets import DatasetOptions, make_datasets, parse_lengths
from training.data.sampling.masking import Masking, SpecialTokens
from training.data.tokenizer import Tokenizer
from training.errors import BadInput

TOKENS = SpecialTokens(mask=4, pad=3, special=frozenset(range(5)), vocabulary=300)
NAMES = ["card", "cash", "transfer"]


def encode(texts: list[str]) -> list[Any]:
    """A token for each byte."""
    return [np.array([0, *(5 + byte for byte in text.encode()), 1], np.int32) for text in texts]


@pytest.fixture(autouse=True)
def tokenizer(monkeypatch: pytest.MonkeyPatch) -> None:
    """A tokenizer that needs neither a folder nor a library."""
    monkeypatch.setattr(procedure.tokenizers, "read", lambda url, rows="packed": Tokenizer(url, b"", "t", TOKENS))
    monkeypatch.setattr(procedure.tokenizers, "encoder", lambda tokenizer: encode)


def write_rows(path: Path, count: int) -> str:
    rows = ({"text": "x" * (number % 40), "kind": NAMES[number % 3]} for number in range(1, count))
    path.write_text("\n".join(map(json.dumps, rows)))
    return str(path)


def options(tmp_path: Path, **changes: Any) -> DatasetOptions:
    default = DatasetOptions("builtin:pydoc", "t", str(tmp_path / "out"), sequence_length=32)
    return replace(default, **changes)


def test_both_splits_of_a_corpus_are_made_and_share_no_document(tmp_path: Path) -> None:
    train, evaluation = make_datasets(options(tmp_path, evaluation_percent=20.0))
    assert (train.dataset.manifest.split, evaluation.dataset.manifest.split) == ("train", "evaluation")
    plan = train.dataset.manifest.origin["plan"]
    assert (plan["origin"]["corpus"], plan["origin"]["evaluation_percent"]) == ("builtin:pydoc", 20.0)
    documents = [int(result.note.split()[1]) for result in (train, evaluation)]
    assert sum(documents) > documents[0] > documents[1] > 0


def test_with_an_evaluation_corpus_every_document_is_used(tmp_path: Path) -> None:
    corpus, other = write_rows(tmp_path / "a.jsonl", 60), write_rows(tmp_path / "b.jsonl", 30)
    train, evaluation = make_datasets(options(tmp_path, corpus=corpus, evaluation_corpus=other))
    origins = [result.dataset.manifest.origin["plan"]["origin"] for result in (train, evaluation)]
    assert [(origin["corpus"], origin["evaluation_percent"]) for origin in origins] == [(corpus, None), (other, None)]


def test_classes_are_numbered_in_the_order_of_their_names_or_of_a_file(tmp_path: Path) -> None:
    corpus = write_rows(tmp_path / "a.jsonl", 60)
    (tmp_path / "names.json").write_text(json.dumps(NAMES[::-1]))
    for number, (labels, names) in enumerate([(None, NAMES), (str(tmp_path / "names.json"), NAMES[::-1])]):
        changes = {"label": "kind", "labels": labels, "lengths": "8,32", "splits": ("train",)}
        corpora = {"corpus": corpus, "evaluation_corpus": corpus}
        [result] = make_datasets(options(tmp_path / str(number), task="classification", **corpora, **changes))
        assert result.dataset.manifest.labels == names
        assert {shard.length for shard in result.dataset.shards} == {8, 32}
        counts = np.zeros(3, np.int64)
        for batch in labelled_evaluation(result.dataset, HostSlice(TOKENS, 8)):
            counts += np.bincount(batch.labels[batch.weights > 0], minlength=3)
        assert counts.sum() == result.dataset.records


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"task": "regression", "layout": "recipe"}, "--task regression has the compact layout only"),
        ({"task": "regression", "labels": "x.json"}, "--labels lists the names of classes"),
        ({"task": "classification", "lengths": "8,16"}, "--lengths 8,16: expected ascending numbers that end in"),
    ],
)
def test_options_that_do_not_fit_together_are_refused(tmp_path: Path, changes: Any, message: str) -> None:
    with pytest.raises(BadInput, match=message):
        list(make_datasets(options(tmp_path, **changes)))


def test_a_file_of_labels_is_a_list_of_different_names(tmp_path: Path) -> None:
    cases = {"{": "not JSON", '["a", "a"]': "a JSON list of different strings", "[]": "a JSON list"}
    for content, message in cases.items():
        (tmp_path / "names.json").write_text(content)
        with pytest.raises(BadInput, match=message):
            list(make_datasets(options(tmp_path, task="classification", labels=str(tmp_path / "names.json"))))


def test_lengths_default_to_halves_and_are_checked() -> None:
    assert parse_lengths(None, 64) == (16, 32, 64)
    assert parse_lengths("8,64", 64) == (8, 64)
    for lengths in ("8,x", "64,8", "8,8,64", "1,64", "8,32"):
        with pytest.raises(BadInput, match=f"--lengths {lengths}: expected"):
            parse_lengths(lengths, 64)


LENGTH = 12


def packed(folder: Path | str, count: int, first: int, **changes: str) -> Dataset:
    """Rows of the ids first + row number."""
    plan = DatasetPlan("train", LENGTH, "t", labelled.TOKENS.vocabulary, 7, **changes)
    return pack_rows(folder, plan, np.repeat(first + np.arange(count, dtype=np.int32)[:, None], LENGTH, axis=1))


def rows(dataset: Dataset, steps: range, host: int = 0, hosts: int = 1) -> list[list[tuple[int, ...]]]:
    """Records, ids and labels of each step's rows of one host."""
    batches = MlmBatches(dataset, HostSlice(labelled.TOKENS, 8, host, hosts), Masking(), 5)
    found = []
    for step in steps:
        batch = batches.batch(step)
        columns = (batch.records, *batch.input_ids.T, *batch.labels.T)
        found.append([tuple(map(int, row)) for row in zip(*columns, strict=True)])
    batches.close()
    return found


def test_an_epoch_has_each_record_as_often_as_the_mixture_says(tmp_path: Path) -> None:
    parts = {"web": (20, 20, 1), "books": (12, 60, 3)}
    for name, (count, first, _) in parts.items():
        packed(tmp_path / name, count, first)
    given = [f"--part={tmp_path / name}={times}" for name, (_, _, times) in parts.items()]
    command = ["dataset", "mix", *given, f"--out={tmp_path / 'mixed'}"]
    told = CliRunner().invoke(tpu_train, command, catch_exceptions=False)
    assert "20 records, 1 times, 35.7% of an epoch" in told.output
    assert CliRunner().invoke(tpu_train, command).output == told.output, "the same mixture again changes nothing"
    mixed = check_dataset(str(tmp_path / "mixed"), rows="packed", tokenizer=None)
    epoch = rows(mixed, range(7))  # of 56 records
    labels = Counter(row[-1] for step in epoch for row in step)
    assert labels == {first + n: times for count, first, times in parts.values() for n in range(count)}
    assert len({row[0] for step in epoch for row in step}) == mixed.records == 56
    halves = [rows(mixed, range(3, 9), host, 2) for host in (0, 1)]
    again = rows(mixed, range(3, 9))
    assert [first + second for first, second in zip(*halves, strict=True)] == again, "on any number of hosts"
    assert again[:4] == epoch[3:], "whatever was read before"


def test_parts_in_a_bucket_are_mixed_and_read_from_there(tmp_path: Path, gcs: object) -> None:
    sizes = {"web": (20, 20, 1), "books": (12, 60, 3)}
    read = []
    for root in (str(tmp_path), "gs://bucket/data"):
        for name, (count, first, _) in sizes.items():
            packed(f"{root}/{name}", count, first)
        mixed = write_mixture(f"{root}/mixed", {f"{root}/{name}": times for name, (_, _, times) in sizes.items()})
        assert open_dataset(f"{root}/mixed") == mixed
        read.append(rows(mixed, range(7)))
    assert read[0] == read[1]
    assert all(shard.folder.startswith("gs://bucket/data/") for shard in mixed.shards)


def test_labelled_rows_are_mixed_too_and_a_missing_shard_is_named(tmp_path: Path) -> None:
    for name, count in (("one", 30), ("two", 20)):
        labelled.make(tmp_path / name, count)
    mixed = write_mixture(str(tmp_path / "mixed"), {str(tmp_path / "one"): 2, str(tmp_path / "two"): 1})
    expected = labelled.expected(30) + labelled.expected(30) + labelled.expected(20)
    parts = list(labelled.labelled_evaluation(mixed, HostSlice(labelled.TOKENS, 8)))
    assert labelled.contents(parts) == expected
    shard = tmp_path / "two" / mixed.shards[-1].name
    shard.unlink()
    with pytest.raises(BadInput, match=f"{shard} is missing"):
        labelled.batches(open_dataset(str(tmp_path / "mixed")))


def test_parts_that_do_not_fit_are_refused(tmp_path: Path) -> None:
    packed(tmp_path / "plain", 10, 20)
    labelled.make(tmp_path / "labelled", 10)
    plain = str(tmp_path / "plain")
    for other, message in (({"labelled": 1}, "differ in rows"), ({}, "at least two different parts")):
        with pytest.raises(BadInput, match=message):
            write_mixture(str(tmp_path / "mixed"), {plain: 1, **{str(tmp_path / name): n for name, n in other.items()}})
    shutil.copytree(plain, tmp_path / "copy")
    write_mixture(str(tmp_path / "mixed"), {plain: 1, str(tmp_path / "copy"): 1})
    with pytest.raises(BadInput, match="holds another dataset"):
        write_mixture(str(tmp_path / "mixed"), {plain: 2, str(tmp_path / "copy"): 1})
    for wrong in ("plain", "plain=0", "plain=x", "=2"):
        told = CliRunner().invoke(tpu_train, ["dataset", "mix", f"--part={wrong}", f"--out={tmp_path / 'other'}"])
        assert "expected FOLDER=TIMES" in str(told.exception or told.output)
