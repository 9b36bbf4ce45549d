"""The launcher's promises, a function each. `claims`, `slice_promises`, `end_promises` and `world` have others."""

from __future__ import annotations

import inspect
import json
import math
import re
import tarfile
from collections import Counter
from collections.abc import Callable, Sequence
from itertools import accumulate, pairwise
from pathlib import Path
from typing import TYPE_CHECKING

from launcher.errors import Exit
from launcher.run import events
from launcher.run.bucket import LEASE_SECONDS
from launcher.run.logs import read_from
from launcher.run.recovery import spent_so_far
from launcher.run.session import list_runs
from launcher.tpu_vm.requests import RequestRecord
from tests.simulation.launcher import claims, end_promises, slice_promises
from tests.simulation.launcher.jobs import REST, SECRET, SUPERVISORS
from tests.simulation.launcher.world import containers_of, slices_of
from training.machine import parse_time

if TYPE_CHECKING:
    from launcher.run.events import RunEvent
    from tests.simulation.launcher.commands import Command
    from tests.simulation.launcher.google import Request, Slice
    from tests.simulation.launcher.jobs import Job
    from tests.simulation.launcher.simulated_run import SimulatedRun
    from tests.simulation.launcher.world import Actor, World

_TAKEN = "now, so this tpu-launch exits"  # told by a process whose lease another one has
_PATIENCE = 4.9  # seconds for which a command waits for a run's lock
_CODES = {int(code) for code in Exit}
_LOOK_SECONDS = 6.0  # from a line until the launcher has seen it
_SILENCE_SECONDS = 40.0  # minutes are rounded, and an answer is handled seconds after it came
_TAKES_HOSTS = ("preempt", "maintenance", "reboot", "die")  # faults
_BILLED = ("CREATING", "READY", "STOPPED", "STARTING")
_UNBILLED_REQUESTS = ("DELETING", "SUSPENDING", "SUSPENDED", "FAILED")  # the next `up` replaces the last three


# -- of each command, when it ends ------------------------------------------------------------------------------------


def check_command(simulation: SimulatedRun, command: Command) -> None:
    if command.killed or command.code is None:
        return
    for promise in _OF_COMMANDS:
        promise(simulation, command)


def documented_code(simulation: SimulatedRun, command: Command) -> None:
    if command.code not in _CODES and command.name != "exec":  # which ends as what it runs
        simulation.break_promise("every ending has a documented code", f"{command.name} ended with {command.code}")


def message_with_a_next_step(simulation: SimulatedRun, command: Command) -> None:
    """Every error says what to do next."""
    text = str(command.error)
    words = "`|try|wait|again|fix:|start|ask|sign in|correct|choose|see |look|raise |grant|reach it?"
    if command.error is not None and (len(text) < 15 or not any(word in text for word in words.split("|"))):
        simulation.break_promise("every ending has a message with a next step", f"{command.name}: {text}")


def nothing_is_left_after_down(simulation: SimulatedRun, command: Command) -> None:
    """A `down` that succeeded leaves only what another command asked for meanwhile, which it can't stop."""
    if command.name != "down" or command.code != 0:
        return
    user = command.laptop.user
    old = any(fault.kind == "old describe" for fault in simulation.faults)  # shows none while Google removes one
    there = (*simulation.world.google.slices.values(), *simulation.world.google.requests.values())
    left = [item for item in there if item.creator == user and not (old and item.state == "DELETING")]
    going_on = any("has not ended; going on" in text for text in command.said)
    for item in left:
        by = item.by
        elsewhere = by is not None and by.laptop is not command.laptop and by.ended > command.began - 120.0
        meanwhile = by is not None and by.ended > command.began and (by.name == "up" or going_on)
        if not elsewhere and not meanwhile:
            simulation.break_promise("after down nothing of ours is left", f"{item} by {by and by.name}")
    jobsets = simulation.world.cluster.jobsets_of(user) if simulation.world.cluster is not None else []
    if jobsets and not any(each is not command and each.ended > command.began - 120.0 for each in simulation.commands):
        simulation.break_promise("after down nothing of ours is left", f"{jobsets}")


