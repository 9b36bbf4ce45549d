"""Queued resources of the Cloud TPU API v2: requests that wait for capacity, become a node, and outlive it.

The server calls `advance` periodically: it grants and expires requests and notices preempted nodes. nodes.py creates
and deletes the nodes. Requests for several nodes (multi-slice) are refused.

    ACCEPTED -> PROVISIONING -> ACTIVE
    ACCEPTED -> WAITING_FOR_RESOURCES -> PROVISIONING    each try uses up one stock-out that is due
    WAITING_FOR_RESOURCES -> FAILED                      after valid-until
    PROVISIONING -> SUSPENDING -> SUSPENDED              its node was preempted
    ACTIVE -> SUSPENDING -> SUSPENDED                    its node was preempted or deleted
    any -> DELETING -> gone                              deleted by a call

What can fail half-way: nothing, because each step is one change of the state, which a killed server repeats.
"""

import re
from typing import Any

from launcher.emulator import faults
from launcher.emulator.api import catalogue
from launcher.emulator.api import nodes as tpu_api
from launcher.emulator.api.catalogue import ApiError, bad_request
from launcher.emulator.http_server import timestamp
from launcher.emulator.state import EmulatorState, Operation, QueuedResource
from training.accelerators import Accelerator

_LONGEST_RUN = 7 * 24 * 3600.0  # of flex-start
_TRY_SECONDS = 1.0  # between tries to find capacity
# Requests in these states have no node and may be deleted without force.
_NO_NODE = frozenset(("ACCEPTED", "WAITING_FOR_RESOURCES", "FAILED", "SUSPENDED"))


def to_json(queued: QueuedResource) -> dict[str, Any]:
    """Returns the queued resource as GET shows it."""
    shown: dict[str, Any] = {"state": queued.state, "stateInitiator": queued.initiator}
    # All states but WAITING_FOR_RESOURCES have a data field; only a failure's holds anything.
    if queued.state == "FAILED":
        shown["failedData"] = {"error": queued.error or {}}
    elif queued.state != "WAITING_FOR_RESOURCES":
        shown[f"{queued.state.lower()}Data"] = {}
    return {**queued.resource, "state": shown}


def advance(state: EmulatorState, now: float) -> None:
    """Moves every request one state on, if it can at `now`: creates or deletes its node, suspends it when its node was
    preempted or deleted, and removes it, once deleted, after its node."""
    for queued in list(state.queued.values()):
        node = state.nodes.get(queued.node)
        if queued.state in ("SUSPENDING", "DELETING") and node and node.resource.get("queuedResource") != queued.name:
            node = None  # another's, of the same name
        match queued.state:
            case "ACCEPTED" | "WAITING_FOR_RESOURCES":
                _try(state, queued, now)
            case "PROVISIONING" if node is None:
                queued.state = "WAITING_FOR_RESOURCES"  # the creation of its node failed
            case "PROVISIONING" if node is not None and node.state == "READY":
                queued.state = "ACTIVE"
            case "PROVISIONING" | "ACTIVE" if node is not None and node.state in ("PREEMPTED", "TERMINATED"):
                queued.initiator, queued.state = "SERVICE", "SUSPENDING"
            case "ACTIVE" if node is None or node.state == "DELETING":
                queued.initiator, queued.state = "USER", "SUSPENDING"
            case "SUSPENDING" | "DELETING" if node is not None and node.state != "DELETING":
                tpu_api.start_delete(state, node, now)
            case "SUSPENDING" if node is None:
                queued.state = "SUSPENDED"
            case "DELETING" if node is None:
                del state.queued[queued.name]
                for operation in state.operations.values():
                    if operation.target == queued.name and not operation.done:
                        _end(operation, {"@type": "type.googleapis.com/google.protobuf.Empty"}, now)


def _try(state: EmulatorState, queued: QueuedResource, now: float) -> None:
    """Tries to create the node, once in _TRY_SECONDS. Without capacity (an injected stock-out is used up) the request
    waits; it fails after its valid-until time, on an internal error, and if the node can't be entered."""
    if queued.until is not None and now > queued.until:
        text = f"Resource {queued.name} could not be provisioned before its valid-until time"
        message = f"{text} {catalogue.event_id(text)}"
        queued.state, queued.error = "FAILED", {"code": catalogue.RESOURCE_EXHAUSTED, "message": message}
        return
    if now < queued.next_try:
        return
    queued.next_try = now + _TRY_SECONDS
    parent, node_id = queued.node.split("/nodes/")
    body = dict(queued.resource["tpu"]["nodeSpec"][0]["node"])
    body["schedulingConfig"] = {"spot": "spot" in queued.resource, "reserved": "reservationName" in queued.resource}
    accelerator_type = str(body.get("acceleratorType"))
    shortage = tpu_api.find_shortage(state, queued.node, accelerator_type, body["schedulingConfig"], now)
    if shortage is not None:
        gives_up = shortage["code"] == catalogue.INTERNAL  # after Google has begun to make the hosts
        queued.state, queued.error = ("FAILED", shortage) if gives_up else ("WAITING_FOR_RESOURCES", None)
        return
    try:
        tpu_api.create(state, parent, node_id, body, now, granted=True)
    except ApiError as error:  # the name was taken meanwhile, or the network is full
        queued.state, queued.error = "FAILED", {"code": error.code, "message": error.message}
        return
    state.nodes[queued.node].resource["queuedResource"] = queued.name
    queued.state = "PROVISIONING"


