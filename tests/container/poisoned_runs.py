"""Regressions on data with an absurd label: of 1e30 the loss overflows, of 1e19 only the gradient norm does."""

from pathlib import Path
from typing import Any

import pytest

from tests.container import small_runs
from tests.container.test_regression_runs import document, prepare
from tests.processes import wait_until
from training.checkpoint.format import committed_steps, read_manifest
from training.errors import NonFinite
from training.telemetry.metrics import read_history

STEPS = 8


def poisoned_document(folder: Path, backend: str, label: float, **changes: Any) -> dict[str, Any]:
    """Eight steps over all of the data, in strict mode, with a checkpoint after each."""
    prepare(folder, 95, 19, {40: label})
    settings = {"train__steps": STEPS, "checkpoint__every_steps": 1, "checkpoint__keep_last": STEPS}
    return document(folder, seed=1, backend=backend, **{**settings, **changes})


def assert_skip_leaves_the_state_alone(folder: Path, backend: str, label: float, **changes: Any) -> None:
    """Bit for bit, moments included, in one program, and the step is counted."""
    config = poisoned_document(folder, backend, label, train__on_nonfinite="skip", **changes)
    check_skips(folder, small_runs.train_here(config, "skip"))


def check_skips(folder: Path, summary: dict[str, Any]) -> None:
    """Of the run "skip" in `folder`."""
    lines = [line for line in read_history(str(folder / "runs" / "skip")) if "learning_rate" in line]
    skipped = [line["step"] for line in lines if line.get("not_finite")]
    assert len(skipped) == summary["skipped_steps"] == lines[-1]["skipped_steps"]
    assert max(skipped) > 1, "no step was skipped that has a checkpoint before it"
    place = str(folder / "runs" / "skip" / "checkpoints")
    checksums = [[part.crc32c for part in read_manifest(place, step).parts] for step in range(1, STEPS + 1)]
    unchanged = [step for step in range(2, STEPS + 1) if checksums[step - 1] == checksums[step - 2]]
    assert unchanged == [step for step in skipped if step > 1]
    assert all(line["gradient_norm"] > 0 for line in lines if line["step"] not in skipped)


def assert_stop_commits_nothing_behind_it(folder: Path, backend: str, label: float) -> None:
    """The attempt ends at the step whose update is not finite, although the loss may be."""
    with pytest.raises(NonFinite) as raised:
        small_runs.train_here(poisoned_document(folder, backend, label), "stop")
    place, last = str(folder / "runs" / "stop" / "checkpoints"), [raised.value.step] if raised.value.step else []
    wait_until(lambda: committed_steps(place)[:1] == last)  # a save may be under way


def assert_two_hosts_skip_alike(folder: Path, backend: str) -> None:
    """Two processes, whose gradients meet between two programs, both leave the update out: else weights differ."""
    config = poisoned_document(folder, backend, 1e19, train__on_nonfinite="skip")
    check_skips(folder, small_runs.trained(folder, "skip", config, hosts=2))
