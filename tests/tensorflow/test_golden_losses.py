"""The losses of twenty steps are those of tests/golden, whatever was moved or renamed since."""

from pathlib import Path

import pytest

from tests.container.golden_losses import DOCUMENTS, assert_golden
from training.registry import TASKS


@pytest.mark.parametrize("task", [task for task in DOCUMENTS if TASKS[task].tensorflow])
def test_losses_are_the_golden_ones(task: str, tmp_path: Path) -> None:
    assert_golden(task, "tensorflow", tmp_path)
