"""The start of an attempt on every host, and the end of one whose start was interrupted.

A start may be repeated after a crash at any point: containers that exist are found again by their names and labels. A
stop of the run counts until the containers run: it is checked before the attempt begins. A stop meanwhile ends what has
started on the hosts; after the start, supervision carries it out.
"""

import contextlib
from collections.abc import Sequence

from launcher import costs
from launcher.config import Config
from launcher.errors import BadInput, Exit, LaunchError
from launcher.provider import DELIVERY_SECONDS, SECRETS_LATE, ContainerState, HostReport, Observation, Provider
from launcher.run import events, specification
from launcher.run.ledger import NotRecorded
from launcher.run.session import RunStopped, Session, pull_known, runs_on_slice
from launcher.run.state import Phase, phase_on_hosts
from launcher.run.supervise import end_everywhere
from launcher.run.verdict import SLICE_DELETED, Cause, Kind, Verdict
from launcher.tpu_vm import slice_hints
from training.machine import Queue, format_time, parse_time

_ANSWER_SECONDS = 10.0  # for hosts to answer what became of an attempt, beside half a second a host


def start_attempt(session: Session) -> tuple[int, Verdict | None]:
    """Removes orphans of earlier attempts from the slice, then starts the next attempt on all hosts and records it.
    Returns its number, and None; or the verdict that ended it if the slice or a host was lost meanwhile.

    Raises:
        BadInput: A secret or the overlay is missing; no attempt has begun.
        LaunchError: The start failed. The attempt was ended on all hosts that could be reached; `events.Orphaned` names
            the others. If it is a NotRecorded, the attempt may run, and the ledger does not say so.
        RunStopped: The user stopped the run.
    """
    ledger, spec, config, provider = session.ledger, session.specification, session.config, session.provider
    require_inputs(session)
    assert spec.image is not None
    number, before = ledger.state.attempt + 1, ledger.state.outcome
    overlay = specification.read_overlay(ledger.folder, spec)
    secrets = session.secret_values()
    attempt = specification.make_attempt(spec, config, number, spec.image, secrets=secrets, overlay=overlay)
    resumes = f" (resumes: the last attempt ended with {before!r})" if before else ""
    session.say(f": attempt {number} on {provider.host_count} hosts{resumes}")
    _reap_orphans(session)
    session.check_stop()
    placed = slice_hints.current(config) if provider.capabilities.cloud_tpu_node else None
    ledger.append(
        events.AttemptBegan(
            number,
            image=attempt.image,
            command=attempt.command,
            overlay=overlay.digest if overlay else "",
            overlay_target=overlay.target if overlay else "",
            preflight=",".join(spec.preflight),
            slice=str(placed) if placed else "",
            dollars_an_hour=costs.per_hour(placed.accelerator_type, placed.zone, placed.capacity) if placed else None,
        )
    )
    try:
        session.check_stop()  # a stop that was recorded just before this attempt has told that none follows
        try:
            reports = provider.start(attempt, session.clock)
            if not all(report.ok or report.occupied_by for report in reports):  # a connection may have failed once
                session.check_stop()
                reports = provider.start(attempt, session.clock)
            require_all(reports, "start")
        except LaunchError:  # a host may have started the container although the call failed
            end_everywhere(session, number, session.workers)
            pull_known(ledger, session.machine)  # another machine may have stopped the run, while this one slept
            session.check_stop()
            raise
    except RunStopped as stopped:
        ledger.append(events.Ended(number, Kind.STOPPED.value, Cause(-1, str(stopped))))
        raise
    except NotRecorded:  # what runs on the hosts is not on record: do not record that the attempt ended
        raise
    except LaunchError as error:
        lost = judge_slice(session)
        if lost is None and error.exit_code is Exit.HOST_LOST:
            lost = Verdict(Kind.HOST_LOST, Cause(-1, str(error)))
        ledger.append(events.Ended(number, lost.kind.value if lost else events.NOT_STARTED, Cause(-1, str(error))))
        if lost is None:
            raise
        return number, lost
    ledger.append(events.Started(number, reports[0].detail, *provider.identity()))
    session.say(": started on all hosts; Ctrl-C detaches")
    return number, None


def judge_slice(session: Session) -> Verdict | None:
    """Returns DELETED if the API says twice that the slice is missing, PREEMPTED if it is PREEMPTED or TERMINATED; else
    None, also if the API gives no answer."""
    try:
        slice_state = session.describe_slice()
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
    text = f"slice {slice_state.name} is {slice_state.state}"
    if slice_state.gone_for_good:
        raise LaunchError(f"{text}: `tpu-launch up` deletes it and creates it again", exit_code=Exit.PREEMPTED)
    if not slice_state.ready:
        raise LaunchError(f"{text}, not READY: `tpu-launch up` waits for it", exit_code=Exit.CONFLICT)


