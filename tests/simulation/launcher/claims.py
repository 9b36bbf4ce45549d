"""Promises about what commands claim and decide, compared with what the world knows: what was deleted, stopped, spent,
lost or left behind, and when it was told."""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING

from launcher.costs import duration, per_hour
from launcher.errors import Exit
from launcher.owner import hash_account
from launcher.run import specification
from launcher.run.events import (
    NOT_STARTED,
    VANISHED,
    Ended,
    HostEnded,
    Recovered,
    Recovering,
    RecoveryGivenUp,
    Requested,
    RoundFailed,
    RunStopRequested,
    SliceReplaced,
    StragglerFound,
    StragglerGone,
)
from launcher.run.runs import list_runs
from launcher.run.status import Status
from launcher.tpu_vm.requests import RequestRecord
from tests.simulation.launcher import hangs
from tests.simulation.launcher.faults import API_FAULTS, MEDDLING
from tests.simulation.launcher.hosts import EPOCH
from tests.simulation.launcher.jobs import SUPERVISORS
from training.machine.clock import parse_time
from training.telemetry.progress_line import parse

if TYPE_CHECKING:
    from launcher.tpu_vm.inventory import Listing
    from tests.simulation.launcher.commands import Command
    from tests.simulation.launcher.google import Slice
    from tests.simulation.launcher.jobs import Cause, Job
    from tests.simulation.launcher.simulated_run import SimulatedRun
    from tests.simulation.launcher.world import Actor, World

_RECENT_SECONDS = 45.0  # within which hosts are asked for lines, which a sleeping supervisor has not fetched
_STATUS_SECONDS = 12.0  # from a host's answer to `status`, and its newest line then, to those at the end
_EXPLAIN_SECONDS = 60.0  # from the limit of a stall until its explanation is recorded
_SSH_FAULTS = ("dead ssh", "no ssh", "ssh loses answers", "offline")
_TAKERS = ("preempt", "maintenance", *MEDDLING)  # faults
_CALM = ("preempt", "maintenance", "reboot", "die", "stockout", "clock", "connection")  # faults that delay no command
_STOP_SECONDS = 240.0  # from a stop until the command that supervises has ended
_PATIENCE = 60.0  # seconds that `down` waits for a supervising process, at least
_LOST_SECONDS = 60.0  # beyond run.host_lost_seconds, from a host's death until it is told
_BUDGET_SECONDS = 60.0  # for which a run may go on when its budget is spent; and what is kept back for its end
_LONGEST_PAUSE = 450.0
_QUEUE_SECONDS = 7200.0  # slice.queued.valid_until_hours of all files
_FIRST_DELAY, _LONGEST_DELAY = 5.0, 300.0  # seconds before another attempt after a failure
_PROGRESS_SECONDS = 12.0  # from a step until it is kept
_TAKE_OVER_SECONDS = 120.0  # from the end of a supervisor until another machine has taken its run over
_SLICE_LOST = ("preempted", "slice deleted")  # outcomes


# -- of one moment ----------------------------------------------------------------------------------------------------


def deletion_follows_a_stop(simulation: SimulatedRun, node: Slice, by: Actor) -> None:
    """A `down` deletes a slice after the runs of its folder have ended, or says which may not have saved; `run` deletes
    none whose program has finished."""
    command = next((each for each in simulation.commands if each.actor is by), None)
    if command is None:
        return
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


def creation_is_due(simulation: SimulatedRun, made: Slice, by: Actor) -> None:
    """Checks that a new slice has its owner's labels, follows no `down` that succeeded, and is not beside one that `up`
    could use, and that `run` creates one only in a recovery that was neither stopped nor given up before that `run`."""
    labels, hours = made.node.resource.get("labels", {}), simulation.scenario.setting.expires_hours
    ours = [labels.get(f"tpu-launch{name}") for name in ("", "-owner", "-account")]
    late = 0.0 if made.expires is None else simulation.world.scheduler.now + EPOCH - made.expires + (hours or 0) * 3600
    expires = (made.expires is None) == (hours is None) and late < _QUEUE_SECONDS + 60.0
    if ours != ["1", by.user, hash_account(by.user)] or not (expires or by.laptop.wall):
        simulation.break_promise("what is created is labelled", f"{made} of {by.user}: {labels}")
    command = next(each for each in simulation.commands if each.actor is by)
    calm = not any(fault.kind in ("stale", "old describe", "date", *MEDDLING) for fault in simulation.faults)
    for down in simulation.commands if calm and not by.laptop.asleep else ():
        if down.name == "down" and down.code == 0 and down.laptop is by.laptop and command.ended < down.began:
            simulation.break_promise("after down nothing of ours comes", f"{made} by {by.command}")
    for other in simulation.world.google.slices.values() if by.command == "up" and calm else ():
        known = other.creator == by.user and other.state == "READY" and other.ready_at < command.began
        if known and other is not made and simulation.scenario.candidates is None:
            simulation.break_promise("up continues from the existing slice", f"{made} beside {other}")
    if by.command not in SUPERVISORS:
        return
    for ledger in list_runs(by.laptop.home, simulation.commands[0].machine):
        recovers = stopped = False
        for event in ledger.events():
            match event:
                case Recovering():
                    recovers, stopped = True, False
                case RunStopRequested() | RecoveryGivenUp():
                    stopped = True
                case Requested() if stopped:
                    recovers = False
        if recovers:
            return
    simulation.break_promise("run makes a slice only in a recovery", f"{by.command} of {by.user}")


