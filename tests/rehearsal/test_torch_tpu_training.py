"""The trainer with TorchTPU on an emulated v4-8: four processes on a virtual TPU have torch-xla's losses, and so has a
run that is killed and resumed, or changes the runtime. Starts one slice; about 4 minutes after the images are built."""

import contextlib
import json
import os
import shutil
from collections.abc import Iterator
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
FIND_RANK_2 = "grep -lzx RANK=2 /proc/[0-9]*/environ | cut -d/ -f3"
TORCH_TPU = "backend=torch-tpu"
LOCAL = ("-f", FILE, "--set", TORCH_TPU)


def kill_and_resume(
    work: Workstation, reference: list[str], step: int, first: list[str], then: list[str], rel: float
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Trains with the settings `reference`; with `first` until a rank is killed at a step, and on with `then`. Requires
    the same losses of both; returns their summaries."""
    run = ("--emulated", "run", "-f", FILE, "--json", *settings(*CHANGES))
    expected = work.results(work.good(*run, *settings(*reference), "--new", seconds=900).json()["run"], LOCAL)
    running = work.begin(*run, *settings(*first), "--new")
    running.wait_for(rf"^\[0\] rank 0: step +{step}/", 300)
    (container,) = work.containers(0)
    docker("exec", "--user=0", container, "sh", "-c", f"kill -9 $({FIND_RANK_2})")
    killed = running.end(10).require(10, "rank 2 was killed by SIGKILL (exit code 137)")
    resumed = work.good(*run, *settings(*then), seconds=600).require(0, "rank 0: going on from gs://")
    assert resumed.json()["run"] == killed.json()["run"]
    found = work.results(resumed.json()["run"], LOCAL)
    theirs, ours = dict(expected["history"]), dict(found["history"])
    assert len(ours) >= STEPS - 1  # the line of the step in which it was killed may be missing
    assert ours == pytest.approx({step: theirs[step] for step in ours}, rel=rel)
    assert found["eval_loss"] == pytest.approx(expected["eval_loss"], rel=rel)
    return found, expected


@contextlib.contextmanager
def prepared(work: Workstation, kind: str) -> Iterator[None]:
    """Makes a slice for the block, and in the bucket a tokenizer and data."""
    work.file(FILE, (ROOT / "examples" / FILE).read_text().replace("v4-16 #", f"{kind} #"))
    with work.slice_of(FILE):
        work.make_data(LOCAL, "--overwrite")
        yield


@pytest.mark.timeout(1200)  # two images are built where they are missing
def test_four_processes_train_as_torch_xla_does_through_a_kill_and_export_a_model(emulator: Workstation) -> None:
    with prepared(emulator, "v4-8"):
        found, expected = kill_and_resume(emulator, [], 8, [TORCH_TPU], [TORCH_TPU], rel=1e-5)
        assert (found["devices"], expected["devices"], found["committed_step"]) == (4, 4, STEPS)
        predict = ("--emulated", "local", *LOCAL, "--", "tpu-train", "predict", found["model"])
        assert "statement ends a loop" in emulator.good(*predict, "The [MASK] statement ends a loop.").output


@pytest.mark.nightly
@pytest.mark.timeout(1800)
def test_state_split_over_hosts_resumes_on_another_mesh_with_losses_of_a_replicated_one(emulator: Workstation) -> None:
    """Eight processes, each with an eighth of every matrix, after a kill with a half, or with all of the state."""
    with prepared(emulator, "v4-16"):
        replicated, eighths, halves = ([TORCH_TPU, f"train.mesh.fsdp={parts}"] for parts in (1, 8, 2))
        split, _ = kill_and_resume(emulator, replicated, 13, eighths, halves, rel=1e-6)
        assert (split["devices"], split["hosts"]) == (8, 2)


def train_in(backend: str, fsdp: int, folder: Path, run_id: str, attempt: int) -> dict[str, Any]:
    """Trains in a container of the backend's image, on a virtual v4-8, with its files in `folder`."""
    changes = {"train__precision": "fp32", "train__mesh": {"fsdp": fsdp}, "checkpoint__every_steps": 5}
    (folder / "config.yaml").write_text(json.dumps(small_runs.document(folder, backend=backend, **changes)))
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
