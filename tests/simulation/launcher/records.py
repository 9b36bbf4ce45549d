"""Promises about each event of a ledger, checked before it is written: its writer may be killed right after."""

from __future__ import annotations

import math
from collections import Counter
from typing import TYPE_CHECKING

from launcher.run import events
from launcher.tpu_vm.requests import RequestRecord
from tests.simulation.launcher.hosts import EPOCH
from tests.simulation.launcher.world import containers_of, slices_of
from training.machine import parse_time

if TYPE_CHECKING:
    from launcher.run.events import RunEvent
    from launcher.run.ledger import Ledger
    from tests.simulation.launcher.hosts import Container
    from tests.simulation.launcher.simulated_run import SimulatedRun

_BEGUN_SECONDS, _CALM_SECONDS = 10.0, 60.0  # since a program's begin, and since the last fault
_SEEN_SECONDS, _END_SECONDS, _SLOW_SECONDS = 1.0, 3.0, 8.0  # from an end, and the last one, to its record; more if slow
_TOLD_AT_ONCE = ("finished", "saved", "failed", "bad input")  # with a lost connection, an earlier cause is waited for


def check_event(simulation: SimulatedRun, ledger: Ledger, event: RunEvent) -> None:
    """Checks the promises about an event that is about to be recorded; on a cluster, pods end after their deletion."""
    if isinstance(event, events.HostEnded | events.Ended):
        _end_is_seen_in_time(simulation, ledger, event)
    if isinstance(event, events.Judged | events.Ended):
        _verdict_is_whole(simulation, ledger, event)
    if isinstance(event, events.AttemptBegan | events.Recovering | events.Recovered):
        _what_follows_has_a_reason(simulation, ledger, event)
    if simulation.world.cluster is not None:
        return
    match event:
        case events.Ended():
            _end_follows_its_acts(simulation, ledger, event)
        case events.Reaped():
            for container in _on_hosts(simulation, ledger, event.attempt):
                if container.host.worker in event.hosts:
                    _break(simulation, event, f"{container.name} is on {container.host!r}")
        case events.Started():
            job = simulation.world.record.jobs.get((ledger.run_id, event.attempt))
            if job is None or len(job.containers) < job.hosts:
                _break(simulation, event, f"{job} was not started on all hosts")
        case events.HostEnded():
            for container in _on_hosts(simulation, ledger, event.attempt):
                if container.host.worker != event.host:
                    continue
                code = None if container.invented or event.exit_code is None else container.exit_code
                if container.running or code not in (None, event.exit_code):
                    _break(simulation, event, f"{container.name} is {container.status} with {container.exit_code}")
        case events.RecoveryGivenUp(reason="no slice is left"):
            command = simulation.running_command()
            left = slices_of(simulation.world, command.laptop.user) if command is not None else []
            if left := [node for node in left if node.state == "READY" and node.ready_at < command.began]:
                _break(simulation, event, f"there is {left[0]}")
        case events.Requested():
            command = simulation.running_command()
            known = command.known_stops.get(ledger.run_id, 0) if command is not None else event.stops
            if event.stops > known and ledger.bucket is None:  # with a bucket, `run` first pulls what it has
                _break(simulation, event, f"{known} stops were requested when the command began")
            for down in simulation.commands if command is not None and not simulation.full_disk else ():
                at_work = down.name == "down" and down.code is None and not down.killed
                if at_work and down.laptop is command.laptop and down.began < command.began:
                    _break(simulation, event, f"a `down` deletes the slice since {down.began:.1f}")


def _end_follows_its_acts(simulation: SimulatedRun, ledger: Ledger, event: events.Ended) -> None:
    """An attempt's end is recorded when no host runs it any more but those that are recorded as left behind."""
    left = {(item.attempt, worker) for item in ledger.state.orphans for worker in item.hosts}
    for container in _on_hosts(simulation, ledger, event.attempt):
        if event.outcome == events.VANISHED and container.host.engine_up:
            _break(simulation, event, f"{container.name} is on {container.host!r}")
        if container.running and (event.attempt, container.host.worker) not in left:
            _break(simulation, event, f"{container.name} runs on {container.host!r}")


