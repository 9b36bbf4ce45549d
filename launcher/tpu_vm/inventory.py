"""Everything of ours in a project: which slices there are, whose, for which run, how old, what they cost so far, and
which should be gone.

Ours is what carries the label `tpu-launch=1`, which every creation gets. `leftovers` decides what `gc` removes; it
never names anything else.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from launcher import costs
from launcher.clock import parse_time
from launcher.tpu_vm import gcloud

_SECONDS = 120.0
OURS = "tpu-launch"
# Nothing runs there any more, and it keeps its name and its quota until it is deleted.
_DEAD = frozenset(("PREEMPTED", "TERMINATED", "FAILED", "SUSPENDED"))


@dataclass(frozen=True)
class Found:
    """One slice of ours, as the API shows it."""

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
        cost = self.cost(now)
        return {
            **asdict(self),
            "age_seconds": None if self.created is None else round(now - self.created),
            "cost": None if cost is None else round(cost, 2),
            "leftover": self.why_leftover(now),
        }

    def row(self, now: float) -> list[str]:
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
    """What is asked: the nodes, and the queued resources, of one zone (or of all, `-`)."""
    ends = [f"--project={project}", f"--zone={zone}", "--quiet", "--format=json"]
    return [["gcloud", "compute", "tpus", kind, "list", *ends] for kind in ("tpu-vm", "queued-resources")]


def ours(project: str, zones: Sequence[str]) -> list[Found]:
    """All slices of ours in the zones, whoever made them. A queued resource that became a node counts as the node."""
    found: dict[tuple[str, str], Found] = {}
    for zone in zones:
        nodes, queued = (
            json.loads(gcloud.call(command, timeout=_SECONDS) or "[]") for command in list_commands(project, zone)
        )
        for each in [*map(parse_queued, queued), *map(parse_node, nodes)]:
            if each is None or each.labels.get(OURS) != "1":
                continue
            before = found.get((each.zone, each.name))
            # A dead request tells more than the node that it left behind.
            if before is None or before.state not in _DEAD:
                found[each.zone, each.name] = each
    return sorted(found.values(), key=lambda each: (each.zone, each.name))


def parse_node(node: dict[str, Any]) -> Found:
    """One entry of `tpu-vm list --format=json`."""
    parts = node["name"].split("/")
    return _found(
        parts[-1],
        parts[-3],
        "node",
        node.get("state", ""),
        node,
        node.get("schedulingConfig", {}),
        node.get("createTime", ""),
    )


def parse_queued(resource: dict[str, Any]) -> Found | None:
    """One entry of `queued-resources list --format=json`; None for one without a node of its own (multi-slice is out of
    scope)."""
    specs = resource.get("tpu", {}).get("nodeSpec", [])
    if len(specs) != 1 or "nodeId" not in specs[0]:
        return None
    parts = resource["name"].split("/")
    scheduling = {"spot": "spot" in resource, "reserved": bool(resource.get("reservationName"))}
    state = resource.get("state", {}).get("state", "")
    return _found(
        parts[-1],
        parts[-3],
        "queued resource",
        state,
        specs[0].get("node", {}),
        scheduling,
        resource.get("createTime", ""),
    )


def _found(
    name: str, zone: str, kind: str, state: str, node: dict[str, Any], scheduling: dict[str, Any], created: str
) -> Found:
    labels: dict[str, str] = node.get("labels", {})
    capacity = (
        "spot"
        if scheduling.get("spot") or scheduling.get("preemptible")
        else "reserved"
        if scheduling.get("reserved")
        else "on-demand"
    )
    expires = labels.get(f"{OURS}-expires", "")
    return Found(
        name=name,
        zone=zone,
        kind=kind,
        state=state,
        accelerator_type=node.get("acceleratorType", ""),
        capacity=capacity,
        owner=labels.get(f"{OURS}-owner", ""),
        run=labels.get(f"{OURS}-run", ""),
        created=parse_time(created),
        expires=float(expires) if expires.isdigit() else None,
        labels=labels,
        request=node.get("queuedResource", "").rsplit("/", 1)[-1],
    )


def leftovers(found: Sequence[Found], now: float, *, owner: str | None) -> list[Found]:
    """What should be gone: of one owner, or (None) of everybody who used this tool."""
    return [each for each in found if each.why_leftover(now) and owner in (None, each.owner)]


def delete_command(project: str, each: Found) -> list[str]:
    """A node that came from the queue goes with its request, which would keep the quota."""
    ends = [f"--project={project}", f"--zone={each.zone}", "--quiet"]
    if each.kind == "node" and not each.request:
        return ["gcloud", "compute", "tpus", "tpu-vm", "delete", each.name, *ends]
    return ["gcloud", "compute", "tpus", "queued-resources", "delete", each.request or each.name, *ends, "--force"]
