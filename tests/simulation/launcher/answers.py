"""Promises about each answer of a provider, compared with the world just after it was given."""

from __future__ import annotations

import functools
import math
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from launcher.provider import Attempt, HostReport, Observation, Provider, SliceState, container_name
from launcher.tpu_vm import connections
from launcher.tpu_vm.requests import RequestRecord
from tests.simulation.launcher.faults import API_FAULTS
from tests.simulation.launcher.hosts import EPOCH

if TYPE_CHECKING:
    from tests.simulation.launcher.cluster import Cluster
    from tests.simulation.launcher.commands import Command
    from tests.simulation.launcher.hosts import Host

_WATCH_SECONDS = 30.0  # for which a cluster that fails shows a pod as it was
_EVENT_SECONDS = 5.0  # from a container's end until its pod shows it, and a watch that works tells of it
_OLD = ("stale", "old describe")  # faults after which Google tells what was


@dataclass
class _Call:
    provider: Any  # a Provider, whose attributes are read
    command: Command
    began: float
    hosts: int
    there: frozenset[str]
    """Slices and JobSets of the command's user when it began; those that had not ended, with a "+"."""


def check_answers(provider: Provider, command: Command) -> Provider:
    """Makes the answers of a provider be checked, and returns it."""
    for name, check in _CHECKS.items():
        setattr(provider, name, functools.partial(_answer, getattr(provider, name), check, provider, command))
    return provider


def _answer(
    method: Callable[..., Any], check: Callable[..., str], provider: Provider, command: Command,
    *given: Any, **options: Any,
) -> Any:  # fmt: skip
    there = _there(command) if check in (_describe, _create, _stop) else frozenset[str]()
    call = _Call(provider, command, command.world.scheduler.now, provider.host_count, there)
    answer = method(*given, **options)
    if wrong := check(call, answer, *given, **options):
        command.world.break_promise("a provider tells what is", f"{command.name}: {wrong}")
    return answer


def _there(command: Command) -> frozenset[str]:
    if (cluster := command.world.cluster) is not None:
        jobsets = {each["metadata"]["name"]: each for each in cluster.store.all("jobsets")}
        over = {name for name, each in jobsets.items() if each.get("status", {}).get("terminalState")}
        return frozenset([*jobsets, *(f"+{name}" for name in jobsets.keys() - over)])
    slices = command.world.google.slices.values()
    return frozenset(each.node.resource["id"] for each in slices if each.creator == command.laptop.user)


def _describe(call: _Call, state: SliceState | None) -> str:
    """A slice that stays is described, with its hosts."""
    world, both = call.command.world, (call.there, _there(call.command))
    if world.cluster is not None:
        return _describe_cluster(call, world.cluster, state, *both) if state is not None else "no cluster"
    if any(fault.kind in _OLD for fault in world.faults):
        return ""
    if state is None:
        return f"no slice, and there is {both[0] & both[1]}" if both[0] & both[1] else ""
    node = next((each for each in world.google.slices.values() if each.node.resource["id"] == state.uid), None)
    hosts = [host.address for host in node.hosts] if node is not None else [*state.hosts]
    return f"{state}, whose hosts are {hosts}" if state.ready and [*state.hosts] != hosts else ""


def _describe_cluster(
    call: _Call, cluster: Cluster, state: SliceState, before: frozenset[str], after: frozenset[str]
) -> str:
    """A JobSet that has not ended is told, and whether another client has deleted the observed one."""
    _, _, told = state.detail.partition(", JobSet ")
    stays = {name[1:] for name in before & after if name.startswith("+")}
    others = (before | after) - (before & after)
    right = told in stays if stays else not told
    if not others and not (right and all(host.startswith(told) for host in state.hosts)):
        return f"{state}, and there are {sorted(before)}"
    observed = call.provider._observed
    run = observed.rpartition("-")[0]
    may_see_later = any(name.removeprefix("+").rpartition("-")[0] == run for name in (before | after) - {observed})
    by_another = observed and cluster.deleted.get(observed) is not call.command
    gone = observed in cluster.deleted and observed not in before
    is_known = observed in call.provider._removed or may_see_later
    if by_another and gone and not is_known and state.state != "DELETED":
        return f"{state}, and {observed} was deleted"
    never = observed not in cluster.created  # its start was interrupted: nothing tells it from one that was deleted
    if state.state == "DELETED" and (observed in after or not (never or observed in cluster.deleted)):
        return f"{state}, and {observed} is there"
    return ""


