"""The slices of tpu-launch in a project: whose they are, for which run, how old, what they cost so far, and which of
them should be gone.

A slice of tpu-launch carries the label `tpu-launch=1`, which every creation gets. `find_leftovers` decides what `gc`
removes; it never names anything else.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from launcher import costs
from launcher.clock import parse_time
from launcher.gcloud.calls import call_gcloud
from launcher.machine import Machine

_SECONDS = 120.0
LABEL = "tpu-launch"
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


def list_owned(project: str, zones: Sequence[str], machine: Machine) -> list[OwnedSlice]:
    """All slices of tpu-launch in the zones, whoever made them.

    A queued resource that became a node counts as the node, unless it is dead: then it keeps the quota.
    """
    owned: dict[tuple[str, str], OwnedSlice] = {}
    for zone in zones:
        nodes, queued = (
            json.loads(call_gcloud(machine, command, timeout=_SECONDS) or "[]")
            for command in list_commands(project, zone)
        )
        for slice_ in [*map(parse_queued, queued), *map(parse_node, nodes)]:
            if slice_ is None or slice_.labels.get(LABEL) != "1":
                continue
            known = owned.get((slice_.zone, slice_.name))
            if known is None or known.state not in _DEAD:
                owned[slice_.zone, slice_.name] = slice_
    return sorted(owned.values(), key=lambda slice_: (slice_.zone, slice_.name))


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
    expires = labels.get(f"{LABEL}-expires", "")
    return OwnedSlice(
        name=name,
        zone=zone,
        kind=kind,
        state=state,
        accelerator_type=node.get("acceleratorType", ""),
        capacity=capacity,
        owner=labels.get(f"{LABEL}-owner", ""),
        run=labels.get(f"{LABEL}-run", ""),
        created=parse_time(created),
        expires=float(expires) if expires.isdigit() else None,
        labels=labels,
        request=node.get("queuedResource", "").rsplit("/", 1)[-1],
    )


def find_leftovers(slices: Sequence[OwnedSlice], now: float, *, owner: str | None) -> list[OwnedSlice]:
    """The slices that should be gone: those of one owner, or (None) of everybody who uses this tool."""
    return [slice_ for slice_ in slices if slice_.why_leftover(now) and owner in (None, slice_.owner)]


def delete_command(project: str, slice_: OwnedSlice) -> list[str]:
    """Deletes a slice. A node that came from the queue goes with its request, which would keep the quota."""
    ends = [f"--project={project}", f"--zone={slice_.zone}", "--quiet"]
    if slice_.kind == "node" and not slice_.request:
        return ["gcloud", "compute", "tpus", "tpu-vm", "delete", slice_.name, *ends]
    name = slice_.request or slice_.name
    return ["gcloud", "compute", "tpus", "queued-resources", "delete", name, *ends, "--force"]
