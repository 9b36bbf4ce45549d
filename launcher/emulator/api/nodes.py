"""Nodes and operations of the Cloud TPU API v2: pure functions of the state."""

import hashlib
import ipaddress
import itertools
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


def create(
    state: EmulatorState, parent: str, node_id: str, body: dict[str, Any], now: float, *, granted: bool = False
) -> Operation:
    """Enters a node below `parent` and its pending creation; a shortage (a stockout fault, or no stock left) makes it
    fail, without hosts; a stuck fault keeps it from ending. Uses up each fault that takes effect. Raises ApiError for a
    bad body or name, a taken name, a fault that refuses it (not a busy one, if it is `granted` to a queued resource),
    or a full network."""
    catalogue.check_node_name(node_id)
    name = f"{parent}/nodes/{node_id}"
    zone = parent.split("/")[3]
    requested = catalogue.check_node(body, zone)
    if name in state.nodes:
        raise ApiError(catalogue.ALREADY_EXISTS, f"Resource '{name}' already exists")
    faults.refuse_create(state, requested, zone)
    if not granted:
        faults.refuse_change(state)
    hosts = _new_hosts(state, name, requested.hosts, now)
    operation = start_operation(state, "create", name, now, state.create_seconds)
    operation.failure = find_shortage(state, name, requested.name, body.get("schedulingConfig", {}), now)
    if faults.take(state, "stuck"):
        operation.ends_at = now + _NEVER
    resource = _new_resource(body, name, requested, now)
    state.nodes[name] = Node(name, resource, [] if operation.failure else hosts)  # a stock-out makes no VM
    return operation


def find_shortage(
    state: EmulatorState, name: str, accelerator_type: str, scheduling: dict[str, Any], now: float
) -> dict[str, Any] | None:
    """Returns why Google would have no hosts for the node `name`, as an operation's error: an injected stock-out, which
    is used up, or no stock left. None: it has."""
    zone, capacity = name.split("/")[3], stock.capacity_of(state, name, scheduling)
    stockout = faults.take(state, "stockout")
    if stockout is None and stock.is_left(state, zone, accelerator_type, capacity, now):
        return None
    return faults.no_capacity(zone, stockout.wording if stockout else "")


def _new_resource(body: dict[str, Any], name: str, requested: Accelerator, now: float) -> dict[str, Any]:
    """Returns the node of a creation's `body` as the API shows it: CREATING, with defaults and its networks' full names
    filled in. `name`: projects/.../nodes/...; `now`: Unix time."""
    _, project, _, zone, *_ = name.split("/")
    network = dict(body.get("networkConfig", {}))
    region = f"regions/{zone.rsplit('-', 1)[0]}"
    for kind, folder in (("network", "global/networks"), ("subnetwork", f"{region}/subnetworks")):
        name_or_path = network.get(kind) or "default"
        network[kind] = name_or_path if "/" in name_or_path else f"projects/{project}/{folder}/{name_or_path}"
    return {
        **body,
        "name": name,
        "id": str(_number(name, now)),
        "apiVersion": "V2",
        "acceleratorType": requested.name,
        "acceleratorConfig": catalogue.accelerator_config(requested),
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


def delete(state: EmulatorState, node: Node, now: float) -> Operation:
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
    """Marks a node in any state as DELETING and enters the pending deletion. Unlike `delete`, cancels no operation and
    heeds no fault."""
    node.resource["state"] = "DELETING"
    return start_operation(state, "delete", node.name, now, state.update_seconds)


def update(state: EmulatorState, node: Node, mask: str, body: dict[str, Any], now: float) -> Operation:
    """Enters a pending update that replaces all metadata (gcloud adds its ssh key so). Raises ApiError for a `mask` of
    other fields, bad metadata or a busy fault, and unless the node is READY or STOPPED and no operation on it is
    pending."""
    if mask != "metadata":
        raise bad_request(f'update mask "{mask}" is not emulated: only metadata is')
    if node.state not in ("READY", "STOPPED"):
        raise bad_request(f"update is not supported while in state {node.state}")
    if any(operation.target == node.name and not operation.done for operation in state.operations.values()):
        raise ApiError(catalogue.ABORTED, "unable to queue the operation")
    faults.refuse_change(state)
    metadata = body.get("metadata", {})
    catalogue.check_metadata(metadata)
    operation = start_operation(state, "update", node.name, now, state.update_seconds)
    operation.change = {"metadata": metadata}
    return operation


def stop_or_start(state: EmulatorState, node: Node, verb: str, now: float) -> Operation:
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


def guest_attributes(node: Node, body: dict[str, Any]) -> dict[str, Any]:
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


def accelerator_json(parent: str, name: str) -> dict[str, Any]:
    """Returns the accelerator type `name` as the API lists it. `parent`: projects/P/locations/Z/acceleratorTypes."""
    config = catalogue.accelerator_config(ACCELERATORS[name])
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
    """Ends a node's operation once its work on the hosts is done, and changes the node as the operation promised; a
    stop also forgets the hosts' guest attributes. After an `error` of that work the node is UNKNOWN, unless it was an
    update. A deletion meanwhile, or a stock-out, is reported instead; a stock-out removes the node. Of the ended
    operations only the newest _KEPT_OPERATIONS stay."""
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
        response = {"@type": "type.googleapis.com/google.cloud.tpu.v2.Node", **node_json(node)}
    operation.done, operation.ended, operation.error, operation.response = True, now, error, response
    ended = [other for other in state.operations.values() if other.done]
    for other in ended[:-_KEPT_OPERATIONS]:
        del state.operations[other.name]


def _number(text: str, now: float) -> int:
    """Returns a number like Google's ids: 19 digits at most, the same for the same text and time."""
    return int.from_bytes(hashlib.sha256(f"{text} {now}".encode()).digest()[:7], "big") * 100
