"""Injected faults: `tpu-launch emulator inject ...` enters them; the call that a fault spoils uses up one
occurrence in the same change of the state.

Pure functions over the state. Faults that kill or disconnect hosts only mark them; vm/hosts.py acts on the containers.
"""

from typing import Any

from launcher.emulator.api import catalogue
from launcher.emulator.api.catalogue import ApiError, event_id
from launcher.emulator.state import EmulatorState, Fault, Host, Node
from training.accelerators import Accelerator

SERVICES = ("tpu", "storage", "metadata")


def enter(
    state: EmulatorState, now: float, *, fault: str, node: str = "", worker: int = 0, **more: Any
) -> tuple[Node | None, list[Host]]:
    """Enters a fault of a node, of one of its hosts (`worker`), or of later calls, with `more` fields of Fault; "clear"
    ends all but preemptions. Returns the node (None: it is no node's) and the hosts on which the server must act: for
    `more["seconds"]`, if given. Raises ValueError for a wrong target, and for a node that must be READY and is not."""
    target = find_node(state, node) if node else None
    if fault == "clear":
        state.faults.clear()
        return None, [host for host in state.hosts if host.killed or host.cut or host.hung]
    if fault not in (*_ON_READY, *FLAGS):
        hostname = find_host(state, node, worker).hostname if node else ""
        state.faults.append(Fault(**{"kind": fault, "service": "tpu", "host": hostname, **more}))
        return None, []
    if target is None:
        raise ValueError(f"{fault} needs a node")
    if fault in _ON_READY and target.state != "READY":
        raise ValueError(f"node {target.short_name} is {target.state}; {fault} needs a READY one")
    if fault == "preempt":
        preempt(target)
    elif fault in OUTAGES:
        begin_outage(target, fault, now + more.get("seconds", 0.0))
    else:
        host = find_host(state, node, worker)
        if fault in FLAGS:
            setattr(host, FLAGS[fault], True)
            host.restore_at = now + more["seconds"] if more.get("seconds") else None
        return target, [host]
    return target, [*target.hosts]


def take(state: EmulatorState, kind: str, service: str = "tpu") -> Fault | None:
    """Returns the first fault of a kind and service, or None, and uses up one of its occurrences, if counted."""
    for fault in state.faults:
        if fault.kind == kind and fault.service == service:
            if fault.left is not None:
                fault.left -= 1
                if fault.left <= 0:
                    state.faults.remove(fault)
            return fault
    return None


def refuse_create(state: EmulatorState, requested: Accelerator, zone: str) -> None:
    """Raises ApiError for a creation, and uses up the fault, when a permission or quota fault is due."""
    if take(state, "permission"):
        raise ApiError(catalogue.PERMISSION_DENIED, f"Permission denied on 'locations/{zone}' (or it may not exist).")
    if take(state, "quota"):
        limit = f"TPU{requested.generation.name.upper()}PerProjectPerZoneForTPUAPI"
        text = f"Quota limit '{limit}' has been exceeded. Limit: 0 in zone {zone}."
        raise ApiError(catalogue.RESOURCE_EXHAUSTED, text)


def refuse_change(state: EmulatorState) -> None:
    """Raises ApiError, as Google while another operation is pending, and uses up the fault, if a busy fault is due."""
    if take(state, "busy"):
        raise ApiError(catalogue.ABORTED, "unable to queue the operation")


def engine_trouble(state: EmulatorState, hostname: str, *, registry: bool) -> str | None:
    """Returns the error of the engine of `hostname` ("": the workstation) if its disk is full, or if the request needs
    the `registry` and that is down for this engine; None otherwise. Uses up no fault."""
    for fault in state.faults:
        if fault.host in ("", hostname):
            if fault.kind == "registry" and registry:
                return "received unexpected HTTP status: 503 Service Unavailable"
            if fault.kind == "disk-full" and fault.host == hostname:
                return "write /var/lib/docker/tmp/GetImageBlob: no space left on device"
    return None


