"""What is promised whatever happens: one function each. Those that concern one moment are checked there, in `world`."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

from launcher.errors import Exit
from launcher.run.events import AttemptBegan, Ended
from launcher.run.logs import read_from
from launcher.run.recovery import spent_so_far
from launcher.run.runs import list_runs

if TYPE_CHECKING:
    from tests.simulation.launcher.commands import Command
    from tests.simulation.launcher.google import Slice
    from tests.simulation.launcher.hosts import Container
    from tests.simulation.launcher.jobs import Job
    from tests.simulation.launcher.simulated_run import SimulatedRun
    from tests.simulation.launcher.world import World

_CODES = {int(code) for code in Exit}
_LOOK_SECONDS = 6.0  # from a line until the launcher may know it
_TAKES_HOSTS = ("preempt", "maintenance", "reboot", "die")  # faults
_BILLED = ("CREATING", "READY", "STOPPED", "STARTING")


def slices_of(world: World, person: str) -> list[Slice]:
    """What a person pays for, or would if nobody deleted it."""
    return [node for node in world.google.slices.values() if node.maker == person]


# -- of each command, when it ends ------------------------------------------------------------------------------------


def check_command(simulation: SimulatedRun, command: Command) -> None:
    """Everything that is promised of the end of a command."""
    if command.killed or command.code is None:
        return
    documented_code(simulation, command)
    message_with_a_next_step(simulation, command)
    nothing_is_left_after_down(simulation, command)
    no_silent_bill(simulation, command)
    who_leaves_a_recovery_hears_of_the_bill(simulation, command)
    up_that_fails_says_what_stays(simulation, command)
    after_a_stop_nothing_runs(simulation, command)
    stop_in_a_kind_world_succeeds(simulation, command)
    logs_end_with_their_program(simulation, command)
    command_ends_in_time(simulation, command)
    deletion_waits_out_what_passes(simulation, command)
    creation_waits_out_what_passes(simulation, command)
    stockout_is_told_as_one(simulation, command)
    conflict_has_another_party(simulation, command)
    nothing_runs_on_after_a_verdict(simulation, command)
    run_with_budget_goes_on(simulation, command)
    up_in_a_kind_world_succeeds(simulation, command)


def documented_code(simulation: SimulatedRun, command: Command) -> None:
    """Every ending has a documented code."""
    if command.code not in _CODES:
        simulation.world.break_promise(
            "every ending has a documented code", f"{command.name} ended with {command.code}"
        )


def message_with_a_next_step(simulation: SimulatedRun, command: Command) -> None:
    """Every error says what to do next."""
    if command.error is None:
        return
    text = str(command.error)
    hints = ("`", "try", "wait", "again", "fix:", "start", "ask", "sign in", "correct", "choose", "see ", "look")
    if len(text) < 15 or not any(hint in text for hint in hints):
        simulation.world.break_promise("every ending has a message with a next step", f"{command.name}: {text}")


def nothing_is_left_after_down(simulation: SimulatedRun, command: Command) -> None:
    """After `down` nothing of ours is left."""
    if command.name != "down" or command.code != 0:
        return
    person = command.laptop.person
    left: list[object] = [*slices_of(simulation.world, person)]
    left += [item for item in simulation.world.google.requests.values() if item.maker == person]
    others_busy = any(other.name in ("up", "run", "attach") and other.code is None for other in simulation.commands)
    if left and not others_busy:
        simulation.world.break_promise("after down nothing of ours is left", f"{left}")


def no_silent_bill(simulation: SimulatedRun, command: Command) -> None:
    """A command that ends with an error names what it leaves running and how to delete it."""
    if command.code == 0 or command.name not in ("up", "run", "attach") or command.verdict is not None:
        return
    google, person = simulation.world.google, command.laptop.person
    left = [node for node in slices_of(simulation.world, person) if node.by is command.actor and node.state in _BILLED]
    requests = [item for item in google.requests.values() if item.maker == person and item.by is command.actor]
    text = "\n".join(command.said)
    if "detached: what was started goes on" in text:  # a run that is well has a slice
        return
    if (left or requests) and not any(word in text for word in ("tpu-launch down", "tpu-launch up", "billed")):
        simulation.world.break_promise(
            "money never runs unattended",
            f"{command.name} ended with {command.code} and left {left or requests}: {text[-300:]}",
        )


def up_in_a_kind_world_succeeds(simulation: SimulatedRun, command: Command) -> None:
    """Before anything has gone wrong, the first `up` succeeds, whatever of ours is there."""
    if command is not simulation.commands[0] or command.name != "up" or simulation.world.struck or command.interrupted:
        return
    if command.code not in (0, Exit.CONFLICT):
        simulation.world.break_promise(
            "up goes on from what is there", f"{simulation.scenario.leftover}: {command.error}"
        )


def run_with_budget_goes_on(simulation: SimulatedRun, command: Command) -> None:
    """A run with budget left, in a world that heals, ends only because its program or its owner wants it to."""
    world = simulation.world
    if command.name not in ("run", "attach") or command.code in (0, Exit.DETACHED, Exit.BAD_INPUT, Exit.CONFLICT):
        return
    known = list_runs(command.laptop.home, command.machine)
    if not known or world.record.stops or world.record.permanent or simulation.loses_by_its_disk:
        return
    ledger = known[-1]
    ended = [event for event in ledger.events() if isinstance(event, Ended)]
    attempts_here = [entry for entry in command.said if ": attempt " in entry and " hosts" in entry]
    if not ended or not attempts_here:
        return
    spent, run = spent_so_far(ledger.events()), simulation.config.run
    outcome = ended[-1].outcome
    if command.verdict is not None:
        kinds = ("preempted", "host lost", "saved")
        if outcome in kinds and spent.preemptions < run.preemption_retries:
            world.break_promise(
                "a run with budget left goes on", f"ended {outcome} with {spent} of {run.preemption_retries}"
            )
        if outcome in ("failed", "stalled") and spent.failures < run.failure_retries:
            world.break_promise(
                "a run with budget left goes on", f"ended {outcome} with {spent} of {run.failure_retries}"
            )
        return
    if command.error is None or command.error.exit_code in (Exit.QUOTA, Exit.PERMISSION, Exit.STOCKOUT):
        return
    recovering = any(": starting again (" in line for line in command.said)
    text = str(command.error)
    if recovering and "run.recovery_minutes" not in text and "it was deleted" not in text:
        world.break_promise(
            "a run with budget left goes on", f"ended with {command.code} after {spent}: {str(command.error)[:300]}"
        )


def who_leaves_a_recovery_hears_of_the_bill(simulation: SimulatedRun, command: Command) -> None:
    """A recovery that its owner stopped or left says that the slice stays, is billed, and how it is deleted."""
    if command.name not in ("run", "attach") or simulation.world.down_allowed:
        return
    recoveries = [number for number, line in enumerate(command.said) if ": starting again (" in line]
    if not recoveries:
        return
    since = "\n".join(command.said[recoveries[-1] :])
    left = [node for node in slices_of(simulation.world, command.laptop.person) if node.state in _BILLED]
    if ": started on all hosts" not in since and left and not ("tpu-launch down" in since and "billed" in since):
        simulation.world.break_promise(
            "who leaves a recovery hears of the bill", f"{command.name} ended with {command.code}: {since[-300:]}"
        )


def up_that_fails_says_what_stays(simulation: SimulatedRun, command: Command) -> None:
    """An `up` that has seen a slice or a request of its owner's, and fails, says that it stays."""
    if command.name != "up" or command.error is None or not command.actor.looked:
        return
    google, person = simulation.world.google, command.laptop.person
    left: list[object] = [node for node in slices_of(simulation.world, person) if node.state in _BILLED]
    left += [item for item in google.requests.values() if item.maker == person and item.state != "DELETING"]
    if left and not any(word in "\n".join(command.said) for word in ("tpu-launch down", "tpu-launch up", "billed")):
        simulation.world.break_promise("up that fails says what stays", f"{command.error}; there is {left[0]}")


