"""The life of a slice: created, described, deleted, through gcloud.

`create` and `delete` start from what the API says and may be repeated at any point: a slice that is on its way is
waited for, a stopped one started, one that is being deleted waited out. A node that was preempted must be deleted
before its name can be used again, as the API demands. Nothing is used or deleted that is not provably ours
(ownership.py), nor one that was made anew since it was looked at. A slice may come from a request in the queue
(queued.py), and may be in one of several zones (placement.py).

gcloud waits for an operation for half an hour at most, and has no command that describes an operation: so a creation is
waited for by gcloud, whose message says why it failed, and after that, or when the answer is lost, by describing the
node.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

from launcher import costs
from launcher.config import Config
from launcher.errors import CommandTimeout, LaunchError
from launcher.gcloud.calls import Patience, call_gcloud, call_gcloud_long, try_deletion
from launcher.gcloud.errors import Conflict, NotFound, PermissionDenied, Preempted, StillRunning, Stockout
from launcher.provider import SliceState
from launcher.tpu_vm import commands, ownership, placement, queued
from launcher.tpu_vm.ownership import NotOurs
from launcher.workstation import Workstation

_SECONDS = 60.0  # for one question to the API
_LOOK_SECONDS = 120.0  # until an API that does not answer ends a deletion that has not begun
_DELETE_MINUTES = 15.0
_POLL_SECONDS = 2.0
_LAG_SECONDS = 20.0  # the API may not yet show what it has just made
_ARRIVAL_SECONDS = 300.0  # for which a gcloud that asks for a slice may be on its way
_LOOK_AGAIN_SECONDS = 5.0
_ASKED_AT_MOST = 3  # creations whose answers are lost
_FIRST_PAUSE, _LONGEST_PAUSE = 15.0, 300.0  # seconds, between rounds through zones without capacity

Say = Callable[[str], None]


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
        uid=node.get("id", ""),
        labels=node.get("labels", {}),
        request=node.get("queuedResource", "").rsplit("/", 1)[-1],
    )


def describe(config: Config, machine: Workstation) -> SliceState | None:
    """The slice, or None when it does not exist. A request that waits in the queue counts, in its own state and without
    hosts. Of other zones than the one where it was last, only a slice that is ours counts."""
    current = placement.current_zone(config)
    state = _describe_in_zone(placement.in_zone(config, current), machine)
    if state is not None or len(config.zones) == 1:
        return state
    others = [other for other in placement.in_every_zone(config) if other.zone != current]
    states = machine.threads.map(lambda zoned: _describe_in_zone(zoned, machine), others, at_once=len(others))
    for other, state in zip(others, states, strict=True):
        if state is not None and (config.any_owner or not ownership.why_not_ours(state.labels, machine.owner)):
            placement.save_zone(config, other.zone)
            return state
    return None


def _describe_in_zone(config: Config, machine: Workstation) -> SliceState | None:
    node = _describe_node(config, machine)
    if config.slice.queued is None or (node is not None and node.state != "DELETING"):
        return node
    request = queued.describe(config, machine)
    if request is None:
        return node
    if node is not None and not (request.lost and request.initiator == "SERVICE"):
        return node  # a user deletes it
    # A suspended request lost its node, which is what PREEMPTED says of a node.
    state = "PREEMPTED" if request.lost else request.state
    detail = request.error or "queued resource"
    return SliceState(
        request.name,
        state,
        "HEALTH_UNSPECIFIED",
        config.slice.accelerator_type,
        (),
        detail,
        labels=request.labels,
    )


def _describe_node(config: Config, machine: Workstation) -> SliceState | None:
    try:
        return parse_state(call_gcloud(machine, commands.describe_command(config), timeout=_SECONDS))
    except NotFound:
        return None


def _describe_request(config: Config, machine: Workstation) -> queued.Request | None:
    """The request in the queue. An account that may not look there has none there, unless the configuration uses it."""
    try:
        return queued.describe(config, machine)
    except PermissionDenied:
        if config.slice.queued is not None:
            raise
        return None


# -- creating ---------------------------------------------------------------------------------------------------------


def create(config: Config, say: Say, machine: Workstation) -> SliceState:
    """Returns the slice when it is READY: creates it when it is missing, waits when it is on its way.

    Zones without capacity are passed over; after the last one all are tried again for slice.stockout_minutes, with
    growing pauses.

    Raises:
        Conflict: the name is taken by a slice of another type or owner, or somebody deleted the slice meanwhile.
        Stockout, QuotaExceeded, PermissionDenied, Refused: as Google says; only a stock-out is tried again.
    """
    begin, pause = machine.clock.monotonic(), _FIRST_PAUSE
    zones = _zones_to_try(config, machine)
    has_asked = False
    while True:
        for placed in zones:
            placement.save_zone(config, placed.zone)
            creation = _Creation(placed, say, machine, first_contact=not has_asked)
            has_asked = True
            try:
                return creation.run()
            except KeyboardInterrupt:
                creation.explain_interrupt()
                raise
            except Stockout as error:
                stockout = error
                if len(zones) > 1:
                    say(str(error).splitlines()[0])
            except LaunchError as error:
                raise creation.with_bill(error) from None
        wait = pause * (0.5 + machine.random.random())  # jitter: others wait for the same capacity
        left = config.slice.stockout_minutes * 60 - (machine.clock.monotonic() - begin)
        if wait > left:
            placement.forget(config)
            raise stockout
        say(
            f"no capacity in {', '.join(config.zones)}: trying again in {wait:.0f} s, for {costs.duration(left)} more "
            "(slice.stockout_minutes)"
        )
        machine.clock.sleep(wait)
        pause = min(pause * 2, _LONGEST_PAUSE)


def _zones_to_try(config: Config, machine: Workstation) -> list[Config]:
    """All zones; only that of the slice when it exists, unless it must be deleted first."""
    zones = placement.in_every_zone(config)
    existing = describe(config, machine) if len(zones) > 1 else None
    if existing is None:
        return zones
    current = placement.current_zone(config)
    if not existing.gone_for_good:
        return [zoned for zoned in zones if zoned.zone == current]
    return sorted(zones, key=lambda zoned: zoned.zone != current)


class _Creation:
    """The state machine of `create`, in one zone and once. Each step acts on what the API said last of the node."""

    def __init__(self, config: Config, say: Say, machine: Workstation, *, first_contact: bool) -> None:
        """`first_contact`: an API that can't be reached is told at once, and not waited for."""
        self.config, self.say, self.machine, self.first_contact = config, say, machine, first_contact
        self.patience = Patience(machine, say, f"slice {config.slice.name}")
        self.exists: bool | None = None  # when it was described last
        self.asked = 0
        self.granted = False  # whether gcloud reported the end of a creation
        self.lost: LaunchError | None = None  # why the answer to a creation is not known
        self.missing_since: float | None = None
        self.reported = ""
        self.deadline = self._from_now(config.slice.create_minutes * 60)

    def run(self) -> SliceState:
        """The READY slice."""
        if self.first_contact:
            node = _describe_node(self.config, self.machine)
        else:
            node = self.patience.ask(lambda: _describe_node(self.config, self.machine), self.deadline)
        while True:
            self.exists = node is not None
            if node is None:
                self._handle_missing()
            else:
                self.missing_since = None
                if self.asked or not node.ready:  # a run may go on with a READY one that somebody else made
                    ownership.require_ours(self.config, node.labels, self.machine.owner)
                if self._act(node):
                    return node
            node = self.patience.ask(lambda: _describe_node(self.config, self.machine), self.deadline)

    def explain_interrupt(self) -> None:
        """Says what Ctrl-C leaves: of a request in the queue that has been said."""
        if self.exists or (self.asked and self.config.slice.queued is None):
            self.say(
                "interrupted: Google may go on creating it. `tpu-launch up` goes on waiting, `tpu-launch down` deletes "
                "it"
            )

    def with_bill(self, error: LaunchError) -> LaunchError:
        """The error, which says what it leaves: of a request in the queue that has been said."""
        is_asked_for = self.asked and self.config.slice.queued is None
        is_left = self.exists or (error.transient and (is_asked_for or self.exists is None))
        if not is_left or isinstance(error, Conflict) or "`tpu-launch down`" in str(error):
            return error
        return type(error)(
            f"{error}\n  slice {self.config.slice.name} may be there, and is billed then: `tpu-launch up` goes on with "
            "it, `tpu-launch down` deletes it",
            exit_code=error.exit_code,
        )

    def _act(self, node: SliceState) -> bool:
        """One step towards READY; whether it is there."""
        if node.state == "DELETING":
            self._wait_for_deletion(node)
        elif node.gone_for_good:
            self._replace(node)
        else:
            _check_type(self.config, node)
            if node.ready:
                _check_hosts(self.config, node)
                return True
            if node.state == "STOPPED":
                self._start(node)
            self._wait(node)
        return False

    def _handle_missing(self) -> None:
        """Asks for the node, unless it was asked for and may not be visible yet. Raises Conflict when it is gone."""
        now = self.machine.clock.monotonic()
        if self.missing_since is None:
            self.missing_since = now
        if self.asked and now - self.missing_since < _LAG_SECONDS:
            self.machine.clock.sleep(_POLL_SECONDS)
        elif self.granted:
            raise Conflict(
                f"slice {self.config.slice.name} was deleted while it was waited for; `tpu-launch up` creates it again"
            )
        elif self.lost is not None and self.asked >= _ASKED_AT_MOST:
            raise self.lost
        else:
            self._ask_for_node()

    def _ask_for_node(self) -> None:
        """Asks for the node, directly or through the queue, and waits for the answer."""
        config, slice_ = self.config, self.config.slice
        costs.check(config)
        self.say(
            f"creating {slice_.accelerator_type} slice {slice_.name} in {config.zone} ({config.accelerator.hosts} "
            f"hosts, {slice_.capacity})"
        )
        self.say(costs.line(config))
        labels = ownership.make_labels(config, self.machine.owner, self.machine.clock.time())
        self.asked += 1
        self.missing_since = None
        placement.save_request(config, self.machine.clock.time())
        if slice_.queued is not None:
            queued.obtain(config, labels, lambda: _describe_node(config, self.machine), self.say, self.machine)
            self.granted, self.deadline = True, self._from_now(slice_.create_minutes * 60)
            return
        if self.asked == 1:
            self.deadline = self._from_now(slice_.create_minutes * 60)
        try:
            seconds = max(1.0, self.deadline - self.machine.clock.monotonic())
            with placement.asking(config) as mark:
                call_gcloud_long(self.machine, commands.create_command(config, labels), timeout=seconds, pass_fds=mark)
            self.granted = True
        except StillRunning:
            self.say(f"gcloud waits no longer than half an hour; slice {slice_.name} is waited for on")
        except Conflict as error:  # another `up` made it, or an earlier try of gcloud's own arrived after all
            self.lost = error
        except (Stockout, Preempted, CommandTimeout):
            raise
        except LaunchError as error:
            if not error.transient:
                raise
            self.lost = error
            self.say(f"{str(error).splitlines()[0]}: looking whether slice {slice_.name} is being created nevertheless")

    def _start(self, node: SliceState) -> None:
        self.say(f"slice {node.name} is STOPPED: starting it")
        costs.check(self.config)
        seconds = max(1.0, self.deadline - self.machine.clock.monotonic())
        try:
            call_gcloud(self.machine, commands.start_command(self.config), timeout=seconds)
        except Stockout as error:
            raise Stockout(
                f"slice {node.name} can't be started: {error}; or delete it with `tpu-launch down`"
            ) from None
        except LaunchError as error:
            if not error.transient:
                raise  # else the next description tells whether it starts

    def _wait_for_deletion(self, node: SliceState) -> None:
        if self.asked:
            raise Conflict(
                f"slice {node.name} is being deleted by somebody while it was waited for; `tpu-launch up` creates it "
                "again"
            )
        self.say(f"slice {node.name} is DELETING: waiting until it is gone, then creating it")
        _wait_gone(self.config, node, self.say, self.machine, self._from_now(_DELETE_MINUTES * 60), delete=False)
        self.deadline = self._from_now(self.config.slice.create_minutes * 60)

    def _replace(self, node: SliceState) -> None:
        if self.asked:
            raise Preempted(
                f"slice {node.name} became {node.state} while it was being created; run `tpu-launch up` again"
            )
        self.say(f"slice {node.name} is {node.state}: deleting it, as its name can't be used before")
        _delete_in_zone(self.config, _describe_request(self.config, self.machine), node, self.say, self.machine)
        self.deadline = self._from_now(self.config.slice.create_minutes * 60)

    def _wait(self, node: SliceState) -> None:
        """Until the next description. Raises CommandTimeout."""
        if node.state != self.reported:
            self.say(f"slice {node.name} is {node.state}")
            self.reported = node.state
        if self.machine.clock.monotonic() > self.deadline:
            raise CommandTimeout(
                f"slice {node.name} is {node.state} and not READY after {self.config.slice.create_minutes:.0f} minutes "
                "(slice.create_minutes): `tpu-launch up` goes on waiting, `tpu-launch down` deletes it"
            )
        self.machine.clock.sleep(_POLL_SECONDS)

    def _from_now(self, seconds: float) -> float:
        return self.machine.clock.monotonic() + seconds


