"""Claims about looking after slices: costs, list, gc (real gcloud, emulated API). Starts one emulator; about 40 s."""

from __future__ import annotations

import json
import os
import subprocess
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from launcher.emulator import control
from tests.rehearsal.conftest import SLICE
from tests.rehearsal.workstation import Workstation

ONE = SLICE.replace("TYPE", "v4-8")


def gcloud(work: Workstation, *arguments: str) -> str:
    """gcloud as a person beside us would type it."""
    environment = {**os.environ, **control.environment(Path(work.environment["TPU_LAUNCH_HOME"]) / "emulator")}
    argv = ["gcloud", "compute", "tpus", *arguments, "--project=rehearsal-project", "--zone=us-central2-b", "--quiet"]
    return subprocess.run(argv, env=environment, capture_output=True, text=True, check=True, timeout=120).stdout


def test_a_slice_above_the_limit_is_not_created(emulator: Workstation) -> None:
    file = emulator.file("dear.yaml", ONE.replace("NAME", "dear"))
    ended = emulator.launch("--emulated", "up", "-f", file, "--max-cost", "12")
    assert ended.code == 2, ended.output
    assert "about $12.88 an hour" in ended.output
    assert gcloud(emulator, "tpu-vm", "list", "--format=value(name)") == ""


def test_gc_removes_what_expired_or_was_preempted_and_nothing_else(emulator: Workstation) -> None:
    for name in ("old", "lost"):
        emulator.file(f"{name}.yaml", ONE.replace("NAME", name))
    node = ["--accelerator-type=v4-8", "--version=tpu-ubuntu2204-base"]
    bobs = "--labels=tpu-launch=1,tpu-launch-owner=bob,tpu-launch-expires=1"
    with ThreadPoolExecutor() as pool:
        made = [
            pool.submit(gcloud, emulator, "tpu-vm", "create", "theirs", *node, "--labels=team=other"),
            pool.submit(gcloud, emulator, "tpu-vm", "create", "bobs", *node, bobs),
            pool.submit(emulator.good, "--emulated", "up", "-f", "old.yaml", "--set", "slice.expires_hours=0.0001"),
            pool.submit(emulator.good, "--emulated", "up", "-f", "lost.yaml", "--set", "slice.expires_hours=5"),
        ]
    for each in made:
        each.result()
    emulator.good("emulator", "inject", "preempt", "theirs")

    listed = {each["name"]: each for each in emulator_json(emulator, "list", "-f", "lost.yaml")}
    assert set(listed) == {"bobs", "old", "lost"}
    assert listed["old"]["leftover"].startswith("expired")
    assert listed["lost"]["leftover"] == ""
    assert listed["lost"]["run"] == "lost"
    assert listed["lost"]["cost"] is not None
    assert "cost so far: about $" in emulator.good("--emulated", "status", "-f", "lost.yaml").output

    emulator.good("emulator", "inject", "preempt", "lost")
    assert "gc --yes" in emulator.good("--emulated", "gc", "-f", "lost.yaml").output
    assert len(emulator_json(emulator, "list", "-f", "lost.yaml")) == 3, "without --yes nothing is deleted"
    emulator.good("--emulated", "gc", "--yes", "-f", "lost.yaml")
    assert sorted(gcloud(emulator, "tpu-vm", "list", "--format=value(name.basename())").split()) == ["bobs", "theirs"]
    emulator.good("--emulated", "gc", "--yes", "--all-owners", "--all-zones", "-f", "lost.yaml")
    assert gcloud(emulator, "tpu-vm", "list", "--format=value(name.basename())").split() == ["theirs"]


def emulator_json(work: Workstation, *arguments: str) -> list[dict[str, object]]:
    output = work.good("--emulated", *arguments, "--json").output
    return list(json.loads(output[output.index("[") :]))
