"""Faults: what goes wrong on purpose. Entered by `tpu-launch emulator inject ...`, kept in the state, consumed
atomically with what they spoil.

Pure functions over the state; the ones that kill or cut off hosts only mark them here, and host_containers.py does it.
"""

from __future__ import annotations

import random
from typing import Any

from launcher.emulator.api import catalogue
from launcher.emulator.api.catalogue import ApiError, event_id
from launcher.emulator.state import Fault, Host, Node, State
from training.accelerators import Accelerator

SERVICES = ("tpu", "storage", "metadata")


class NoSuchTarget(ValueError):
    """A fault names a node or a worker that isn't there; the message lists what is."""


def take(state: State, kind: str, service: str = "tpu") -> Fault | None:
    """The first such fault, with one use of it gone."""
    for fault in state.faults:
        if fault.kind == kind and fault.service == service:
            if fault.left is not None:
                fault.left -= 1
                if fault.left <= 0:
                    state.faults.remove(fault)
            return fault
    return None


def refuse_create(state: State, wanted: Accelerator, zone: str) -> None:
    """Raises the error that a quota or permission fault answers a creation with."""
    if take(state, "permission"):
        raise ApiError(catalogue.PERMISSION_DENIED, f"Permission denied on 'locations/{zone}' (or it may not exist).")
    if take(state, "quota"):
        limit = f"TPU{wanted.generation.name.upper()}PerProjectPerZoneForTPUAPI"
        raise ApiError(
            catalogue.RESOURCE_EXHAUSTED, f"Quota limit '{limit}' has been exceeded. Limit: 0 in zone {zone}."
        )


def refuse_change(state: State) -> None:
    """Raises what Google answers while another operation is on its way."""
    if take(state, "busy"):
        raise ApiError(catalogue.ABORTED, "unable to queue the operation")


def engine_trouble(state: State, hostname: str, *, registry: bool) -> str | None:
    """Why an engine (a host's; the workstation's has no name) can't do what it is asked for now: its registry is down,
    or its disk is full."""
    for fault in state.faults:
        if fault.host in ("", hostname):
            if fault.kind == "registry" and registry:
                return "received unexpected HTTP status: 503 Service Unavailable"
            if fault.kind == "disk-full" and fault.host == hostname:
                return "write /var/lib/docker/tmp/GetImageBlob: no space left on device"
    return None


# What an outage shows of a node: Google's words for its state and health.
OUTAGES: dict[str, dict[str, Any]] = {
    "repair": {"state": "REPAIRING", "health": "TIMEOUT", "healthDescription": "The TPU is being repaired."},
    "maintenance": {
        "health": "UNHEALTHY_MAINTENANCE",
        "healthDescription": "The TPU had a maintenance event.",
        "upcomingMaintenance": {"type": "UNSCHEDULED", "maintenanceStatus": "ONGOING"},
    },
}


def begin_outage(node: Node, kind: str, until: float) -> None:
    """The node shows that it is being worked on. Its hosts are the caller's business."""
    node.resource |= OUTAGES[kind]
    node.outage_until = until


def end_outage(node: Node) -> None:
    node.outage_until = None
    for key in ("upcomingMaintenance", "healthDescription"):
        node.resource.pop(key, None)
    if node.state in ("READY", "REPAIRING"):
        node.resource |= {"state": "READY", "health": "HEALTHY"}


def stockout(state: State, zone: str) -> dict[str, Any] | None:
    """The error that a creation's operation ends with, when a stock-out is due."""
    if not take(state, "stockout"):
        return None
    text = (
        f'There is no more capacity in the zone "{zone}"; you can try in another zone where Cloud TPU Nodes are offered '
        "(see https://cloud.google.com/tpu/docs/regions)"
    )
    return {"code": catalogue.RESOURCE_EXHAUSTED, "message": f"{text} {event_id(text)}"}


def error_status(state: State, service: str, chance: float | None = None) -> int | None:
    """The HTTP status to answer the next request to `service` with instead of doing it, if any. `chance` is drawn from
    [0, 1)."""
    for fault in state.faults:
        if fault.kind == "errors" and fault.service == service:
            drawn = random.random() if chance is None else chance
            if drawn < fault.rate:
                take(state, "errors", service)
                return fault.status
    return None


def delay(state: State, service: str) -> float:
    """How many seconds the next request to `service` waits."""
    return sum(fault.seconds for fault in state.faults if fault.kind == "slow" and fault.service == service)


def find_node(state: State, name: str) -> Node:
    """The node of that name, short or full. Raises NoSuchTarget."""
    found = [node for node in state.nodes.values() if name in (node.name, node.short_name)]
    if len(found) == 1:
        return found[0]
    if found:
        raise NoSuchTarget(f"several nodes are called {name}: give one of {', '.join(node.name for node in found)}")
    known = ", ".join(sorted(node.short_name for node in state.nodes.values())) or "none"
    raise NoSuchTarget(f"there is no node {name!r} on this emulator; nodes: {known}")


def find_host(state: State, name: str, worker: int) -> Host:
    """The host of a node by worker index. Raises NoSuchTarget."""
    node = find_node(state, name)
    if not 0 <= worker < len(node.hosts):
        raise NoSuchTarget(f"node {node.short_name} has workers 0 to {len(node.hosts) - 1}, no worker {worker}")
    return node.hosts[worker]
