"""The commands on a run: start or resume (`run`), attach, stop; and `down`, which stops a slice's runs.

A run is found by its folder and by the labels of its containers, so each command may be repeated after a crash at any
point: a start that finds its containers running attaches to them.
"""

import contextlib
from dataclasses import dataclass, replace
from pathlib import Path

from launcher.checks import inputs, preflight
from launcher.config import Config
from launcher.errors import BadInput, Exit, LaunchError
from launcher.file_lock import hold_shared, is_held
from launcher.images import local, overlays
from launcher.provider import HostReport, Overlay, Provider
from launcher.run import budget, events, specification
from launcher.run.ledger import Ledger
from launcher.run.loop import resume_open_attempt, run_attempts
from launcher.run.session import (
    Context,
    Outcome,
    RunStopped,
    Session,
    deletion_mark,
    find_run,
    list_runs,
    open_session,
    pull_known,
    resolve_run,
    runs_on_slice,
    supervising,
)
from launcher.run.specification import SecretSource, Specification
from launcher.run.start import end_interrupted_start, observe_phase, require_all, require_inputs, require_ready
from launcher.run.state import Phase
from launcher.run.supervise import StartInterrupted, supervise

_RELEASE_SECONDS = 60.0  # for a process whose run was stopped: a gcloud call may be in flight
_RELEASE_POLL_SECONDS = 0.2
_SHOWN_PATHS = 5


@dataclass(frozen=True)
class RunRequest:
    """The arguments of one `tpu-launch run`."""

    config: Config
    run_id: str | None = None
    """The run to resume; None for the newest unfinished one of the slice with the same configuration hash."""
    new: bool = False
    """Start a new run even if one could be resumed."""
    env_file: Path | None = None
    overlay: str | None = None
    """FOLDER=TARGET."""
    sync: str | None = None
    """FOLDER[=TARGET]: stop the attempt that runs, and start the next one with the folder's changed files."""
    preflight: bool = True
    """Refuse a step that preflight found too large."""


def read_extras(request: RunRequest, context: Context) -> tuple[dict[str, str], Overlay | None]:
    """Reads the env file and packs the overlay, or the changed files of --sync; {} and None for what is not asked for.
    Tells the user which files are left out because they hold credentials, and which --sync found changed or removed.
    Raises BadInput if the env file, the overlay or the folder can't be used."""
    config, say = request.config, context.output.say
    variables = specification.read_env_file(request.env_file) if request.env_file is not None else {}
    if option := request.sync or request.overlay:
        overlays.report_credentials(option, say)
    if request.sync is None:
        return variables, overlays.pack(request.overlay) if request.overlay is not None else None
    if request.overlay is not None:
        raise BadInput("--sync and --overlay: one of the two")
    changes = overlays.find_changes(request.sync, config, context.home, _last_image(config, context))
    shown = ", ".join(changes.changed[:_SHOWN_PATHS]) + (", ..." if len(changes.changed) > _SHOWN_PATHS else "")
    size = len(changes.overlay.archive) / 1024
    say(f"{len(changes.changed)} changed files ({shown or 'none'}), {size:.1f} KiB to each host")
    if changes.removed:
        say(f"removed here, and in the image until it is built again: {', '.join(changes.removed)}")
    return variables, changes.overlay


def run(request: RunRequest, context: Context) -> Outcome:
    """Starts the next attempt of a new or resumed run on every host, watches it, and others as the budgets allow.

    Checks that cost nothing come first, then the image, then the hosts. An attempt that is there already is watched, as
    its specification says (--sync stops it first); `request` counts for an attempt that is started.

    Raises:
        BadInput: The request can't be carried out; nothing was started.
        LaunchError: An attempt could not be started, or another process supervises the run (Exit.CONFLICT).
        RunStopped: The user stopped the run after this command began.
    """
    config, say = request.config, context.output.say
    for ledger in runs_on_slice(config, context.home, context.machine)[-1:]:
        pull_known(ledger, context.machine)
    known_stops = {ledger.run_id: ledger.state.stops for ledger in list_runs(context.home, context.machine)}
    variables, overlay = read_extras(request, context)
    secrets = SecretSource(context.environment, variables)
    config.require_something_to_run()
    budget.require_prices(config)
    inputs.buckets(config, say)
    inputs.data(config, say)
    checked: tuple[str, ...] = ()
    if request.preflight:
        config, checked = preflight.leave_out_unfit(config, context.home, say)
    with contextlib.closing(context.make_provider(config)) as provider:
        _require_capabilities(request, provider, secrets)
        local.check(config)
        requested = specification.describe(
            config, "", env_file=request.env_file, variables=variables, overlay=overlay, preflight=checked
        )
        for run_id in _stop_before_restart(config, context) if request.sync is not None else ():
            known_stops[run_id] = known_stops.get(run_id, 0) + 1  # this command's own
        ledger = resolve_run(
            config, context.home, context.machine, requested, overlay, run_id=request.run_id, new=request.new, say=say
        )
        with supervising(ledger, context.machine, say):
            known = known_stops.get(ledger.run_id, 0)
            _require_startable(request, ledger, known)
            provider.withdraw_unused()  # now: another machine's supervisor may have requests that are not known here
            slice_is_known = provider.known_ready()
            if ledger.state.phase.is_open:
                if not slice_is_known and provider.describe() is None:
                    require_ready(config, provider)
                outcome = resume_open_attempt(open_session(context, ledger, secrets))
                if outcome is not None:
                    return outcome
            provider.connect()
            ledger.append(events.Requested(ledger.state.attempt + 1, known))
            if ledger.state.stop_requested:  # meanwhile
                raise RunStopped.of(ledger.run_id)
            if not slice_is_known and ledger.state.recovering is None:
                require_ready(config, provider)
            kept = specification.read(ledger.folder)
            spec = specification.resume(kept, requested)
            if overlay is not None:
                specification.write_overlay(ledger.folder, overlay)
            session = Session(context, ledger, spec, config, provider, secrets)
            require_inputs(session)  # before an image is built
            budget.require_left(session)
            return run_attempts(session.with_image(_choose_image(request, context, kept, spec)))


