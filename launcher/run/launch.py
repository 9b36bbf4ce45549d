"""The commands on a run: start or resume, attach, stop.

A run is found again by its folder and by the labels of its containers, so each of them may be called again after a
crash at any point: a start that finds its containers running attaches to them.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from launcher.checks import inputs, preflight
from launcher.config import Config
from launcher.errors import BadInput, Exit, LaunchError
from launcher.file_lock import hold_shared, is_held
from launcher.home import of_slice
from launcher.images import local
from launcher.images.overlays import overlay as overlays
from launcher.images.overlays import sync
from launcher.provider import HostReport, Overlay, Provider
from launcher.run import env_file, events, specification
from launcher.run import ledger as ledgers
from launcher.run.attempts.drive import drive
from launcher.run.attempts.found import Presence, end_open_attempt, look
from launcher.run.attempts.session import Outcome, RunStopped, Session, with_image
from launcher.run.attempts.start import require_all, require_inputs, require_ready
from launcher.run.ledger import Ledger, RunRecord, same_slice
from launcher.run.specification import SecretSource, Specification
from launcher.run.supervise import Output, describe_interrupted_start
from launcher.run.verdict import Kind
from launcher.workstation import Workstation

MakeProvider = Callable[[Config], Provider]

_RELEASE_SECONDS = 60.0  # for a process that was told to stop a run: gcloud may be under way
_RELEASE_POLL_SECONDS = 0.2
_SHOWN_PATHS = 5
_FINISHED = Kind.FINISHED.value


@dataclass(frozen=True)
class Context:
    """What every command on a run needs from the process that it runs in."""

    home: Path
    """The launcher's folder."""
    environment: Mapping[str, str]
    """Where values of secrets come from."""
    make_provider: MakeProvider
    output: Output
    machine: Workstation


@dataclass(frozen=True)
class Request:
    """One `tpu-launch run`: what it asks for."""

    config: Config
    run_id: str | None = None
    """The run to resume; None for the newest unfinished one of the slice that means the same."""
    new: bool = False
    """Start a new run even if one could be resumed."""
    env_file: Path | None = None
    overlay: str | None = None
    """FOLDER=TARGET."""
    sync: str | None = None
    """FOLDER[=TARGET]: the attempt that is there is stopped, and the next one has the folder's changed files."""
    preflight: bool = True
    """Whether a step that preflight found too large is refused."""


@dataclass(frozen=True)
class Extras:
    """What the command line adds to the configuration."""

    variables: env_file.EnvFile | None
    overlay: Overlay | None

    def secrets(self, environment: Mapping[str, str]) -> SecretSource:
        """Where values of secrets are found, with these."""
        return SecretSource(environment, self.variables.values if self.variables else {})


def read_extras(request: Request, context: Context) -> Extras:
    """Reads the env file and packs the overlay. Raises BadInput for what is wrong with them."""
    variables = env_file.read(request.env_file) if request.env_file is not None else None
    overlay = overlays.pack(request.overlay) if request.overlay is not None else None
    if request.sync is not None:
        overlay = _read_changes(request, request.sync, context)
    return Extras(variables, overlay)


def _read_changes(request: Request, folder: str, context: Context) -> Overlay:
    """The changed files of a folder, as an overlay over what ran last; says which they are."""
    if request.overlay is not None:
        raise BadInput("--sync and --overlay: one of the two")
    changes = sync.find_changes(folder, request.config, context.home, _last_image(request.config, context))
    shown = ", ".join(changes.changed[:_SHOWN_PATHS]) + (", ..." if len(changes.changed) > _SHOWN_PATHS else "")
    size = len(changes.overlay.archive) / 1024
    context.output.say(f"{len(changes.changed)} changed files ({shown or 'none'}), {size:.1f} KiB to each host")
    if changes.removed:
        context.output.say(f"removed here, and in the image until it is built again: {', '.join(changes.removed)}")
    return changes.overlay


