"""Promises about slices: what is created, where and whose, what is listed, deleted and spent."""

from __future__ import annotations

import os
import re
from itertools import pairwise
from typing import TYPE_CHECKING
from unittest import mock

from launcher.config import Candidate
from launcher.costs import per_hour
from launcher.errors import Exit
from launcher.run import events
from launcher.run.session import list_runs
from launcher.tpu_vm.requests import RequestRecord
from launcher.workstation import hash_account
from tests.simulation.launcher.faults import API_FAULTS, MEDDLING
from tests.simulation.launcher.google import Slice
from tests.simulation.launcher.hosts import EPOCH
from tests.simulation.launcher.jobs import SUPERVISORS
from training.machine import parse_time

if TYPE_CHECKING:
    from launcher.tpu_vm.inventory import Listing
    from tests.simulation.launcher.commands import Command
    from tests.simulation.launcher.simulated_run import SimulatedRun
    from tests.simulation.launcher.world import World

_TAKERS = ("preempt", "maintenance", *MEDDLING)  # faults
_BUDGET_SECONDS = 60.0  # for which a run may go on when its budget is spent; and what is kept back for its end
_LONGEST_PAUSE = 450.0
_BETTER_SECONDS = 120.0  # for which a granted slice waits for candidates before it
_WAITS = ("CREATING", "ACCEPTED", "WAITING_FOR_RESOURCES", "PROVISIONING")
_TOLD_EVERY = 60.0  # seconds, in which a state of a request is told at most once
_QUEUE_SECONDS = 7200.0  # slice.queued.valid_until_hours of all files


def deletion_follows_a_stop(simulation: SimulatedRun, node: Slice, command: Command) -> None:
    """A `down` deletes a slice after its runs, or says which may not have saved; a `run` deletes no finished one's."""
    said = "\n".join(command.said)
    for host in node.hosts:
        for container in host.containers.values():
            job = container.job
            if job is None or job.began is None or not (command.laptop.home / "runs" / job.run).exists():
                continue
            told = "may not have saved" in said or "has not ended; going on" in said
            if command.name == "down" and container.running and not (job.disturbed or job.over or told):
                simulation.break_promise("down stops a run before its slice", f"{container.name} on {host!r}")
            if command.name in SUPERVISORS and job.seen_finished and job is simulation.world.newest_job():
                simulation.break_promise("a finished run keeps its slice", f"{command.name} deletes {node}")


def creation_is_due(simulation: SimulatedRun, made: Slice, by: Command) -> None:
    """Checks that a new slice has its owner's labels, follows no `down` that succeeded, and is not beside one that `up`
    could use, and that `run` creates one only in a recovery that was neither stopped nor given up before that `run`."""
    labels, hours = made.node.resource.get("labels", {}), simulation.config.slice.expires_hours
    ours = [labels.get(f"tpu-launch{name}") for name in ("", "-owner", "-account")]
    late = 0.0 if made.expires is None else simulation.world.scheduler.now + EPOCH - made.expires + (hours or 0) * 3600
    expires = (made.expires is None) == (hours is None) and late < _QUEUE_SECONDS + 60.0
    if ours != ["1", by.user, hash_account(by.user)] or not (expires or by.laptop.wall):
        simulation.break_promise("what is created is labelled", f"{made} of {by.user}: {labels}")
    with mock.patch.dict(os.environ, TPU_LAUNCH_HOME=str(by.laptop.home)):
        asked = [item for item in RequestRecord(simulation.config).read() if item.node == made.name]
    recorded = any(item.candidate.zone == made.node.zone and item.ended is None for item in asked)
    if simulation.races and not recorded:
        simulation.break_promise("what is asked for is recorded", f"{made} of {by.name}: {asked}")
    calm = not any(fault.kind in ("stale", "old describe", "date", *MEDDLING) for fault in simulation.faults)
    for down in simulation.commands if calm and not by.laptop.asleep else ():
        if down.name == "down" and down.code == 0 and down.laptop is by.laptop and by.ended < down.began:
            simulation.break_promise("after down nothing of ours comes", f"{made} by {by.name}")
    for other in simulation.world.google.slices.values() if by.name == "up" and calm else ():
        known = other.creator == by.user and other.state == "READY" and other.ready_at < by.began
        if known and other is not made and not simulation.races:
            simulation.break_promise("up continues from the existing slice", f"{made} beside {other}")
    if by.name not in SUPERVISORS:
        return
    for ledger in list_runs(by.laptop.home, simulation.commands[0].machine):
        recovers = stopped = False
        for event in ledger.events():
            match event:
                case events.Recovering() | events.SliceReplaced():
                    recovers, stopped = True, False
                case events.RunStopRequested() | events.RecoveryGivenUp():
                    stopped = True
                case events.Requested() if stopped:
                    recovers = False
        if recovers:
            return
    simulation.break_promise("run makes a slice only in a recovery", f"{by.name} of {by.user}")


