"""The slices of tpu-launch in a project: whose they are, for which run, how old, what they cost so far, and which of
them should be gone.

A slice of tpu-launch carries the label `tpu-launch=1`, which every creation gets (ownership.py). `find_leftovers`
decides what `gc` removes; it never names anything else. `remove` describes a slice again before it deletes it: a list
may be minutes old, and what has the name now may be another slice, or the same one that was given more time. Between
that description and the deletion lies one call of gcloud (about a second); the API has no condition on a deletion.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from launcher import costs
from launcher.errors import CommandTimeout, LaunchError
from launcher.gcloud.calls import Patience, call_gcloud, try_deletion
from launcher.gcloud.errors import NotFound
from launcher.owner import Owner
from launcher.tpu_vm.ownership import ACCOUNT, EXPIRES, LABEL, OWNER, RUN, why_not_ours
from launcher.workstation import Workstation
from training.machine.clock import parse_time

_SECONDS = 120.0
_DELETE_SECONDS = 900.0
_POLL_SECONDS = 5.0
_FRESH_SECONDS = 60.0  # between the first look at something and its deletion
# Nothing runs there any more, and it keeps its name and its quota until it is deleted.
_DEAD = frozenset(("PREEMPTED", "TERMINATED", "FAILED", "SUSPENDED"))


@dataclass(frozen=True)
class OwnedSlice:
    """One slice of tpu-launch, as the API shows it."""

    name: str
    zone: str
    kind: str  # "node" or "queued resource"
    state: str
    accelerator_type: str
    capacity: str  # as slice.capacity
    owner: str
    run: str
    created: float | None  # Unix seconds
    expires: float | None
    labels: dict[str, str]
    request: str = ""  # the queued resource that a node came from
    uid: str = ""  # the API's own number of a node: another one of the same name has another

    def cost(self, now: float) -> float | None:
        """Dollars so far; None when unknown, 0 for a request that holds nothing."""
        if self.kind != "node":
            return 0.0
        return (
            None
            if self.created is None
            else costs.so_far(self.accelerator_type, self.zone, self.capacity, now - self.created)
        )

    def why_leftover(self, now: float) -> str:
        """Why `gc` would remove it; empty when it would not."""
        if self.state == "DELETING":
            return ""
        if self.state in _DEAD:
            return f"is {self.state}"
        if self.expires is not None and self.expires < now:
            return f"expired {costs.duration(now - self.expires)} ago"
        return ""

    def as_json(self, now: float) -> dict[str, Any]:
        """The fields of `tpu-launch ls --json`. `now`: Unix seconds."""
        cost = self.cost(now)
        return {
            **asdict(self),
            "age_seconds": None if self.created is None else round(now - self.created),
            "cost": None if cost is None else round(cost, 2),
            "leftover": self.why_leftover(now),
        }

    def row(self, now: float) -> list[str]:
        """The cells below COLUMNS."""
        cost = self.cost(now)
        expires = "never" if self.expires is None else costs.duration(self.expires - now)
        if self.expires is not None and self.expires < now:
            expires = f"{expires} ago"
        return [
            self.name,
            self.zone,
            self.state if self.kind == "node" else f"{self.state} (queued)",
            f"{self.accelerator_type} {self.capacity}",
            self.owner,
            self.run,
            "" if self.created is None else costs.duration(now - self.created),
            "unknown" if cost is None else f"${cost:.2f}",
            expires,
        ]


COLUMNS = ["slice", "zone", "state", "type", "owner", "run", "age", "cost", "expires"]


def list_commands(project: str, zone: str) -> list[list[str]]:
    """The commands that list the nodes and the queued resources of one zone (or of all, `-`)."""
    ends = [f"--project={project}", f"--zone={zone}", "--quiet", "--format=json"]
    return [["gcloud", "compute", "tpus", kind, "list", *ends] for kind in ("tpu-vm", "queued-resources")]


@dataclass(frozen=True)
class Listing:
    """What was listed, and the zones that could not be."""

    slices: list[OwnedSlice]
    failures: Mapping[str, LaunchError]


def list_owned(project: str, zones: Sequence[str], machine: Workstation) -> Listing:
    """All slices of tpu-launch in the zones, whoever made them; each zone by itself.

    A queued resource that became a node counts as the node, unless it is dead: then it keeps the quota.
    """
    owned: dict[tuple[str, str], OwnedSlice] = {}
    failures: dict[str, LaunchError] = {}
    for zone in zones:
        try:
            nodes, queued = (
                json.loads(call_gcloud(machine, command, timeout=_SECONDS) or "[]")
                for command in list_commands(project, zone)
            )
        except LaunchError as error:
            failures[zone] = error
            continue
        for slice_ in [*map(parse_queued, queued), *map(parse_node, nodes)]:
            if slice_ is None or slice_.labels.get(LABEL) != "1":
                continue
            known = owned.get((slice_.zone, slice_.name))
            if known is None or known.state not in _DEAD:
                owned[slice_.zone, slice_.name] = slice_
    return Listing(sorted(owned.values(), key=lambda slice_: (slice_.zone, slice_.name)), failures)


def parse_node(node: dict[str, Any]) -> OwnedSlice:
    """One entry of `tpu-vm list --format=json`."""
    parts = node["name"].split("/")
    return _make(
        parts[-1],
        parts[-3],
        "node",
        node.get("state", ""),
        node,
        node.get("schedulingConfig", {}),
        node.get("createTime", ""),
    )


def parse_queued(resource: dict[str, Any]) -> OwnedSlice | None:
    """One entry of `queued-resources list --format=json`; None for one without a node of its own (multi-slice is out of
    scope)."""
    specs = resource.get("tpu", {}).get("nodeSpec", [])
    if len(specs) != 1 or "nodeId" not in specs[0]:
        return None
    parts = resource["name"].split("/")
    scheduling = {"spot": "spot" in resource, "reserved": bool(resource.get("reservationName"))}
    state = resource.get("state", {}).get("state", "")
    return _make(
        parts[-1],
        parts[-3],
        "queued resource",
        state,
        specs[0].get("node", {}),
        scheduling,
        resource.get("createTime", ""),
    )


def _make(
    name: str, zone: str, kind: str, state: str, node: dict[str, Any], scheduling: dict[str, Any], created: str
) -> OwnedSlice:
    labels: dict[str, str] = node.get("labels", {})
    if scheduling.get("spot") or scheduling.get("preemptible"):
        capacity = "spot"
    else:
        capacity = "reserved" if scheduling.get("reserved") else "on-demand"
    expires = labels.get(EXPIRES, "")
    return OwnedSlice(
        name=name,
        zone=zone,
        kind=kind,
        state=state,
        accelerator_type=node.get("acceleratorType", ""),
        capacity=capacity,
        owner=labels.get(OWNER, ""),
        run=labels.get(RUN, ""),
        created=parse_time(created),
        expires=float(expires) if expires.isdigit() else None,
        labels=labels,
        request=node.get("queuedResource", "").rsplit("/", 1)[-1],
        uid=node.get("id", ""),
    )


def find_leftovers(slices: Sequence[OwnedSlice], now: float, *, owner: Owner | None) -> list[OwnedSlice]:
    """The slices that should be gone: those of one owner, or (None) of everybody who uses this tool. One without an
    owner's label (of an early version) is nobody's in particular."""
    return [
        slice_
        for slice_ in slices
        if slice_.why_leftover(now) and (owner is None or (slice_.owner and not why_not_ours(slice_.labels, owner)))
    ]


def delete_command(project: str, slice_: OwnedSlice) -> list[str]:
    """Deletes a slice. A node that came from the queue goes with its request, which would keep the quota."""
    if slice_.kind == "node" and not slice_.request:
        return _command(project, slice_.zone, "tpu-vm", "delete", slice_.name)
    return [*_command(project, slice_.zone, "queued-resources", "delete", slice_.request or slice_.name), "--force"]


def _command(project: str, zone: str, kind: str, verb: str, name: str) -> list[str]:
    ends = [f"--project={project}", f"--zone={zone}", "--quiet"]
    return ["gcloud", "compute", "tpus", kind, verb, name, *ends]


def remove(project: str, leftover: OwnedSlice, say: Callable[[str], None], machine: Workstation) -> str:
    """Deletes a leftover, if what has its name now is what was listed, and is still a leftover.

    Args:
        project: the leftover's.
        leftover: as it was listed.
        say: is given lines for a person.
        machine: asks gcloud, and waits.

    Returns:
        What became of it: "deleted", "gone already", or "left alone: " and why.

    Raises:
        LaunchError: it could not be described or deleted within 15 minutes.
    """
    deadline = machine.clock.monotonic() + _DELETE_SECONDS
    patience = Patience(machine, say, f"{leftover.kind} {leftover.name}")
    asked, reported = False, ""
    while True:
        began = machine.clock.monotonic()
        request = _request_of(project, leftover, patience, machine, deadline)
        under = _node_under(project, leftover, patience, machine, deadline)
        current = patience.ask(lambda: _describe(project, leftover, machine), deadline)
        if current is None or (asked and current.uid != leftover.uid):
            return "deleted" if asked else "gone already"
        if asked and current.state == "DELETING":
            return "deleted"
        if reason := _why_changed(leftover, current, machine.clock.time()):
            return f"left alone: {reason}"
        if under is not None and under.request != leftover.name:  # a deletion with force might take it along
            return "left alone: the slice of its name did not come from it; `tpu-launch down` deletes both"
        if machine.clock.monotonic() > deadline:
            raise CommandTimeout(f"{leftover.name} could not be deleted within {_DELETE_SECONDS / 60:.0f} minutes")
        if machine.clock.monotonic() - began > _FRESH_SECONDS:
            continue  # what was seen first may not be so any more
        asked = True
        doomed = replace(current, request=request.name if request is not None else "")
        problem = try_deletion(machine, delete_command(project, doomed), timeout=_DELETE_SECONDS)
        if problem is None:
            return "deleted"
        text = str(problem).splitlines()[0]
        if text != reported:
            say(f"{leftover.name}: {text}; looking again")
        reported = text
        machine.clock.sleep(_POLL_SECONDS)


def _describe(project: str, listed: OwnedSlice, machine: Workstation) -> OwnedSlice | None:
    """What has the name of a listed node or request now."""
    kind = "tpu-vm" if listed.kind == "node" else "queued-resources"
    command = [*_command(project, listed.zone, kind, "describe", listed.name), "--format=json"]
    try:
        resource = json.loads(call_gcloud(machine, command, timeout=_SECONDS))
    except NotFound:
        return None
    return parse_node(resource) if listed.kind == "node" else parse_queued(resource)


def _why_changed(listed: OwnedSlice, current: OwnedSlice, now: float) -> str:
    """Why what has the name now must not be deleted although the list said so; empty when nothing changed."""
    if (listed.uid, listed.created) != (current.uid, current.created):
        return "it was made anew since it was listed"
    for label in (LABEL, OWNER, ACCOUNT):
        if listed.labels.get(label) != current.labels.get(label):
            return f"its label {label} changed since it was listed"
    if current.state == "DELETING":
        return "it is being deleted"
    return "" if current.why_leftover(now) else f"it is {current.state} and no leftover any more"


def _request_of(
    project: str, node: OwnedSlice, patience: Patience, machine: Workstation, deadline: float
) -> OwnedSlice | None:
    """The request that goes with a node: the one that it came from, if that is there and carries the same labels."""
    if node.kind != "node" or not node.request:
        return None
    listed = replace(node, kind="queued resource", name=node.request)
    request = patience.ask(lambda: _describe(project, listed, machine), deadline)
    same = request is not None and all(
        request.labels.get(key) == node.labels.get(key) for key in (LABEL, OWNER, ACCOUNT)
    )
    return request if same else None


def _node_under(
    project: str, request: OwnedSlice, patience: Patience, machine: Workstation, deadline: float
) -> OwnedSlice | None:
    """The node that has a request's name."""
    if request.kind == "node":
        return None
    return patience.ask(lambda: _describe(project, replace(request, kind="node"), machine), deadline)
