"""The attempts of a run: starting one on every host, watching it, and starting the next as the budgets allow.

Every attempt is made from the run's specification. A start may be repeated after a crash at any point: containers that
are there already are found again by their names and labels.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from launcher.clock import Clock
from launcher.config import CONFIG_FILE, Config
from launcher.errors import BadInput, Exit, LaunchError
from launcher.machine import Machine
from launcher.provider import Attempt, HostReport, Overlay, Provider
from launcher.run import events, specification
from launcher.run import ledger as ledgers
from launcher.run.ledger import Ledger, RunRecord
from launcher.run.recovery import Budgets, Next, bad_host, decide, spent_so_far
from launcher.run.specification import SecretSource, Specification
from launcher.run.supervise import AttemptRef, Output, explain, last_lines, supervise
from launcher.run.verdict import Cause, Kind, Limits, Verdict
from training.preflight.agreement import CHECKED_PROGRAMS_VARIABLE


@dataclass(frozen=True)
class Outcome:
    """How a run ended here: its last attempt's verdict, and what the host that is the cause wrote last."""

    run_id: str
    attempt: int
    verdict: Verdict
    last_lines: list[str]


@dataclass(frozen=True)
class Session:
    """One process's work on a run, whose lock it holds."""

    home: Path
    """The launcher's folder."""
    ledger: Ledger
    specification: Specification | None
    """None for a run of an older version: it can be watched, and no attempt of it can be started."""
    config: Config
    """The specification's; of a run of an older version, that of the command line."""
    provider: Provider
    secrets: SecretSource
    output: Output
    machine: Machine

    def say(self, text: str) -> None:
        """Says a line about this run."""
        self.output.say(f"run {self.ledger.run_id}{text}")

    def attempt(self, number: int) -> AttemptRef:
        """How an attempt that was begun is found on the hosts, and which values are masked in what is kept of it."""
        if not self.provider.capabilities.sends_secrets:
            names, values = list(self.config.gke.secrets), dict[str, str]()
        elif self.specification is not None:
            names, values = self.specification.secrets, self.secrets.values(self.specification)
        else:
            names, environment = self.config.run.secrets, self.secrets.environment
            values = {name: environment[name] for name in names if name in environment}
        workers = range(self.config.accelerator.hosts)
        unknown = [name for name in names if name not in values]
        return AttemptRef(self.ledger.run_id, number, workers, values, unknown)


def make_attempt(
    spec: Specification,
    config: Config,
    number: int,
    image: str,
    *,
    secrets: Mapping[str, str] | None = None,
    overlay: Overlay | None = None,
) -> Attempt:
    """What every host is given for one start of the run.

    Args:
        spec: The run.
        config: Its configuration, `spec.config()`.
        number: Of the attempt, from 0.
        image: REPOSITORY@sha256:... or an image id.
        secrets: Values of the variables that only the command may see.
        overlay: Files over the image's own.
    """
    checked = {CHECKED_PROGRAMS_VARIABLE: ",".join(spec.preflight)} if spec.preflight else {}
    return Attempt(
        run_id=spec.run,
        number=number,
        image=image,
        command=config.command,
        environment={**config.run.environment, **checked},
        files={CONFIG_FILE: config.document.dump().encode()},
        shm_size=config.run.shm_size,
        stop_seconds=config.run.stop_seconds,
        user=config.run.user,
        secrets=secrets or {},
        overlay=overlay,
    )


def same_slice(config: Config, record: RunRecord) -> bool:
    """Whether a run was started on the slice of this configuration."""
    requested = (config.slice.name, config.project, config.zone, config.provider)
    return (record.slice, record.project, record.zone, record.provider) == requested


def drive(session: Session, attempt: AttemptRef | None, *, ready: bool = True) -> Outcome:
    """Watches an attempt, or starts the next one when there is none, and then those that the budgets allow.

    Args:
        session: The run. Its specification names the image.
        attempt: The attempt that runs; None to start the next one.
        ready: Whether the slice was seen to be READY. If not, a failure to start is explained by the slice's state.

    Returns:
        How the last attempt ended.

    Raises:
        LaunchError: An attempt could not be started.
        BadInput: Another attempt would follow, and secrets or the overlay are missing. The run stays resumable.
    """
    recovery: _RecoveryTimes | None = None
    while True:
        verdict = None
        if attempt is None:
            attempt, verdict = _start_next(session, ready=ready)
            ready = True
            if recovery is not None:
                _report_recovery(session, recovery)
        if verdict is None:
            verdict = _supervise(session, attempt)
        recovery = _RecoveryTimes(session.machine.clock)
        if not _recover(session, attempt, verdict, recovery):
            lines = last_lines(session.ledger, attempt.number, verdict)
            return Outcome(session.ledger.run_id, attempt.number, verdict, lines)
        attempt = None


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


# -- watching, and what follows ---------------------------------------------------------------------------------------