def told_deletion_is_true(simulation: SimulatedRun, command: Command) -> None:
    """A command tells that a slice or a request was deleted only after a user has deleted one."""
    words = ("was deleted by another command", "deleted as soon as it was READY", "it was deleted", "client deleted")
    told = [text for text in command.said if any(word in text for word in words)]
    others = [text for each in simulation.commands if each is not command for text in each.said]
    ending = any("interrupted while it was started: ending it" in text for text in others)
    killed = any(each.killed and each.name in SUPERVISORS for each in simulation.commands)
    ending |= killed and any(not job.confirmed for job in simulation.world.record.jobs.values())
    if ending and simulation.world.cluster is not None:  # another `run` has deleted the JobSet of that start
        return
    if told and not any(at < command.ended for at in simulation.world.record.deletions):
        simulation.break_promise("what is told deleted was deleted", f"{command.name}: {told[0][:300]}")


def stockout_is_waited_out(simulation: SimulatedRun, command: Command) -> None:
    """An `up` gives up for lack of capacity only after slice.stockout_minutes, or the time of its own request."""
    if command.name != "up" or command.code != Exit.STOCKOUT or command.laptop.asleep or command.laptop.wall:
        return
    section = simulation.config.slice
    queues = section.queued and command is simulation.commands[0]
    longest = _QUEUE_SECONDS if queues else section.stockout_minutes * 60 - _LONGEST_PAUSE
    seconds = simulation.world.scheduler.now - command.began
    if (queues or not section.queued) and seconds < longest and "can't be started" not in str(command.error):
        simulation.break_promise("a stock-out is waited out", f"{command.name} after {seconds:.0f} s: {command.error}")


def what_was_asked_for_is_used_or_withdrawn(simulation: SimulatedRun, command: Command) -> None:
    """A command leaves no request but a granted one, unless it says so; one gives way only to another candidate's."""
    names, said = {str(each) for each in simulation.config.candidates}, [text for text in command.said if ": " in text]
    if not simulation.races or command.name not in ("up", *SUPERVISORS):
        return
    asked = [(number, *text.split(": ", 1)) for number, text in enumerate(said) if text.split(": ", 1)[1] in names]
    for number, text in enumerate(said):
        gave_way = text.partition(": ")[0] if "trying another candidate" in text else ""
        later = next((name for at, _, name in asked if at > number), "")
        if gave_way and later in (name for _, request, name in asked if request == gave_way):
            simulation.break_promise("a request gives way to another", f"{text}, then {later}")
    made = {request for _, request, _ in asked}
    if simulation.loses_by_its_disk or any("not withdrawn yet" in text for text in said):
        return
    command.process.enter()
    ended = "".join(simulation.world.storage.objects)  # perhaps by another workstation, which has taken the run over
    for request in RequestRecord(simulation.config).open():
        taken_over = any(f"/{request.number:06d}.{part}.json" in ended for part in ("granted", "ended"))
        if f"request {request.number}" in made and request.granted is None and not taken_over:
            simulation.break_promise("what was asked for is used or withdrawn", f"{command.name}: {request}")


def better_candidates_are_waited_for(simulation: SimulatedRun, command: Command) -> None:
    """A granted slice is taken two minutes after the first was READY, or when no better candidate is requested."""
    names, left = [str(each) for each in simulation.config.candidates], dict[str, str]()
    for at, text in command.told if command.name in ("up", *SUPERVISORS) else ():
        match = re.match(r"request (\d+): (.*)|withdrawing (.*)", text)
        request, what, withdrawn = match.groups(default="") if match else ("", "", "")
        if what in names:
            left[request] = what
        elif what.startswith("granted, "):
            better = names[: names.index(what.removeprefix("granted, "))]
            ready = [node.ready_at for node in simulation.world.record.billed if node.ready_at <= at]
            if set(better) & {*left.values()} and at - min(ready, default=0.0) < _BETTER_SECONDS:
                simulation.break_promise("a better candidate is waited for", f"{text}, after {ready}, beside {left}")
        else:
            left = {key: name for key, name in left.items() if key != request and name not in withdrawn.split(", ")}