def run(request: Request, context: Context) -> Outcome:
    """Starts the run's next attempt on every host, watches it, and starts further attempts as the budgets allow.

    The order of the checks: what costs nothing comes first, then the image, then the hosts. An attempt that is there
    already is watched, as its specification says; `request` counts for an attempt that is started.

    Raises:
        BadInput: Something is wrong with the request; nothing was started.
        LaunchError: An attempt could not be started.
    """
    config, say = request.config, context.output.say
    stops = {ledger.run_id: ledger.stops for ledger in ledgers.runs(context.home, context.machine)}
    extras = read_extras(request, context)
    config.require_something_to_run()
    inputs.buckets(config, say)
    inputs.data(config, say)
    checked = preflight.require(config, context.home, say) if request.preflight else ()
    provider = context.make_provider(config)
    with contextlib.closing(provider):
        _require_capabilities(request, provider)
        local.check(config)
        provider.connect()
        _require_secrets(config, provider, extras.secrets(context.environment))
        requested = specification.describe(
            config, "", variables=extras.variables, overlay=extras.overlay, preflight=checked
        )
        for run_id in _stop_before_restart(config, context) if request.sync is not None else ():
            stops[run_id] = stops.get(run_id, 0) + 1  # that one was ours
        ledger = _choose(request, context, requested, extras.overlay)
        with ledger.supervising():
            if request.run_id is None and ledger.outcome == _FINISHED:
                raise LaunchError(
                    f"run {ledger.run_id} has just finished elsewhere: `tpu-launch run` again starts a new one",
                    exit_code=Exit.CONFLICT,
                )
            # A stop that came while this command checked or waited for the lock is later than what it was asked for.
            known = stops.get(ledger.run_id, 0)
            _require_no_stop_since(ledger, known)
            if is_held(_deletion(config)):
                raise LaunchError(
                    f"slice {config.slice.name} is being deleted by `tpu-launch down` on this machine: wait for its "
                    "end, then `tpu-launch up` creates it again",
                    exit_code=Exit.CONFLICT,
                )
            return _start_or_resume(request, context, ledger, provider, requested, extras, known)


def attach(request: Request, context: Context) -> Outcome:
    """Goes on watching a run that was started before, from this terminal or another.

    Attempts that follow are made from the run's specification; the file on this command line only finds the run.

    Args:
        request: Finds the run: its id, or the newest one of the slice. An env file gives values of the run's secrets.
        context: This process.

    Raises:
        BadInput: There is no such run, it is not running, or another attempt would follow and secrets are missing.
    """
    config = request.config
    if (request.overlay or request.sync) is not None:
        option = "--overlay" if request.sync is None else "--sync"
        raise BadInput(f"{option}: a run that is there keeps the files that it was started with: leave out --attach")
    ledger = _find(config, context, request.run_id)
    given = env_file.read(request.env_file).values if request.env_file is not None else {}
    with ledger.supervising():
        if ledger.attempts == 0:
            raise BadInput(f"run {ledger.run_id} was never started")
        if ledger.outcome is not None:
            raise BadInput(
                f"run {ledger.run_id} is not running: its last attempt ended with {ledger.outcome!r}; "
                "`tpu-launch logs` shows its lines"
            )
        session = open_session(config, context, ledger, SecretSource(context.environment, given))
        with contextlib.closing(session.provider):
            if not ledger.started_everywhere and look(session) in (Presence.INCOMPLETE, Presence.GONE):
                raise BadInput(describe_interrupted_start(ledger.run_id, ledger.attempts - 1))
            _warn_of_missing_secrets(session)
            return drive(session, session.attempt(ledger.attempts - 1))


def stop(config: Config, context: Context, run_id: str | None, *, grace: int | None) -> list[HostReport]:
    """Stops the run for good: its containers on all hosts (SIGTERM; SIGKILL after the grace), and waits until they have
    ended. No attempt follows, whoever supervises the run on this machine and whatever it waits for, until `run` is
    asked for one.

    Args:
        config: Finds the run: the newest one of its slice.
        context: This process.
        run_id: Finds the run instead.
        grace: Seconds; None for run.stop_seconds.
    """
    ledger = _find(config, context, run_id)
    supervised = ledger.supervised()
    if ledger.attempts == 0 and not supervised:
        raise BadInput(f"run {ledger.run_id} was never started")
    session = open_session(config, context, ledger, SecretSource(context.environment, {}))
    with contextlib.closing(session.provider):
        seconds = session.config.run.stop_seconds if grace is None else grace
        ledger.append(events.StopRequested(max(0, ledger.attempts - 1), seconds))
        # From here on no attempt begins, so the last one is the one to stop.
        if not ledger.under_way and not ledger.left_behind():
            session.say(": nothing of it runs on hosts, and no attempt follows")
            return []
        session.output.say(f"stopping run {ledger.run_id} on {session.config.accelerator.hosts} hosts")
        return session.provider.stop(session.attempt(ledger.attempts - 1).container, grace=seconds, remove=False)


def _find(config: Config, context: Context, run_id: str | None) -> Ledger:
    """The run of that id, or the newest one of the slice. Raises BadInput when there is none."""
    return ledgers.find(context.home, context.machine, run_id, slice_name=config.slice.name, provider=config.provider)


def delete_slice(config: Config, context: Context) -> None:
    """Deletes the slice. Runs of it that are under way, or that a process of this machine recovers, are stopped first,
    and those processes are waited for: they shall not create the slice again behind our back. Nor shall a run that is
    asked for meanwhile: it is refused."""
    with hold_shared(_deletion(config)):
        _stop_runs(config, context)
        with contextlib.closing(context.make_provider(config)) as provider:
            provider.delete()


