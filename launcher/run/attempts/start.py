"""The start of one attempt on every host, and what must be there before it.

A stop of the run counts until the containers run: it is looked for before the attempt begins and before the hosts are
told to start. After that, supervision carries it out.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence

from launcher.config import Config
from launcher.errors import BadInput, Exit, LaunchError
from launcher.provider import Attempt, HostReport, Provider
from launcher.run import events, specification
from launcher.run import ledger as ledgers
from launcher.run.attempts.session import RunStopped, Session
from launcher.run.ledger import same_slice
from launcher.run.specification import Specification
from launcher.run.supervise import AttemptRef, stop_hosts
from launcher.run.verdict import SLICE_DELETED, Cause, Kind, Verdict


def require_ready(config: Config, provider: Provider) -> None:
    """Raises LaunchError unless the slice is READY; the message says what to do."""
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


def require_inputs(session: Session, spec: Specification) -> None:
    """Raises BadInput when the next attempt would lack a secret or its overlay."""
    missing = session.secrets.missing(spec) if session.provider.capabilities.sends_secrets else []
    if missing:
        raise BadInput(
            f"run {spec.run}: attempt {session.ledger.attempts} is not started: "
            f"{specification.name_missing(spec, missing)}; "
            "nothing is lost: export them, then resume the run with the same `tpu-launch run` command"
        )
    specification.read_overlay(session.ledger.folder, spec)


def start_next(session: Session, *, ready: bool) -> tuple[AttemptRef, Verdict | None]:
    """Starts the next attempt on all hosts.

    Args:
        session: The run.
        ready: Whether the slice was seen to be READY.

    Returns:
        The attempt, and a verdict when the slice was taken away meanwhile: a preemption like any other.

    Raises:
        LaunchError: The attempt does not run anywhere that could be reached; `events.LeftBehind` says where it may.
        RunStopped: The run's owner stopped it.
    """
    ledger, spec, config = session.ledger, session.specification, session.config
    assert spec is not None
    require_inputs(session, spec)
    attempt = _describe_next(session, spec)
    number = attempt.number
    before = f" (resumes: the last attempt ended with {ledger.outcome!r})" if number and ledger.outcome else ""
    session.say(f": attempt {number} on {config.accelerator.hosts} hosts{before}")
    _sweep(session)
    session.check_stop()
    ledger.append(
        events.AttemptBegan(
            number,
            image=attempt.image,
            command=attempt.command,
            overlay=attempt.overlay.digest if attempt.overlay else "",
            overlay_target=attempt.overlay.target if attempt.overlay else "",
            preflight=",".join(spec.preflight),
        )
    )
    try:
        _start_everywhere(session, attempt)
    except RunStopped as stopped:
        ledger.append(events.Ended(number, Kind.STOPPED.value, Cause(-1, str(stopped))))
        raise
    except LaunchError as error:
        preempted = _preemption(session.provider, ready)
        outcome = preempted.kind.value if preempted else events.NOT_STARTED
        ledger.append(events.Ended(number, outcome, Cause(-1, str(error))))
        if preempted and (ready or config.run.preemption_retries):
            return session.attempt(number), preempted
        if not ready:
            require_ready(config, session.provider)
        raise
    session.say(": started on all hosts; Ctrl-C detaches")
    return session.attempt(number), None


def _describe_next(session: Session, spec: Specification) -> Attempt:
    assert spec.image is not None
    return specification.make_attempt(
        spec,
        session.config,
        session.ledger.attempts,
        spec.image,
        secrets=session.secrets.values(spec) if session.provider.capabilities.sends_secrets else {},
        overlay=specification.read_overlay(session.ledger.folder, spec),
    )


def _sweep(session: Session) -> None:
    """Ends what earlier attempts left on hosts that were out of reach when they ended: a host that was only cut off
    goes on working, and holds its TPU."""
    for ledger in ledgers.runs(session.home, session.machine):
        if not same_slice(session.config, ledger.record):
            continue
        for left in ledger.left_behind():
            with contextlib.suppress(LaunchError):
                reports = session.provider.stop(left.container, grace=1, remove=True, workers=left.hosts)
                if all(report.ok for report in reports):
                    ledger.append(events.Swept(left.attempt, left.hosts))


def _preemption(provider: Provider, ready: bool) -> Verdict | None:
    """The verdict on a start that failed because the slice is gone; None when that is not why."""
    try:
        slice_state = provider.describe()
    except LaunchError:
        return None
    if slice_state is None:
        return Verdict(Kind.DELETED, SLICE_DELETED) if ready else None
    if slice_state.gone_for_good:
        return Verdict(Kind.PREEMPTED, Cause(-1, f"the slice is {slice_state.state}"))
    return None


def _start_everywhere(session: Session, attempt: Attempt) -> None:
    """Prepares all hosts, checks that they have the same image, starts all. On any failure nothing is left running."""
    provider, ledger = session.provider, session.ledger
    prepared = provider.prepare(attempt)
    images = {report.detail for report in prepared}
    if len(images) != 1 or not all(report.ok for report in prepared):
        end_everywhere(session, attempt.number, attempt.container, [report.worker for report in prepared if report.ok])
        session.check_stop()  # which may be why
    require_all(prepared, "prepare")
    if len(images) != 1:
        raise LaunchError(
            "the hosts do not have the same image: "
            + "; ".join(f"host {report.worker} has {report.detail}" for report in prepared)
        )
    ledger.append(events.Prepared(attempt.number, images.pop()))
    try:
        session.check_stop()
        require_all(provider.start(attempt), "start")
    except LaunchError:  # although a call failed or was given up, hosts may have done what it said
        end_everywhere(session, attempt.number, attempt.container, range(session.config.accelerator.hosts))
        session.check_stop()
        raise
    ledger.append(events.Started(attempt.number))


def end_everywhere(session: Session, number: int, container: str, workers: Sequence[int], *, grace: int = 1) -> None:
    """Ends and removes a container on hosts; those on which it may be left are recorded, for the sweep before the next
    start."""
    reports = stop_hosts(session.provider, container, workers, grace=grace, remove=True)
    if left := tuple(report.worker for report in reports if not report.ok):
        session.ledger.append(events.LeftBehind(number, container, left))


def require_all(reports: Sequence[HostReport], verb: str) -> None:
    """Raises LaunchError unless every host did what it was told: `verb`."""
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
