"""What Cloud TPU accepts, refuses and shows, in the words that gcloud prints."""

from functools import partial
from typing import Any

import pytest

from launcher.emulator.api import catalogue
from tests.emulator.conftest import refusal
from training.accelerators import ACCELERATORS

BY_TOPOLOGY = {"acceleratorType": None, "acceleratorConfig": {"type": "V4", "topology": "2x2x2"}}


@pytest.mark.parametrize("name", sorted(ACCELERATORS))
def test_every_accelerator_of_the_table_can_be_created_in_its_zones_and_nowhere_else(api: Any, name: str) -> None:
    accelerator = ACCELERATORS[name]
    api.state.subnet = "10.192.0.0/10"
    version = accelerator.generation.runtime_version
    for zone in accelerator.zones():
        api.create(zone=zone, acceleratorType=name, runtimeVersion=version)
    elsewhere = next(zone for zone in catalogue.ZONES if zone not in accelerator.zones())
    status, message = refusal(api.create, "other", zone=elsewhere, acceleratorType=name, runtimeVersion=version)
    assert status == 400
    assert message.startswith(f'CloudTpu received an invalid AcceleratorType, "{name}" for zone "{elsewhere}"')


@pytest.mark.parametrize(
    ("changes", "status", "words"),
    [
        ({"acceleratorType": "v3-16", "zone": "europe-west4-a"}, 400, 'invalid AcceleratorType, "v3-16"'),
        ({"acceleratorType": "h100"}, 400, 'invalid AcceleratorType, "h100"'),
        (BY_TOPOLOGY, 400, "acceleratorConfig (gcloud's --type and --topology) is not emulated"),
        ({"zone": "us-nowhere1-a"}, 403, "Permission denied on 'locations/us-nowhere1-a' (or it may not exist)."),
        ({"runtimeVersion": "tpu-ubuntu1804"}, 400, 'the runtime version "tpu-ubuntu1804" was not found'),
        ({"runtimeVersion": "v2-alpha-tpuv6e"}, 400, "is not supported for accelerator type"),
        ({"runtimeVersion": None}, 400, "runtimeVersion is required"),
        ({"labels": {"Team": "x"}}, 400, 'label key "Team"'),
        ({"labels": {"team": "X Y"}}, 400, 'label value "X Y"'),
        ({"metadata": {"k": 1}}, 400, "metadata must be an object of strings"),
        ({"metadata": {"a b": "x"}}, 400, 'metadata key "a b"'),
        ({"hosts": 4}, 400, 'Unknown name "hosts"'),
        ({"schedulingConfig": {"spot": True, "preemptible": True}}, 400, "only one of spot and preemptible"),
        ({"acceleratorType": "v4-128"}, 429, "free addresses"),
    ],
)
def test_bad_creations_get_googles_code_and_words(api: Any, changes: dict[str, Any], status: int, words: str) -> None:
    api.state.subnet = "10.200.0.0/28"
    code, message = refusal(api.create, **changes)
    assert code == status
    assert words in message
    assert (api.state.nodes, api.state.operations) == ({}, {})


@pytest.mark.parametrize("state", ["CREATING", "PREEMPTED", "DELETING"])
def test_a_node_that_is_not_usable_can_not_be_updated(api: Any, state: str) -> None:
    api.ready().resource["state"] = state
    status, message = refusal(api.call, "PATCH", "nodes", "pod", body={"metadata": {}}, updateMask="metadata")
    assert status == 400
    assert f"update is not supported while in state {state}" in message
    assert ("networkEndpoints" in api.call("GET", "nodes", "pod")) == (state != "CREATING")


def test_a_deletion_cancels_what_is_under_way_for_its_node_alone(api: Any) -> None:
    for name in ("a", "b"):
        api.create(name)
    api.call("DELETE", "nodes", "a")
    found = [(each.verb, each.target[-1], each.cancelled) for each in api.state.operations.values()]
    assert found == [("create", "a", True), ("create", "b", False), ("delete", "a", False)]


def test_only_single_host_nodes_stop_and_start(api: Any) -> None:
    api.ready("pod")
    api.ready("one", acceleratorType="v4-8")
    status, message = refusal(api.call, "POST", "nodes", "pod", verb="stop")
    assert (status, "stop is not supported for TPU pods" in message) == (400, True)
    assert refusal(api.call, "POST", "nodes", "one", verb="start")[0] == 400
    api.call("POST", "nodes", "one", verb="stop")
    assert api.call("GET", "nodes", "one")["state"] == "STOPPING"


def test_guest_attributes_have_one_entry_a_worker_in_the_shape_that_gcloud_reads(api: Any) -> None:
    for host in api.ready().hosts:
        host.guest_attributes = {"hostkeys/ssh-ed25519": f"key{host.index}", "other/x": "y"}
    # gcloud sends [""] for all workers.
    ask = partial(api.call, "POST", "nodes", "pod", verb="getGuestAttributes")
    every = [entry["queryValue"]["items"] for entry in ask(body={"workerIds": [""]})["guestAttributes"]]
    assert [[row["value"] for row in rows if row["key"] == "ssh-ed25519"] for rows in every] == [["key0"], ["key1"]]
    (one,) = ask(body={"workerIds": ["1"], "queryPath": "hostkeys/"})["guestAttributes"]
    assert one["queryValue"]["items"] == [{"namespace": "hostkeys", "key": "ssh-ed25519", "value": "key1"}]
    assert refusal(ask, body={"workerIds": ["2"]})[0] == 400


def test_a_listing_over_all_zones_shows_every_zone(api: Any) -> None:
    api.create("a")
    api.create("b", zone="europe-west4-a", acceleratorType="v3-8")
    zones = [node["name"].split("/")[3] for node in api.call("GET", "nodes", zone="-")["nodes"]]
    assert zones == ["europe-west4-a", "us-central2-b"]


def test_catalogues_name_what_can_be_created(api: Any) -> None:
    types = [accelerator["type"] for accelerator in api.call("GET", "acceleratorTypes")["acceleratorTypes"]]
    assert types == [name for name in ACCELERATORS if name.startswith("v4-")]
    versions = [version["version"] for version in api.call("GET", "runtimeVersions")["runtimeVersions"]]
    assert "tpu-ubuntu2204-base" in versions
