"""Stops runs: `stop`; `down`, which stops a slice's runs and deletes it; and `run --sync`, which stops them first."""

import contextlib
from dataclasses import replace

from launcher.config import Config
from launcher.errors import BadInput, Exit, LaunchError
from launcher.home import hold_shared
from launcher.provider import HostReport
from launcher.run import events
from launcher.run.ledger import Ledger
from launcher.run.session import (
    Context,
    Session,
    deletion_mark,
    find_on_slice,
    list_runs,
    open_session,
    pull_known,
    runs_on_slice,
    supervising,
)
from launcher.run.start import end_interrupted_start, judge_slice, observe_phase, require_all
from launcher.run.state import Phase
from launcher.run.supervise import supervise

_RELEASE_SECONDS = 60.0  # for a process whose run was stopped: a gcloud call may be in flight
_RELEASE_POLL_SECONDS = 0.2


def stop_run(config: Config, context: Context, run_id: str | None, *, grace: int | None) -> list[HostReport]:
    """Stops the run (None: the slice's newest): ends its containers on all hosts (SIGTERM; SIGKILL after `grace`
    seconds, None: run.stop_seconds), removes none, and waits until they ended, up to 60 s more for a tpu-launch that
    starts them. No attempt follows until the next `tpu-launch run`, whichever process supervises the run. Returns a
    report for each host; [] if nothing runs on hosts. Raises BadInput if there is no such run, or it was never started;
    LaunchError if the stop can't be recorded."""
    ledger = find_on_slice(config, context, run_id)
    supervised = ledger.supervised()
    if ledger.state.phase is Phase.NEW and not supervised:
        raise BadInput(f"run {ledger.run_id} was never started")
    session = open_session(context, ledger)
    with contextlib.closing(session.provider):
        seconds = session.config.run.stop_seconds if grace is None else grace
        ledger.append(events.RunStopRequested(max(0, ledger.state.attempt), seconds))
        state = ledger.state  # from here on no attempt begins, so the last one is the one to stop
        if not state.phase.is_open and not state.orphans:
            session.say(": nothing of it runs on hosts, and no attempt follows")
            return []
        context.output.say(f"stopping run {ledger.run_id} on {len(session.workers)} hosts")
        reports = _stop_on_hosts(session, seconds)
        deadline = context.machine.clock.monotonic() + _RELEASE_SECONDS
        if state.phase is Phase.STARTING and not _wait_for_release(ledger, context, deadline):
            session.say(": the tpu-launch that starts it has not ended yet; if it goes on, `tpu-launch stop` again")
        return reports


def _stop_on_hosts(session: Session, grace: int) -> list[HostReport]:
    """Stops the last attempt's and orphaned containers (SIGKILL after `grace` s). Removes none. Returns the reports."""
    state, stop = session.ledger.state, session.provider.stop
    reports = stop(session.container(state.attempt), grace=grace, remove=False)
    for orphan in state.orphans:
        there = [worker for worker in orphan.hosts if worker in session.workers]
        if orphan.attempt != state.attempt and there:
            reports += stop(orphan.container, grace=grace, remove=False, workers=there)
    return reports


def delete_slice(config: Config, context: Context) -> None:
    """Deletes the slice and waits until it is gone. First stops its runs and waits for the processes that supervise
    them, a minute beyond run.stop_seconds at most, so that none recreates it; says which go on, and deletes it all the
    same; says too which runs go on with another provider. Meanwhile this machine's `tpu-launch run` refuses the slice.
    Raises LaunchError, after the runs are stopped, and BadInput as `make_provider`, before."""
    for ledger in list_runs(context.home, context.machine):
        slice_, other = ledger.record.slice, ledger.record.provider
        if slice_ == config.slice.name and other != config.provider and ledger.state.phase.is_open:
            context.output.say(f"run {ledger.run_id} goes on: `tpu-launch down --provider {other}` ends it")
    with hold_shared(deletion_mark(config)), contextlib.closing(context.make_provider(config)) as provider:
        _stop_runs(config, context)
        provider.delete()


