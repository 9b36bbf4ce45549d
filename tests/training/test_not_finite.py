"""Checks that what is not finite is neither committed nor restored, and ends a run only when retrying is useless."""

import json
from pathlib import Path
from unittest.mock import Mock

import pytest

from tests.container.small_runs import StopAfter
from tests.training.numpy_backend import Runs
from training.checkpoint.format import committed_steps
from training.checkpoint.reader import verify
from training.errors import BadInput, NonFinite, StopRequested
from training.progress import MOST_STEPS_BACK, NonFiniteHistory
from training.telemetry.metrics import read_history
from training.telemetry.report import NonFiniteStep, write_report


@pytest.fixture
def runs(tmp_path: Path) -> Runs:
    return Runs(tmp_path)


def steps(runs: Runs, run_id: str) -> list[int]:
    """The committed steps, newest first, each of which is whole and finite."""
    folder = str(runs.path(run_id) / "checkpoints")
    committed = committed_steps(folder)
    for step in committed:
        verify(folder, step)
    return committed


@pytest.mark.parametrize("bad_step", [19, 39])
def test_an_update_that_is_not_finite_is_not_committed(runs: Runs, bad_step: int) -> None:
    """Its own loss is finite: only the gradient norm tells. Step 19 is the one before a save, 39 the run's last."""
    with pytest.raises(NonFinite, match=rf"the gradient norm of step {bad_step} is nan.*No later step is saved"):
        runs.train("r", 0, lambda number: "update" if number == bad_step else None)
    assert steps(runs, "r")[0] == bad_step - 9
    assert (runs.train("r", 1)["steps"], steps(runs, "r")[0]) == (40, 40)


def test_the_same_step_twice_is_an_end_that_no_attempt_changes(runs: Runs) -> None:
    why = r"loss of step 35 is nan; the last finite one was \d.*Records .*: \d"
    for error in (NonFinite, BadInput, BadInput):
        with pytest.raises(error, match=why) as raised:
            runs.train("r", 0, lambda number: "loss" if number == 35 else None)
    assert "trying again changes nothing" in str(raised.value)
    assert steps(runs, "r")[0] == 30
    assert "loss of step 35 is nan" in (runs.path("r") / "report.html").read_text()
    # Another configuration may do better.
    assert runs.train("r", 1, train__learning_rate=0.001)["steps"] == 40


def test_a_checkpoint_before_a_step_not_finite_is_passed_over(runs: Runs, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(StopRequested):
        runs.train("r", 0, shutdown=StopAfter(21))
    assert steps(runs, "r")[0] > 20
    newest = steps(runs, "r")[0]
    with pytest.raises(NonFinite, match=f"the next attempt goes back one checkpoint, before step {newest}"):
        runs.train("r", 1, lambda number: "loss" if number == newest else None)
    summary = runs.train("r", 2)
    assert "going on from " + str(runs.path("r") / "checkpoints" / "step-00000020") in capsys.readouterr().out
    assert (summary["steps"], steps(runs, "r")[0]) == (40, 40)


def test_a_run_goes_back_a_few_checkpoints_and_not_for_ever() -> None:
    def record(step: int) -> NonFiniteStep:
        return NonFiniteStep(step, step, f"part-of-{step}", "p")

    records = tuple(record(step) for step in range(90, 90 - 10 * MOST_STEPS_BACK, -10))
    assert NonFiniteHistory(records).suspects == {"part-of-90", "part-of-80"}
    error = NonFinite(70, "the loss of step 70 is nan")
    assert isinstance(NonFiniteHistory(records[:1]).judge(error, 70), NonFinite)
    assert isinstance(NonFiniteHistory(records).judge(error, 70), BadInput)


def test_skipped_steps_leave_the_state_and_count_over_attempts(runs: Runs, capsys: pytest.CaptureFixture[str]) -> None:
    def fault(number: int) -> str | None:
        return {5: "loss", 25: "update"}.get(number)

    changes = {"train__on_nonfinite": "skip"}
    with pytest.raises(StopRequested):
        runs.train("r", 0, fault, shutdown=StopAfter(12), **changes)
    summary = runs.train("r", 1, fault, **changes)
    assert (summary["skipped_steps"], summary["steps"]) == (2, 40)
    lines = {line["step"]: line for line in read_history(str(runs.path("r"))) if "gradient_norm" in line}
    assert [lines[6][name] for name in ("loss", "gradient_norm")] == [None, None]
    assert lines[6]["not_finite"] == ["loss", "gradient_norm"]
    assert lines[26]["loss"] is not None
    assert [lines[step]["skipped_steps"] for step in (5, 6, 25, 26, 40)] == [0, 1, 1, 2, 2]
    assert lines[40]["gradient_norm"] == 0.5
    assert "the loss of step 5 is nan: its update was skipped (1 so far)" in capsys.readouterr().err
    page = Path(write_report(str(runs.path("r")))).read_text()
    assert "Gradient norm" in page
    assert "2 step(s) were skipped" in page


def test_an_evaluation_not_finite_is_named_and_all_stays_json(runs: Runs, capsys: pytest.CaptureFixture[str]) -> None:
    best = {"metric": "loss", "mode": "min"}  # so that saves come after evaluations, and know their figures
    changes = {"evaluation_loss": float("nan"), "evaluation__every": 10, "checkpoint__best": best}
    with pytest.raises(StopRequested):
        runs.train("r", 0, shutdown=StopAfter(20), **changes)
    summary = runs.train("r", 1, **changes)
    assert summary["eval_loss"] is None
    assert summary["not_finite"] == ["eval_loss", "eval_perplexity"]
    refuse = Mock(side_effect=AssertionError("a literal that is not JSON"))
    documents = [path for path in runs.path("r").rglob("*.json*") if path.is_file()]
    assert len(documents) > 5
    for path in documents:
        for text in path.read_text().splitlines() if path.suffix == ".jsonl" else [path.read_text()]:
            json.loads(text, parse_constant=refuse)
    assert "the evaluation after step 10 is not finite: loss, perplexity" in capsys.readouterr().err
    assert "not finite" in Path(write_report(str(runs.path("r")))).read_text()
