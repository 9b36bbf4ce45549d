"""Odd circumstances on two hosts: two launchers, and a host that freezes
and wakes up too late."""

import os
import signal
import time
from pathlib import Path
from typing import Any

import pytest

from tests.container import small_runs
from tests.container.faulty_trainers import Attempt, Fault, Run, resumed_at
from training.checkpoint.format import committed_steps
from training.errors import Exit

SMALL = {
    "model__layers": 1,
    "model__hidden_size": 16,
    "data__evaluation": None,
    "train__steps": 24,
    "checkpoint__every_steps": 4,
    "export__at_end": False,
}


@pytest.fixture(scope="module")
def undisturbed(folder: Path) -> dict[str, Any]:
    run = Run(folder, "undisturbed", 2, small_runs.document(folder, **SMALL))
    attempt = run.start()
    assert attempt.finish() == [0, 0], attempt.everything()
    return run.summary()


def finish(run: Run, undisturbed: dict[str, Any]) -> Attempt:
    """The last attempt goes on from the newest checkpoint, and ends with the same bits."""
    newest = run.newest()
    attempt = run.start()
    assert attempt.finish() == [0, 0], attempt.everything()
    assert resumed_at(attempt.text()) == newest
    for key in ("first_loss", "last_loss", "final_weights_crc32c"):
        assert run.summary()[key] == undisturbed[key], key
    return attempt


def files_in(folder: str) -> dict[Path, bytes]:
    return {path: path.read_bytes() for path in Path(folder).rglob("*") if path.is_file()}


def wait_for(attempt: Attempt, text: str, seconds: float = 600) -> None:
    deadline = time.monotonic() + seconds
    while text not in attempt.text():
        assert time.monotonic() < deadline, f"no {text!r} within {seconds} s\n{attempt.everything()}"
        assert all(process.exitcode is None for process in attempt.processes), attempt.everything()
        time.sleep(0.02)


@pytest.mark.nightly
def test_of_two_launchers_on_one_run_the_later_goes_on_and_the_earlier_leaves(
    folder: Path, undisturbed: dict[str, Any]
) -> None:
    config = small_runs.document(folder, **SMALL)
    slow = {**config, "train": {**config["train"], "steps": 2000}}
    (folder / "second").mkdir()
    earlier, later = Run(folder, "twice", 2, slow), Run(folder / "second", "twice", 2, slow)
    first = earlier.start()
    wait_for(first, "step    5/2000")
    second = later.start()
    assert first.finish() == [Exit.BAD_INPUT, Exit.LOST_PEER], first.everything()
    assert "run twice was started again while this attempt 0 was training" in first.text()
    assert "only the newest start may commit" in first.text()
    wait_for(second, "/2000  loss")
    assert resumed_at(second.text()) >= 4
    os.kill(second.processes[0].pid or 0, signal.SIGTERM)
    assert second.finish() == [Exit.SAVED, Exit.SAVED], second.everything()
    assert later.newest() > resumed_at(second.text())


@pytest.mark.nightly
def test_a_host_that_freezes_in_a_save_is_named_and_can_do_no_harm_when_it_wakes_up(
    folder: Path, undisturbed: dict[str, Any]
) -> None:
    """Host 0, which keeps the rendezvous and was about to commit. The other one waits 12 s for its gradients, 5 s for
    news, and 20 s for an answer."""
    run = Run(folder, "frozen", 2, small_runs.document(folder, **SMALL, rendezvous__seconds=12))
    frozen = run.start({0: Fault("before the manifest", 2, signals=(signal.SIGSTOP,))})
    sleeper, other = frozen.processes
    other.join(120)
    assert other.exitcode == Exit.LOST_PEER, frozen.everything()
    assert "rendezvous 'after adding up gradients failed': host 0 did not answer within 20 s" in frozen.text(1), (
        frozen.everything()
    )
    assert run.newest() == 4
    run.config = small_runs.document(folder, **SMALL)
    finish(run, undisturbed)
    files = files_in(run.checkpoints)
    os.kill(sleeper.pid or 0, signal.SIGCONT)
    sleeper.join(60)
    assert sleeper.exitcode not in (None, 0, Exit.SAVED), frozen.everything()
    assert files.items() <= files_in(run.checkpoints).items(), "what was committed meanwhile is as it was"
    assert committed_steps(run.checkpoints)[0] == 24