def no_silent_bill(simulation: SimulatedRun, command: Command) -> None:
    """A command that ends with an error names what it leaves running, or an `up` has seen, and how to delete it."""
    if command.code == 0 or command.name not in ("up", *SUPERVISORS) or command.verdict is not None:
        return
    seen = command.name == "up" and command.error is not None and command.saw_slice
    left: list[Slice | Request] = [
        node for node in slices_of(simulation.world, command.laptop.user)
        if node.state in _BILLED and (seen or node.by is command)
    ]  # fmt: skip
    for item in simulation.world.google.requests.values():
        billed = seen and item.state not in _UNBILLED_REQUESTS
        left += [item] if item.creator == command.laptop.user and (billed or item.by is command) else []
    text = "\n".join(command.said)
    if "detached: what was started goes on" in text or _TAKEN in text:  # a run that is well has a slice
        return
    if left and not any(word in text for word in ("tpu-launch down", "tpu-launch up", "billed")):
        simulation.break_promise("money never runs unattended", f"{command.name} left {left[0]}: {text[-300:]}")


def a_kind_world_is_kind(simulation: SimulatedRun, command: Command) -> None:
    """Before any fault, and with no other user of the slice, a command does not fail because of the cloud."""
    here = command.laptop
    others = [each for each in simulation.commands if each.laptop is not here and each.name in ("up", "down", "gc")]
    others += [each for each in simulation.commands if each.name == "gc"]  # the slice may have expired
    others += [each for each in simulation.actions if each.kind == "asleep"]
    if simulation.world.struck or others or simulation.kill_at or command.interrupted:
        return
    first = command is simulation.commands[0] and "is STOPPED and is not started: the limit" not in str(command.error)
    wanted = {
        "up": (0, Exit.CONFLICT) if first else None,  # whatever slice of the user exists
        "stop": (0, Exit.BAD_INPUT),
        "down": (0, Exit.BAD_INPUT, Exit.CONFLICT),
        **dict.fromkeys(("run", "attach"), _CODES - {int(Exit.CLOUD_ERROR)}),
    }.get(command.name)
    if wanted is not None and command.code not in wanted:
        simulation.break_promise("a kind world is kind", f"{command.name}: {command.code}: {command.said[-2:]}")


def run_with_budget_continues(simulation: SimulatedRun, command: Command) -> None:
    """A run with budget left ends only because of its program or its user, in a world whose faults pass."""
    world = simulation.world
    if command.name not in SUPERVISORS or command.code in (0, Exit.DETACHED, Exit.BAD_INPUT, Exit.CONFLICT):
        return
    known = [each for each in command.ledgers() if any(f"run {each.run_id}: attempt" in said for said in command.said)]
    if not known or world.record.stops or world.record.permanent or simulation.loses_by_its_disk:
        return
    ledger = known[-1]
    ended = [event for event in ledger.events() if isinstance(event, events.Ended)]
    if not ended:
        return
    spent, run = spent_so_far(ledger.events()), simulation.config.run
    outcome = ended[-1].outcome
    if command.verdict is not None:
        kinds = ("preempted", "host lost", "connection lost", "saved")
        left = outcome in kinds and spent.preemptions < run.preemption_retries
        if left or (outcome in ("failed", "stalled") and spent.failures < run.failure_retries):
            world.break_promise("a run with budget left continues", f"ended {outcome} with {spent}")
        return
    if command.error is None or command.error.exit_code in (Exit.QUOTA, Exit.PERMISSION, Exit.STOCKOUT):
        return
    recovering = any(": starting again (" in line for line in command.said)
    text = str(command.error)
    if recovering and not any(words in text for words in ("run.recovery_minutes", "it was deleted", "client deleted")):
        world.break_promise("a run with budget left continues", f"{command.code} after {spent}: {text[:300]}")


def leaving_a_recovery_reports_the_bill(simulation: SimulatedRun, command: Command) -> None:
    """A recovery that the user stops or leaves says that the slice stays, is billed, and how to delete it."""
    if command.name not in SUPERVISORS or command.laptop.user in simulation.world.downs:
        return
    recoveries = [number for number, line in enumerate(command.said) if ": starting again (" in line]
    if not recoveries:
        return
    since = "\n".join(command.said[recoveries[-1] :])
    left = [node for node in slices_of(simulation.world, command.laptop.user) if node.state in _BILLED]
    started = ": started on all hosts" in since or "its start could not be recorded" in since
    if not (started or _TAKEN in since) and left and not ("tpu-launch down" in since and "billed" in since):
        simulation.break_promise("leaving a recovery reports the bill", f"{command.name}: {since[-300:]}")


