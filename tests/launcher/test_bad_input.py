"""Bad input on the command line is one message that names the place and what to do; exit code 2, nothing started."""

import subprocess
from pathlib import Path

import pytest

from tests.processes import run_module

GOOD = """\
project: my-project
zone: us-central2-b
slice:
  name: demo
  accelerator_type: v4-16
run:
  command: [echo, hello]
"""


def launch(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    return run_module("launcher.cli", folder, *arguments)


def refused(ended: subprocess.CompletedProcess[str], *expected: str) -> None:
    told = ended.stdout + ended.stderr
    assert ended.returncode == 2, told
    assert "Traceback" not in told
    for words in expected:
        assert words in told


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "run.yaml").write_text(GOOD)
    return tmp_path


@pytest.mark.parametrize("verb", ["up", "run", "status", "stop", "down", "plan"])
def test_an_unknown_key_is_named_by_every_verb(folder: Path, verb: str) -> None:
    (folder / "run.yaml").write_text(GOOD.replace("accelerator_type", "acelerator_type"))
    refused(
        launch(folder, verb, "-f", "run.yaml"),
        "run.yaml:5: unknown key 'slice.acelerator_type'; did you mean 'accelerator_type'?",
    )


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["up", "-f", "nowhere.yaml"], ["nowhere.yaml: no such file"]),
        (["up", "--colour"], ["--colour"]),
        (["up", "--max-cost", "nan"], ["nan is not an amount of dollars"]),
        (["up", "--max-cost", "inf"], ["inf is not an amount of dollars"]),
        (["logs", "run.yaml"], ["no run was started from this folder yet"]),
    ],
)
def test_a_mistake_is_named(folder: Path, arguments: list[str], expected: list[str]) -> None:
    file = [] if {"-f", "--file", "run.yaml"} & set(arguments) else ["-f", "run.yaml"]
    refused(launch(folder, *arguments, *file), *expected)


def test_the_default_file_is_tpu_launch_yaml(tmp_path: Path) -> None:
    refused(launch(tmp_path, "up"), "tpu-launch.yaml: no such file", "tpu-launch init")
