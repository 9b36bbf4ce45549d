"""Deletes a slice with its queued resource in each of its zones, and waits until the API shows neither.

Nothing is deleted without our labels (slices.py), nor a slice that was recreated since it was described.
"""

from collections.abc import Callable, Sequence

from launcher import costs
from launcher.config import Config
from launcher.errors import CommandTimeout, LaunchError
from launcher.gcloud import DELETE_SECONDS, Look, Retry, delete_until_gone
from launcher.provider import SliceState
from launcher.tpu_vm import commands, requests, slice_hints, slices
from launcher.tpu_vm.requests import RequestRecord
from launcher.tpu_vm.slices import NotOurs, Request, Say
from launcher.workstation import Workstation

_LOOK_SECONDS = 120.0  # until an API that does not answer ends a deletion that has not begun
_IN_FLIGHT_SECONDS = 300.0  # for which a create request of this machine is waited for
LOOK_AGAIN_SECONDS = 5.0
_GOING = ("DELETING", "SUSPENDING")  # states; a request must end SUSPENDING before it can be deleted


def delete(config: Config, say: Say, machine: Workstation) -> bool:
    """Deletes the slice in every zone, with its queued resource, and waits until the API says that both are gone.
    Returns whether there was one. A zone that does not answer keeps no slice in another zone alive. Deletes a queued
    resource first, with force: that takes along a node granted in the meantime. Looks again while a create request of
    this machine may still arrive. Records the end of open requests, and forgets the local hints.

    Raises:
        NotOurs: Only another owner's slice has the name.
        CommandTimeout: A create request was still in flight after five minutes.
        LaunchError: Which of several zones failed and why, after all others were done; with one zone, its own error.
    """
    record = RequestRecord(config)
    left = record.open()
    places = {(place.zone, place.node): place for place in map(config.placed, config.all_candidates)}
    for request in left:  # perhaps of a candidate that the file does not name any more
        places[request.candidate.zone, request.node] = config.placed(request.candidate, request.node)
    deleted = delete_places(config, list(places.values()), say, machine)
    record.end(left, requests.DELETED, machine.clock.time())
    slice_hints.forget(config)
    return deleted


def delete_places(
    config: Config, places: Sequence[Config], say: Say, machine: Workstation, *, all_requests: bool = False
) -> bool:
    """Deletes the slices of `places` (a configuration each) at once; returns whether there was one. Looks again while a
    create request of this machine may still arrive, for five minutes (CommandTimeout); without `all_requests`, a look
    that finds a slice, or fails, is the last one unless a request is in flight. Leaves another owner's slice alone,
    which raises NotOurs if nothing was deleted and no other place failed; never with `all_requests`. Raises as
    `delete`."""

    def delete_there(placed: Config) -> bool | LaunchError:
        try:
            return look_and_delete(placed, say, machine)
        except LaunchError as error:
            return error

    clock, name = machine.clock, config.slice.name
    begun = clock.monotonic()
    visible_by = begun + slices.LAG_SECONDS - slice_hints.seconds_since_create(config, clock.time())
    deleted = said = False
    while True:
        look_began, in_flight = clock.monotonic(), slice_hints.is_create_in_flight(config)
        outcomes = machine.threads.map(delete_there, places, at_once=len(places))
        deleted |= True in outcomes
        now = clock.monotonic()
        if in_flight:  # the request of a killed command may arrive after the slice of a later one was deleted
            visible_by = now + slices.LAG_SECONDS
        if look_began >= visible_by or (any(outcomes) and not in_flight and not all_requests):
            break
        if now >= begun + _IN_FLIGHT_SECONDS:
            raise CommandTimeout(
                f"a create request for slice {name} is still in flight after {_IN_FLIGHT_SECONDS / 60:.0f} minutes, "
                "and the slice is billed if it arrives: run `tpu-launch down` again"
            )
        if not said:
            say(f"a create request for slice {name} is still in flight; waiting")
            said = True
        clock.sleep(LOOK_AGAIN_SECONDS)
    pairs = zip(places, outcomes, strict=True)
    failures = [(placed.zone, outcome) for placed, outcome in pairs if isinstance(outcome, LaunchError)]
    if (deleted or all_requests) and all(isinstance(error, NotOurs) for _, error in failures):
        for _, error in failures:
            say(f"left alone: {str(error).splitlines()[0]}")
        return deleted
    if failures and len(places) == 1:
        raise failures[0][1]
    if failures:
        lines = "\n".join(f"{zone}: {str(error).replace(chr(10), chr(10) + '  ')}" for zone, error in failures)
        if all(isinstance(error, NotOurs) for _, error in failures):
            raise NotOurs(f"no slice {name} of yours was found:\n{lines}")
        raise LaunchError(
            f"not all zones are done; run `tpu-launch down` again:\n{lines}", exit_code=failures[0][1].exit_code
        )
    return deleted


