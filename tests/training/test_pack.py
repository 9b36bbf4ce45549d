"""Writing datasets: nothing is lost, the same input gives the same bytes, and an interrupted run is taken up."""

import random
import tracemalloc
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.packed_datasets import pack_documents
from training import storage
from training.data.formats.open_dataset import check_dataset
from training.data.loading.batches import DocumentBatches, document_evaluation
from training.data.loading.record_source import FixedShards, HostSlice
from training.data.prepare import dataset_writer, pack
from training.data.prepare.dataset_writer import DatasetPlan, WrittenDataset
from training.data.prepare.pack import WholeDocuments, best_fit
from training.data.sampling.masking import SpecialTokens, special_tokens
from training.data.tokenizer import Tokenizer
from training.errors import BadInput

LENGTH = 8


def plan(**changes: Any) -> DatasetPlan:
    return replace(DatasetPlan("train", LENGTH, "t", vocabulary=1000, records_per_shard=5), **changes)


def corpus(count: int, seed: int = 0) -> list[str]:
    """Documents of 0 to 30 'words', which are numbers below 1000."""
    chance = random.Random(seed)
    return [" ".join(str(chance.randrange(1000)) for _ in range(chance.randrange(31))) for _ in range(count)]


def encode(texts: list[str]) -> list[Any]:
    return [np.array([int(word) for word in text.split()], np.int32) for text in texts]


def content(url: str) -> dict[str, bytes]:
    return {stat.url.removeprefix(url): storage.read(stat.url) for stat in storage.listing(url)}


