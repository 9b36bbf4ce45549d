"""The slices that Google describes: their nodes and queued resources ("requests"), and the labels that tell the owner.

`creation` and `deletion` change a slice. They start from what the API says and may be repeated at any point. A slice
may come from a queued resource (queued.py) and may be in one of several zones (slice_hints.py). Its labels are written
at creation, and checked before use or deletion:

    tpu-launch=1              created by this program
    tpu-launch-owner          the user who created it
    tpu-launch-account        hash of the user's Google account; absent where gcloud has none
    tpu-launch-run            the prefix of its runs' ids
    tpu-launch-slice          slice.name: candidate bert-2 of slice bert may be named as another file's slice
    tpu-launch-expires        Unix seconds after which `gc` removes it

Without these labels nothing is used or deleted, unless the command says `--any-owner`.
"""

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from launcher.config import Config
from launcher.gcloud import Conflict, PermissionDenied, ResourceNotFound, call_gcloud
from launcher.provider import SliceState
from launcher.tpu_vm import commands, slice_hints
from launcher.workstation import Owner, Workstation

Say = Callable[[str], None]  # tells the user a line

_SECONDS, _REQUEST_SECONDS = 60.0, 120.0  # for one question to the API
LAG_SECONDS = 20.0  # the API may show a new node this late

LABEL = "tpu-launch"
OWNER, ACCOUNT, RUN, SLICE, EXPIRES = (f"{LABEL}-{name}" for name in ("owner", "account", "run", "slice", "expires"))


class NotOurs(Conflict):
    """Raised when a slice or a queued resource has our name but not our labels."""


def make_labels(config: Config, owner: Owner, now: float) -> dict[str, str]:
    """Returns the labels of a slice created at `now` (Unix seconds): tpu-launch's own, user, run, slice, a hash of the
    Google account if it is known, and with slice.expires_hours the time at which the slice expires."""
    labels = {LABEL: "1", OWNER: owner.user, RUN: config.run_name, SLICE: config.slice.name}
    if owner.account:
        labels[ACCOUNT] = owner.account
    if config.slice.expires_hours is not None:
        labels[EXPIRES] = str(round(now + config.slice.expires_hours * 3600))
    return labels


def why_not_ours(labels: Mapping[str, str], owner: Owner, *, deletion: bool = False) -> str:
    """Returns why the labels do not prove that `owner` created the slice; "" when they do. For a `deletion` a user name
    is no proof without an account: everybody is root or ubuntu on some VM."""
    if labels.get(LABEL) != "1":
        return f"tpu-launch did not create it (it has no label {LABEL}=1)"
    made_by, account = labels.get(OWNER) or "an unknown user", labels.get(ACCOUNT, "")
    if made_by != owner.user:
        return f"{made_by} created it, and you are {owner.user} (label {OWNER})"
    if account != owner.account:
        return f"another Google account than the one that gcloud uses here created it, or none (label {ACCOUNT})"
    if deletion and not account:
        return f"{made_by} without a Google account created it (no label {ACCOUNT}), which may be another {made_by}"
    return ""


def _is_of_another_file(config: Config, labels: Mapping[str, str]) -> bool:
    return labels.get(SLICE, config.slice.name) != config.slice.name


def why_not_of(config: Config, labels: Mapping[str, str], owner: Owner, *, deletion: bool = False) -> str:
    """Returns why the labels do not prove that it is the configured slice, and, unless --any-owner is set, that `owner`
    created it (`why_not_ours`); "" when they do."""
    if _is_of_another_file(config, labels):
        return f"it is slice {labels[SLICE]} of another file (label {SLICE})"
    return "" if config.any_owner else why_not_ours(labels, owner, deletion=deletion)


def require_ours(config: Config, labels: Mapping[str, str], owner: Owner, *, deletion: bool = False) -> None:
    """Raises NotOurs unless the labels prove that the slice is ours (`why_not_of`)."""
    if reason := why_not_of(config, labels, owner, deletion=deletion):
        way = "give its file" if _is_of_another_file(config, labels) else "add --any-owner"
        raise NotOurs(
            f"slice {config.slice.name} in {config.zone} is not yours: {reason}\n"
            f"  choose another slice.name; to use or delete it nevertheless, {way} to `up` or `down`"
        )


