"""Checks what a host sees of the engine: its own containers by their own names, its network, refusals."""

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from launcher.emulator.vm import engine_view as engine
from launcher.emulator.vm import virtual_tpu
from launcher.emulator.vm.engine_client import HOST_LABEL, LABEL, EngineError
from launcher.emulator.vm.engine_view import EngineView

VIEW = EngineView("0badcafe", "t1v-n-12345678-w-0")
CA_BIND = f"/private/ca.pem:{engine.CONTAINER_CA}:ro"
names = st.from_regex(r"[a-zA-Z0-9][a-zA-Z0-9_.-]{0,20}", fullmatch=True)


def create(body: dict[str, Any]) -> dict[str, Any]:
    def find_source(source: str) -> str:
        if source == "/etc":
            raise EngineError(400, f"invalid bind source {source}")
        return f"/engine{source}" if source.startswith("/") else f"own.{source}"

    return engine.create_on_host(body, VIEW, find_source=find_source, image="sha256:1", ca="/private/ca.pem")


def listed(name: str, **requested: Any) -> dict[str, Any]:
    """An own container as the workstation's engine lists it."""
    ours = {LABEL: VIEW.emulator, HOST_LABEL: VIEW.hostname, engine.REQUESTED_LABEL: json.dumps(requested)}
    shown = {"Id": "a" * 64, "Names": [f"/{VIEW.prefix}{name}"], "Labels": {**ours, "user": "x"}}
    return {**shown, "Image": "sha256:1", "HostConfig": {"NetworkMode": "container:1"}}


def test_host_network_means_the_hosts_network() -> None:
    host = {"NetworkMode": "host", "PortBindings": {}}
    body = {"Image": "i", "Hostname": "x", "ExposedPorts": {"80/tcp": {}}, "HostConfig": dict(host)}
    made = create(body)
    assert made["HostConfig"]["NetworkMode"] == f"container:{VIEW.hostname}"
    assert not {"Hostname", "ExposedPorts"} & set(made)
    assert not {"CapAdd", "CapDrop", "SecurityOpt"} & set(made["HostConfig"]), "it is not privileged"
    assert body["HostConfig"] == host, "the request itself is left as it was"


def test_there_is_no_tpu_and_the_bucket_is_the_emulators() -> None:
    made = create({"Env": ["PJRT_DEVICE=TPU", "A=b=c"]})
    added = [f"STORAGE_EMULATOR_HOST={engine.HOST_STORAGE}", f"CURL_CA_BUNDLE={engine.CONTAINER_CA}"]
    assert made["Env"] == ["PJRT_DEVICE=CPU", "A=b=c", *added]
    assert made["HostConfig"]["Binds"] == [CA_BIND]
    given = ["STORAGE_EMULATOR_HOST=x", "PJRT_DEVICE=CUDA", "CURL_CA_BUNDLE=y"]
    assert create({"Env": given})["Env"] == given
    assert create({"Env": given})["HostConfig"]["Binds"] == []


def test_privileged_becomes_capabilities_and_inspect_still_says_privileged() -> None:
    host = {"Privileged": True, "NetworkMode": "host", "Ulimits": [{"Name": "memlock"}]}
    made = create({"Image": "repo@sha256:2", "HostConfig": host})
    host = made["HostConfig"]
    assert "Privileged" not in host
    assert (host["CapAdd"], host["CapDrop"], host["Ulimits"]) == (["ALL"], ["SYS_RESOURCE"], [])
    config = {"Image": made["Image"], "Labels": made["Labels"]}
    answer = {"Name": f"/{VIEW.prefix}c", "Config": config, "HostConfig": {**host, "Privileged": False}}
    shown = engine.present_container(answer, VIEW)
    assert (shown["Name"], shown["Config"]["Image"], shown["Config"]["Labels"]) == ("/c", "repo@sha256:2", {})
    assert (shown["HostConfig"]["Privileged"], shown["HostConfig"]["NetworkMode"]) == (True, "host")


@pytest.mark.parametrize(
    ("ended", "died", "booted", "code"),
    [
        ("2026-01-01T00:00:06Z", "2026-01-01T00:00:05.5Z", "2026-01-01T00:00:11Z", 255),
        ("2026-01-01T00:00:05Z", "2026-01-01T00:00:05.5Z", "2026-01-01T00:00:11Z", 137),
        ("2026-01-01T00:00:12Z", "2026-01-01T00:00:05.5Z", "2026-01-01T00:00:11Z", 137),
        ("2026-01-01T00:00:12Z", "0001-01-01T00:00:00Z", "2026-01-01T00:00:01Z", 137),
    ],
    ids=["died with the host", "ended before", "ended since", "never rebooted"],
)
def test_a_container_that_died_with_its_host_has_an_unseen_end(ended: str, died: str, booted: str, code: int) -> None:
    config, state = {"Image": "i", "Labels": {}}, {"Status": "exited", "ExitCode": 137, "FinishedAt": ended}
    answer = {"Name": f"/{VIEW.prefix}c", "Config": config, "HostConfig": {}, "State": state}
    state = engine.present_container(answer, VIEW, {"FinishedAt": died, "StartedAt": booted})["State"]
    assert (state["ExitCode"], state["FinishedAt"]) == (code, booted if code == 255 else ended)


