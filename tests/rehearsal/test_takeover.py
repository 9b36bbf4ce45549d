"""Claims about a run whose launcher is gone for good: a supervisor that knows nothing but the bucket goes on with it,
and its losses and weights are those of the undisturbed run.

Trains twice on an emulated slice of two hosts, which is preempted once; about two minutes.
"""

import json
import shutil
import signal
from typing import Any

import pytest

from tests.rehearsal.test_recovery import FILE, summary, trainable  # noqa: F401  (a fixture)
from tests.rehearsal.workstation import COMPILE_FAST, Running, Workstation

pytestmark = [pytest.mark.alone, pytest.mark.timeout(2400)]

RUNS = "gs://rehearsal/runs"
STEPS = 40
SETTINGS = (
    *(f"train.steps={STEPS}", "train.global_batch_size=8", "train.log_every=1", "train.warmup_steps=2"),
    *("checkpoint.every_steps=4", f"evaluation.every={STEPS}", "run.preemption_retries=2"),
)


def train(work: Workstation, *options: str) -> Running:
    settings = [word for setting in SETTINGS for word in ("--set", setting)]
    return work.begin("--emulated", "run", "--new", "-f", FILE, *COMPILE_FAST, *settings, *options)


def state(work: Workstation, run: str) -> dict[str, Any]:
    """Returns the run's row of `list`."""
    listed = work.good("--emulated", "list", RUNS, "--json").output
    found: list[dict[str, Any]] = json.loads(listed[listed.index("[") :])
    return next(row for row in found if row["run"] == run)


def test_a_supervisor_elsewhere_finishes_a_run_whose_machine_is_gone(trainable: Workstation) -> None:  # noqa: F811
    work = trainable
    running = train(work)
    run = running.wait_for(r"run \S+: attempt 0 on 2 hosts", 300).split("run ")[1].split(":")[0]
    supervisor = work.begin("--emulated", "supervise", RUNS)
    running.wait_for(r"^\[0\].*\bstep +[6-9]/", 900)
    assert state(work, run)["supervised by"], "the launcher that is about to die"
    running.process.send_signal(signal.SIGKILL)
    shutil.rmtree(work.runs.parent)  # the folder of that machine: runs, addresses, hints
    supervisor.wait_for(rf"run {run}: taken over by", 300)
    work.good("emulator", "inject", "preempt", "rehearsal")
    supervisor.wait_for(rf"run {run}: recovered in ", 900)
    supervisor.wait_for(rf"run {run}: its process ended with 0", 900)
    assert state(work, run) == {
        "run": run,
        "slice": "rehearsal",
        "attempt": 1,
        "state": "finished",
        "supervised by": "",
    }
    supervisor.process.terminate()
    assert supervisor.end(60).code == 0, supervisor.lines
    ended = work.good("--emulated", "events", "-f", f"{RUNS}/{run}").output
    print("\n".join(supervisor.lines), ended, sep="\n")
    assert ended.count(": supervised: ") == 2, "a supervisor each"

    undisturbed = train(work, "--json").end(900)
    assert undisturbed.code == 0, undisturbed.output
    expected, after = summary(work, undisturbed.json()["run"]), summary(work, run)
    for key in ("first_loss", "last_loss", "eval_loss", "final_weights_crc32c", "committed_step", "steps"):
        assert after[key] == expected[key], key
    assert len(after["history"]) > STEPS // 2
    assert {step: loss for step, loss in after["history"] if loss != dict(expected["history"])[step]} == {}
