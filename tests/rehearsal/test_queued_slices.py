"""Claims about slices from the queue (real gcloud, emulated API). Creates and loses slices one
after the other; about 50 s."""

import time
from pathlib import Path
from typing import Any

import pytest

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


def wait_until(work: Workstation, wanted: dict[str, Any], seconds: float = 30) -> None:
    deadline = time.monotonic() + seconds
    while (found := there(work)) != wanted:
        assert time.monotonic() < deadline, f"{found}, not {wanted}"
        time.sleep(0.2)


@pytest.mark.nightly
def test_a_wait_can_be_interrupted_and_gone_on_with_and_down_takes_what_was_granted_afterwards(
    emulator: Workstation,
) -> None:
    file = emulator.file("queue.yaml", QUEUED.replace("NAME", "queue"))
    control.inject(home(emulator), {"fault": "stockout", "left": 1000})
    for first in (True, False):
        running = emulator.begin("--emulated", "up", "-f", file)
        running.wait_for("request queue is WAITING_FOR_RESOURCES, asked .* ago, valid for 59 min more", 30)
        running.interrupt()
        ended = running.end(20)
        assert ended.code == 130
        assert "goes on waiting" in ended.output
        assert ("asking for a v4-8" in ended.output) == first, "the second up goes on with the first one's request"
    assert "WAITING_FOR_RESOURCES" in emulator.good("--emulated", "status", "-f", file).output
    control.inject(home(emulator), {"fault": "clear"})
    wait_until(emulator, {"requests": {"queue": "ACTIVE"}, "nodes": {"queue": "READY"}})
    emulator.good("--emulated", "down", "-f", file)
    assert there(emulator) == {"requests": {}, "nodes": {}}


def test_without_capacity_it_ends_with_its_code_and_nothing_is_left(emulator: Workstation) -> None:
    file = emulator.file("never.yaml", QUEUED.replace("NAME", "never"))
    control.inject(home(emulator), {"fault": "stockout", "left": 1000})
    ended = emulator.launch("--emulated", "up", "-f", file, "--set", "slice.queued.valid_until_hours=0.0005")
    assert ended.code == 20, ended.output
    assert "slice.queued.valid_until_hours" in ended.output
    assert there(emulator) == {"requests": {}, "nodes": {}}
    control.inject(home(emulator), {"fault": "clear"})