# -- of each command, when it ends ------------------------------------------------------------------------------------


def told_deletion_is_true(simulation: SimulatedRun, command: Command) -> None:
    """A command tells that a slice or a request was deleted only after a user has deleted one."""
    words = ("was deleted by another command", "deleted as soon as it was READY", "it was deleted", "client deleted")
    told = [text for text in command.said if any(word in text for word in words)]
    if told and not any(at < command.ended for at in simulation.world.record.deletions):
        simulation.break_promise("what is told deleted was deleted", f"{command.name}: {told[0][:300]}")


def told_stop_is_true(simulation: SimulatedRun, command: Command) -> None:
    """`run` ends without an attempt's verdict as stopped only if it was stopped after it began."""
    if command.name not in ("run", "attach") or command.code != Exit.STOPPED or command.verdict is not None:
        return
    stops = simulation.world.record.stops
    stopped = any(command.run_id in ("", stop.run) and stop.at >= command.began for stop in stops)
    if not stopped and not any("the budget is spent" in text for text in command.said):
        simulation.break_promise("what is told stopped was stopped", f"{command.name}: {command.error}")


def nothing_is_repeated_without_a_pause(simulation: SimulatedRun, command: Command) -> None:
    """No line is told three times in a row within 10 s, and the cloud and each host are asked in moderation."""
    excused = simulation.scenario.candidates is not None or simulation.full_disk is not None
    excused |= command.name == "watch"  # which passes the lines of its processes on at their end
    for (began, line), (_, again), (at, third) in zip(command.told, command.told[1:], command.told[2:], strict=False):
        flaps = "does not answer: " in line  # and answers between
        if line == again == third and at - began < 10.0 and not excused and not flaps:
            simulation.break_promise("a line is not told again and again", f"{command.name}: {line}")
    for call, times in command.actor.calls.items():
        if _is_frequent(times, 40):
            simulation.break_promise("the cloud is asked in moderation", f"{command.name}: {' '.join(call)[:200]}")
    for (host, script), times in command.actor.scripts.items():
        if _is_frequent(times, 45 if script == "observe" else 8):
            simulation.break_promise("a host is asked in moderation", f"{command.name}: {script} on {host!r}")


def _is_frequent(times: Sequence[float], most: int) -> bool:
    """Returns whether there are more than so many times within 30 s."""
    return any(later - earlier < 30.0 for earlier, later in zip(times, times[most:], strict=False))


def told_use_is_true(simulation: SimulatedRun, command: Command) -> None:
    """A slice is called in use only if another run was on it meanwhile."""
    if "the slice is in use" not in str(command.error):
        return
    others = [item for host in simulation.world.hosts for item in host.containers.values()]
    others += [item for job in simulation.world.record.jobs.values() for item in job.containers.values()]
    used = any(item.ended > command.began - 10.0 and item.run != command.run_id for item in others)
    used |= any(  # its containers may be removed before the last host started one
        each.name == "run" and each.run_id not in ("", command.run_id) and each.ended > command.began - 10.0
        for each in simulation.commands
    )
    cluster = simulation.world.cluster
    if not used and not (cluster is not None and cluster.has_open_jobset()):
        simulation.break_promise("what is told in use was in use", f"{command.name}: {command.error}")


def down_deletes_jobsets(simulation: SimulatedRun, command: Command) -> None:
    """After a `down`, no JobSet of its user is left but those that another command has asked for."""
    cluster = simulation.world.cluster
    if command.name != "down" or command.code != 0 or cluster is None:
        return
    others = [each for each in simulation.commands if each is not command and each.ended > command.began - 120.0]
    if (left := cluster.jobsets_of(command.laptop.user)) and not others:
        simulation.break_promise("after down nothing of ours is left", f"{left}")


def told_patience_is_true(simulation: SimulatedRun, command: Command) -> None:
    """Checks that `down` and `stop` go on without a supervisor only if there is one that had its time to end."""
    for at, text in command.told if not command.laptop.asleep else ():
        if "has not ended; going on" not in text and "that starts it has not ended yet" not in text:
            continue
        anywhere = simulation.scenario.in_bucket
        there = [each for each in simulation.commands if anywhere or each.laptop is command.laptop]
        there = [each for each in there if each.ended > at - 1.0]
        others = [each for each in there if each is not command and each.name not in ("up", "status", "gc")]
        if at - command.began < _PATIENCE or not others:
            simulation.break_promise("supervisors are waited for", f"after {at - command.began:.0f} s: {text}")


