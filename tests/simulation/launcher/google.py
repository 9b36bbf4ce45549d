"""Google, simulated: nodes and queued resources with all their states, their operations, and gcloud's words for it."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from tests.simulation.launcher.hosts import EPOCH, Host, timestamp
from training.accelerators import accelerator

if TYPE_CHECKING:
    from tests.simulation.launcher.world import World

GCLOUD_WAITS = 1800.0  # seconds that gcloud waits for an operation


@dataclass(eq=False)
class Operation:
    """A long-running operation."""

    name: str
    target: str
    kind: str
    done: bool = False
    error: dict[str, Any] | None = None
    waiters: dict[Any, None] = field(default_factory=dict)


@dataclass(eq=False)
class Node:
    """A slice."""

    name: str
    zone: str
    project: str
    type: str
    labels: dict[str, str]
    spot: bool
    maker: str
    """The person whose command asked for it."""
    created: float
    uid: str
    state: str = "CREATING"
    request: str = ""
    by: object = None
    """The command that asked for it."""
    hosts: list[Host] = field(default_factory=list)
    deleted: float | None = None

    @property
    def full_name(self) -> str:
        """As the API names it."""
        return f"projects/{self.project}/locations/{self.zone}/nodes/{self.name}"

    def document(self) -> dict[str, Any]:
        """As GET shows it."""
        shown: dict[str, Any] = {
            "name": self.full_name,
            "id": self.uid,
            "uid": self.uid,
            "state": self.state,
            "health": "HEALTHY",
            "acceleratorType": self.type,
            "createTime": timestamp(self.created + EPOCH),
            "labels": self.labels,
            "schedulingConfig": {"spot": True} if self.spot else {},
        }
        if self.request:
            shown["queuedResource"] = f"projects/{self.project}/locations/{self.zone}/queuedResources/{self.request}"
        if self.hosts and self.state != "CREATING":
            shown["networkEndpoints"] = [{"ipAddress": host.address, "port": 8470} for host in self.hosts]
        return shown


@dataclass(eq=False)
class Request:
    """A queued resource."""

    name: str
    zone: str
    project: str
    type: str
    labels: dict[str, str]
    spot: bool
    maker: str
    created: float
    until: float
    state: str = "ACCEPTED"
    initiator: str = "SERVICE"
    error: dict[str, Any] | None = None
    by: object = None
    """The command that asked for it."""

    def document(self) -> dict[str, Any]:
        """As GET shows it."""
        parent = f"projects/{self.project}/locations/{self.zone}"
        state: dict[str, Any] = {"state": self.state, "stateInitiator": self.initiator}
        if self.error:
            state["failedData"] = {"error": self.error}
        shown: dict[str, Any] = {
            "name": f"{parent}/queuedResources/{self.name}",
            "createTime": timestamp(self.created + EPOCH),
            "state": state,
            "tpu": {
                "nodeSpec": [
                    {
                        "parent": parent,
                        "nodeId": self.name,
                        "node": {"acceleratorType": self.type, "labels": self.labels},
                    }
                ]
            },
        }
        return {**shown, "spot": {}} if self.spot else shown


STOCKOUTS: tuple[dict[str, Any], ...] = (
    {"code": 8, "message": 'There is no more capacity in the zone "z"; you can try in another zone'},
    {"code": 13, "message": "an internal error has occurred"},
    {"code": 8, "message": "Insufficient capacity. [EID: 0x0a]"},
    {"code": 9, "message": "The zone does not have enough resources available to fulfill the request"},
)


class ApiError(Exception):
    """The API refuses; the message is what gcloud prints."""


class Google:
    """All zones of all projects. Operations and queued resources go on by timers."""

    def __init__(self, world: World) -> None:
        self.world, self.scheduler, self.chance = world, world.scheduler, world.chance
        self.nodes: dict[tuple[str, str], Node] = {}
        self.requests: dict[tuple[str, str], Request] = {}
        self.operations: dict[str, Operation] = {}
        self.snapshots: dict[str, list[tuple[float, list[dict[str, Any]]]]] = {"nodes": [], "requests": []}
        self.counter = 0
        self.every_node: list[Node] = []

    # -- nodes --------------------------------------------------------------------------------------------------------

    def create_node(
        self,
        key: tuple[str, str],
        project: str,
        kind: str,
        labels: dict[str, str],
        spot: bool,
        maker: str,
        request: str = "",
        by: object = None,
    ) -> Operation:
        """Begins a creation. Raises ApiError."""
        zone, name = key
        if key in self.nodes:
            raise ApiError(
                f"ALREADY_EXISTS: Resource 'projects/{project}/locations/{zone}/nodes/{name}' already exists"
            )
        self.counter += 1
        node = Node(name, zone, project, kind, labels, spot, maker, self.scheduler.now, str(1000 + self.counter))
        node.request, node.by = request, by
        self.nodes[key] = node
        self.every_node.append(node)
        self._changed("nodes")
        operation = self._operation(node.name, "create")
        stockout = self.world.weather("stockout")
        seconds = self.chance.choice((self.chance.uniform(2.0, 12.0), self.chance.uniform(5.0, 60.0)))
        if self.chance.random() < 0.01:
            seconds = 2400.0
        if stockout is not None:
            self._later(min(seconds, 15.0), lambda: self._fail_creation(key, node, operation, stockout.number))
        else:
            self._later(seconds, lambda: self._finish_creation(node, operation))
        self.world.note(f"Google creates node {name} in {zone} for {maker}")
        return operation

    def _finish_creation(self, node: Node, operation: Operation) -> None:
        if node.state != "CREATING":
            self._end(operation)
            return
        count = accelerator(node.type).hosts
        for worker in range(count):
            address = f"10.{self.counter % 250}.{node.uid[-3:].lstrip('0') or 0}.{worker + 1}"
            host = Host(self.scheduler, f"{node.name}@{node.uid}", worker, address)
            host.ssh_from = self.scheduler.now + self.chance.uniform(0.0, 20.0)
            node.hosts.append(host)
            self.world.addresses[address] = host
        node.state = "READY"
        self.world.note(f"node {node.name} is READY")
        self._changed("nodes")
        self._end(operation)

    def _fail_creation(self, key: tuple[str, str], node: Node, operation: Operation, number: int) -> None:
        if self.nodes.get(key) is node:
            del self.nodes[key]
            node.deleted = self.scheduler.now
        self.world.note(f"creation of {node.name} failed: no capacity")
        self._changed("nodes")
        self._end(operation, STOCKOUTS[number % len(STOCKOUTS)])

    def delete_node(self, node: Node, who: str) -> Operation:
        """Begins a deletion. Raises ApiError."""
        if node.state == "DELETING":
            raise ApiError("ABORTED: unable to queue the operation")
        self.world.node_deleted(node, who)
        node.state = "DELETING"
        for host in node.hosts:
            host.die(for_good=True)
        operation = self._operation(node.name, "delete")
        self._changed("nodes")
        self._later(self.chance.uniform(1.0, 20.0), lambda: self._finish_deletion(node, operation))
        return operation

    def _finish_deletion(self, node: Node, operation: Operation) -> None:
        key = (node.zone, node.name)
        if self.nodes.get(key) is node:
            del self.nodes[key]
        node.deleted = self.scheduler.now
        self.world.note(f"node {node.name} is gone")
        self._changed("nodes")
        self._end(operation)

    def preempt(self, node: Node, lag: float) -> None:
        """Takes a slice away: its hosts die at once, its state follows after `lag` seconds."""
        if node.state != "READY":
            return
        self.world.note(f"node {node.name} is preempted, and shown so after {lag:.0f} s")
        for host in node.hosts:
            host.die(for_good=True)

        def show() -> None:
            if node.state == "READY":
                node.state = "PREEMPTED"
                self._changed("nodes")
                if (request := self.requests.get((node.zone, node.request))) is not None:
                    self._suspend(request, node)

        self._later(lag, show)

    def start_node(self, node: Node) -> Operation:
        """Starts a stopped node. Raises ApiError."""
        if node.state != "STOPPED":
            raise ApiError(f"FAILED_PRECONDITION: start is not supported while in state {node.state}")
        node.state = "STARTING"
        operation = self._operation(node.name, "start")

        def finish() -> None:
            if node.state == "STARTING":
                node.state = "READY"
                for host in node.hosts:
                    host.boot_up(0, writes_time=True)
                self._changed("nodes")
            self._end(operation)

        self._later(self.chance.uniform(2.0, 20.0), finish)
        return operation

    # -- queued resources ---------------------------------------------------------------------------------------------

    def create_request(self, request: Request) -> None:
        """Accepts a request. Raises ApiError."""
        key = (request.zone, request.name)
        if key in self.requests:
            raise ApiError(f"ALREADY_EXISTS: Resource 'queuedResources/{request.name}' already exists")
        if key in self.nodes:
            raise ApiError(f"ALREADY_EXISTS: Resource 'nodes/{request.name}' already exists")
        self.requests[key] = request
        self.world.note(f"Google accepts request {request.name} of {request.maker}")
        self.world.reached("request")
        self._changed("requests")
        self._later(self.chance.uniform(1.0, 8.0), lambda: self._advance(request))

    def _advance(self, request: Request) -> None:
        if request.state not in ("ACCEPTED", "WAITING_FOR_RESOURCES", "PROVISIONING"):
            return
        key = (request.zone, request.name)
        node = self.nodes.get(key)
        if self.scheduler.now > request.until and request.state != "PROVISIONING":
            request.state = "FAILED"
            request.error = {"code": 8, "message": "the resource could not be provisioned before its valid-until time"}
        elif request.state == "PROVISIONING":
            if node is None:
                request.state = "WAITING_FOR_RESOURCES"
            elif node.state == "READY":
                request.state = "ACTIVE"
                self.world.note(f"request {request.name} is ACTIVE")
        elif self.world.weather("stockout") is not None:
            request.state = "WAITING_FOR_RESOURCES"
        else:
            try:
                self.create_node(
                    key,
                    request.project,
                    request.type,
                    request.labels,
                    request.spot,
                    request.maker,
                    request.name,
                    request.by,
                )
                request.state = "PROVISIONING"
            except ApiError as error:
                request.state, request.error = "FAILED", {"code": 6, "message": str(error)}
        self._changed("requests")
        self._later(self.chance.uniform(2.0, 6.0), lambda: self._advance(request))

    def _suspend(self, request: Request, node: Node | None) -> None:
        if request.state != "ACTIVE":
            return
        request.state, request.initiator = "SUSPENDING", "SERVICE"

        def finish() -> None:
            if request.state == "SUSPENDING":
                if node is not None and self.nodes.get((node.zone, node.name)) is node:
                    del self.nodes[node.zone, node.name]
                    node.deleted = self.scheduler.now
                request.state = "SUSPENDED"
                self._changed("requests")

        self._later(self.chance.uniform(2.0, 30.0), finish)

    def delete_request(self, request: Request, who: str) -> Operation:
        """Begins the deletion of a request with its node. Raises ApiError."""
        if request.state == "DELETING":
            raise ApiError("ABORTED: unable to queue the operation")
        self.world.request_deleted(request, who)
        request.state = "DELETING"
        operation = self._operation(request.name, "delete")
        key = (request.zone, request.name)
        node = self.nodes.get(key)
        if node is not None and node.request == request.name and node.state != "DELETING":
            self.delete_node(node, who)

        def finish() -> None:
            node = self.nodes.get(key)
            if node is not None and node.request == request.name:
                if node.state != "DELETING":
                    self.delete_node(node, who)
                self._later(3.0, finish)
                return
            if self.requests.get(key) is request:
                del self.requests[key]
            self._changed("requests")
            self._end(operation)

        self._changed("requests")
        self._later(self.chance.uniform(1.0, 8.0), finish)
        return operation

    # -- operations ---------------------------------------------------------------------------------------------------

    def _operation(self, target: str, kind: str) -> Operation:
        self.counter += 1
        operation = Operation(f"operation-{self.counter}", target, kind)
        self.operations[operation.name] = operation
        return operation

    def _end(self, operation: Operation, error: dict[str, Any] | None = None) -> None:
        operation.done, operation.error = True, error
        self.scheduler.wake_all(operation.waiters)

    def _later(self, seconds: float, function: Callable[[], None]) -> None:
        self.scheduler.call_at(self.scheduler.now + seconds, function)

    # -- lists, which may be old --------------------------------------------------------------------------------------

    def _changed(self, kind: str) -> None:
        items = self.nodes.values() if kind == "nodes" else self.requests.values()
        self.snapshots[kind].append((self.scheduler.now, [dict(item.document()) for item in items]))

    def listed(self, kind: str, zone: str, age: float) -> list[dict[str, Any]]:
        """What a list shows: the state of `age` seconds ago."""
        newest: list[dict[str, Any]] = []
        for at, documents in self.snapshots[kind]:
            if at <= self.scheduler.now - age:
                newest = documents
        return [document for document in newest if zone in ("-", document["name"].split("/")[3])]


def dump(value: Any) -> str:
    """JSON as gcloud prints it."""
    return json.dumps(value)
