"""The losses of twenty steps are those of tests/golden, whatever was moved or renamed since."""

from pathlib import Path

import pytest

from tests.container.golden_losses import DOCUMENTS, assert_golden


@pytest.mark.parametrize("task", DOCUMENTS)
def test_losses_are_the_golden_ones(task: str, tmp_path: Path) -> None:
    assert_golden(task, "torch-xla", tmp_path)