def stop_of_a_start_is_told(simulation: SimulatedRun, command: Command) -> None:
    """`run` whose start fails after the run was stopped tells the stop, and no failure."""
    if "could not start the container" not in str(command.error) or "slow" in {f.kind for f in simulation.faults}:
        return
    stops = [stop for stop in simulation.world.record.stops if command.began < stop.at < command.ended - 10.0]
    if any(stop.run in str(command.said) for stop in stops) and command.laptop is simulation.ann:
        simulation.break_promise("a stop of a start is told", f"{command.name}: {command.error}")


def kind_world_starts_a_run(simulation: SimulatedRun, command: Command) -> None:
    """Without faults and without other users of the slice, `run` fails for no reason of a cloud."""
    others = [each for each in simulation.commands if each.laptop is not command.laptop and each.name in ("up", "down")]
    hostile = simulation.faults or simulation.full_disk or simulation.kill_at or others
    if command.name not in ("run", "attach") or hostile or any(each.kind == "asleep" for each in simulation.actions):
        return
    candidates = simulation.scenario.candidates
    if command.code == Exit.CLOUD_ERROR and (candidates is None or not candidates.kill_at):
        simulation.break_promise("a run starts in a kind world", f"{command.name}: {command.error}")


def stockout_is_waited_out(simulation: SimulatedRun, command: Command) -> None:
    """An `up` gives up for lack of capacity only after slice.stockout_minutes, or the time of its own request."""
    if command.name != "up" or command.code != Exit.STOCKOUT or command.laptop.asleep or command.laptop.wall:
        return
    setting = simulation.scenario.setting
    queues = setting.queued and command is simulation.commands[0]
    longest = _QUEUE_SECONDS if queues else setting.stockout_minutes * 60 - _LONGEST_PAUSE
    seconds = simulation.world.scheduler.now - command.began
    if (queues or not setting.queued) and seconds < longest and "can't be started" not in str(command.error):
        simulation.break_promise("a stock-out is waited out", f"{command.name} after {seconds:.0f} s: {command.error}")


def status_shows_what_is(simulation: SimulatedRun, status: Status) -> None:
    """`status` shows of each host that answers what its container does, and the newest line that it has written."""
    job = simulation.world.record.jobs.get((status.run or "", status.attempt if status.attempt is not None else -1))
    if any(hole in f"{line}\n" for line in status.lines() for hole in ("()", "None", ": \n")):
        simulation.break_promise("a message has no holes", f"{status.lines()}")
    status.rows()
    if job is None or simulation.faults:
        return
    for host in status.hosts:
        container = job.containers.get(host.worker)
        if container is None or host.container.startswith("not reachable"):
            continue
        if host.container == "running" and container.ended < simulation.world.scheduler.now - 5.0:
            simulation.break_promise("status shows what is", f"{container.name}: {host}")
        job.write_lines(container)
        silent = simulation.world.scheduler.now - (container.wrote or 0.0)
        if silent < _RECENT_SECONDS and abs((host.quiet_seconds or 0.0) - silent) > _STATUS_SECONDS:
            simulation.break_promise("status shows what is", f"{container.name} is silent for {silent:.0f} s: {host}")
        if not any(host.last_line in text for text in ("", *(text for _, text in container.log))):
            simulation.break_promise("status shows what is", f"{container.name} never wrote {host.last_line!r}")


def frames_show_the_run(simulation: SimulatedRun, command: Command) -> None:
    """`top` draws frames as wide as the terminal, with a bar that shows the steps, and the whole curve of a loss that
    falls with each step."""
    for view, columns, lines in command.frames:
        frame, progress = "\n".join(lines), view.progress
        wrong = [line for line in lines if len(line) > columns]
        if progress is not None and progress.steps:
            bar = next((line for line in lines if line.startswith(f"step {progress.step:,}/{progress.steps:,} ")), "")
            full, empty = bar.count("\u2588"), bar.count("\u2591")
            wrong += [bar] if abs(full - progress.step / progress.steps * (full + empty)) > 0.5 or "…" in bar else []
            wrong += [] if full + empty else [frame]
            wrong += [] if f"loss {progress.loss:.5f}" in frame and "8.0 examples/s" in frame else [frame]
        if len(view.losses) > 1:
            curve = [line[9:] for line in lines if "\u2502" in line[:9]]
            wrong += [] if curve and curve[0][:1] > "\u2800" and len(curve[-1]) == columns - 9 else [frame]
        wrong += [frame] if len(view.hosts) != sum(line.split(" ")[0].isdigit() for line in lines) else []
        if wrong:
            simulation.break_promise("a frame shows the run", f"{columns} columns, {view}:\n{wrong[0]}")


def what_was_asked_for_is_used_or_withdrawn(simulation: SimulatedRun, command: Command) -> None:
    """A command leaves no request for a candidate that it made, but a granted one, unless it says so; a request gives
    way only to one for another candidate."""
    names, said = {str(each) for each in simulation.config.candidates}, [text for text in command.said if ": " in text]
    if simulation.scenario.candidates is None or command.name not in ("up", *SUPERVISORS):
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
    for request in RequestRecord(simulation.config).read():
        if f"request {request.number}" in made and request.granted is None and request.ended is None:
            simulation.break_promise("what was asked for is used or withdrawn", f"{command.name}: {request}")


