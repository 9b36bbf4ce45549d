"""Queued resources: every state, and what may be done in it. Pure: a state in memory, a clock that the test sets."""

from typing import Any

import pytest

from launcher.emulator.api import queued_resources
from launcher.emulator.api.catalogue import ApiError
from launcher.emulator.state import Fault
from tests.emulator.conftest import BODY, ZONE, refusal

PARENT = f"projects/p/locations/{ZONE}"


class Queue:
    """Requests against one state."""

    def __init__(self, api: Any) -> None:
        self.api, self.state = api, api.state

    def call(self, method: str, *path: str, **more: Any) -> dict[str, Any]:
        return self.api.call(method, "queuedResources", *path, **more)

    def create(self, seconds: int = 60, **changes: Any) -> dict[str, Any]:
        spec = {"parent": PARENT, "nodeId": "n", "node": BODY}
        body = {"tpu": {"nodeSpec": [spec]}, "queueingPolicy": {"validUntilDuration": f"{seconds}s"}, **changes}
        return self.call("POST", body=body, queuedResourceId="q")

    def advance(self, seconds: float = 0.0) -> str:
        """Returns the state after so many seconds."""
        self.api.now += seconds
        queued_resources.advance(self.state, self.api.now)
        return str(self.shown()["state"]) if self.state.queued else "gone"

    def shown(self) -> dict[str, Any]:
        return dict(self.call("GET", "q")["state"])

    def finish_node(self, state: str | None) -> None:
        """As operations.py does, without containers: the node gets a state, or is gone."""
        if state is None:
            del self.state.nodes[f"{PARENT}/nodes/n"]
        else:
            self.state.nodes[f"{PARENT}/nodes/n"].resource["state"] = state

    def activate(self) -> None:
        self.create()
        assert self.advance() == "PROVISIONING"
        self.finish_node("READY")
        assert self.advance() == "ACTIVE"


@pytest.fixture
def queue(api: Any) -> Queue:
    return Queue(api)


def test_a_request_is_accepted_provisioned_and_active_and_its_node_names_it(queue: Queue) -> None:
    operation = queue.create(spot={})
    assert operation["done"]
    assert operation["response"]["state"] == {"state": "ACCEPTED", "stateInitiator": "USER", "acceptedData": {}}
    assert queue.advance() == "PROVISIONING"
    node = queue.state.nodes[f"{PARENT}/nodes/n"].resource
    assert node["queuedResource"] == f"{PARENT}/queuedResources/q"
    assert node["schedulingConfig"] == {"spot": True}
    queue.finish_node("READY")
    assert queue.advance() == "ACTIVE"
    assert [queued["name"] for queued in queue.call("GET")["queuedResources"]] == [f"{PARENT}/queuedResources/q"]


def test_code_13_fails_it_as_it_does_for_large_slices(queue: Queue) -> None:
    queue.state.faults.append(Fault("stockout", "tpu", left=1, wording="internal"))
    queue.create()
    assert queue.advance() == "FAILED"
    assert queue.shown()["failedData"]["error"] == {"code": 13, "message": "an internal error has occurred"}


@pytest.mark.parametrize(
    ("before", "node", "initiator"),
    [("READY", "PREEMPTED", "SERVICE"), ("CREATING", "PREEMPTED", "SERVICE"), ("READY", "DELETING", "USER")],
)
def test_a_lost_node_suspends_it_and_says_who_did_it(queue: Queue, before: str, node: str, initiator: str) -> None:
    queue.create()
    queue.advance()
    queue.finish_node(before)
    assert queue.advance() == ("ACTIVE" if before == "READY" else "PROVISIONING")
    queue.finish_node(node)
    assert queue.advance() == "SUSPENDING"
    queue.advance()
    assert queue.state.nodes[f"{PARENT}/nodes/n"].state == "DELETING"
    queue.finish_node(None)
    assert queue.advance() == "SUSPENDED"
    assert queue.shown()["stateInitiator"] == initiator


def test_deleting_one_that_has_a_node_needs_force_and_takes_the_node_along(queue: Queue) -> None:
    queue.activate()
    assert refusal(queue.call, "DELETE", "q")[0] == 400
    operation = queue.call("DELETE", "q", force="true")
    assert not operation["done"]
    assert refusal(queue.call, "DELETE", "q", force="true")[0] == 409
    assert queue.advance() == "DELETING"
    assert queue.state.nodes[f"{PARENT}/nodes/n"].state == "DELETING"
    queue.finish_node(None)
    assert queue.advance() == "gone"
    assert queue.state.operations[operation["name"]].done
    assert refusal(queue.call, "GET", "q")[0] == 404


def test_a_waiting_one_may_be_deleted_without_force(queue: Queue) -> None:
    queue.state.faults.append(Fault("stockout", "tpu"))
    queue.create()
    assert queue.advance() == "WAITING_FOR_RESOURCES"
    queue.state.faults.clear()
    queue.api.create("n")
    queue.call("DELETE", "q")
    assert queue.advance() == "gone"
    assert queue.state.nodes[f"{PARENT}/nodes/n"].state == "CREATING", "it is another's"


def test_what_google_refuses_is_refused(queue: Queue) -> None:
    queue.create()
    with pytest.raises(ApiError, match="already exists"):
        queue.create()
    queue.state.queued.clear()
    with pytest.raises(ApiError, match="is not in us-central2-b"):
        queue.create(reservationName="projects/p/locations/None/reservations/-")
    with pytest.raises(ApiError, match="one node only"):
        queue.create(tpu={"nodeSpec": [{"parent": PARENT, "multisliceParams": {"nodeCount": 2}, "node": BODY}]})
    with pytest.raises(ApiError, match="invalid AcceleratorType"):
        queue.create(tpu={"nodeSpec": [{"parent": PARENT, "nodeId": "n", "node": {**BODY, "acceleratorType": "v3-8"}}]})
    for fault, words in (("quota", "Quota limit"), ("busy", "unable to queue the operation")):
        queue.state.faults.append(Fault(fault, "tpu", left=1))
        with pytest.raises(ApiError, match=words):
            queue.create()
    assert queue.state.queued == {}
    queue.create()
    queue.state.faults.append(Fault("busy", "tpu", left=1))
    assert queue.advance() == "PROVISIONING", "a grant is no call"
