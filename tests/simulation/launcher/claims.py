"""Promises about what commands tell and show, and what a run's folder keeps, compared with what the world knows."""

from __future__ import annotations

import json
import math
import re
import tarfile
from collections import Counter, defaultdict
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING

from launcher.errors import Exit
from launcher.run import events
from launcher.run.status import Status
from tests.simulation.launcher import hangs
from tests.simulation.launcher.hosts import EPOCH
from tests.simulation.launcher.jobs import SUPERVISORS
from tests.simulation.launcher.world import containers_of
from training.machine import parse_time
from training.telemetry.progress_line import parse

if TYPE_CHECKING:
    from tests.simulation.launcher.commands import Command
    from tests.simulation.launcher.jobs import Job
    from tests.simulation.launcher.simulated_run import SimulatedRun

_RECENT_SECONDS = 45.0  # within which hosts are asked for lines, which a sleeping supervisor has not fetched
_STATUS_SECONDS = 12.0  # from a host's answer to `status`, and its newest line then, to those at the end
_CALM = ("preempt", "maintenance", "reboot", "die", "stockout", "clock", "connection")  # faults that delay no command
_LOGS_SECONDS = 590.0  # for which `logs` waits for hosts that do not answer, at least
_STOP_SECONDS = 240.0  # from a stop until the command that supervises has ended
_PATIENCE = 60.0  # seconds that `down` waits for a supervising process, at least
_PROGRESS_SECONDS = 12.5  # from a step until it is kept: three observations, and their answers
_STRAGGLER_SECONDS = 88.0  # from a program's begin, or another such event, until a straggler is told, at least
_WINDOW_SECONDS = 42.0  # in which a supervisor has seen half a minute of steps
_BEGIN_ROUNDS = events.Recovering | events.Recovered | events.RecoveryGivenUp | events.Requested | events.Supervised
_TAKE_OVER_SECONDS = 120.0  # from the end of a supervisor until another machine has taken its run over


def told_stop_is_true(simulation: SimulatedRun, command: Command) -> None:
    """`run` ends without an attempt's verdict as stopped only if it was stopped after it began."""
    if command.name not in ("run", "attach") or command.code != Exit.STOPPED or command.verdict is not None:
        return
    stops = simulation.world.record.stops
    stopped = any(  # another machine's is recorded seconds after it was asked for
        command.run_id in ("", stop.run) and (stop.done or math.inf) >= command.began for stop in stops
    )
    if not stopped and not any("the budget is spent" in text for text in command.said):
        simulation.break_promise("what is told stopped was stopped", f"{command.name}: {command.error}")


def nothing_is_repeated_without_a_pause(simulation: SimulatedRun, command: Command) -> None:
    """No line is told three times in a row within 10 s, or four times in half a minute, as if at each look; the cloud
    and each host are asked in moderation."""
    excused = simulation.races or simulation.full_disk
    excused |= command.name == "watch"  # which passes the lines of its processes on at their end
    for (began, line), (_, again), (at, third) in zip(command.told, command.told[1:], command.told[2:], strict=False):
        flaps = "does not answer: " in line or "still waiting, although: " in line  # and answers between
        if line == again == third and at - began < 10.0 and not excused and not flaps:
            simulation.break_promise("a line is not told again and again", f"{command.name}: {line}")
    for four in zip(*(command.told[first:] for first in range(4)), strict=False) if not excused else ():
        if (
            2.0 < four[3][0] - four[0][0] < 30.0
            and len({text for _, text in four}) == 1
            and "although" not in four[0][1]
        ):
            simulation.break_promise("a line is not told again and again", f"{command.name}: {four}")
    for call, times in command.calls.items():
        # gcloud itself takes a second. After Ctrl-C, what is being withdrawn is withdrawn once more beside that.
        limit = 16 * (1 + command.interrupted) if "describe" in call[:6] else 24 if "jobsets" in " ".join(call) else 40
        if _is_frequent(times, limit):
            simulation.break_promise("the cloud is asked in moderation", f"{command.name}: {' '.join(call)[:200]}")
    for (host, script), times in command.scripts.items():
        if _is_frequent(times, 120 if script == "observe" else 20):  # each reads one page of a log
            simulation.break_promise("a host is asked in moderation", f"{command.name}: {script} on {host!r}")


