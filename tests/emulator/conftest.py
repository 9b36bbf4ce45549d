"""The emulator's services without containers: the API over a state in memory, and Cloud Storage on a loopback port."""

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from launcher.emulator.api import calls
from launcher.emulator.api import nodes as tpu_api
from launcher.emulator.api.calls import Call
from launcher.emulator.api.catalogue import ApiError
from launcher.emulator.state import EmulatorState, Node, Operation
from tests.servers import BucketServer

Json = dict[str, Any]
ZONE = "us-central2-b"
EXTERNAL_IPS = {"networkConfig": {"enableExternalIps": True}}
BODY = {"acceleratorType": "v4-16", "runtimeVersion": "tpu-ubuntu2204-base", **EXTERNAL_IPS}


class Api:
    """Calls against one state, at a time that the test sets."""

    def __init__(self) -> None:
        self.state = EmulatorState("0badcafe", 1, "/nowhere", "/nowhere", 1.0, 0.5, subnet="10.200.0.0/22")
        self.now = 1_700_000_000.0

    def call(self, method: str, *path: str, verb: str = "", body: Json | None = None, **query: str) -> Json:
        """Makes a call below ZONE, or below the query's `zone`."""
        parent = ("projects", "p", "locations", query.pop("zone", ZONE))
        self.now += 0.001
        return calls.answer(self.state, Call(method, parent + path, verb, query, body or {}), self.now)

    def create(self, name: str = "pod", zone: str = ZONE, **changes: Any) -> Json:
        body = {key: value for key, value in {**BODY, **changes}.items() if value is not None}
        return self.call("POST", "nodes", body=body, nodeId=name, zone=zone)

    def ready(self, name: str = "pod", **changes: Any) -> Node:
        """Creates a node and ends its creation."""
        tpu_api.finish_operation(self.state, self.operation(self.create(name, **changes)), self.now)
        return self.state.nodes[f"projects/p/locations/{ZONE}/nodes/{name}"]

    def operation(self, value: Json) -> Operation:
        return self.state.operations[value["name"]]


def refusal(function: Any, *arguments: Any, **named: Any) -> tuple[int, str]:
    """(HTTP status, message) of the error that a call ends with."""
    with pytest.raises(ApiError) as caught:
        function(*arguments, **named)
    return caught.value.as_json()["error"]["code"], caught.value.message


@pytest.fixture
def api() -> Api:
    return Api()


def use_storage(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Makes clients of Cloud Storage ask this service, directly."""
    monkeypatch.setenv("STORAGE_EMULATOR_HOST", url)
    for name in [key for key in os.environ if key.lower().endswith("_proxy")]:
        monkeypatch.delenv(name)


@pytest.fixture
def storage(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[BucketServer]:
    served = BucketServer(tmp_path / "buckets")
    use_storage(served.url, monkeypatch)
    yield served
    served.close()


@pytest.fixture
def client(storage: BucketServer) -> Any:
    """Returns a client of the unmodified library."""
    from google.cloud import storage as library

    return library.Client(project="p")


@pytest.fixture
def bucket(client: Any) -> Any:
    return client.create_bucket("some-bucket")
