"""The life of a slice: created, described, deleted, through gcloud.

`create` and `delete` start from what the API says and may be repeated at any point: a slice under way is waited for, a
stopped one started, one that is being deleted waited out. A preempted node must be deleted before its name can be used
again, as the API demands. Nothing is used or deleted without our labels (ownership.py), nor a slice that was recreated
since it was described. A slice may come from a queued resource (queued.py) and may be in one of several zones
(slice_hints.py).

gcloud waits for an operation for half an hour at most, and has no command that describes an operation. So gcloud waits
for a creation, because its message says why it failed; after that, or when the answer is lost, the node is described
until it is READY.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from typing import Any

from launcher import costs, shell
from launcher.config import Candidate, Config
from launcher.errors import BadInput, CommandTimeout, LaunchError
from launcher.gcloud.calls import DELETE_SECONDS, Look, call_gcloud, delete_until_gone
from launcher.gcloud.errors import Conflict, PermissionDenied, Preempted, ResourceNotFound, StillRunning, Stockout
from launcher.gcloud.retry import Backoff, Retry
from launcher.provider import SliceState
from launcher.tpu_vm import commands, ownership, queued, requests, slice_hints
from launcher.tpu_vm.ownership import NotOurs
from launcher.tpu_vm.requests import RequestRecord, place_of
from launcher.workstation import Workstation

_SECONDS = 60.0  # for one question to the API
_LOOK_SECONDS = 120.0  # until an API that does not answer ends a deletion that has not begun
_POLL_SECONDS = 2.0
_LAG_SECONDS = 20.0  # the API may show a new node this late
_IN_FLIGHT_SECONDS = 300.0  # for which a create request of this machine is waited for
_LOOK_AGAIN_SECONDS = 5.0
_MOST_CREATES = 3  # whose answers are lost
_FIRST_PAUSE, _LONGEST_PAUSE = 15.0, 300.0  # seconds, between rounds through zones without capacity

Say = Callable[[str], None]


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
    current = slice_hints.current(config)
    found = _describe_in_zone(config.placed(current), machine)

    def is_ours(state: SliceState | None) -> bool:
        return state is not None and (config.any_owner or not ownership.why_not_ours(state.labels, machine.owner))

    if len(config.candidates) == 1 or is_ours(found):
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
    """Returns the node. With slice.queued, returns the request in its own state (PREEMPTED if it lost its node) when
    there is no node, or when Google took the one being deleted."""
    node = _describe_node(config, machine)
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
    except ResourceNotFound:
        return None


def _describe_request(config: Config, machine: Workstation) -> queued.Request | None:
    """Returns the queued resource of the slice's name; None if the account may not see any and none is configured."""
    try:
        return queued.describe(config, machine)
    except PermissionDenied:
        if config.slice.queued is not None:
            raise
        return None


# -- creating ---------------------------------------------------------------------------------------------------------


def create(config: Config, say: Say, machine: Workstation) -> SliceState:
    """Returns the slice when it is READY: creates it when it is missing, waits when it is under way.

    Passes over zones without capacity; after the last one, tries all again for slice.stockout_minutes, with growing
    pauses.

    Raises:
        Conflict: The name is taken by a slice of another type or owner, or another command deleted the slice meanwhile.
        Stockout, QuotaExceeded, PermissionDenied, Refused: As Google says; only a stock-out is retried.
    """
    begin, backoff = machine.clock.monotonic(), Backoff(machine, _FIRST_PAUSE, _LONGEST_PAUSE)
    try:
        zones = _zones_to_try(config, machine)
    except LaunchError as error:
        raise (add_bill(config, error) if error.transient else error) from None
    has_asked = False
    while True:
        for placed in zones:
            slice_hints.save_place(config, Candidate(config.slice.accelerator_type, placed.zone, config.slice.capacity))
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
        wait = backoff.next()
        left = config.slice.stockout_minutes * 60 - (machine.clock.monotonic() - begin)
        if wait > left:
            slice_hints.forget(config)
            raise stockout
        say(
            f"no capacity in {', '.join(config.zones)}: trying again in {wait:.0f} s, for {costs.duration(left)} more "
            "(slice.stockout_minutes)"
        )
        machine.clock.sleep(wait)