def after_a_stop_nothing_runs(simulation: SimulatedRun, command: Command) -> None:
    """A `stop` that succeeded has ended the run on every host that there is."""
    if (
        command.name != "stop"
        or command.code != 0
        or any(at > command.began for at in simulation.world.record.runs_asked)
    ):
        return
    stop = next((item for item in simulation.world.record.stops if item.by is command), None)
    for container in containers_of(simulation.world, stop.run) if stop is not None else ():
        if container.running and container.host.up:
            simulation.world.break_promise("after a stop nothing runs", f"{container.name} on {container.host!r}")


def stop_in_a_kind_world_succeeds(simulation: SimulatedRun, command: Command) -> None:
    """Where nothing has gone wrong, a `stop` succeeds."""
    if command.name != "stop" or simulation.world.struck or command.interrupted or simulation.world.down_allowed:
        return
    if command.code not in (0, Exit.BAD_INPUT):
        simulation.world.break_promise("a stop in a kind world succeeds", f"{command.code}: {command.said[-2:]}")


def logs_end_with_their_program(simulation: SimulatedRun, command: Command) -> None:
    """`logs -f` ends by itself when nothing of the run is left that could write."""
    if command.name != "logs" or not command.interrupted:
        return
    since = simulation.world.scheduler.now - 120.0
    job = simulation.world.newest_job()
    watchers = [other for other in simulation.commands if other is not command and other.name in ("run", "attach")]
    busy = any(
        (other.began < command.began or other.code is None) and (other.code is None or other.ended > since)
        for other in watchers
    )
    if job is None or busy or not job.containers:  # none: they may wait for the rest of an interrupted start
        return
    if all(item.ended < since and item.host.quiet_since(since) for item in job.containers.values()):
        simulation.world.break_promise("logs end with their program", f"{job}: {command.said[-2:]}")