def describe(config: Config, machine: Workstation) -> SliceState | None:
    """Returns the slice, or None when it does not exist. A queued resource without a node counts, in its own state and
    without hosts. Looks for the candidate last seen (else the first); unless that slice is ours, looks for the others,
    returns one that is ours, a READY one first, and saves its candidate as last seen. If none is ours, returns what the
    first look found, perhaps another owner's slice; with slice.candidates not another file's. Raises LaunchError."""
    known = slice_hints.last_seen(config)
    current = known or config.candidates[0]
    found = _describe_in_zone(config.placed(current), machine)

    def is_ours(state: SliceState | None) -> bool:
        return state is not None and not why_not_of(config, state.labels, machine.owner)

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
    return None if found and config.slice.candidates and _is_of_another_file(config, found.labels) else found


def _describe_in_zone(config: Config, machine: Workstation) -> SliceState | None:
    """Returns the node; None without one. With slice.queued, if there is no node or Google is taking it away, returns
    the request, in its own state or as PREEMPTED if it lost its node; None if a user deleted that node. Raises
    LaunchError."""
    node = describe_node(config, machine)
    if config.slice.queued is None or (node is not None and node.state != "DELETING"):
        return node
    request = describe_request(config, machine)
    if request is None or (node is not None and not (request.lost and request.initiator == "SERVICE")):
        return node  # a user deletes it
    if request.lost and request.initiator == "USER":
        return None  # a user has deleted the node
    # A suspended request lost its node, which is what PREEMPTED says of a node.
    state = "PREEMPTED" if request.lost else request.state
    detail = request.detail or "queued resource"
    return SliceState(request.name, state, request.health, request.accelerator_type, (), detail, labels=request.labels)


def describe_node(config: Config, machine: Workstation) -> SliceState | None:
    """Returns the node of the candidate last seen, else of the first one, also if a queued resource made it or another
    user owns it; None without a node. Raises LaunchError."""
    node = read_resource(machine, commands.node_command(config, "describe", "--format=json"), _SECONDS)
    if node is None:
        return None
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


def read_resource(machine: Workstation, command: list[str], seconds: float) -> dict[str, Any] | None:
    """Returns what a describing command prints (JSON); None without the resource. Raises LaunchError, also if late."""
    try:
        found: dict[str, Any] = json.loads(call_gcloud(machine, command, timeout=seconds))
    except ResourceNotFound:
        return None
    return found


@dataclass(frozen=True)
class Request(SliceState):
    """A queued resource as the API describes it; `labels` are those of the node that it becomes, `detail` is the API's
    message about a failure. Its states: CREATING, ACCEPTED, WAITING_FOR_RESOURCES, PROVISIONING, ACTIVE, SUSPENDING,
    SUSPENDED, FAILED, DELETING."""

    initiator: str = ""  # USER or SERVICE: which of them suspended it

    @property
    def lost(self) -> bool:
        """Returns whether its node was taken away."""
        return self.state in ("SUSPENDING", "SUSPENDED")


def describe_request(config: Config, machine: Workstation) -> Request | None:
    """Returns the queued resource of this name, with the labels of its first node; None without. Raises LaunchError."""
    resource = read_resource(machine, commands.request_command(config, "describe", "--format=json"), _REQUEST_SECONDS)
    if resource is None:
        return None
    state: dict[str, Any] = resource.get("state", {})
    specs = resource.get("tpu", {}).get("nodeSpec", [])
    return Request(
        name=resource["name"].rsplit("/", 1)[-1],
        state=state.get("state", "STATE_UNSPECIFIED"),
        health="HEALTH_UNSPECIFIED",
        accelerator_type=config.slice.accelerator_type,
        hosts=(),
        detail=state.get("failedData", {}).get("error", {}).get("message", ""),
        created=resource.get("createTime", ""),
        labels=specs[0].get("node", {}).get("labels", {}) if specs else {},
        initiator=state.get("stateInitiator", ""),
    )


def find_request(config: Config, machine: Workstation) -> Request | None:
    """Returns the name's queued resource; None without, or (not with slice.queued) if denied. Raises LaunchError."""
    try:
        return describe_request(config, machine)
    except PermissionDenied:
        if config.slice.queued is not None:
            raise
        return None