def _zones_to_try(config: Config, machine: Workstation) -> list[Config]:
    """Returns the configuration in each zone to try: only the slice's zone if it exists, otherwise all zones. A slice
    that is gone for good must be deleted first, so its zone comes first."""
    zones = slice_hints.in_every_place(config)
    existing = describe(config, machine) if len(zones) > 1 else None
    if existing is None:
        return zones
    current = slice_hints.current(config).zone
    if not existing.gone_for_good:
        return [zoned for zoned in zones if zoned.zone == current]
    return sorted(zones, key=lambda zoned: zoned.zone != current)


def create_in_place(config: Config, say: Say, machine: Workstation) -> SliceState:
    """Returns the slice of one candidate when it is READY, as `create` does, and tries no other. Retries the first look
    too."""
    creation = _Creation(config, say, machine, first_contact=False)
    try:
        return creation.run()
    except LaunchError as error:
        raise creation.with_bill(error) from None


class _Creation:
    """The state machine of `create`, in one zone and once. Each step acts on the last description of the node."""

    def __init__(self, config: Config, say: Say, machine: Workstation, *, first_contact: bool) -> None:
        """`first_contact`: raise at once when the API does not answer, instead of retrying."""
        self.config, self.say, self.machine, self.first_contact = config, say, machine, first_contact
        self.retry = Retry(machine, say, f"slice {config.slice.name}")
        self.exists: bool | None = None  # when it was last described
        self.creates = 0
        self.granted = False  # whether gcloud reported the end of a creation
        self.lost: LaunchError | None = None  # why the answer to a create request is not known
        self.missing_since: float | None = None
        self.reported = ""
        self.deadline = self._from_now(config.slice.create_minutes * 60)

    def run(self) -> SliceState:
        """Returns the slice when it is READY. Raises NotOurs for another owner's that was not READY at first sight."""
        if self.first_contact:
            node = _describe_node(self.config, self.machine)
        else:
            node = self.retry.call(lambda: _describe_node(self.config, self.machine), self.deadline)
        while True:
            self.exists = node is not None
            if node is None:
                self._handle_missing()
            else:
                self.missing_since = None
                if self.creates or not node.ready:  # a run may use a READY slice of any owner
                    ownership.require_ours(self.config, node.labels, self.machine.owner)
                if self._act(node):
                    return node
            node = self.retry.call(lambda: _describe_node(self.config, self.machine), self.deadline)

    def explain_interrupt(self) -> None:
        """Tells the user what Ctrl-C leaves; for a queued resource, `queued` has told it."""
        if self.exists or (self.creates and self.config.slice.queued is None):
            self.say(
                "interrupted: Google may still be creating it: `tpu-launch up` goes on waiting, `tpu-launch down` "
                "deletes it"
            )

    def with_bill(self, error: LaunchError) -> LaunchError:
        """Returns the error, with `add_bill` if it may leave a slice behind that the error does not name yet."""
        was_requested = self.creates and self.config.slice.queued is None
        is_left = self.exists or (error.transient and (was_requested or self.exists is None))
        if not is_left or isinstance(error, Conflict) or "`tpu-launch down`" in str(error):
            return error
        return add_bill(self.config, error)

    def _act(self, node: SliceState) -> bool:
        """Takes one step towards READY. Returns whether the node is READY."""
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
        """Creates the node, unless it was requested and may not be visible yet. Raises Conflict when it was deleted."""
        now = self.machine.clock.monotonic()
        if self.missing_since is None:
            self.missing_since = now
        if self.creates and now - self.missing_since < _LAG_SECONDS:
            self.machine.clock.sleep(_POLL_SECONDS)
        elif self.granted:
            raise Conflict(
                f"slice {self.config.slice.name} was deleted by another command while this one waited for it; "
                "`tpu-launch up` creates it again"
            )
        elif self.lost is not None and self.creates >= _MOST_CREATES:
            raise self.lost
        else:
            self._create_node()

    def _create_node(self) -> None:
        """Checks the cost limit, requests the node and waits for the answer. Keeps a lost answer in `lost`."""
        config, slice_ = self.config, self.config.slice
        costs.check(config)
        self.say(
            f"creating {slice_.accelerator_type} slice {slice_.name} in {config.zone} ({config.accelerator.hosts} "
            f"hosts, {slice_.capacity})"
        )
        self.say(costs.line(config))
        labels = ownership.make_labels(config, self.machine.owner, self.machine.clock.time())
        self.creates += 1
        self.missing_since = None
        slice_hints.save_create_time(config, self.machine.clock.time())
        if slice_.queued is not None:
            queued.obtain(config, labels, lambda: _describe_node(config, self.machine), self.say, self.machine)
            self.granted, self.deadline = True, self._from_now(slice_.create_minutes * 60)
            return
        if self.creates == 1:
            self.deadline = self._from_now(slice_.create_minutes * 60)
        try:
            seconds = max(1.0, self.deadline - self.machine.clock.monotonic())
            command = commands.create_command(config, labels)
            with slice_hints.mark_create_in_flight(config) as descriptors:
                call_gcloud(self.machine, command, timeout=seconds, pass_fds=descriptors)
            self.granted = True
        except StillRunning:
            self.say(f"gcloud waits no longer than half an hour; still waiting for slice {slice_.name}")
        except Conflict as error:  # another `up` created it, or an earlier try of gcloud's own arrived after all
            self.lost = error
        except CommandTimeout:
            raise CommandTimeout(
                f"no end after {seconds / 60:.0f} minutes of: {shell.quote(command)}\n"
                "Google may still be creating it: `tpu-launch up` goes on waiting, `tpu-launch down` deletes it"
            ) from None
        except (Stockout, Preempted):
            raise
        except LaunchError as error:
            if not error.transient:
                raise
            self.lost = error
            self.say(f"{str(error).splitlines()[0]}: checking whether {slice_.name} is being created nevertheless")

    def _start(self, node: SliceState) -> None:
        """Starts a STOPPED node and waits. Raises Stockout; leaves a transient error to the next description."""
        try:
            costs.check(self.config)
        except BadInput as error:
            raise BadInput(
                f"slice {node.name} is STOPPED and is not started: {str(error).removesuffix('. Nothing was created')}\n"
                "  raise the limit, or delete the slice with `tpu-launch down`"
            ) from None
        self.say(f"slice {node.name} is STOPPED: starting it")
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
        """Waits until a DELETING node is gone; resets the deadline. Raises Conflict once this command created it."""
        if self.creates:
            raise Conflict(
                f"slice {node.name} is being deleted by another command while this one waits for it; `tpu-launch up` "
                "creates it again"
            )
        self.say(f"slice {node.name} is DELETING: waiting until it is gone, then creating it")
        _delete_node(self.config, node, self.say, self.machine, self._from_now(DELETE_SECONDS), wait_only=True)
        self.deadline = self._from_now(self.config.slice.create_minutes * 60)

    def _replace(self, node: SliceState) -> None:
        """Deletes a lost node with its request; resets the deadline. Raises Preempted once this command created it."""
        if self.creates:
            raise Preempted(
                f"slice {node.name} became {node.state} while it was being created; run `tpu-launch up` again"
            )
        self.say(f"slice {node.name} is {node.state}: deleting it, because its name can't be used before")
        _delete_in_zone(self.config, _describe_request(self.config, self.machine), node, self.say, self.machine)
        self.deadline = self._from_now(self.config.slice.create_minutes * 60)

    def _wait(self, node: SliceState) -> None:
        """Tells the user a new state and sleeps. Raises CommandTimeout after slice.create_minutes."""
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


