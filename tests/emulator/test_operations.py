"""Long-running operations against containers that boot when the test says so: each path from CREATING, and a crash."""

import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest

from launcher.emulator import operations
from launcher.emulator.operations import OperationRunner
from launcher.emulator.state import Host, Node, Store, from_json, to_json
from launcher.emulator.vm import hosts
from launcher.emulator.vm.engine_client import EngineError


class Hosts:
    """Hosts without containers: a host boots when the gate is open, and publishes its key."""

    def __init__(self, store: Store) -> None:
        self.store = store
        self.gate = threading.Event()
        self.gate.set()
        self.booting = threading.Event()  # a host waits at the gate, or has passed it
        self.hosts: set[str] = set()
        self.broken = False

    def ensure(self, node: Node, host: Host) -> None:
        self.booting.set()
        self.gate.wait(60)
        if self.broken:
            raise OSError("the engine is gone")
        self.hosts.add(host.hostname)
        with self.store.change():
            host.guest_attributes["hostkeys/ssh-ed25519"] = "AAAA"

    def remove(self, host: Host) -> None:
        self.hosts.discard(host.hostname)

    power_off = remove


class Running:
    """An API, its store, and a lifecycle that works on it, quickly."""

    def __init__(self, api: Any) -> None:
        self.api = api
        api.state.create_seconds, api.state.update_seconds = 0.02, 0.01
        self.gates: list[threading.Event] = []
        self.serve(Store(api.state, None))

    def serve(self, store: Store) -> None:
        self.store = store
        self.containers = Hosts(store)
        self.gates.append(self.containers.gate)
        self.operations = OperationRunner(store, self.containers)  # type: ignore[arg-type]
        store.after_change = self.operations.wake

    def call(self, function: Any, *arguments: Any, **named: Any) -> str:
        self.api.now = time.time()
        with self.store.change():
            return str(function(*arguments, **named)["name"])

    def ended(self, name: str) -> dict[str, Any]:
        done = self.store.wait(lambda state: name in state.operations and state.operations[name].done, 10)
        assert done, f"{name} did not end"
        operation = self.store._state.operations[name]
        return operation.error or operation.response or {}

    def node(self, name: str = "pod") -> dict[str, Any]:
        return self.api.call("GET", "nodes", name)


@pytest.fixture
def running(api: Any) -> Iterator[Running]:
    served = Running(api)
    yield served
    for gate in served.gates:
        gate.set()


def test_a_node_deleted_while_it_is_created_leaves_nothing(running: Running) -> None:
    running.containers.gate.clear()
    creation = running.call(running.api.create)
    deletion = running.call(running.api.call, "DELETE", "nodes", "pod")
    running.containers.gate.set()
    assert running.ended(creation)["code"] == 1
    assert running.ended(deletion)["@type"].endswith("Empty")
    assert not running.containers.hosts
    assert not running.api.state.nodes


def test_a_pending_creation_goes_on_in_the_next_server(running: Running) -> None:
    running.containers.gate.clear()
    creation = running.call(running.api.create)
    running.api.state = from_json(to_json(running.api.state))
    running.serve(Store(running.api.state, None))
    running.operations.wake()
    response = running.ended(creation)
    assert (response["state"], response["health"], len(response["networkEndpoints"])) == ("READY", "HEALTHY", 2)


def test_a_pending_deletion_goes_on_in_the_next_server(running: Running) -> None:
    running.ended(running.call(running.api.create))
    running.store.after_change = lambda: None  # this server dies before it does anything
    deletion = running.call(running.api.call, "DELETE", "nodes", "pod")
    running.api.state = from_json(to_json(running.api.state))
    running.serve(Store(running.api.state, None))
    running.operations.wake()
    running.ended(deletion)
    assert not running.api.state.nodes


def test_a_single_host_stops_and_starts(running: Running) -> None:
    running.ended(running.call(running.api.create, acceleratorType="v4-8"))
    assert running.ended(running.call(running.api.call, "POST", "nodes", "pod", verb="stop"))["state"] == "STOPPED"
    assert not running.containers.hosts
    assert running.ended(running.call(running.api.call, "POST", "nodes", "pod", verb="start"))["state"] == "READY"
    assert len(running.containers.hosts) == 1


def test_a_node_deleted_while_it_starts_leaves_nothing(running: Running) -> None:
    running.ended(running.call(running.api.create, acceleratorType="v4-8"))
    running.ended(running.call(running.api.call, "POST", "nodes", "pod", verb="stop"))
    running.containers.gate.clear()
    running.containers.booting.clear()
    start = running.call(running.api.call, "POST", "nodes", "pod", verb="start")
    assert running.containers.booting.wait(10)
    deletion = running.call(running.api.call, "DELETE", "nodes", "pod")
    too_early = running.store.wait(lambda state: state.operations[deletion].done, 0.2)
    assert not too_early, "the start may still make a host"
    running.containers.gate.set()
    assert running.ended(start)["code"] == 1
    running.ended(deletion)
    assert not running.containers.hosts
    assert not running.api.state.nodes


def test_a_stop_that_ends_during_a_deletion_does_not_undo_it(running: Running) -> None:
    running.ended(running.call(running.api.create, acceleratorType="v4-8"))
    stop = running.call(running.api.call, "POST", "nodes", "pod", verb="stop")
    running.api.state.update_seconds = 60.0
    deletion = running.call(running.api.call, "DELETE", "nodes", "pod")
    assert running.ended(stop)["code"] == 1
    assert running.node()["state"] == "DELETING"
    with running.store.change() as state:  # end it now
        state.operations[deletion].cancelled = True


def test_a_start_whose_host_does_not_boot_ends_with_an_error(running: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    running.ended(running.call(running.api.create, acceleratorType="v4-8"))
    running.ended(running.call(running.api.call, "POST", "nodes", "pod", verb="stop"))
    monkeypatch.setattr(operations, "BOOT_TIMEOUT", 0.01)
    monkeypatch.setattr(running.containers, "ensure", lambda node, host: None)
    error = running.ended(running.call(running.api.call, "POST", "nodes", "pod", verb="start"))
    assert (error["code"], "did not boot within" in error["message"]) == (13, True)
    assert running.node()["state"] == "UNKNOWN"


def test_a_creation_that_the_engine_refuses_ends_with_an_error_and_can_be_deleted(running: Running) -> None:
    running.containers.broken = True
    error = running.ended(running.call(running.api.create))
    assert (error["code"], "the engine is gone" in error["message"]) == (13, True)
    assert running.node()["state"] == "UNKNOWN"
    running.ended(running.call(running.api.call, "DELETE", "nodes", "pod"))
    assert not running.api.state.nodes


def test_no_host_is_made_after_closing(running: Running) -> None:
    running.operations.close()
    creation = running.call(running.api.create)
    time.sleep(0.1)
    assert not running.containers.hosts
    with running.store.change() as state:  # else its thread waits for the hosts
        state.operations[creation].cancelled = True


def test_a_host_that_exists_and_is_paused_stays_so(api: Any, tmp_path: Path) -> None:
    """A fault may pause a host whose creation the next server continues."""
    node, exists_and_is_paused = api.ready(), EngineError(409, "")
    engine = Mock(call=Mock(side_effect=[*[None] * len(hosts.SHARED), *[exists_and_is_paused] * 2]))
    real = hosts.Hosts(Store(api.state, None), engine, "", "", tmp_path, lambda hostname: [])
    real.ensure(node, node.hosts[0])
    real.agent_sockets.pop(node.hosts[0].hostname).close()
    engine.call.assert_called_with("POST", f"/containers/{node.hosts[0].hostname}/start")
