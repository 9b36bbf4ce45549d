"""Promises about the end of each attempt: what a verdict says, compared with what happened, and what follows it."""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Sequence
from typing import TYPE_CHECKING

from launcher.errors import Exit
from launcher.run.events import Ended, HostEnded, Judged, Recovering
from tests.simulation.launcher import hangs
from tests.simulation.launcher.faults import API_FAULTS
from tests.simulation.launcher.hosts import EPOCH
from tests.simulation.launcher.jobs import SECRET, SUPERVISORS
from training.machine import parse_time

if TYPE_CHECKING:
    from tests.simulation.launcher.commands import Command
    from tests.simulation.launcher.hangs import Hang
    from tests.simulation.launcher.jobs import Cause, Job
    from tests.simulation.launcher.simulated_run import SimulatedRun

_EXPLAIN_SECONDS = 60.0  # from the limit of a stall until its explanation is recorded
_SSH_FAULTS = ("dead ssh", "no ssh", "ssh loses answers", "offline")
_LOST_SECONDS = 60.0  # beyond run.host_lost_seconds, from a host's death until it is told
_FIRST_DELAY, _LONGEST_DELAY = 5.0, 300.0  # seconds before another attempt after a failure


def hang_is_explained(simulation: SimulatedRun, job: Job, event: Ended, time: float) -> None:
    """A program that hangs is called stalled within its limit and a minute, and the host that differs is named; a slow
    one that makes progress is never called stalled. `time`: of the end, in Unix seconds."""
    hung, hang = job.hung, job.plan.hang
    if job.last_step < time - EPOCH:  # it stood still because it had lost a host
        return
    if event.outcome == "stalled" and (hung is None or hang is None):
        simulation.break_promise("a slow program is no stall", f"{job} ended {event.outcome}: {event.cause}")
    if event.outcome == "stalled" and hang is not None:
        allowed = {hang.named if job.hosts > 1 else 0}
        if hang.kind == "no stacks":  # a host that is out of reach gives none either
            allowed |= {worker for worker, item in job.containers.items() if item.host.troubled}
        if event.cause is None or event.cause.worker not in allowed:
            simulation.break_promise("the host that hangs is named", f"{job} hangs by {hang}; told was {event.cause}")
    undisturbed = simulation.is_undisturbed(time - EPOCH + 1.0)  # events have whole seconds
    if undisturbed and hang is not None and hung is not None and job.stall_seconds is not None:
        late = time - EPOCH - hung - hang.limit(job.stall_seconds, job.hosts)
        if event.outcome != "stalled" or not -1.0 <= late <= _EXPLAIN_SECONDS:
            simulation.break_promise("a hang is explained in time", f"{job}: {event.outcome}, {late:.0f} s: {hang}")
        elif job.hosts > 1:
            _check_stall(simulation, job, hang, event, time - EPOCH - hung)


def _check_stall(simulation: SimulatedRun, job: Job, hang: Hang, event: Ended, most: float) -> None:
    """Checks that a verdict tells a hang's kind, since when (`most` seconds ago), advice, and where others are."""
    silent, what = bool(hang.last_words(-1)), event.cause.what if event.cause is not None else ""
    lasted = re.search(r" for (\d+) s; .", what)
    least = 0.0 if silent else hang.limit(job.stall_seconds or 0.0, job.hosts) - 1.0
    right = (lasted is None) == (hang.kind in ("program", "step")) and hang.words in what
    right &= lasted is None or least <= float(lasted[1]) <= most + 1.0
    others = [worker for worker in range(job.hosts) if worker != hang.named]
    if not silent:
        right &= len(event.symptoms) == len(others)
        for worker, text in zip(others, event.symptoms, strict=False):
            right &= text.startswith(f"host {worker}: {min(_told(job, worker, math.inf, math.inf))}: ")
            right &= text.endswith(hangs.says(hang.show(worker)))
    if not right:
        simulation.break_promise("a hang is told by its kind", f"{job}: {event}, not {hang}")


def _told(job: Job, worker: int, since: float, until: float) -> set[str]:
    """Returns where a host has told that it is, between two moments; "" of a program that does not tell."""
    first, last = (max(0.0, at - (job.began or 0.0)) for at in (since, until))
    moments = [first, last, *(at for at, _, _ in job.timeline if first < at < last)]
    lines = [hangs.line(job.timeline, at, job.plan.hang, worker) for at in moments]
    return {f"step {each.step}, {each.phase}" if job.plan.tells else "" for each in lines}