def _is_frequent(times: Sequence[float], most: int) -> bool:
    """Returns whether there are more than so many times within 30 s."""
    return any(later - earlier < 30.0 for earlier, later in zip(times, times[most:], strict=False))


def told_refusal_is_true(simulation: SimulatedRun, command: Command) -> None:
    """A command that refuses a run tells why, truly: how it ended, or that a `down` deletes its slice."""
    told = re.match(
        r"run (\S+?):? (is not running: its last attempt ended with '(.*)'|was never started|has just finished"
        r"|attempt (\d+) was interrupted)", str(command.error),
    )  # fmt: skip
    for ledger in command.ledgers() if told is not None else ():
        known = ledger.events()
        right = any(isinstance(each, events.Ended) and each.outcome == (told[3] or "finished") for each in known)
        if told[4]:
            right = not any(isinstance(each, events.Started) and each.attempt == int(told[4]) for each in known)
        elif "never" in told[2]:
            right = not any(isinstance(each, events.AttemptBegan) for each in known)
        if ledger.run_id == told[1] and not right:
            simulation.break_promise("what is told refused is so", f"{command.name}: {command.error}: {known}")
    downs = [each for each in simulation.commands if each.name == "down" and each.laptop is command.laptop]
    meanwhile = any(each.began < command.ended and each.ended > command.began for each in downs)
    if "is being deleted by `tpu-launch down`" in str(command.error) and not meanwhile:
        simulation.break_promise("what is told refused is so", f"{command.name}: {command.error}")


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
    jobsets = simulation.world.cluster.store.all("jobsets") if simulation.world.cluster is not None else []
    if not used and not any(not each.get("status", {}).get("terminalState") for each in jobsets):
        simulation.break_promise("what is told in use was in use", f"{command.name}: {command.error}")


def told_patience_is_true(simulation: SimulatedRun, command: Command) -> None:
    """Checks that `down` and `stop` go on without a supervisor only if there is one that had its time to end."""
    for at, text in command.told if not command.laptop.asleep else ():
        if "has not ended; going on" not in text and "that starts it has not ended yet" not in text:
            continue
        run = text.split()[1].rstrip(":,")  # which another machine may supervise, if it has a bucket
        away = simulation.second if simulation.scenario.in_bucket else command.laptop
        near = [each for each in simulation.commands if each.ended > at - 1.0]
        near = [each for each in near if each.laptop is command.laptop or (each.laptop is away and each.run_id == run)]
        others = [
            each for each in near if each is not command and each.name not in ("up", "status", "gc", "explain", "exec")
        ]
        if at - command.began < _PATIENCE or not others:
            simulation.break_promise("supervisors are waited for", f"after {at - command.began:.0f} s: {text}")


def stop_of_a_start_is_told(simulation: SimulatedRun, command: Command) -> None:
    """`run` whose start fails after the run was stopped tells the stop, and no failure."""
    if "could not start the container" not in str(command.error) or "slow" in {f.kind for f in simulation.faults}:
        return
    stops = [stop for stop in simulation.world.record.stops if command.began < stop.at < command.ended - 10.0]
    killed = [each for each in simulation.commands if each.killed]  # perhaps before it had recorded the stop
    stops = [stop for stop in stops if stop.by not in killed and stop.run in str(command.said)]
    if stops and command.laptop is simulation.ann:
        simulation.break_promise("a stop of a start is told", f"{command.name}: {command.error}")


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
        differs = abs((host.quiet_seconds or 0.0) - silent) > _STATUS_SECONDS
        if job.hung is None and silent < _RECENT_SECONDS and differs:
            simulation.break_promise("status shows what is", f"{container.name} is silent for {silent:.0f} s: {host}")
        if not any(host.last_line in text for text in ("", *(text for _, text in container.log))):
            simulation.break_promise("status shows what is", f"{container.name} never wrote {host.last_line!r}")