def create(state: EmulatorState, parent: str, queued_id: str, body: dict[str, Any], now: float) -> Operation:
    """Enters an ACCEPTED request; its operation is done at once. Raises ApiError for a bad body or name, a taken one
    (the node's too), or a permission, quota or busy fault."""
    zone = parent.split("/")[3]
    catalogue.check_node_name(queued_id)
    name = f"{parent}/queuedResources/{queued_id}"
    if name in state.queued:
        raise ApiError(catalogue.ALREADY_EXISTS, f"Resource '{name}' already exists")
    specs = body.get("tpu", {}).get("nodeSpec", [])
    if len(specs) != 1 or "nodeId" not in specs[0]:
        raise ApiError(catalogue.UNIMPLEMENTED, "the emulator has queued resources for one node only: give --node-id")
    spec = specs[0]
    catalogue.check_node_name(spec["nodeId"])
    if spec.get("parent") != parent:
        raise bad_request(f"the parent of the node, {spec.get('parent')!r}, is not that of the request, {parent!r}")
    reservation = body.get("reservationName", "")
    if reservation and f"/locations/{zone}/" not in reservation:
        raise bad_request(f'the reservation "{reservation}" is not in {zone}')
    if "spot" in body and "guaranteed" in body:
        raise bad_request("only one of spot and guaranteed may be set")
    requested = catalogue.check_node(spec.get("node", {}), zone)
    _check_model(body, requested)
    node = f"{parent}/nodes/{spec['nodeId']}"
    if node in state.nodes:
        raise ApiError(catalogue.ALREADY_EXISTS, f"Resource '{node}' already exists")
    faults.refuse_create(state, requested, zone)
    faults.refuse_change(state)
    resource = {**body, "name": name, "createTime": timestamp(now)}
    until = _until(body.get("queueingPolicy", {}), now)
    queued = state.queued[name] = QueuedResource(name, resource, node, "ACCEPTED", until)
    operation = tpu_api.start_operation(state, "create-queued", name, now, 0)
    _end(operation, {"@type": "type.googleapis.com/google.cloud.tpu.v2.QueuedResource", **to_json(queued)}, now)
    return operation


def _check_model(body: dict[str, Any], requested: Accelerator) -> None:
    """Raises ApiError for flex-start on others than v5e and v6e or without a maxRunDuration of at most 7 days, and for
    a reservation-bound request that names no reservation."""
    model, seconds = body.get("provisioningModel"), str(body.get("runDuration", {}).get("maxRunDuration", "0s"))
    if model == "FLEX_START" and requested.generation.name not in ("v5e", "v6e"):
        raise bad_request(f"flex-start is not supported for {requested.name}")
    if model == "FLEX_START" and not 0 < float(seconds.removesuffix("s")) <= _LONGEST_RUN:
        raise bad_request("flex-start needs a maxRunDuration of at most 7 days")
    if model == "RESERVATION_BOUND" and not body.get("reservationName"):
        raise bad_request("a reservation-bound request needs the name of its reservation")


def _until(policy: dict[str, Any], now: float) -> float | None:
    """Returns when a request with this queueingPolicy expires, in Unix seconds; None: never. Raises ApiError for a
    policy other than validUntilDuration."""
    unknown = sorted(set(policy) - {"validUntilDuration"})
    if unknown:
        text = f"the emulator knows only validUntilDuration of a queueing policy, not {unknown[0]}"
        raise ApiError(catalogue.UNIMPLEMENTED, text)
    duration = policy.get("validUntilDuration")
    if duration is None:
        return None
    match = re.fullmatch(r"(\d+(\.\d+)?)s", str(duration))
    if not match:
        raise bad_request(f"validUntilDuration {duration!r} is not a duration")
    return now + float(match.group(1))


def delete(state: EmulatorState, queued: QueuedResource, force: bool, now: float) -> Operation:
    """Marks a request as DELETING; `advance` removes its node and then the request. Raises ApiError if it is DELETING
    already, for a busy fault and, without `force`, while it may have a node."""
    if queued.state == "DELETING":
        raise ApiError(catalogue.ABORTED, "unable to queue the operation")
    if not force and queued.state not in _NO_NODE:
        text = f"queued resource {queued.name} is {queued.state}: delete its node first, or delete it with force"
        raise bad_request(text, catalogue.FAILED_PRECONDITION)
    faults.refuse_change(state)
    queued.state, queued.initiator = "DELETING", "USER"
    return tpu_api.start_operation(state, "delete-queued", queued.name, now, 0)


def _end(operation: Operation, response: dict[str, Any], now: float) -> None:
    """Marks an operation as done, with its response."""
    operation.done, operation.ended, operation.response = True, now, response
