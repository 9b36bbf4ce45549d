"""Injected faults: what they answer, how often, and that they are consumed with what they spoil."""

import threading
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest

from launcher.emulator import faults
from launcher.emulator.api import catalogue
from launcher.emulator.api.catalogue import ApiError
from launcher.emulator.server import Server
from launcher.emulator.state import Fault, Store
from launcher.emulator.vm.engine_client import EngineError
from launcher.emulator.vm.hosts import Hosts
from tests.emulator.conftest import refusal


@pytest.mark.parametrize(
    ("wording", "code", "words"),
    [
        ("capacity", 8, 'There is no more capacity in the zone "us-central2-b"'),
        ("internal", 13, "an internal error has occurred"),
        ("resources", 8, "does not have enough resources available to fulfill the request"),
    ],
)
def test_a_stockout_spoils_as_many_creations_as_asked(api: Any, wording: str, code: int, words: str) -> None:
    api.state.faults.append(Fault("stockout", "tpu", left=2, wording=wording))
    failures = [api.operation(api.create(f"n{i}")).failure for i in range(3)]
    assert [failure and failure["code"] for failure in failures] == [code, code, None]
    assert words in failures[0]["message"]
    assert [len(node.hosts) for node in api.state.nodes.values()] == [0, 0, 2]
    assert not api.state.faults


@pytest.mark.parametrize(
    ("kind", "status", "words"),
    [
        ("quota", 429, "Quota limit 'TPUV4PerProjectPerZoneForTPUAPI' has been exceeded. Limit: 0 in"),
        ("permission", 403, "Permission denied"),
    ],
)
def test_quota_and_permission_are_refused_at_once(api: Any, kind: str, status: int, words: str) -> None:
    api.state.faults.append(Fault(kind, "tpu"))
    for _ in range(2):
        code, message = refusal(api.create)
        assert code == status
        assert words in message
    assert not api.state.nodes


def test_a_fault_is_not_consumed_by_a_creation_that_is_invalid_anyway(api: Any) -> None:
    api.state.faults.append(Fault("stockout", "tpu", left=1))
    with pytest.raises(ApiError):
        api.create(acceleratorType="v3-16")
    assert len(api.state.faults) == 1


def test_slowness_adds_up(api: Any) -> None:
    api.state.faults += [Fault("slow", "tpu", seconds=seconds) for seconds in (0.5, 1)]
    api.state.faults.append(Fault("slow", "storage", seconds=9))
    assert faults.delay(api.state, "tpu") == 1.5


def test_targets_that_do_not_exist_are_named_with_what_does(api: Any) -> None:
    api.ready()
    with pytest.raises(ValueError, match="there is no node 'x' on this emulator; nodes: pod"):
        faults.find_node(api.state, "x")
    with pytest.raises(ValueError, match="workers 0 to 1, no worker 2"):
        faults.find_host(api.state, "pod", 2)
    assert faults.find_host(api.state, "pod", 1).index == 1


def test_a_change_is_refused_while_another_operation_is_on_its_way(api: Any) -> None:
    api.ready()
    api.state.faults.append(Fault("busy", "tpu", left=1))
    with pytest.raises(ApiError, match="unable to queue the operation") as refused:
        api.call("DELETE", "nodes", "pod")
    assert refused.value.code == catalogue.ABORTED
    api.call("DELETE", "nodes", "pod")


def test_a_stuck_creation_has_no_end_in_sight(api: Any) -> None:
    api.state.faults.append(Fault("stuck", "tpu", left=1))
    assert api.operation(api.create()).ends_at > api.now + 1e6
    assert api.operation(api.create("other")).ends_at < api.now + 60


@pytest.mark.parametrize(("state", "starts"), [("REPAIRING", True), ("PREEMPTED", False), ("DELETING", False)])
def test_a_host_whose_fault_ends_starts_again_unless_its_node_is_lost(api: Any, state: str, starts: bool) -> None:
    node, engine = api.ready(), Mock()
    node.resource["state"], node.hosts[0].killed, node.hosts[0].restore_at = state, True, 1.0
    Hosts(Store(api.state, None), engine, "", "", Path(), Mock()).run_timers()
    assert (engine.call.called, node.hosts[0].killed) == (starts, False)


@pytest.mark.parametrize("kind", ["repair", "maintenance"])
def test_an_outage_shows_and_leaves_no_trace(api: Any, kind: str) -> None:
    node = api.ready()
    before = dict(node.resource)
    faults.begin_outage(node, kind, 1.0)
    assert node.resource != before
    faults.end_outage(node)
    assert node.resource == before


def test_a_fault_acts_on_all_hosts_of_a_large_slice_at_once(api: Any) -> None:
    together = threading.Barrier(len(api.ready(acceleratorType="v4-256").hosts))
    hosts = Mock(kill=lambda host: together.wait(timeout=5))
    Server.inject(Mock(store=Store(api.state, None), hosts=hosts), {"fault": "preempt", "node": "pod"})


def test_a_slice_that_the_stock_loses_loses_all_its_hosts_although_the_engine_refuses_one(api: Any) -> None:
    api.ready(schedulingConfig={"spot": True})
    api.state.stock, hosts = {"stock": []}, Mock()
    hosts.kill.side_effect = [EngineError(500, ""), None]
    with pytest.raises(EngineError):
        Server._advance_queue(Mock(store=Store(api.state, None), hosts=hosts))
    assert hosts.kill.call_count == 2


def test_a_registry_that_is_down_for_one_host_serves_the_others(api: Any) -> None:
    api.state.faults.append(Fault("registry", "tpu", host="a"))
    assert "503" in (faults.engine_trouble(api.state, "a", registry=True) or "")
    assert faults.engine_trouble(api.state, "a", registry=False) is None
    assert faults.engine_trouble(api.state, "b", registry=True) is None
    api.state.faults.append(Fault("disk-full", "tpu", host="b"))
    assert "no space left" in (faults.engine_trouble(api.state, "b", registry=False) or "")