def places_are_tried_in_their_order(simulation: SimulatedRun, command: Command) -> None:
    """`up` tries zones in the file's order, each after the one before had no capacity; with a slice, its zone first."""
    zones = simulation.config.zones
    tried = [match[1] for text in command.said if (match := re.match(r"(?:creating|requesting) .* in ([\w-]+)", text))]
    if command.name != "up" or simulation.races or not tried:
        return
    order = [tried[0], *(zone for zone in zones if zone != tried[0])]
    wrong = [pair for pair in pairwise(tried) if pair[1] not in (pair[0], order[order.index(pair[0]) - len(order) + 1])]
    first = command is simulation.commands[0] and simulation.scenario.leftover in ("", "preempted")
    hidden = any(fault.kind in ("old describe", *MEDDLING) for fault in simulation.faults)
    hidden |= any(each.name in ("down", "gc") and each.began < command.ended for each in simulation.commands)
    passes_over = "no capacity in " in "".join(command.said) and {*zones} - {*tried}
    if wrong or (first and (passes_over or tried[0] != simulation.leftover_zone) and not hidden):
        simulation.break_promise("places are tried in their order", f"{tried} of {zones}")


def _is_told_late(world: World) -> bool:
    """Returns whether Google may tell what was, or a colleague meddles."""
    return any(fault.kind in ("stale", "old describe", *MEDDLING) for fault in world.faults)


def told_missing_is_missing(simulation: SimulatedRun, command: Command) -> None:
    """Checks that a slice is called missing only if it was, at some time since the command began."""
    told = f"slice {simulation.config.slice.name} does not exist" in str(command.error)
    if not told or _is_told_late(simulation.world) or simulation.races:
        return
    for node in simulation.world.google.slices.values():
        if node.creator == command.laptop.user and node.state == "READY" and node.ready_at < command.began - 5.0:
            simulation.break_promise("what is told missing is missing", f"{command.name}: {node}: {command.error}")


def slices_are_replaced_for_their_own_hosts(simulation: SimulatedRun) -> None:
    """A slice is replaced for a host by which its last attempts, as many as the file says, were lost or failed."""
    for ledger in simulation.ledgers():
        ends: list[int] = []
        for event in ledger.events():
            if isinstance(event, events.Ended) and event.outcome not in (events.NOT_STARTED, events.VANISHED):
                of_a_host = event.cause is not None and event.outcome in ("host lost", "failed")
                ends.append(event.cause.worker if event.cause is not None and of_a_host else -1)
            elif isinstance(event, events.SliceReplaced):
                wanted = simulation.config.run.replace_after or 0
                if event.host >= 0 and ends[-wanted:] != [event.host] * wanted:
                    simulation.break_promise("a slice is replaced for its own hosts", f"{event}: {ends}")
                ends.clear()


def attempts_tell_their_slice(simulation: SimulatedRun) -> None:
    """The record of an attempt has the slice on which its containers were, and that slice's list price."""
    nodes = {host: item.node for item in simulation.world.record.billed for host in item.hosts}
    for ledger in simulation.ledgers():
        for event in ledger.events():
            job = simulation.world.record.jobs.get((ledger.run_id, getattr(event, "attempt", -1)))
            there = [nodes[item.host] for item in job.containers.values() if item.host in nodes] if job else []
            for node in there if isinstance(event, events.AttemptBegan) else ():
                kind = "spot" if node.resource.get("schedulingConfig", {}).get("spot") else "on-demand"
                wanted = Candidate(node.resource["acceleratorType"], node.zone, kind)
                price = per_hour(wanted.accelerator_type, wanted.zone, kind)
                if (event.slice, event.dollars_an_hour) != (str(wanted), price):
                    simulation.break_promise("an attempt tells its slice", f"{event}, not {wanted} for {price}")


