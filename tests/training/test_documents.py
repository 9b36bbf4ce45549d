"""Rows of whole documents: every document is in one row, once; labels and positions stay inside it."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.training.test_pack import corpus, encode
from training.data.formats.dataset import check_dataset
from training.data.loading.batches import DocumentBatches, document_evaluation
from training.data.loading.record_source import HostSlice
from training.data.prepare import pack
from training.data.prepare.dataset_writer import DatasetPlan
from training.data.prepare.pack import WholeDocuments, best_fit
from training.data.sampling.masking import SpecialTokens, special_tokens
from training.data.tokenizer import Tokenizer
from training.errors import BadInput

LENGTH, END = 16, 999
TOKENS = SpecialTokens(-1, END, frozenset({END}), 1000, END)
TOKENIZER = Tokenizer("t", b"", "t", TOKENS)
PLAN = DatasetPlan("train", LENGTH, "t", vocabulary=1000, records_per_shard=4)


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
        expected += [whole[start : start + LENGTH] for start in range(0, len(whole), LENGTH)]
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
                while end < LENGTH and weights[end - 1]:
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