# The fields of a node that the API shows during an outage.
OUTAGES: dict[str, dict[str, Any]] = {
    "repair": {"state": "REPAIRING", "health": "TIMEOUT", "healthDescription": "The TPU is being repaired."},
    "maintenance": {
        "health": "UNHEALTHY_MAINTENANCE",
        "healthDescription": "The TPU had a maintenance event.",
        "upcomingMaintenance": {"type": "UNSCHEDULED", "maintenanceStatus": "ONGOING"},
    },
}
FLAGS = {"kill-host": "killed", "cut-host": "cut", "hang-host": "hung"}  # what a fault sets of its host
_ON_READY = ("preempt", "restore-host", *OUTAGES)  # faults of READY nodes only


def begin_outage(node: Node, kind: str, until: float) -> None:
    """Marks the node as in "repair", or READY in "maintenance" (`kind`), and its hosts as killed, until a Unix time,
    when the timers of `Hosts` end the outage. The caller stops the hosts."""
    node.resource |= OUTAGES[kind]
    node.outage_until = until
    for host in node.hosts:
        host.killed, host.restore_at = True, until


def end_outage(node: Node) -> None:
    """Removes the outage's fields from the node; one that is READY or REPAIRING becomes READY and HEALTHY."""
    node.outage_until = None
    for key in ("upcomingMaintenance", "healthDescription"):
        node.resource.pop(key, None)
    if node.state in ("READY", "REPAIRING"):
        node.resource |= {"state": "READY", "health": "HEALTHY"}


# Google's errors when it has no hosts: code and message. Users saw each: terraform-provider-google #21243 and #16147,
# Compute Engine (HAWQ #4).
STOCKOUTS: dict[str, tuple[int, str]] = {
    "capacity": (
        catalogue.RESOURCE_EXHAUSTED,
        'There is no more capacity in the zone "{zone}"; you can try in another zone where Cloud TPU Nodes are '
        "offered (see https://cloud.google.com/tpu/docs/regions)",
    ),
    "internal": (catalogue.INTERNAL, "an internal error has occurred"),
    "resources": (
        catalogue.RESOURCE_EXHAUSTED,
        "The zone 'projects/p/zones/{zone}' does not have enough resources available to fulfill the request. Try a "
        "different zone, or try again later.",
    ),
}


def no_capacity(zone: str, wording: str = "") -> dict[str, Any]:
    """Returns the error of an operation in a zone without capacity. `wording`: a key of STOCKOUTS, "" for the first."""
    code, text = STOCKOUTS[wording or "capacity"]
    text = text.format(zone=zone)
    return {"code": code, "message": text if code == catalogue.INTERNAL else f"{text} {event_id(text)}"}


def preempt(node: Node) -> None:
    """Marks a node as preempted. The caller has checked its state, and stops its hosts."""
    node.resource["state"] = "PREEMPTED"
    node.resource.pop("health", None)


def delay(state: EmulatorState, service: str) -> float:
    """Returns for how many seconds injected faults delay each request to a service."""
    return sum(fault.seconds for fault in state.faults if fault.kind == "slow" and fault.service == service)


def find_node(state: EmulatorState, name: str) -> Node:
    """Returns the node of a short or full name. Raises ValueError when none, or several, have that name."""
    nodes = [node for node in state.nodes.values() if name in (node.name, node.short_name)]
    if len(nodes) == 1:
        return nodes[0]
    if nodes:
        raise ValueError(f"several nodes are called {name}: give one of {', '.join(node.name for node in nodes)}")
    known = ", ".join(sorted(node.short_name for node in state.nodes.values())) or "none"
    raise ValueError(f"there is no node {name!r} on this emulator; nodes: {known}")


def find_host(state: EmulatorState, name: str, worker: int) -> Host:
    """Returns the host of a node by worker index. Raises ValueError as `find_node`, and without that worker."""
    node = find_node(state, name)
    if not 0 <= worker < len(node.hosts):
        raise ValueError(f"node {node.short_name} has workers 0 to {len(node.hosts) - 1}, no worker {worker}")
    return node.hosts[worker]
