"""Nodes and operations of the Cloud TPU API v2, and the Compute call that gcloud makes: pure functions of the state.

`answer(state, call, now)` changes the state and returns Google's answer. Nothing here starts a container: a change
enters a pending operation into the state, operations.py does its work on the hosts, and `finish_operation` ends it.
queued_resources.py has the API's other half.

Reference: gcloud 528, generated_clients/apis/tpu/v2/tpu_v2_{client,messages}.py.
"""

import hashlib
import ipaddress
import itertools
from dataclasses import dataclass, field
from typing import Any

from launcher.emulator import faults
from launcher.emulator.api import catalogue, stock
from launcher.emulator.api.catalogue import ApiError, bad_request
from launcher.emulator.http_server import timestamp
from launcher.emulator.state import EmulatorState, Host, Node, Operation
from training.accelerators import ACCELERATORS, Accelerator

PROJECT_NUMBER = "100000000001"
_NEVER = 1e7  # seconds
_FIRST_HOST = 10  # of the subnet: the addresses below belong to the network
_KEPT_OPERATIONS = 200  # how many that have ended are kept


@dataclass(frozen=True)
class Call:
    """An API call, without its transport."""

    method: str
    path: tuple[str, ...]  # decoded parts after the version: ("projects", "p", ...), the last without its ":verb"
    verb: str = ""  # "stop" of nodes/n:stop
    query: dict[str, str] = field(default_factory=dict)
    body: dict[str, Any] = field(default_factory=dict)


def parse(method: str, segments: list[str], query: dict[str, str], body: dict[str, Any]) -> Call:
    """Returns the API call of an HTTP request; `segments` are the decoded parts of its path after the version."""
    head, separator, verb = segments[-1].partition(":")
    return Call(method, (*segments[:-1], head), verb if separator else "", query, body)


def answer(state: EmulatorState, call: Call, now: float) -> dict[str, Any]:
    """Carries out a call by changing `state` alone: work on hosts is entered as a pending operation. Returns the
    response's JSON. Raises ApiError, also after a fault was used up."""
    match call.path:
        case ("projects", project, "locations"):
            names = [{"name": f"projects/{project}/locations/{zone}", "locationId": zone} for zone in catalogue.ZONES]
            return {"locations": names}
        case ("projects", project, "locations", zone):
            catalogue.check_zone(zone)
            return {"name": f"projects/{project}/locations/{zone}", "locationId": zone}
        case ("projects", project, "locations", zone, *rest):
            if zone != "-":
                catalogue.check_zone(zone)
            return _in_zone(state, call, f"projects/{project}/locations/{zone}", rest, now)
    raise no_method(call)


def _in_zone(state: EmulatorState, call: Call, parent: str, rest: list[str], now: float) -> dict[str, Any]:
    """Answers for nodes, operations, accelerator types and runtime versions of a zone; "-" is only for lists of nodes,
    of all zones, and of runtime versions. Raises ApiError."""
    name = "/".join([parent, *rest])
    match (call.method, rest, call.verb):
        case ("GET", ["nodes"], ""):
            prefix = parent.removesuffix("-") if parent.endswith("/-") else f"{parent}/"
            nodes = [node_json(node) for full_name, node in sorted(state.nodes.items()) if full_name.startswith(prefix)]
            return {"nodes": nodes}
        case ("POST", ["nodes"], ""):
            return operation_json(_create(state, call, parent, now))
        case (_, ["nodes", _], _):
            return _on_node(state, call, catalogue.find(state.nodes, name), now)
        case ("GET", ["operations", _], ""):
            return operation_json(catalogue.find(state.operations, name))
        case ("GET", ["acceleratorTypes" as kind], ""):
            offered = catalogue.accelerators_in(parent.rsplit("/", 1)[1])
            return {kind: [_accelerator_json(name, accelerator_type) for accelerator_type in offered]}
        case ("GET", ["runtimeVersions" as kind], ""):
            return {kind: [{"name": f"{name}/{each}", "version": each} for each in catalogue.runtime_versions()]}
    raise no_method(call)


