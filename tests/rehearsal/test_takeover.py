"""Claims about a run whose launcher is gone for good: a supervisor that knows nothing but the bucket goes on with it,
and its weights and losses are those of the undisturbed run.

Trains twice on an emulated slice of two hosts, which is preempted once; about three minutes.
"""

from __future__ import annotations

import json
import shutil
import signal
from typing import Any

import pytest

from tests.rehearsal.test_recovery import FILE, require_the_same, settings, summary, trainable, undisturbed  # noqa: F401
from tests.rehearsal.workstation import Workstation

pytestmark = [pytest.mark.alone, pytest.mark.timeout(1200)]

RUNS = "gs://rehearsal/runs"


def state(work: Workstation, run: str) -> dict[str, Any]:
    """Returns the run's row of `list`."""
    listed = work.good("--emulated", "list", RUNS, "--json").output
    found: list[dict[str, Any]] = json.loads(listed[listed.index("[") :])
    return next(row for row in found if row["run"] == run)


def test_a_supervisor_elsewhere_finishes_a_run_whose_machine_is_gone(
    trainable: Workstation,  # noqa: F811
    undisturbed: dict[str, Any],  # noqa: F811
) -> None:
    work = trainable
    running = work.begin("--emulated", "run", "--new", "-f", FILE, *settings(), "--set", "run.preemption_retries=2")
    run = running.wait_for(r"^run \S+: attempt 0 on 2 hosts").split()[1].rstrip(":")
    running.wait_for(r"^\[0\].*\bstep +[6-9]/", 180)
    supervisor = work.begin("--emulated", "supervise", RUNS)
    supervisor.wait_for("supervising the runs of")
    assert state(work, run)["supervised by"], "the laptop's launcher"
    running.process.send_signal(signal.SIGKILL)
    shutil.rmtree(work.runs.parent)  # the laptop's folder: runs, addresses, hints
    supervisor.wait_for(rf"^run {run}: going on with it", 300)
    work.good("emulator", "inject", "preempt", "rehearsal")
    supervisor.wait_for(rf"^run {run}: recovered in ", 400)
    supervisor.wait_for(rf"^run {run}: its process ended with 0", 400)
    assert state(work, run) == {
        "run": run,
        "slice": "rehearsal",
        "attempt": 1,
        "state": "finished",
        "supervised by": "",
    }
    supervisor.process.terminate()
    assert supervisor.end(30).code == 0
    require_the_same(work, run, undisturbed)
    ended = work.good("--emulated", "events", "--run", f"{RUNS}/{run}").output
    assert ended.count("supervised: ") == 2, ended
    assert summary(work, run)["steps"] == undisturbed["steps"]