def attach(request: RunRequest, context: Context) -> Outcome:
    """Watches a run that was started before, from this terminal or another.

    Attempts that follow are made from the run's specification; the file on this command line only finds the run. An env
    file gives values of the run's secrets.

    Raises:
        BadInput: There is no such run, it is not running, its start was interrupted (StartInterrupted), or another
            attempt would follow and secrets are missing.
        LaunchError: Another process supervises the run (Exit.CONFLICT), or it could not be recovered.
    """
    config = request.config
    if (request.overlay or request.sync) is not None:
        option = "--overlay" if request.sync is None else "--sync"
        raise BadInput(f"{option}: a run that is there keeps the files that it was started with: leave out --attach")
    ledger = _find(config, context, request.run_id)
    given = specification.read_env_file(request.env_file) if request.env_file is not None else {}
    with supervising(ledger, context.machine, context.output.say):
        state = ledger.state
        if state.phase is Phase.NEW:
            raise BadInput(f"run {ledger.run_id} was never started")
        if not state.phase.is_open:
            raise BadInput(
                f"run {ledger.run_id} is not running: its last attempt ended with {state.outcome!r}; "
                "`tpu-launch logs` shows its lines"
            )
        session = open_session(context, ledger, SecretSource(context.environment, given))
        with contextlib.closing(session.provider):
            session.provider.withdraw_unused()
            if state.phase is Phase.STARTING and observe_phase(session) is Phase.INTERRUPTED:
                raise StartInterrupted(ledger.run_id, state.attempt)
            missing = session.unknown_secrets() if session.provider.capabilities.sends_secrets else []
            if missing:
                text = specification.describe_missing(session.specification, missing)
                session.say(f": {text}; no other attempt starts without them")
            return run_attempts(session, state.attempt)


def stop(config: Config, context: Context, run_id: str | None, *, grace: int | None) -> list[HostReport]:
    """Stops the run: ends its containers on all hosts (SIGTERM; SIGKILL after the grace) and waits until they ended.

    No attempt follows until the next `tpu-launch run`, whichever process supervises the run. Without `run_id`
    stops the newest run of the slice. `grace` is in seconds; None for run.stop_seconds. Raises BadInput if there is no
    such run, or it was never started; LaunchError if the stop can't be recorded. Returns a report for each host; [] if
    nothing runs on hosts.
    """
    ledger = _find(config, context, run_id)
    supervised = ledger.supervised()
    if ledger.state.phase is Phase.NEW and not supervised:
        raise BadInput(f"run {ledger.run_id} was never started")
    session = open_session(context, ledger, SecretSource(context.environment, {}))
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
    """Deletes the slice. First stops its runs and waits for the processes that supervise them, a minute beyond
    run.stop_seconds at most, so that none recreates it. Meanwhile this machine's `tpu-launch run` refuses the slice."""
    with hold_shared(deletion_mark(config)):
        _stop_runs(config, context)
        with contextlib.closing(context.make_provider(config)) as provider:
            provider.delete()


def _find(config: Config, context: Context, run_id: str | None) -> Ledger:
    """Returns the run of that id, or the newest one of the slice, as `find_run` does. Raises BadInput without one."""
    return find_run(context.home, context.machine, run_id, slice_name=config.slice.name, provider=config.provider)