def _stop_runs(config: Config, context: Context) -> None:
    """Requests a stop of each run on the slice that is open, recovering, supervised or has orphans, and waits for the
    processes that supervise them, a minute beyond run.stop_seconds at most; stops the containers of those without one
    itself. Says which processes have not ended, which stops can't be recorded, and which runs may not have saved; does
    not raise LaunchError for these, as the slice is deleted next."""
    stopped = []
    for ledger in [pull_known(each, context.machine) for each in runs_on_slice(config, context.home, context.machine)]:
        state = ledger.state  # after all pulls, which may take long
        if state.phase.is_open or state.recovering or state.budget_spent or state.orphans or ledger.supervised():
            stopped.append(ledger)
    for ledger in stopped:
        context.output.say(f"run {ledger.run_id} is stopped with its slice; `tpu-launch run` resumes it on another")
        try:
            ledger.append(events.RunStopRequested(max(0, ledger.state.attempt), config.run.stop_seconds))
        except LaunchError as error:  # the slice must not be billed because a bucket refuses
            context.output.say(
                f"run {ledger.run_id}: its stop can't be recorded; if another machine supervises it, check afterwards "
                f"whether it recreated the slice (`tpu-launch list`): {error}"
            )
    deadline = context.machine.clock.monotonic() + config.run.stop_seconds + _RELEASE_SECONDS
    for ledger in stopped:
        if not _wait_for_release(ledger, context, deadline):
            context.output.say(
                f"run {ledger.run_id}: the tpu-launch that supervises it has not ended; going on. Check afterwards "
                "whether it recreated the slice: `tpu-launch list`"
            )
        elif ledger.state.phase.is_open or ledger.state.orphans:  # also where that process was killed meanwhile
            _stop_detached(ledger, context)


def _stop_detached(ledger: Ledger, context: Context) -> None:
    """Stops the containers of a run that no process supervises, orphaned ones too, which have run.stop_seconds to save.
    Keeps the lines of an open attempt and records its end, if all hosts tell that it ended or that its start was
    interrupted. Where the API says that the slice is gone, only records that as the end. Says if any of it fails."""
    try:
        quiet = replace(context, output=replace(context.output, emit=lambda worker, line: None))  # days of lines
        session = open_session(quiet, ledger)
        with contextlib.closing(session.provider):
            if (lost := judge_slice(session)) is None:
                require_all(_stop_on_hosts(session, session.config.run.stop_seconds), "stop")
            elif not ledger.state.phase.is_open:
                return
            with supervising(ledger, context.machine, context.output.say):
                if not ledger.state.phase.is_open:  # also if another `down` has recorded its end meanwhile
                    return
                if lost is not None:  # else the attempt would be open, and cost dollars, until the next `run`
                    ledger.append(events.Ended(ledger.state.attempt, lost.kind.value, lost.cause))
                    return
                phase = observe_phase(session)  # waits for seconds at most, as `supervise` need not
                if phase is Phase.EXITED:
                    supervise(session, ledger.state.attempt)
                elif phase is Phase.INTERRUPTED:
                    end_interrupted_start(session)
    except LaunchError as error:
        context.output.say(f"run {ledger.run_id} may not have saved before its slice is deleted: {error}")


def stop_before_restart(config: Config, context: Context) -> list[str]:
    """Stops the open runs on the slice, so that they can save, waits up to a minute each for the processes that
    supervise them, and returns their ids. Raises LaunchError if a host could not be stopped, or a process goes on."""
    stopped = []
    for ledger in runs_on_slice(config, context.home, context.machine):
        if not ledger.state.phase.is_open:
            continue
        stopped.append(ledger.run_id)
        require_all(stop_run(config, context, ledger.run_id, grace=None), "stop")
        if not _wait_for_release(ledger, context, context.machine.clock.monotonic() + _RELEASE_SECONDS):
            raise LaunchError(
                f"run {ledger.run_id} is stopped, but the tpu-launch that supervises it has not ended within "
                f"{_RELEASE_SECONDS:.0f} s: end it, then run again",
                exit_code=Exit.CONFLICT,
            )
    return stopped


def _wait_for_release(ledger: Ledger, context: Context, deadline: float) -> bool:
    """Waits until no process is seen to supervise the run; returns False if one is at `deadline` (monotonic clock)."""
    while ledger.supervised():
        if context.machine.clock.monotonic() > deadline:
            return False
        context.machine.clock.sleep(_RELEASE_POLL_SECONDS)
    return True


def explain_interrupt(config: Config, context: Context) -> None:
    """Says what an interrupted `run` leaves: an interrupted start, a run that goes on, or nothing on the slice."""
    say = context.output.say
    runs = runs_on_slice(config, context.home, context.machine)
    phases = [(ledger.run_id, ledger.state.phase) for ledger in runs if ledger.state.phase.is_open]
    if phases and phases[-1][1] is Phase.STARTING:
        say(
            f"interrupted while run {phases[-1][0]} was started: what has started of it goes on. `tpu-launch run` "
            "again ends it and starts the next attempt, `tpu-launch stop` ends it; the slice is billed until "
            "`tpu-launch down` deletes it"
        )
    elif phases:
        say(
            "detached: what was started goes on. `tpu-launch run --attach` watches it again, `tpu-launch stop` stops it"
        )
    else:
        say(
            "interrupted: nothing of it is running. `tpu-launch run` again starts it or goes on with it; "
            f"slice {config.slice.name} stays if it is there, and is billed, until `tpu-launch down` deletes it"
        )