def _deletion(config: Config) -> Path:
    """What is marked while the slice is being deleted."""
    return of_slice(config.project, config.slice.name, "deleting")


def _stop_runs(config: Config, context: Context) -> None:
    """Stops the slice's runs, and waits for the processes that supervise them."""
    stopped = [
        ledger
        for ledger in ledgers.runs(context.home, context.machine)
        if same_slice(config, ledger.record) and (ledger.under_way or ledger.supervised())
    ]
    for ledger in stopped:
        context.output.say(f"run {ledger.run_id} is stopped with its slice; `tpu-launch run` resumes it on another")
        ledger.append(events.StopRequested(max(0, ledger.attempts - 1), config.run.stop_seconds))
    deadline = context.machine.clock.monotonic() + config.run.stop_seconds + _RELEASE_SECONDS
    for ledger in stopped:
        if not _is_released(ledger, context, deadline):
            context.output.say(
                f"run {ledger.run_id}: the tpu-launch that supervises it has not ended; going on. See afterwards "
                "whether it created the slice again: `tpu-launch list`"
            )


def _stop_before_restart(config: Config, context: Context) -> list[str]:
    """Stops what runs on the slice, so that it can save, and waits for the processes that supervise it. Returns the ids
    of the runs that were stopped.

    Raises LaunchError when a host could not be stopped, or a process does not end.
    """
    stopped = []
    for ledger in ledgers.runs(context.home, context.machine):
        if not same_slice(config, ledger.record) or not ledger.under_way:
            continue
        stopped.append(ledger.run_id)
        require_all(stop(config, context, ledger.run_id, grace=None), "stop")
        if not _is_released(ledger, context, context.machine.clock.monotonic() + _RELEASE_SECONDS):
            raise LaunchError(
                f"run {ledger.run_id} is stopped, but the tpu-launch that supervises it has not ended within "
                f"{_RELEASE_SECONDS:.0f} s: end it, then run again",
                exit_code=Exit.CONFLICT,
            )
    return stopped


def _is_released(ledger: Ledger, context: Context, deadline: float) -> bool:
    """Waits until no process supervises the run. False when one still does at `deadline`."""
    while ledger.supervised():
        if context.machine.clock.monotonic() > deadline:
            return False
        context.machine.clock.sleep(_RELEASE_POLL_SECONDS)
    return True


def open_session(config: Config, context: Context, ledger: Ledger, secrets: SecretSource) -> Session:
    """The session of a run as its folder says; for a run of an older version as `config` says."""
    spec = specification.read(ledger.folder)
    own = spec.config() if spec is not None else config
    provider = context.make_provider(own)
    return Session(context.home, ledger, spec, own, provider, secrets, context.output, context.machine)


def under_way(config: Config, home: Path, machine: Workstation) -> bool:
    """Whether an attempt was begun on this slice that has not ended, as far as is known here."""
    return any(ledger.under_way for ledger in ledgers.runs(home, machine) if same_slice(config, ledger.record))


# -- before a start ---------------------------------------------------------------------------------------------------


def _require_capabilities(request: Request, provider: Provider) -> None:
    if request.env_file is not None and not provider.capabilities.sends_secrets:
        raise BadInput(
            f"--env-file: provider {request.config.provider} sends no secrets; "
            "name where the cluster has them in gke.secrets"
        )
    if (request.overlay or request.sync) is not None and not provider.capabilities.overlays:
        option = "--overlay" if request.sync is None else "--sync"
        raise BadInput(f"{option}: provider {request.config.provider} has no overlays: build an image (image.code)")


def _require_secrets(config: Config, provider: Provider, secrets: SecretSource) -> None:
    """Raises BadInput when a secret that the file names has no value here."""
    if not provider.capabilities.sends_secrets:
        return
    known = {**secrets.environment, **secrets.given}
    if missing := [name for name in config.run.secrets if name not in known]:
        raise BadInput(
            f"{config.document.place(('run', 'secrets'))}: run.secrets: not in the environment: {', '.join(missing)}; "
            "export them, then run again"
        )


def _warn_of_missing_secrets(session: Session) -> None:
    spec = session.specification
    if spec is None or not session.provider.capabilities.sends_secrets:
        return
    if missing := session.secrets.missing(spec):
        session.say(f": {specification.name_missing(spec, missing)}; until they are there no other attempt is started")