def _check_type(config: Config, node: SliceState) -> None:
    wanted = config.slice.accelerator_type
    if node.accelerator_type and node.accelerator_type != wanted:
        raise Conflict(
            f"slice {node.name} exists and is a {node.accelerator_type}, not a {wanted}: "
            "choose another slice.name, or delete it with `tpu-launch down`"
        )


def _check_hosts(config: Config, node: SliceState) -> None:
    if len(node.hosts) != config.accelerator.hosts:
        raise LaunchError(
            f"slice {node.name} has {len(node.hosts)} hosts; a {config.slice.accelerator_type} has "
            f"{config.accelerator.hosts}: delete and create it again"
        )


# -- deleting ---------------------------------------------------------------------------------------------------------


def delete(config: Config, say: Say, machine: Workstation) -> bool:
    """Deletes the slice, in whichever zone it is, with the request that it came from, and waits until the API says that
    both are gone. Returns whether there was one. Each zone is looked at by itself, so that one that does not answer
    keeps no other slice alive.

    A request is deleted first, with force: one that was granted after somebody gave up takes its node along.

    Raises:
        NotOurs: somebody else's has the name, and none of ours.
        LaunchError: what failed in which zone, after all others were done.
    """

    def delete_there(zoned: Config) -> bool | LaunchError:
        try:
            return _look_and_delete(zoned, say, machine)
        except LaunchError as error:
            return error

    zones = placement.in_every_zone(config)

    arrivals = _Arrivals(config, say, machine)
    while True:
        arrivals.begin_look()
        outcomes = machine.threads.map(delete_there, zones, at_once=len(zones))
        if any(outcomes) or not arrivals.wait():
            break
    deleted = any(outcome is True for outcome in outcomes)
    failures = [
        (zoned.zone, outcome)
        for zoned, outcome in zip(zones, outcomes, strict=True)
        if isinstance(outcome, LaunchError)
    ]
    if deleted and all(isinstance(error, NotOurs) for _, error in failures):
        for _, error in failures:
            say(f"left alone: {str(error).splitlines()[0]}")
        failures = []
    if failures and len(zones) == 1:
        raise failures[0][1]
    if failures:
        lines = [f"{zone}: {str(error).replace(chr(10), chr(10) + '  ')}" for zone, error in failures]
        raise LaunchError(
            "not all zones are done; run `tpu-launch down` again:\n" + "\n".join(lines),
            exit_code=failures[0][1].exit_code,
        )
    placement.forget(config)
    return deleted