def require_inputs(session: Session) -> None:
    """Raises BadInput if the next attempt would lack a secret or its overlay, or the overlay was changed."""
    spec = session.specification
    if missing := session.describe_missing_secrets():
        raise BadInput(
            f"run {spec.run}: attempt {session.ledger.state.attempt + 1} is not started: {missing}; "
            "nothing is lost: export them, then resume the run with the same `tpu-launch run` command"
        )
    specification.read_overlay(session.ledger.folder, spec)


def require_all(reports: Sequence[HostReport], verb: str) -> None:
    """Raises LaunchError, which says `verb` ("start"), unless all are ok; Exit.CONFLICT if another run uses a host."""
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
        "  `tpu-launch ssh --host N`, or `kubectl describe pod` on GKE, looks there; then run again"
    )


def _reap_orphans(session: Session) -> None:
    """Removes containers that earlier attempts, of any run on the slice, left on hosts that were out of reach, where
    they hold the TPU, and records Reaped. Silently leaves those that can't be removed now to the next start."""
    for ledger in runs_on_slice(session.config, session.context.home, session.machine):
        for orphan in ledger.state.orphans:
            with contextlib.suppress(LaunchError):
                there = [worker for worker in orphan.hosts if worker in session.workers]  # another slice may have fewer
                stop = session.provider.stop
                reports = stop(orphan.container, grace=1, remove=True, workers=there) if there else []
                if all(report.ok for report in reports):
                    ledger.append(events.Reaped(orphan.attempt, orphan.hosts))


# -- an attempt that is there already ---------------------------------------------------------------------------------


def observe_phase(session: Session) -> Phase:
    """Asks every host once for the open attempt, and returns the run's phase with what they answered. Waits only until
    an answer shows that the phase stays, 10 s and half a second a host at most. A missing answer leaves the phase as it
    is: a host may be away for a moment while the run goes on."""
    state, clock, threads = session.ledger.state, session.machine.clock, session.machine.threads
    # Lines matter only where the start may have been interrupted.
    since = format_time(clock.time()) if state.phase is Phase.RUNNING else None
    inbox: Queue[Observation] = threads.queue(len(session.workers))

    def observe(worker: int) -> None:
        inbox.put(session.observe(worker, state.attempt, since))

    deadline = clock.monotonic() + _ANSWER_SECONDS + len(session.workers) / 2
    for worker in session.workers:
        threads.start(observe, worker)
    containers: list[ContainerState] = []
    lacks_secrets = False
    for _ in session.workers:
        answer = inbox.get(timeout=max(0.0, deadline - clock.monotonic()))
        if answer is None or answer.container is None or (state.phase is Phase.RUNNING and answer.container.running):
            return state.phase
        containers.append(answer.container)
        lacks_secrets = lacks_secrets or _may_lack_secrets(session, answer, answer.container)
    return phase_on_hosts(state.phase, containers, may_lack_secrets=lacks_secrets)


def _may_lack_secrets(session: Session, answer: Observation, container: ContainerState) -> bool:
    """Returns whether a container waits, or waited to its end, for secrets or an overlay that died with its launcher. A
    running one may wait if it has written no line and started more recently than it waits for secrets."""
    config, spec = session.config, session.specification
    waits = session.provider.host_count > 1 or bool(spec.secrets) or spec.overlay is not None
    if not session.provider.capabilities.sends_secrets or not waits:
        return False
    if answer.lines or not container.running:
        return any(SECRETS_LATE in line.text for line in answer.lines)
    longest, started = config.run.start_minutes * 60 + DELIVERY_SECONDS, parse_time(container.started_at)
    return started is None or session.machine.clock.time() - started < longest


def end_interrupted_start(session: Session) -> None:
    """Ends (SIGKILL after run.stop_seconds) and removes the open attempt's containers, as `end_everywhere`: raises
    nothing for a host on which that fails. Records the attempt as not started."""
    number = session.ledger.state.attempt
    session.say(f": attempt {number} was interrupted while it was started: ending it")
    end_everywhere(session, number, session.workers, grace=session.config.run.stop_seconds)
    session.ledger.append(events.Ended(number, events.NOT_STARTED, Cause(-1, events.INTERRUPTED)))


def observe_open_attempt(session: Session) -> Phase | None:
    """Returns the phase of the attempt whose end is not recorded, as its hosts answer (`observe_phase`); the recorded
    phase if one gives no answer. Returns None after it recorded an end: the containers are gone, the slice is (after a
    failed round), or the start was interrupted and is ended."""
    ledger = session.ledger
    number = ledger.state.attempt
    if ledger.state.recovering and (lost := judge_slice(session)):  # a round of that recovery has failed
        ledger.append(events.Ended(number, lost.kind.value, lost.cause))
        return None
    phase = observe_phase(session)
    if phase is Phase.INTERRUPTED:
        end_interrupted_start(session)
        return None
    if phase is Phase.VANISHED:
        ledger.append(events.Ended(number, events.VANISHED, Cause(-1, "no host has its container any more")))
        return None
    return phase