def _verdict_is_whole(simulation: SimulatedRun, ledger: Ledger, event: events.Judged | events.Ended) -> None:
    """A verdict by a host that failed tells of each other host that was seen to fail before it how that ended, once;
    other verdicts tell of none. What it tells of its first cause is what was seen."""
    known = [each for each in ledger.events() if each.attempt == event.attempt]
    judged = [number for number, each in enumerate(known) if isinstance(each, events.Judged)]
    seen = {each.host: each for each in known[: min(judged, default=None)] if isinstance(each, events.HostEnded)}
    gone = {host for host, each in seen.items() if each.exit_code is None and not each.finished_at}
    failed = {host: each for host, each in seen.items() if each.exit_code not in (0, 75) and host not in gone}
    first, code = (event.cause.worker, event.cause.exit_code) if event.cause is not None else (-1, None)
    of_hosts = event.outcome in ("failed", "host lost", "connection lost", "bad input")
    due = {f"host {host}: {each.what}" for host, each in failed.items() if of_hosts and host != first}
    due -= {text for text in due if text.endswith(": exit code 0")} - {*event.symptoms}  # of a later reboot
    # A stall tells of hosts that hang; one that refused its input after a stop, of itself alone.
    tells = event.outcome != "stalled" and (event.outcome != "bad input" or not ledger.state.stop_requested)
    late = tuple(f"host {host}:" for host in gone)  # a pod's exit code may come after it was seen to be gone
    wrong = tells and Counter(each for each in event.symptoms if not each.startswith(late)) != Counter(due)
    wrong |= first in failed and failed[first].exit_code not in (None, code)
    wrong |= event.outcome == "connection lost" and any(each.exit_code != 76 for each in failed.values())
    again = len(judged) + isinstance(event, events.Judged) > 1  # after a supervisor that was killed
    if wrong and not again and not simulation.full_disk and ledger.bucket is None:
        _break(simulation, event, f"hosts were seen to end so: {seen}")


def _what_follows_has_a_reason(simulation: SimulatedRun, ledger: Ledger, event: RunEvent) -> None:
    """An attempt follows another only after a `run`, or a retry that is counted; a recovery took as long as is told."""
    known, command = ledger.events(), simulation.running_command()
    since = command.began if command is not None else 0.0
    match event:
        case events.AttemptBegan():
            started = max((at for at, each in enumerate(known) if isinstance(each, events.Started)), default=-1)
            if not any(isinstance(each, events.Requested | events.Recovering) for each in known[started + 1 :]):
                _break(simulation, event, "no user and no retry asks for it")
            _pause_was_kept(simulation, ledger, event, since + EPOCH)
            _requests_are_shared(simulation, ledger, event)
        case events.Recovering():
            ended = [each for each in known if isinstance(each, events.Ended)][-1:]
            of_program = event.after in ("failed", "stalled")
            retries = [each for each in known if isinstance(each, events.Recovering)]
            number = 1 + sum((each.after in ("failed", "stalled")) == of_program for each in retries)
            counted = f"{'failure' if of_program else 'preemption'} {number} of " in event.reason
            final = event.after in ("finished", "stopped", "bad input", "slice deleted")
            told = [(each.attempt, each.outcome) for each in ended]
            if final or not counted or told != [(event.attempt, event.after)]:
                _break(simulation, event, f"the last end is {ended} after {number - 1} such retries")
        case events.Recovered():
            times = {type(each.event): parse_time(each.time) or 0.0 for each in ledger.entries()}
            date, took = simulation.world.scheduler.now + EPOCH, event.seconds
            waits = ledger.bucket is not None or simulation.full_disk  # before it is recorded
            began, late = times.get(events.Recovering, 0.0), math.inf if waits else 1.5
            here = began > since + EPOCH  # else another process began it
            jumps = any((each.wall, each.asleep) != (0.0, 0.0) for each in simulation.world.laptops)
            wrong = here and not date - began - late < sum(took.values()) < date - began + 0.3
            wrong |= not date - times[events.AttemptBegan] - late < took["start"]
            wrong |= min(took.values()) < 0.0 or (not here and sum(took.values()) > date - EPOCH - since + 0.3)
            if wrong and not jumps:
                _break(simulation, event, f"{date - began:.1f} s after its begin")