def command_ends_in_time(simulation: SimulatedRun, command: Command) -> None:
    """Commands that wait for nobody end within minutes."""
    longest = {"stop": 900.0, "gc": 3600.0, "down": 4800.0}.get(command.name)
    if longest is None or command.laptop.asleep:
        return
    if (seconds := simulation.world.scheduler.now - command.began) > longest:
        simulation.world.break_promise("every wait ends in its time", f"{command.name} took {seconds:.0f} s")


def deletion_waits_out_what_passes(simulation: SimulatedRun, command: Command) -> None:
    """A `down` that has begun to delete does not give up for what passes within minutes: another operation, an API or a
    network that is away."""
    if command.name != "down" or command.code != Exit.CLOUD_ERROR or simulation.loses_by_its_disk:
        return
    seconds = simulation.world.scheduler.now - command.began
    if seconds < 300.0 and any("deleting slice" in text for text in command.said):
        simulation.world.break_promise("a deletion waits out what passes", f"after {seconds:.0f} s: {command.error}")


def creation_waits_out_what_passes(simulation: SimulatedRun, command: Command) -> None:
    """An `up` that has asked for a slice, or seen it READY, does not give up for what passes within minutes. An answer
    that is lost again and again ends it."""
    if command.name != "up" or command.code != Exit.CLOUD_ERROR or simulation.loses_by_its_disk:
        return
    question = "asking for " if simulation.scenario.setting.queued else "creating "
    asked = sum(text.startswith(question) for text in command.said)
    waited = "was READY, and is billed" in str(command.error)
    seconds = simulation.world.scheduler.now - command.began
    if seconds < 200.0 and (asked == 1 or waited):  # of five minutes: it leaves when the next pause would be too long
        simulation.world.break_promise("a creation waits out what passes", f"after {seconds:.0f} s: {command.error}")


def stockout_is_told_as_one(simulation: SimulatedRun, command: Command) -> None:
    """Who could not be given a slice because there is no capacity is told so, in whatever words Google said it."""
    if command.actor.out_of_stock and command.code == Exit.CLOUD_ERROR and not simulation.loses_by_its_disk:
        simulation.world.break_promise("no capacity is told as that", f"{command.name}: {command.error}")


def conflict_has_another_party(simulation: SimulatedRun, command: Command) -> None:
    """Who is told that another process supervises the run shares the folder with one."""
    if command.error is None or "is supervised by another tpu-launch" not in str(command.error):
        return
    others = [
        other
        for other in simulation.commands
        if other is not command
        and other.laptop is command.laptop
        and other.name in ("run", "attach", "logs", "down", "stop")
        and other.ended > command.began
    ]
    if not others:
        simulation.world.break_promise("a conflict has another party", str(command.error))


def nothing_runs_on_after_a_verdict(simulation: SimulatedRun, command: Command) -> None:
    """When a command says how a run ended, no host runs it any more, except those that are recorded as left behind."""
    if command.verdict is None or command.outcome is None:
        return
    run = command.outcome.run_id
    ledger = next(item for item in list_runs(command.laptop.home, command.machine) if item.run_id == run)
    if ledger.state.phase.is_open or ledger.supervised():  # another terminal has started it again
        return
    left = {(item.attempt, worker) for item in ledger.state.orphans for worker in item.hosts}
    for container in containers_of(simulation.world, run):
        known = (container.attempt, container.host.worker) in left
        if container.running and container.host.up and not known:
            simulation.world.break_promise(
                "nothing runs on after a verdict", f"{container.name} on {container.host!r}: {command.verdict}"
            )


def containers_of(world: World, run: str) -> list[Container]:
    """All containers of a run that hosts have, those of slices that are gone left out."""
    hosts = [host for node in world.google.slices.values() for host in node.hosts]
    return [item for host in hosts for item in host.containers.values() if item.run == run]


