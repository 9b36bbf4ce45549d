"""Claims about rows labelled with numbers: float32 in the shards and in the batches, padded and scheduled as usual."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from training.data.formats.dataset import Dataset, DatasetManifest, dump_manifest, load_manifest
from training.data.formats.verify import problems
from training.data.loading.batches import LabelledBatches, labelled_evaluation
from training.data.loading.record_source import HostSlice
from training.data.prepare.dataset_writer import DatasetPlan
from training.data.prepare.labelled_rows import FloatLabels, write_labelled_rows
from training.data.sampling.masking import SpecialTokens
from training.errors import BadInput

TOKENS = SpecialTokens(mask=4, pad=3, special=frozenset(range(5)), vocabulary=300)
VALUES = [(-1.0) ** number * number / 7 for number in range(100)]


def encode(texts: list[str]) -> list[Any]:
    """Texts are numbers: 3 to 14 tokens, the first of which is the number."""
    return [np.array([0, 5 + int(text), *[5] * (int(text) % 12), 1], np.int32) for text in texts]


def make(folder: Path, labels: list[Any] = VALUES) -> Dataset:
    plan = DatasetPlan("train", 16, "t", TOKENS.vocabulary, 30)
    rows = [(str(number), str(label)) for number, label in enumerate(labels)]
    return write_labelled_rows(str(folder), plan, (8, 16), FloatLabels(), lambda: rows, encode, TOKENS.pad).dataset


@pytest.mark.parametrize("hosts", [1, 2])
def test_each_row_keeps_its_number(tmp_path: Path, hosts: int) -> None:
    dataset = make(tmp_path)
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
        make(tmp_path, ["1.5", label])


def test_verify_finds_a_label_that_is_not_finite(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert list(problems(make(tmp_path / "good"))) == []
    monkeypatch.setattr(FloatLabels, "encode", lambda self, label, url: float(label))
    [problem] = problems(make(tmp_path / "bad", ["0.5", "nan"]))
    assert problem.endswith("record 1 has label nan, which is not a finite number")


def test_a_manifest_whose_label_is_of_another_type_is_refused(tmp_path: Path) -> None:
    body = make(tmp_path).manifest.model_dump()
    body["features"]["label"]["dtype"] = "int32"
    with pytest.raises(BadInput, match="the label of number-labelled rows can't be int32"):
        load_manifest(dump_manifest(DatasetManifest.model_validate(body)), "x")


def test_rows_without_labels_are_not_labelled_rows(samples: Any, tmp_path: Path) -> None:
    with pytest.raises(BadInput, match="holds packed rows, which have no label"):
        LabelledBatches(samples.make(tmp_path / "mlm", 20), HostSlice(TOKENS, 4), 0)