def _create(call: _Call, _answer: None, *_given: Any, **_options: Any) -> str:
    """A slice that was created is READY, its hosts are up and their addresses kept; a cluster's nodes are counted."""
    world, since = call.command.world, call.began
    said = "\n".join(text for at, text in call.command.told if at >= since)
    if (cluster := world.cluster) is None:
        nodes = [node for node in world.google.slices.values() if node.name.startswith(world.config.slice.name)]
        ready = [node for node in nodes if node.state == "READY"]
        up = any(all(host.key_known and host.engine_up for host in node.hosts) for node in ready)
        kept = connections.load_addresses(call.provider.config)
        up &= kept is not None and [*kept.internal] in [[host.address for host in node.hosts] for node in ready]
        return "" if up or world.struck else f"there is {nodes}, and the next command knows {kept}"
    if cluster.changed_at >= since or "permission" in world.record.permanent:
        return ""
    short, hidden = "the cluster has" in said, "you may not list nodes" in said
    wanted = (not cluster.hides_nodes and len(cluster.nodes) < cluster.size, cluster.hides_nodes)
    return "" if (short, hidden) == wanted else f"{len(cluster.nodes)} of {cluster.size} nodes, and told was {said!r}"


def _withdraw_unused(call: _Call, _answer: None) -> str:
    """Checks that only the request whose slice is used stays recorded, unless another command works or it is told."""
    mine = call.command
    left = RequestRecord(mine.config).open()
    told = any("not withdrawn yet" in text for at, text in mine.told if at >= call.began)
    wrong = any(each.granted is None or len(left) > 1 for each in left)
    return f"{left} stay" if wrong and not told and mine.laptop.at_work() < 2 else ""


def _start(call: _Call, reports: Sequence[HostReport], attempt: Attempt, *_given: Any, **_options: Any) -> str:
    """A host that is reported as started has started its container, or its pod never will: it was taken."""
    world, job = call.command.world, call.command.world.record.jobs.get((attempt.run_id, attempt.number))
    if wrong := _check_reports(reports, range(call.hosts)):
        return wrong
    for report in reports:
        item = job.containers.get(report.worker) if job is not None else None
        if item is not None and (wrong := _check_clock(call, item.host)):
            return wrong
        taken = world.cluster is not None and (world.struck or world.record.stops)
        if report.ok and not taken and (job is None or report.worker not in job.starts):
            return f"{report}, and {job} did not start there"
    return ""


def _check_clock(call: _Call, host: Host) -> str:
    """A host whose clock differs from the workstation's by more than half a minute is told, with the difference."""
    world, laptop = call.command.world, call.command.laptop
    if world.cluster is not None or world.calm_from >= call.began:  # a clock may have jumped meanwhile
        return ""
    differs, seconds = abs(host.wall - EPOCH - laptop.wall), world.scheduler.now - call.began
    said = "".join(f"{text}\n" for at, text in call.command.told if at > call.began)
    told = [float(each) for each in re.findall(rf"host {host.worker}: its clock is (\d+) s off", said)]
    wrong = any(not max(30.0, differs - seconds - 3.0) <= each <= differs + 1.0 for each in told)
    wrong |= not told and differs > seconds + 33.0
    return f"{told}, and {host!r} differs by {differs:.0f} s" if wrong else ""