def budget_is_spent_on_slices(simulation: SimulatedRun) -> None:
    """A run stops for its budget only when slices have cost that much, and soon after they have."""
    budget = simulation.config.run.budget
    if budget is None or simulation.ann.wall:
        return
    # A slice that is taken counts until that is recorded: in a recovery, or while the API is out, the workstation
    # sleeps or no process supervises the run, that may take minutes.
    deaf = any(action.kind == "asleep" for action in simulation.actions)
    deaf |= any(fault.kind in API_FAULTS for fault in simulation.faults)
    taken = [fault for fault in simulation.faults if fault.kind in _TAKERS]
    meddled = any(deaf or fault.anchor not in ("start", "beginning") for fault in taken)
    left = any(command.killed or command.code == Exit.DETACHED for command in simulation.commands)
    elsewhere = any(each.name == "down" and each.laptop is not simulation.ann for each in simulation.commands)
    meddled |= (left or simulation.full_disk) and (bool(taken) or elsewhere)
    for command in simulation.commands:
        # `watch` repeats what its processes say, of every attempt.
        if command.name != "watch" and sum("stopping it, so that it saves" in text for text in command.said) > 1:
            simulation.break_promise("a spent budget stops a run once", f"{command.name}: {command.said[-9:]}")
        for at, text in command.told if not meddled else ():
            enough = min(budget * 0.99, budget - _rate(simulation) * _BUDGET_SECONDS)
            if "the budget is spent" in text and (cost := _cost_of_slices(simulation, at)) < enough:
                simulation.break_promise("a budget is spent on slices", f"${cost:.2f} at {at:.0f}: {text}")
    for job in simulation.world.record.jobs.values():
        seconds = max((item.ended for item in job.containers.values()), default=0.0) - (job.began or 0.0)
        allowed = budget + _rate(simulation) * _BUDGET_SECONDS
        watched = not simulation.actions and not simulation.kill_at and not simulation.faults
        watched &= not simulation.races  # which have prices of their own
        if job.began is not None and watched and seconds * _rate(simulation) > allowed:
            simulation.break_promise("a budget is kept", f"{job} trains for {seconds:.0f} s, {budget} dollars")


def _rate(simulation: SimulatedRun) -> float:
    """Returns the dollars a second of the most expensive slice that the file allows."""
    prices = [per_hour(item.accelerator_type, item.zone, item.capacity) for item in simulation.config.candidates]
    return max(price or 0.0 for price in prices) / 3600


def _cost_of_slices(simulation: SimulatedRun, until: float) -> float:
    """Returns the most that ann's slices can have cost until a moment."""
    billed = [node for node in simulation.world.record.billed if node.ready_at < until]
    lasted = [(until if node.gone_at is None else min(until, node.gone_at)) - node.ready_at for node in billed]
    return sum(max(0.0, seconds) for seconds in lasted) * _rate(simulation)


def list_shows_what_is(world: World, listing: Listing, began: float, date: float) -> None:
    """Checks that `list` and `gc` show each slice that stayed and each request that has waited since, and whose it is.
    `date`: the workstation's, in Unix seconds."""
    if _is_told_late(world):
        return
    shown = {(item.zone, item.name): item.row(date) for item in listing.slices}
    for name, each in [*world.google.slices.items(), *world.google.requests.items()]:
        zone = name.split("/")[3]
        if zone not in world.config.zones or zone in listing.failures or each.creator == "stranger":
            continue
        if isinstance(each, Slice):
            stays, states = each.state == "READY" and each.ready_at < began, ("READY", "STARTING")
        else:
            created = (parse_time(each.made.resource["createTime"]) or 0.0) - EPOCH
            stays, states = each.state in ("ACCEPTED", "WAITING_FOR_RESOURCES") and created < began, ("(queued)",)
        row = shown.get((zone, each.name), [""] * 9)
        if stays and (row[4] != each.creator or not any(state in row[2] for state in states)):
            world.break_promise("a list shows what is", f"{each}: {row}")


def gc_removes_what_has_expired(simulation: SimulatedRun, command: Command) -> None:
    """After a `gc`, what it reports as deleted is gone, and so is each READY slice of its user that had expired."""
    if command.name != "gc" or _is_told_late(simulation.world):
        return
    named = {text.removesuffix(": deleted") for text in command.said if text.endswith(": deleted")}
    all_ = command.code == 0 and not simulation.faults and len(simulation.config.zones) == 1
    date, google = command.began + EPOCH + command.laptop.wall, simulation.world.google
    for left in (*google.slices.values(), *google.requests.values()):
        again = left.by is not None and left.by.ended > command.began
        wrong = left.name in named and left.state != "DELETING" and not again
        if isinstance(left, Slice) and left.state == "READY" and left.by is not None and left.expires is not None:
            wrong |= all_ and left.expires < date and "left alone" not in "\n".join(command.said)
        if wrong and left.creator == command.laptop.user:
            simulation.break_promise("gc removes what has expired", f"{left}: {command.said}")
