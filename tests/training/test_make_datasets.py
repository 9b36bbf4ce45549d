"""Claims about the procedure behind `tpu-train shards`: which corpus, plan and writer each split gets."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from training.data.loading.batches import labelled_evaluation
from training.data.loading.record_source import HostSlice
from training.data.prepare import make_datasets as procedure
from training.data.prepare.make_datasets import DatasetOptions, make_datasets, parse_lengths
from training.data.sampling.masking import SpecialTokens
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
