"""Checks what torch_xla, TensorFlow, JAX and Google's guest agent read at metadata.google.internal on a host."""

import importlib.util
import json
import threading
import time
from email.message import Message
from io import BytesIO
from pathlib import Path
from typing import Any

import pytest
import yaml

from launcher.emulator.http_server import Body, HttpRequest, HttpResponse
from launcher.emulator.state import Store
from launcher.emulator.vm import metadata


class Host:
    """Worker 1 of a v4-32, asking."""

    def __init__(self, api: Any) -> None:
        self.api = api
        self.node = api.ready(acceleratorType="v4-32", metadata={"greeting": "hello"})
        self.store = Store(api.state, None)

    def ask(
        self, path: str, method: str = "GET", body: bytes = b"", headers: dict[str, str] | None = None, **query: str
    ) -> HttpResponse:
        message = Message()
        for key, value in (headers if headers is not None else {"Metadata-Flavor": "Google"}).items():
            message[key] = value
        message["Content-Length"] = str(len(body))
        request = HttpRequest(method, f"/computeMetadata/v1/{path}", query, message, Body(BytesIO(body), message))
        return metadata.answer(self.store, self.node.hosts[1].hostname, request)

    def text(self, path: str, **query: str) -> str:
        response = self.ask(path, **query)
        assert response.status == 200, response.body
        return response.body.decode()


@pytest.fixture
def host(api: Any) -> Host:
    return Host(api)


def test_the_header_is_required(host: Host) -> None:
    assert host.ask("instance/id", headers={}).status == 403
    assert host.ask("instance/id", headers={"Metadata-Flavor": "Google", "X-Forwarded-For": "1.2.3.4"}).status == 403
    assert host.ask("instance/id").headers["Metadata-Flavor"] == "Google"


def test_tpu_env_has_the_bounds_that_torch_xla_needs(host: Host) -> None:
    values = yaml.safe_load(host.text("instance/attributes/tpu-env"))
    assert values["TPU_PROCESS_BOUNDS"] == "1,1,4"
    assert values["TPU_CHIPS_PER_PROCESS_BOUNDS"] == "2,2,1"
    assert (values["WORKER_ID"], values["TYPE"], values["TOPOLOGY"]) == ("1", "V4", "2x2x4")


def test_v3_has_no_bounds_in_its_tpu_env(api: Any) -> None:
    api.create("old", zone="europe-west4-a", acceleratorType="v3-32")
    node = api.state.nodes["projects/p/locations/europe-west4-a/nodes/old"]
    assert "BOUNDS" not in metadata.tpu_env(node, node.hosts[0])
    node.resource["schedulingConfig"] = {"reserved": True}
    assert "PREEMPTIBLE: 'false'" in metadata.tpu_env(node, node.hosts[0])


def test_folders_are_listed_and_read_whole(host: Host) -> None:
    assert host.ask("instance").status == 301
    assert "attributes/\n" in host.text("instance/")
    assert "greeting\n" in host.text("instance/attributes/")
    assert json.loads(host.text("", recursive="true"))["instance"]["attributes"]["greeting"] == "hello"
    assert host.ask("instance/nothing").status == 404


def test_a_guest_attribute_that_is_put_is_what_the_api_shows(host: Host) -> None:
    assert host.ask("instance/guest-attributes/hostkeys/ssh-ed25519", method="PUT", body=b"AAAA").status == 200
    assert host.node.hosts[1].guest_attributes == {"hostkeys/ssh-ed25519": "AAAA"}
    assert host.ask("instance/attributes/greeting", method="PUT", body=b"x").status == 405


def test_waiting_for_a_change_ends_with_the_change(host: Host) -> None:
    def change() -> None:
        with host.store.change():
            host.node.resource["metadata"] = {"greeting": "bye"}

    begun = time.monotonic()
    assert host.text("instance/attributes/greeting", wait_for_change="true", last_etag="0") == "hello", "missed it"
    assert host.text("instance/attributes/greeting", wait_for_change="true", timeout_sec="0") == "hello"
    assert time.monotonic() - begun < 20
    threading.Timer(0.1, change).start()
    assert host.text("instance/attributes/greeting", wait_for_change="true") == "bye"


def test_the_guest_agent_gathers_ssh_keys_of_all_sources_by_user() -> None:
    path = Path(__file__).resolve().parents[2] / "images" / "host" / "guest-agent.py"
    spec = importlib.util.spec_from_file_location("guest_agent", path)
    agent = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(agent)
    node, project = "\nme:ssh-rsa AAAA me\nyou:ssh-ed25519 BBBB you", "me:ssh-rsa CCCC me\n\n"
    mine, yours = ["ssh-rsa AAAA me", "ssh-rsa CCCC me"], ["ssh-ed25519 BBBB you"]
    assert agent.parse_keys([node, project]) == {"me": mine, "you": yours}