def _on_node(state: EmulatorState, call: Call, node: Node, now: float) -> dict[str, Any]:
    """Carries out a call on one node. Raises ApiError."""
    match (call.method, call.verb):
        case ("GET", ""):
            return node_json(node)
        case ("DELETE", ""):
            return operation_json(_delete(state, node, now))
        case ("PATCH", ""):
            return operation_json(_update(state, node, call, now))
        case ("POST", "getGuestAttributes"):
            return _guest_attributes(node, call.body)
        case ("POST", "stop" | "start"):
            return operation_json(_stop_or_start(state, node, call.verb, now))
    raise no_method(call)


def compute_project(project: str) -> dict[str, Any]:
    """Returns the JSON of GET compute/v1/projects/P, without metadata: gcloud looks there for ssh keys and OS Login."""
    return {
        "kind": "compute#project",
        "id": PROJECT_NUMBER,
        "name": project,
        "commonInstanceMetadata": {"kind": "compute#metadata", "fingerprint": "AAAAAAAAAAA=", "items": []},
        "defaultServiceAccount": service_account(),
    }


def service_account() -> str:
    """Returns the e-mail address of the project's default service account."""
    return f"{PROJECT_NUMBER}-compute@developer.gserviceaccount.com"


# -- calls


def _create(state: EmulatorState, call: Call, parent: str, now: float) -> Operation:
    """Enters a node and its pending creation; a stock-out (injected, or no stock left) makes it fail, without hosts; a
    stuck fault keeps it from ending. Both faults are used up. Raises ApiError for a bad body or name, a taken name, a
    fault that refuses it, or a full network."""
    node_id = call.query.get("nodeId", "")
    catalogue.check_node_name(node_id)
    name = f"{parent}/nodes/{node_id}"
    zone, project = parent.split("/")[3], parent.split("/")[1]
    requested = catalogue.check_node(call.body, zone)
    if name in state.nodes:
        raise ApiError(catalogue.ALREADY_EXISTS, f"Resource '{name}' already exists")
    faults.refuse_create(state, requested, zone)
    faults.refuse_change(state)
    hosts = _new_hosts(state, name, requested.hosts, now)
    operation = start_operation(state, "create", name, now, state.create_seconds)
    kind = (zone, requested.name, stock.capacity_of(state, name, call.body.get("schedulingConfig", {})))
    operation.failure = faults.stockout(state, zone)
    if operation.failure is None and not stock.is_left(state, *kind, now):
        operation.failure = faults.no_capacity(zone)
    if faults.take(state, "stuck"):
        operation.ends_at = now + _NEVER
    resource = _new_resource(call.body, name, requested, zone, project, now)
    state.nodes[name] = Node(name, resource, [] if operation.failure else hosts)  # a stock-out makes no VM
    return operation


def _new_resource(
    body: dict[str, Any], name: str, requested: Accelerator, zone: str, project: str, now: float
) -> dict[str, Any]:
    """Returns the node of a creation's `body` as the API shows it: CREATING, with defaults and full names filled in."""
    network = {"network": "default", **body.get("networkConfig", {})}
    region = zone.rsplit("-", 1)[0]
    network["network"] = _qualified(network["network"], f"projects/{project}/global/networks/")
    network["subnetwork"] = _qualified(
        network.get("subnetwork") or "default", f"projects/{project}/regions/{region}/subnetworks/"
    )
    return {
        **body,
        "name": name,
        "id": str(_number(name, now)),
        "apiVersion": "V2",
        "acceleratorType": requested.name,
        "acceleratorConfig": {"type": catalogue.api_type(requested), "topology": requested.topology_name},
        "createTime": timestamp(now),
        "networkConfig": network,
        "schedulingConfig": {key: value for key, value in body.get("schedulingConfig", {}).items() if value},
        "serviceAccount": {
            "email": service_account(),
            "scope": ["https://www.googleapis.com/auth/cloud-platform"],
            **body.get("serviceAccount", {}),
        },
        "state": "CREATING",
    }


def _new_hosts(state: EmulatorState, name: str, count: int, now: float) -> list[Host]:
    """Returns records of a new node's hosts, with the lowest free addresses. Raises ApiError if there are too few."""
    taken = {host.address for node in state.nodes.values() for host in node.hosts}
    addresses = itertools.islice(ipaddress.ip_network(state.subnet).hosts(), _FIRST_HOST - 1, None)
    free = list(itertools.islice((str(address) for address in addresses if str(address) not in taken), count))
    if len(free) < count:
        raise ApiError(
            catalogue.RESOURCE_EXHAUSTED,
            f"the emulated network {state.subnet} has only {len(free)} free addresses, and {name} needs {count}",
        )
    digest = hashlib.sha256(f"{state.id} {name} {now}".encode()).hexdigest()[:8]
    return [Host(i, free[i], f"t1v-n-{digest}-w-{i}", _number(f"{name} {i}", now)) for i in range(count)]


