"""The trainer with TorchTPU on an emulated v4-8: four processes on a virtual TPU have torch-xla's losses, and so has a
run that is killed and resumed, or changes the runtime. Starts one slice; about 4 minutes after the images are built."""

import json
import os
import shutil
from pathlib import Path
from typing import Any

import pytest

from launcher.emulator.vm import virtual_tpu
from launcher.images.build import ensure_image
from launcher.images.specification import default_spec
from tests.container import small_runs
from tests.rehearsal.workstation import ROOT, Workstation, docker, settings

pytestmark = pytest.mark.alone

FILE, STEPS = "rehearsal.yaml", 20
CHANGES = f"train.steps={STEPS}", "train.log_every=1", "evaluation.every=20", "checkpoint.every_steps=5"
LOCAL = ("-f", FILE, "--set", "backend=torch-tpu")


def results(work: Workstation, run_id: str) -> tuple[dict[str, Any], dict[int, float]]:
    """The summary of a run, and its losses by their steps."""
    found = work.results(run_id, LOCAL)
    return found, dict(found["history"])


def kill_rank(container: str, rank: int) -> None:
    find = f"grep -lzx RANK={rank} /proc/[0-9]*/environ | cut -d/ -f3"
    docker("exec", "--user=0", container, "sh", "-c", f"kill -9 $({find})")


def prepare(work: Workstation, slice_: str) -> None:
    """Makes a slice, and in the bucket a tokenizer and data."""
    work.file(FILE, (ROOT / "examples" / FILE).read_text().replace("v4-16 #", f"{slice_} #"))
    work.good("--emulated", "up", "-f", FILE)
    work.make_data(LOCAL, "--overwrite")


@pytest.mark.timeout(1200)  # two images are built where they are missing
def test_four_processes_train_as_torch_xla_does_through_a_kill_and_export_a_model(emulator: Workstation) -> None:
    work = emulator
    prepare(work, "v4-8")
    run = ("--emulated", "run", "-f", FILE, "--json", *settings(*CHANGES))
    expected, theirs = results(work, work.good(*run, "--new", seconds=900).json()["run"])

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

    found, ours = results(work, resumed.json()["run"])
    assert (found["devices"], expected["devices"], found["committed_step"]) == (4, 4, STEPS)
    assert len(ours) >= STEPS - 1  # the line of the step in which it was killed may be missing
    assert ours == pytest.approx({step: theirs[step] for step in ours}, rel=1e-5)
    assert found["eval_loss"] == pytest.approx(expected["eval_loss"], rel=1e-5)
    predict = ("--emulated", "local", *LOCAL, "--", "tpu-train", "predict", found["model"])
    answers = work.good(*predict, "The [MASK] statement ends a loop.")
    assert "statement ends a loop" in answers.output
    work.good("--emulated", "down", "-f", FILE)


@pytest.mark.nightly
@pytest.mark.timeout(1800)
def test_state_split_over_hosts_resumes_on_another_mesh_with_losses_of_a_replicated_one(emulator: Workstation) -> None:
    """Eight processes, each with an eighth of every matrix, after a kill with a half, or with all of the state."""
    work = emulator
    prepare(work, "v4-16")
    run = ("--emulated", "run", "-f", FILE, "--json", *settings(*CHANGES, "backend=torch-tpu"), "--set")
    replicated, theirs = results(work, work.good(*run, "train.mesh.fsdp=1", "--new", seconds=600).json()["run"])
    running = work.begin(*run, "train.mesh.fsdp=8", "--new")
    running.wait_for(r"^\[0\] rank 0: step +13/", 300)
    kill_rank(next(entry.split()[0] for entry in work.containers_of_runs() if "-w-0." in entry), 2)
    assert (killed := running.end(10)).code == 10, killed.output
    resumed = work.good(*run, "train.mesh.fsdp=2", seconds=600)
    assert "rank 0: going on from gs://" in resumed.output
    split, ours = results(work, resumed.json()["run"])
    assert resumed.json()["run"] == killed.json()["run"]
    assert (split["devices"], split["hosts"]) == (8, 2)
    assert len(ours) >= STEPS - 1
    assert ours == pytest.approx({step: theirs[step] for step in ours}, rel=1e-6)
    assert split["eval_loss"] == pytest.approx(replicated["eval_loss"], rel=1e-6)
    work.good("--emulated", "down", "-f", FILE)


def train_in(backend: str, fsdp: int, folder: Path, run_id: str, attempt: int) -> dict[str, Any]:
    """Trains in a container of the backend's image, on a virtual v4-8, with its files in `folder`."""
    changes = {"train__precision": "fp32", "train__mesh": {"fsdp": fsdp}, "checkpoint__every_steps": 5}
    config = small_runs.document(folder, backend=backend, **changes)
    (folder / "config.yaml").write_text(json.dumps(config))
    volume = virtual_tpu.ensure_volume(ROOT / "images" / "virtual-tpu", print)
    run = {"TPU_ACCELERATOR_TYPE": "v4-8", "TPU_LAUNCH_RUN_ID": run_id, "TPU_LAUNCH_ATTEMPT": str(attempt)}
    told = {**virtual_tpu.container_environment(), **run}
    image = ensure_image(default_spec(backend), print).reference
    docker(
        "run", "--rm", "--network=none", "--shm-size=1g", f"--user={os.getuid()}:{os.getgid()}", "--env=HOME=/tmp",
        f"--volume={folder}:{folder}", f"--volume={volume}:{virtual_tpu.MOUNTED_AT}:ro",
        *(f"--env={name}={value}" for name, value in told.items()), image,
        "tpu-train", "train", f"{folder}/config.yaml",
    )  # fmt: skip
    return small_runs.summary(folder, run_id)


@pytest.mark.parametrize(("first", "then", "fsdp"), [("torch-xla", "torch-tpu", 1), ("torch-tpu", "torch-xla", 2)])
def test_a_run_changes_the_runtime_at_a_checkpoint(first: str, then: str, fsdp: int, tmp_path: Path) -> None:
    """The last two of twelve steps are trained again by the other runtime, once with a state in two halves."""
    small_runs.prepare(tmp_path)
    straight = train_in(first, fsdp, tmp_path, "straight", 0)
    shutil.copytree(tmp_path / "runs" / "straight", tmp_path / "runs" / "changed")
    shutil.rmtree(tmp_path / "runs" / "changed" / "checkpoints" / "step-00000012")
    changed = train_in(then, fsdp, tmp_path, "changed", 1)
    assert changed["attempt"] == 1
    for key in ("last_loss", "eval_loss"):
        assert changed[key] == pytest.approx(straight[key], rel=1e-5), key
    assert small_runs.losses(tmp_path, "changed") == pytest.approx(small_runs.losses(tmp_path, "straight"), rel=1e-5)