def add_bill(config: Config, error: LaunchError) -> LaunchError:
    """Returns the same error with one more line: the slice may exist and is billed then."""
    return type(error)(
        f"{error}\n  slice {config.slice.name} may exist, and is billed then: `tpu-launch up` goes on with it, "
        "`tpu-launch down` deletes it",
        exit_code=error.exit_code,
    )


def _check_type(config: Config, node: SliceState) -> None:
    wanted = config.slice.accelerator_type
    if node.accelerator_type and node.accelerator_type != wanted:
        raise Conflict(
            f"slice {node.name} exists and is a {node.accelerator_type}, not a {wanted}: "
            "choose another slice.name, or delete it with `tpu-launch down`"
        )


def _check_hosts(config: Config, node: SliceState) -> None:
    """Raises LaunchError unless the node has as many hosts as its type."""
    if len(node.hosts) != config.accelerator.hosts:
        raise LaunchError(
            f"slice {node.name} has {len(node.hosts)} hosts; a {config.slice.accelerator_type} has "
            f"{config.accelerator.hosts}: delete and create it again"
        )


# -- deleting ---------------------------------------------------------------------------------------------------------


def delete(config: Config, say: Say, machine: Workstation) -> bool:
    """Deletes the slice in every zone, with its queued resource, and waits until the API says that both are gone.
    Returns whether there was one. A zone that does not answer keeps no slice in another zone alive.

    Deletes a queued resource first, with force: that takes along a node granted in the meantime. Looks again while a
    create request of this machine may still arrive. Forgets the local hints at the end.

    Raises:
        NotOurs: Another owner's slice has the name, and there is none of ours.
        LaunchError: Which zones failed and why, after all others were done.
    """

    record = RequestRecord(config)
    left = record.open()
    places = {(place.zone, place.node): place for place in map(config.placed, config.all_candidates)}
    places |= {(request.candidate.zone, request.node): place_of(config, request) for request in left}
    deleted = delete_places(config, list(places.values()), say, machine)
    record.end(left, requests.DELETED, machine.clock.time())
    slice_hints.forget(config)
    return deleted


