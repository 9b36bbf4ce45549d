"""SIGTERM on one of two hosts, in each phase of a run: both leave with 75, one step is committed, and the run goes on
to the same bits."""

import signal
import time
from pathlib import Path

import pytest

from tests.container import small_runs
from tests.container.faulty_trainers import Fault, Run, resumed_at
from training.errors import Exit
from training.telemetry import metrics

TERM = (signal.SIGTERM,)
SMALL = {
    "model__layers": 1,
    "model__hidden_size": 16,
    "train__steps": 16,
    "checkpoint__every_steps": 4,
    "evaluation__every": 6,
}


# In this order one attempt after the other, each with the step that it is to commit; the saves are of steps 4, 8, 12
# and 16, the evaluations after 6, 12, 16.
PHASES = {
    "start-up": (1, Fault("starting", signals=TERM), 0),
    "compile": (
        1,
        Fault("compiling", delay=0.2, signals=TERM),
        2,
    ),  # the step that compiles, and the one that tells the others
    "step": (0, Fault("a step", 2, signals=TERM), 4),
    "evaluation": (1, Fault("evaluating", 2, signals=TERM), 6),
    # Of step 8, while further steps run; the engine and the launcher ask.
    "save": (1, Fault("before the part", 1, signals=TERM * 2), None),
    "final export": (0, Fault("exporting", signals=TERM), 16),
}


@pytest.mark.nightly
@pytest.mark.timeout(1200)
def test_asked_to_stop_in_any_phase(folder: Path) -> None:
    run = Run(folder, "stopped", 2, small_runs.document(folder, **SMALL))
    for phase, (worker, fault, expected) in PHASES.items():
        before = run.newest()
        attempt = run.start({worker: fault})
        assert attempt.finish() == [Exit.SAVED, Exit.SAVED], f"{phase}\n{attempt.everything()}"
        assert resumed_at(attempt.text()) == before
        committed = run.newest()
        assert f"stopped after step {committed}, which is committed" in attempt.text(0), phase
        assert f"stopped after step {committed}, which is committed" in attempt.text(1), phase
        assert committed == expected if expected is not None else 8 <= committed <= 12, (
            f"{phase}: {committed}\n{attempt.everything()}"
        )
    assert not (Path(run.output) / "summary.json").exists()

    straight = Run(folder, "straight", 2, small_runs.document(folder, **SMALL))
    attempts = [run.start(), straight.start()]
    assert [attempt.finish() for attempt in attempts] == [[0, 0], [0, 0]], attempts[0].everything()
    for key in ("first_loss", "last_loss", "eval_loss", "final_weights_crc32c", "committed_step"):
        assert run.summary()[key] == straight.summary()[key], key
    histories = [
        [(line["step"], line["loss"]) for line in metrics.read_history(other.output) if "loss" in line]
        for other in (run, straight)
    ]
    assert histories[0] == histories[1]
    assert run.history() == straight.history()


LONG_COMPILATION = {"model__layers": 6, "train__steps": 4}


def test_a_compilation_that_outlives_the_budget_is_left_with_the_last_commit_as_the_state(folder: Path) -> None:
    run = Run(folder, "long", 2, small_runs.document(folder, **LONG_COMPILATION, checkpoint__stop_seconds=0.5))
    began = time.monotonic()
    attempt = run.start({1: Fault("compiling", delay=0.2, signals=TERM)})
    assert attempt.finish(300) == [Exit.SAVED, Exit.SAVED], attempt.everything()
    print(f"left {time.monotonic() - began:.1f} s after the start")
    assert (
        "could not stop in good order within 0.5 s (checkpoint.stop_seconds); the run goes on from its last commit"
        in attempt.text(1)
    )
    assert (
        "host 1 stopped in phase 'step 0, the first of this attempt' with exit code 75: could not stop in good order"
        in attempt.text(0)
    )
    assert "step 1/4" not in attempt.text(0), "the compilation was to be cut short"


def test_a_second_ctrl_c_in_a_compilation_ends_it_at_once(folder: Path) -> None:
    run = Run(folder, "twice", 2, small_runs.document(folder, **LONG_COMPILATION))
    attempt = run.start({1: Fault("compiling", delay=0.2, signals=(signal.SIGINT, signal.SIGINT))})
    assert attempt.finish(300) == [Exit.LOST_PEER, 128 + signal.SIGINT], attempt.everything()
    assert "leaving at once, without saving" in attempt.text(1)
    assert "host 1 is gone" in attempt.text(0)
    assert "step 1/4" not in attempt.text(0), "the compilation was to be cut short"
