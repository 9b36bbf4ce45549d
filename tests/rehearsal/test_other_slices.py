"""Claims about a run that follows capacity: it loses its spot slice of two hosts when the emulated stock falls, goes on
on another type with one host, and its losses are those of the undisturbed run.

Trains twice, on emulated slices of a v4-16 and a v3-8 (virtual TPU); about two and a half minutes.
"""

import json
from typing import Any

import pytest

from launcher.emulator import control
from tests.rehearsal.test_recovery import FILE, summary, trainable  # noqa: F401  (a fixture)
from tests.rehearsal.workstation import Workstation

pytestmark = [pytest.mark.alone, pytest.mark.timeout(1200)]

STEPS = 160
CANDIDATES = (
    "slice.capacity=spot",
    "slice.candidates=[{accelerator_type: v3-8, zones: [us-central1-a]}]",
    "slice.stockout_minutes=10",
    "slice.price_limit=12",
    "run.preemption_retries=3",
)
STOCK = """\
stock:
- {zone: us-central2-b, accelerator_type: v4-16, capacity: spot, slices: [[0, %d]]}
- {zone: us-central1-a, accelerator_type: v3-8, capacity: spot, slices: [[0, %d]]}
"""


def enter_stock(work: Workstation, v4: int, v3: int) -> None:
    work.good("emulator", "stock", work.file("stock.yaml", STOCK % (v4, v3)))


def options() -> list[str]:
    return [word for setting in CANDIDATES for word in ("--set", setting)]


def short() -> list[str]:
    small = (f"train.steps={STEPS}", "train.global_batch_size=8", "train.log_every=1", "train.warmup_steps=2")
    often = ("checkpoint.every_steps=10", f"evaluation.every={STEPS}")
    return [word for setting in (*small, *often) for word in ("--set", setting)]


def test_a_run_goes_on_on_another_type_of_slice_with_the_same_losses(trainable: Workstation) -> None:  # noqa: F811
    work = trainable
    begun = work.good("--emulated", "run", "--new", "-f", FILE, "--json", *short(), seconds=600)
    undisturbed = summary(work, begun.json()["run"])
    work.good("--emulated", "down", "-f", FILE)
    enter_stock(work, 1, 0)
    up = work.good("--emulated", "up", "-f", FILE, *options())
    assert "slice rehearsal is READY: 2 hosts, 8 devices of a v4-16" in up.output
    running = work.begin("--emulated", "run", "-f", FILE, "--new", "--json", *short(), *options())
    running.wait_for(r"step +[1-9][0-9]/", 900)
    enter_stock(work, 0, 1)
    ended = running.end(900)
    assert ended.code == 0, ended.output
    assert "attempt 0 on 2 hosts" in ended.output
    assert "attempt 1 on 1 hosts" in ended.output
    after = summary(work, ended.json()["run"])
    expected: dict[int, float] = dict(undisturbed["history"])
    assert len(after["history"]) > STEPS // 2, ended.output
    apart = {step: abs(loss - expected[step]) for step, loss in after["history"]}
    assert max(apart.values()) < 1e-6, apart
    found = control.status(work.folder / ".tpu-launch" / "emulator")
    assert [node["accelerator_type"] for node in found["nodes"]] == ["v3-8"]
    listed: list[dict[str, Any]] = json.loads(
        work.good("--emulated", "capacity", "-f", FILE, "--json", *options()).output
    )
    assert [(each["candidate"]["accelerator_type"], each["outcome"]) for each in listed if each["granted"]] == [
        ("v4-16", "taken away"),
        ("v3-8", ""),
    ]
    work.good("--emulated", "down", "-f", FILE)
    assert control.status(work.folder / ".tpu-launch" / "emulator")["nodes"] == []
    work.good("emulator", "stock", "--clear")