class _Arrivals:
    """Requests of this machine that may arrive at Google, or be shown, after somebody has looked for the slice: those
    of a command that was killed on the way."""

    def __init__(self, config: Config, say: Say, machine: Workstation) -> None:
        self.config, self.say, self.machine, self.said = config, say, machine, False
        self.began, self.asked = machine.clock.monotonic(), False
        self.shown_by = self.began + _LAG_SECONDS - placement.seconds_since_request(config, machine.clock.time())
        self.give_up = self.began + _ARRIVAL_SECONDS

    def begin_look(self) -> None:
        """To be called before each look."""
        self.began, self.asked = self.machine.clock.monotonic(), placement.is_asked_for(self.config)

    def wait(self) -> bool:
        """Waits for the next look; False when the last one has shown all that can arrive. Raises CommandTimeout."""
        now, name = self.machine.clock.monotonic(), self.config.slice.name
        if self.asked or placement.is_asked_for(self.config):
            self.shown_by = now + _LAG_SECONDS
        if self.began >= self.shown_by:
            return False
        if now >= self.give_up:
            raise CommandTimeout(
                f"a request for slice {name} is still on its way after {_ARRIVAL_SECONDS / 60:.0f} minutes, and is "
                "billed if it arrives: run `tpu-launch down` again"
            )
        if not self.said:
            self.say(f"there is no slice {name}, which was asked for a moment ago: looking on")
            self.said = True
        self.machine.clock.sleep(_LOOK_AGAIN_SECONDS)
        return True


