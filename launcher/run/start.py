"""The start of an attempt on every host, and the end of one whose start was interrupted.

A start may be repeated after a crash at any point: containers that exist are found again by their names and labels. A
stop of the run counts until the containers run: it is checked before the attempt begins. A stop meanwhile ends what has
started on the hosts; after the start, supervision carries it out.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence

from launcher.config import Config
from launcher.errors import BadInput, Exit, LaunchError
from launcher.provider import DELIVERY_SECONDS, Attempt, HostReport, Observation, Provider
from launcher.run import events, specification
from launcher.run.runs import runs_on_slice
from launcher.run.session import RunStopped, Session
from launcher.run.state import Phase, phase_on_hosts
from launcher.run.supervise import stop_hosts
from launcher.run.verdict import SLICE_DELETED, Cause, Kind, Verdict
from training.machine.clock import format_time, parse_time


def start_attempt(session: Session) -> tuple[int, Verdict | None]:
    """Removes orphans of earlier attempts from the slice, then starts the next attempt on all hosts and records it.

    Returns:
        The attempt's number, and a verdict if the slice was taken away meanwhile: a preemption like any other.

    Raises:
        LaunchError: The attempt runs on no host that could be reached; `events.Orphaned` names the others.
        RunStopped: The user stopped the run.
    """
    ledger, spec, config, provider = session.ledger, session.specification, session.config, session.provider
    require_inputs(session)
    assert spec.image is not None
    number, before = ledger.state.attempt + 1, ledger.state.outcome
    overlay = specification.read_overlay(ledger.folder, spec)
    attempt = specification.make_attempt(
        spec, config, number, spec.image, secrets=session.secret_values(), overlay=overlay
    )
    resumes = f" (resumes: the last attempt ended with {before!r})" if before else ""
    session.say(f": attempt {number} on {config.accelerator.hosts} hosts{resumes}")
    _reap_orphans(session)
    session.check_stop()
    ledger.append(
        events.AttemptBegan(
            number,
            image=attempt.image,
            command=attempt.command,
            overlay=overlay.digest if overlay else "",
            overlay_target=overlay.target if overlay else "",
            preflight=",".join(spec.preflight),
        )
    )
    try:
        try:
            reports = provider.start(attempt)
            if not all(report.ok or report.occupied_by for report in reports):  # a connection may have failed once
                session.check_stop()
                reports = provider.start(attempt)
            require_all(reports, "start")
        except LaunchError:  # a host may have started the container although the call failed
            end_everywhere(session, number, session.workers)
            session.check_stop()
            raise
    except RunStopped as stopped:
        ledger.append(events.Ended(number, Kind.STOPPED.value, Cause(-1, str(stopped))))
        raise
    except LaunchError as error:
        lost = _judge_slice(provider)
        outcome = lost.kind.value if lost else events.NOT_STARTED
        ledger.append(events.Ended(number, outcome, Cause(-1, str(error))))
        if lost is None:
            raise
        return number, lost
    ledger.append(events.Started(number, reports[0].detail))
    session.say(": started on all hosts; Ctrl-C detaches")
    return number, None


def _judge_slice(provider: Provider) -> Verdict | None:
    """Returns the verdict on a failed start if the slice is gone; None if it is there, or the API does not answer."""
    try:
        slice_state = provider.describe()
    except LaunchError:
        return None
    if slice_state is None:
        return Verdict(Kind.DELETED, SLICE_DELETED)
    if slice_state.gone_for_good:
        return Verdict(Kind.PREEMPTED, Cause(-1, f"the slice is {slice_state.state}"))
    return None


def require_ready(config: Config, provider: Provider) -> None:
    """Raises unless the slice is READY: BadInput if there is none, else LaunchError (PREEMPTED or CONFLICT)."""
    slice_state = provider.describe()
    if slice_state is None:
        raise BadInput(
            f"slice {config.slice.name} does not exist in {config.zone}: "
            f"create it with `tpu-launch up -f {config.document.name}`"
        )
    if slice_state.gone_for_good:
        raise LaunchError(
            f"slice {slice_state.name} is {slice_state.state}: `tpu-launch up` deletes it and creates it again",
            exit_code=Exit.PREEMPTED,
        )
    if not slice_state.ready:
        raise LaunchError(
            f"slice {slice_state.name} is {slice_state.state}, not READY: `tpu-launch up` waits for it",
            exit_code=Exit.CONFLICT,
        )


def require_inputs(session: Session) -> None:
    """Raises BadInput if the next attempt would lack a secret or its overlay, or the overlay was changed."""
    spec = session.specification
    if session.provider.capabilities.sends_secrets and (missing := session.unknown_secrets()):
        raise BadInput(
            f"run {spec.run}: attempt {session.ledger.state.attempt + 1} is not started: "
            f"{specification.describe_missing(spec, missing)}; "
            "nothing is lost: export them, then resume the run with the same `tpu-launch run` command"
        )
    specification.read_overlay(session.ledger.folder, spec)


def require_all(reports: Sequence[HostReport], verb: str) -> None:
    """Raises LaunchError, Exit.CONFLICT if another run uses a host, unless every host carried out `verb`."""
    failed = [report for report in reports if not report.ok]
    if not failed:
        return
    details = "\n".join(f"  host {report.worker}: {report.detail}" for report in failed)
    if any(report.occupied_by for report in failed):
        raise LaunchError(
            f"the slice is in use:\n{details}\n  wait for it, or stop it with `tpu-launch stop --run RUN`",
            exit_code=Exit.CONFLICT,
        )
    raise LaunchError(
        f"{len(failed)} of {len(reports)} hosts could not {verb} the container:\n{details}\n"
        "  `tpu-launch ssh --host N` looks there; then run again"
    )


def end_everywhere(session: Session, attempt: int, workers: Sequence[int], *, grace: int = 1) -> None:
    """Ends and removes an attempt's containers. Records hosts where that failed, to be reaped before the next start."""
    reports = stop_hosts(session, attempt, workers, grace=grace, remove=True)
    if left := tuple(report.worker for report in reports if not report.ok):
        session.ledger.append(events.Orphaned(attempt, session.container(attempt), left))