def delete_places(
    config: Config, places: Sequence[Config], say: Say, machine: Workstation, *, all_requests: bool = False
) -> bool:
    """Deletes the slices of these candidates at once, and returns whether there was one. Looks again while a create
    request may still arrive; without `all_requests`, only until a place has a slice or fails. Leaves another owner's
    slice alone, and raises NotOurs for it only without `all_requests` and if nothing was deleted. Raises as `delete`.
    """

    def delete_there(placed: Config) -> bool | LaunchError:
        try:
            return look_and_delete(placed, say, machine)
        except LaunchError as error:
            return error

    in_flight = _InFlightCreates(config, say, machine)
    deleted = False
    while True:
        in_flight.begin_look()
        outcomes = machine.threads.map(delete_there, places, at_once=len(places))
        deleted = deleted or any(outcome is True for outcome in outcomes)
        if (any(outcomes) and not all_requests) or not in_flight.wait():
            break
    failures = [
        (placed.zone, outcome)
        for placed, outcome in zip(places, outcomes, strict=True)
        if isinstance(outcome, LaunchError)
    ]
    if (deleted or all_requests) and all(isinstance(error, NotOurs) for _, error in failures):
        for _, error in failures:
            say(f"left alone: {str(error).splitlines()[0]}")
        failures = []
    if failures and len(places) == 1:
        raise failures[0][1]
    if failures:
        lines = [f"{zone}: {str(error).replace(chr(10), chr(10) + '  ')}" for zone, error in failures]
        raise LaunchError(
            "not all zones are done; run `tpu-launch down` again:\n" + "\n".join(lines),
            exit_code=failures[0][1].exit_code,
        )
    return deleted


class _InFlightCreates:
    """Create requests of this machine (of a killed command) that may still reach Google or become visible."""

    def __init__(self, config: Config, say: Say, machine: Workstation) -> None:
        self.config, self.say, self.machine, self.said = config, say, machine, False
        self.look_began, self.was_in_flight = machine.clock.monotonic(), False
        since_create = slice_hints.seconds_since_create(config, machine.clock.time())
        self.visible_by = self.look_began + _LAG_SECONDS - since_create
        self.deadline = self.look_began + _IN_FLIGHT_SECONDS

    def begin_look(self) -> None:
        """Records when a look begins, and whether a create request is in flight at that time."""
        self.look_began = self.machine.clock.monotonic()
        self.was_in_flight = slice_hints.is_create_in_flight(self.config)

    def wait(self) -> bool:
        """Waits until the next look is due. Returns False when the last look has shown all that can still come.

        Raises:
            CommandTimeout: A create request is in flight for more than five minutes.
        """
        now, name = self.machine.clock.monotonic(), self.config.slice.name
        if self.was_in_flight or slice_hints.is_create_in_flight(self.config):
            self.visible_by = now + _LAG_SECONDS
        if self.look_began >= self.visible_by:
            return False
        if now >= self.deadline:
            raise CommandTimeout(
                f"a create request for slice {name} is still in flight after {_IN_FLIGHT_SECONDS / 60:.0f} minutes, "
                "and the slice is billed if it arrives: run `tpu-launch down` again"
            )
        if not self.said:
            self.say(f"slice {name} not found yet: a create request is still in flight; waiting")
            self.said = True
        self.machine.clock.sleep(_LOOK_AGAIN_SECONDS)
        return True


