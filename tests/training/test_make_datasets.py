"""`tpu-train shards` and `dataset mix`: which corpus each split gets, how often a record is in an epoch."""

import json
import shutil
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner, Result

from tests.packed_datasets import pack_rows
from tests.training import test_labelled_rows as labelled
from tests.training.mlm_rows import PLAN, join, mlm_batches, require_alike_on_hosts, unmask
from training.cli.main import tpu_train
from training.data.formats.open_dataset import check_dataset, open_dataset
from training.data.loading.batches import labelled_evaluation
from training.data.loading.record_source import HostSlice
from training.data.prepare import make_datasets as procedure
from training.data.prepare.corpus import Corpus
from training.data.prepare.dataset_writer import write_mixture
from training.data.prepare.make_datasets import DatasetOptions, make_datasets, parse_lengths
from training.data.sampling.masking import SpecialTokens
from training.data.tokenizer import Tokenizer
from training.errors import BadInput

TOKENS = SpecialTokens(mask=4, pad=3, special=frozenset(range(5)), vocabulary=300)
NAMES = ["transfer", "cash", "card"]


def encode(texts: list[str]) -> list[Any]:
    """A token for each byte."""
    return [np.array([0, *(5 + byte for byte in text.encode()), 1], np.int32) for text in texts]


@pytest.fixture(autouse=True)
def tokenizer(monkeypatch: pytest.MonkeyPatch) -> None:
    """A tokenizer that needs neither a folder nor a library."""
    monkeypatch.setattr(procedure.tokenizers, "read", lambda url, rows="packed": Tokenizer(url, b"", "t", TOKENS))
    monkeypatch.setattr(procedure.tokenizers, "encoder", lambda tokenizer: encode)


def options(tmp_path: Path, **changes: Any) -> DatasetOptions:
    return replace(DatasetOptions("builtin:pydoc", "t", str(tmp_path / "out"), sequence_length=32), **changes)


def test_the_splits_of_a_corpus_share_no_document(tmp_path: Path) -> None:
    made = make_datasets(options(tmp_path, evaluation_percent=20.0))
    train, evaluation = (int(result.note.split()[1]) for result in made)  # documents
    assert train > evaluation > 0
    assert train + evaluation == len(list(Corpus("builtin:pydoc").documents()))


@pytest.mark.parametrize("evaluation", ["a share", "a corpus"])
@pytest.mark.parametrize(("labels", "names"), [("names.json", NAMES), (None, sorted(NAMES))])
def test_classes_are_in_the_order_of_a_file_or_of_their_names_and_texts_are_cut(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, labels: str | None, names: list[str], evaluation: str
) -> None:
    rows = ({"text": f"{'x' * (number % 40)}y", "kind": NAMES[number % 3]} for number in range(60))
    if labels is None:  # without a special token at the end
        monkeypatch.setattr(procedure.tokenizers, "encoder", lambda _: lambda texts: [x[:-1] for x in encode(texts)])
    (tmp_path / "a.jsonl").write_text("\n".join(map(json.dumps, rows)))
    (tmp_path / "names.json").write_text(json.dumps(NAMES))
    own = {"corpus": str(tmp_path / "a.jsonl"), "label": "kind", "labels": labels and str(tmp_path / labels)}
    other = {"evaluation_corpus": own["corpus"]} if evaluation == "a corpus" else {"evaluation_percent": 50.0}
    made = list(make_datasets(options(tmp_path, task="classification", lengths="8,32", **own, **other)))
    assert [result.dataset.manifest.labels for result in made] == [names, names]
    assert {shard.length for shard in made[0].dataset.shards} == {8, 32}
    parts = labelled_evaluation(made[0].dataset, HostSlice(TOKENS, 1))
    assert {part.input_ids[part.attention_mask > 0][-1] - 5 for part in parts} == ({-4} if labels else {*b"xy"})
    assert sum(result.dataset.records for result in made) == (120 if evaluation == "a corpus" else 60)


@pytest.mark.parametrize("names", [None, "names.json"])
def test_integers_of_a_corpus_are_its_names(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, names: str | None) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(Corpus, "label_names", property(lambda corpus: tuple(Path(corpus.name).stem.split("-"))))
    Path("names.json").write_text('["no", "yes"]')
    for name, number in (("yes-no", 0), ("no-yes", 1)):
        Path(f"{name}.jsonl").write_text(json.dumps({"text": "a", "label": number}))
    corpora = {"corpus": "yes-no.jsonl", "evaluation_corpus": "no-yes.jsonl", "labels": names}
    made = [result.dataset for result in make_datasets(options(tmp_path, task="classification", **corpora))]
    assert len({shard.crc32c for dataset in made for shard in dataset.shards}) == 1, "both rows say yes"
    Path("names.json").write_text('["no", "maybe"]')
    with pytest.raises(BadInput, match="label 'yes' is not among the 2 labels"):
        list(make_datasets(options(tmp_path / "b", task="classification", **corpora | {"labels": "names.json"})))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"task": "regression", "layout": "recipe"}, "--task regression has the compact layout only"),
        ({"task": "regression", "labels": "x.json"}, "--labels lists the names of classes"),
        ({"lengths": "8,16"}, "--lengths 8,16: expected ascending numbers that end in"),
        ({"labels": "{"}, "not JSON"),
        ({"labels": '["a", "a"]'}, "a JSON list of different strings"),
        ({"labels": "[]"}, "a JSON list"),
    ],
)
def test_options_that_do_not_fit_together_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, changes: Any, message: str
) -> None:
    monkeypatch.setattr("training.storage.read", lambda names: names)  # a file of labels
    with pytest.raises(BadInput, match=message):
        list(make_datasets(options(tmp_path, **{"task": "classification", **changes})))