def _reap_orphans(session: Session) -> None:
    """Removes containers that earlier attempts, of any run on the slice, left on hosts that were out of reach: such a
    container goes on working, and holds the TPU. Keeps the record of those that can't be removed."""
    for ledger in runs_on_slice(session.config, session.context.home, session.machine):
        for orphan in ledger.state.orphans:
            with contextlib.suppress(LaunchError):
                reports = session.provider.stop(orphan.container, grace=1, remove=True, workers=orphan.hosts)
                if all(report.ok for report in reports):
                    ledger.append(events.Reaped(orphan.attempt, orphan.hosts))


# -- an attempt that is there already ---------------------------------------------------------------------------------


def observe_phase(session: Session) -> Phase:
    """Asks every host once for the open attempt, and returns the run's phase with what they answered.

    A missing answer says nothing: a host may be away for a moment while the run goes on.
    """
    state = session.ledger.state
    # Lines matter only where the start may have been interrupted.
    since = format_time(session.machine.clock.time()) if state.phase is Phase.RUNNING else None

    def observe(worker: int) -> Observation | None:
        try:
            return session.provider.observe(worker, session.container(state.attempt), since)
        except LaunchError:
            return None

    answers = session.machine.threads.map(observe, session.workers, at_once=64)
    containers = [None if answer is None else answer.container for answer in answers]
    return phase_on_hosts(state.phase, containers, may_lack_secrets=_may_lack_secrets(session, answers))


def _may_lack_secrets(session: Session, answers: Sequence[Observation | None]) -> bool:
    """Returns whether the containers may wait for secrets that died with the launcher that started them.

    Then they have written no line, and were started more recently than they wait for secrets.
    """
    config = session.config
    needs_secrets = config.accelerator.hosts > 1 or bool(session.specification.secrets)
    if not session.provider.capabilities.sends_secrets or not needs_secrets:
        return False
    if any(answer.lines for answer in answers if answer):
        return False
    now, longest = session.machine.clock.time(), config.run.start_minutes * 60 + DELIVERY_SECONDS
    starts = [parse_time(answer.container.started_at) for answer in answers if answer and answer.container]
    return all(start is None or now - start < longest for start in starts)


def end_interrupted_start(session: Session) -> None:
    """Ends and removes the containers of an attempt whose start was interrupted, and records its end, "not started"."""
    number = session.ledger.state.attempt
    session.say(f": attempt {number} was interrupted while it was started: ending it")
    end_everywhere(session, number, session.workers, grace=session.config.run.stop_seconds)
    cause = Cause(-1, "it was interrupted while it was started")
    session.ledger.append(events.Ended(number, events.NOT_STARTED, cause))