def after_a_stop_nothing_runs(simulation: SimulatedRun, command: Command) -> None:
    """A `stop` that succeeded has ended the run on every host."""
    record = simulation.world.record
    again = any(at > command.began for _, at in record.requested_runs)
    started = any("that starts it has not ended yet" in text for text in command.said)
    if command.name != "stop" or command.code != 0 or again or started:
        return
    stop = next((item for item in record.stops if item.by is command), None)
    for container in containers_of(simulation.world, stop.run) if stop is not None else ():
        if container.running and container.host.up:
            simulation.break_promise("after a stop nothing runs", f"{container.name} on {container.host!r}")


def logs_end_with_their_program(simulation: SimulatedRun, command: Command) -> None:
    """`logs -f` ends by itself when no container of the run can write any more; minutes later if a pod is gone."""
    if command.name != "logs" or not command.interrupted:
        return
    job = simulation.world.newest_job()
    since = simulation.world.scheduler.now - (720.0 if job is not None and job.left else 120.0)
    watchers = [other for other in simulation.commands if other is not command and other.name in SUPERVISORS]
    busy = any(other.code is None or (other.began < command.began and other.ended > since) for other in watchers)
    if job is None or busy or len(job.containers) < job.hosts:  # an interrupted start: one may wait for its secrets
        return
    if all(item.ended < since and item.host.quiet_since(since) for item in job.containers.values()):
        simulation.break_promise("logs end with their program", f"{job}: {command.said[-2:]}")


def command_ends_in_time(simulation: SimulatedRun, command: Command) -> None:
    """Commands without a program to wait for end in bounded time."""
    longest = {"stop": 900.0, "gc": 3600.0, "down": 4800.0, "up": 2.5 * 3600.0}.get(command.name)
    if longest is None or command.laptop.asleep:
        return
    if (seconds := simulation.world.scheduler.now - command.began) > longest:
        simulation.break_promise("every wait ends in its time", f"{command.name} took {seconds:.0f} s")


def passing_failures_are_outlasted(simulation: SimulatedRun, command: Command) -> None:
    """A `down` that deletes, or an `up` that has asked once for a slice, does not give up within minutes because of
    another operation, the API or the network. Answers that are lost repeatedly end an `up`."""
    if command.code != Exit.CLOUD_ERROR or simulation.loses_by_its_disk or command.name not in ("up", "down"):
        return
    text, seconds = str(command.error), simulation.world.scheduler.now - command.began
    if command.name == "down":
        asked = any("deleting slice" in said for said in command.said)
        longest = 100.0 if "not all zones are done" in text else 300.0  # a place that does not answer
    else:  # of five minutes: it leaves when the next pause would be too long
        question = "requesting a " if simulation.config.slice.queued else "creating "
        asks = sum(said.startswith(question) for said in command.said)
        asked, longest = asks == 1 or "was READY, and is billed" in text, 200.0
    if asked and seconds < longest:
        simulation.break_promise("passing failures are outlasted", f"{command.name}, {seconds:.0f} s: {text}")


def stockout_is_reported_as_stockout(simulation: SimulatedRun, command: Command) -> None:
    """A command that gets no slice for lack of capacity says so, in every wording of Google's error."""
    if command.out_of_stock and command.code == Exit.CLOUD_ERROR and not simulation.loses_by_its_disk:
        simulation.break_promise("a stock-out is reported as a stock-out", f"{command.name}: {command.error}")


def refusal_is_told_as_what_it_is(simulation: SimulatedRun, command: Command) -> None:
    """A command that Google refused for one reason alone ends with that reason's code, and says what helps."""
    told = {"signed out": (Exit.PERMISSION, "gcloud auth login"), "quota": (Exit.QUOTA, "quota")}
    passing = {fault.kind for fault in simulation.faults} & {"lost", "offline", "busy", "slow"}
    if command.error is None or len(command.refusals) != 1 or passing or simulation.loses_by_its_disk:
        return
    (kind,) = command.refusals
    if kind in told and command.code in (Exit.PERMISSION, Exit.QUOTA, Exit.CLOUD_ERROR):
        code, what_helps = told[kind]
        if command.code != code or what_helps not in str(command.error):
            simulation.break_promise("a refusal is told as what it is", f"{command.name}, {kind}: {command.error}")