def test_lengths_default_to_halves_and_are_checked() -> None:
    assert (parse_lengths(None, 64), parse_lengths("8,64", 64)) == ((16, 32, 64), (8, 64))
    for lengths in ("8,x", "64,8", "8,8,64", "1,64", "8,32"):
        with pytest.raises(BadInput, match=f"--lengths {lengths}: expected"):
            parse_lengths(lengths, 64)


def packed(folder: Path | str, count: int, first: int) -> str:
    """Writes rows of the ids first + row number."""
    plan = replace(PLAN, records_per_shard=7)
    pack_rows(folder, plan, np.repeat(first + np.arange(count, dtype=np.int32)[:, None], PLAN.length, axis=1))
    return str(folder)


def mix(out: str, *parts: str) -> Result:
    return CliRunner().invoke(tpu_train, ["dataset", "mix", *(f"--part={part}" for part in parts), f"--out={out}"])


@pytest.mark.parametrize("place", ["local", "gs://bucket"])
def test_an_epoch_has_each_record_as_often_as_the_mixture_says(tmp_path: Path, gcs: object, place: str) -> None:
    root = str(tmp_path) if place == "local" else place
    parts = [f"{packed(f'{root}/web', 20, 20)}=1", f"{packed(f'{root}/books', 12, 60)}=3"]
    told = mix(f"{root}/mixed", *parts).output
    assert "20 records, 1 times, 35.7% of an epoch" in told
    assert mix(f"{root}/mixed", *parts).output == told, "the same mixture again changes nothing"
    mixed = check_dataset(f"{root}/mixed", rows="packed", tokenizer=None)
    assert {shard.folder for shard in mixed.shards} == {f"{root}/web", f"{root}/books"}
    open_batches = partial(mlm_batches, mixed, global_batch_size=8)
    epoch = join(map(open_batches().batch, range(7)))  # of 56 records
    assert sorted(epoch.records.tolist()) == list(range(mixed.records)) == list(range(56))
    assert sorted(unmask(epoch)[:, 0].tolist()) == sorted([*range(20, 40), *[*range(60, 72)] * 3])
    require_alike_on_hosts(open_batches, 2, range(3, 9))


def test_labelled_rows_are_mixed_too_and_a_missing_shard_or_changed_part_is_named(tmp_path: Path) -> None:
    one, two = (labelled.make(tmp_path / name, count).url for name, count in (("one", 30), ("two", 20)))
    mixed = write_mixture(str(tmp_path / "mixed"), {one: 2, two: 1})
    expected = labelled.expected(30) + labelled.expected(30) + labelled.expected(20)
    assert labelled.contents(list(labelled_evaluation(mixed, HostSlice(TOKENS, 8)))) == expected
    (shard := Path(two) / mixed.shards[-1].name).unlink()
    with pytest.raises(BadInput, match=f"{shard} is missing"):
        labelled.batches(open_dataset(mixed.url))
    shutil.copytree(one, two, dirs_exist_ok=True)
    with pytest.raises(BadInput, match=f"{two} was written again since {mixed.url} was mixed"):
        labelled.batches(open_dataset(mixed.url))


def test_parts_that_do_not_fit_are_refused(tmp_path: Path) -> None:
    plain, copy, mixed = packed(tmp_path / "plain", 10, 20), str(tmp_path / "copy"), str(tmp_path / "mixed")
    other = labelled.make(tmp_path / "labelled", 10).url
    shutil.copytree(plain, copy)
    write_mixture(mixed, {plain: 1, copy: 1})
    for parts, message in (
        ({plain: 1, other: 1}, "differ in rows"),
        ({plain: 1}, "at least two different parts"),
        ({plain: 2, copy: 1}, "holds another dataset"),
    ):
        with pytest.raises(BadInput, match=message):
            write_mixture(mixed, parts)
    for wrong in ("plain", "plain=0", "plain=x", "=2"):
        assert "expected FOLDER=TIMES" in str(mix(str(tmp_path / "other"), wrong).exception)
    assert "--part names a folder twice" in str(mix(str(tmp_path / "other"), f"{plain}=1", f"{plain}=3").exception)
