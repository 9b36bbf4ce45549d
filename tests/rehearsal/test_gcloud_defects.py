"""Defects of gcloud 528 that show in what it asks of the API, provoked with the real gcloud and the emulator's API in
this process. About 10 s.

Others are provoked and survived elsewhere: --output-directory (test_emulator_slice.py), exit codes of worker subsets
(test_gcloud.py), 255 that runs a command again and 409 for two changes of metadata (test_fault_matrix.py), waiting for
all workers (test_runs.py), output without prefix and standard input for one worker only (test_secrets.py).
"""

import copy
import os
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from launcher import shell
from launcher.config import Config, load
from launcher.emulator.api import calls
from launcher.emulator.api import nodes as tpu_api
from launcher.emulator.api.catalogue import ApiError
from launcher.emulator.http_server import HttpRequest, HttpResponse, json_response
from launcher.emulator.state import EmulatorState, Store
from launcher.emulator.vm import metadata
from launcher.gcloud import call_gcloud
from launcher.providers import this_machine
from launcher.tpu_vm import commands, creation, deletion, inventory, slices
from launcher.tpu_vm.connections import SliceConnections, parse_dry_run
from launcher.tpu_vm.slices import NotOurs
from launcher.workstation import hash_account, this_owner
from tests.emulator.conftest import BODY
from tests.launcher.run_files import SLICE, load_text
from tests.servers import LoopbackServer

GCLOUD = ("gcloud", "compute", "tpus")
PLACE = ("--project=p", "--zone=us-central2-b")
PARENT = "projects/p/locations/us-central2-b"


def finish_operations(state: EmulatorState) -> None:
    for operation in list(state.operations.values()):
        if not operation.done and "/nodes/" in operation.target:
            tpu_api.finish_operation(state, operation, time.time())


@pytest.fixture
def asked() -> list[tuple[str, Any]]:
    """Path and body of what gcloud asked of the API."""
    return []


@pytest.fixture
def state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, asked: list[tuple[str, Any]]) -> Iterator[EmulatorState]:
    """A READY slice of two hosts without reachable addresses, behind the emulated API."""
    found = EmulatorState("0badcafe", 0, "", "", 0, 0, subnet="10.200.0.0/22")
    tpu_api.create(found, PARENT, "demo", dict(BODY), time.time())
    finish_operations(found)
    hostname = found.hosts[0].hostname
    vm, lock = Store(copy.deepcopy(found), None), threading.Lock()  # the VM on which gcloud runs outlives the slice

    def answer(request: HttpRequest) -> HttpResponse:
        with lock:
            if request.segments[0] in ("computeMetadata", ""):
                return metadata.answer(vm, hostname, request)
            if request.segments[0] == "compute":
                return json_response(tpu_api.compute_project("p"))
            has_attributes = any(host.guest_attributes for host in found.hosts)
            if request.path.endswith(":getGuestAttributes") and not has_attributes:
                return json_response({"guestAttributes": []})
            try:
                said = request.json()
                asked.append((request.path, said))
                call = calls.parse(request.method, request.segments[1:], request.query, said)
                return json_response(calls.answer(found, call, time.time()))
            except ApiError as error:
                return json_response(error.as_json(), error.status)
            finally:
                finish_operations(found)

    server = LoopbackServer(answer)
    endpoint = f"{server.url}/"
    for key, value in {
        "CLOUDSDK_API_ENDPOINT_OVERRIDES_TPU": endpoint,
        "CLOUDSDK_API_ENDPOINT_OVERRIDES_COMPUTE": f"{endpoint}compute/v1/",
        "CLOUDSDK_AUTH_DISABLE_CREDENTIALS": "true",
        "CLOUDSDK_CORE_CHECK_GCE_METADATA": "false",
        "GCE_METADATA_ROOT": server.address,
        "CLOUDSDK_CORE_DISABLE_USAGE_REPORTING": "true",
        "CLOUDSDK_COMPONENT_MANAGER_DISABLE_UPDATE_CHECK": "true",
        "CLOUDSDK_CONFIG": str(tmp_path / "gcloud"),
        "HOME": str(tmp_path),
    }.items():
        monkeypatch.setenv(key, value)
    for name in [key for key in os.environ if key.lower().endswith("_proxy")]:
        monkeypatch.delenv(name)
    yield found
    server.close()


@pytest.fixture
def config(tmp_path: Path) -> Config:
    return load_text(tmp_path, SLICE, command=["true"])


def test_a_host_whose_guest_agent_is_not_up_yet_is_a_problem_that_passes(state: EmulatorState, config: Config) -> None:
    """gcloud crashes on one worker of a slice without guest attributes; to the launcher, it doesn't answer yet."""
    crashed = shell.run(commands.ssh_command(config, "true", worker="0"), timeout=600)
    assert not crashed.ok
    assert "IndexError" in crashed.stderr
    result = SliceConnections(config, this_machine()).run_through_gcloud(0, "true")
    assert (result.reached, "IndexError" in result.problem) == (False, True)
    for host in state.hosts:
        host.guest_attributes["hostkeys/ssh-ed25519"] = "AAAAC3NzaC1lZDI1NTE5AAAAIGAbCdEf"
    dry_run = commands.ssh_command(config, "true", dry_run=True)
    addresses = parse_dry_run(call_gcloud(this_machine(), dry_run, timeout=600))
    assert [address.alias.rsplit("-", 2)[1:] for address in addresses] == [["0", "AbCdEf"], ["1", "AbCdEf"]]