def look_and_delete(config: Config, say: Say, machine: Workstation) -> bool:
    """Looks for the node and the queued resource in one zone, deletes those it finds and waits until they are gone.
    Returns whether there was one. Raises as `_delete_in_zone`; LaunchError if the API gives no answer in two minutes.
    """
    retry = Retry(machine, say, f"slice {config.slice.name} in {config.zone}")
    deadline = machine.clock.monotonic() + _LOOK_SECONDS
    # Look at the queue even when the configuration does not use it (any more): a queued resource keeps its quota.
    looking = machine.threads.submit(lambda: _describe_request(config, machine))
    node = retry.call(lambda: _describe_node(config, machine), deadline)
    try:
        request = looking.result()
    except LaunchError:
        request = retry.call(lambda: _describe_request(config, machine), deadline)
    if request is None and node is not None and node.request:  # requested and granted between the two looks
        request = retry.call(lambda: _describe_request(config, machine), deadline)
    if request is None and node is None:
        return False
    _delete_in_zone(config, request, node, say, machine)
    return True


def _delete_in_zone(
    config: Config, request: queued.Request | None, node: SliceState | None, say: Say, machine: Workstation
) -> None:
    """Deletes the queued resource and node that were found in one zone, and waits until they are gone.

    Also deletes a node that the queued resource was granted meanwhile; leaves a node that has replaced the one found.

    Raises:
        NotOurs: One of them has another owner's labels; it is not deleted.
        CommandTimeout: One of them is not gone in time.
    """
    for labels in [found.labels for found in (request, node) if found is not None]:
        ownership.require_ours(config, labels, machine.owner, deletion=True)
    deadline = machine.clock.monotonic() + DELETE_SECONDS
    cost = costs.since(config, node.created, machine.clock.time()) if node is not None else ""
    say(f"deleting slice {config.slice.name}{f' ({cost})' if cost else ''}")
    if request is not None:
        say(f"its queued resource is {request.state}: deleting it with its node")
        queued.remove(config, request, say, machine)
        retry = Retry(machine, say, f"slice {config.slice.name}")
        later = retry.call(lambda: _describe_node(config, machine), deadline)
        if later is not None and node is None:  # granted in the meantime
            ownership.require_ours(config, later.labels, machine.owner, deletion=True)
        # A node of the same name that is not the one found may be another owner's by now: leave it.
        node = later if later is not None and (node is None or node.is_same(later)) else None
    if node is not None:
        _delete_node(config, node, say, machine, deadline)


def _delete_node(
    config: Config, doomed: SliceState, say: Say, machine: Workstation, deadline: float, *, wait_only: bool = False
) -> None:
    """Deletes a node (with `wait_only`, waits for its deletion) and returns when the API does not show it any more, or
    shows a recreated one, which is left alone. Raises CommandTimeout after `deadline` (seconds of the monotonic
    clock)."""
    retry = Retry(machine, say, f"slice {doomed.name}")

    def look() -> Look | None:
        node = retry.call(lambda: _describe_node(config, machine), deadline)
        if node is None:
            return None
        if not doomed.is_same(node):
            owner = node.labels.get(ownership.OWNER) or "an unknown user"
            say(f"slice {node.name} was recreated in the meantime by {owner}: left alone")
            return None
        wait = wait_only or node.state == "DELETING"
        return f"slice {node.name} is {node.state}", None if wait else commands.delete_command(config)

    delete_until_gone(machine, say, look, deadline)