def _look_and_delete(config: Config, say: Say, machine: Workstation) -> bool:
    """Deletes what there is in one zone; whether there was something."""
    patience = Patience(machine, say, f"slice {config.slice.name} in {config.zone}")
    deadline = machine.clock.monotonic() + _LOOK_SECONDS
    # The queue is looked at also when the configuration does not use it (any more): a request would keep its quota.
    looking = machine.threads.submit(lambda: _describe_request(config, machine))
    node = patience.ask(lambda: _describe_node(config, machine), deadline)
    try:
        request = looking.result()
    except LaunchError:
        request = patience.ask(lambda: _describe_request(config, machine), deadline)
    if request is None and node is not None and node.request:  # made and granted after it was looked for
        request = patience.ask(lambda: _describe_request(config, machine), deadline)
    if request is None and node is None:
        return False
    _delete_in_zone(config, request, node, say, machine)
    return True


def _delete_in_zone(
    config: Config,
    request: queued.Request | None,
    node: SliceState | None,
    say: Say,
    machine: Workstation,
) -> None:
    """Deletes what was found in one zone, if it is ours. Raises NotOurs and CommandTimeout."""
    for labels in [thing.labels for thing in (request, node) if thing is not None]:
        ownership.require_ours(config, labels, machine.owner)
    deadline = machine.clock.monotonic() + _DELETE_MINUTES * 60
    cost = costs.since(config, node.created, machine.clock.time()) if node is not None else ""
    say(f"deleting slice {config.slice.name}{f' ({cost})' if cost else ''}")
    if request is not None:
        say(f"its queued resource is {request.state}: deleted with what belongs to it")
        queued.remove(config, request, say, machine)
        patience = Patience(machine, say, f"slice {config.slice.name}")
        later = patience.ask(lambda: _describe_node(config, machine), deadline)
        if later is not None and node is None:  # granted in the meantime
            ownership.require_ours(config, later.labels, machine.owner)
        # Of a node that went with its request nothing is left to delete: its name may be somebody else's by now.
        node = later if later is not None and (node is None or node.is_same(later)) else None
    if node is not None:
        _wait_gone(config, node, say, machine, deadline, delete=True)


