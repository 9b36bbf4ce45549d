"""Google, simulated: the emulator's Cloud TPU API over a virtual clock, with simulated hosts, owners and faults.

The API answers calls and ends operations as in the emulator. Here operations end by timers, faults of the simulated run
become faults of the API, and lists may be old.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from launcher.costs import per_hour
from launcher.emulator import faults
from launcher.emulator.api import nodes as tpu_api
from launcher.emulator.api import queued_resources
from launcher.emulator.state import EmulatorState, Fault, Node, Operation, QueuedResource
from launcher.tpu_vm.slices import EXPIRES
from tests.gcloud_commands import Command
from tests.simulation.launcher.hosts import EPOCH, Host
from tests.simulation.launcher.jobs import SUPERVISORS
from tests.simulation.scheduler import Task

if TYPE_CHECKING:
    from tests.simulation.launcher.world import World

_SLOW_CREATION = 2400.0  # seconds: longer than gcloud waits
_OLDEST_DESCRIPTION = 4.0  # seconds
_BETWEEN_HIDDEN = 120.0  # seconds between two descriptions that do not show what is there; a retry takes up to 90
_WORDINGS = tuple(faults.STOCKOUTS)


@dataclass(eq=False)
class Owned:
    """A node or a queued resource of the API, with what only the simulation knows of it."""

    made: Any  # the API's own object
    creator: str  # the user whose command requested it
    by: Any  # the command that requested it

    def __repr__(self) -> str:
        return f"{type(self).__name__.lower()} {self.name} ({self.state})"

    @property
    def name(self) -> str:
        return str(self.made.name.rpartition("/")[2])

    @property
    def state(self) -> str:
        return str(self.made.state)


class Slice(Owned):
    """A node."""

    deleting = False
    ready_at = 0.0
    gone_at: float | None = None
    used_as = ""  # its last state before DELETING

    def __init__(self, node: Node, creator: str, by: object) -> None:
        super().__init__(node, creator, by)
        self.node, self.hosts = node, list[Host]()

    @property
    def expires(self) -> float | None:
        """Returns the date after which `gc` deletes it, in Unix seconds; None: never."""
        label = self.node.resource.get("labels", {}).get(EXPIRES, "")
        return float(label) if label else None


class Request(Owned):
    """A queued resource."""

    deleter = ""  # the user who deleted it
    deleted_by: object = None


class Google:
    """All zones of all projects."""

    def __init__(self, world: World) -> None:
        self.world, self.scheduler, self.rng = world, world.scheduler, world.rng
        self.state = EmulatorState("5eed", 0, "", "", create_seconds=0.0, update_seconds=0.0, subnet="10.0.0.0/16")
        self.slices: dict[str, Slice] = {}  # by the API's full names, like `requests`
        self.requests: dict[str, Request] = {}
        self._lists: list[tuple[float, EmulatorState]] | None = None  # old states, where lists may be old
        if any(fault.kind in ("stale", "old describe") for fault in world.faults):
            self._lists = []
        self._hidden_until = 0.0
        self._made = 0  # slices so far
        self.slowest_creation = 0.0  # seconds
        self._scheduled: set[str] = set()  # operations with a timer
        self._cancelled: set[str] = set()
        self._waiters: dict[str, dict[Task, None]] = {}  # by operation
        self._advancing = False

    @property
    def _now(self) -> float:
        return self.scheduler.now + EPOCH

    # -- calls --------------------------------------------------------------------------------------------------------

    def call(self, command: Command, user: str, by: object = None) -> dict[str, Any]:
        """Answers a command's call, subject to faults. Raises ApiError."""
        if command.verb == "list":
            return command.call(self._listed(), self._now)
        if command.verb == "describe":
            return command.call(self._described(by), self._now)
        if not command.changes:
            return command.call(self.state, self._now)
        if self.world.api_fault("busy") is not None:
            self.state.faults.append(Fault("busy", "tpu", left=1))
        self._draw(creates=(command.group, command.verb) == ("tpu-vm", "create"), zone=command.zone)
        if any(fault.kind == "quota" for fault in self.state.faults):
            getattr(by, "refusals", set()).add("quota")
        try:
            answer = command.call(self.state, self._now)
        finally:
            self.state.faults.clear()
        if command.verb == "delete" and command.group == "queued-resources":
            request = self.requests[command.full_name]
            request.deleter, request.deleted_by = user, by
            self.world.request_deleted(request, user)
        self._follow(user, by)
        return answer

    def wait(self, name: str, seconds: float) -> Operation:
        """Waits until an operation has ended, for so many seconds at most."""
        operation, deadline = self.state.operations[name], self.scheduler.now + seconds
        while not operation.done and self.scheduler.now < deadline:
            self.scheduler.wait(self._waiters.setdefault(name, {}), deadline - self.scheduler.now, f"operation {name}")
        return operation

    def slice_of(self, command: Command) -> Slice | None:
        return self.slices.get(f"{command.parent}/nodes/{command.name}")

    def _draw(self, *, creates: bool, zone: str = "") -> None:
        """Draws how long operations take, and whether a creation finds no capacity: in one zone of a file or in all."""
        self.state.update_seconds = self.rng.uniform(1.0, 20.0)
        seconds = self.rng.choice((self.rng.uniform(2.0, 12.0), self.rng.uniform(5.0, 60.0)))
        if self.rng.random() < 0.01:
            seconds = _SLOW_CREATION
        stockout = self.world.api_fault("stockout") if creates else None
        places = self.world.config.zones
        if stockout is not None and zone in places:
            stockout = stockout if stockout.number % (len(places) + 1) in (0, 1 + places.index(zone)) else None
        if stockout is not None:
            wording = _WORDINGS[stockout.number % len(_WORDINGS)]
            self.state.faults.append(Fault("stockout", "tpu", left=1, wording=wording))
            seconds = min(seconds, 15.0)
        elif creates and self.world.api_fault("quota") is not None:
            self.state.faults.append(Fault("quota", "tpu", left=1))
        self.state.create_seconds = seconds
        self.slowest_creation = max(self.slowest_creation, seconds)

    def _listed(self) -> EmulatorState:
        """Returns the state that a list shows now: the current one, or an old one."""
        if self._lists is None or self.world.api_fault("stale") is None:
            return self.state
        return self._state_of(self.scheduler.now - self.rng.uniform(20.0, 300.0))

    def _described(self, by: object) -> EmulatorState:
        """Returns the state that a description shows: of now, of seconds ago, or rarely none, as a lagging replica."""
        fault = self.world.api_fault("old describe") if self._lists is not None else None
        if fault is None:
            return self.state
        if fault.number % 2 and getattr(by, "name", "") in ("up", *SUPERVISORS, "down"):
            if self.scheduler.now < self._hidden_until:
                return self.state
            self._hidden_until = self.scheduler.now + _BETWEEN_HIDDEN
            return self._state_of(-1.0)
        return self._state_of(self.scheduler.now - self.rng.uniform(0.0, _OLDEST_DESCRIPTION))

    def _state_of(self, until: float) -> EmulatorState:
        """Returns the state of an earlier moment."""
        old = [state for at, state in self._lists or () if at <= until]
        return old[-1] if old else EmulatorState("", 0, "", "", 0.0, 0.0)

    # -- what follows from a change -----------------------------------------------------------------------------------

    def _follow(self, user: str = "Google", by: object = None) -> None:
        """Brings slices, requests and timers up to date with the API's state, which `user` has changed."""
        for name, queued in self.state.queued.items():
            if name not in self.requests or self.requests[name].made is not queued:
                self.requests[name] = Request(queued, user, by)
                self.world.note(f"Google accepts request {self.requests[name].name} of {user}")
                self.world.reached("request")
        for name, node in self.state.nodes.items():
            if name not in self.slices or self.slices[name].node is not node:
                self._add_slice(name, node, user, by)
            if node.state != "DELETING":
                self.slices[name].used_as = node.state
            if node.state == "STOPPING":
                for host in self.slices[name].hosts:
                    host.die(for_good=False)
            elif node.state == "DELETING" and not self.slices[name].deleting:
                self._begin_deletion(self.slices[name], user, by)
        for name in [name for name in self.slices if name not in self.state.nodes]:
            self.slices[name].gone_at = self.scheduler.now
            self.world.note(f"node {self.slices.pop(name).name} is gone")
        for name in [name for name in self.requests if name not in self.state.queued]:
            self.world.note(f"request {self.requests.pop(name).name} is gone")
        self._check_price()
        for operation in self.state.operations.values():
            if operation.done:
                self.scheduler.wake_all(self._waiters.pop(operation.name, {}))
            elif "/nodes/" in operation.target:
                self._schedule(operation)
        if self._lists is not None:
            shown = {"nodes": self.state.nodes, "queued": self.state.queued}
            self._lists.append((self.scheduler.now, EmulatorState("", 0, "", "", 0.0, 0.0, **copy.deepcopy(shown))))
        self._advance_later()

    def _check_price(self) -> None:
        """Checks that what ann may be granted now costs no more together than slice.price_limit."""
        owned = [*self.requests.items(), *self.slices.items()]
        owned = [(name, each) for name, each in owned if each.by is not None and each.creator == "ann"]
        asked = {}  # a request and its node are one
        for name, each in [(name, each) for name, each in owned if each.state != "DELETING"]:
            node = each.node.resource if isinstance(each, Slice) else each.made.resource["tpu"]["nodeSpec"][0]["node"]
            spot = "spot" in (node.get("schedulingConfig", {}) if isinstance(each, Slice) else each.made.resource)
            zone = name.split("/")[3]
            asked[zone, name.rpartition("/")[2]] = node["acceleratorType"], zone, "spot" if spot else "on-demand"
        limit, total = self.world.config.slice.price_limit, sum(per_hour(*each) or 0.0 for each in asked.values())
        if limit is not None and total > limit + 1e-6:
            self.world.break_promise("never above the price limit", f"{asked}: ${total:.2f} an hour")

    def _add_slice(self, name: str, node: Node, user: str, by: object) -> None:
        if (request := self.requests.get(node.resource.get("queuedResource", ""))) is not None:
            user, by = request.creator, request.by
        self.slices[name] = Slice(node, user, by)
        self.world.note(f"Google creates node {node.short_name} in {node.zone} for {user}")
        self.world.node_created(self.slices[name], by)

    def _begin_deletion(self, slice_: Slice, user: str, by: object) -> None:
        slice_.deleting = True
        request = self.requests.get(slice_.node.resource.get("queuedResource", ""))
        if request is not None and request.deleter:
            user, by = request.deleter, request.deleted_by
        if user != "Google":
            self.world.node_deleted(slice_, user, by)
        for host in slice_.hosts:
            host.die(for_good=True)

    def _schedule(self, operation: Operation) -> None:
        if operation.name not in self._scheduled:
            self._scheduled.add(operation.name)
            self._later(operation.ends_at - self._now, lambda: self._finish(operation))
        if operation.cancelled and operation.name not in self._cancelled:
            self._cancelled.add(operation.name)
            self._later(self.rng.uniform(0.2, 3.0), lambda: self._finish(operation))

    def _finish(self, operation: Operation) -> None:
        """Ends an operation. A deletion waits for the end of the creation that it cancels, as in the emulator."""
        creations = [other for other in self.state.operations.values() if other.verb == "create" and not other.done]
        if operation.verb == "delete" and any(other.target == operation.target for other in creations):
            self._later(1.0, lambda: self._finish(operation))
            return
        if operation.done:
            return
        slice_ = self.slices.get(operation.target)  # None: it was deleted meanwhile
        tpu_api.finish_operation(self.state, operation, self._now)
        self.world.note(f"{operation.verb} of {operation.target} ends {operation.error or 'well'}")
        if operation.verb == "create" and operation.error is None and slice_ is not None:
            self._boot(slice_)
            slice_.ready_at = self.scheduler.now
            if slice_.creator == "ann":
                self.world.record.billed.append(slice_)
            if sum(other.creator == slice_.creator and other.state == "READY" for other in self.slices.values()) > 1:
                self.scheduler.spawn(self.world.watch_two, slice_, name="two slices", process=self.scheduler.world)
            if getattr(slice_.by, "name", "") in SUPERVISORS:
                self.world.reached("made again")
        if operation.verb == "start" and slice_ is not None:
            for host in slice_.hosts:
                host.boot_up(0, writes_time=True)
        self._follow()

    def _boot(self, slice_: Slice) -> None:
        self._made += 1
        for emulated in slice_.node.hosts:
            host = Host(self.scheduler, f"{slice_.name}@{self._made}", emulated.index, emulated.address)
            host.ssh_from = self.scheduler.now + self.rng.uniform(0.0, 20.0)
            slice_.hosts.append(host)
            self.world.add_host(host)

    def preempt(self, slice_: Slice, lag: float) -> None:
        """Takes a READY slice away: its hosts die at once, its state follows after `lag` seconds."""
        if slice_.state != "READY":
            return
        self.world.note(f"node {slice_.name} is preempted, and shown so after {lag:.0f} s")
        for host in slice_.hosts:
            host.die(for_good=True)

        def show() -> None:
            if slice_.state in ("READY", "STOPPED"):  # else shown already, or deleted meanwhile
                faults.preempt(slice_.node)
            self._follow()

        if not lag:
            faults.preempt(slice_.node)
        self._later(lag, show)

    # -- queued resources ---------------------------------------------------------------------------------------------

    def _advance_later(self) -> None:
        """Sets a timer for the next step of queued resources, unless each stays as it is until something changes."""
        if not self._advancing and any(not self._is_settled(queued) for queued in self.state.queued.values()):
            self._advancing = True
            self._later(self.rng.uniform(1.0, 6.0), self._advance)

    def _is_settled(self, queued: QueuedResource) -> bool:
        node = self.state.nodes.get(queued.node)
        well = node is not None and node.state in ("READY", "STOPPED", "STARTING")
        return queued.state in ("FAILED", "SUSPENDED") or (queued.state == "ACTIVE" and well)

    def _advance(self) -> None:
        self._advancing = False
        waiting = any(queued.state in ("ACCEPTED", "WAITING_FOR_RESOURCES") for queued in self.state.queued.values())
        self._draw(creates=waiting)
        for request in self.requests.values() if any(fault.kind == "quota" for fault in self.state.faults) else ():
            getattr(request.by, "refusals", set()).add("quota")
        queued_resources.advance(self.state, self._now)
        self.state.faults.clear()
        self._follow()

    def _later(self, seconds: float, function: Callable[[], None]) -> None:
        self.scheduler.call_at(self.scheduler.now + max(0.0, seconds), function)
