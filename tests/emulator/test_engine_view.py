"""What a host sees of the engine, as pure rewriting: its own containers under their own names, its own network, honest
refusals."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from launcher.emulator.vm import engine_request
from launcher.emulator.vm import engine_view as engine
from launcher.emulator.vm.engine_client import HOST_LABEL, LABEL
from launcher.emulator.vm.engine_view import EngineRefusal, EngineView

VIEW = EngineView("0badcafe", "t1v-n-12345678-w-0")
CA_BIND = f"/private/ca.pem:{engine.CONTAINER_CA}:ro"
IDS = ["a" * 64, "ab" + "c" * 62, "d" * 64]
names = st.from_regex(r"[a-zA-Z0-9][a-zA-Z0-9_.-]{0,20}", fullmatch=True)


def create(body: dict[str, Any], image: str = "sha256:1") -> dict[str, Any]:
    def bind(path: str) -> str:
        if not path.startswith(("/tmp", "/dev/shm")):
            raise EngineRefusal(400, f"invalid bind source {path}")
        return f"/engine{path}"

    return engine.create_on_host(
        body, VIEW, bind=bind, volume=lambda name: f"own.{name}", image=image, ca="/private/ca.pem"
    )


def refused(status: int, words: str, body: dict[str, Any]) -> None:
    with pytest.raises(EngineRefusal, match=words) as caught:
        create(body)
    assert caught.value.status == status


def listed(name: str, identifier: str = IDS[0], **requested: Any) -> dict[str, Any]:
    """An own container as the workstation's engine lists it."""
    labels = {
        LABEL: VIEW.emulator,
        HOST_LABEL: VIEW.hostname,
        engine.REQUESTED_LABEL: json.dumps(requested),
        "user": "x",
    }
    return {
        "Id": identifier,
        "Names": [f"/{VIEW.prefix}{name}"],
        "Labels": labels,
        "Image": "sha256:1",
        "HostConfig": {"NetworkMode": "container:1"},
    }


def test_host_network_means_the_hosts_network() -> None:
    body = {
        "Image": "i",
        "Hostname": "x",
        "ExposedPorts": {"80/tcp": {}},
        "HostConfig": {"NetworkMode": "host", "PortBindings": {}},
    }
    made = create(body)
    assert made["HostConfig"]["NetworkMode"] == f"container:{VIEW.hostname}"
    assert "Hostname" not in made
    assert "ExposedPorts" not in made
    assert body["HostConfig"] == {"NetworkMode": "host", "PortBindings": {}}, "the request itself is left as it was"


def test_there_is_no_tpu_and_the_bucket_is_the_emulators() -> None:
    made = create({"Env": ["PJRT_DEVICE=TPU", "A=b=c"]})
    added = [f"STORAGE_EMULATOR_HOST={engine.HOST_STORAGE}", f"CURL_CA_BUNDLE={engine.CONTAINER_CA}"]
    assert made["Env"] == ["PJRT_DEVICE=CPU", "A=b=c", *added]
    assert made["HostConfig"]["Binds"] == [CA_BIND]
    given = ["STORAGE_EMULATOR_HOST=x", "PJRT_DEVICE=CUDA", "CURL_CA_BUNDLE=y"]
    assert create({"Env": given})["Env"] == given
    assert create({"Env": given})["HostConfig"]["Binds"] == []


def test_privileged_becomes_capabilities_and_inspect_still_says_privileged() -> None:
    made = create(
        {
            "Image": "repo@sha256:2",
            "HostConfig": {"Privileged": True, "NetworkMode": "host", "Ulimits": [{"Name": "memlock"}]},
        }
    )
    host = made["HostConfig"]
    assert "Privileged" not in host
    assert (host["CapAdd"], host["CapDrop"], host["Ulimits"]) == (["ALL"], ["SYS_RESOURCE"], [])
    answer = {
        "Name": f"/{VIEW.prefix}c",
        "Config": {"Image": made["Image"], "Labels": made["Labels"]},
        "HostConfig": {**host, "Privileged": False},
    }
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
def test_an_engine_did_not_see_how_a_container_ended_that_died_with_its_host(
    ended: str, died: str, booted: str, code: int
) -> None:
    answer = {
        "Name": f"/{VIEW.prefix}c",
        "Config": {"Image": "i", "Labels": {}},
        "HostConfig": {},
        "State": {"Status": "exited", "ExitCode": 137, "FinishedAt": ended},
    }
    state = engine.present_container(answer, VIEW, {"FinishedAt": died, "StartedAt": booted})["State"]
    assert (state["ExitCode"], state["FinishedAt"]) == (code, booted if code == 255 else ended)


def test_an_unprivileged_container_gets_no_capability() -> None:
    assert not {"CapAdd", "CapDrop", "SecurityOpt"} & set(create({"HostConfig": {"NetworkMode": "host"}})["HostConfig"])


def test_namespaces_of_the_host_are_the_emulated_hosts() -> None:
    host = create({"HostConfig": {"PidMode": "host", "IpcMode": "host", "UTSMode": "host", "Binds": ["/tmp/a:/a"]}})[
        "HostConfig"
    ]
    assert (host["PidMode"], host["IpcMode"], host["UTSMode"]) == (f"container:{VIEW.hostname}", "private", "")
    assert host["Binds"] == ["/engine/dev/shm:/dev/shm", "/engine/tmp/a:/a", CA_BIND]


