"""Claims about runs that lose hosts, slices or their launcher, beside an undisturbed run.

- A run that loses a host fails fast with the right first cause, and ends with the undisturbed run's bits.
- A run whose launcher is killed for good when the first slice is taken away is finished on slices of other types and
  sizes, with the undisturbed run's losses, by a supervisor in the launcher's image that knows nothing but the bucket.

Trains on emulated slices: on a v4-16 three times, then on a v3-8 (virtual TPU) and a v4-32; about ten minutes.
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
from tests.container import small_runs
from tests.processes import wait_until
from tests.rehearsal.test_launcher_image import argv_of, emulated_options, image  # noqa: F401  (a fixture)
from tests.rehearsal.workstation import ROOT, Running, Workstation, settings
from tests.xla_flags import UNOPTIMIZED
from training import storage

pytestmark = pytest.mark.alone

FILE = "rehearsal.yaml"
LOCAL = ("-f", FILE)
RUNS = "gs://rehearsal/runs"
STEPS = 160
SETTINGS = (
    *(f"train.steps={STEPS}", "train.global_batch_size=16", "train.log_every=1", "train.warmup_steps=2"),
    *("checkpoint.every_steps=5", f"evaluation.every={STEPS // 2}"),
)


@pytest.fixture(scope="module")
def trainable(emulator: Workstation) -> Workstation:
    """A READY slice of two hosts, and data in the bucket, by a role that has just what is needed."""
    emulator.good("emulator", "inject", "object-user")
    shutil.copy(ROOT / "examples" / "rehearsal.yaml", emulator.folder / FILE)
    emulator.good("--emulated", "up", "-f", FILE)
    emulator.make_data(LOCAL)
    return emulator


def small(*more: str) -> list[str]:
    flags = f"run.environment.XLA_FLAGS={UNOPTIMIZED}"  # the virtual TPU knows no others
    return settings(flags, *SETTINGS, *more)


@pytest.fixture(scope="module")
def undisturbed(trainable: Workstation) -> dict[str, Any]:
    trained = trainable.good("--emulated", "run", "--new", "-f", FILE, "--json", *small())
    return trainable.results(trained.json()["run"], LOCAL)


def require_the_same(work: Workstation, run_id: str, undisturbed: dict[str, Any]) -> None:
    after = work.results(run_id, LOCAL)
    small_runs.require_same_bits(after, undisturbed, "committed_step", "steps")
    # A step's batch is a function of its number, and each loss is that of the same batch and the same weights: so every
    # record was trained exactly once. Lines that were not written yet when a host died are missing.
    expected = dict(undisturbed["history"])
    steps = [step for step, _ in after["history"]]
    assert list(expected) == list(range(1, STEPS + 1))
    assert steps == sorted(set(steps))
    assert len(steps) > STEPS // 2
    assert {step: loss for step, loss in after["history"] if loss != expected[step]} == {}


def step_after(running: Running, pattern: str, seconds: float = 240) -> None:
    """Until host 0 has told of a step after the first line that matches."""
    first = running.lines.index(running.wait_for(pattern, seconds))
    lines = running.lines
    wait_until(lambda: any(line.startswith("[0] step") for line in lines[first:]), seconds, lambda: lines)


@pytest.mark.timeout(900)  # five attempts, each of which may be slow on a busy machine
def test_a_run_survives_a_lost_host_a_stop_a_cut_network_and_a_bucket_that_refuses_and_ends_with_the_same_bits(
    trainable: Workstation, undisturbed: dict[str, Any]
) -> None:
    """One run, five attempts: a host dies, `stop` saves, a profile is taken, a host is cut off, the bucket refuses."""
    work = trainable
    run = ("--emulated", "run", "-f", FILE, "--json", *small("run.preemption_retries=2", "run.failure_retries=1"))
    running = work.begin(*run, "--new")
    running.wait_for(r"^\[0\].*\bstep +[6-9]/", 180)
    begun = time.monotonic()
    work.good("emulator", "inject", "kill-host", "rehearsal", "1", "--for", "5")
    running.wait_for(r"attempt 1 on 2 hosts", 60)
    started = time.monotonic() - begun
    step_after(running, r"^\[0\] going on from gs:.*step-", 90)
    stepped = time.monotonic() - begun
    trainer = running.wait_for(r"attempt 1: first step after", 30)
    work.good("--emulated", "stop", "-f", FILE)
    ended = running.end(60).require(75).json()
    assert ended["outcome"] == "saved"
    run_id = ended["run"]
    [recovered] = [event["seconds"] for event in work.events(run_id) if event["event"] == "recovered"]
    parts = f"{started:.1f} s to the next attempt's start; the launcher: {recovered}; {trainer}"
    told = f"{stepped:.1f} s from the host's death to the first new step ({parts})"
    print(told)

    running = work.begin(*run)
    step_after(running, r"attempt 2 on 2 hosts")
    profiled = work.good("--emulated", "profile", "-f", FILE, "--steps", "3", "--host", "all")
    place = rf"gs://rehearsal/runs/{run_id}/profiles/(\S+)/plugins/profile/\2/host-(\d)\.xplane\.pb"
    found = re.findall(rf"^\[(\d)\] steps \d+ to \d+: {place}$", profiled.output, re.MULTILINE)
    assert sorted((host, number) for host, _, number in found) == [("0", "0"), ("1", "1")], profiled.output
    advice = "look at it: `gcloud storage cp -r FOLDER .`, FOLDER being the path above up to profiles/"
    assert f"{advice}{found[0][1]}" in profiled.output
    work.good("emulator", "inject", "cut-host", "rehearsal", "1", "--for", "12")
    step_after(running, r"attempt 3 on 2 hosts")
    work.good("emulator", "inject", "errors", "--service", "storage", "--status", "403")
    running.wait_for(r"^\[\d\].*it is not allowed", 120)
    running.wait_for("its lease can't be renewed; decisions wait until it is", 60)
    work.good("emulator", "inject", "clear")
    assert running.end(280).require(0).json()["run"] == run_id
    require_the_same(work, run_id, undisturbed)
    # On a machine that has other things to do, what the trainer needs to its first step is known from the run before.
    starting = sum(undisturbed["seconds"].get(phase, 0.0) for phase in ("start", "imports", "model", "compile"))
    assert stepped < max(60, 30 + 2 * starting), told


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
    return json.loads(output[output.index("[") :])


@pytest.mark.nightly
@pytest.mark.timeout(1800)
def test_a_supervisor_in_a_container_finishes_a_run_on_other_slices_when_its_machine_is_gone(
    trainable: Workstation,
    undisturbed: dict[str, Any],
    image: str,  # noqa: F811
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    work = trainable
    monkeypatch.setenv("STORAGE_EMULATOR_HOST", control.environment(work.emulator)["STORAGE_EMULATOR_HOST"])
    work.good("--emulated", "down", "-f", FILE)
    enter_stock(work, 1, 0, 0)
    up = work.good("--emulated", "up", "-f", FILE, *small(*CANDIDATES))
    assert "slice rehearsal is READY: 2 hosts, 8 devices of a v4-16" in up.output
    running = work.begin("--emulated", "run", "--new", "-f", FILE, *small(*CANDIDATES))
    run = running.run_id(300)
    supervisor = work.begin_other(argv_of(image, "supervise", RUNS, options=emulated_options(work, tmp_path)))
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

    after, expected = work.results(run, LOCAL), dict(undisturbed["history"])
    assert len(after["history"]) > STEPS // 2
    apart = {step: abs(loss / expected[step] - 1) for step, loss in after["history"]}
    print(f"largest relative difference of {len(apart)} losses: {max(apart.values()):.1e}")
    assert max(apart.values()) <= 1e-6, apart

    asked = ask(work, "capacity", "-f", f"{RUNS}/{run}")
    granted = [(each["candidate"]["accelerator_type"], each["outcome"]) for each in asked if each["granted"]]
    assert granted == [("v4-16", "taken away"), ("v3-8", "taken away"), ("v4-32", "")]
    work.good("--emulated", "down", "-f", f"{RUNS}/{run}")
    assert control.status(work.emulator)["nodes"] == []