def _choose(request: Request, context: Context, requested: Specification, overlay: Overlay | None) -> Ledger:
    """The run that is meant: an unfinished one that means the same, or a new one."""
    config, home = request.config, context.home
    if request.run_id is not None:
        ledger = ledgers.find(home, context.machine, request.run_id, provider=config.provider)
        if ledger.record.config_hash != specification.meaning(config):
            raise BadInput(
                f"run {request.run_id} was started with another configuration or command "
                f"(see {ledger.folder / 'config.yaml'}): change the file back, or start a new run with --new"
            )
        return ledger
    if not request.new:
        newest = next(
            (run for run in reversed(ledgers.runs(home, context.machine)) if same_slice(config, run.record)), None
        )
        if (
            newest is not None
            and newest.outcome != _FINISHED
            and newest.record.config_hash == specification.meaning(config)
        ):
            return newest
    record = _record(config, ledgers.new_run_id(config.run_name, context.machine), context.machine)

    def keep(folder: Path) -> None:
        if overlay is not None:
            specification.write_overlay(folder, overlay)
        specification.write(folder, requested.model_copy(update={"run": record.run_id}))

    return ledgers.begin(home, context.machine, record, config.document.dump(), keep)


def _record(config: Config, run_id: str, machine: Workstation) -> RunRecord:
    return RunRecord(
        run_id=run_id,
        name=config.run_name,
        project=config.project,
        zone=config.zone,
        slice=config.slice.name,
        file=str(Path(config.document.name).absolute()),
        command=list(config.command),
        config_hash=specification.meaning(config),
        created=machine.clock.time(),
        provider=config.provider,
    )


def _start_or_resume(
    request: Request,
    context: Context,
    ledger: Ledger,
    provider: Provider,
    requested: Specification,
    extras: Extras,
    stops: int,
) -> Outcome:
    """Watches the attempt that is there, if there is one; otherwise starts the next. `stops`: how many stops of the run
    were known when this was asked for."""
    config, secrets = request.config, extras.secrets(context.environment)
    if not ledger.under_way:
        ledger.append(events.Requested(ledger.attempts, stops))
    kept = specification.read(ledger.folder)
    ready = not provider.known_ready()
    if ledger.under_way:
        if ready and provider.describe() is None:
            require_ready(config, provider)
        outcome = end_open_attempt(open_session(config, context, ledger, secrets))
        if outcome is not None:
            return outcome
        _require_no_stop_since(ledger, stops)
        ledger.append(events.Requested(ledger.attempts, stops))
    if ready:
        require_ready(config, provider)
    spec = requested.model_copy(update={"run": ledger.run_id})
    if kept is not None:
        spec = specification.resume(kept, spec)
    if extras.overlay is not None:
        specification.write_overlay(ledger.folder, extras.overlay)
    session = Session(context.home, ledger, spec, config, provider, secrets, context.output, context.machine)
    require_inputs(session, spec)  # before an image is built
    return drive(with_image(session, _image(request, context, kept, spec)), None, ready=ready)


def _require_no_stop_since(ledger: Ledger, stops: int) -> None:
    """Raises RunStopped when the run's owner has asked it to stop more often than that."""
    if ledger.stops > stops:
        raise RunStopped(f"run {ledger.run_id}: its owner stopped it; `tpu-launch run` resumes it")


def _image(request: Request, context: Context, kept: Specification | None, spec: Specification) -> str:
    """What hosts will run. An overlay goes over the image that ran last, instead of a new build."""
    known: str | None = None
    if request.overlay is not None or request.sync is not None:
        known = _last_image(request.config, context)
    elif spec.overlay is not None and kept is not None:
        known = kept.image  # the overlay is resumed, and so is what it was laid over
    if known is None:
        known = local.image(request.config, context.output.say)
        sync.remember(context.home, known, request.config)
    return known


def _last_image(config: Config, context: Context) -> str | None:
    """What the newest attempt on this slice ran."""
    for ledger in reversed(ledgers.runs(context.home, context.machine)):
        attempt = ledger.last_attempt
        if attempt is not None and same_slice(config, ledger.record):
            return attempt.image
    return None


def explain_interrupt(config: Config, context: Context) -> None:
    """Says what Ctrl-C means for the run of this slice."""
    say = context.output.say
    begun = [
        ledger
        for ledger in ledgers.runs(context.home, context.machine)
        if same_slice(config, ledger.record) and ledger.under_way
    ]
    if begun and not begun[-1].started_everywhere:
        say(
            f"interrupted while run {begun[-1].run_id} was started: what has started of it goes on. `tpu-launch run` "
            "again starts it anew, `tpu-launch stop` ends it; the slice is billed until `tpu-launch down` deletes it"
        )
    elif begun:
        say(
            "detached: what was started goes on. `tpu-launch run --attach` watches it again, `tpu-launch stop` stops it"
        )
    else:
        say(
            "interrupted: nothing of it is running. `tpu-launch run` again starts it or goes on with it; "
            f"slice {config.slice.name} stays if it is there, and is billed, until `tpu-launch down` deletes it"
        )
