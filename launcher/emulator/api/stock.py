"""The stock of the emulated zones: how many slices of each type and capacity there are, and when they come and go.

`tpu-launch emulator stock FILE` enters a file like that of docs/guide/capacity.md: `seed` decides every random number,
and `speed` is how many seconds of the file pass in a second.

`slices` lists from which second on how many there are; `random` draws a number from 0 to `most` again and again. A type
that the file does not name has none. A creation beyond the stock fails with Google's error, a queued resource waits,
and when the stock falls below what is used, the newest READY spot slices are preempted. Pure functions of the state.
"""

from __future__ import annotations

import random
from typing import Annotated, Any

from pydantic import Field, model_validator

from launcher.config.sections import AcceleratorType, Capacity, Zone
from launcher.emulator.state import EmulatorState, Node
from training.yaml_file import Section

_MODELS = {"FLEX_START": "flex-start", "RESERVATION_BOUND": "calendar"}  # provisioningModel of v2alpha1 -> capacity


class RandomSection(Section):
    """A number of slices that is drawn again and again."""

    every: float = Field(gt=0)
    """Seconds between two draws."""
    most: int = Field(ge=0)
    """The largest number."""


class EntrySection(Section):
    """The stock of one type and capacity in one zone."""

    zone: Zone
    accelerator_type: AcceleratorType
    capacity: Capacity = "on-demand"
    slices: list[Annotated[list[float], Field(min_length=2, max_length=2)]] = []
    """From which second on, how many; in order."""
    random: RandomSection | None = None

    @model_validator(mode="after")
    def _one_way(self) -> EntrySection:
        """Returns the section. Raises ValueError unless it has exactly one of slices and random."""
        if bool(self.slices) == (self.random is not None):
            raise ValueError("give either slices or random")
        return self


class StockSection(Section):
    """A stock file."""

    seed: int = 0
    speed: float = Field(default=1.0, gt=0)
    stock: list[EntrySection]


def available(state: EmulatorState, zone: str, accelerator_type: str, capacity: str, now: float) -> int | None:
    """Returns how many slices of a kind exist at `now`, used ones included, 0 for one that the stock file does not
    name; None without a stock file: any number. `capacity`: on-demand, spot, reserved, flex-start or calendar."""
    if state.stock is None:
        return None
    stock = StockSection.model_validate(state.stock)
    seconds, total = (now - state.stock_since) * stock.speed, 0
    for number, entry in enumerate(stock.stock):
        if (entry.zone, entry.accelerator_type, entry.capacity) != (zone, accelerator_type, capacity):
            continue
        if entry.random is not None:
            draw = random.Random(f"{stock.seed} {number} {int(seconds // entry.random.every)}")
            total += draw.randint(0, entry.random.most)
        else:
            total += int(([0.0] + [count for begin, count in entry.slices if begin <= seconds])[-1])
    return total


def is_left(state: EmulatorState, zone: str, accelerator_type: str, capacity: str, now: float) -> bool:
    """Returns whether another slice of a kind (as for `available`) can be created at `now`."""
    total = available(state, zone, accelerator_type, capacity, now)
    return total is None or len(_used(state, zone, accelerator_type, capacity)) < total


def taken(state: EmulatorState, now: float) -> list[Node]:
    """Returns the READY spot slices that exceed the stock at `now`: in each zone, of each type, the newest ones."""
    found: list[Node] = []
    for kind in {_kind(state, node) for node in state.nodes.values()}:
        total, used = available(state, *kind, now), _used(state, *kind)
        if total is not None and kind[2] == "spot":
            ready = [node for node in used if node.state == "READY"]
            newest = sorted(ready, key=lambda node: node.resource["createTime"], reverse=True)
            found += newest[: max(0, len(used) - total)]
    return found


def capacity_of(state: EmulatorState, name: str, scheduling: dict[str, Any]) -> str:
    """Returns the capacity of the node `name`: flex-start or calendar if its queued resource asks for that, else what
    its schedulingConfig asks for: spot (preemptible too), reserved or on-demand."""
    for queued in state.queued.values():
        if queued.node == name and (model := _MODELS.get(queued.resource.get("provisioningModel", ""))):
            return model
    if scheduling.get("spot") or scheduling.get("preemptible"):
        return "spot"
    return "reserved" if scheduling.get("reserved") else "on-demand"


def _kind(state: EmulatorState, node: Node) -> tuple[str, str, str]:
    """Returns the zone, accelerator type and capacity whose stock a node takes."""
    capacity = capacity_of(state, node.name, node.resource["schedulingConfig"])
    return node.zone, str(node.resource["acceleratorType"]), capacity


def _used(state: EmulatorState, zone: str, accelerator_type: str, capacity: str) -> list[Node]:
    """Returns the nodes of a kind that take up stock: they have hosts, and are neither preempted nor being deleted."""
    return [
        node
        for node in state.nodes.values()
        if _kind(state, node) == (zone, accelerator_type, capacity)
        and node.hosts
        and node.state not in ("PREEMPTED", "TERMINATED", "DELETING")
    ]
