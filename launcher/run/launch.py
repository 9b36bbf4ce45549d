"""The commands that start or resume a run, and watch one: `run` and `run --attach`. `run_attempts` is their loop.

A run is found by its folder and by the labels of its containers, so each command may be repeated after a crash at any
point: a start that finds its containers running attaches to them.
"""

import contextlib
from collections import Counter
from dataclasses import dataclass, replace
from pathlib import Path

from launcher.checks import inputs, preflight
from launcher.config import Config
from launcher.errors import BadInput, Exit, LaunchError
from launcher.home import is_held
from launcher.images import local, overlays
from launcher.provider import Overlay, Provider
from launcher.run import budget, events, specification, start
from launcher.run.ledger import Ledger
from launcher.run.recovery import Recovery, Retries, decide, describe_bill, spent_so_far
from launcher.run.session import (
    Context,
    Outcome,
    RunStopped,
    Session,
    deletion_mark,
    find_on_slice,
    list_runs,
    open_session,
    pull_known,
    resolve_run,
    runs_on_slice,
    supervising,
)
from launcher.run.specification import SecretSource, Specification
from launcher.run.state import Phase
from launcher.run.stop import stop_before_restart
from launcher.run.supervise import StartInterrupted, supervise
from launcher.run.verdict import Kind, Verdict, explain

_SHOWN_PATHS = 5


@dataclass(frozen=True)
class RunRequest:
    """The arguments of one `tpu-launch run`."""

    config: Config
    run_id: str | None = None  # to resume; None: the slice's newest unfinished one of the same configuration hash
    new: bool = False  # start a new run even if one could be resumed
    env_file: Path | None = None
    overlay: str | None = None  # FOLDER=TARGET
    sync: str | None = None  # FOLDER[=TARGET]: stop the attempt that runs, start the next one with its changed files
    preflight: bool = True  # refuse a step that preflight found too large


