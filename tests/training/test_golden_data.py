"""Claims about bits: datasets, batches and masks are those of tests/golden/data.json, whatever was moved or renamed.

Another checksum of batches means that a seed no longer means what it meant: resumed runs would see other batches.
TensorFlow's are the same: tests/tensorflow/test_input.py.
"""

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import google_crc32c
import numpy as np
import pytest

from tests.packed_datasets import pack_rows
from training.data.formats.dataset import Dataset
from training.data.loading.batches import LabelledBatches, MlmBatches, labelled_evaluation, mlm_evaluation
from training.data.loading.record_source import HostSlice
from training.data.prepare.dataset_writer import DatasetPlan
from training.data.prepare.labelled_rows import ClassLabels, write_labelled_rows
from training.data.sampling.masking import Masking, SpecialTokens

GOLDEN: dict[str, dict[str, str]] = json.loads((Path(__file__).parents[1] / "golden" / "data.json").read_text())
TOKENS = SpecialTokens(mask=4, pad=3, special=frozenset(range(5)), vocabulary=300)
LENGTH, RECORDS, SEED = 16, 600, 7
STEPS = 4
MASKING = Masking(20)
SLICES = {"alone": HostSlice(TOKENS, 24), "second of two": HostSlice(TOKENS, 24, 1, 2)}


def make_masked(folder: Path, layout: str) -> Dataset:
    """A dataset for masked language modelling, with some special tokens in its rows."""
    rows = np.random.default_rng(0).integers(2, TOKENS.vocabulary, (RECORDS, LENGTH)).astype(np.int32)
    plan = DatasetPlan("train", LENGTH, "t", TOKENS.vocabulary, 250, layout)
    return pack_rows(folder, plan, rows)


def make_labelled(folder: Path) -> Dataset:
    """Texts of 3 to 20 tokens in buckets of 4, 8 and 16."""
    random = np.random.default_rng(1)
    texts = [random.integers(5, TOKENS.vocabulary, random.integers(3, 21)).astype(np.int32) for _ in range(RECORDS)]
    names = ("card", "cash", "transfer")
    rows = [(str(number), names[len(text) % 3]) for number, text in enumerate(texts)]
    plan = DatasetPlan("train", LENGTH, "t", TOKENS.vocabulary, 100)

    def encode(numbers: list[str]) -> list[Any]:
        return [texts[int(number)] for number in numbers]

    kind = ClassLabels(names)
    return write_labelled_rows(str(folder), plan, (4, 8, 16), kind, lambda: rows, encode, TOKENS.pad).dataset


def checksum(arrays: Iterable[Mapping[str, Any]]) -> str:
    """CRC-32C over the names, types, shapes and bytes of all arrays of all batches, without `replaced`."""
    crc = 0
    for batch in arrays:
        for name in sorted(set(batch) - {"replaced"}):
            values = np.ascontiguousarray(batch[name])
            crc = google_crc32c.extend(crc, f"{name} {values.dtype} {values.shape}".encode() + values.tobytes())
    return f"{crc:08x}"


def checksum_files(folder: Path) -> dict[str, str]:
    """Returns {"files": CRC-32C over the names and bytes of all files}."""
    crc = 0
    for path in sorted(path for path in folder.iterdir() if path.is_file()):
        crc = google_crc32c.extend(crc, path.name.encode() + path.read_bytes())
    return {"files": f"{crc:08x}"}


@pytest.mark.parametrize("content", ["masked, compact", "masked, recipe", "labelled"])
def test_datasets_and_batches_are_the_golden_ones(content: str, tmp_path: Path) -> None:
    labelled = content == "labelled"
    dataset = make_labelled(tmp_path) if labelled else make_masked(tmp_path, content.removeprefix("masked, "))
    checksums = checksum_files(tmp_path)
    for name, how in SLICES.items():
        batches = LabelledBatches(dataset, how, SEED) if labelled else MlmBatches(dataset, how, MASKING, SEED)
        evaluation = labelled_evaluation(dataset, how) if labelled else mlm_evaluation(dataset, how, MASKING)
        checksums[f"batches, {name}"] = checksum(vars(batches.batch(step)) for step in range(STEPS))
        checksums[f"far batches, {name}"] = checksum(vars(batches.batch(10**6 + step)) for step in range(STEPS))
        checksums[f"evaluation, {name}"] = checksum(map(vars, evaluation))
        batches.close()
    assert checksums == GOLDEN[content]
