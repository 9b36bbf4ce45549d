"""Runs the long-running operations of the Cloud TPU API: makes, stops and removes the hosts of nodes.

The state lists what is pending; each pending operation gets a thread.

What can fail half-way: every step is idempotent, so a server that was killed runs the same operations again. An
operation's end and the node's new state are one change of the state (api.nodes.finish_operation).
"""

import logging
import threading
import time

from launcher.emulator.api import catalogue
from launcher.emulator.api import nodes as tpu_api
from launcher.emulator.state import Host, Node, Operation, Store
from launcher.emulator.vm.hosts import Hosts, in_parallel

log = logging.getLogger(__name__)

BOOT_TIMEOUT = 180.0  # seconds until a host has published its ssh host keys


class OperationRunner:
    """Runs the pending operations of a store on its hosts."""

    def __init__(self, store: Store, hosts: Hosts) -> None:
        self._store = store
        self._hosts = hosts
        self._running: set[str] = set()  # changed under the store's lock
        self._closing = False
        self._booting = threading.Condition()
        self._boots = 0

    def close(self) -> None:
        """Makes no further host, and waits up to 10 s for those that are being made."""
        with self._booting:
            self._closing = True
            self._booting.wait_for(lambda: self._boots == 0, timeout=10)

    def wake(self) -> None:
        """Starts a thread for each pending operation on a node, unless the operation has one. Returns at once."""
        with self._store.read() as state:
            new = [
                operation.name
                for operation in state.operations.values()
                if not operation.done and "/nodes/" in operation.target and operation.name not in self._running
            ]
            self._running.update(new)
        for name in new:
            threading.Thread(target=self._run, args=(name,), name=name.rsplit("/", 1)[1], daemon=True).start()

    def _run(self, name: str) -> None:
        """Does an operation's work on the hosts, waits until it may end, and ends it; an exception is its error."""
        with self._store.read() as state:
            operation = state.operations[name]
            node = state.nodes.get(operation.target)
        message = ""
        try:
            if node is not None:
                message = self._work(operation, node)
        except Exception as error:
            log.exception("operation %s", name)
            message = f"the emulator could not do it: {error}"
        else:
            self._wait_until_due(operation)
        failure = {"code": catalogue.INTERNAL, "message": message} if message else None
        with self._store.change() as state:
            tpu_api.finish_operation(state, state.operations[name], time.time(), failure)
            self._running.discard(name)

    def _work(self, operation: Operation, node: Node) -> str:
        """Does an operation's work on the hosts, if any; waits at most BOOT_TIMEOUT until new ones have booted, and
        then until the operation is due. Returns an error, such as hosts that did not boot, or "". Raises
        EngineError."""
        match operation.verb:
            case "create" | "start":
                if operation.failure is None:
                    in_parallel(lambda host: self._boot(operation, node, host), node.hosts)
                    self._store.wait(lambda _: operation.cancelled or all(map(_booted, node.hosts)), BOOT_TIMEOUT)
                self._wait_until_due(operation)
                return _describe_missing(node)
            case "stop":
                in_parallel(self._hosts.power_off, node.hosts)
            case "delete":
                self._delete(node)
        return ""

    def _boot(self, operation: Operation, node: Node, host: Host) -> None:
        """Makes and starts a host. Does nothing once cancelled, or while closing."""
        with self._booting:
            if operation.cancelled or self._closing:
                return
            self._boots += 1
        try:
            self._hosts.ensure(node, host)
        finally:
            with self._booting:
                self._boots -= 1
                self._booting.notify_all()

    def _delete(self, node: Node) -> None:
        """Waits until the node's creations and starts have ended, at most BOOT_TIMEOUT, and removes the hosts."""

        def makes_hosts(other: Operation) -> bool:
            return other.verb in ("create", "start") and other.target == node.name and not other.done

        # A creation or start that was cancelled may still be making hosts.
        self._store.wait(lambda state: not any(map(makes_hosts, state.operations.values())), BOOT_TIMEOUT)
        in_parallel(self._hosts.remove, node.hosts)

    def _wait_until_due(self, operation: Operation) -> None:
        """Waits until the operation's `ends_at`, or until it is cancelled."""
        self._store.wait(lambda _: operation.cancelled, max(0.0, operation.ends_at - time.time()))


def _booted(host: Host) -> bool:
    """Returns whether the host has published its ssh host key."""
    return "hostkeys/ssh-ed25519" in host.guest_attributes


def _describe_missing(node: Node) -> str:
    """Returns an error message that names the hosts which have not booted by now; "" if all have."""
    missing = [host for host in node.hosts if not _booted(host)]
    if not missing:
        return ""
    return (
        f"workers {[host.index for host in missing]} of {node.short_name} did not boot within {BOOT_TIMEOUT:.0f} s; "
        f"see docker logs {missing[0].hostname}"
    )