def read_extras(request: RunRequest, context: Context) -> tuple[dict[str, str], Overlay | None]:
    """Returns the env file's variables ({} without one) and the packed overlay, or for --sync the changed files as one
    (None without either). Says which files are left out because they hold credentials, and which --sync found changed
    or removed. Raises BadInput if the env file, the overlay or the folder can't be used, or both options are given."""
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
    Checks that cost nothing come first, then unused requests for the slice are deleted, an image is built and pushed if
    need be, and hosts begin. An attempt that is there already is watched, as its specification says (--sync stops it
    first); `request` counts for an attempt that is started. Returns how the last attempt ended.

    Raises BadInput if the request can't be carried out or there is no slice (nothing was started), or a later attempt
    lacks secrets or the overlay; LaunchError if an attempt could not be started, or another process supervises the run
    (Exit.CONFLICT); RunStopped if the user stops it before an attempt runs: afterwards that is an Outcome."""
    config, say = request.config, context.output.say
    for ledger in runs_on_slice(config, context.home, context.machine)[-1:]:
        pull_known(ledger, context.machine)
    known_stops = Counter({ledger.run_id: ledger.state.stops for ledger in list_runs(context.home, context.machine)})
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
        if request.sync is not None:
            known_stops.update(stop_before_restart(config, context))  # this command's own
        ledger = resolve_run(config, context, requested, overlay, run_id=request.run_id, new=request.new)
        with supervising(ledger, context.machine, say):
            _require_startable(request, ledger, known_stops[ledger.run_id])
            provider.withdraw_unused()  # now: another machine's supervisor may have requests that are not known here
            slice_is_known = provider.known_ready()
            if ledger.state.phase.is_open:
                if not slice_is_known and provider.describe() is None:
                    start.require_ready(config, provider)
                outcome = resume_open_attempt(open_session(context, ledger, variables))
                if outcome is not None:
                    return outcome
            provider.connect()
            ledger.append(events.Requested(ledger.state.attempt + 1, known_stops[ledger.run_id]))
            if ledger.state.stop_requested:  # meanwhile
                raise RunStopped(ledger.run_id)
            if not slice_is_known and ledger.state.recovering is None:
                start.require_ready(config, provider)
            session = Session(context, ledger, requested, config, provider, secrets)
            return run_attempts(_write_specification(request, session, overlay))


def _write_specification(request: RunRequest, session: Session, overlay: Overlay | None) -> Session:
    """Writes the specification of the next attempt, here and to the bucket: the run's own, changed by the session's,
    with the image, which is built if need be. Returns the session with it. Before that, raises BadInput for a missing
    secret or overlay, LaunchError if no budget is left."""
    ledger, kept = session.ledger, specification.read(session.ledger.folder)
    session = replace(session, specification=specification.resume(kept, session.specification))
    if overlay is not None:
        specification.write_overlay(ledger.folder, overlay)
    start.require_inputs(session)  # before an image is built
    budget.require_left(session)
    image = _choose_image(request, session.context, kept, session.specification)
    spec = session.specification.model_copy(update={"image": image})
    specification.write(ledger.folder, spec)
    ledger.publish()
    return replace(session, specification=spec)


def attach(request: RunRequest, context: Context) -> Outcome:
    """Watches a run that was started before, from this terminal or another. Attempts that follow are made from the
    run's specification; the file on this command line only finds the run, and an env file gives values of its secrets.
    Deletes unused requests for the slice, and the slice itself once run.budget is spent, as `run_attempts`.

    Raises BadInput if --overlay or --sync is given, there is no such run, it is not running, its start was interrupted
    (StartInterrupted), or an attempt would follow and secrets are missing; LaunchError if another process supervises
    the run (Exit.CONFLICT), or an attempt could not be started or the run recovered."""
    config = request.config
    if (request.overlay or request.sync) is not None:
        option = "--overlay" if request.sync is None else "--sync"
        raise BadInput(f"{option}: a run that is there keeps the files that it was started with: leave out --attach")
    ledger = find_on_slice(config, context, request.run_id)
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
        session = open_session(context, ledger, given)
        with contextlib.closing(session.provider):
            session.provider.withdraw_unused()
            if state.phase is Phase.STARTING and start.observe_phase(session) is Phase.INTERRUPTED:
                raise StartInterrupted(ledger.run_id, state.attempt)
            if missing := session.describe_missing_secrets():
                session.say(f": {missing}; no other attempt starts without them")
            return run_attempts(session, state.attempt)


def run_attempts(
    session: Session, attempt: int | None = None, verdict: Verdict | None = None, *, in_rounds: bool = False
) -> Outcome:
    """Starts the next attempt, watches it, then further attempts as the budgets allow. Returns how the last one ended.
    Continues an earlier process's recovery, at no cost to retry budgets. Deletes the slice once run.budget is spent.

    Args:
        attempt: Number of an attempt that runs, which is watched first; None: there is none.
        verdict: How that attempt has ended, if that is recorded and what follows is not.
        in_rounds: Start the first attempt in rounds, as after a recovery: no user waits for its error.

    Raises:
        LaunchError: An attempt could not be started, or the run could not be recovered.
        BadInput: Another attempt would follow, and secrets or the overlay are missing. The run stays resumable. Or the
            watched attempt proves never to have started (StartInterrupted).
        RunStopped: The user stopped the run before the first attempt had started.
    """
    while True:
        begun = session.ledger.state.recovering
        if begun is not None and attempt is None:
            session.say(
                f": going on with its recovery after attempt {begun.attempt} ended: {begun.after}, {begun.reason}"
            )
        if attempt is None and (begun is not None or in_rounds):
            try:
                attempt = Recovery(session, in_use=None if begun is None else False).run()
            except RunStopped:
                _say_stopped(session)
                raise
        elif attempt is None:
            attempt, verdict = start.start_attempt(session)
        if verdict is None:
            verdict = supervise(session, attempt)
        following = _recover(session, attempt, verdict)
        if following is None:
            if verdict.kind is not Kind.FINISHED and budget.is_spent(session):
                budget.take_down(session)
            # An attempt that a stop has ended since, while it was started, has no lines either.
            ended = session.ledger.last(events.Ended)
            return Outcome(session.ledger.run_id, attempt, verdict, list(ended.last_lines) if ended else [])
        attempt, verdict = following, None


def resume_open_attempt(session: Session) -> Outcome | None:
    """Watches the attempt whose end is not recorded, and others as the budgets allow, or records an end that no process
    saw; ends an interrupted start. Closes the provider. Returns how the run ended; None if the next attempt has to be
    started, as after one that ended unwatched, did not finish, and was followed by none. Raises LaunchError and
    BadInput as `run_attempts`."""
    number = session.ledger.state.attempt
    with contextlib.closing(session.provider):
        phase = start.observe_open_attempt(session)
        if phase is None:
            return None
        session.say(f": attempt {number} is there already; attaching to it")
        try:
            outcome = run_attempts(session, number)
        except StartInterrupted:  # reported by a host that could not be reached before
            start.end_interrupted_start(session)
            return None
    if phase is not Phase.EXITED or outcome.attempt != number or outcome.verdict.kind is Kind.FINISHED:
        return outcome
    # The attempt had ended while no process watched it: `run` was asked for in order to resume it.
    session.say(f": attempt {number} had ended: {explain(outcome.verdict)[0]}")
    return None


def _recover(session: Session, attempt: int, verdict: Verdict) -> int | None:
    """Says the verdict, records Recovering, waits the delay, starts the attempt that follows in rounds (`Recovery`),
    and returns its number; None if the run is over: by the verdict, retry budgets, a spent run.budget or a stop. Raises
    LaunchError if the recovery is given up, BadInput if secrets or the overlay are missing."""
    ledger, settings = session.ledger, session.config.run
    decision = decide(
        verdict,
        spent_so_far(ledger.events()),
        Retries(settings.preemption_retries, settings.failure_retries),
        stop_requested=ledger.state.stop_requested,
    )
    if not decision.retry or budget.is_spent(session):
        return None
    for line in explain(verdict):
        session.say(f", attempt {attempt}: {line}")
    start.require_inputs(session)
    delay = f" in {decision.delay:.0f} s" if decision.delay else ""
    session.say(f": starting again ({decision.reason}){delay}")
    try:
        ledger.append(events.Recovering(attempt, verdict.kind.value, decision.reason, decision.delay))
    except LaunchError as error:
        raise LaunchError(f"{error}\n  {describe_bill(session)}`tpu-launch run` resumes the run") from error
    try:
        recovery = Recovery(session, in_use=None)
        recovery.wait(decision.delay, settle=verdict.kind is Kind.SAVED)
        return recovery.run()
    except RunStopped:
        _say_stopped(session)
        return None


def _say_stopped(session: Session) -> None:
    """Says that the run was stopped, how to resume it, and what is still billed, for which it asks the API."""
    session.say(f": it was stopped: no attempt follows; {describe_bill(session)}`tpu-launch run` resumes it")


def _require_capabilities(request: RunRequest, provider: Provider, secrets: SecretSource) -> None:
    """Raises BadInput for --env-file, --overlay or --sync where the provider has no such thing, and if it sends secrets
    and one of run.secrets is neither in the environment nor in the env file."""
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
            f"{config.document.locate('run.secrets')}: not in the environment: {', '.join(missing)}; "
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
        raise RunStopped(ledger.run_id)
    if is_held(deletion_mark(request.config)):
        raise LaunchError(
            f"slice {request.config.slice.name} is being deleted by another tpu-launch on this machine: wait for its "
            "end, then `tpu-launch up` creates it again",
            exit_code=Exit.CONFLICT,
        )


def _choose_image(request: RunRequest, context: Context, kept: Specification, spec: Specification) -> str:
    """Returns the image that hosts will run. An overlay of this request goes over the image of the newest attempt on
    the slice (of any run), a kept one over the run's own. Without overlay, or such an image, builds and pushes one if
    necessary, and records its code in the launcher's folder for a later --sync."""
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
    """Returns the image of the newest attempt on the slice, of any run that is known here; None before the first."""
    for ledger in reversed(runs_on_slice(config, context.home, context.machine)):
        if ledger.state.last_attempt is not None:
            return ledger.state.last_attempt.image
    return None