def explain_tells_where_hosts_are(simulation: SimulatedRun, command: Command) -> None:
    """`explain` tells where each host of a live run is, and writes what it has got of each host into a file, masked."""
    job = simulation.world.record.jobs.get((command.run_id, command.attempt))
    if job is None or not command.stacks or simulation.faults or job.began is None or job.began > command.began:
        return
    shown = {worker: job.containers[worker].stacks.get(command, []) for worker in range(job.hosts)}
    changed = job.hung is not None and command.began < job.hung < command.ended
    if changed or any(len(each) != 2 for each in shown.values()):  # it has begun to hang, or ended, meanwhile
        return
    mask = "***" if simulation.world.cluster is None else SECRET
    wanted = {f"host-{worker}": "\n=== 5 s later\n".join(text for _, text in each) for worker, each in shown.items()}
    wanted = {name: text.replace(SECRET, mask) for name, text in wanted.items()}
    right = command.stacks == wanted | {"explanation": f"{command.explained}\n"}
    for worker, row in zip(shown, command.explained.splitlines()[1:], strict=False):
        places = {f"  host {worker}: {told}".rstrip() for told in _told(job, worker, command.began, command.ended)}
        right &= row.startswith((*places,)) and hangs.says(shown[worker][-1][0]) in row
    if not right or len(command.explained.splitlines()) != job.hosts + 2:
        simulation.break_promise("`explain` tells where hosts are", f"{job}, {shown.keys()}: {command.explained}")


def exec_runs_once(simulation: SimulatedRun, command: Command) -> None:
    """`exec` runs at most once a host, masks its lines, and tells how each ended; it does run on undisturbed hosts."""
    ran, going_on = Counter[int](), set[int]()
    for host in simulation.world.hosts:
        ran[host.worker] += host.executed.count(command)
        runs = any(container.running for container in host.containers.values())
        going_on |= {host.worker} if runs and not simulation.world.struck else set()
    wrong = {worker for worker, times in ran.items() if times > 1}
    for report in command.reports:
        worker, told = report.worker, report.exit_code is not None
        shown = command.lines[worker, "", f"works on {worker} with ***"]
        right = (ran[worker], shown, report.exit_code) == (1, 1, worker) if told else report.problem and not shown
        wrong |= set() if right and (told or worker not in going_on) else {worker}
    failed = [report for report in command.reports if report.exit_code != 0]
    first = min(failed, key=lambda report: report.ended).exit_code if failed else None
    if wrong or first not in (None, command.code):
        simulation.break_promise("`exec` runs once", f"hosts {wrong} of {command.reports}: ran {ran}, {command.lines}")


def causes_are_true(simulation: SimulatedRun, job: Job, event: Ended) -> None:
    """A program that was killed for its memory is no lost host, a first cause no symptom; and a container is called
    removed only if it was removed from its host, not if the slice is another one by now."""
    if (cause := event.cause) is None:
        return
    container = job.containers.get(cause.worker)
    lost = simulation.world.cluster is not None or simulation.loses_by_its_disk  # a pod goes with its node
    removed = "its container was removed" in cause.what and container is not None and container.host.gone
    wrong = (event.outcome == "host lost" and cause.oom_killed) or (removed and not lost)
    if wrong or any(line.startswith(f"host {cause.worker}:") for line in event.symptoms):
        simulation.break_promise("a verdict's cause is true", f"{job} ended {event.outcome}: {cause}: {event.symptoms}")


def finished_means_finished(simulation: SimulatedRun, job: Job, event: Ended) -> None:
    """A run is reported as finished or saved only when its programs ended so."""
    codes = {worker: container.exit_code for worker, container in job.containers.items()}
    wanted = {"finished": (0,), "saved": (0, 75)}.get(event.outcome)
    rebooted = any(container.boot != container.host.boot for container in job.containers.values())
    if wanted and not rebooted and (len(codes) < job.hosts or any(code not in wanted for code in codes.values())):
        simulation.break_promise("finished means finished", f"{job} ended {event.outcome}: {codes}")


