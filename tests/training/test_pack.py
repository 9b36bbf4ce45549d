"""Writing datasets: nothing is lost, the same input gives the same bytes, and an interrupted run is taken up."""

import contextlib
import json
import random
import tracemalloc
from collections.abc import Iterable
from dataclasses import replace
from datetime import datetime
from itertools import repeat
from pathlib import Path
from typing import Any
from unittest.mock import DEFAULT, Mock, patch

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.packed_datasets import pack_documents
from training import storage
from training.data.formats.open_dataset import check_dataset
from training.data.loading.batches import document_evaluation
from training.data.loading.record_source import FixedShards, HostSlice
from training.data.prepare import dataset_writer, pack
from training.data.prepare.dataset_writer import DatasetPlan, WrittenDataset
from training.data.prepare.pack import WholeDocuments, best_fit
from training.data.sampling.masking import SpecialTokens
from training.data.tokenizer import Tokenizer
from training.errors import BadInput

LENGTH = 8
PLAN = DatasetPlan("train", LENGTH, "t", vocabulary=1000, records_per_shard=5)


def corpus(count: int, seed: int = 0) -> list[str]:
    """Documents of 0 to 30 'words', which are numbers below 1000."""
    chance = random.Random(seed)
    return [" ".join(str(chance.randrange(1000)) for _ in range(chance.randrange(31))) for _ in range(count)]


def encode(texts: list[str]) -> list[Any]:
    return [np.array([int(word) for word in text.split()], np.int32) for text in texts]


DOCUMENTS = corpus(30)


def make(
    url: Path | str, documents: Iterable[str] = DOCUMENTS, encode: Any = encode, overwrite: bool = False, **changes: Any
) -> WrittenDataset:
    """Packs documents into rows of eight ids, five in a shard. `changes`: of the plan."""
    return pack_documents(str(url), replace(PLAN, **changes), lambda: documents, encode, overwrite=overwrite)


def content(url: Path | str) -> dict[str, bytes]:
    return {stat.url.removeprefix(str(url)): storage.read(stat.url) for stat in storage.listing(str(url))}