def _delete(state: EmulatorState, node: Node, now: float) -> Operation:
    """Cancels the node's pending operations and enters its deletion. Raises ApiError if it is being deleted already, or
    for a busy fault."""
    if node.state == "DELETING":
        raise ApiError(catalogue.ABORTED, "unable to queue the operation")
    faults.refuse_change(state)
    for other in state.operations.values():
        if other.target == node.name and not other.done:
            other.cancelled = True
    return start_delete(state, node, now)


def start_delete(state: EmulatorState, node: Node, now: float) -> Operation:
    """Marks a node in any state as DELETING and enters the pending deletion."""
    node.resource["state"] = "DELETING"
    return start_operation(state, "delete", node.name, now, state.update_seconds)


def _update(state: EmulatorState, node: Node, call: Call, now: float) -> Operation:
    """Enters a pending update that replaces all metadata (gcloud adds its ssh key so). Raises ApiError for other
    fields, bad metadata or a busy fault, and unless the node is READY or STOPPED and no operation on it is pending."""
    mask = call.query.get("updateMask", "")
    if mask != "metadata":
        raise bad_request(f'update mask "{mask}" is not emulated: only metadata is')
    if node.state not in ("READY", "STOPPED"):
        raise bad_request(f"update is not supported while in state {node.state}")
    if any(operation.target == node.name and not operation.done for operation in state.operations.values()):
        raise ApiError(catalogue.ABORTED, "unable to queue the operation")
    faults.refuse_change(state)
    metadata = call.body.get("metadata", {})
    catalogue.check_metadata(metadata)
    operation = start_operation(state, "update", node.name, now, state.update_seconds)
    operation.change = {"metadata": metadata}
    return operation


def _stop_or_start(state: EmulatorState, node: Node, verb: str, now: float) -> Operation:
    """Enters a stop of a READY node of one host, or a start of a STOPPED one. Raises ApiError for nodes of several
    hosts, in other states, and for a busy fault."""
    before, during = ("READY", "STOPPING") if verb == "stop" else ("STOPPED", "STARTING")
    if len(node.hosts) > 1:
        raise bad_request(
            f"{verb} is not supported for TPU pods: {node.short_name} has {len(node.hosts)} hosts; "
            "delete it and create it again"
        )
    if node.state != before:
        raise bad_request(f"{verb} is not supported while in state {node.state}", catalogue.FAILED_PRECONDITION)
    faults.refuse_change(state)
    node.resource["state"] = during
    return start_operation(state, verb, node.name, now, state.update_seconds)


def _guest_attributes(node: Node, body: dict[str, Any]) -> dict[str, Any]:
    """Returns the attributes at and below queryPath ("": all) of each worker in workerIds (none, or [""]: all workers);
    a path without any gives an empty list. Raises ApiError for other ids."""
    workers = [worker for worker in body.get("workerIds", []) if worker != ""]
    if any(not str(worker).isdigit() or int(worker) >= len(node.hosts) for worker in workers):
        raise bad_request(f"worker ids {workers} are not of this node, which has {len(node.hosts)} workers")
    hosts = [node.hosts[int(worker)] for worker in workers] or node.hosts
    query = str(body.get("queryPath", "")).strip("/")
    entries = []
    for host in hosts:
        items = []
        for path, value in sorted(host.guest_attributes.items()):
            if path == query or path.startswith(f"{query}/" if query else ""):
                namespace, _, key = path.partition("/")
                items.append({"namespace": namespace, "key": key, "value": value})
        entries.append({"queryPath": query, "queryValue": {"items": items}})
    return {"guestAttributes": entries}


# -- resources as the API shows them


def node_json(node: Node) -> dict[str, Any]:
    """Returns the node as GET shows it. Its addresses appear when it has been created."""
    if node.state == "CREATING" or not node.hosts:
        return node.resource
    external = bool(node.resource["networkConfig"].get("enableExternalIps"))
    endpoints = [
        {"ipAddress": host.address, "port": 8470, "accessConfig": {"externalIp": host.address} if external else {}}
        for host in node.hosts
    ]
    return {**node.resource, "networkEndpoints": endpoints}