def places_are_tried_in_their_order(simulation: SimulatedRun, command: Command) -> None:
    """`up` tries zones in the file's order, each after the one before had no capacity; with a slice, its zone first."""
    zones = simulation.scenario.setting.zones
    tried = [match[1] for text in command.said if (match := re.match(r"(?:creating|requesting) .* in ([\w-]+)", text))]
    if command.name != "up" or simulation.scenario.candidates is not None or not tried:
        return
    order = [tried[0], *(zone for zone in zones if zone != tried[0])]
    wrong = [pair for pair in pairwise(tried) if pair[1] not in (pair[0], order[order.index(pair[0]) - len(order) + 1])]
    first = command is simulation.commands[0] and simulation.scenario.leftover in ("", "preempted")
    hidden = any(fault.kind in ("old describe", *MEDDLING) for fault in simulation.faults)
    hidden |= any(each.name in ("down", "gc") and each.began < command.ended for each in simulation.commands)
    passes_over = "no capacity in " in "".join(command.said) and {*zones} - {*tried}
    if wrong or (first and (passes_over or tried[0] != simulation.leftover_zone) and not hidden):
        simulation.break_promise("places are tried in their order", f"{tried} of {zones}")


def lines_are_shown_once(simulation: SimulatedRun, command: Command) -> None:
    """Checks that a command shows only lines that are in the logs of its folder, each once; that `logs` which ends by
    itself shows all of its attempt, and `run` all of an attempt that it started and judged."""
    logs = {path: _lines_in(path) for path in command.laptop.home.glob("runs/*/logs/attempt-*/host-*.log")}
    if extra := command.lines - sum(logs.values(), Counter()):
        simulation.break_promise("every line is shown once", f"{command.name} showed again {[*extra][:3]}")
    shows, outcome = command.shows if command.code == 0 else None, command.outcome
    job = simulation.world.record.jobs.get((outcome.run_id, outcome.attempt)) if outcome is not None else None
    started = job is not None and job.began is not None and job.began > command.began
    if job is not None and started and not simulation.full_disk and "attaching to it" not in "".join(command.said):
        shows = command.laptop.home / "runs" / job.run / "logs" / f"attempt-{job.attempt}"
    for path, lines in logs.items():
        if path.parent == shows and (missing := lines - command.lines):
            simulation.break_promise("every line is shown once", f"{command.name} did not show {[*missing][:3]}")


def _lines_in(path: Path) -> Counter[tuple[int, str, str]]:
    lines, worker = path.read_text(errors="surrogateescape").split("\n")[:-1], int(path.stem.partition("-")[2])
    return Counter((worker, *line.split(" ", 1)) for line in lines)


def told_missing_is_missing(simulation: SimulatedRun, command: Command) -> None:
    """Checks that a slice is called missing only if it was, at some time since the command began."""
    told = f"slice {simulation.config.slice.name} does not exist" in str(command.error)
    lags = any(fault.kind in ("stale", "old describe", *MEDDLING) for fault in simulation.faults)
    if not told or lags or simulation.scenario.candidates is not None:
        return
    for node in simulation.world.google.slices.values():
        if node.creator == command.laptop.user and node.state == "READY" and node.ready_at < command.began - 5.0:
            simulation.break_promise("what is told missing is missing", f"{command.name}: {node}: {command.error}")


def waits_are_told(simulation: SimulatedRun, command: Command) -> None:
    """`up` tells once what it waits for: each state in which Google has described the slice repeatedly. A race tells of
    its requests instead."""
    looks = command.name == "up" and simulation.scenario.candidates is None
    for (_, state), times in command.actor.states.items() if looks else ():
        told = [text for text in command.said if state in text]
        if state in ("CREATING", "STARTING") and times > 3 and not told and not simulation.scenario.setting.queued:
            simulation.break_promise("a wait is told", f"{state} was seen {times} times")
    for before, after in pairwise(command.said):
        if before == after and re.search(r"slice \S+ is [A-Z]+$", after):
            simulation.break_promise("a wait is told", f"again: {after}")


def what_is_left_is_recorded(simulation: SimulatedRun, command: Command) -> None:
    """After a verdict, each container of the attempt that a host still has is recorded as left behind."""
    if command.verdict is None or command.outcome is None or simulation.loses_by_its_disk:
        return
    outcome = command.outcome
    ledger = next(item for item in command.ledgers() if item.run_id == outcome.run_id)
    job = simulation.world.record.jobs.get((outcome.run_id, outcome.attempt))
    if job is None or ledger.state.phase.is_open or ledger.supervised():
        return
    known = {(item.attempt, worker) for item in ledger.state.orphans for worker in item.hosts}
    for worker, container in job.containers.items():
        host = container.host
        there = host.containers.get(container.name) is container and host.up and host.engine_up
        if there and (outcome.attempt, worker) not in known and not host.gone:
            simulation.break_promise("what is left behind is recorded", f"{container.name} on {host!r}")


