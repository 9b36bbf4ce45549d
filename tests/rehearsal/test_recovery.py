"""Claims about a run that loses a host: fail-fast with the right first cause, and a resumed run that equals the undisturbed one bit for bit.

Starts one slice of two hosts and trains three times; about 3 minutes.
"""

from __future__ import annotations

import json
import shutil
import time
from typing import Any

import pytest

from tests.rehearsal.workstation import HOUSE, Ended, Workstation

FILE = "rehearsal.yaml"
STEPS = 48


@pytest.fixture(scope="module")
def trainable(emulator: Workstation) -> Workstation:
    """A READY slice of two hosts, and data in the bucket."""
    shutil.copy(HOUSE / "examples" / "rehearsal.yaml", emulator.folder / FILE)
    emulator.good("--emulated", "up", "-f", FILE)
    corpus = ["--corpus", "builtin:pydoc"]
    local = ["--emulated", "local", "-f", FILE, "--", "tpu-train"]
    emulator.good(*local, "tokenizer", *corpus, "--vocabulary", "2000", "--out", "gs://rehearsal/tokenizer")
    emulator.good(
        *local, "shards", *corpus, "--tokenizer", "gs://rehearsal/tokenizer", "--sequence-length", "64", "--out", "gs://rehearsal/data"
    )
    return emulator


def trained(work: Workstation, *options: str) -> Ended:
    return work.good("--emulated", "run", "-f", FILE, "--json", *settings(), *options)


def settings() -> list[str]:
    return ["--set", f"train.steps={STEPS}", "--set", "checkpoint.every_steps=5", "--set", "train.log_every=2"]


def summary(work: Workstation, run_id: str) -> dict[str, Any]:
    """What the trainer left in the bucket."""
    script = f"from training import storage; print(storage.read('gs://rehearsal/runs/{run_id}/summary.json').decode())"
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


def test_killing_a_host_ends_the_run_and_the_resumed_run_equals_the_undisturbed_one(
    trainable: Workstation, undisturbed: dict[str, Any]
) -> None:
    work = trainable
    running = work.begin("--emulated", "run", "--new", "-f", FILE, "--json", *settings())
    running.wait_for(r"^\[0\].*\bstep +1[0-9]\b")
    work.good("emulator", "inject", "kill-host", "rehearsal", "1")
    begun = time.monotonic()
    ended = running.end(60)
    seconds = time.monotonic() - begun
    assert seconds < 10, f"the run must end within 10 s of the host's death, took {seconds:.1f} s"
    assert ended.code == 11, ended.output
    told = ended.json()
    assert told["outcome"] == "host lost"
    assert told["cause"]["worker"] == 1, told
    assert [name for name in work.containers_of_runs() if "w-1" not in name] == [], "host 0's containers must be gone"

    work.good("emulator", "inject", "restore-host", "rehearsal", "1")
    resumed = trained(work)
    assert resumed.json()["run"] == told["run"], "run resumes the run that lost its host"
    assert resumed.json()["attempt"] == 1
    require_the_same(work, told["run"], undisturbed)
    assert work.containers_of_runs() == []


def test_stop_saves_on_all_hosts_and_run_resumes(trainable: Workstation) -> None:
    work = trainable
    running = work.begin("--emulated", "run", "--new", "-f", FILE, "--json", "--set", "train.steps=500")
    running.wait_for(r"^\[0\].*\bstep +\d")
    work.good("--emulated", "stop", "-f", FILE)
    ended = running.end(60)
    assert ended.code == 75, ended.output
    assert ended.json()["outcome"] == "saved"
    again = work.begin("--emulated", "run", "-f", FILE, "--json", "--set", "train.steps=500")
    again.wait_for(r"going on from gs:.*step-", 90)
    work.good("--emulated", "stop", "-f", FILE)
    assert again.end(60).code == 75


def test_data_that_does_not_exist_is_refused_before_anything_starts(trainable: Workstation) -> None:
    ended = trainable.launch("--emulated", "run", "--new", "-f", FILE, "--set", "data.train=gs://rehearsal/nothing")
    assert ended.code == 2, ended.output
    assert "gs://rehearsal/nothing" in ended.output
    assert "Traceback" not in ended.output


def test_a_bucket_that_does_not_exist_is_refused_with_its_place(trainable: Workstation) -> None:
    ended = trainable.launch("--emulated", "up", "-f", FILE, "--set", "output=gs://no-such-bucket/runs")
    assert ended.code == 2, ended.output
    assert "--set output" in ended.output
    assert "gs://no-such-bucket does not exist" in ended.output


def test_a_host_that_comes_back_is_waited_for_and_training_goes_on_within_a_minute_to_the_same_bits(
    trainable: Workstation, undisturbed: dict[str, Any]
) -> None:
    work = trainable
    running = work.begin("--emulated", "run", "--new", "-f", FILE, "--json", *settings(), "--set", "run.preemption_retries=1")
    running.wait_for(r"^\[0\].*\bstep +[6-9]/", 180)
    begun = time.monotonic()
    work.good("emulator", "inject", "kill-host", "rehearsal", "1", "--for", "5")
    running.wait_for(r"attempt 1 on 2 hosts", 60)
    started = time.monotonic() - begun
    running.wait_for(r"^\[0\] going on from gs:.*step-", 90)
    seen = len(running.lines)
    while not any(line.startswith("[0] step") for line in running.lines[seen:]):
        assert time.monotonic() - begun < 120, "\n".join(running.lines)
        time.sleep(0.1)
    stepped = time.monotonic() - begun
    ended = running.end(120)
    assert ended.code == 0, ended.output
    assert ended.json()["attempt"] == 1
    run_id = ended.json()["run"]
    [recovered] = [event["seconds"] for event in work.events(run_id) if event["event"] == "recovered"]
    told = f"{stepped:.1f} s from the host's death to the first new step ({started:.1f} s to the next attempt's start; the launcher: {recovered})"
    print(told)
    require_the_same(work, run_id, undisturbed)
    assert stepped < 60, told