def operation_json(operation: Operation) -> dict[str, Any]:
    """Returns the operation as GET shows it."""
    metadata = {
        "@type": "type.googleapis.com/google.cloud.tpu.v2.OperationMetadata",
        "createTime": timestamp(operation.created),
        "target": operation.target,
        "verb": operation.verb,
        "cancelRequested": operation.cancelled,
        "apiVersion": "v2",
    }
    if operation.ended is not None:
        metadata["endTime"] = timestamp(operation.ended)
    value: dict[str, Any] = {"name": operation.name, "metadata": metadata, "done": operation.done}
    if operation.error is not None:
        value["error"] = operation.error
    elif operation.response is not None:
        value["response"] = operation.response
    return value


def _accelerator_json(parent: str, name: str) -> dict[str, Any]:
    """Returns the accelerator type `name` as the API lists it. `parent`: the full name of the list."""
    accelerator = ACCELERATORS[name]
    config = {"type": catalogue.api_type(accelerator), "topology": accelerator.topology_name}
    return {"name": f"{parent}/{name}", "type": name, "acceleratorConfigs": [config]}


def start_operation(state: EmulatorState, verb: str, target: str, now: float, seconds: float) -> Operation:
    """Enters a pending operation that ends after `seconds` at the earliest. `verb`: create, update, delete, stop or
    start of the node `target` (full name), create-queued or delete-queued of a queued resource."""
    parent = target.rsplit("/", 2)[0]
    number = _number(f"{verb} {target} {len(state.operations)}", now)
    name = f"{parent}/operations/operation-{int(now * 1000)}-{number:013x}"
    state.operations[name] = Operation(name, verb, target, now, now + seconds)
    return state.operations[name]


def finish_operation(
    state: EmulatorState, operation: Operation, now: float, error: dict[str, Any] | None = None
) -> None:
    """Ends a node's operation once its work on the hosts is done, and changes the node as the operation promised. After
    an `error` of that work the node is UNKNOWN, unless it was an update. A deletion meanwhile, or a stock-out, is
    reported instead; a stock-out removes the node. Only the newest _KEPT_OPERATIONS ended operations stay."""
    node = state.nodes.get(operation.target)
    response: dict[str, Any] | None = None
    if node is None or (node.state == "DELETING" and operation.verb != "delete"):
        # A deletion waits for no other operation.
        what = "creation" if operation.verb == "create" else operation.verb
        error = {"code": catalogue.CANCELLED, "message": f"The {what} of {operation.target} was cancelled."}
    elif operation.failure is not None:
        error = operation.failure
        del state.nodes[node.name]
    elif error is not None:
        if operation.verb != "update":
            node.resource["state"] = "UNKNOWN"  # the user can only delete it
    elif operation.verb == "delete":
        del state.nodes[node.name]
        response = {"@type": "type.googleapis.com/google.protobuf.Empty"}
    else:
        _apply(operation, node)
        response = {"@type": "type.googleapis.com/google.cloud.tpu.v2.Node", **node_json(node)}
    operation.done, operation.ended, operation.error, operation.response = True, now, error, response
    ended = [other for other in state.operations.values() if other.done]
    for other in ended[:-_KEPT_OPERATIONS]:
        del state.operations[other.name]


def _apply(operation: Operation, node: Node) -> None:
    """Gives the node an update's fields, STOPPED (without health and guest attributes), or READY and HEALTHY."""
    match operation.verb:
        case "update":
            node.resource |= operation.change
        case "stop":
            node.resource["state"] = "STOPPED"
            node.resource.pop("health", None)
            for host in node.hosts:
                host.guest_attributes.clear()
        case _:
            node.resource |= {"state": "READY", "health": "HEALTHY"}


def no_method(call: Call) -> ApiError:
    """Returns the error for a call that the API does not have."""
    return ApiError(catalogue.NOT_FOUND, f"The requested URL was not found: {call.method} /v2/{'/'.join(call.path)}")


def _qualified(name: str, prefix: str) -> str:
    """Puts `prefix` before a name, unless it is a path already."""
    return name if "/" in name else prefix + name


def _number(text: str, now: float) -> int:
    """Returns a number like Google's ids: 19 digits at most, the same for the same text and time."""
    return int.from_bytes(hashlib.sha256(f"{text} {now}".encode()).digest()[:7], "big") * 100
