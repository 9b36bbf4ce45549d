"""The first minutes of a new user, with README alone: `tpu-launch` installed into an empty environment, a first file,
and a program of their own on an emulated slice of two hosts. Starts one slice; two minutes."""

import os
import re
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from tests.launcher.test_wheel import SOURCES, constraints
from tests.rehearsal.workstation import ROOT, Workstation

pytestmark = [pytest.mark.alone, pytest.mark.nightly]

PROJECT = ("--project", "rehearsal-project", "--zone", "us-central2-b")
ANSWERS = (*PROJECT, "--accelerator-type", "v4-16", "--name", "first")


@pytest.fixture
def newcomer(workstation: Workstation, tmp_path: Path) -> Workstation:
    """A workstation on which `pip install .` was typed in a checkout; nothing of these tests' environment is seen."""
    checkout, programs = tmp_path / "checkout", tmp_path / "venv" / "bin"
    for name in SOURCES:
        copy = shutil.copytree if (ROOT / name).is_dir() else shutil.copy
        checkout.mkdir(exist_ok=True)
        copy(ROOT / name, checkout / name)
    ours = ("PYTHON", "VIRTUAL_ENV")
    environment = {name: value for name, value in workstation.environment.items() if not name.startswith(ours)}
    pins = ("--constraint", str(constraints(tmp_path)))
    for command in (
        (str(Path(sys.executable).with_name("uv")), "venv", "--quiet", "--seed", "--python", sys.executable, "../venv"),
        (str(programs / "pip"), "install", "--quiet", *pins, "."),
    ):
        subprocess.run(command, cwd=checkout, env=environment, check=True, timeout=600)
    environment["PATH"] = f"{programs}{os.pathsep}{environment['PATH']}"
    return replace(workstation, environment=environment, program=("tpu-launch",))


def test_own_program_runs_on_two_hosts_from_an_empty_environment(newcomer: Workstation) -> None:
    """`init`, the folder named in its file, `plan`, and then the slice."""
    newcomer.good("init", "-f", "run.yaml", *ANSWERS)
    path = newcomer.folder / "run.yaml"
    assert "\n  # code: src #" in path.read_text()
    path.write_text(path.read_text().replace("\n  # code: src #", "\n  code: src #"))
    (newcomer.folder / "src").mkdir()
    shutil.copy(ROOT / "examples" / "own_code" / "my_train.py", newcomer.folder / "src" / "train.py")
    program = ("-f", "run.yaml", "--", "python", "train.py")
    assert "gcloud compute tpus tpu-vm create" in newcomer.good("plan", *program).output
    newcomer.good("--emulated", "doctor", "-f", "run.yaml")
    with newcomer.slice_of("run.yaml"):
        ended = newcomer.good("--emulated", "run", *program)
    lines = re.findall(r"^\[(\d)\] host (\d) of 2: y = ([\d.-]+) x \+ ([\d.-]+)$", ended.output, re.MULTILINE)
    assert sorted(line[:2] for line in lines) == [("0", "0"), ("1", "1")], ended.output
    assert {tuple(round(float(value), 2) for value in line[2:]) for line in lines} == {(3.0, -2.0)}
