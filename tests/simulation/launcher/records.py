"""Promises about each event that a ledger records, checked just before it is written: its writer may be killed right
after, so what it says must be true already."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from launcher.run import events
from tests.simulation.launcher.promises import containers_of, slices_of

if TYPE_CHECKING:
    from launcher.run.events import RunEvent
    from launcher.run.ledger import Ledger
    from tests.simulation.launcher.hosts import Container
    from tests.simulation.launcher.simulated_run import SimulatedRun

_BEGUN_SECONDS, _CALM_SECONDS = 10.0, 60.0  # since a program's begin, and since the last fault
_SEEN_SECONDS, _END_SECONDS, _POD_SECONDS = 1.0, 3.0, 8.0  # from an end, and the last one, to its record; more for pods
_TOLD_AT_ONCE = ("finished", "saved", "failed", "bad input")  # with a lost connection, an earlier cause is waited for


def check_event(simulation: SimulatedRun, ledger: Ledger, event: RunEvent) -> None:
    """Checks the promises about an event that is about to be recorded; on a cluster, pods end after their deletion."""
    if isinstance(event, events.HostEnded | events.Ended):
        _end_is_seen_in_time(simulation, ledger, event)
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


def _end_follows_its_acts(simulation: SimulatedRun, ledger: Ledger, event: events.Ended) -> None:
    """An attempt's end is recorded when no host runs it any more but those that are recorded as left behind."""
    left = {(item.attempt, worker) for item in ledger.state.orphans for worker in item.hosts}
    for container in _on_hosts(simulation, ledger, event.attempt):
        if container.running and (event.attempt, container.host.worker) not in left:
            _break(simulation, event, f"{container.name} runs on {container.host!r}")


def _end_is_seen_in_time(simulation: SimulatedRun, ledger: Ledger, event: events.HostEnded | events.Ended) -> None:
    """A supervisor for which nothing is out of order sees at once that a program ends, and then that all have."""
    world, command = simulation.world, simulation.running_command()
    job = world.record.jobs.get((ledger.run_id, event.attempt))
    idle = simulation.full_disk is not None or any(action.kind == "asleep" for action in simulation.actions)
    if job is None or job.began is None or command is None or command.began > job.began or idle:
        return
    items, of_host = job.containers.values(), isinstance(event, events.HostEnded)
    calm = max([world.calm_from, *(at for item in items for at in item.host.troubled)]) + _CALM_SECONDS
    job.watched = not of_host and calm < job.began
    ends = [item.ended for item in items if not of_host or item.host.worker == event.host]
    late = world.scheduler.now - max(ends) - (0.0 if world.cluster is None else _POD_SECONDS)
    most = _SEEN_SECONDS if of_host else _END_SECONDS if event.outcome in _TOLD_AT_ONCE else math.inf
    if min(ends) > max(calm, job.began + _BEGUN_SECONDS) and late > most:
        _break(simulation, event, f"{job} has ended for {late:.1f} s")


def _on_hosts(simulation: SimulatedRun, ledger: Ledger, attempt: int) -> list[Container]:
    """Returns the containers of an attempt on hosts that are up."""
    return [item for item in containers_of(simulation.world, ledger.run_id) if item.attempt == attempt and item.host.up]


def _break(simulation: SimulatedRun, event: RunEvent, what: str) -> None:
    simulation.break_promise("what is recorded is so already", f"{event}: {what}")
