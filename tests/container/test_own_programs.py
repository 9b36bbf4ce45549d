"""`tpu-train exec` with the real torch_xla on one host (two hosts: tests/rehearsal/test_frameworks.py)."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.processes import run_python
from training.cli.processes import chip_process_environment
from training.distributed.cluster import Cluster


@pytest.mark.parametrize(
    ("line", "code", "told"),
    [
        ("raise RuntimeError('no such thing')", 1, "RuntimeError: no such thing"),
        pytest.param("raise SystemExit(75)", 75, "", marks=pytest.mark.nightly),
    ],
)
def test_a_failed_program_fails_with_its_traceback_or_its_exit_code(
    tmp_path: Path, line: str, code: int, told: str
) -> None:
    (tmp_path / "program.py").write_text(line)
    command = [sys.executable, "-m", "training.cli", "exec", "program.py"]
    ended = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=600, check=False)
    assert (ended.returncode, told in ended.stderr) == (code, True), ended.stderr
    assert ("a process of program.py ended early" in ended.stderr) == (code == 1)


@pytest.mark.parametrize(
    ("accelerator", "worker", "hosts", "bounds"),
    [
        ("v4-16", 1, 2, "2,2,2"),
        ("v5litepod-16", 3, 4, "4,4,1"),
        pytest.param("v5litepod-8", 0, 1, "2,4,1", marks=pytest.mark.nightly),
        pytest.param("v6e-16", 2, 4, "4,4,1", marks=pytest.mark.nightly),
    ],
)
def test_torch_xla_derives_one_process_for_each_chip(accelerator: str, worker: int, hosts: int, bounds: str) -> None:
    """What torch_xla itself makes of our variables, in the process of the host's last chip."""
    addresses = tuple(f"10.0.0.{number}" for number in range(hosts))
    chips = 8 if accelerator == "v5litepod-8" else 4
    program = (
        "import json, os\nfrom torch_xla._internal import tpu\n"
        f"tpu.num_available_chips = lambda: {chips}\n"
        f"processes = tpu.num_local_processes()\ntpu.configure_topology(processes - 1, processes)\n"
        "print(json.dumps([processes, dict(os.environ)]))\n"
    )
    environment = chip_process_environment(Cluster(worker, addresses, accelerator))
    processes, derived = json.loads(run_python("-c", program, **environment, PJRT_DEVICE="TPU").splitlines()[-1])
    assert processes == chips
    assert derived["TPU_PROCESS_BOUNDS"] == bounds
    assert derived["TPU_CHIPS_PER_PROCESS_BOUNDS"] == "1,1,1"
    assert derived["CLOUD_TPU_TASK_ID"] == str((worker + 1) * chips - 1)
    assert derived["TPU_VISIBLE_CHIPS"] == str(chips - 1)
    assert len(derived["TPU_PROCESS_ADDRESSES"].split(",")) == hosts * chips