def body(asked: list[tuple[str, Any]], collection: str) -> Any:
    """Of the newest request to create something."""
    return next(said for path, said in reversed(asked) if path.endswith(f"/{collection}") and said)


def test_without_a_type_gcloud_asks_for_a_v2_8_and_we_always_say_which(
    state: EmulatorState, asked: list[tuple[str, Any]], config: Config
) -> None:
    shell.run([*GCLOUD, "tpu-vm", "create", "bare", *PLACE, "--version=tpu-ubuntu2204-base", "--quiet"], timeout=600)
    assert body(asked, "nodes")["acceleratorType"] == "v2-8"
    shell.run(commands.create_command(config, {}), timeout=600)
    assert body(asked, "nodes")["acceleratorType"] == "v4-16"


def test_reserved_without_a_zone_asks_for_a_reservation_in_none_and_we_always_say_where(
    state: EmulatorState, asked: list[tuple[str, Any]], config: Config, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CLOUDSDK_COMPUTE_ZONE", "us-central2-b")
    words = [*GCLOUD, "queued-resources", "create", "bare", "--project=p", "--node-id=bare", "--accelerator-type=v4-16"]
    shell.run([*words, "--runtime-version=tpu-ubuntu2204-base", "--reserved", "--quiet"], timeout=600)
    assert "/locations/None/" in body(asked, "queuedResources")["reservationName"]
    reserved = replace(config, slice=config.slice.model_copy(update={"capacity": "reserved"}))
    shell.run(commands.create_request_command(reserved, {}, 3600), timeout=600)
    assert body(asked, "queuedResources")["reservationName"] == "projects/p/locations/us-central2-b/reservations/-"


@pytest.mark.parametrize(
    ("slice_", "zone", "fields"),
    [
        ("accelerator_type: v6e-1, capacity: flex-start, max_run_hours: 2", "us-east5-a",
         {"provisioningModel": "FLEX_START", "runDuration": {"maxRunDuration": "7200s"}}),
        ("accelerator_type: v6e-1, capacity: calendar, reservation: june", "us-east5-a",
         {"provisioningModel": "RESERVATION_BOUND",
          "reservationName": "projects/p/locations/us-east5-a/reservations/june"}),
        ("accelerator_type: v4-8, capacity: reserved, reservation: ours", "us-central2-b",
         {"reservationName": "projects/p/locations/us-central2-b/reservations/ours"}),
    ],
    ids=["flex-start", "calendar", "named reservation"],
)  # fmt: skip
def test_gcloud_requests_each_kind_of_capacity_in_the_fields_of_googles_api(
    asked: list[tuple[str, Any]], tmp_path: Path, state: EmulatorState, slice_: str, zone: str, fields: dict[str, Any]
) -> None:
    text = f"project: p\nzone: {zone}\nslice: {{name: kind, {slice_}, queued: {{valid_until_hours: 1}}}}\n"
    (tmp_path / "kind.yaml").write_text(text)
    requested = shell.run(commands.create_request_command(load(tmp_path / "kind.yaml"), {}, 3600), timeout=600)
    assert requested.ok, requested.stderr
    found = body(asked, "queuedResources")
    assert {key: found.get(key) for key in fields} == fields


@pytest.mark.nightly
def test_slices_are_replaced_and_found(state: EmulatorState, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The whole life of a slice with the real gcloud on a VM; the emulated API provides it at once."""
    assert this_owner().account == ""
    monkeypatch.setenv("CLOUDSDK_CORE_CHECK_GCE_METADATA", "true")
    assert this_owner().account == hash_account(tpu_api.service_account())
    monkeypatch.setenv("TPU_LAUNCH_HOME", str(tmp_path / "kept"))
    path = tmp_path / "life.yaml"
    section = "slice:\n  name: demo\n  accelerator_type: v4-16\n  runtime_version: tpu-ubuntu2204-base\n"
    path.write_text(f"project: p\nzone: us-central2-b\n{section}")
    config = load(path, command=["true"])
    said: list[str] = []
    with pytest.raises(NotOurs, match="no label tpu-launch=1"):
        deletion.delete(config, said.append, this_machine())
    assert deletion.delete(replace(config, any_owner=True), said.append, this_machine())
    assert slices.describe(config, this_machine()) is None
    created = creation.create(config, said.append, this_machine())
    assert created.ready
    assert slices.describe(config, this_machine()) == created
    assert creation.create(config, said.append, this_machine()) == created, "an existing slice is used"
    (owned,) = inventory.list_owned("p", ["us-central2-b"], this_machine()).slices
    assert (owned.name, owned.state, owned.request) == ("demo", "READY", "")
    assert deletion.delete(config, said.append, this_machine())
    assert not deletion.delete(config, said.append, this_machine())
    assert state.nodes == {}
