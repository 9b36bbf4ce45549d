"""`tpu-launch rehearsal` trains on two hosts and leaves nothing; a slice of four hosts works too. About 3 minutes."""

import json
import subprocess

import pytest

from launcher.emulator.state import emulator_id
from tests.rehearsal.workstation import COMPILE_FAST, ROOT, Workstation, docker

pytestmark = pytest.mark.alone

RESULT = {"hosts", "steps", "seconds", "first_loss", "last_loss", "eval_perplexity", "examples_per_second"}
KEYS = RESULT | {"checkpoint", "committed_step"}


def left(work: Workstation) -> list[str]:
    """Everything of this workstation's emulators that still exists: containers, networks, volumes, processes."""
    found = []
    for emulator in (work.emulator, work.home / "rehearsal" / "emulator"):
        only = ["--filter", f"label=tpu-launch.emulator={emulator_id(emulator)}"]
        found += docker("ps", "--all", *only, "--format", "container {{.Names}}").splitlines()
        found += docker("network", "ls", *only, "--format", "network {{.Name}}").splitlines()
        found += docker("volume", "ls", *only, "--format", "volume {{.Name}}").splitlines()
    shown = subprocess.run(["ps", "axeww", "-o", "args"], capture_output=True, text=True, check=True)  # with variables
    return found + [line for line in shown.stdout.splitlines() if str(work.home) in line]


@pytest.mark.parametrize(("accelerator", "hosts"), [("v4-16", 2), pytest.param("v4-32", 4, marks=pytest.mark.nightly)])
def test_a_rehearsal_trains_commits_and_leaves_nothing(workstation: Workstation, accelerator: str, hosts: int) -> None:
    file = str(ROOT / "examples" / "rehearsal.yaml")
    changes = ("--set", f"slice.accelerator_type={accelerator}", "--set", "train.steps=12", *COMPILE_FAST)
    ended = workstation.good("rehearsal", "-f", file, *changes, seconds=600)
    summary = json.loads((workstation.home / "rehearsal" / "summary.json").read_text())
    assert summary.keys() >= KEYS
    assert summary["hosts"] == hosts
    assert summary["steps"] == summary["committed_step"] == 12
    assert summary["last_loss"] < summary["first_loss"]
    assert summary["eval_perplexity"] > 1
    assert summary["checkpoint"].startswith("gs://")
    assert f"hosts                {hosts} ({accelerator}, emulated)" in ended.output
    assert left(workstation) == []


def test_ctrl_c_in_the_middle_leaves_nothing(workstation: Workstation) -> None:
    running = workstation.begin("rehearsal", "-f", str(ROOT / "examples" / "rehearsal.yaml"))
    running.wait_for(r"started on all hosts", 200)
    running.interrupt()
    assert running.end(90).code == 130
    assert left(workstation) == []
