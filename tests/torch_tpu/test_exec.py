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


def execute(*arguments: str) -> tuple[int, str, str]:
    """Returns (exit code, standard output, standard error)."""
    command = [sys.executable, "-m", "training.cli", "exec", "--runtime", "torch-tpu", *arguments]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=SECONDS, check=False)
    return ended.returncode, ended.stdout, ended.stderr


@pytest.fixture(scope="module")
def one_process() -> list[float]:
    """The losses of one CPU process on the whole batches."""
    program = Path(__file__).with_name("one_process.py")
    return json.loads(run_python(str(program), str(EXAMPLE), str(STEPS), str(ROWS)))


@pytest.mark.parametrize("sharding", [(), ("--fsdp",)], ids=["ddp", "fsdp"])
def test_losses_of_four_processes_equal_those_of_one(sharding: tuple[str, ...], one_process: list[float]) -> None:
    code, out, errors = execute(str(EXAMPLE / "train.py"), f"--steps={STEPS}", f"--rows={ROWS}", *sharding)
    assert code == 0, out + errors
    losses = [float(loss) for loss in re.findall(r"^rank 0: step \d+: loss ([\d.]+)$", out, re.MULTILINE)]
    assert losses == pytest.approx(one_process, rel=1e-6)
    stored = re.findall(r"^rank (\d): process (\d) of 4 stores (\d+) numbers$", out, re.MULTILINE)
    assert sorted(rank for rank, process, _ in stored if rank == process) == ["0", "1", "2", "3"]
    assert {int(number) for *_, number in stored} == {WEIGHTS // 4 if sharding else WEIGHTS}


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("TPU_ACCELERATOR_TYPE", "v3-8", "TorchTPU does not know TPU v3 (v3-8)"),
        ("PJRT_DEVICE", "CPU", "needs TPU chips or a virtual TPU"),
    ],
)
def test_other_devices_are_refused(name: str, value: str, message: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(name, value)
    code, _, errors = execute(str(EXAMPLE / "train.py"))
    assert (code, message in errors) == (2, True), errors
