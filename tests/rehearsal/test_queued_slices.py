"""Claims about slices from the queue (real gcloud, emulated API); about 20 s."""

from launcher.emulator import control
from tests.rehearsal.conftest import slice_file
from tests.rehearsal.workstation import Workstation


def test_without_capacity_it_ends_with_its_code_and_nothing_is_left(emulator: Workstation) -> None:
    file = emulator.file("never.yaml", slice_file("never", "v4-8"))
    emulator.good("emulator", "inject", "stockout", "1000")
    ended = emulator.launch("--emulated", "up", "-f", file, "--set", "slice.queued.valid_until_hours=0.0005")
    ended.require(20, "slice.queued.valid_until_hours")
    left = control.status(emulator.emulator)
    assert (left["queued_resources"], left["nodes"]) == ([], [])