def _stop(
    call: _Call, reports: Sequence[HostReport], container: str, *,
    remove: bool, workers: Sequence[int] | None = None, **_options: Any,
) -> str:  # fmt: skip
    """A host that is reported as stopped runs the container no more. Pods of a JobSet that had begun before are kept
    until they are removed, and their logs with them, unless another command has deleted the pods already."""
    job, cluster, name = _job_of(call, container), call.command.world.cluster, container.removeprefix("tpu-launch-")
    keeps = cluster is not None and name in call.there and not (remove or call.command.world.faults)
    keeps = keeps and all(by is call.command for pod, by in cluster.deleters.items() if pod.startswith(f"{name}-"))
    begun = job is not None and (job.began or math.inf) < call.began
    if keeps and begun and cluster.deleted.get(name) is call.command:
        return f"{name} is deleted, and {job} has begun"
    if wrong := _check_reports(reports, range(call.hosts) if workers is None else workers):
        return wrong
    seconds = call.command.world.scheduler.now - call.began
    for report in reports:
        item = job.containers.get(report.worker) if job is not None else None
        if report.ok and report.detail:
            return f"{report}, which is ok"
        if item is not None and report.ok and item.running and item.host.up:
            return f"{report}, and {item.name} runs on {item.host!r}"
        if item is not None and "its pod did not end" in report.detail and item.ended < call.began:
            return f"{report}, and {item.name} had ended"
        if (told := re.search(r"did not end within (\d+) s", report.detail)) and seconds < float(told[1]):
            return f"{report} after {seconds:.0f} s"
    return ""


def _check_reports(reports: Sequence[HostReport], workers: Sequence[int]) -> str:
    """Each host has one report, and each failure a reason."""
    if [report.worker for report in reports] != [*workers]:
        return f"{reports} of hosts {[*workers]}"
    return next((f"{report} without a reason" for report in reports if not (report.ok or report.detail)), "")


def _observe(call: _Call, seen: Observation, worker: int, container: str, *_given: Any, **_options: Any) -> str:
    """A container is in the state that is told, or was a moment ago; it is told unless something was in the way."""
    world, state, job = call.command.world, seen.container, _job_of(call, container)
    item = job.containers.get(worker) if job is not None else None
    if state is None:
        calm = call.began > world.calm_from + 90.0 and not call.command.laptop.asleep
        # Else the workstation slept meanwhile, with a running clock, or before, and a firewall forgot its connection.
        calm &= world.scheduler.now - call.began < 15.0
        calm &= not any(link.forgotten and link.actor is call.command for link in world.links)
        well = calm and item is not None and item.running and item.host.quiet_since(call.began - 90.0)
        return f"{seen} of {container} on {item and item.host!r}" if well or not seen.problem else ""
    if item is None or item.host.gone or not item.host.up:
        return ""
    there = item.host.containers.get(container) is item and (world.cluster is None or item.running)
    calm = not any(fault.kind in API_FAULTS for fault in world.faults)
    slack = math.inf if "awake" in world._reached else _EVENT_SECONDS if calm else _WATCH_SECONDS
    slack = 0.0 if world.cluster is None else slack
    ended, told = (item.exit_code, item.oom_killed), (state.exit_code, state.oom_killed)
    wrong = state.running and item.ended < call.began - slack
    wrong |= state.ended and item.running
    wrong |= state.ended and item.status == "exited" and not item.invented and told != ended
    wrong |= state.status == "absent" and there
    return f"{state} of {item.name} on {item.host!r}, which is {item.status} with {ended}" if wrong else ""


def _job_of(call: _Call, container: str) -> Any:
    """Returns the attempt of a container; None of one that was not started."""
    return next((job for key, job in call.command.world.record.jobs.items() if container_name(*key) == container), None)


_CHECKS: dict[str, Callable[..., str]] = {
    "describe": _describe, "create": _create, "start": _start, "stop": _stop, "observe": _observe, "look": _observe,
    "withdraw_unused": _withdraw_unused,
}  # fmt: skip
