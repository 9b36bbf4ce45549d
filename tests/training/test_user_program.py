"""The environment in which `tpu-train exec` starts a program of the user's own."""

import sys
from pathlib import Path

import pytest

from training.cli.processes import chip_process_environment, gloo_environment, run_script
from training.distributed.cluster import Cluster
from training.errors import BadInput


def test_several_cpu_hosts_get_the_variables_of_torchrun(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    assert gloo_environment(Cluster(1, ("10.0.0.2", "10.0.0.3"))) == {
        "RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1", "MASTER_ADDR": "10.0.0.2",
        "MASTER_PORT": "8491", "OMP_NUM_THREADS": "1", "USE_TORCH_XLA": "0", "ACCELERATE_USE_CPU": "true",
    }  # fmt: skip


def test_a_tpu_host_leaves_the_bounds_of_processes_to_torch_xla() -> None:
    assert chip_process_environment(Cluster(1, ("10.0.0.2", "10.0.0.3"), "v4-16")) == {
        "TPU_SKIP_MDS_QUERY": "1", "TPU_ACCELERATOR_TYPE": "v4-16", "TPU_HOST_BOUNDS": "1,1,2",
        "TPU_CHIPS_PER_HOST_BOUNDS": "2,2,1", "TPU_WORKER_ID": "1", "TPU_WORKER_HOSTNAMES": "10.0.0.2,10.0.0.3",
        "TPU_TOPOLOGY_WRAP": "false,false,false", "TPU_TOPOLOGY_ALT": "false",
    }  # fmt: skip


def test_two_devices_a_chip_are_refused() -> None:
    with pytest.raises(BadInput, match="v3-8 has two devices"):
        chip_process_environment(Cluster(0, ("10.0.0.2",), "v3-8"))


def test_a_script_sees_its_arguments_and_its_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "neighbour_module.py").write_text("VALUE = 7\n")
    script = tmp_path / "program.py"
    script.write_text(
        "import pathlib, sys, neighbour_module\n"
        "if __name__ == '__main__':\n"
        "    pathlib.Path(sys.argv[1]).write_text(f'{sys.argv[2]} {neighbour_module.VALUE}')\n"
    )
    monkeypatch.setattr(sys, "argv", list(sys.argv))
    monkeypatch.setattr(sys, "path", list(sys.path))
    run_script(str(script), [str(tmp_path / "result"), "--flag"])
    assert (tmp_path / "result").read_text() == "--flag 7"
