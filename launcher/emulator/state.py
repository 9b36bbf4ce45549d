"""The emulator's state, kept in one JSON file.

`EmulatorState` holds what must survive the server: nodes and their hosts, operations, pushed images, faults. Code
changes it only inside `Store.change()`, which holds the lock and writes the file before another thread sees the change.
Objects of buckets are in files of their own (storage/bucket.py).

What can fail half-way: the file is written under a temporary name, synced, then renamed, so a server that was killed
finds either the old or the new state. Pending operations are idempotent (operations.py).
"""

import contextlib
import dataclasses
import hashlib
import json
import secrets
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Literal

from pydantic import TypeAdapter, ValidationError

from launcher.home import write_private

_new_token = partial(secrets.token_hex, 16)


@dataclass
class Host:
    """One TPU VM of a node. Its container is named like its hostname."""

    index: int
    address: str
    hostname: str  # t1v-n-<hash>-w-<index>
    instance_id: int
    killed: bool = False  # by a fault: is down until restored
    cut: bool = False  # by a fault: has no network until restored
    hung: bool = False  # by a fault: its processes are stopped until restored
    restore_at: float | None = None  # when a fault of this host ends
    guest_attributes: dict[str, str] = field(default_factory=dict)  # "hostkeys/ssh-ed25519" -> value
    pulled: list[str] = field(default_factory=list)  # ids of the registry's images that its engine has
    token: str = field(default_factory=_new_token)  # the access token of its service account


@dataclass
class Node:
    """A slice. `resource` is what the API shows, without networkEndpoints (those come from the hosts)."""

    name: str  # projects/P/locations/Z/nodes/N
    resource: dict[str, Any]
    hosts: list[Host]
    outage_until: float | None = None  # when a repair or a maintenance ends

    @property
    def project(self) -> str:
        return self.name.split("/")[1]

    @property
    def zone(self) -> str:
        return self.name.split("/")[3]

    @property
    def short_name(self) -> str:
        return self.name.split("/")[5]

    @property
    def state(self) -> str:
        return str(self.resource["state"])


@dataclass
class Operation:
    """A long-running operation. The server works on it until it is done, also after a restart."""

    name: str  # projects/P/locations/Z/operations/...
    verb: str  # create | update | delete | stop | start | create-queued | delete-queued
    target: str  # full name of the node or queued resource
    created: float
    ends_at: float  # at the earliest
    change: dict[str, Any] = field(default_factory=dict)  # fields that an update sets
    failure: dict[str, Any] | None = None  # an error that is known from the start: a stock-out
    cancelled: bool = False
    done: bool = False
    ended: float | None = None
    error: dict[str, Any] | None = None
    response: dict[str, Any] | None = None


@dataclass
class QueuedResource:
    """A request for a node that may have to wait for capacity. See queued_resources.py."""

    name: str  # projects/P/locations/Z/queuedResources/Q
    resource: dict[str, Any]  # as the API shows it, without its state
    node: str  # full name of the node that it becomes
    state: str  # ACCEPTED, WAITING_FOR_RESOURCES, ...
    until: float | None  # when it expires
    initiator: str = "USER"
    error: dict[str, Any] | None = None
    next_try: float = 0.0


@dataclass
class Fault:
    """A fault that will occur `left` more times; None: until it is cleared. See faults.py."""

    kind: str  # stockout | quota | permission | busy | stuck | errors | slow | ...: faults.py
    service: str  # tpu | storage | metadata
    left: int | None = None
    status: int = 503
    seconds: float = 0.0
    host: str = ""  # registry and disk-full: the hostname; "": all hosts
    wording: str = ""  # stockout: a key of faults.STOCKOUTS


@dataclass
class EmulatorState:
    """Everything that survives the server."""

    id: str  # of the home directory: the label of every container and network
    port: int
    sockets: str  # the folder of the unix sockets
    engine: str  # the workstation's engine, a unix socket
    create_seconds: float = 0.2  # that operations take at least; gcloud first polls after 1 s, then every 2 s
    update_seconds: float = 0.5
    registry_port: int = 0  # on 127.0.0.1, with TLS
    token: str = field(default_factory=_new_token)  # the access token of the workstation's account
    full_pushes: bool = False  # whether docker's pushes send an image's bytes, and not only its name
    subnet: str = ""
    nodes: dict[str, Node] = field(default_factory=dict)
    operations: dict[str, Operation] = field(default_factory=dict)
    faults: list[Fault] = field(default_factory=list)
    queued: dict[str, QueuedResource] = field(default_factory=dict)
    pushed: dict[str, dict[str, str]] = field(default_factory=dict)  # repository -> tag or digest -> image id
    repositories: dict[str, dict[str, Any]] = field(default_factory=dict)  # projects/P/locations/L/repositories/R
    stock: dict[str, Any] | None = None  # a stock file's content; see api/stock.py
    stock_since: float = 0.0  # when it was entered
    format: Literal[1] = 1

    @property
    def storage(self) -> str:
        """The URL of Cloud Storage for processes of the workstation, with the login that clients then send."""
        return f"http://workstation:{self.token}@127.0.0.1:{self.port}"

    @property
    def hosts(self) -> list[Host]:
        """The hosts of all nodes."""
        return [host for node in self.nodes.values() for host in node.hosts]

    def find_host(self, hostname: str) -> tuple[Node, Host] | None:
        """Returns a host with its node; None when there is no host of this name."""
        found = ((node, host) for node in self.nodes.values() for host in node.hosts if host.hostname == hostname)
        return next(found, None)


def emulator_id(home: Path) -> str:
    """Returns the emulator's id, 8 hexadecimal digits of its home's path: a label of all that the emulator makes."""
    return hashlib.sha256(str(home.resolve()).encode()).hexdigest()[:8]


def to_json(state: EmulatorState) -> str:
    return json.dumps(dataclasses.asdict(state), indent=1)


def from_json(text: str) -> EmulatorState:
    """Parses the state file. Raises ValueError when it is not a state of this format."""
    try:
        return TypeAdapter(EmulatorState).validate_json(text)
    except ValidationError as error:
        raise ValueError(f"not an emulator state of this format: {error.errors()[0]['msg']}") from None


class Store:
    """Shares the state between all threads of the server, and writes it."""

    def __init__(self, state: EmulatorState, path: Path | None) -> None:
        """`path`: the file to which changes are written; None: the state is kept in memory only."""
        self._state = state
        self._path = path
        self._condition = threading.Condition(threading.RLock())
        self._written = ""
        self.after_change: Callable[[], None] = lambda: None

    @contextlib.contextmanager
    def change(self) -> Iterator[EmulatorState]:
        """Yields the locked state to change it. After the block: writes it, wakes `wait`, calls `after_change`. A block
        that raises must change nothing."""
        with self._condition:
            yield self._state
            text = to_json(self._state)
            if self._path is not None and text != self._written:
                write_private(self._path, text, sync=True)
                self._written = text
            self._condition.notify_all()
        self.after_change()

    @contextlib.contextmanager
    def read(self) -> Iterator[EmulatorState]:
        """Yields the state to read it, under the lock of `change`."""
        with self._condition:
            yield self._state

    def wait(self, ready: Callable[[EmulatorState], bool], timeout: float) -> bool:
        """Waits until `ready(state)`, whose errors pass. Returns False when `timeout` seconds passed first."""
        with self._condition:
            return self._condition.wait_for(lambda: ready(self._state), timeout)