def _pause_was_kept(simulation: SimulatedRun, ledger: Ledger, event: events.AttemptBegan, since: float) -> None:
    """The process that tries again, which began at `since`, has recorded each round that failed, and waited then."""
    waits = [each for each in ledger.entries() if isinstance(each.event, events.Recovering | events.RoundFailed)]
    last, command = parse_time(waits[-1].time) or 0.0 if waits else 0.0, simulation.running_command()
    passed = simulation.world.scheduler.now + EPOCH - last
    told = sum(": not recovered yet: " in text for text in command.said) if command is not None else 0
    failed = sum(isinstance(each.event, events.RoundFailed) for each in waits)
    unsure = simulation.full_disk or ledger.bucket or any(each.wall or each.asleep for each in simulation.world.laptops)
    if not unsure and (told > failed or (last > since and passed < waits[-1].event.delay)):
        _break(simulation, event, f"{told} rounds have failed, the last {passed:.1f} s ago: {waits}")


def _requests_are_shared(simulation: SimulatedRun, ledger: Ledger, event: events.AttemptBegan) -> None:
    """Other machines know the open requests of a run that is in a bucket."""
    hindered = simulation.full_disk or any(each.kind in ("bucket", "offline") for each in simulation.faults)
    if (bucket := ledger.bucket) is None or hindered:
        return
    for request in RequestRecord(simulation.config).read():
        url = f"{bucket.requests}/{request.number:06d}.asked.json"
        if request.ended is None and url not in simulation.world.storage.objects:
            _break(simulation, event, f"{request} is not in the bucket")


def _end_is_seen_in_time(simulation: SimulatedRun, ledger: Ledger, event: events.HostEnded | events.Ended) -> None:
    """A supervisor for which nothing is out of order sees at once that a program ends, and then that all have."""
    world, command = simulation.world, simulation.running_command()
    job = world.record.jobs.get((ledger.run_id, event.attempt))
    idle = simulation.full_disk or any(action.kind == "asleep" for action in simulation.actions)
    if job is None or job.began is None or command is None or command.began > job.began or idle:
        return
    items, of_host = job.containers.values(), isinstance(event, events.HostEnded)
    calm = max([world.calm_from, *(at for item in items for at in item.host.troubled)]) + _CALM_SECONDS
    job.watched = not of_host and calm < job.began
    ends = [item.ended for item in items if not of_host or item.host.worker == event.host]
    slow = world.cluster is not None or command.laptop.refused_from < math.inf
    late = world.scheduler.now - max(ends) - _SLOW_SECONDS * slow
    most = _SEEN_SECONDS if of_host else _END_SECONDS if event.outcome in _TOLD_AT_ONCE else math.inf
    if min(ends) > max(calm, job.began + _BEGUN_SECONDS) and late > most:
        _break(simulation, event, f"{job} has ended for {late:.1f} s")


def _on_hosts(simulation: SimulatedRun, ledger: Ledger, attempt: int) -> list[Container]:
    """Returns the containers of an attempt on hosts that are up."""
    return [item for item in containers_of(simulation.world, ledger.run_id) if item.attempt == attempt and item.host.up]


def _break(simulation: SimulatedRun, event: RunEvent, what: str) -> None:
    simulation.break_promise("what is recorded is so already", f"{event}: {what}")
