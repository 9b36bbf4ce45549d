"""Emulated slices: each module has its own workstation; tests of a process that need two hosts share theirs."""

import contextlib
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.rehearsal.workstation import BUCKET, EmulatedSlice, Workstation, environment_for


@contextlib.contextmanager
def set_up(folder: Path) -> Iterator[Workstation]:
    """Yields a workstation without an emulator; stops at the end what was started on it."""
    work = Workstation(folder, environment_for(folder, "DOCKER_HOST", "STORAGE_EMULATOR_HOST"))
    try:
        yield work
    finally:
        work.launch("emulator", "stop", seconds=120)
        for name in ("runs", "slices"):
            assert not (folder / ".tpu-launch" / name).exists(), "emulated commands wrote where real runs are kept"
        shutil.rmtree(folder / ".tpu-launch", ignore_errors=True)


@pytest.fixture(scope="module")
def workstation(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Workstation]:
    with set_up(tmp_path_factory.mktemp("workstation")) as work:
        yield work


@pytest.fixture(scope="module")
def emulator(workstation: Workstation) -> Workstation:
    """A workstation with an emulator and a bucket."""
    workstation.good("emulator", "start", "--bucket", BUCKET)
    return workstation


def slice_file(name: str, kind: str) -> str:
    """The text of a file of a slice of an accelerator type, in a zone of v4."""
    return f"project: rehearsal-project\nzone: us-central2-b\nslice: {{name: {name}, accelerator_type: {kind}}}\n"


@pytest.fixture(scope="session")
def two_hosts(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EmulatedSlice]:
    """A v4-16 that is READY; its file has no trainer sections: commands are given."""
    with set_up(tmp_path_factory.mktemp("two-hosts")) as work:
        work.good("emulator", "start", "--bucket", BUCKET)
        with work.slice_of(work.file("two.yaml", slice_file("two", "v4-16"))) as made:
            yield made