# -- of each end of an attempt --------------------------------------------------------------------------------------


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
    undisturbed = _is_undisturbed(simulation, time - EPOCH + 1.0)  # events have whole seconds
    if undisturbed and hang is not None and hung is not None and job.stall_seconds is not None:
        late = time - EPOCH - hung - hang.limit(job.stall_seconds, job.hosts)
        if event.outcome != "stalled" or not -1.0 <= late <= _EXPLAIN_SECONDS:
            simulation.break_promise(
                "a hang is explained in time", f"{job}: {event.outcome}, {late:.0f} s late: {hang}"
            )
        elif job.hosts > 1 and (event.cause is None or hang.says not in event.cause.what):
            simulation.break_promise("a hang is told by its kind", f"{job} hangs by {hang}; told was {event.cause}")


def _is_undisturbed(simulation: SimulatedRun, until: float) -> bool:
    """Returns whether, until a moment, nobody did more to a run than look at it, and nothing failed."""
    disturbs = any(action.kind not in ("logs", "status") for action in simulation.actions)
    disturbs |= any(stop.at < until for stop in simulation.world.record.stops)
    return not (disturbs or simulation.faults or simulation.kill_at or simulation.full_disk)


def out_of_memory_is_no_lost_host(simulation: SimulatedRun, job: Job, event: Ended) -> None:
    """A program that was killed for its memory does not count as a lost host."""
    if event.outcome == "host lost" and event.cause is not None and event.cause.oom_killed:
        simulation.break_promise("a program out of memory is no lost host", f"{job}: {event.cause}")


def finished_means_finished(simulation: SimulatedRun, job: Job, event: Ended) -> None:
    """A run is reported as finished or saved only when its programs ended so."""
    codes = {worker: container.exit_code for worker, container in job.containers.items()}
    wanted = {"finished": (0,), "saved": (0, 75)}.get(event.outcome)
    rebooted = any(container.boot != container.host.boot for container in job.containers.values())
    if wanted and not rebooted and (len(codes) < job.hosts or any(code not in wanted for code in codes.values())):
        simulation.break_promise("finished means finished", f"{job} ended {event.outcome}: {codes}")


def verdict_names_the_first_cause(simulation: SimulatedRun, job: Job, event: Ended) -> None:
    """The verdict names the first thing that was made to happen, where it can be told from all others."""
    if event.cause is not None and any(line.startswith(f"host {event.cause.worker}:") for line in event.symptoms):
        simulation.break_promise("the first cause is no symptom", f"{job} ended by {event.cause}: {event.symptoms}")
    causes = [truth for truth in job.causes if truth.kind != "kill"]
    if not causes or event.outcome == "not started" or job.plan.kind == "stall":
        return
    allowed = _verdicts_of(simulation, job, causes)
    cause = event.cause.worker if event.cause is not None else -1
    if allowed and (event.outcome, cause) not in allowed and (event.outcome, None) not in allowed:
        simulation.break_promise(
            "the verdict names the first cause",
            f"{job} ended {event.outcome} of host {cause}, not {allowed}; the causes are {causes}",
        )


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
        deleted = {("slice deleted", None)} if "deleted" in kinds else set()
        if simulation.world.cluster is not None:  # where ends are known by the second
            second = max(0, first.worker) if job.plan.second is None else job.plan.second % job.hosts
            ends = job.containers[second].ended - job.containers[max(0, first.worker)].ended
            deleted |= {("failed", second)} if first.kind == "fail" and ends < 1.0 else set()
            deleted |= {("stopped", worker) for worker in (-1, first.worker, second) if asked}
            deleted |= {("vanished", None)} if simulation.faults else set()
            # A supervisor deletes pods before it records the end: one that is killed between leaves a pod that is gone.
            deleted |= {("host lost", None)} if any(each.killed for each in simulation.commands) else set()
        return allowed[first.kind] | deleted | _unseen(simulation, job) if first.kind in allowed else set()
    if kinds == ["connection"]:
        # A host that ceases to answer before it has told that it lost a peer looks like a lost host.
        return {("connection lost", None)} | ({("stopped", None)} if asked else set()) | _unseen(simulation, job)
    dead = {truth.worker for truth in causes if truth.detail == "dead"}
    if kinds == ["host"] and dead and simulation.world.cluster is None:
        # A launcher that first looks when two hosts are dead can't tell which died first.
        others = {worker for worker, container in job.containers.items() if container.host.troubled}
        lost: set[tuple[str, int | None]] = {("host lost", worker) for worker in dead | others}
        gone = {("slice deleted", None)} if simulation.world.record.deletions else set()  # by a `gc`
        return lost | gone | {(outcome, None) for outcome in ("preempted", "vanished", "stopped")}
    return set()


