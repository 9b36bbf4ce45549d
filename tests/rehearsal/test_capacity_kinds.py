"""Claims about flex-start and reservations, with the real gcloud against the emulated API; about a
minute."""

from pathlib import Path
from typing import Any

import pytest

from launcher.emulator import control
from tests.rehearsal.workstation import Workstation

FILE = """\
project: rehearsal-project
zone: ZONE
slice: {name: kind, accelerator_type: TYPE, queued: {valid_until_hours: 1}, KEYS}
"""


def requested(work: Workstation) -> dict[str, Any]:
    """The only queued resource of the emulator, as its API shows it."""
    found = control.status(Path(work.environment["TPU_LAUNCH_HOME"]) / "emulator")
    assert len(found["queued_resources"]) == 1
    return dict(found["queued_resources"][0])


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("name", "zone", "keys", "fields"),
    [
        pytest.param("v6e-1", "us-east5-a", "capacity: flex-start, max_run_hours: 2",
                     {"provisioningModel": "FLEX_START", "runDuration": {"maxRunDuration": "7200s"}}, id="flex-start"),
        pytest.param("v6e-1", "us-east5-a", "capacity: calendar, reservation: june",
                     {"provisioningModel": "RESERVATION_BOUND",
                      "reservationName": "projects/rehearsal-project/locations/us-east5-a/reservations/june"},
                     id="calendar"),
        pytest.param("v4-8", "us-central2-b", "capacity: reserved, reservation: ours",
                     {"reservationName": "projects/rehearsal-project/locations/us-central2-b/reservations/ours"},
                     id="named reservation"),
    ],
)  # fmt: skip
def test_each_kind_of_capacity_is_asked_for_as_googles_api_has_it(
    emulator: Workstation, name: str, zone: str, keys: str, fields: dict[str, Any]
) -> None:
    file = emulator.file("kind.yaml", FILE.replace("TYPE", name).replace("ZONE", zone).replace("KEYS", keys))
    emulator.good("--emulated", "up", "-f", file)
    shown = requested(emulator)
    assert {key: shown.get(key) for key in fields} == fields
    emulator.good("--emulated", "down", "-f", file)
