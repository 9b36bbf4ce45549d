"""The slices of tpu-launch in a project: owner, run, age, cost so far, and which of them are leftovers.

A slice of tpu-launch carries the label `tpu-launch=1` (slices.py). `find_leftovers` decides what `gc` removes.
`remove` describes a slice again before it deletes it: a list may be minutes old, and the name may belong to another
slice by now, or to the same one with a later expiry. Between that description and the deletion lies one call of gcloud
(about a second); the API has no condition on a deletion.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from launcher import costs
from launcher.errors import LaunchError
from launcher.gcloud import DELETE_SECONDS, Look, Retry, call_gcloud, delete_until_gone
from launcher.tpu_vm.commands import tpus_command
from launcher.tpu_vm.slices import ACCOUNT, EXPIRES, LABEL, OWNER, RUN, read_resource, why_not_ours
from launcher.workstation import Owner, Workstation
from training.machine import parse_time

_SECONDS = 120.0
_FRESH_SECONDS = 60.0  # between the first description of a slice and its deletion
# Nothing runs there any more, and the name and the quota stay taken until the deletion.
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
        """Returns the dollars from its creation to `now` (Unix seconds) at list prices, whatever its state; None if
        unknown, 0 for a queued resource."""
        if self.kind != "node":
            return 0.0
        if self.created is None:
            return None
        return costs.so_far(self.accelerator_type, self.zone, self.capacity, now - self.created)

    def why_leftover(self, now: float) -> str:
        """Returns why `gc` removes it (dead, or expired); "" when it does not. `now`: Unix seconds."""
        if self.state == "DELETING":
            return ""
        if self.state in _DEAD:
            return f"is {self.state}"
        if self.expires is not None and self.expires < now:
            return f"expired {costs.duration(now - self.expires)} ago"
        return ""

    def as_json(self, now: float) -> dict[str, Any]:
        """Returns the fields of `tpu-launch list --json`. `now`: Unix seconds."""
        cost = self.cost(now)
        return {
            **asdict(self),
            "age_seconds": None if self.created is None else round(now - self.created),
            "cost": None if cost is None else round(cost, 2),
            "leftover": self.why_leftover(now),
        }

    def row(self, now: float) -> list[str]:
        """Returns its texts for a table with the headings COLUMNS, in that order. `now`: Unix seconds."""
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


@dataclass(frozen=True)
class Listing:
    """The slices found, and the errors of zones that could not be listed."""

    slices: list[OwnedSlice]
    failures: Mapping[str, LaunchError]  # by zone


def list_owned(project: str, zones: Sequence[str], machine: Workstation) -> Listing:
    """Returns tpu-launch's slices of all owners in the zones (`-`: all), by zone and name, and the errors of zones that
    can't be listed. A queued resource with a node is listed as the node; a dead one as itself, beside a node of its
    name that did not come from it."""
    owned: dict[tuple[str, str, bool], OwnedSlice] = {}
    failures: dict[str, LaunchError] = {}
    for zone in zones:
        try:
            nodes, queued = (
                json.loads(call_gcloud(machine, [*command, "--format=json"], timeout=_SECONDS) or "[]")
                for command in (tpus_command(project, zone, kind, "list") for kind in ("tpu-vm", "queued-resources"))
            )
        except LaunchError as error:
            failures[zone] = error
            continue
        for slice_ in [*map(parse_queued, queued), *map(parse_node, nodes)]:
            if slice_ is None or slice_.labels.get(LABEL) != "1":
                continue
            known = owned.get((slice_.zone, slice_.name, False))
            is_dead = known is not None and known.state in _DEAD
            if not is_dead or slice_.request != slice_.name:
                owned[slice_.zone, slice_.name, is_dead] = slice_
    return Listing(sorted(owned.values(), key=lambda slice_: (slice_.zone, slice_.name)), failures)


def parse_node(node: dict[str, Any]) -> OwnedSlice:
    """Returns the slice in one entry of `tpu-vm list --format=json`."""
    return _make("node", node, node.get("state", ""), node, node.get("schedulingConfig", {}))


def parse_queued(resource: dict[str, Any]) -> OwnedSlice | None:
    """Returns the slice in one entry of `queued-resources list --format=json`; None unless it is for one node."""
    specs = resource.get("tpu", {}).get("nodeSpec", [])
    if len(specs) != 1 or "nodeId" not in specs[0]:
        return None
    scheduling = {"spot": "spot" in resource, "reserved": bool(resource.get("reservationName"))}
    state = resource.get("state", {}).get("state", "")
    return _make("queued resource", resource, state, specs[0].get("node", {}), scheduling)


def _make(
    kind: str, resource: dict[str, Any], state: str, node: dict[str, Any], scheduling: dict[str, Any]
) -> OwnedSlice:
    """Builds a slice of `kind` ("node" or "queued resource") from a resource of the API and the `node` that it is or
    becomes; `scheduling`: which of "spot", "preemptible" and "reserved" it is."""
    *_, zone, _, name = resource["name"].split("/")
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
        created=parse_time(resource.get("createTime", "")),
        expires=float(expires) if expires.isdigit() else None,
        labels=labels,
        request=node.get("queuedResource", "").rsplit("/", 1)[-1],
        uid=node.get("id", ""),
    )


def find_leftovers(slices: Sequence[OwnedSlice], now: float, *, owner: Owner | None) -> list[OwnedSlice]:
    """Returns the slices of `owner` (None: of all owners) that are dead, or expired at `now` (Unix seconds)."""
    return [
        slice_
        for slice_ in slices
        if slice_.why_leftover(now) and (owner is None or not why_not_ours(slice_.labels, owner))
    ]


def delete_command(project: str, slice_: OwnedSlice) -> list[str]:
    """Returns the command that deletes a slice; a node from the queue with its request, which would keep the quota."""
    if slice_.kind == "node" and not slice_.request:
        return tpus_command(project, slice_.zone, "tpu-vm", "delete", slice_.name)
    return [*tpus_command(project, slice_.zone, "queued-resources", "delete", slice_.request or slice_.name), "--force"]


def remove(project: str, leftover: OwnedSlice, say: Callable[[str], None], machine: Workstation) -> str:
    """Deletes a listed leftover, if the slice of its name is still the same and a leftover. Returns "deleted", "gone
    already", or "left alone: " and why. Raises LaunchError if it is not described or deleted within 15 minutes."""
    deadline = machine.clock.monotonic() + DELETE_SECONDS
    retry = Retry(machine, say, f"{leftover.kind} {leftover.name}")
    requested, outcome = False, "gone already"

    def describe(kind: str, name: str) -> OwnedSlice | None:
        """Returns the node or request of this name in the leftover's zone; None without one."""
        api, parse = ("tpu-vm", parse_node) if kind == "node" else ("queued-resources", parse_queued)
        command = [*tpus_command(project, leftover.zone, api, "describe", name), "--format=json"]
        found = retry.call(lambda: read_resource(machine, command, _SECONDS), deadline)
        return None if found is None else parse(found)

    def look() -> Look | None:
        """Returns the leftover's state and its deletion; None, and sets `outcome`, when nothing is to be deleted."""
        nonlocal requested, outcome
        began, is_node = machine.clock.monotonic(), leftover.kind == "node"
        request = describe("queued resource", leftover.request) if is_node and leftover.request else None
        # A deletion with force would take along the node of a request's name.
        node = None if is_node else describe("node", leftover.name)
        current = describe(leftover.kind, leftover.name)
        if current is None or (requested and (_is_another(leftover, current) or current.state == "DELETING")):
            return None
        if reason := _why_changed(leftover, current, machine.clock.time()):
            outcome = f"left alone: {reason}"
            return None
        if node is not None and node.request != leftover.name:
            outcome = "left alone: the slice of its name did not come from it; `tpu-launch down` deletes both"
            return None
        description = f"{current.kind} {current.name} is {current.state}"
        if machine.clock.monotonic() - began > _FRESH_SECONDS:
            return description, None  # the first description may be out of date
        requested, outcome = True, "deleted"
        is_its_own = request is not None and not _changed_labels(leftover, request)
        return description, delete_command(project, replace(current, request=leftover.request if is_its_own else ""))

    def on_refusal() -> None:
        """Lets the next look judge as the first: another command may be deleting it."""
        nonlocal requested, outcome
        requested, outcome = False, "gone already"

    delete_until_gone(machine, say, look, deadline, on_refusal)
    return outcome


def _is_another(listed: OwnedSlice, current: OwnedSlice) -> bool:
    """Returns whether the slice was recreated under the listed name. A queued resource has no uid."""
    return (listed.uid, listed.created) != (current.uid, current.created)


def _changed_labels(listed: OwnedSlice, current: OwnedSlice) -> list[str]:
    """Returns which labels that tell the owner differ."""
    return [label for label in (LABEL, OWNER, ACCOUNT) if listed.labels.get(label) != current.labels.get(label)]


def _why_changed(listed: OwnedSlice, current: OwnedSlice, now: float) -> str:
    """Returns why the slice of the listed name must not be deleted now; "" when nothing changed since the list."""
    if _is_another(listed, current):
        return "it was recreated since it was listed"
    if changed := _changed_labels(listed, current):
        return f"its label {changed[0]} changed since it was listed"
    if current.state == "DELETING":
        return "it is being deleted"
    return "" if current.why_leftover(now) else f"it is {current.state} and no leftover any more"