def lines_are_shown_once(simulation: SimulatedRun, command: Command) -> None:
    """Checks that a command shows only lines that are in the logs of its folder, each once; that `logs` which ends by
    itself shows all of its attempt, and `run` all of an attempt that it started and judged."""
    logs = {path: _lines_in(path) for path in command.laptop.home.glob("runs/*/logs/attempt-*/host-*.log")}
    if command.name != "exec" and (extra := command.lines - sum(logs.values(), Counter())):
        simulation.break_promise("every line is shown once", f"{command.name} showed again {[*extra][:3]}")
    shows, outcome = command.shows if command.code == 0 else None, command.outcome
    job = simulation.world.record.jobs.get((outcome.run_id, outcome.attempt)) if outcome is not None else None
    started = job is not None and job.began is not None and job.began > command.began
    started &= not any(  # another one started it, and may have shown lines, as `logs` may have between the two
        each is not command and each.name in SUPERVISORS and command.began < each.ended and each.began < command.began
        for each in simulation.commands
    )
    if job is not None and started and not simulation.full_disk and "attaching to it" not in "".join(command.said):
        shows = command.laptop.home / "runs" / job.run / "logs" / f"attempt-{job.attempt}"
    for path, lines in logs.items():
        if path.parent == shows and (missing := lines - command.lines):
            simulation.break_promise("every line is shown once", f"{command.name} did not show {[*missing][:3]}")


def _lines_in(path: Path) -> Counter[tuple[int, str, str]]:
    lines, worker = path.read_text(errors="surrogateescape").split("\n")[:-1], int(path.stem.partition("-")[2])
    return Counter((worker, *line.split(" ", 1)) for line in lines)


def silence_of_logs_lasts(simulation: SimulatedRun, command: Command) -> None:
    """`logs` gives hosts up that do not answer only after minutes."""
    silent = any("no host that may go on writing has answered for" in text for text in command.said)
    if silent and command.ended - command.began < _LOGS_SECONDS:
        simulation.break_promise("silence of logs lasts", f"{command.ended - command.began:.0f} s")


def waits_are_told(simulation: SimulatedRun, command: Command) -> None:
    """`up` tells once what it waits for: each state in which Google has described the slice repeatedly."""
    looks = command.name == "up" and not simulation.races  # a race tells of its requests instead
    for (_, state), times in command.states.items() if looks else ():
        told = [text for text in command.said if state in text]
        if state in ("CREATING", "STARTING") and times > 3 and not told and not simulation.config.slice.queued:
            simulation.break_promise("a wait is told", f"{state} was seen {times} times")
    for before, after in pairwise(command.said):
        if before == after and re.search(r"slice \S+ is [A-Z]+$", after):
            simulation.break_promise("a wait is told", f"again: {after}")


def what_is_left_is_recorded(simulation: SimulatedRun, command: Command) -> None:
    """After a verdict, what a host still has of the attempt, or runs of the run, is recorded as left behind."""
    if command.verdict is None or (outcome := command.outcome) is None:
        return
    ledger = next(item for item in command.ledgers() if item.run_id == outcome.run_id)
    if ledger.state.phase.is_open or ledger.supervised():  # another terminal has started it again
        return
    known = {(item.attempt, worker) for item in ledger.state.orphans for worker in item.hosts}
    for container in containers_of(simulation.world, outcome.run_id):
        host, stays = container.host, container.attempt == outcome.attempt and not simulation.loses_by_its_disk
        there = host.up and (container.running or (stays and host.engine_up and not host.gone))
        if there and (container.attempt, host.worker) not in known:
            simulation.break_promise("what is left behind is recorded", f"{container.name} on {host!r}")


def rounds_keep_to_their_time(simulation: SimulatedRun) -> None:
    """No supervisor begins a round of a recovery later than run.recovery_minutes after its first one that failed."""
    if simulation.ann.wall or simulation.second.wall or simulation.ann.asleep:
        return
    for ledger in simulation.ledgers():
        first: float | None = None
        for entry in ledger.entries():
            now, event = parse_time(entry.time) or 0.0, entry.event
            if isinstance(event, events.RoundFailed):
                first = now if first is None else first
                if now + event.delay - first > simulation.config.run.recovery_minutes * 60 + 1.0:
                    simulation.break_promise("rounds keep to their time", f"{event} {now - first:.0f} s later")
            elif isinstance(event, _BEGIN_ROUNDS):
                first = None


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


