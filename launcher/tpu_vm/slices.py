"""The life of a slice: created, described, deleted, through gcloud.

`create` is idempotent: it finds what exists and goes on from there. A node that was preempted must be deleted before
its name can be used again, as the API demands. A slice may come from a request in the queue (queued.py), and may be in
one of several zones (placement.py).
"""

from __future__ import annotations

import getpass
import json
import re
from collections.abc import Callable
from typing import Any

from launcher import costs
from launcher.config import Config
from launcher.errors import CommandTimeout, LaunchError
from launcher.gcloud.calls import call_gcloud, call_gcloud_long
from launcher.gcloud.errors import Conflict, NotFound, PermissionDenied, Preempted, Stockout
from launcher.machine import Machine
from launcher.provider import SliceState
from launcher.tpu_vm import commands, placement, queued

_SECONDS = 60.0  # for one question to the API
_DELETE_MINUTES = 15.0
_POLL_SECONDS = 2.0
_FIRST_PAUSE, _LONGEST_PAUSE = 15.0, 300.0  # seconds, between rounds through zones without capacity


def owner() -> str:
    """Who creates slices here, as a label's value."""
    return re.sub(r"[^a-z0-9_-]", "-", getpass.getuser().lower())[:63]


def owner_labels(config: Config, now: float) -> dict[str, str]:
    """The labels of a slice: who made it, for which run, and (slice.expires_hours) when it should be gone, in Unix
    seconds. `now`: Unix seconds."""
    labels = {"tpu-launch": "1", "tpu-launch-owner": owner(), "tpu-launch-run": config.run_name}
    if config.slice.expires_hours is not None:
        labels["tpu-launch-expires"] = str(round(now + config.slice.expires_hours * 3600))
    return labels


def parse_state(text: str) -> SliceState:
    """The slice in the output of `describe --format=json`."""
    node: dict[str, Any] = json.loads(text)
    symptoms = [
        f"{symptom.get('symptomType')} on host {symptom.get('workerId')}: {symptom.get('details', '')}"
        for symptom in node.get("symptoms", [])
    ]
    return SliceState(
        name=node["name"].rsplit("/", 1)[-1],
        state=node.get("state", "STATE_UNSPECIFIED"),
        health=node.get("health", "HEALTH_UNSPECIFIED"),
        accelerator_type=node.get("acceleratorType", ""),
        hosts=tuple(endpoint.get("ipAddress", "") for endpoint in node.get("networkEndpoints", [])),
        detail="; ".join(filter(None, [node.get("healthDescription", ""), *symptoms])),
        created=node.get("createTime", ""),
    )


def describe(config: Config, machine: Machine) -> SliceState | None:
    """The slice, or None when it does not exist. A request that waits in the queue counts, in its own state and without
    hosts."""
    current = placement.current_zone(config)
    state = _describe_in_zone(placement.in_zone(config, current), machine)
    if state is not None or len(config.zones) == 1:
        return state
    others = [other for other in placement.in_every_zone(config) if other.zone != current]
    states = machine.tasks.map(lambda zoned: _describe_in_zone(zoned, machine), others, at_once=len(others))
    for other, state in zip(others, states, strict=True):
        if state is not None:
            placement.save_zone(config, other.zone)
            return state
    return None


def _describe_in_zone(config: Config, machine: Machine) -> SliceState | None:
    node = _describe_node(config, machine)
    if node is not None or config.slice.queued is None:
        return node
    request = queued.describe(config, machine)
    if request is None:
        return None
    # A suspended request lost its node, which is what PREEMPTED says of a node.
    state = "PREEMPTED" if request.lost else request.state
    detail = request.error or "queued resource"
    return SliceState(request.name, state, "HEALTH_UNSPECIFIED", config.slice.accelerator_type, (), detail)


def _describe_node(config: Config, machine: Machine) -> SliceState | None:
    try:
        return parse_state(call_gcloud(machine, commands.describe_command(config), timeout=_SECONDS))
    except NotFound:
        return None


def _describe_request(config: Config, machine: Machine) -> queued.Request | None:
    """The request in the queue. An account that may not look there has none there, unless the configuration uses it."""
    try:
        return queued.describe(config, machine)
    except PermissionDenied:
        if config.slice.queued is not None:
            raise
        return None


def create(config: Config, say: Callable[[str], None], machine: Machine) -> SliceState:
    """Returns the slice when it is READY: creates it when it is missing, waits when it is on its way.

    Zones without capacity are passed over; after the last one all are tried again for slice.stockout_minutes, with
    growing pauses.

    Raises:
        Conflict: the name is taken by a slice of another type.
        Stockout, QuotaExceeded, PermissionDenied, Refused: as Google says; only a stock-out is tried again.
    """
    begin, pause = machine.clock.monotonic(), _FIRST_PAUSE
    zones = placement.in_every_zone(config)
    if len(zones) > 1 and describe(config, machine) is not None:  # an existing slice comes first
        current = placement.current_zone(config)
        zones.sort(key=lambda placed: placed.zone != current)
    while True:
        for placed in zones:
            placement.save_zone(config, placed.zone)
            try:
                return _create_in_zone(placed, say, machine)
            except Stockout as error:
                stockout = error
                if len(zones) > 1:
                    say(str(error).splitlines()[0])
        wait = pause * (0.5 + machine.random.random())  # jitter: others wait for the same capacity
        left = config.slice.stockout_minutes * 60 - (machine.clock.monotonic() - begin)
        if wait > left:
            placement.forget_zone(config)
            raise stockout
        say(
            f"no capacity in {', '.join(config.zones)}: trying again in {wait:.0f} s, for {costs.duration(left)} more "
            "(slice.stockout_minutes)"
        )
        machine.clock.sleep(wait)
        pause = min(pause * 2, _LONGEST_PAUSE)