def test_binds_are_of_the_hosts_folders_and_volumes_are_its_own() -> None:
    mounts = [{"Type": "bind", "Source": "/tmp/x"}, {"Type": "volume", "Source": "v"}, {"Type": "tmpfs"}]
    host = create({"HostConfig": {"Binds": ["/tmp/a:/a:ro", "data:/d"], "Mounts": mounts}})["HostConfig"]
    assert host["Binds"] == ["/engine/tmp/a:/a:ro", "own.data:/d", CA_BIND]
    assert [mount.get("Source") for mount in host["Mounts"]] == ["/engine/tmp/x", "own.v", None]


@pytest.mark.parametrize(
    ("status", "words", "host"),
    [
        (400, "invalid bind source /etc", {"Binds": ["/etc:/e"]}),
        (400, "publishing ports", {"PortBindings": {"80/tcp": [{"HostPort": "80"}]}}),
        (400, "publishing ports", {"NetworkMode": "bridge", "PublishAllPorts": True}),
        (404, "network mine not found", {"NetworkMode": "mine"}),
        (404, "network container:t1v-n-1-w-1 not found", {"NetworkMode": "container:t1v-n-1-w-1"}),
        (400, "ExtraHosts", {"NetworkMode": "host", "ExtraHosts": ["a:1.2.3.4"]}),
        (400, "Devices", {"Devices": [{"PathOnHost": "/dev/accel0"}]}),
        (400, "VolumesFrom", {"VolumesFrom": ["x"]}),
        (400, "PidMode", {"PidMode": "container:other"}),
        (400, "IpcMode", {"IpcMode": "host"}),
    ],
)
def test_settings_that_can_not_be_emulated_are_refused(status: int, words: str, host: dict[str, Any]) -> None:
    with pytest.raises(EngineError, match=words) as refused:
        create({"HostConfig": host})
    assert refused.value.status == status


def test_users_can_not_pretend_to_be_another_host() -> None:
    labels = create({"Labels": {HOST_LABEL: "t1v-n-other-w-0", "mine": "1"}})["Labels"]
    assert (labels[HOST_LABEL], labels["mine"]) == (VIEW.hostname, "1")


@given(names)
def test_names_come_back_as_they_were_given(name: str) -> None:
    shown = engine.present_listing([listed(name, Image="repo:tag", NetworkMode="host")], VIEW)[0]
    assert (shown["Names"], shown["Labels"], shown["Image"]) == ([f"/{name}"], {"user": "x"}, "repo:tag")
    assert shown["HostConfig"]["NetworkMode"] == "host"


def test_listings_are_filtered_to_the_host_whatever_else_was_asked() -> None:
    query = engine.listing_query({"filters": '{"label": {"a=b": true}}'}, VIEW)
    assert json.loads(query["filters"]) == {"label": ["a=b", *VIEW.labels]}
    for filters, words in (("[1", "invalid filters"), ('{"name": ["^/run"]}', "a filter by name is not supported")):
        with pytest.raises(EngineError, match=words):
            engine.listing_query({"filters": filters}, VIEW)


def test_on_the_workstation_only_host_network_containers_reach_the_bucket() -> None:
    def made(mode: str) -> dict[str, Any]:
        body = {"Image": "i", "HostConfig": {"NetworkMode": mode}}
        return engine.create_on_workstation(body, "0badcafe", "http://127.0.0.1:1", image="i")

    assert made("host")["Env"] == ["STORAGE_EMULATOR_HOST=http://127.0.0.1:1"]
    assert "Env" not in made("default")
    assert made("default")["Labels"] == {LABEL: "0badcafe"}


def test_torch_tpu_has_a_virtual_tpu_on_any_number_of_hosts_and_torch_xla_on_one() -> None:
    def serves(framework: str) -> list[bool]:
        return [virtual_tpu.serves({virtual_tpu.FRAMEWORK_LABEL: framework}, hosts) for hosts in (1, 2)]

    assert serves("torch-tpu") == [True, True]
    assert serves("torch-xla") == [True, False]
    assert serves("tensorflow") == [False, False]
    assert not virtual_tpu.serves(None, 1)
