"""Claims about bits: datasets, batches and masks are those of tests/golden/data.json, whatever was moved or renamed."""

from pathlib import Path

import pytest

from tests.golden_data import (
    GOLDEN,
    LAYOUTS,
    MASKING,
    SEED,
    SLICES,
    STEPS,
    checksum,
    checksum_files,
    make_labelled,
    make_masked,
)
from training.data.loading.labelled_batches import LabelledBatches, labelled_evaluation
from training.data.loading.mlm_batches import MlmBatches, mlm_evaluation


@pytest.mark.parametrize("layout", LAYOUTS)
def test_masked_datasets_and_batches_are_the_golden_ones(layout: str, tmp_path: Path) -> None:
    dataset = make_masked(tmp_path, layout)
    checksums = checksum_files(tmp_path)
    for name, how in SLICES.items():
        batches = MlmBatches(dataset, how, MASKING, SEED)
        checksums[f"batches, {name}"] = checksum(vars(batches.batch(step)) for step in range(STEPS))
        checksums[f"far batches, {name}"] = checksum(vars(batches.batch(10**6 + step)) for step in range(STEPS))
        checksums[f"evaluation, {name}"] = checksum(map(vars, mlm_evaluation(dataset, how, MASKING)))
        batches.close()
    assert checksums == GOLDEN[f"masked, {layout}"]


def test_labelled_datasets_and_batches_are_the_golden_ones(tmp_path: Path) -> None:
    dataset = make_labelled(tmp_path)
    checksums = checksum_files(tmp_path)
    for name, how in SLICES.items():
        batches = LabelledBatches(dataset, how, SEED)
        checksums[f"batches, {name}"] = checksum(vars(batches.batch(step)) for step in range(STEPS))
        checksums[f"far batches, {name}"] = checksum(vars(batches.batch(10**6 + step)) for step in range(STEPS))
        checksums[f"evaluation, {name}"] = checksum(map(vars, labelled_evaluation(dataset, how)))
        batches.close()
    assert checksums == GOLDEN["labelled"]