def _unseen(simulation: SimulatedRun, job: Job) -> set[tuple[str, int | None]]:
    """Returns the verdicts that hosts allow that ceased to answer before a launcher saw how their programs ended."""
    found: set[tuple[str, int | None]] = set()
    for ledger in simulation.ledgers():
        if ledger.run_id != job.run:
            continue
        seen = {
            entry.event.host: parse_time(entry.time) or 0.0
            for entry in reversed(ledger.entries())  # the first one counts
            if isinstance(entry.event, HostEnded) and entry.event.attempt == job.attempt
        }
        ways = API_FAULTS if simulation.world.cluster is not None else _SSH_FAULTS
        deaf = any(fault.kind in ways for fault in simulation.faults)
        # A pod that a node's maintenance took while the cluster did not answer is gone at the next look.
        evicted = simulation.world.cluster is not None and {"maintenance", "preempt"} & {
            f.kind for f in simulation.faults
        }
        taken = job.left if deaf and evicted else set()
        found |= {(outcome, worker) for worker in taken for outcome in ("host lost", "failed")}
        for worker, container in job.containers.items():
            before = seen.get(worker, math.inf) - EPOCH
            if (deaf and worker not in seen) or any(
                container.ended - 30.0 < at < before for at in container.host.troubled
            ):
                found |= {("host lost", worker), ("preempted", None), ("vanished", None)}
        if deaf or found:  # the first that ends may be read last, or never
            found |= {("stopped", worker) for worker in job.containers}
    return found


def finished_programs_are_told_finished(simulation: SimulatedRun, job: Job, event: Ended) -> None:
    """A run whose programs have all finished, saved, or refused their input is no lost host or failure, although hosts
    rebooted afterwards or their pods were disrupted."""
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
        calm &= sum(fault.seconds for fault in simulation.faults) < simulation.scenario.setting.host_lost_seconds - 8.0
    if calm and event.outcome in ("host lost", "failed", "connection lost"):
        simulation.break_promise("finished programs are told finished", f"{job} ended {event.outcome}: {event.cause}")


def told_removal_is_true(simulation: SimulatedRun, job: Job, event: Ended) -> None:
    """A container is called removed only if it was removed from its host, not if the slice is another one by now."""
    removed = event.cause is not None and "its container was removed" in event.cause.what
    if event.cause is None or not removed or simulation.world.cluster is not None:  # there, a pod goes with its node
        return
    container = job.containers.get(event.cause.worker)
    if container is not None and container.host.gone:
        simulation.break_promise("what is told removed was removed", f"{container.name} of {container.host!r}")


# -- of the whole run, at its end -------------------------------------------------------------------------------------


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


def rounds_keep_to_their_time(simulation: SimulatedRun) -> None:
    """No round of a recovery is begun later than run.recovery_minutes after the first one that failed."""
    if simulation.ann.wall or simulation.second.wall or simulation.ann.asleep:
        return
    for ledger in simulation.ledgers():
        first: float | None = None
        for entry in ledger.entries():
            now = parse_time(entry.time) or 0.0
            if isinstance(entry.event, RoundFailed):
                first = now if first is None else first
                if now + entry.event.delay - first > simulation.scenario.setting.recovery_minutes * 60 + 1.0:
                    simulation.break_promise("rounds keep to their time", f"{entry.event} {now - first:.0f} s later")
            elif isinstance(entry.event, Recovering | Recovered | RecoveryGivenUp | Requested):
                first = None


def slices_are_replaced_for_their_own_hosts(simulation: SimulatedRun) -> None:
    """A slice is replaced because of a host by which the last attempts, as many as the file says, were lost or failed
    on this slice."""
    for ledger in simulation.ledgers():
        ends: list[int] = []
        for event in ledger.events():
            if isinstance(event, Ended) and event.outcome not in (NOT_STARTED, VANISHED):
                of_a_host = event.cause is not None and event.outcome in ("host lost", "failed")
                ends.append(event.cause.worker if event.cause is not None and of_a_host else -1)
            elif isinstance(event, SliceReplaced):
                wanted = simulation.scenario.setting.replace_after or 0
                if event.host >= 0 and ends[-wanted:] != [event.host] * wanted:
                    simulation.break_promise("a slice is replaced for its own hosts", f"{event}: {ends}")
                ends.clear()


def stop_ends_its_supervisor(simulation: SimulatedRun) -> None:
    """After a `stop`, the command that supervises the run on the same machine ends within minutes."""
    if any(fault.kind not in _CALM for fault in simulation.faults) or simulation.full_disk or simulation.ann.asleep:
        return
    if any(action.kind == "asleep" for action in simulation.actions):
        return
    for stop in simulation.world.record.stops:
        by = stop.by
        for command in simulation.commands if by is not None else ():
            same = command.laptop is getattr(by, "laptop", None) and command.run_id == stop.run
            seconds = command.ended - stop.at
            late = seconds > _STOP_SECONDS + simulation.world.google.slowest_creation
            if same and command.name in SUPERVISORS and command.began < stop.at and late:
                simulation.break_promise("a stop ends its supervisor", f"{command.name} after {seconds:.0f} s")