@settings(max_examples=30)
@given(st.integers(1, 60), st.integers(1, 7), st.integers(1, 20), st.integers(0, 1000))
def test_only_the_last_tail_of_a_split_is_dropped(
    tmp_path_factory: pytest.TempPathFactory, count: int, batch: int, per_shard: int, seed: int
) -> None:
    documents = corpus(count, seed)
    stream = np.concatenate(encode(documents))
    if len(stream) < LENGTH:
        return
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(pack, "BATCH_DOCUMENTS", batch)
        made = make(tmp_path_factory.mktemp("d"), documents, records_per_shard=per_shard)
    rows = FixedShards(made.dataset).read(0, made.dataset.records, made.dataset.records)["input_ids"]
    assert rows.reshape(-1).tolist() == stream[: len(stream) // LENGTH * LENGTH].tolist()
    assert made.note == f"from {count} documents; {len(stream) % LENGTH} tokens at the end fill no row"
    assert all(shard.records == per_shard for shard in made.dataset.shards[:-1])


class Killed(BaseException):
    pass


@pytest.mark.parametrize("place", ["local", "gs://bucket/data"])
def test_killed_runs_end_in_same_bytes(tmp_path: Path, gcs: Any, monkeypatch: pytest.MonkeyPatch, place: str) -> None:
    monkeypatch.setattr(pack, "BATCH_DOCUMENTS", 3)
    make(tmp_path / "undisturbed")
    for number in range(40):
        url = f"{tmp_path if place == 'local' else place}/killed-{number}"
        with monkeypatch.context() as patch, contextlib.suppress(Killed):
            dying = Mock(wraps=storage.write, side_effect=[*repeat(DEFAULT, number), *repeat(Killed, 100)])
            patch.setattr(storage, "write", dying)
            make(url)
        counted = Mock(wraps=encode)
        again = make(url, encode=counted)
        assert content(url) == content(tmp_path / "undisturbed")
        if again.reused:
            break
        encoded = sum(len(call.args[0]) for call in counted.call_args_list)
        assert number <= 20 or encoded < len(DOCUMENTS), "what is in a shard is not tokenized again"
    assert again.reused


@pytest.fixture
def unfinished(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of a run that was killed before it wrote the manifest."""
    monkeypatch.setattr(pack, "BATCH_DOCUMENTS", 3)
    with monkeypatch.context() as patch, contextlib.suppress(Killed):
        patch.setattr(dataset_writer, "finish_dataset", Mock(side_effect=Killed))
        make(tmp_path / "x")
    return tmp_path / "x"


def test_a_half_written_shard_of_a_killed_run_is_made_again(unfinished: Path, tmp_path: Path) -> None:
    (unfinished / "train-00002.tfrecord").write_bytes(b"half")
    make(unfinished)
    make(tmp_path / "undisturbed")
    assert content(unfinished) == content(tmp_path / "undisturbed")


def test_the_beginning_of_another_dataset_is_not_mixed_in(unfinished: Path) -> None:
    with pytest.raises(BadInput, match="holds the beginning of another dataset"):
        make(unfinished, tokenizer_hash="u")
    assert make(unfinished, tokenizer_hash="u", overwrite=True).dataset.manifest.tokenizer_hash == "u"


def test_a_finished_dataset_is_left_alone_and_another_one_is_not_overwritten(tmp_path: Path) -> None:
    first, before = make(tmp_path), content(tmp_path)
    again = make(tmp_path, documents=Mock(side_effect=Killed))
    assert (again.reused, again.dataset) == (True, first.dataset)
    for other in ({"length": 4}, {"tokenizer_hash": "u"}, {"origin": {"corpus": "y"}}):
        why = rf"{tmp_path} holds another dataset \(\d+ records of 8 tokens\): use another --out, or --overwrite"
        with pytest.raises(BadInput, match=why):
            make(tmp_path, **other)
    assert content(tmp_path) == before
    (tmp_path / "train-00001.tfrecord").write_bytes(before["/train-00000.tfrecord"])  # of the same size
    assert [make(tmp_path, overwrite=True).reused for _ in range(2)] == [False, True]
    assert content(tmp_path) == before
    assert make(tmp_path, length=4, records_per_shard=50, overwrite=True).dataset.sequence_length == 4
    assert set(content(tmp_path)) == {"/dataset.json", *(f"/train-0000{shard}.tfrecord" for shard in range(3))}


def test_a_folder_with_other_files_is_not_written_to(tmp_path: Path) -> None:
    (tmp_path / "thesis.txt").write_text("mine")
    make(tmp_path / "other")
    other = content(tmp_path / "other")
    with pytest.raises(BadInput, match=r"is not empty \(.*\) and not a dataset"):
        make(tmp_path)
    made = make(tmp_path, overwrite=True)
    assert (tmp_path / "thesis.txt").read_text() == "mine"
    assert content(tmp_path / "other") == other
    for shard in made.dataset.shards:
        (tmp_path / shard.name).unlink()
    with pytest.raises(BadInput, match="is missing"):  # those of the other dataset are not taken for them
        check_dataset(str(tmp_path), rows="packed", tokenizer=None)


@pytest.mark.parametrize(
    ("text", "vocabulary", "message"),
    [
        ("1 2 3", 1000, "the train split has 3 tokens in 1 documents, less than one row of 8"),
        ("999 " * 50, 10, "the tokenizer gave id 999, beyond its own vocabulary of 10"),
    ],
)
def test_what_makes_no_rows_is_said(tmp_path: Path, text: str, vocabulary: int, message: str) -> None:
    with pytest.raises(BadInput, match=message):
        make(tmp_path, [text], vocabulary=vocabulary)


def test_memory_does_not_grow_with_the_corpus(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """20 MB of text pass through batches and shards of a few hundred kB; Python's own peak stays below 8 MB."""
    monkeypatch.setattr(pack, "BATCH_CHARACTERS", 1 << 16)
    ids = np.arange(20_000, dtype=np.int32) % 1000
    text = " ".join(map(str, ids.tolist()))
    tracemalloc.start()
    made = make(tmp_path, repeat(text, 250), lambda texts: [ids] * len(texts), records_per_shard=5000)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert made.dataset.records == 625_000
    assert peak < 8e6


ROW_LENGTH, END = 16, 999
TOKENS = SpecialTokens(-1, END, frozenset({END}), 1000, END)
ROW_PLAN = replace(PLAN, length=ROW_LENGTH, records_per_shard=4)


def write(url: Path, documents: list[str]) -> Any:
    kind = WholeDocuments(ROW_PLAN, Tokenizer("t", b"", "t", TOKENS), encode)
    return pack.write_rows(str(url), ROW_PLAN, lambda: documents, kind).dataset


@given(st.lists(st.integers(1, 20), max_size=60))
def test_best_fit_places_each_document_once_and_fills_rows_well(lengths: list[int]) -> None:
    rows = best_fit(lengths, 20)
    assert sorted(number for row in rows for number in row) == list(range(len(lengths)))
    used = [sum(lengths[number] for number in row) for row in rows]
    assert all(0 < count <= 20 for count in used)
    assert sum(count <= 10 for count in used) <= 1, "two rows that are half empty would have been one"


@settings(max_examples=20)
@given(st.integers(1, 40), st.integers(0, 1000))
def test_positions_and_labels_are_by_document(tmp_path_factory: pytest.TempPathFactory, count: int, seed: int) -> None:
    documents = corpus(count, seed)
    dataset = write(tmp_path_factory.mktemp("rows"), documents)
    assert check_dataset(dataset.url, rows="documents", tokenizer=None).records == dataset.records
    expected = []
    for ids in encode(documents):
        whole = ids.tolist()
        whole += [END] * (whole[-1:] != [END])
        expected += [whole[start : start + ROW_LENGTH] for start in range(0, len(whole), ROW_LENGTH)]
    found = []
    for batch in document_evaluation(dataset, HostSlice(TOKENS, 3)):
        columns = (batch.input_ids, batch.position_ids, batch.labels, batch.weights, batch.records)
        for ids, places, labels, weights, record in zip(*columns, strict=True):
            learnt = np.flatnonzero(weights)
            assert record >= 0 or not len(learnt)
            assert (labels[learnt] == ids[learnt + 1]).all()
            assert (places[learnt + 1] == places[learnt] + 1).all()
            for start in np.flatnonzero(places == 0):
                end = start + 1
                while end < ROW_LENGTH and weights[end - 1]:
                    end += 1
                found.append(ids[start:end].tolist())
    assert sorted(piece for piece in found if len(piece) > 1) == sorted(piece for piece in expected if len(piece) > 1)


def test_a_tokenizer_that_transformers_cannot_load_is_named() -> None:
    library = Mock(**{"AutoTokenizer.from_pretrained.side_effect": ValueError("no\nmodel_type")})
    with patch.dict("sys.modules", transformers=library), pytest.raises(BadInput, match=r"^/x: .* load .*: no model"):
        pack.open_template("/x")


def test_chats_may_hold_dates_and_parts_but_no_answer_in_parts() -> None:
    at, parts = datetime(2024, 1, 2), [{"type": "text", "text": "a"}]
    chat = [{"role": "user", "content": parts, "at": at}, {"role": "assistant", "content": "b"}]
    rows = [{"m": chat}, {"m": [*chat, {**chat[1], "content": parts}]}]
    read = pack.chats(Mock(field="m", rows=lambda: rows))
    messages = json.loads(next(read))
    assert messages == [{**chat[0], "at": "2024-01-02 00:00:00"}, chat[1]]
    shown = Mock(_apply=lambda chat, **_: chat[0]["role"] + "".join(f" {message['content']};" for message in chat))
    text, spans = pack.WholeChats._render(shown, [{**chat[1], "content": "s"}, *messages])
    assert ([text[slice(*span)] for span in spans], text[: spans[0][0]]) == (["s", "b"], "assistant ")
    with pytest.raises(BadInput, match="row 2: an answer's content is not text but list"):
        next(read)
