"""Two trainers on loopback, as two hosts of a slice: they train as one, and end together whatever happens to one."""

from pathlib import Path
from typing import Any

import pytest

from tests.container import small_runs
from training.errors import Exit

LONG = {"train__steps": 60, "checkpoint__every_steps": 10, "evaluation__every": 25, "train__warmup_steps": 5}


@pytest.fixture(scope="module")
def undisturbed(folder: Path) -> dict[str, Any]:
    return small_runs.trained(folder, "undisturbed", small_runs.document(folder, **LONG), hosts=2)


def test_two_hosts_report_one_run(undisturbed: dict[str, Any]) -> None:
    assert (undisturbed["hosts"], undisturbed["devices"], undisturbed["committed_step"]) == (2, 2, 60)
    assert undisturbed["last_loss"] < undisturbed["first_loss"] - 0.5
    assert undisturbed["compilations"] == 3  # gradients, update, evaluation


def test_hosts_with_different_configurations_are_told_apart(folder: Path) -> None:
    ports = small_runs.free_ports()
    first = small_runs.start(folder, "differ", small_runs.document(folder), hosts=2, ports=ports, only=0)
    second = small_runs.start(folder, "differ", small_runs.document(folder, seed=9), hosts=2, ports=ports, only=1)
    small_runs.end([*first, *second], Exit.BAD_INPUT, Exit.BAD_INPUT)
    assert "configuration: host 0 has" in first[0].text()
    assert "host 1" in first[0].text()


def test_hosts_whose_devices_are_not_connected_refuse_to_train_apart(tmp_path: Path) -> None:
    """The CPU's PJRT client has only the devices of its own process."""
    config = small_runs.document(small_runs.prepare(tmp_path))
    hosts = small_runs.start(tmp_path, "apart", config, 2, CPU_NUM_DEVICES="2")
    codes = [host.finish() for host in hosts]
    refusing = [host.text() for host, code in zip(hosts, codes, strict=True) if code == Exit.FAILED]
    assert refusing, hosts[0].text() + hosts[1].text()
    assert set(codes) <= {Exit.FAILED, Exit.LOST_PEER}  # the first to refuse ends one that still opens its devices
    assert all("torch_xla shows 2 devices, all of this host, but the run has 2 hosts" in text for text in refusing)