def lost_host_is_told_in_time(simulation: SimulatedRun) -> None:
    """A host that dies under a program ends the attempt within run.host_lost_seconds and a minute, while a command
    supervises it, other hosts answer and nothing else is out of order."""
    if {fault.kind for fault in simulation.faults} & {*API_FAULTS, "cut", "hang", "filter", "engine"}:
        return
    if simulation.full_disk is not None or any(action.kind == "asleep" for action in simulation.actions):
        return
    limit = simulation.scenario.setting.host_lost_seconds + _LOST_SECONDS
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


def budget_is_spent_on_slices(simulation: SimulatedRun) -> None:
    """A run stops for its budget only when slices have cost that much, and soon after they have."""
    budget = simulation.scenario.setting.budget
    if budget is None or simulation.ann.wall:
        return
    # A slice that is taken counts until that is recorded: in a recovery, or while the API is out, the workstation
    # sleeps or no process supervises the run, that may take minutes.
    deaf = any(action.kind == "asleep" for action in simulation.actions)
    deaf |= any(fault.kind in API_FAULTS for fault in simulation.faults)
    taken = [fault for fault in simulation.faults if fault.kind in _TAKERS]
    meddled = any(deaf or fault.anchor not in ("start", "beginning") for fault in taken)
    left = any(command.killed or command.code == Exit.DETACHED for command in simulation.commands)
    meddled |= left and (
        bool(taken) or any(each.name == "down" and each.laptop is not simulation.ann for each in simulation.commands)
    )
    for command in simulation.commands:
        if sum("stopping it, so that it saves" in text for text in command.said) > 1:
            simulation.break_promise("a spent budget stops a run once", f"{command.name}: {command.said[-9:]}")
        for at, text in command.told if not meddled else ():
            enough = min(budget * 0.99, budget - _rate(simulation) * _BUDGET_SECONDS)
            if "the budget is spent" in text and (cost := _cost_of_slices(simulation, at)) < enough:
                simulation.break_promise("a budget is spent on slices", f"${cost:.2f} at {at:.0f}: {text}")
    for job in simulation.world.record.jobs.values():
        seconds = max((item.ended for item in job.containers.values()), default=0.0) - (job.began or 0.0)
        allowed = budget + _rate(simulation) * _BUDGET_SECONDS
        watched = not simulation.actions and not simulation.kill_at and not simulation.faults
        watched &= simulation.scenario.candidates is None  # which have prices of their own
        if job.began is not None and watched and seconds * _rate(simulation) > allowed:
            simulation.break_promise("a budget is kept", f"{job} trains for {seconds:.0f} s, {budget} dollars")


def _rate(simulation: SimulatedRun) -> float:
    """Returns the dollars a second of the most expensive slice that the file allows."""
    prices = [per_hour(item.accelerator_type, item.zone, item.capacity) for item in simulation.config.candidates]
    return max(price or 0.0 for price in prices) / 3600


def _cost_of_slices(simulation: SimulatedRun, until: float) -> float:
    """Returns the most that ann's slices can have cost until a moment."""
    seconds = sum(
        max(0.0, min(until, node.gone_at if node.gone_at is not None else until) - node.ready_at)
        for node in simulation.world.record.billed
        if node.ready_at < until
    )
    return seconds * _rate(simulation)


def unfinished_runs_are_taken_over(simulation: SimulatedRun, command: Command) -> None:
    """Checks that no run is without a supervisor for long while another machine supervises the bucket's runs."""
    now, faults = simulation.world.scheduler.now, {fault.kind for fault in simulation.faults}
    for ledger in simulation.ledgers() if command.name == "watch" and not faults & {"bucket", "offline"} else ():
        there = [each for each in simulation.commands if each.run_id == ledger.run_id and each.name in SUPERVISORS]
        since = max([command.began, *(min(each.ended, now) for each in there)])
        if ledger.state.phase.is_open and ledger.bucket is not None and now - since > _TAKE_OVER_SECONDS:
            simulation.break_promise("an unfinished run is taken over", f"{ledger.run_id}: not for {now - since:.0f} s")


def folders_are_whole(simulation: SimulatedRun) -> None:
    """Checks that a run's folder has its configuration and what its attempts were started with."""
    for ledger in simulation.ledgers():
        kept, wanted = specification.read(ledger.folder), simulation.config.slice.name
        if (ledger.record.slice, kept.run) != (wanted, ledger.run_id) or not (ledger.folder / "config.yaml").exists():
            simulation.break_promise("a run's folder is whole", f"{ledger.run_id}: {ledger.record}, {kept}")


