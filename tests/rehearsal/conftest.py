"""Emulated slices for tests: each module has its own workstation, and its emulator is stopped after the module."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator

import pytest

from tests.rehearsal.workstation import BUCKET, ROOT, Workstation


@pytest.fixture(scope="module")
def workstation(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Workstation]:
    """A workstation without an emulator."""
    folder = tmp_path_factory.mktemp("workstation")
    environment = {
        key: value for key, value in os.environ.items() if key not in ("DOCKER_HOST", "STORAGE_EMULATOR_HOST")
    }
    environment |= {"TPU_LAUNCH_HOME": str(folder / ".tpu-launch"), "PYTHONPATH": str(ROOT), "PYTHONUNBUFFERED": "1"}
    work = Workstation(folder, environment)
    try:
        yield work
    finally:
        work.launch("emulator", "stop", seconds=120)
        for name in ("runs", "slices"):
            assert not (folder / ".tpu-launch" / name).exists(), "emulated commands wrote where real runs are kept"
        shutil.rmtree(folder / ".tpu-launch", ignore_errors=True)


@pytest.fixture(scope="module")
def emulator(workstation: Workstation) -> Workstation:
    """A workstation with an emulator and a bucket."""
    workstation.good("emulator", "start", "--bucket", BUCKET)
    return workstation


SLICE = """\
project: rehearsal-project
zone: us-central2-b
slice: {name: NAME, accelerator_type: TYPE}
"""


@pytest.fixture(scope="module")
def two_hosts(emulator: Workstation) -> Iterator[tuple[Workstation, str]]:
    """A v4-16 that is READY, and its file (no trainer sections: commands are given)."""
    name = emulator.file("two.yaml", SLICE.replace("NAME", "two").replace("TYPE", "v4-16"))
    emulator.good("--emulated", "up", "-f", name)
    yield emulator, name
    emulator.launch("--emulated", "down", "-f", name)
