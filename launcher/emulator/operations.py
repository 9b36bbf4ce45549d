"""Runs the long-running operations of the Cloud TPU API: makes, stops and removes the hosts of nodes.

The state lists what is pending; each pending operation gets a thread.

What can fail half-way: every step is idempotent, so a server that was killed runs the same operations again. An
operation's end and the node's new state are one change of the state.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from launcher.emulator.api import catalogue
from launcher.emulator.api import nodes as tpu_api
from launcher.emulator.state import Host, Node, Operation, State, Store
from launcher.emulator.vm.host_containers import HostContainers

log = logging.getLogger(__name__)

BOOT_TIMEOUT = 180.0  # seconds until a host has published its ssh host keys
KEPT_OPERATIONS = 200


class OperationRunner:
    """Runs the pending operations of a store on the containers of its hosts."""

    def __init__(self, store: Store, containers: HostContainers, *, prepare: Callable[[Node, Host], None]) -> None:
        self._store = store
        self._containers = containers
        self._prepare = prepare  # called before a host is started: opens its control socket
        self._running: set[str] = set()
        self._lock = threading.Lock()
        self._closing = False
        self._booting = threading.Condition()
        self._boots = 0

    def close(self) -> None:
        """Makes no host from now on, and waits for those that are being made."""
        with self._booting:
            self._closing = True
            self._booting.wait_for(lambda: self._boots == 0, timeout=10)

    def wake(self) -> None:
        """Starts a thread for each pending operation that has none."""
        with self._store.read() as state:
            pending = [
                operation.name
                for operation in state.operations.values()
                if not operation.done and "/nodes/" in operation.target
            ]
        with self._lock:
            new = [name for name in pending if name not in self._running]
            self._running.update(new)
        for name in new:
            threading.Thread(target=self._run, args=(name,), name=name.rsplit("/", 1)[1], daemon=True).start()

    def _run(self, name: str) -> None:
        with self._store.read() as state:
            operation = state.operations[name]
            node = state.nodes.get(operation.target)
        try:
            assert node is not None, f"{name}: its node is gone"
            work = {
                "create": self._create,
                "delete": self._delete,
                "update": self._update,
                "stop": self._stop,
                "start": self._start,
            }
            work[operation.verb](operation, node)
        except Exception as error:
            log.exception("operation %s", name)
            with self._store.change() as state:
                operation, node = state.operations[name], state.nodes.get(operation.target)
                if node is not None and operation.verb != "update":
                    node.resource["state"] = "UNKNOWN"  # what is left is to delete it
                _finish(
                    state, name, error={"code": catalogue.INTERNAL, "message": f"the emulator could not do it: {error}"}
                )
        finally:
            with self._lock:
                self._running.discard(name)

    def _create(self, operation: Operation, node: Node) -> None:
        if operation.failure is None:
            with ThreadPoolExecutor(max(1, min(16, len(node.hosts)))) as pool:
                list(pool.map(lambda host: self._boot(operation, node, host), node.hosts))
            self._store.wait(lambda _: operation.cancelled or all(_booted(host) for host in node.hosts), BOOT_TIMEOUT)
        self._until_due(operation)
        missing = [host.index for host in node.hosts if not _booted(host)]
        with self._store.change() as state:
            if operation.cancelled:
                error = {"code": 1, "message": f"The creation of {node.short_name} was cancelled."}
                if node.state == "CREATING":  # cancelled by name, not by a deletion that takes the hosts away itself
                    tpu_api.start_delete(state, node, time.time())
                _finish(state, operation.name, error=error)
            elif operation.failure is not None:
                del state.nodes[node.name]
                _finish(state, operation.name, error=operation.failure)
            elif missing:
                message = (
                    f"workers {missing} of {node.short_name} did not boot within {BOOT_TIMEOUT:.0f} s; "
                    f"see docker logs {node.hosts[missing[0]].hostname}"
                )
                node.resource["state"] = "UNKNOWN"
                _finish(state, operation.name, error={"code": catalogue.INTERNAL, "message": message})
            else:
                node.resource |= {"state": "READY", "health": "HEALTHY"}
                _finish(state, operation.name, response=_typed(node))

    def _boot(self, operation: Operation, node: Node, host: Host) -> None:
        with self._booting:
            if operation.cancelled or self._closing:
                return
            self._boots += 1
        try:
            self._prepare(node, host)
            self._containers.ensure(node, host)
        finally:
            with self._booting:
                self._boots -= 1
                self._booting.notify_all()

    def _delete(self, operation: Operation, node: Node) -> None:
        def is_creation(other: Operation) -> bool:
            return other.verb == "create" and other.target == node.name and not other.done

        # A creation that was cancelled may still be making hosts.
        self._store.wait(lambda state: not any(map(is_creation, state.operations.values())), BOOT_TIMEOUT)
        with ThreadPoolExecutor(max(1, min(16, len(node.hosts)))) as pool:
            list(pool.map(self._containers.remove, node.hosts))
        self._until_due(operation)
        with self._store.change() as state:
            del state.nodes[node.name]
            _finish(state, operation.name, response={"@type": "type.googleapis.com/google.protobuf.Empty"})

    def _update(self, operation: Operation, node: Node) -> None:
        self._until_due(operation)
        with self._store.change() as state:
            _change(state, operation, node)

    def _stop(self, operation: Operation, node: Node) -> None:
        for host in node.hosts:
            self._containers.power_off(host)
        self._until_due(operation)
        with self._store.change() as state:
            node.resource["state"] = "STOPPED"
            node.resource.pop("health", None)
            for host in node.hosts:
                host.guest_attributes.clear()
            _finish(state, operation.name, response=_typed(node))

    def _start(self, operation: Operation, node: Node) -> None:
        for host in node.hosts:
            self._prepare(node, host)
            self._containers.start(host)
        self._store.wait(lambda _: all(_booted(host) for host in node.hosts), BOOT_TIMEOUT)
        self._until_due(operation)
        with self._store.change() as state:
            node.resource |= {"state": "READY", "health": "HEALTHY"}
            _finish(state, operation.name, response=_typed(node))

    def _until_due(self, operation: Operation) -> None:
        self._store.wait(lambda _: operation.cancelled, max(0.0, operation.ends_at - time.time()))


def _booted(host: Host) -> bool:
    return "hostkeys/ssh-ed25519" in host.guest_attributes


def _typed(node: Node) -> dict[str, Any]:
    return {"@type": "type.googleapis.com/google.cloud.tpu.v2.Node", **tpu_api.node_json(node)}


def finish_pending_operations(state: State) -> None:
    """Ends every pending operation at once with its node as requested, for a state without containers."""
    for operation in [operation for operation in state.operations.values() if not operation.done]:
        _change(state, operation, state.nodes[operation.target])


def _change(state: State, operation: Operation, node: Node) -> None:
    node.resource |= operation.change
    _finish(state, operation.name, response=_typed(node))


def _finish(
    state: State, name: str, *, error: dict[str, Any] | None = None, response: dict[str, Any] | None = None
) -> None:
    operation = state.operations[name]
    operation.done, operation.ended, operation.error, operation.response = True, time.time(), error, response
    done = [operation for operation in state.operations.values() if operation.done]
    for operation in done[:-KEPT_OPERATIONS]:
        del state.operations[operation.name]
