"""The emulated stock: creations and queued resources find what the file says; spot slices are taken when it falls."""

import json
from pathlib import Path
from typing import Any

from launcher.emulator.api import nodes as tpu_api
from launcher.emulator.api import queued_resources, stock
from launcher.emulator.state import EmulatorState
from tests.gcloud_commands import parse
from training.yaml_file import load, validate

ZONE, NODE = "us-central2-b", "projects/p/locations/us-central2-b/nodes/a"


def make(*entries: dict[str, Any], seed: int = 0, speed: float = 1.0) -> EmulatorState:
    state = EmulatorState("0badcafe", 1, "/", "/", create_seconds=0.0, update_seconds=0.0, subnet="10.0.0.0/24")
    common = {"zone": ZONE, "accelerator_type": "v4-8"}
    state.stock = {"seed": seed, "speed": speed, "stock": [{**common, **entry} for entry in entries]}
    state.stock_since = 1000.0
    return state


def create(state: EmulatorState, now: float, name: str = "a", flag: str = "--spot") -> dict[str, Any]:
    """Creates a node as gcloud asks for it, and ends its operation; returns the operation's error or {}."""
    what = f"--accelerator-type=v4-8 --version=tpu-ubuntu2204-base {flag}"
    command = parse(f"gcloud compute tpus tpu-vm create {name} --project=p --zone={ZONE} {what}".split())
    operation = state.operations[command.call(state, now)["name"]]
    tpu_api.finish_operation(state, operation, now)
    return operation.error or {}


def test_a_creation_beyond_the_stock_fails_as_googles_does() -> None:
    state = make({"capacity": "spot", "slices": [[0, 1]]})
    assert create(state, 1001.0) == {}
    assert create(state, 1002.0, "b")["code"] == 8
    assert "no more capacity" in create(state, 1003.0, "c", "")["message"], "the file has no on-demand ones"
    assert list(state.nodes) == [NODE]


def test_when_the_stock_falls_the_newest_spot_slice_is_taken_and_no_other_one() -> None:
    state = make({"capacity": "spot", "slices": [[0, 2], [60, 1]]}, {"slices": [[0, 1], [60, 0]]})
    create(state, 1001.0)
    create(state, 1002.0, "b")
    create(state, 1003.0, "c", "")
    assert stock.taken(state, 1059.0) == []
    assert [node.short_name for node in stock.taken(state, 1061.0)] == ["b"]


def test_the_file_of_the_guide_is_valid(tmp_path: Path) -> None:
    page = (Path(__file__).parents[2] / "docs" / "guide" / "capacity.md").read_text()
    text = next(block for block in page.split("```yaml\n") if block.startswith("seed: 7")).partition("```")[0]
    (tmp_path / "stock.yaml").write_text(text)
    read = validate(stock.StockSection, load(tmp_path / "stock.yaml"))
    state = make()
    state.stock = json.loads(json.dumps(read.model_dump()))  # as the control socket and the state's file have it
    assert [stock.available(state, ZONE, "v4-16", "spot", 1000.0 + at / 600) for at in (1, 14401, 86401)] == [1, 0, 1]


def test_a_flex_start_request_takes_its_own_stock() -> None:
    state = make({"capacity": "flex-start", "accelerator_type": "v6e-8", "zone": "us-east5-a", "slices": [[0, 1]]})
    for name in ("a", "b"):
        argv = f"gcloud alpha compute tpus queued-resources create {name} --node-id={name} --zone=us-east5-a"
        what = "--project=p --accelerator-type=v6e-8 --runtime-version=v2-alpha-tpuv6e --provisioning-model=flex-start"
        parse(f"{argv} {what} --max-run-duration=3600s --valid-until-duration=3600s".split()).call(state, 1001.0)
    queued_resources.advance(state, 1002.0)
    for operation in list(state.operations.values()):
        tpu_api.finish_operation(state, operation, 1003.0)
    queued_resources.advance(state, 1004.0)
    assert [each.state for each in state.queued.values()] == ["ACTIVE", "WAITING_FOR_RESOURCES"]
    assert [node.short_name for node in state.nodes.values()] == ["a"]