def verdict_names_the_first_cause(simulation: SimulatedRun, job: Job, event: Ended) -> None:
    """The verdict names the first thing that was made to happen, where it can be told from all others."""
    causes = [truth for truth in job.causes if truth.kind != "kill"]
    if not causes or event.outcome == "not started" or job.plan.kind == "stall":
        return
    allowed = _verdicts_of(simulation, job, causes)
    told = (event.outcome, event.cause.worker if event.cause is not None else -1)
    if allowed and told not in allowed and (event.outcome, None) not in allowed:
        simulation.break_promise("the verdict names the first cause", f"{job}: {told}, not {allowed}, of {causes}")


def _verdicts_of(simulation: SimulatedRun, job: Job, causes: Sequence[Cause]) -> set[tuple[str, int | None]]:
    """Returns the outcomes, each with its host (None: any or none), that causes allow; empty where all do."""
    first, kinds = causes[0], [truth.kind for truth in causes]
    # A stop may be requested before a failure is seen: then the exit code is the stop's (14, as documented: the effect
    # of SIGTERM is no failure), and the cause is the host that failed.
    asked = any(stop.run == job.run for stop in simulation.world.record.stops)
    # Which host failed first is told by the hosts' clocks.
    told = None if any(item.host.clock_jumped for item in job.containers.values()) else first.worker
    if job.began is not None and not job.disturbed and "stop" not in kinds:
        allowed: dict[str, set[tuple[str, int | None]]] = {
            "finish": {("finished", None)},
            "save": {("saved", None)},
            "bad input": {("bad input", None)},
            "fail": {("failed", told)} | ({("stopped", told)} if asked else set()),
        }
        # The slice may be deleted, or a cluster's pod stopped, before a launcher sees how the program ended.
        unseen = _unseen(simulation, job)
        swept = bool(unseen and simulation.world.record.deletions)  # by a `gc`, after Google had taken it away
        deleted = {("slice deleted", None), ("vanished", None)} if "deleted" in kinds or swept else set()
        deleted |= {("stopped", -1)} if asked and (not job.confirmed or (deleted and unseen)) else set()
        if simulation.world.cluster is not None:  # where ends are known by the second
            second = max(0, first.worker) if job.plan.second is None else job.plan.second % job.hosts
            ends = job.containers[second].ended - job.containers[max(0, first.worker)].ended
            deleted |= {("failed", second)} if first.kind == "fail" and ends < 1.0 else set()
            deleted |= {("stopped", worker) for worker in (-1, first.worker, second) if asked}
            deleted |= {("vanished", None)} if simulation.faults else set()
        return allowed[first.kind] | deleted | unseen if first.kind in allowed else set()
    if kinds == ["connection"]:
        # A host that ceases to answer before it has told that it lost a peer looks like a lost host.
        return {("connection lost", None)} | ({("stopped", None)} if asked else set()) | _unseen(simulation, job)
    dead = {truth.worker for truth in causes if truth.detail == "dead"}
    if kinds == ["host"] and dead and simulation.world.cluster is None:
        # A launcher that first looks when two hosts are dead can't tell which died first.
        others = {worker for worker, container in job.containers.items() if container.host.troubled}
        lost: set[tuple[str, int | None]] = {("host lost", worker) for worker in dead | others}
        gone = {("slice deleted", None)} if simulation.world.record.deletions else set()  # by a `gc`
        if simulation.ann.refused_from < math.inf:  # gcloud takes half a minute to tell that a host does not answer
            gone |= {("connection lost", None)}
        return lost | gone | {(outcome, None) for outcome in ("preempted", "vanished", "stopped")}
    return set()


