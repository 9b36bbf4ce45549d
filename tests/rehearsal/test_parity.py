"""Both backends do the same training (`make benchmark NAME=parity`): 16 small runs in each one's image, 90 s."""

from pathlib import Path

import pytest

from benchmarks import parity

pytestmark = pytest.mark.alone


@pytest.mark.nightly
@pytest.mark.timeout(1800)  # two frameworks' imports and compilations, on a machine that may be busy
def test_losses_batches_checkpoints_and_models_of_both_backends_agree(tmp_path: Path) -> None:
    rows = {row["name"]: row for row in parity.compare(tmp_path)}
    assert len(rows) == 19
    for name, row in rows.items():
        assert row["ours"] <= row["peer"], name
    losses = parity.losses(tmp_path, "mlm-1-tensorflow")
    assert losses[-1] < losses[0] - 0.1, "it learns"
