"""Claims about bits: the tf.data pipeline gives the batches of tests/golden/data.json, which numpy's gives too.

For one layout: that both give the same for every layout and task is what test_input.py says.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tests.golden_data import GOLDEN, MASKING, SEED, SLICES, checksum, checksum_files, first_batches, make_masked
from training.data.tf.mlm_batches import mlm_batches, mlm_evaluation


def fields(batches: Any) -> Iterator[dict[str, Any]]:
    """The arrays that numpy's batches have too."""
    for batch in batches.as_numpy_iterator():
        yield {name: values for name, values in batch.items() if name != "replaced"}


def test_masked_batches_are_the_golden_ones(tmp_path: Path) -> None:
    dataset = make_masked(tmp_path, "compact")
    checksums = checksum_files(tmp_path)
    for name, how in SLICES.items():
        checksums[f"batches, {name}"] = first_batches(fields(mlm_batches(dataset, how, MASKING, SEED)))
        checksums[f"far batches, {name}"] = first_batches(fields(mlm_batches(dataset, how, MASKING, SEED, 10**6)))
        checksums[f"evaluation, {name}"] = checksum(fields(mlm_evaluation(dataset, how, MASKING)))
    assert checksums == GOLDEN["masked, compact"]