def test_binds_are_of_the_hosts_folders_and_volumes_are_its_own() -> None:
    mounts = [
        {"Type": "bind", "Source": "/tmp/x", "Target": "/x"},
        {"Type": "volume", "Source": "v", "Target": "/v"},
        {"Type": "tmpfs", "Target": "/t"},
    ]
    host = create({"HostConfig": {"Binds": ["/tmp/a:/a:ro", "data:/d"], "Mounts": mounts}})["HostConfig"]
    assert host["Binds"] == ["/engine/tmp/a:/a:ro", "own.data:/d", CA_BIND]
    assert [mount.get("Source") for mount in host["Mounts"]] == ["/engine/tmp/x", "own.v", None]
    refused(400, "invalid bind source /etc", {"HostConfig": {"Binds": ["/etc:/e"]}})


@pytest.mark.parametrize(
    ("status", "words", "host"),
    [
        (400, "publishing ports", {"PortBindings": {"80/tcp": [{"HostPort": "80"}]}}),
        (400, "publishing ports", {"NetworkMode": "bridge", "PublishAllPorts": True}),
        (404, "network mine not found", {"NetworkMode": "mine"}),
        (404, "network container:t1v-n-1-w-1 not found", {"NetworkMode": "container:t1v-n-1-w-1"}),
        (400, "ExtraHosts together with --network host", {"NetworkMode": "host", "ExtraHosts": ["a:1.2.3.4"]}),
        (400, "/dev/accel0", {"Devices": [{"PathOnHost": "/dev/accel0"}]}),
        (400, "VolumesFrom", {"VolumesFrom": ["x"]}),
        (400, "PidMode of another container", {"PidMode": "container:other"}),
    ],
)
def test_what_can_not_be_given_honestly_is_refused(status: int, words: str, host: dict[str, Any]) -> None:
    refused(status, words, {"HostConfig": host})


def test_users_can_not_pretend_to_be_another_host() -> None:
    labels = create({"Labels": {HOST_LABEL: "t1v-n-other-w-0", "mine": "1"}})["Labels"]
    assert (labels[HOST_LABEL], labels["mine"]) == (VIEW.hostname, "1")


@given(names)
def test_names_come_back_as_they_were_given(name: str) -> None:
    shown = engine.present_listing([listed(name, Image="repo:tag", NetworkMode="host")], VIEW, [], None)[0]
    assert (shown["Names"], shown["Labels"], shown["Image"]) == ([f"/{name}"], {"user": "x"}, "repo:tag")
    assert shown["HostConfig"]["NetworkMode"] == "host"
    assert engine.resolve_container(name, [listed(name)], VIEW) == IDS[0]


def test_containers_are_found_by_name_id_and_start_of_an_id_among_the_hosts_own() -> None:
    own = [listed(name, identifier) for name, identifier in zip(("one", "two", "three"), IDS, strict=True)]
    assert engine.resolve_container("two", own, VIEW) == IDS[1]
    assert engine.resolve_container("/two", own, VIEW) == IDS[1]
    assert engine.resolve_container("d", own, VIEW) == IDS[2]
    assert engine.resolve_container(IDS[0], own, VIEW) == IDS[0]
    with pytest.raises(EngineRefusal, match="No such container: four"):
        engine.resolve_container("four", own, VIEW)
    with pytest.raises(EngineRefusal, match="Multiple IDs"):
        engine.resolve_container("a", own, VIEW)
    with pytest.raises(EngineRefusal, match="No such container"):
        engine.resolve_container(f"{VIEW.hostname}.", own, VIEW)


def test_listings_are_filtered_to_the_host_whatever_else_was_asked() -> None:
    query, filtered, limit = engine.listing_query(
        {"all": "1", "limit": "2", "filters": '{"label": {"a=b": true}, "name": ["^/run"]}'}, VIEW
    )
    assert json.loads(query["filters"]) == {"label": ["a=b", *VIEW.labels]}
    assert (filtered, limit, "limit" in query) == (["^/run"], 2, False)
    values = [listed(name) for name in ("run-1", "other", "run-2", "run-3")]
    assert [row["Names"] for row in engine.present_listing(values, VIEW, filtered, limit)] == [["/run-1"], ["/run-2"]]
    with pytest.raises(EngineRefusal, match="invalid filters"):
        engine.listing_query({"filters": "[1"}, VIEW)


def test_on_the_workstation_only_host_network_containers_reach_the_bucket() -> None:
    def made(mode: str) -> dict[str, Any]:
        return engine.create_on_workstation(
            {"Image": "i", "HostConfig": {"NetworkMode": mode}}, "0badcafe", "http://127.0.0.1:1", image="i"
        )

    assert made("host")["Env"] == ["STORAGE_EMULATOR_HOST=http://127.0.0.1:1"]
    assert "Env" not in made("default")
    assert made("default")["Labels"] == {LABEL: "0badcafe"}


@pytest.mark.parametrize(
    ("path", "parts"),
    [
        ("/v1.41/containers/json", ("/v1.41", "/containers/json")),
        ("/_ping", ("", "/_ping")),
        ("/version", ("", "/version")),
    ],
)
def test_versions_are_split_off_paths(path: str, parts: tuple[str, str]) -> None:
    assert engine_request.split_version(path) == parts