def look_and_delete(config: Config, say: Say, machine: Workstation) -> bool:
    """Looks for the node and the queued resource in one zone, deletes those it finds and waits until they are gone.
    Returns whether there was one. Raises as `delete_in_zone`; LaunchError if the API gives no answer in two minutes."""
    retry = Retry(machine, say, f"slice {config.slice.name} in {config.zone}")
    deadline = machine.clock.monotonic() + _LOOK_SECONDS
    # Look at the queue even when the configuration does not use it (any more): a queued resource keeps its quota.
    looking = machine.threads.submit(lambda: slices.find_request(config, machine))
    node = retry.call(lambda: slices.describe_node(config, machine), deadline)
    try:
        request = looking.result()
    except LaunchError:
        request = retry.call(lambda: slices.find_request(config, machine), deadline)
    if request is None and node is not None and node.request:  # requested and granted between the two looks
        request = retry.call(lambda: slices.find_request(config, machine), deadline)
    if request is None and node is None:
        return False
    delete_in_zone(config, request, node, say, machine)
    return True


def delete_in_zone(
    config: Config, request: Request | None, node: SliceState | None, say: Say, machine: Workstation
) -> None:
    """Deletes the queued resource and node that were found in one zone, and waits until they are gone. Also deletes a
    node that the queued resource was granted meanwhile; leaves a node that has replaced the one found. Raises NotOurs
    for one with another owner's labels, which is not deleted, CommandTimeout for one that is not gone in time."""
    for labels in [found.labels for found in (request, node) if found is not None]:
        slices.require_ours(config, labels, machine.owner, deletion=True)
    deadline = machine.clock.monotonic() + DELETE_SECONDS
    cost = costs.since(config, node.created, machine.clock.time()) if node is not None else ""
    say(f"deleting slice {config.slice.name}{f' ({cost})' if cost else ''}")
    if request is not None:
        say(f"its queued resource is {request.state}: deleting it with its node")
        remove(config, request, say, machine, deadline)
        retry = Retry(machine, say, f"slice {config.slice.name}")
        later = retry.call(lambda: slices.describe_node(config, machine), deadline)
        if later is not None and node is None:  # granted in the meantime
            slices.require_ours(config, later.labels, machine.owner, deletion=True)
        # A node of the same name that is not the one found may be another owner's by now: leave it.
        node = later if later is not None and (node is None or node.is_same(later)) else None
    if node is not None:
        remove(config, node, say, machine, deadline)


def remove(
    config: Config, doomed: SliceState, say: Say, machine: Workstation, deadline: float, *, wait_only: bool = False
) -> None:
    """Deletes a node, or a queued resource (Request) with its node, or with `wait_only` nothing. Waits until the API
    shows it no more, or a recreated one, which it leaves alone. Raises CommandTimeout after `deadline` (monotonic
    clock), LaunchError if Google refuses."""
    kind, command = "slice", commands.node_command(config, "delete")
    describe: Callable[[Config, Workstation], SliceState | None] = slices.describe_node
    if isinstance(doomed, Request):
        kind, command, describe = "request", commands.delete_request_command(config), slices.describe_request
    retry = Retry(machine, say, f"{kind} {doomed.name}")
    asked = doomed.state in _GOING  # else one answer without it is taken for a stale one

    def look() -> Look | None:
        """Returns its state and, unless it is being deleted, its deletion; None when it is gone or another."""
        nonlocal asked
        found = retry.call(lambda: describe(config, machine), deadline) or (None if asked else doomed)
        asked = True
        if found is None:
            return None
        if not doomed.is_same(found):
            owner = found.labels.get(slices.OWNER) or "an unknown user"
            say(f"{kind} {found.name} was recreated in the meantime by {owner}: left alone")
            return None
        wait = wait_only or found.state in _GOING  # the API sometimes forgets a deletion: repeat it
        return f"{kind} {found.name} is {found.state}", None if wait else command

    delete_until_gone(machine, say, look, deadline)