def _unseen(simulation: SimulatedRun, job: Job) -> set[tuple[str, int | None]]:
    """Returns the verdicts that hosts allow that ceased to answer before a launcher saw how their programs ended."""
    found: set[tuple[str, int | None]] = set()
    cluster, faults = simulation.world.cluster, {fault.kind for fault in simulation.faults}
    deaf = bool(faults & {*(API_FAULTS if cluster is not None else _SSH_FAULTS)})
    for ledger in [each for each in simulation.ledgers() if each.run_id == job.run]:
        # A supervisor that resumes a verdict may see more ends. Of those of one host, the first counts.
        entries = [entry for entry in ledger.entries() if entry.event.attempt == job.attempt]
        judged = next((number for number, entry in enumerate(entries) if isinstance(entry.event, Judged)), None)
        seen = {
            entry.event.host: parse_time(entry.time) or 0.0
            for entry in reversed(entries[:judged])
            if isinstance(entry.event, HostEnded)
        }
        # A node's maintenance may take a pod while nobody looks; at the next look it is gone.
        taken = job.left - seen.keys() if cluster is not None and faults & {"maintenance", "preempt"} else set()
        found |= {(outcome, worker) for worker in taken for outcome in ("host lost", "failed")}
        for worker, item in job.containers.items():
            before = seen.get(worker, math.inf) - EPOCH
            if (deaf and worker not in seen) or any(item.ended - 30.0 < at < before for at in item.host.troubled):
                found |= {("host lost", worker), ("preempted", None), ("vanished", None)}
        if deaf or found:  # the first that ends may be read last, or never; a pod that is gone, as one that was removed
            found |= {("stopped", worker) for worker in job.containers}
            found |= {("connection lost", None), ("failed", None)} if cluster is not None else set()
    return found


def finished_programs_are_told_finished(simulation: SimulatedRun, job: Job, event: Ended) -> None:
    """Programs that finished, saved or refused input make no lost host or failure, though hosts rebooted afterwards."""
    ends = [item for item in job.containers.values() if item.status == "exited" and not item.invented]
    # An engine may have made up all codes but 2 and 75.
    seen = any(item.boot == item.host.boot or item.exit_code in (2, 75) for item in ends)
    if len(ends) < job.hosts or any(item.exit_code not in (0, 2, 75) for item in ends) or not seen:
        return
    if simulation.faults and any(item.exit_code == 2 for item in ends):  # a failure is judged within seconds
        return
    cluster = simulation.world.cluster is not None and not simulation.actions
    calm = {fault.kind for fault in simulation.faults} <= ({"preempt", "maintenance"} if cluster else {"reboot"})
    if not cluster:  # a host that boots for longer is lost, and a look takes seconds
        calm &= sum(fault.seconds for fault in simulation.faults) < simulation.config.run.host_lost_seconds - 8.0
    if calm and event.outcome in ("host lost", "failed", "connection lost"):
        simulation.break_promise("finished programs are told finished", f"{job} ended {event.outcome}: {event.cause}")


def lost_host_is_told_in_time(simulation: SimulatedRun) -> None:
    """A host that dies ends the attempt within run.host_lost_seconds and a minute, while all else is in order."""
    if {fault.kind for fault in simulation.faults} & {*API_FAULTS, "cut", "hang", "filter", "engine"}:
        return
    if simulation.full_disk or any(action.kind == "asleep" for action in simulation.actions):
        return
    limit = simulation.config.run.host_lost_seconds + _LOST_SECONDS
    for (run, attempt), job in simulation.world.record.jobs.items():
        if (died := job.first_death) is None or job.began is None or died < job.began:
            continue
        if all(item.host.troubled for item in job.containers.values()):
            continue
        ends = [
            parse_time(entry.time) or 0.0
            for ledger in simulation.ledgers() if ledger.run_id == run
            for entry in ledger.entries() if isinstance(entry.event, Ended) and entry.event.attempt == attempt
        ]  # fmt: skip
        told = min(ends, default=float("inf")) - EPOCH
        watched = any(
            command.run_id == run and command.name in SUPERVISORS and command.began < job.began
            and not command.killed and command.code != Exit.DETACHED and command.ended > died + limit
            for command in simulation.commands
        )  # fmt: skip
        if watched and told - died > limit and not simulation.ann.wall and not simulation.second.wall:
            simulation.break_promise("a lost host is told in time", f"{job}: {told - died:.0f} s after its death")


def retries_wait_as_documented(simulation: SimulatedRun) -> None:
    """After a lost host another attempt follows at once; after failures, after pauses that double."""
    for ledger in simulation.ledgers():
        failures = 0
        for event in ledger.events():
            if isinstance(event, Recovering):
                failed = event.after in ("failed", "stalled")
                wanted = min(_LONGEST_DELAY, _FIRST_DELAY * 2**failures) if failed else 0.0
                failures += failed
                if event.delay != wanted:
                    simulation.break_promise("retries wait as documented", f"{event}, not {wanted:.0f} s")
