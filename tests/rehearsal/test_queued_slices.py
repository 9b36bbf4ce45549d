"""Claims about slices from the queue (real gcloud, emulated API). Creates and loses several in turn; about 50 s."""

from pathlib import Path
from typing import Any

from launcher.emulator import control
from tests.rehearsal.workstation import Workstation

QUEUED = """\
project: rehearsal-project
zone: us-central2-b
slice: {name: NAME, accelerator_type: v4-8, queued: {valid_until_hours: 1}}
"""


def home(work: Workstation) -> Path:
    return Path(work.environment["TPU_LAUNCH_HOME"]) / "emulator"


def there(work: Workstation) -> dict[str, Any]:
    """What the emulator has: states of requests and nodes."""
    found = control.status(home(work))
    requests = {each["name"].split("/")[-1]: each["state"]["state"] for each in found["queued_resources"]}
    return {"requests": requests, "nodes": {node["name"].split("/")[-1]: node["state"] for node in found["nodes"]}}


def test_without_capacity_it_ends_with_its_code_and_nothing_is_left(emulator: Workstation) -> None:
    file = emulator.file("never.yaml", QUEUED.replace("NAME", "never"))
    control.inject(home(emulator), {"fault": "stockout", "left": 1000})
    ended = emulator.launch("--emulated", "up", "-f", file, "--set", "slice.queued.valid_until_hours=0.0005")
    assert ended.code == 20, ended.output
    assert "slice.queued.valid_until_hours" in ended.output
    assert there(emulator) == {"requests": {}, "nodes": {}}
    control.inject(home(emulator), {"fault": "clear"})