def conflict_has_another_party(simulation: SimulatedRun, command: Command) -> None:
    """A command that reports another supervisor shares its folder with one."""
    if command.error is None or "is supervised by another tpu-launch" not in str(command.error):
        return
    names = (*SUPERVISORS, "logs", "down", "stop")
    there = [each for each in simulation.commands if each is not command and each.laptop is command.laptop]
    others = [each for each in there if each.name in names and each.ended > command.began]
    if not others or (command.ended - command.began < _PATIENCE and command.name in SUPERVISORS):
        simulation.break_promise("a conflict has another party", f"{command.name}: {command.error}")


# -- of one moment ----------------------------------------------------------------------------------------------------


def stalled_program_is_silent(world: World, run: str) -> None:
    """A run that is reported as stalled has written no line for as long as its file says. Called at the report."""
    job = world.newest_job(run)
    if job is None or job.plan.tells or job.stall_seconds is None:
        return
    now = world.scheduler.now
    for container in job.containers.values():
        job.write_lines(container)
        if (newest := container.wrote) is not None and now - newest < job.stall_seconds - _LOOK_SECONDS:
            world.break_promise("what writes lines is not stalled", f"{container.host!r}: {now - newest:.0f} s ago")
            return


def told_absence_is_true(world: World, actor: Actor, text: str) -> None:
    """Without faults, a command tells that no host answers only if none has answered for half a minute."""
    if not world.faults and any(1.0 < world.scheduler.now - at < 25.0 for at in actor.heard.values()):
        world.break_promise("what is told absent is absent", text)


def told_silence_is_true(world: World, by: Actor, run: str, text: str) -> None:
    """A host, or all hosts, that a command calls silent for so long have told it nothing for so long. Called then."""
    told = re.search(r"host (\d+): (the host|no host) has (?:not )?answered for (\d+) (s|minutes)", text)
    job = world.newest_job(run)
    if told is None or job is None:
        return
    seconds = float(told[3]) * (1.0 if told[4] == "s" else 60.0)
    for worker, container in job.containers.items():
        job.told_lost |= world.is_lost(by, container.host, job)
        silent = world.scheduler.now - by.heard.get(container.host, -math.inf)
        if (told[2] == "no host" or worker == int(told[1])) and 1.0 < silent < seconds - _SILENCE_SECONDS:
            world.break_promise("what is told silent was silent", f"{container.host!r} for {silent:.0f} s: {text}")


# -- of the whole run, at its end -------------------------------------------------------------------------------------


def check_end(simulation: SimulatedRun) -> None:
    for promise in _OF_RUNS:
        promise(simulation)
    for ledger in simulation.ledgers():
        for entry in [each for each in ledger.entries() if isinstance(each.event, events.Ended)]:
            event = entry.event
            job = simulation.world.record.jobs.get((ledger.run_id, event.attempt))
            for promise in _OF_ENDS if job is not None else ():
                promise(simulation, job, event)
            if job is not None and job.plan.tells:
                end_promises.hang_is_explained(simulation, job, event, parse_time(entry.time) or 0.0)


def nothing_is_left_at_the_end(simulation: SimulatedRun) -> None:
    """After the last `down`, ann pays for nothing."""
    if left := [node for node in slices_of(simulation.world, "ann") if node.state != "DELETING"]:
        ends = [command.code for command in simulation.commands if command.name == "down"]
        simulation.break_promise("money never runs unattended", f"{left[0].name} is left; down ended with {ends}")


def every_request_is_withdrawn_or_used(simulation: SimulatedRun) -> None:
    """After the last `down`, the record has no request without an end, and at most one was used at a time."""
    ends = [command for command in simulation.commands if command.name == "down" and command.laptop is simulation.ann]
    if not ends or ends[-1].code != 0:
        return
    ends[-1].process.enter()  # the record is in the folder of ann's command
    used: list[tuple[float, float]] = []
    for request in RequestRecord(simulation.config).read():
        if request.ended is None:
            simulation.break_promise("every request is withdrawn or used", f"{request}")
        elif request.granted is not None:
            used.append((request.granted, request.ended))
    for before, after in pairwise(used):
        if after[0] < before[1] and not simulation.ann.wall:
            simulation.break_promise("every request is withdrawn or used", f"two at once: {used}")