def progress_is_kept(simulation: SimulatedRun) -> None:
    """Checks that a run's folder has each reported step once, until seconds before the program's end."""
    supervisors = sum(command.name in (*SUPERVISORS, "down") for command in simulation.commands)
    for job in simulation.world.record.jobs.values() if not simulation.full_disk else ():
        files = [home / "runs" / job.run / f"progress-{job.attempt}.jsonl" for home in simulation.homes]
        lines = [parse(line) for file in files if file.exists() for line in file.open()]  # one may be cut by a kill
        steps = [line.step for line in lines if line is not None]
        again = sum(before >= after for before, after in pairwise(steps))
        if again >= supervisors and not (job.plan.hang and job.plan.hang.kind == "step"):
            simulation.break_promise("progress is kept", f"{job}: {steps}")
        ended = max((item.ended for item in job.containers.values()), default=0.0)
        calm = job.plan.tells and _is_undisturbed(simulation, ended)
        since = min(ended, job.last_step) - _PROGRESS_SECONDS - (job.began or math.inf)
        if calm and job.confirmed and 0.0 < since < math.inf:
            least = hangs.line(job.timeline, since, None, 0).step
            if max(steps, default=-1) < least:
                simulation.break_promise("progress is kept", f"{job}: {steps}, and step {least} was done")


def stragglers_are_told(simulation: SimulatedRun) -> None:
    """Checks that a host is called slower than the others only while it is, and by its factor."""
    for ledger in simulation.ledgers():
        slow = None
        for event in ledger.events():
            job = simulation.world.record.jobs.get((ledger.run_id, event.attempt))
            if isinstance(event, StragglerFound) and job is not None:
                slow = job.plan.slow
                same = slow is not None and (event.host, event.part) == (slow.host, "dispatch")
                if not same or not (3.0 if math.isinf(slow.steps) else 1.5) <= event.factor <= 3.0:
                    simulation.break_promise("a straggler is told", f"{job}: {event}, not {slow}")
            elif isinstance(event, StragglerGone) and (slow is None or math.isinf(slow.steps)):
                simulation.break_promise("a straggler is told", f"{job}: {event}: {slow}")


def gc_leaves_no_request(simulation: SimulatedRun, command: Command) -> None:
    """Checks that each slice that `gc` reports as deleted is gone, and its request too."""
    named = {text.removesuffix(": deleted") for text in command.said if text.endswith(": deleted")}
    if command.name != "gc" or any(fault.kind in ("stale", "old describe", *MEDDLING) for fault in simulation.faults):
        return
    google = simulation.world.google
    for left in (*google.slices.values(), *google.requests.values()):
        by = next((each for each in simulation.commands if each.actor is left.by), None)
        again = by is not None and by.ended > command.began
        if left.name in named and left.creator == command.laptop.user and left.state != "DELETING" and not again:
            simulation.break_promise("gc leaves no request", f"{left}: {command.said}")


def list_shows_what_is(world: World, listing: Listing, began: float, date: float) -> None:
    """Checks each slice that `list` and `gc` show, and that none is missing that was there all the time since a moment.
    `date`: of the workstation, in Unix seconds."""
    if {fault.kind for fault in world.faults} & {"stale", "old describe", *MEDDLING}:
        return
    shown = {(item.zone, item.name): item for item in listing.slices}
    for node in world.google.slices.values():
        labels, created = node.node.resource.get("labels", {}), parse_time(node.node.resource["createTime"])
        item = shown.get((node.node.zone, node.name))
        there = node.state == "READY" and node.ready_at < began and node.node.zone not in listing.failures
        if item is None and there and labels.get("tpu-launch") == "1" and node.node.zone in world.zones:
            world.break_promise("a list shows what is", f"{node} is missing: {listing}")
        if item is None or item.uid != node.node.resource["id"]:
            continue
        spot = node.node.resource.get("schedulingConfig", {}).get("spot")
        _, _, state, kind, owner, _, age, cost, expires = item.row(date)
        wanted = (f"{node.node.resource['acceleratorType']} {'spot' if spot else 'on-demand'}", node.creator)
        price = per_hour(item.accelerator_type, item.zone, "spot" if spot else "on-demand")
        dollars = "unknown" if price is None else f"${max(0.0, date - (created or 0.0)) / 3600 * price:.2f}"
        ends = node.expires is None or (node.expires < date) == expires.endswith("ago")
        right = (
            (kind, owner) == wanted
            and state == item.state
            and dollars == cost
            and age == duration(date - (created or 0.0))
        )
        if not right or not ends or (expires == "never") != (node.expires is None):
            world.break_promise(
                "a list shows what is", f"{node}, created {created}: {item.row(date)}, {wanted}, {dollars}"
            )


def gc_removes_what_has_expired(simulation: SimulatedRun, command: Command) -> None:
    """After a `gc` that succeeded, no READY slice of its user has expired long ago."""
    if command.name != "gc" or command.code != 0 or simulation.faults or len(simulation.scenario.setting.zones) > 1:
        return
    date = command.began + EPOCH + command.laptop.wall
    for node in simulation.world.google.slices.values():
        mine = node.creator == command.laptop.user and node.state == "READY" and node.by is not None
        if mine and node.expires is not None and node.expires < date and "left alone" not in "\n".join(command.said):
            simulation.break_promise("gc removes what has expired", f"{node} expired {date - node.expires:.0f} s ago")