def _wait_gone(
    config: Config, gone: SliceState, say: Say, machine: Workstation, deadline: float, *, delete: bool
) -> None:
    """Waits until the API shows this node no more, or one that was made anew under its name, which is left alone. Each
    deletion follows a description: what was seen before may have been minutes ago.

    Args:
        config: of one zone.
        gone: the node, as last described.
        say: is given lines for a person.
        machine: asks gcloud, and waits.
        deadline: seconds of the monotonic clock.
        delete: ask for the deletion, as often as it gets lost or another operation is on its way.

    Raises:
        CommandTimeout: it is still there.
    """
    patience, reported = Patience(machine, say, f"slice {gone.name}"), ""
    while True:
        node = patience.ask(lambda: _describe_node(config, machine), deadline)
        if node is None:
            return
        if not gone.is_same(node):
            say(f"slice {node.name} was made anew in the meantime, by {node.labels.get(ownership.OWNER) or 'somebody'}")
            return
        if machine.clock.monotonic() > deadline:
            raise CommandTimeout(
                f"slice {node.name} is {node.state} and not gone after {_DELETE_MINUTES:.0f} minutes; run "
                "`tpu-launch down` again"
            )
        if delete and node.state != "DELETING":
            problem = try_deletion(machine, commands.delete_command(config), timeout=_DELETE_MINUTES * 60)
            if problem is None:
                continue
            text = str(problem).splitlines()[0]
            if text != reported:
                say(f"deleting slice {gone.name}: {text}; trying again")
            reported = text
        machine.clock.sleep(_POLL_SECONDS)