def budgets_are_kept(simulation: SimulatedRun) -> None:
    """No more attempts than the budgets allow; one event that takes a host or the slice costs one attempt, if one
    command handles it."""
    run, record, commands = simulation.config.run, simulation.world.record, simulation.commands
    histories = {ledger.run_id: ledger.events() for ledger in simulation.ledgers()}
    replaced = [name for name, known in histories.items() for each in known if isinstance(each, events.SliceReplaced)]
    one_by_one = not any(fault.kind not in _TAKES_HOSTS for fault in simulation.faults)
    for name, known in histories.items():
        spent = spent_so_far(known)
        again = any(isinstance(each, events.Recovering) and each.after == "connection lost" for each in known)
        wrong = spent.preemptions > max(run.preemption_retries, 3 * again) or spent.failures > run.failure_retries
        due = len(simulation.faults) + sum(stop.run == name and stop.by is not None for stop in record.stops)
        due += sum(job.plan.kind == "save" for job in record.jobs.values() if job.run == name)
        due += sum(each.killed or each.interrupted for each in commands)
        due += sum(each.name == "down" and each.laptop is not simulation.ann for each in commands)
        due += len(replaced) - replaced.count(name)  # another machine's run may end this one's slice
        if wrong or (one_by_one and spent.preemptions > due):
            simulation.break_promise("budgets are spent on what they are for", f"{name}: {spent}, {due}")


def ledgers_are_in_order(simulation: SimulatedRun) -> None:
    """Attempts are numbered one after another, each ends at most once, and none begins before the last has ended."""
    for ledger in simulation.ledgers():
        began = [event.attempt for event in ledger.events() if isinstance(event, events.AttemptBegan)]
        ended = [event.attempt for event in ledger.events() if isinstance(event, events.Ended)]
        if began != list(range(len(began))) or len(set(ended)) < len(ended):
            simulation.break_promise("a ledger is in order", f"{ledger.run_id}: began {began}, ended {ended}")
        order = [event for event in ledger.events() if isinstance(event, events.AttemptBegan | events.Ended)]
        for event, following in pairwise(order):
            if isinstance(event, events.AttemptBegan) and isinstance(following, events.AttemptBegan):
                simulation.break_promise("a ledger is in order", f"{ledger.run_id}: attempt {event.attempt} has no end")
        away, over, attempt = set[int](), set[int](), -1
        recorded = not simulation.full_disk and ledger.bucket is None  # which may lose what hosts did
        for event in ledger.events() if recorded else ():
            if isinstance(event, events.AttemptBegan):
                away, over, attempt = set(), set(), event.attempt
            elif isinstance(event, events.HostOutOfReach | events.HostBack | events.HostEnded) and (
                event.attempt != attempt
                or (isinstance(event, events.HostBack) and event.host not in away)
                or (isinstance(event, events.HostEnded) and event.exit_code is not None and event.host in over)
            ):
                simulation.break_promise("a ledger is in order", f"{ledger.run_id}: {event} in attempt {attempt}")
            away |= {event.host} if isinstance(event, events.HostOutOfReach) else set()
            over |= {event.host} if isinstance(event, events.HostEnded) else set()


def one_supervisor_decides(simulation: SimulatedRun) -> None:
    """Checks that the lease's holder records what begins or follows an attempt; folders have the first events."""
    written = {url: data for url, (data, _, _) in simulation.world.storage.objects.items() if "/events/" in url}
    for ledger in [item for home in simulation.homes for item in list_runs(home, simulation.commands[0].machine)]:
        if ledger.bucket is None:
            continue
        there = [json.loads(written[url]) for url in sorted(written) if url.startswith(f"{ledger.bucket.url}/")]
        copied = [*map(events.from_document, there[: len(ledger.entries())])]
        held = list(accumulate(there, lambda by, item: item["by"] if item["event"] == "supervised" else by, initial=""))
        wrong = [
            item for item, by in zip(there, held, strict=False)
            if item["event"] in ("attempt", "ended", "recover", "replaced") and item["by"] != by
        ]  # fmt: skip
        if wrong or copied != [*ledger.entries()]:
            simulation.break_promise("one supervisor decides", f"{ledger.folder}: {wrong}, {there}")


