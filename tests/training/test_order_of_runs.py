"""A run goes on with the order of records that it began with; a new run takes ORDER_VERSION. With the real loop."""

from __future__ import annotations

import functools
from pathlib import Path

import pytest
from click.testing import CliRunner

from tests.container import small_runs
from tests.training.numpy_backend import Runs
from training.checkpoint.admin import newest_manifest
from training.cli.data import dataset
from training.data.sampling import order
from training.errors import BadInput, StopRequested
from training.tasks.mlm import task
from training.tasks.task import training_slice

VERSIONS = order.ORDER_VERSIONS


@pytest.fixture
def runs(tmp_path: Path) -> Runs:
    return Runs(tmp_path)


def train(runs: Runs, run_id: str, attempt: int, new_runs: int, stop_after: int | None = None) -> list[float]:
    """An attempt by a program whose new runs take the order `new_runs`. Returns all losses of the run."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(task, "training_slice", functools.partial(training_slice, order_version=new_runs))
        if stop_after is None:
            runs.train(run_id, attempt)
        else:
            with pytest.raises(StopRequested):
                runs.train(run_id, attempt, shutdown=small_runs.StopAfter(stop_after))
    return small_runs.losses(runs.folder, run_id)


def test_a_run_goes_on_with_its_order_whatever_new_runs_take(runs: Runs) -> None:
    whole = {version: train(runs, f"whole-{version}", 0, version) for version in VERSIONS}
    assert whole[1] != whole[2]
    for version, other in (VERSIONS, VERSIONS[::-1]):
        train(runs, f"run-{version}", 0, version, stop_after=17)
        assert train(runs, f"run-{version}", 1, other) == whole[version]
        assert order.version_of(newest_manifest(str(runs.path(f"run-{version}"))).identity) == version


def test_a_checkpoint_that_names_no_order_is_of_the_first(runs: Runs) -> None:
    train(runs, "old", 0, 1, stop_after=17)
    assert order.VERSION_KEY not in newest_manifest(str(runs.path("old"))).identity


def test_a_new_run_takes_the_newest_order(runs: Runs) -> None:
    runs.train("new", 0)
    assert order.version_of(newest_manifest(str(runs.path("new"))).identity) == order.ORDER_VERSION


def test_an_order_of_a_later_program_is_refused_in_one_line(runs: Runs, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as later:
        later.setattr(order, "identity", lambda version: {order.VERSION_KEY: 3})
        train(runs, "later", 0, 2, stop_after=17)
    with pytest.raises(BadInput, match="have version 3 of the order of records") as refusal:
        runs.train("later", 1)
    assert "\n" not in str(refusal.value)


def test_preview_shows_the_order_that_the_run_takes(runs: Runs) -> None:
    shown = {}
    for version in VERSIONS:
        train(runs, f"run-{version}", 0, version, stop_after=17)
        urls = [str(runs.folder / "train"), "--tokenizer", str(runs.folder / "tokenizer"), "--global-batch-size", "8"]
        options = ["--seed", "1", "--rows", "8", "--run", str(runs.path(f"run-{version}"))]
        shown[version] = CliRunner().invoke(dataset, ["preview", *urls, *options], catch_exceptions=False).output
        assert shown[version].startswith(f"batch 0 of seed 1 in order {version}, ")
        new = CliRunner().invoke(dataset, ["preview", *urls], catch_exceptions=False).output
        assert new.startswith(f"batch 0 of seed 0 in order {order.ORDER_VERSION}, ")
    assert shown[1].splitlines()[1:] != shown[2].splitlines()[1:]
