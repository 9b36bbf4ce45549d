"""Claims about a run that follows capacity without the machine that began it: its launcher is killed for good when the
first slice is taken away, a supervisor in the launcher's image, which knows nothing but the bucket, goes on with it on
slices of other types and sizes, and its losses are those of the undisturbed run.

Trains twice: on an emulated v4-16, and on a v4-16, a v3-8 (virtual TPU) and a v4-32; about eight minutes.
"""

import json
import re
import shutil
import signal
import time
from pathlib import Path
from typing import Any

import pytest

from launcher.emulator import control
from tests.rehearsal.test_launcher_image import argv_of, emulated_options, image  # noqa: F401  (a fixture)
from tests.rehearsal.test_recovery import FILE, summary, trainable  # noqa: F401  (a fixture)
from tests.rehearsal.workstation import COMPILE_FAST, Running, Workstation
from training import storage

pytestmark = [pytest.mark.alone, pytest.mark.timeout(2400)]

RUNS = "gs://rehearsal/runs"
STEPS = 160
SETTINGS = (
    *(f"train.steps={STEPS}", "train.global_batch_size=16", "train.log_every=1", "train.warmup_steps=2"),
    *("checkpoint.every_steps=10", f"evaluation.every={STEPS}"),
)
CANDIDATES = (
    "slice.capacity=spot",
    "slice.candidates=[{accelerator_type: v3-8, zones: [us-central1-a]}, {accelerator_type: v4-32}]",
    *("slice.stockout_minutes=10", "slice.price_limit=30", "run.preemption_retries=3"),
)
STOCK = """\
stock:
- {zone: us-central2-b, accelerator_type: v4-16, capacity: spot, slices: [[0, %d]]}
- {zone: us-central1-a, accelerator_type: v3-8, capacity: spot, slices: [[0, %d]]}
- {zone: us-central2-b, accelerator_type: v4-32, capacity: spot, slices: [[0, %d]]}
"""


def words(settings: tuple[str, ...]) -> list[str]:
    return [*COMPILE_FAST, *(word for setting in settings for word in ("--set", setting))]


def enter_stock(work: Workstation, *slices: int) -> None:
    work.good("emulator", "stock", work.file("stock.yaml", STOCK % slices))


def wait_for_commit(run: str, after: int, running: Running) -> int:
    """Waits until a checkpoint of a later step than `after` is committed; returns its step."""
    while True:
        urls = [found.url for found in storage.listing(f"{RUNS}/{run}/checkpoints")]
        steps = [int(found[1]) for url in urls if (found := re.search(r"step-(\d+)/manifest\.json$", url))]
        if max(steps, default=0) > after:
            return max(steps)
        assert running.process.poll() is None, running.lines
        time.sleep(0.2)


def ask(work: Workstation, *arguments: str) -> list[dict[str, Any]]:
    output = work.good("--emulated", *arguments, "--json").output
    found: list[dict[str, Any]] = json.loads(output[output.index("[") :])
    return found


def test_a_supervisor_in_a_container_finishes_a_run_on_other_slices_when_its_machine_is_gone(
    trainable: Workstation,  # noqa: F811
    image: str,  # noqa: F811
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    work, emulator = trainable, trainable.folder / ".tpu-launch" / "emulator"
    monkeypatch.setenv("STORAGE_EMULATOR_HOST", control.environment(emulator)["STORAGE_EMULATOR_HOST"])
    begun = work.good("--emulated", "run", "--new", "-f", FILE, "--json", *words(SETTINGS), seconds=600)
    undisturbed = summary(work, begun.json()["run"])
    work.good("--emulated", "down", "-f", FILE)

    enter_stock(work, 1, 0, 0)
    up = work.good("--emulated", "up", "-f", FILE, *words(CANDIDATES))
    assert "slice rehearsal is READY: 2 hosts, 8 devices of a v4-16" in up.output
    running = work.begin("--emulated", "run", "--new", "-f", FILE, *words(SETTINGS + CANDIDATES))
    run = running.wait_for(r"run \S+: attempt 0 on 2 hosts", 300).split("run ")[1].split(":")[0]
    command = argv_of(image, "supervise", RUNS, options=emulated_options(work, tmp_path))
    supervisor = work.begin_other(command)
    supervisor.wait_for(f"supervising the runs of {RUNS}", 120)
    first = wait_for_commit(run, 0, running)
    running.process.send_signal(signal.SIGKILL)
    killed = time.monotonic()
    shutil.rmtree(work.runs.parent)  # the folder of that machine: runs, addresses, hints
    enter_stock(work, 0, 1, 0)
    supervisor.wait_for(rf"run {run}: taken over by", 300)
    seconds = time.monotonic() - killed
    print(f"taken over {seconds:.1f} s after the launcher's death")
    assert seconds <= 60
    supervisor.wait_for(rf"run {run}: attempt 1 on 1 hosts", 900)
    wait_for_commit(run, first, supervisor)
    enter_stock(work, 0, 0, 1)
    supervisor.wait_for(rf"run {run}: attempt 2 on 4 hosts", 900)
    supervisor.wait_for(rf"run {run}: its process ended with 0", 900)
    [state] = [row for row in ask(work, "list", RUNS) if row["run"] == run]
    assert (state["attempt"], state["state"], state["supervised by"]) == (2, "finished", "")
    supervisor.process.terminate()
    assert supervisor.end(60).code == 0, supervisor.lines
    told = [event["event"] for event in ask(work, "events", "-f", f"{RUNS}/{run}")]
    assert told.count("supervised") == 2, "a supervisor each"

    after, expected = summary(work, run), dict(undisturbed["history"])
    assert len(after["history"]) > STEPS // 2
    apart = {step: abs(loss / expected[step] - 1) for step, loss in after["history"]}
    print(f"largest relative difference of {len(apart)} losses: {max(apart.values()):.1e}")
    assert max(apart.values()) <= 1e-6, apart

    asked = ask(work, "capacity", "-f", f"{RUNS}/{run}")
    assert [(each["candidate"]["accelerator_type"], each["outcome"]) for each in asked if each["granted"]] == [
        *(("v4-16", "taken away"), ("v3-8", "taken away")),
        ("v4-32", ""),
    ]
    work.good("--emulated", "down", "-f", f"{RUNS}/{run}")
    assert control.status(emulator)["nodes"] == []