def locks_are_free(simulation: SimulatedRun) -> None:
    """A command that has ended holds no run's lock, and a killed one its lease only until that expires."""
    if any(command.code is None and not command.killed for command in simulation.commands):
        return
    recent = simulation.world.scheduler.now - LEASE_SECONDS
    leased = any(command.killed and command.ended > recent for command in simulation.commands)
    for ledger in simulation.ledgers():
        if ledger.supervised() and not (ledger.bucket is not None and leased):
            simulation.break_promise("locks go with their processes", ledger.run_id)


def lines_come_once(simulation: SimulatedRun) -> None:
    """Every line of a host is in its file at most once, and exactly once when its container was removed after a
    verdict, unless the launcher told that lines may be missing, or left the container behind."""
    ledgers = {ledger.run_id: ledger for ledger in simulation.ledgers()}
    for job in simulation.world.record.jobs.values():
        for worker, container in job.containers.items():
            log = Path("runs", job.run, "logs", f"attempt-{job.attempt}", f"host-{worker}.log")
            kept = Counter[tuple[str, str]]()  # another workstation may have gone on with the run
            for path in [home / log for home in simulation.homes if (home / log).exists()]:
                kept |= Counter((line.timestamp, line.text) for line in read_from(path, 0)[0])
            where = f"{job} host {worker}"
            extra = kept - Counter(container.log)
            if container.host.clock_jumped:  # its log may be read from the middle of a line on
                extra = Counter({(at, text): count for (at, text), count in extra.items() if text != REST})
            if extra:
                seen = [(at, text[-60:]) for at, text in extra]
                simulation.break_promise("every line once", f"{where}: twice or never written: {seen[:3]}")
            removed = (job.run, job.attempt, worker) in simulation.world.record.removed_logs
            disturbed = simulation.faults or simulation.actions or simulation.full_disk
            vanishes = simulation.world.cluster is not None and disturbed  # a deleted pod's log goes with it
            if not removed or vanishes or not _are_lines_due(ledgers[job.run].events(), job, worker):
                continue
            hint = f"host {worker}: its last lines may be missing"
            told = any(hint in text for command in simulation.commands for text in command.said)
            missing = Counter(container.log) - kept
            if missing and not told and not container.host.clock_jumped:
                seen = [(at, text[-60:]) for at, text in missing]
                simulation.break_promise("every line once", f"{where}: lost {seen[:3]}")


def secrets_are_nowhere(simulation: SimulatedRun) -> None:
    """The value of a secret, which programs print, is in no message and in no file but the hosts' logs."""
    if simulation.world.cluster is not None:  # whose secrets the launcher does not know
        return
    for command in simulation.commands:
        if told := [text for text in command.said if SECRET in text]:
            simulation.break_promise("secrets are nowhere", f"{command.name} said {told[0][:300]}")
    for path in (each for home in simulation.homes for each in home.rglob("*") if each.is_file()):
        if "logs" in path.parts:
            continue
        kept = path.read_bytes()
        if path.name.endswith(".tar.gz"):
            with tarfile.open(path) as archive:
                kept = b"".join(file.read() for item in archive if (file := archive.extractfile(item)) is not None)
        if SECRET.encode() in kept:
            simulation.break_promise("secrets are nowhere", f"{path} holds one")


def _are_lines_due(recorded: Sequence[RunEvent], job: Job, worker: int) -> bool:
    """Returns whether a host's lines were due: the attempt ended, by no stop of its start, and did not leave it."""
    ends = [event for event in recorded if isinstance(event, events.Ended) and event.attempt == job.attempt]
    left = [each.hosts for each in recorded if isinstance(each, events.Orphaned) and each.attempt == job.attempt]
    unfetched = (events.NOT_STARTED, events.VANISHED, *([] if job.confirmed else ["stopped"]))
    return bool(ends) and ends[-1].outcome not in unfetched and not any(worker in hosts for hosts in left)


def _find_promises(*parameters: str) -> list[Callable[..., None]]:
    """Returns the functions of this module and the others that take these parameters: each is a promise."""
    modules = (globals(), vars(claims), vars(slice_promises), vars(end_promises))
    functions = [each for module in modules for each in module.values() if inspect.isfunction(each)]
    public = [each for each in functions if not each.__name__.startswith(("_", "check_"))]
    return [each for each in public if (*inspect.signature(each).parameters,) == parameters]


_OF_COMMANDS = _find_promises("simulation", "command")
_OF_RUNS = _find_promises("simulation")
_OF_ENDS = _find_promises("simulation", "job", "event")