def unfinished_runs_are_taken_over(simulation: SimulatedRun, command: Command) -> None:
    """Checks that no run is without a supervisor for long while another machine supervises the bucket's runs."""
    now, faults = simulation.world.scheduler.now, {fault.kind for fault in simulation.faults}
    for ledger in simulation.ledgers() if command.name == "watch" and not faults & {"bucket", "offline"} else ():
        there = [each for each in simulation.commands if each.run_id == ledger.run_id and each.name == "supervise"]
        failed = any(each.code not in (None, 0) for each in there)  # it is tried again after minutes
        lease = f"{ledger.bucket.url}/lease.json" if ledger.bucket is not None else ""
        *_, renewed = simulation.world.storage.objects.get(lease, (b"", 0, now))
        since = max(command.began, renewed)
        if ledger.state.phase.is_open and not failed and now - since > _TAKE_OVER_SECONDS:
            simulation.break_promise("an unfinished run is taken over", f"{ledger.run_id}: not for {now - since:.0f} s")


def left_behind_is_recorded_once(simulation: SimulatedRun) -> None:
    """Checks that a judged attempt's hosts are recorded as stopped or left behind: none twice, none without a cause."""
    asleep = any(each.asleep for each in simulation.world.laptops)
    unkept = simulation.full_disk or simulation.scenario.in_bucket or asleep
    kind = not (simulation.faults or unkept or simulation.kill_at)
    for ledger in simulation.ledgers():
        kept, jobs = ledger.events(), simulation.world.record.jobs
        left = [(each.attempt, at) for each in kept if isinstance(each, events.Orphaned) for at in each.hosts or (-1,)]
        ends = {each.attempt: each.outcome for each in kept if isinstance(each, events.Ended)}
        due = [jobs.get((ledger.run_id, each.attempt)) for each in kept if isinstance(each, events.Judged)]
        ended = [job for job in due if job and ends.get(job.attempt, "vanished") != "vanished" and not unkept]
        wrong = {(job.attempt, worker) for job in ended for worker in range(job.hosts)} - {*left}
        wrong -= {(each.attempt, each.host) for each in kept if isinstance(each, events.HostStopped)}
        alone = [each for each in left if kind and ends.get(each[0]) in ("finished", "saved")]
        again = len({*left}) < len(left) and not any(each.killed for each in simulation.commands)
        if wrong or alone or any(at < 0 for _, at in left) or again:
            simulation.break_promise("what is left behind is recorded", f"{ledger.run_id}: {left}, not {wrong}")


def progress_is_kept(simulation: SimulatedRun) -> None:
    """Checks that a run's folder has each reported step once, until seconds before host 0's end."""
    supervisors = sum(command.name in (*SUPERVISORS, "down") for command in simulation.commands)
    for job in simulation.world.record.jobs.values() if not simulation.full_disk else ():
        files = [home / "runs" / job.run / f"progress-{job.attempt}.jsonl" for home in simulation.homes]
        lines = [parse(line) for file in files if file.exists() for line in file.open()]  # one may be cut by a kill
        steps = [line.step for line in lines if line is not None]
        again = sum(before >= after for before, after in pairwise(steps))
        if again >= supervisors and not (job.plan.hang and job.plan.hang.kind == "step"):
            simulation.break_promise("progress is kept", f"{job}: {steps}")
        ended = max((item.ended for item in job.containers.values()), default=0.0)
        if job.plan.tells and job.confirmed and (job.watched or simulation.is_undisturbed(ended)):
            since = min(job.containers[0].ended, job.last_step) - _PROGRESS_SECONDS - (job.began or math.inf)
            least = hangs.line(job.timeline, since, None, 0).step if 0.0 < since < math.inf else -1
            if max(steps, default=-1) < least:
                simulation.break_promise("progress is kept", f"{job}: {steps}, and step {least} was done")