def rows(made: WrittenDataset) -> Any:
    return FixedShards(made.dataset).read(0, made.dataset.records, made.dataset.records)["input_ids"]


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
        url = str(tmp_path_factory.mktemp("d"))
        made = pack_documents(url, plan(records_per_shard=per_shard), lambda: documents, encode)
    assert rows(made).reshape(-1).tolist() == stream[: len(stream) // LENGTH * LENGTH].tolist()
    assert made.note == f"from {count} documents; {len(stream) % LENGTH} tokens at the end fill no row"
    assert all(shard.records == per_shard for shard in made.dataset.shards[:-1])


@pytest.mark.parametrize("place", ["local", "gs://bucket/data"])
def test_killed_runs_end_in_same_bytes(tmp_path: Path, gcs: Any, monkeypatch: pytest.MonkeyPatch, place: str) -> None:
    monkeypatch.setattr(pack, "BATCH_DOCUMENTS", 3)
    documents = corpus(30)
    pack_documents(str(tmp_path / "undisturbed"), plan(), lambda: documents, encode)
    expected = content(str(tmp_path / "undisturbed"))
    write = storage.write

    class Killed(BaseException):
        pass

    for number in range(40):
        url = str(tmp_path / f"killed-{number}") if place == "local" else f"gs://bucket/data/killed-{number}"
        writes = iter(range(number))

        def write_or_die(*arguments: Any, writes: Iterator[int] = writes, **options: Any) -> Any:
            if next(writes, None) is None:
                raise Killed
            return write(*arguments, **options)

        monkeypatch.setattr(storage, "write", write_or_die)
        try:
            pack_documents(url, plan(), lambda: documents, encode)
            finished = True
        except Killed:
            finished = False
        monkeypatch.setattr(storage, "write", write)
        encoded = [0]

        def counted(texts: list[str], encoded: list[int] = encoded) -> list[Any]:
            encoded[0] += len(texts)
            return encode(texts)

        assert pack_documents(url, plan(), lambda: documents, counted).reused is finished
        assert content(url) == expected
        if finished:
            break
        if number > 20:
            assert encoded[0] < len(documents), "what is in a shard is not tokenized again"
    assert finished


def test_a_half_written_shard_of_a_killed_run_is_made_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pack, "BATCH_DOCUMENTS", 3)
    documents = corpus(30)
    pack_documents(str(tmp_path / "undisturbed"), plan(), lambda: documents, encode)
    with monkeypatch.context() as patch:
        patch.setattr(dataset_writer, "finish_dataset", lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            pack_documents(str(tmp_path / "x"), plan(), lambda: documents, encode)
    (tmp_path / "x" / "train-00002.tfrecord").write_bytes(b"half")
    pack_documents(str(tmp_path / "x"), plan(), lambda: documents, encode)
    assert content(str(tmp_path / "x")) == content(str(tmp_path / "undisturbed"))


def test_a_finished_dataset_is_left_alone_and_another_one_is_not_overwritten(tmp_path: Path) -> None:
    url, documents = str(tmp_path / "x"), corpus(30)
    first = pack_documents(url, plan(), lambda: documents, encode)
    before = content(url)
    again = pack_documents(url, plan(), lambda: 1 / 0, encode)
    assert again.reused
    assert again.dataset == first.dataset
    for other in (plan(length=4), plan(tokenizer_hash="u"), plan(origin={"corpus": "y"})):
        why = rf"{url} holds another dataset \(\d+ records of 8 tokens\): use another --out, or --overwrite"
        with pytest.raises(BadInput, match=why):
            pack_documents(url, other, lambda: documents, encode)
    assert content(url) == before
    made = pack_documents(url, plan(length=4, records_per_shard=50), lambda: documents, encode, overwrite=True)
    assert made.dataset.sequence_length == 4
    assert set(content(url)) == {"/dataset.json", *(f"/train-0000{shard}.tfrecord" for shard in range(3))}


def test_the_beginning_of_another_dataset_is_not_mixed_in(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    url, documents = str(tmp_path), corpus(30)
    with monkeypatch.context() as patch:
        patch.setattr(dataset_writer, "finish_dataset", lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            pack_documents(url, plan(), lambda: documents, encode)
    with pytest.raises(BadInput, match="holds the beginning of another dataset"):
        pack_documents(url, plan(tokenizer_hash="u"), lambda: documents, encode)
    replaced = pack_documents(url, plan(tokenizer_hash="u"), lambda: documents, encode, overwrite=True)
    assert replaced.dataset.manifest.tokenizer_hash == "u"


def test_a_folder_with_other_files_is_not_written_to(tmp_path: Path) -> None:
    (tmp_path / "thesis.txt").write_text("mine")
    pack_documents(str(tmp_path / "other"), plan(), lambda: corpus(30), encode)
    other = content(str(tmp_path / "other"))
    with pytest.raises(BadInput, match=r"is not empty \(.*\) and not a dataset"):
        pack_documents(str(tmp_path), plan(), lambda: corpus(30), encode)
    made = pack_documents(str(tmp_path), plan(), lambda: corpus(30), encode, overwrite=True)
    assert (tmp_path / "thesis.txt").read_text() == "mine"
    assert content(str(tmp_path / "other")) == other
    for shard in made.dataset.shards:
        (tmp_path / shard.name).unlink()
    with pytest.raises(BadInput, match="is missing"):  # those of the other dataset are not taken for them
        check_dataset(str(tmp_path), rows="packed", tokenizer=None)


def test_too_little_text_for_a_row_is_said(tmp_path: Path) -> None:
    with pytest.raises(BadInput, match=r"the train split has 3 tokens in 1 documents, less than one row of 8"):
        pack_documents(str(tmp_path), plan(), lambda: ["1 2 3"], encode)


def test_ids_beyond_the_vocabulary_are_never_written(tmp_path: Path) -> None:
    with pytest.raises(BadInput, match="the tokenizer gave id 999, beyond its own vocabulary of 10"):
        pack_documents(str(tmp_path), plan(vocabulary=10), lambda: ["999 " * 50], encode)


def test_memory_does_not_grow_with_the_corpus(tmp_path: Path) -> None:
    """20 MB of text pass through batches and shards of a few hundred kB; Python's own peak stays below 8 MB."""
    text = " ".join(str(number % 1000) for number in range(20_000))

    def documents() -> Iterator[str]:
        for _ in range(250):
            yield text

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(pack, "BATCH_CHARACTERS", 1 << 16)
        tracemalloc.start()
        ids = np.arange(20_000, dtype=np.int32) % 1000
        made = pack_documents(str(tmp_path), plan(records_per_shard=5000), documents, lambda texts: [ids] * len(texts))
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
    assert made.dataset.records == 625_000
    assert peak < 8e6


ROW_LENGTH, END = 16, 999
TOKENS = SpecialTokens(-1, END, frozenset({END}), 1000, END)
TOKENIZER = Tokenizer("t", b"", "t", TOKENS)
PLAN = DatasetPlan("train", ROW_LENGTH, "t", vocabulary=1000, records_per_shard=4)


def write(url: str, documents: list[str], plan: DatasetPlan = PLAN) -> Any:
    return pack.write_rows(url, plan, lambda: documents, WholeDocuments(plan, TOKENIZER, encode)).dataset


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
    dataset = write(str(tmp_path_factory.mktemp("rows")), documents)
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
    long = sorted(piece for piece in expected if len(piece) > 1)
    assert sorted(piece for piece in found if len(piece) > 1) == long


def test_batches_do_not_depend_on_the_number_of_hosts(tmp_path: Path) -> None:
    dataset = write(str(tmp_path / "rows"), corpus(60))
    whole, *halves = (DocumentBatches(dataset, replace(HostSlice(TOKENS, 4), host=host, hosts=hosts), seed=3)
                      for host, hosts in ((0, 1), (0, 2), (1, 2)))  # fmt: skip
    for step in (0, 5):
        expected, parts = whole.batch(step), [half.batch(step) for half in halves]
        for name, values in vars(expected).items():
            np.testing.assert_array_equal(np.concatenate([getattr(part, name) for part in parts]), values)
    for source in (whole, *halves):
        source.close()


def test_rows_of_documents_need_an_end_and_no_mask() -> None:
    content = {"added_tokens": [{"id": 1, "content": "<|endoftext|>", "special": True}], "model": {"vocab": {"a": 0}}}
    assert special_tokens(content, "t", "documents") == SpecialTokens(-1, 1, frozenset({1}), 2, 1)
    with pytest.raises(BadInput, match=r"^t: the tokenizer has no mask token"):
        special_tokens(content, "t")
    with pytest.raises(BadInput, match=r"^t: the tokenizer has no end-of-text token \(one of <stop>\)"):
        special_tokens(content, "t", "documents", "<stop>")
