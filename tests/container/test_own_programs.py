"""`tpu-train exec` with the real torch_xla on one host (two hosts: tests/rehearsal/test_frameworks.py)."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.processes import run_python
from training.cli.processes import chip_process_environment
from training.distributed.cluster import Cluster


def execute(*arguments: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "training.cli", "exec", *arguments]
    return subprocess.run(command, cwd=cwd, capture_output=True, text=True, timeout=600, check=False)


def test_a_failed_program_fails_with_its_traceback(tmp_path: Path) -> None:
    (tmp_path / "program.py").write_text("raise RuntimeError('no such thing')\n")
    ended = execute("program.py", cwd=tmp_path)
    assert ended.returncode == 1
    assert "RuntimeError: no such thing" in ended.stderr
    assert "a process of program.py ended early" in ended.stderr


@pytest.mark.nightly
def test_the_exit_code_of_a_program_is_kept(tmp_path: Path) -> None:
    (tmp_path / "program.py").write_text("import sys\nsys.exit(75)\n")
    assert execute("program.py", cwd=tmp_path).returncode == 75


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
    printed = run_python("-c", program, **environment, PJRT_DEVICE="TPU")
    processes, derived = json.loads(printed.splitlines()[-1])
    assert processes == chips
    assert derived["TPU_PROCESS_BOUNDS"] == bounds
    assert derived["TPU_CHIPS_PER_PROCESS_BOUNDS"] == "1,1,1"
    assert derived["CLOUD_TPU_TASK_ID"] == str((worker + 1) * chips - 1)
    assert derived["TPU_VISIBLE_CHIPS"] == str(chips - 1)
    assert len(derived["TPU_PROCESS_ADDRESSES"].split(",")) == hosts * chips
