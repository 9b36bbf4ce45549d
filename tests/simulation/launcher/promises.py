"""What is promised whatever happens: one function each. Those that concern one moment are checked there, in `world`."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

from launcher.errors import CommandTimeout, Exit
from launcher.run import ledger as ledgers
from launcher.run.events import Ended
from launcher.run.logs import read_from
from launcher.run.recovery import spent_so_far

if TYPE_CHECKING:
    from tests.simulation.launcher.google import Node
    from tests.simulation.launcher.jobs import Job
    from tests.simulation.launcher.life import Life
    from tests.simulation.launcher.people import Command
    from tests.simulation.launcher.world import World

_CODES = {int(code) for code in Exit}
_BILLED = ("CREATING", "READY", "STOPPED", "STARTING")


def nodes_of(world: World, person: str) -> list[Node]:
    """What a person pays for, or would if nobody deleted it."""
    return [node for node in world.google.nodes.values() if node.maker == person]


# -- of each command, when it ends ------------------------------------------------------------------------------------


def check_command(life: Life, command: Command) -> None:
    """Everything that is promised of the end of a command."""
    if command.killed or command.code is None:
        return
    documented_code(life, command)
    message_with_a_next_step(life, command)
    nothing_is_left_after_down(life, command)
    no_silent_bill(life, command)
    run_with_budget_goes_on(life, command)
    up_in_a_kind_world_succeeds(life, command)


def documented_code(life: Life, command: Command) -> None:
    """Every ending has a documented code."""
    if command.code not in _CODES:
        life.world.break_promise("every ending has a documented code", f"{command.name} ended with {command.code}")


def message_with_a_next_step(life: Life, command: Command) -> None:
    """Every error says what to do next."""
    if command.error is None:
        return
    text = str(command.error)
    hints = ("`", "try", "wait", "again", "fix:", "start", "ask", "sign in", "correct", "choose", "see ", "look")
    if len(text) < 15 or not any(hint in text for hint in hints):
        life.world.break_promise("every ending has a message with a next step", f"{command.name}: {text}")


def nothing_is_left_after_down(life: Life, command: Command) -> None:
    """After `down` nothing of ours is left."""
    if command.name != "down" or command.code != 0:
        return
    person = command.place.person
    left = [f"node {node.name} ({node.state})" for node in nodes_of(life.world, person)]
    left += [f"request {item.name}" for item in life.world.google.requests.values() if item.maker == person]
    others_busy = any(other.name in ("up", "run", "attach") and other.code is None for other in life.commands)
    if left and not others_busy:
        life.world.break_promise("after down nothing of ours is left", f"{', '.join(left)}")


def no_silent_bill(life: Life, command: Command) -> None:
    """A command that ends with an error names what it leaves running and how to delete it."""
    if command.code == 0 or command.name not in ("up", "run", "attach") or command.verdict is not None:
        return
    google, person = life.world.google, command.place.person
    left = [node for node in nodes_of(life.world, person) if node.by is command.actor and node.state in _BILLED]
    requests = [item for item in google.requests.values() if item.maker == person and item.by is command.actor]
    text = "\n".join(command.said)
    if (left or requests) and not any(word in text for word in ("tpu-launch down", "tpu-launch up", "billed")):
        life.world.break_promise(
            "money never runs unattended",
            f"{command.name} ended with {command.code} and left {left or requests}: {text[-300:]}",
        )


def up_in_a_kind_world_succeeds(life: Life, command: Command) -> None:
    """Before anything has gone wrong, the first `up` succeeds, whatever of ours is there."""
    if command is not life.commands[0] or command.name != "up" or life.world.struck:
        return
    if command.code not in (0, Exit.CONFLICT) and not isinstance(command.error, CommandTimeout):
        life.world.break_promise("up goes on from what is there", f"{life.story.leftover}: {command.error}")


def run_with_budget_goes_on(life: Life, command: Command) -> None:
    """A run with budget left, in a world that heals, ends only because its program or its owner wants it to."""
    world = life.world
    if command.name not in ("run", "attach") or command.code in (0, Exit.DETACHED, Exit.BAD_INPUT, Exit.CONFLICT):
        return
    known = ledgers.runs(command.place.home, command.machine)
    if not known or world.record.stops or world.record.permanent:
        return
    ledger = known[-1]
    ended = [event for event in ledger.events() if isinstance(event, Ended)]
    attempts_here = [entry for entry in command.said if ": attempt " in entry and " hosts" in entry]
    if not ended or not attempts_here:
        return
    spent, run = spent_so_far(ledger.events()), life.config.run
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
    if recovering and "run.recovery_minutes" not in text and "somebody deleted it" not in text:
        world.break_promise(
            "a run with budget left goes on", f"ended with {command.code} after {spent}: {str(command.error)[:300]}"
        )


# -- of the whole life, at its end ------------------------------------------------------------------------------------


def check_end(life: Life) -> None:
    """Everything that is promised at the end of a life."""
    nothing_of_ours_is_left(life)
    budgets_are_kept(life)
    for ledger in ledgers.runs(life.ann.home, life.commands[0].machine) if life.commands else []:
        for event in ledger.events():
            if isinstance(event, Ended):
                job = life.world.record.jobs.get((ledger.run_id, event.attempt))
                if job is not None:
                    verdict_names_the_first_cause(life, job, event)
    lines_come_once(life)


def nothing_of_ours_is_left(life: Life) -> None:
    """When ann has gone home, she pays for nothing."""
    if left := [node for node in nodes_of(life.world, "ann") if node.state != "DELETING"]:
        ends = [command.code for command in life.commands if command.name == "down"]
        life.world.break_promise(
            "money never runs unattended", f"at the end there is {left[0].name}; down ended with {ends}"
        )


def budgets_are_kept(life: Life) -> None:
    """No more attempts than the budgets allow."""
    run = life.config.run
    for ledger in ledgers.runs(life.ann.home, life.commands[0].machine) if life.commands else []:
        spent = spent_so_far(ledger.events())
        if spent.preemptions > run.preemption_retries or spent.failures > run.failure_retries:
            life.world.break_promise("budgets are spent on what they are for", f"{ledger.run_id}: {spent}")


def verdict_names_the_first_cause(life: Life, job: Job, event: Ended) -> None:
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
        asked = any(stop.run == job.run for stop in life.world.record.stops)
        stopped = ("stopped",) if asked and expected == "failed" else ()
        wrong = expected is not None and (
            event.outcome not in (expected, "preempted", "host lost", "vanished", *stopped)
            or (event.outcome == "stopped" and cause != first.worker)
            or (expected == "failed" and event.outcome == "failed" and cause != first.worker)
        )
    hosts = {truth.worker for truth in truths if truth.kind == "host"}
    dead = {truth.worker for truth in truths if truth.detail == "dead"}
    if first.kind == "host" and first.detail == "dead" and len(hosts) == 1 and dead == hosts and len(truths) == 1:
        allowed = ("host lost", "preempted", "vanished", "stopped")
        wrong = event.outcome not in allowed or (event.outcome == "host lost" and cause not in hosts)
    if wrong:
        life.world.break_promise(
            "the verdict names the first cause", f"{job} ended {event.outcome} of host {cause}; the truth is {truths}"
        )


def lines_come_once(life: Life) -> None:
    """Every line of a host is in its file at most once, in order; all of them, of a program that ended undisturbed."""
    for job in life.world.record.jobs.values():
        for worker, container in job.containers.items():
            path = life.ann.home / "runs" / job.run / "logs" / f"attempt-{job.attempt}" / f"host-{worker}.log"
            if not path.exists():
                continue
            kept = [(line.timestamp, line.text) for line in read_from(path, 0)[0]]
            extra = Counter(kept) - Counter(container.log)
            if extra:
                life.world.break_promise(
                    "every line once", f"{job} host {worker}: twice or never written: {list(extra)[:3]}"
                )
            removed = (job.run, job.attempt, worker) in life.world.record.removed_logs
            if removed and not job.disturbed and not life.world.faults and container.status == "exited":
                missing = Counter(container.log) - Counter(kept)
                if missing:
                    life.world.break_promise("every line once", f"{job} host {worker}: lost {list(missing)[:3]}")
