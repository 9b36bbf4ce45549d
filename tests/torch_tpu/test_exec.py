"""`tpu-train exec --runtime torch-tpu` with the real torch_tpu: four processes on a virtual v4-8."""

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.processes import run_python

EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "torch-tpu"
WEIGHTS = 109_376  # of the example's network
STEPS, ROWS, SECONDS = 4, 16, 500.0


def begin(*arguments: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "training.cli", "exec", "--runtime", "torch-tpu", *arguments]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


@pytest.fixture(scope="module")
def one_process() -> list[float]:
    """The losses of one CPU process on the whole batches."""
    program = Path(__file__).with_name("one_process.py")
    return json.loads(run_python(str(program), str(EXAMPLE), str(STEPS), str(ROWS)))


@pytest.mark.parametrize("sharding", [(), ("--fsdp",)], ids=["ddp", "fsdp"])
def test_losses_of_four_processes_equal_those_of_one(sharding: tuple[str, ...], one_process: list[float]) -> None:
    process = begin(str(EXAMPLE / "train.py"), f"--steps={STEPS}", f"--rows={ROWS}", *sharding)
    out, errors = process.communicate(timeout=SECONDS)
    assert process.returncode == 0, out + errors
    losses = [float(loss) for loss in re.findall(r"^rank 0: step \d+: loss ([\d.]+)$", out, re.MULTILINE)]
    assert losses == pytest.approx(one_process, rel=1e-6)
    stored = re.findall(r"^rank (\d): process (\d) of 4 stores (\d+) numbers$", out, re.MULTILINE)
    assert sorted(rank for rank, process, _ in stored if rank == process) == ["0", "1", "2", "3"]
    assert {int(number) for *_, number in stored} == {WEIGHTS // 4 if sharding else WEIGHTS}


@pytest.mark.parametrize(
    ("variables", "message"),
    [
        ({"TPU_ACCELERATOR_TYPE": "v3-8"}, "TorchTPU does not know TPU v3 (v3-8)"),
        ({"PJRT_DEVICE": "CPU"}, "needs TPU chips or a virtual TPU"),
    ],
)
def test_other_devices_are_refused(variables: dict[str, str], message: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    process = begin(str(EXAMPLE / "train.py"))
    _, errors = process.communicate(timeout=SECONDS)
    assert process.returncode == 2
    assert message in errors
