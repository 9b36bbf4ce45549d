"""Claims about candidates with the real gcloud, on emulated slices whose stock comes and goes; about two minutes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from launcher.emulator import control
from tests.rehearsal.workstation import Workstation

FILE = """\
project: rehearsal-project
zone: us-central2-b
slice:
  name: moves
  accelerator_type: v4-16
  capacity: spot
  candidates: [{accelerator_type: v3-8, zones: [us-central1-a]}]
  price_limit: 12
  stockout_minutes: 10
run: {preemption_retries: 3}
"""
STOCK = """\
stock:
- {zone: us-central2-b, accelerator_type: v4-16, capacity: spot, slices: [[0, %d]]}
- {zone: us-central1-a, accelerator_type: v3-8, capacity: spot, slices: [[0, %d]]}
"""
PROGRAM = 'echo "on $TPU_ACCELERATOR_TYPE"; [ "$TPU_ACCELERATOR_TYPE" = v3-8 ] || sleep 10000'


def enter_stock(work: Workstation, v4: int, v3: int) -> None:
    work.good("emulator", "stock", work.file("stock.yaml", STOCK % (v4, v3)))


def test_a_run_goes_on_on_another_type_when_the_stock_falls(emulator: Workstation) -> None:
    work, file = emulator, emulator.file("moves.yaml", FILE)
    enter_stock(work, 1, 0)
    up = work.good("--emulated", "up", "-f", file)
    assert "slice moves is READY: 2 hosts, 8 devices of a v4-16" in up.output
    running = work.begin("--emulated", "run", "-f", file, "--", "sh", "-c", PROGRAM)
    running.wait_for(r"\[1\] on v4-16", 200)
    enter_stock(work, 0, 1)
    ended = running.end(280)
    assert ended.code == 0, ended.output
    assert "attempt 0 on 2 hosts" in ended.output
    assert "attempt 1 on 1 hosts" in ended.output
    assert "[0] on v3-8" in ended.output
    found = control.status(Path(work.environment["TPU_LAUNCH_HOME"]) / "emulator")
    assert [node["accelerator_type"] for node in found["nodes"]] == ["v3-8"]
    listed: list[dict[str, Any]] = json.loads(work.good("--emulated", "capacity", "-f", file, "--json").output)
    used = [(each["candidate"]["accelerator_type"], each["outcome"]) for each in listed if each["granted"]]
    assert used == [("v4-16", "taken away"), ("v3-8", "")]
    work.good("--emulated", "down", "-f", file)
    assert control.status(Path(work.environment["TPU_LAUNCH_HOME"]) / "emulator")["nodes"] == []
    work.good("emulator", "stock", "--clear")