# -- of one moment ----------------------------------------------------------------------------------------------------


def stalled_program_is_silent(world_: World, run: str) -> None:
    """A run that is called stalled has written no line for as long as its file says. Called when that is said."""
    job = world_.newest_job(run)
    if job is None or job.stall_seconds is None:
        return
    now = world_.scheduler.now
    for container in job.containers.values():
        job.write_lines(container)
        if (newest := container.wrote) is not None and now - newest < job.stall_seconds - _LOOK_SECONDS:
            world_.break_promise(
                "what writes lines is not stalled",
                f"{container.name} on {container.host!r} wrote {now - newest:.0f} s ago",
            )
            return


# -- of the whole run, at its end -------------------------------------------------------------------------------------


def check_end(simulation: SimulatedRun) -> None:
    """Everything that is promised at the end of a simulation."""
    nothing_of_ours_is_left(simulation)
    budgets_are_kept(simulation)
    one_event_costs_one_attempt(simulation)
    ledgers_are_in_order(simulation)
    locks_are_free(simulation)
    for ledger in list_runs(simulation.ann.home, simulation.commands[0].machine) if simulation.commands else []:
        for event in ledger.events():
            if isinstance(event, Ended):
                job = simulation.world.record.jobs.get((ledger.run_id, event.attempt))
                if job is not None:
                    verdict_names_the_first_cause(simulation, job, event)
                    memory_is_the_programs(simulation, job, event)
                    finished_means_finished(simulation, job, event)
    lines_come_once(simulation)


def nothing_of_ours_is_left(simulation: SimulatedRun) -> None:
    """When ann has gone home, she pays for nothing."""
    if left := [node for node in slices_of(simulation.world, "ann") if node.state != "DELETING"]:
        ends = [command.code for command in simulation.commands if command.name == "down"]
        simulation.world.break_promise(
            "money never runs unattended", f"at the end there is {left[0].name}; down ended with {ends}"
        )


def budgets_are_kept(simulation: SimulatedRun) -> None:
    """No more attempts than the budgets allow."""
    run = simulation.config.run
    for ledger in list_runs(simulation.ann.home, simulation.commands[0].machine) if simulation.commands else []:
        spent = spent_so_far(ledger.events())
        if spent.preemptions > run.preemption_retries or spent.failures > run.failure_retries:
            simulation.world.break_promise("budgets are spent on what they are for", f"{ledger.run_id}: {spent}")


def one_event_costs_one_attempt(simulation: SimulatedRun) -> None:
    """A budget is spent once for what took a host or the slice away, if one command sees it through."""
    if simulation.loses_by_its_disk or any(fault.kind not in _TAKES_HOSTS for fault in simulation.faults):
        return
    for ledger in list_runs(simulation.ann.home, simulation.commands[0].machine) if simulation.commands else []:
        spent = spent_so_far(ledger.events()).preemptions
        saves = sum(
            job.plan.kind == "save" for job in simulation.world.record.jobs.values() if job.run == ledger.run_id
        )
        stops = sum(stop.run == ledger.run_id and stop.by is not None for stop in simulation.world.record.stops)
        left = sum(command.killed or command.interrupted for command in simulation.commands)
        if spent > len(simulation.faults) + saves + stops + left:
            simulation.world.break_promise(
                "budgets are spent on what they are for", f"{ledger.run_id}: {spent} attempts"
            )


def ledgers_are_in_order(simulation: SimulatedRun) -> None:
    """Attempts are numbered one after another, each ends at most once, and none begins before the last has ended."""
    for ledger in list_runs(simulation.ann.home, simulation.commands[0].machine) if simulation.commands else []:
        began = [event.attempt for event in ledger.events() if isinstance(event, AttemptBegan)]
        ended = [event.attempt for event in ledger.events() if isinstance(event, Ended)]
        if began != list(range(len(began))) or len(set(ended)) < len(ended):
            simulation.world.break_promise("a ledger is in order", f"{ledger.run_id}: began {began}, ended {ended}")


def locks_are_free(simulation: SimulatedRun) -> None:
    """Who has ended holds no run."""
    if any(command.code is None and not command.killed for command in simulation.commands):
        return
    for ledger in list_runs(simulation.ann.home, simulation.commands[0].machine) if simulation.commands else []:
        if ledger.supervised():
            simulation.world.break_promise("locks go with their processes", ledger.run_id)