def _create_in_zone(config: Config, say: Callable[[str], None], machine: Machine) -> SliceState:
    """As `create`, in one zone and once."""
    node = _describe_node(config, machine)
    if node is not None and node.gone_for_good:
        say(f"slice {node.name} is {node.state}: deleting it, as its name can't be used before")
        _delete_in_zone(config, _describe_request(config, machine), node, say, machine)
        node = None
    if node is None:
        _request_node(config, say, machine)
        node = _describe_node(config, machine)
    node = _wait_ready(config, node, say, machine)
    _check_shape(config, node)
    return node


def _request_node(config: Config, say: Callable[[str], None], machine: Machine) -> None:
    """Asks for the node, directly or through the queue, and waits for the answer."""
    costs.check(config)
    slice_ = config.slice
    say(
        f"creating {slice_.accelerator_type} slice {slice_.name} in {config.zone} ({config.accelerator.hosts} hosts, "
        f"{slice_.capacity})"
    )
    say(costs.line(config))
    labels = owner_labels(config, machine.clock.time())
    if slice_.queued is not None:
        queued.obtain(config, labels, lambda: _describe_node(config, machine), say, machine)
    else:
        call_gcloud_long(machine, commands.create_command(config, labels), timeout=slice_.create_minutes * 60)


def _wait_ready(config: Config, node: SliceState | None, say: Callable[[str], None], machine: Machine) -> SliceState:
    """Waits until the node is READY. Raises Preempted, CommandTimeout, and LaunchError when it disappears."""
    deadline = machine.clock.monotonic() + config.slice.create_minutes * 60
    reported = ""
    while node is None or not node.ready:
        if node is None:
            raise LaunchError(
                f"slice {config.slice.name} disappeared while it was being created; see "
                f"`gcloud compute tpus operations list --zone={config.zone}`"
            )
        if node.gone_for_good:
            raise Preempted(
                f"slice {node.name} became {node.state} while it was being created; run `tpu-launch up` again"
            )
        if node.state != reported:
            say(f"slice {node.name} is {node.state}")
            reported = node.state
        if machine.clock.monotonic() > deadline:
            raise CommandTimeout(
                f"slice {node.name} is {node.state} and not READY after {config.slice.create_minutes:.0f} minutes "
                "(slice.create_minutes)"
            )
        machine.clock.sleep(_POLL_SECONDS)
        node = _describe_node(config, machine)
    return node


def _check_shape(config: Config, node: SliceState) -> None:
    """The slice is of the type that the configuration names, with all its hosts."""
    wanted = config.slice.accelerator_type
    if node.accelerator_type and node.accelerator_type != wanted:
        raise Conflict(
            f"slice {node.name} exists and is a {node.accelerator_type}, not a {wanted}: "
            "choose another slice.name, or delete it with `tpu-launch down`"
        )
    if len(node.hosts) != config.accelerator.hosts:
        raise LaunchError(
            f"slice {node.name} has {len(node.hosts)} hosts; a {wanted} has {config.accelerator.hosts}: delete and "
            "create it again"
        )


def delete(config: Config, say: Callable[[str], None], machine: Machine) -> bool:
    """Deletes the slice, in whichever zone it is, with the request that it came from, and waits until the API says that
    both are gone. Returns whether there was one.

    A request is deleted first, with force: one that was granted after somebody gave up takes its node along.
    """
    zones = placement.in_every_zone(config)

    tasks, at_once = machine.tasks, len(zones)
    # The queue is looked at also when the configuration does not use it (any more): a request would keep its quota.
    requests = tasks.submit(lambda: tasks.map(lambda zoned: _describe_request(zoned, machine), zones, at_once))
    nodes = tasks.map(lambda zoned: _describe_node(zoned, machine), zones, at_once)
    existing = [
        (placed, request, node)
        for placed, request, node in zip(zones, requests.result(), nodes, strict=True)
        if request is not None or node is not None
    ]
    for placed, request, node in existing:
        _delete_in_zone(placed, request, node, say, machine)
    placement.forget_zone(config)
    return bool(existing)


def _delete_in_zone(
    config: Config,
    request: queued.Request | None,
    node: SliceState | None,
    say: Callable[[str], None],
    machine: Machine,
) -> None:
    """Deletes what was found in one zone. Raises CommandTimeout."""
    deadline = machine.clock.monotonic() + _DELETE_MINUTES * 60
    cost = costs.since(config, node.created, machine.clock.time()) if node is not None else ""
    say(f"deleting slice {config.slice.name}{f' ({cost})' if cost else ''}")
    if request is not None:
        say(f"its queued resource is {request.state}: deleted with what belongs to it")
        queued.remove(config, machine)
        node = _describe_node(config, machine)
    while node is not None:
        try:
            if node.state != "DELETING":
                call_gcloud(machine, commands.delete_command(config), timeout=_DELETE_MINUTES * 60)
        except (NotFound, Conflict):
            pass  # gone meanwhile, or another operation is on it: the next description tells
        node = _describe_node(config, machine)
        if node is not None:
            if machine.clock.monotonic() > deadline:
                raise CommandTimeout(
                    f"slice {node.name} is {node.state} and not gone after {_DELETE_MINUTES:.0f} minutes; run "
                    "`tpu-launch down` again"
                )
            machine.clock.sleep(_POLL_SECONDS)
