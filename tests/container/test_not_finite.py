"""A step that is not finite, with torch-xla: `train.on_nonfinite`."""

from pathlib import Path

import pytest

from tests.container import poisoned_runs


@pytest.mark.parametrize("label", [1e19, 1e30], ids=["gradient", "loss"])
def test_a_skipped_step_leaves_the_state_bit_for_bit(tmp_path: Path, label: float) -> None:
    poisoned_runs.assert_skip_leaves_the_state_alone(tmp_path, "torch-xla", label)


def test_nothing_is_committed_after_an_infinite_gradient(tmp_path: Path) -> None:
    poisoned_runs.assert_stop_commits_nothing_behind_it(tmp_path, "torch-xla", 1e19)


@pytest.mark.nightly
def test_two_hosts_skip_the_same_update(tmp_path: Path) -> None:
    poisoned_runs.assert_two_hosts_skip_alike(tmp_path, "torch-xla")
