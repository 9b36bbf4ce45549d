"""The trainer with TorchTPU on an emulated v4-8: four processes on a virtual TPU have torch-xla's losses, and a killed
and resumed run has them too. Starts one slice and trains three times; about 4 minutes after the images are built."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.rehearsal.workstation import ROOT, Workstation, docker

pytestmark = pytest.mark.alone

FILE, STEPS = "rehearsal.yaml", 20
SETTINGS = [
    word
    for setting in (f"train.steps={STEPS}", "train.log_every=1", "evaluation.every=20", "checkpoint.every_steps=5")
    for word in ("--set", setting)
]
LOCAL = ("--emulated", "local", "-f", FILE, "--set", "backend=torch-tpu", "--", "tpu-train")


def results(work: Workstation, run_id: str) -> dict[str, Any]:
    """What the trainer left in the bucket: summary.json, and the losses by their steps."""
    script = (
        "import json; from training import storage; from training.telemetry import metrics; "
        f"folder = 'gs://rehearsal/runs/{run_id}'; "
        "losses = {line['step']: line['loss'] for line in metrics.read_history(folder) if 'loss' in line}; "
        "print(json.dumps(json.loads(storage.read(folder + '/summary.json')) | {'losses': losses}))"
    )
    ended = work.good(*LOCAL[:-1], "python", "-c", script)
    found: dict[str, Any] = json.loads(ended.output[ended.output.index("{") : ended.output.rindex("}") + 1])
    return found


def kill_rank(container: str, rank: int) -> None:
    find = f"grep -lzx RANK={rank} /proc/[0-9]*/environ | cut -d/ -f3"
    docker("exec", "--user=0", container, "sh", "-c", f"kill -9 $({find})")


@pytest.mark.timeout(1200)  # two images are built where they are missing
def test_four_processes_train_as_torch_xla_does_through_a_kill_and_export_a_model(emulator: Workstation) -> None:
    work = emulator
    work.file(FILE, (ROOT / "examples" / FILE).read_text().replace("v4-16 #", "v4-8 #"))
    work.good("--emulated", "up", "-f", FILE)
    corpus = ["--corpus", "builtin:pydoc"]
    work.good(*LOCAL, "tokenizer", *corpus, "--vocabulary", "2000", "--out", "gs://rehearsal/tokenizer", seconds=900)
    shards = ["--tokenizer", "gs://rehearsal/tokenizer", "--sequence-length", "64", "--out", "gs://rehearsal/data"]
    work.good(*LOCAL, "shards", *corpus, *shards)
    run = ("--emulated", "run", "-f", FILE, "--json", *SETTINGS)
    expected = results(work, work.good(*run, "--new", seconds=900).json()["run"])

    running = work.begin(*run, "--new", "--set", "backend=torch-tpu")
    running.wait_for(r"^\[0\] rank 0: step +8/", 300)
    (container,) = (entry.split()[0] for entry in work.containers_of_runs())
    kill_rank(container, 2)
    killed = running.end(10)
    assert killed.code == 10, killed.output
    assert "rank 2 was killed by SIGKILL (exit code 137)" in killed.output
    resumed = work.good(*run, "--set", "backend=torch-tpu", seconds=300)
    assert resumed.json()["run"] == killed.json()["run"]
    assert "rank 0: going on from gs://" in resumed.output

    found = results(work, resumed.json()["run"])
    assert (found["devices"], expected["devices"], found["committed_step"]) == (4, 4, STEPS)
    assert len(found["losses"]) >= STEPS - 1  # the line of the step in which it was killed may be missing
    assert [found["losses"][step] for step in found["losses"]] == pytest.approx(
        [expected["losses"][step] for step in found["losses"]], rel=1e-5
    )
    assert found["eval_loss"] == pytest.approx(expected["eval_loss"], rel=1e-5)
    answers = work.good(*LOCAL, "predict", found["model"], "The [MASK] statement ends a loop.")
    assert "statement ends a loop" in answers.output
    work.good("--emulated", "down", "-f", FILE)