class _RecoveryTimes:
    """When the steps of a recovery were done: the attempt was judged, its delay was over, the slice was READY."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._moments = [clock.monotonic()]

    def mark(self) -> None:
        """The next step is done."""
        self._moments.append(self._clock.monotonic())

    def seconds(self) -> dict[str, float]:
        """How long each step took."""
        steps = zip(("delay", "slice", "start"), self._moments, self._moments[1:], strict=False)
        return {name: round(end - begin, 1) for name, begin, end in steps}

    @property
    def total(self) -> float:
        """Seconds from the first moment to the last."""
        return self._moments[-1] - self._moments[0]


def _supervise(session: Session, attempt: AttemptRef) -> Verdict:
    settings = session.config.run
    stall = None if settings.stall_minutes is None else settings.stall_minutes * 60
    limits = Limits(lost=settings.host_lost_seconds, stall=stall)
    return supervise(
        session.provider, session.ledger, attempt, limits=limits, output=session.output, machine=session.machine
    )


def _recover(session: Session, attempt: AttemptRef, verdict: Verdict, times: _RecoveryTimes) -> bool:
    """Makes the slice READY for the next attempt. False when there is none."""
    ledger, settings = session.ledger, session.config.run
    decision = decide(
        verdict,
        spent_so_far(ledger.events()),
        Budgets(settings.preemption_retries, settings.failure_retries),
        stop_requested=ledger.stop_requested(attempt.number),
    )
    if decision.next is Next.END:
        return False
    if session.specification is None:
        session.say(
            ": no attempt follows: an older version of tpu-launch started this run, and its folder does not say what "
            "it is (no specification.yaml); `tpu-launch run` resumes it"
        )
        return False
    for line in explain(verdict):
        session.say(f", attempt {attempt.number}: {line}")
    require_inputs(session, session.specification)
    delay = f" in {decision.delay:.0f} s" if decision.delay else ""
    session.say(f": starting again ({decision.reason}){delay}")
    ledger.append(events.Recovering(attempt.number, verdict.kind.value, decision.reason, decision.delay))
    session.machine.clock.sleep(decision.delay)
    times.mark()
    _replace_slice_of_bad_host(session)
    session.provider.create()  # finds the slice READY, waits for it, or deletes and creates it, as its state demands
    times.mark()
    return True


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


def _replace_slice_of_bad_host(session: Session) -> None:
    """Deletes a slice whose same host fails again and again, where run.replace_after says so: one host of a slice can't
    be exchanged."""
    worker, count = bad_host(session.ledger.events())
    limit = session.config.run.replace_after
    if count < (limit or 2) or not session.provider.capabilities.replaces_hosts:
        return
    reason = f"host {worker} was the first cause of the last {count} attempts"
    if limit is None:
        session.say(f": {reason}; run.replace_after: 2 makes the slice anew then")
        return
    session.say(f": {reason}: making the slice anew (run.replace_after)")
    reason = f"first cause of {count} attempts in a row"
    session.ledger.append(events.SliceReplaced(session.ledger.attempts - 1, worker, reason))
    session.provider.delete()


def _report_recovery(session: Session, times: _RecoveryTimes) -> None:
    """Where the time from one attempt's end to the next one's start went."""
    times.mark()
    seconds = times.seconds()
    session.ledger.append(events.Recovered(session.ledger.attempts - 1, seconds))
    parts = ", ".join(f"{name} {value:.1f} s" for name, value in seconds.items())
    session.say(f": recovered in {times.total:.1f} s ({parts})")


# -- starting ---------------------------------------------------------------------------------------------------------


def _start_next(session: Session, *, ready: bool) -> tuple[AttemptRef, Verdict | None]:
    """Starts the next attempt on all hosts.

    Returns:
        The attempt, and a verdict when the slice was taken away meanwhile: a preemption like any other.
    """
    ledger, spec, config = session.ledger, session.specification, session.config
    assert spec is not None
    assert spec.image is not None
    require_inputs(session, spec)
    number = ledger.attempts
    attempt = make_attempt(
        spec,
        config,
        number,
        spec.image,
        secrets=session.secrets.values(spec) if session.provider.capabilities.sends_secrets else {},
        overlay=specification.read_overlay(ledger.folder, spec),
    )
    before = f" (resumes: the last attempt ended with {ledger.outcome!r})" if number and ledger.outcome else ""
    session.say(f": attempt {number} on {config.accelerator.hosts} hosts{before}")
    _sweep(session)
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
        _start_everywhere(session.provider, attempt, ledger)
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
        return Verdict(Kind.PREEMPTED, Cause(-1, "the slice does not exist any more")) if ready else None
    if slice_state.gone_for_good:
        return Verdict(Kind.PREEMPTED, Cause(-1, f"the slice is {slice_state.state}"))
    return None


def _start_everywhere(provider: Provider, attempt: Attempt, ledger: Ledger) -> None:
    """Prepares all hosts, checks that they have the same image, starts all. On any failure nothing is left running."""
    prepared = provider.prepare(attempt)
    images = {report.detail for report in prepared}
    if len(images) != 1 or not all(report.ok for report in prepared):
        ready = [report.worker for report in prepared if report.ok]
        _clean_up(lambda: provider.stop(attempt.container, grace=1, remove=True, workers=ready))
    require_all(prepared, "prepare")
    if len(images) != 1:
        raise LaunchError(
            "the hosts do not have the same image: "
            + "; ".join(f"host {report.worker} has {report.detail}" for report in prepared)
        )
    ledger.append(events.Prepared(attempt.number, images.pop()))
    started = provider.start(attempt)
    if not all(report.ok for report in started):
        _clean_up(lambda: provider.stop(attempt.container, grace=1, remove=True))
    require_all(started, "start")
    ledger.append(events.Started(attempt.number))


def _clean_up(stop: Callable[[], Sequence[HostReport]]) -> None:
    """Removes what a failed start left. Its own failure is passed over: the user is told what failed first."""
    with contextlib.suppress(LaunchError):
        stop()


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
    raise LaunchError(f"{len(failed)} of {len(reports)} hosts could not {verb} the container:\n{details}")


def with_image(session: Session, image: str) -> Session:
    """The session of a run whose image is known now; its specification is written."""
    assert session.specification is not None
    spec = session.specification.model_copy(update={"image": image})
    specification.write(session.ledger.folder, spec)
    return replace(session, specification=spec)