def memory_is_the_programs(simulation: SimulatedRun, job: Job, event: Ended) -> None:
    """A program that was killed for its memory is no lost host."""
    if event.outcome == "host lost" and event.cause is not None and event.cause.oom_killed:
        simulation.world.break_promise("who runs out of memory is no lost host", f"{job}: {event.cause}")


def finished_means_finished(simulation: SimulatedRun, job: Job, event: Ended) -> None:
    """A run is said to have finished, or to have saved, only when its programs have said so."""
    codes = {worker: container.exit_code for worker, container in job.containers.items()}
    wanted = {"finished": (0,), "saved": (0, 75)}.get(event.outcome)
    rebooted = any(container.boot != container.host.boot for container in job.containers.values())
    if wanted and not rebooted and (len(codes) < job.hosts or any(code not in wanted for code in codes.values())):
        simulation.world.break_promise("finished means finished", f"{job} ended {event.outcome}: {codes}")


def verdict_names_the_first_cause(simulation: SimulatedRun, job: Job, event: Ended) -> None:
    """The verdict names the first thing that was made to fail, where there is exactly one."""
    truths = [truth for truth in job.truths if truth.kind not in ("kill",)]
    if not truths or event.outcome == "not started" or job.plan.kind == "stall":
        return
    first = truths[0]
    cause = event.cause.worker if event.cause is not None else -1
    wrong = False
    if not job.disturbed and job.began is not None and not any(truth.kind == "stop" for truth in truths):
        expected = {"finish": "finished", "save": "saved", "bad input": "bad input", "fail": "failed"}.get(first.kind)
        # Of a failure and a stop that was asked for before anybody had seen it, the exit code is the stop's (14, as
        # documented: what SIGTERM does to a program is no failure), and the cause is the host that failed.
        asked = any(stop.run == job.run for stop in simulation.world.record.stops)
        # Nor is an engine believed that says of the only host, which rebooted, that its program had finished.
        rebooted = any(container.boot != container.host.boot for container in job.containers.values())
        unclear = expected == "failed" or (expected == "finished" and rebooted)
        stopped = ("stopped",) if asked and unclear else ()
        # Nobody may have seen how a program ended whose slice was deleted next.
        deleted = ("slice deleted",) if any(truth.kind == "deleted" for truth in truths) else ()
        wrong = expected is not None and (
            event.outcome not in (expected, "preempted", "host lost", "vanished", *stopped, *deleted)
            or (event.outcome == "stopped" and expected == "failed" and cause != first.worker)
            or (expected == "failed" and event.outcome == "failed" and cause != first.worker)
        )
    hosts = {truth.worker for truth in truths if truth.kind == "host"}
    dead = {truth.worker for truth in truths if truth.detail == "dead"}
    if first.kind == "host" and first.detail == "dead" and len(hosts) == 1 and dead == hosts and len(truths) == 1:
        allowed = ("host lost", "preempted", "vanished", "stopped")
        # Of two hosts that are dead when a launcher first looks, nobody can tell which one died first.
        others = {worker for worker, container in job.containers.items() if container.host.troubled}
        wrong = event.outcome not in allowed or (event.outcome == "host lost" and cause not in hosts | others)
    if wrong:
        simulation.world.break_promise(
            "the verdict names the first cause", f"{job} ended {event.outcome} of host {cause}; the truth is {truths}"
        )


def lines_come_once(simulation: SimulatedRun) -> None:
    """Every line of a host is in its file at most once, in order; all of them, of a program that ended undisturbed. An
    attempt whose start was interrupted is ended without a look at what it wrote."""
    for job in simulation.world.record.jobs.values():
        for worker, container in job.containers.items():
            path = simulation.ann.home / "runs" / job.run / "logs" / f"attempt-{job.attempt}" / f"host-{worker}.log"
            if not path.exists():
                continue
            kept = [(line.timestamp, line.text) for line in read_from(path, 0)[0]]
            extra = Counter(kept) - Counter(container.log)
            if extra:
                simulation.world.break_promise(
                    "every line once", f"{job} host {worker}: twice or never written: {list(extra)[:3]}"
                )
            removed = (job.run, job.attempt, worker) in simulation.world.record.removed_logs
            kind = not simulation.world.faults and not simulation.loses_by_its_disk
            given_up = (job.run, job.attempt) in simulation.world.record.given_up
            if removed and not given_up and not job.disturbed and kind and container.status == "exited":
                missing = Counter(container.log) - Counter(kept)
                if missing:
                    simulation.world.break_promise("every line once", f"{job} host {worker}: lost {list(missing)[:3]}")