def failure_has_a_post_mortem(simulation: SimulatedRun, job: Job, event: events.Ended) -> None:
    """A failed attempt has an archive with the run's records and its logs, and no part of one is left."""
    folders, name = [home / "runs" / job.run for home in simulation.homes], f"post-mortem-{job.attempt}.tar.gz"
    disturbed = simulation.full_disk or simulation.scenario.in_bucket  # another machine may take it over
    disturbed |= any(each.killed or each.interrupted for each in simulation.commands)
    due = event.outcome in ("failed", "stalled", "host lost", "connection lost") and job.confirmed and not disturbed
    found = [folder for folder in folders if (folder / name).exists()]
    wrong = [str(path) for folder in folders for path in folder.glob(".post-mortem*")] + [name] * (due and not found)
    for folder in found:
        with tarfile.open(folder / name) as archive:
            kept = {path.removeprefix(f"{job.run}-{job.attempt}/") for path in archive.getnames()}
        logs = {str(path.relative_to(folder)) for path in folder.glob(f"logs/attempt-{job.attempt}/*.log")}
        wrong += {"run.json", "events.jsonl", "specification.yaml", *logs} - kept
    recorded = [each for ledger in simulation.ledgers() for each in ledger.events()]
    told = {each.path for each in recorded if isinstance(each, events.PostMortemWritten)}
    wrong += [str(folder / name) for folder in found if not (disturbed or str(folder / name) in told)]
    if wrong:
        simulation.break_promise("a failure has a post-mortem", f"{job}: {event.outcome}: {wrong}")


def stragglers_are_told(simulation: SimulatedRun) -> None:
    """Checks that a host is called slower only after minutes, by its factor, and as fast again only after that."""
    for ledger in simulation.ledgers():
        for job in [each for each in simulation.world.record.jobs.values() if each.run == ledger.run_id]:
            slow, is_told, since = job.plan.slow, False, (job.began or 0.0) + EPOCH
            lasts = slow is None or math.isinf(slow.steps)
            for entry in [each for each in ledger.entries() if each.event.attempt == job.attempt]:
                event, time = entry.event, parse_time(entry.time) or 0.0
                if isinstance(event, events.StragglerFound | events.StragglerGone):
                    right = slow is not None and (event.host, event.part) == (slow.host, "dispatch")
                    factor = event.factor if isinstance(event, events.StragglerFound) else 0.0
                    right &= (3.0 if lasts else 1.5) <= factor <= 3.0 if factor else is_told and not lasts
                    if not right or time - since < _STRAGGLER_SECONDS:
                        simulation.break_promise("a straggler is told", f"{job}: {event}, not {slow}")
                    since, is_told = time, True
            if job.plan.tells:
                _check_windows(simulation, job, is_told=is_told)


def _check_windows(simulation: SimulatedRun, job: Job, *, is_told: bool) -> None:
    """Checks what a run's folder keeps of each half minute; if a supervisor watched, that a slow host was told."""
    files, slow = [home / "runs" / job.run / f"hosts-{job.attempt}.jsonl" for home in simulation.homes], job.plan.slow
    lines = [line for file in files if file.exists() for line in file.read_text().splitlines()]
    whole = [line for line in lines if line.count("{") == line.count("}") == 2]  # a kill may cut one
    kept = [{int(worker): own for worker, own in json.loads(line)["seconds"].items()} for line in whole]
    most = defaultdict(lambda: 0.375, {} if slow is None else {slow.host: 0.875})
    wrong = not all(0.375 <= own <= most[worker] for each in kept for worker, own in each.items())
    slowly = "".join("y" if len(each) > 1 and 0.875 in each.values() else "n" for each in kept)
    if job.watched and job.hosts > 1:
        ends = [item.ended - (job.began or 0.0) for item in job.containers.values()]
        wrong |= not max(0, _least_windows(job, min(ends))) <= len(lines) <= max(ends) / 30.0 + 1
    if wrong or (job.watched and "yyy" in slowly and not is_told):
        simulation.break_promise("a straggler is told", f"{job}: {kept}, {is_told}: {slow}")


def _least_windows(job: Job, end: float) -> int:
    """Returns how many half minutes of steps a supervisor has seen at least; the first may show one host alone."""
    count, at, done = -2, -math.inf, 0
    for moment, _, step in job.timeline:
        if step > done and moment > at + _WINDOW_SECONDS and moment < end - _PROGRESS_SECONDS:
            count, at, done = count + 1, moment, step
    return count