def _stop_runs(config: Config, context: Context) -> None:
    """Requests a stop of each run on the slice, which their supervising processes carry out, and this one for a run
    without such a process. Waits for these processes, a minute beyond run.stop_seconds at most, and says which have not
    ended, and which runs may not have saved."""
    known = [pull_known(ledger, context.machine) for ledger in runs_on_slice(config, context.home, context.machine)]
    states = [(ledger, ledger.state) for ledger in known]
    stopped = [
        ledger
        for ledger, state in states
        if state.phase.is_open or state.recovering or state.budget_spent or state.orphans or ledger.supervised()
    ]
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
    """Stops the containers of a run that no process supervises, orphaned ones too, which have run.stop_seconds to save;
    keeps the lines of an open attempt and records its end. Does nothing without a slice. Says if any of it fails."""
    try:
        quiet = replace(context, output=replace(context.output, emit=lambda worker, line: None))  # days of lines
        session = open_session(quiet, ledger, SecretSource(context.environment, {}))
        with contextlib.closing(session.provider):
            if (found := session.describe_slice()) is not None and not found.gone_for_good:
                require_all(_stop_on_hosts(session, session.config.run.stop_seconds), "stop")
                with supervising(ledger, context.machine, context.output.say):
                    if not ledger.state.phase.is_open:  # also if another `down` has recorded its end meanwhile
                        return
                    phase = observe_phase(session)  # waits for seconds at most, as `supervise` need not
                    if phase is Phase.EXITED:
                        supervise(session, ledger.state.attempt)
                    elif phase is Phase.INTERRUPTED:
                        end_interrupted_start(session)
    except LaunchError as error:
        context.output.say(f"run {ledger.run_id} may not have saved before its slice is deleted: {error}")


def _stop_before_restart(config: Config, context: Context) -> list[str]:
    """Stops the open runs on the slice, so that they can save, waits for the processes that supervise them, and returns
    the runs' ids. Raises LaunchError if a host could not be stopped, or a process does not end within a minute."""
    stopped = []
    for ledger in runs_on_slice(config, context.home, context.machine):
        if not ledger.state.phase.is_open:
            continue
        stopped.append(ledger.run_id)
        require_all(stop(config, context, ledger.run_id, grace=None), "stop")
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


def _require_capabilities(request: RunRequest, provider: Provider, secrets: SecretSource) -> None:
    """Raises BadInput for options that the provider can't carry out, and for secrets to send without a value here."""
    config, capabilities = request.config, provider.capabilities
    if request.env_file is not None and not capabilities.sends_secrets:
        raise BadInput(
            f"--env-file: provider {config.provider} sends no secrets; name where the cluster has them in gke.secrets"
        )
    if (request.overlay or request.sync) is not None and not capabilities.overlays:
        option = "--overlay" if request.sync is None else "--sync"
        raise BadInput(f"{option}: provider {config.provider} has no overlays: build an image (image.code)")
    known = {**secrets.environment, **secrets.given}
    missing = [name for name in config.run.secrets if name not in known]
    if capabilities.sends_secrets and missing:
        raise BadInput(
            f"{config.document.place(('run', 'secrets'))}: run.secrets: not in the environment: {', '.join(missing)}; "
            "export them, then run again"
        )


def _require_startable(request: RunRequest, ledger: Ledger, known_stops: int) -> None:
    """Raises LaunchError if the run finished elsewhere and was not asked for by its id, or its slice is being deleted;
    RunStopped if it has more stops than `known_stops`, their number when this command began."""
    if request.run_id is None and ledger.state.phase is Phase.FINISHED:
        raise LaunchError(
            f"run {ledger.run_id} has just finished elsewhere: `tpu-launch run` again starts a new one",
            exit_code=Exit.CONFLICT,
        )
    if ledger.state.stops > known_stops:
        raise RunStopped.of(ledger.run_id)
    if is_held(deletion_mark(request.config)):
        raise LaunchError(
            f"slice {request.config.slice.name} is being deleted by another tpu-launch on this machine: wait for its "
            "end, then `tpu-launch up` creates it again",
            exit_code=Exit.CONFLICT,
        )


def _choose_image(request: RunRequest, context: Context, kept: Specification, spec: Specification) -> str:
    """Returns the image that hosts will run; builds and pushes it if necessary, and records its code for a later
    --sync. An overlay, of this request or kept, goes over the image that ran last, without a build."""
    known: str | None = None
    if request.overlay is not None or request.sync is not None:
        known = _last_image(request.config, context)
    elif spec.overlay is not None:
        known = kept.image  # the overlay is kept, and so is the image under it
    if known is None:
        made = local.image(request.config, context.output.say)
        overlays.record_code(context.home, made)
        known = made.reference
    return known


def _last_image(config: Config, context: Context) -> str | None:
    """Returns the image of the newest attempt on this slice; None before the first."""
    for ledger in reversed(runs_on_slice(config, context.home, context.machine)):
        if ledger.state.last_attempt is not None:
            return ledger.state.last_attempt.image
    return None


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
