"""Claims about a run that loses a host: fail-fast with the right first cause, and a resumed run that equals the
undisturbed one bit for bit.

Starts one slice of two hosts and trains twice; about 3 minutes.
"""

import json
import re
import shutil
import time
from typing import Any

import pytest

from tests.rehearsal.workstation import COMPILE_FAST, ROOT, Ended, Running, Workstation

pytestmark = pytest.mark.alone

FILE = "rehearsal.yaml"
STEPS = 96


@pytest.fixture(scope="module")
def trainable(emulator: Workstation) -> Workstation:
    """A READY slice of two hosts, and data in the bucket, by a role that has just what is needed."""
    emulator.good("emulator", "inject", "object-user")
    shutil.copy(ROOT / "examples" / "rehearsal.yaml", emulator.folder / FILE)
    emulator.good("--emulated", "up", "-f", FILE)
    corpus = ["--corpus", "builtin:pydoc"]
    local = ["--emulated", "local", "-f", FILE, "--", "tpu-train"]
    emulator.good(*local, "tokenizer", *corpus, "--vocabulary", "2000", "--out", "gs://rehearsal/tokenizer")
    shards = ["--tokenizer", "gs://rehearsal/tokenizer", "--sequence-length", "64", "--out", "gs://rehearsal/data"]
    emulator.good(*local, "shards", *corpus, *shards)
    return emulator


def trained(work: Workstation, *options: str) -> Ended:
    return work.good("--emulated", "run", "-f", FILE, "--json", *settings(), *options)


def settings() -> list[str]:
    steps = [f"train.steps={STEPS}", "checkpoint.every_steps=5", "train.log_every=1"]
    return [*COMPILE_FAST, *(word for setting in steps for word in ("--set", setting))]


def summary(work: Workstation, run_id: str) -> dict[str, Any]:
    """What the trainer left in the bucket, with the "history" of its losses: (step, loss), as far as they led to the
    final weights."""
    script = (
        "import json; from training import storage; from training.telemetry import metrics; "
        f"folder = 'gs://rehearsal/runs/{run_id}'; "
        "history = [(line['step'], line['loss']) for line in metrics.read_history(folder) if 'loss' in line]; "
        "print(json.dumps(json.loads(storage.read(folder + '/summary.json')) | {'history': history}))"
    )
    ended = work.good("--emulated", "local", "-f", FILE, "--", "python", "-c", script)
    found: dict[str, Any] = json.loads(ended.output[ended.output.index("{") : ended.output.rindex("}") + 1])
    return found


@pytest.fixture(scope="module")
def undisturbed(trainable: Workstation) -> dict[str, Any]:
    return summary(trainable, trained(trainable, "--new").json()["run"])


def require_the_same(work: Workstation, run_id: str, undisturbed: dict[str, Any]) -> None:
    after = summary(work, run_id)
    for key in ("first_loss", "last_loss", "eval_loss", "final_weights_crc32c", "committed_step", "steps"):
        assert after[key] == undisturbed[key], f"{key}: {after[key]} disturbed, {undisturbed[key]} undisturbed"
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
    deadline = time.monotonic() + seconds
    while not any(line.startswith("[0] step") for line in running.lines[first:]):
        assert time.monotonic() < deadline, "\n".join(running.lines)
        time.sleep(0.1)


@pytest.mark.timeout(900)  # five attempts, each of which may be slow on a busy machine
def test_a_run_survives_a_lost_host_a_stop_a_cut_network_and_a_bucket_that_refuses_and_ends_with_the_same_bits(
    trainable: Workstation, undisturbed: dict[str, Any]
) -> None:
    """One run, five attempts: a host dies and comes back within a minute; `stop` saves and `run` resumes; a profile is
    taken; a host is cut off; the bucket refuses."""
    work = trainable
    retries = ["--set", "run.preemption_retries=2", "--set", "run.failure_retries=1"]
    running = work.begin("--emulated", "run", "--new", "-f", FILE, "--json", *settings(), *retries)
    running.wait_for(r"^\[0\].*\bstep +[6-9]/", 180)
    begun = time.monotonic()
    work.good("emulator", "inject", "kill-host", "rehearsal", "1", "--for", "5")
    running.wait_for(r"attempt 1 on 2 hosts", 60)
    started = time.monotonic() - begun
    step_after(running, r"^\[0\] going on from gs:.*step-", 90)
    stepped = time.monotonic() - begun
    trainer = running.wait_for(r"attempt 1: first step after", 30)
    work.good("--emulated", "stop", "-f", FILE)
    ended = running.end(60)
    assert ended.code == 75, ended.output
    assert ended.json()["outcome"] == "saved"
    run_id = ended.json()["run"]
    [recovered] = [event["seconds"] for event in work.events(run_id) if event["event"] == "recovered"]
    told = (
        f"{stepped:.1f} s from the host's death to the first new step ({started:.1f} s to the next "
        f"attempt's start; the launcher: {recovered}; {trainer})"
    )
    print(told)

    running = work.begin("--emulated", "run", "-f", FILE, "--json", *settings(), *retries)
    step_after(running, r"attempt 2 on 2 hosts")
    profiled = work.good("--emulated", "profile", "-f", FILE, "--steps", "3", "--host", "all")
    place = rf"gs://rehearsal/runs/{run_id}/profiles/(\S+)/plugins/profile/\2/host-(\d)\.xplane\.pb"
    found = re.findall(rf"^\[(\d)\] steps \d+ to \d+: {place}$", profiled.output, re.MULTILINE)
    assert sorted((host, number) for host, _, number in found) == [("0", "0"), ("1", "1")], profiled.output
    assert f"look at it: `tensorboard --logdir FOLDER`, FOLDER being the path above up to profiles/{found[0][1]}" in (
        profiled.output
    )
    work.good("emulator", "inject", "cut-host", "rehearsal", "1", "--for", "12")
    step_after(running, r"attempt 3 on 2 hosts")
    work.good("emulator", "inject", "errors", "--service", "storage", "--status", "403")
    running.wait_for(r"^\[\d\].*it is not allowed", 120)
    running.wait_for("its lease can't be renewed; decisions wait until it is", 60)
    work.good("emulator", "inject", "clear")
    ended = running.end(280)
    assert ended.code == 0, ended.output
    assert ended.json()["run"] == run_id
    assert "Traceback" not in ended.output
    require_the_same(work, run_id, undisturbed)
    # On a machine that has other things to do, what the trainer needs to its first step is known from the run before.
    starting = sum(undisturbed["seconds"].get(phase, 0.0) for phase in ("start", "imports", "model", "compile"))
    assert stepped < max(60, 30 + 2 * starting), told
