"""A step that is not finite, with tensorflow: `train.on_nonfinite`."""

from pathlib import Path

import pytest

from tests.container import poisoned_runs, small_runs


def test_a_skipped_step_leaves_the_state_bit_for_bit(tmp_path: Path) -> None:
    poisoned_runs.assert_skip_leaves_the_state_alone(tmp_path, "tensorflow", 1e19)


def test_an_overflowing_loss_is_skipped_under_xla(tmp_path: Path) -> None:
    poisoned_runs.assert_skip_leaves_the_state_alone(tmp_path, "tensorflow", 1e30, train__jit_compile=True)


def test_nothing_is_committed_after_an_infinite_gradient(tmp_path: Path) -> None:
    poisoned_runs.assert_stop_commits_nothing_behind_it(tmp_path, "tensorflow", 1e19)


@pytest.mark.nightly
def test_two_hosts_skip_the_same_update(tmp_path: Path) -> None:
    poisoned_runs.assert_two_hosts_skip_alike(tmp_path, "tensorflow")


@pytest.mark.nightly
def test_two_devices_skip_the_same_update(tmp_path: Path) -> None:
    """Under a strategy, as on a TPU."""
    config = poisoned_runs.poisoned_document(tmp_path, "tensorflow", 1e19, train__on_nonfinite="skip")
    poisoned_runs.check_skips(tmp_path, small_runs.trained(tmp_path, "skip", config, CPU_NUM_DEVICES="2"))
