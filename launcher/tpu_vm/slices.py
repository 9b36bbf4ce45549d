"""The state of a slice, as gcloud describes it: its node, its queued resource, or both, in each of its zones.

`creation` and `deletion` change it. They start from what the API says and may be repeated at any point. A slice may
come from a queued resource (queued.py) and may be in one of several zones (slice_hints.py).
"""

import json
from typing import Any

from launcher.config import Config
from launcher.gcloud.calls import call_gcloud
from launcher.gcloud.errors import PermissionDenied, ResourceNotFound
from launcher.provider import SliceState
from launcher.tpu_vm import commands, ownership, queued, slice_hints
from launcher.workstation import Workstation

_SECONDS = 60.0  # for one question to the API
LAG_SECONDS = 20.0  # the API may show a new node this late


def parse_state(text: str) -> SliceState:
    """Returns the slice in the output of `describe --format=json`."""
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
        uid=node.get("id", ""),
        labels=node.get("labels", {}),
        request=node.get("queuedResource", "").rsplit("/", 1)[-1],
    )


def describe(config: Config, machine: Workstation) -> SliceState | None:
    """Returns the slice, or None when it does not exist. A queued resource without a node counts, in its own state and
    without hosts. Looks for the candidate of the last look first; of the other candidates, only a slice that is ours
    counts, a READY one before others, and its candidate is kept. Another owner's slice counts if none is ours."""
    known = slice_hints.last_seen(config)
    current = known or config.candidates[0]
    found = _describe_in_zone(config.placed(current), machine)

    def is_ours(state: SliceState | None) -> bool:
        return state is not None and (config.any_owner or not ownership.why_not_ours(state.labels, machine.owner))

    if len(config.candidates) == 1 or is_ours(found):
        if known is None:
            slice_hints.save_place(config, current)
        return found
    others = [other for other in config.candidates if other != current]
    states = machine.threads.map(
        lambda other: _describe_in_zone(config.placed(other), machine), others, at_once=len(others)
    )
    for other, state in sorted(zip(others, states, strict=True), key=lambda pair: pair[1] is None or not pair[1].ready):
        if is_ours(state):
            slice_hints.save_place(config, other)
            return state
    return found


def _describe_in_zone(config: Config, machine: Workstation) -> SliceState | None:
    """Returns the node; None without one. With slice.queued, if there is no node or Google is taking it away, returns
    the request, in its own state or as PREEMPTED if it lost its node; None if a user deleted that node."""
    node = describe_node(config, machine)
    if config.slice.queued is None or (node is not None and node.state != "DELETING"):
        return node
    request = queued.describe(config, machine)
    if request is None or (node is not None and not (request.lost and request.initiator == "SERVICE")):
        return node  # a user deletes it
    if request.lost and request.initiator == "USER":
        return None  # a user has deleted the node
    # A suspended request lost its node, which is what PREEMPTED says of a node.
    state = "PREEMPTED" if request.lost else request.state
    detail = request.error or "queued resource"
    return SliceState(
        request.name, state, "HEALTH_UNSPECIFIED", config.slice.accelerator_type, (), detail, labels=request.labels
    )


def describe_node(config: Config, machine: Workstation) -> SliceState | None:
    """Returns the node of the configuration's candidate, or None when it does not exist."""
    try:
        return parse_state(call_gcloud(machine, commands.describe_command(config), timeout=_SECONDS))
    except ResourceNotFound:
        return None


def describe_request(config: Config, machine: Workstation) -> queued.Request | None:
    """Returns the queued resource of the slice's name; None without one, or if the account may not see any and
    slice.queued is not set."""
    try:
        return queued.describe(config, machine)
    except PermissionDenied:
        if config.slice.queued is not None:
            raise
        return None
