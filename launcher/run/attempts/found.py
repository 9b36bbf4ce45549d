"""An attempt that is there already: one that was started and not seen to end, by this launcher or an earlier one.

Nothing is concluded from a host that does not answer: only what every host says ends an attempt here. What can't be
told at once is left to supervision.
"""

from __future__ import annotations

import contextlib
import enum
from collections.abc import Sequence

from launcher.errors import LaunchError
from launcher.provider import DELIVERY_SECONDS, Observation
from launcher.run import events
from launcher.run.attempts.drive import drive
from launcher.run.attempts.session import Outcome, Session
from launcher.run.attempts.start import end_everywhere
from launcher.run.supervise import StartInterrupted, explain
from launcher.run.verdict import Cause, Kind
from training.machine.clock import format_time, parse_time


class Presence(enum.Enum):
    """What hosts have of an attempt that was not seen to end."""

    GONE = "gone"  # every host answered, and none has a container that ever ran
    INCOMPLETE = "incomplete"  # every host answered; its start was interrupted, and some hosts do not run it
    ENDED = "ended"  # every host answered, and it runs on none any more
    WATCHABLE = "watchable"  # it runs, or hosts could not be asked: supervision finds out what became of it


def end_open_attempt(session: Session) -> Outcome | None:
    """Watches the attempt that was not seen to end, or records how it ended while nobody watched.

    Returns:
        How the run ended; None when what was asked for now is the next attempt.
    """
    ledger = session.ledger
    number = ledger.attempts - 1
    with contextlib.closing(session.provider):
        presence = look(session)
        if presence is Presence.GONE and not ledger.started_everywhere:  # what was asked for may yet arrive
            _end_interrupted_start(session, number)
            return None
        if presence is Presence.GONE:
            ledger.append(events.Ended(number, events.VANISHED, Cause(-1, "no host has its container any more")))
            return None
        if presence is Presence.INCOMPLETE:
            _end_interrupted_start(session, number)
            return None
        session.say(f": attempt {number} is there already; attaching to it")
        try:
            outcome = drive(session, session.attempt(number))
        except StartInterrupted:  # a host that could not be asked before says so now
            _end_interrupted_start(session, number)
            return None
    if presence is not Presence.ENDED or outcome.verdict.kind is Kind.FINISHED:
        return outcome
    # It had ended while nobody watched: what was asked for now is to resume it.
    session.say(f": attempt {number} had ended: {explain(outcome.verdict)[0]}")
    return None


def _end_interrupted_start(session: Session, number: int) -> None:
    session.say(f": attempt {number} was interrupted while it was started: ending it")
    attempt = session.attempt(number)
    end_everywhere(session, number, attempt.container, attempt.workers, grace=session.config.run.stop_seconds)
    cause = Cause(-1, "it was interrupted while it was started")
    session.ledger.append(events.Ended(number, events.NOT_STARTED, cause))


def look(session: Session) -> Presence:
    """Asks every host once for the last attempt. An answer that is missing says nothing: a host may be away for a
    moment while the run goes on."""
    attempt = session.attempt(session.ledger.attempts - 1)
    started_everywhere = session.ledger.started_everywhere
    # The lines matter only where the start may have been interrupted.
    since = format_time(session.machine.clock.time()) if started_everywhere else None

    def observe(worker: int) -> Observation | None:
        try:
            return session.provider.observe(worker, attempt.container, since)
        except LaunchError:
            return None

    answers = session.machine.threads.map(observe, attempt.workers, at_once=64)
    observations = [answer for answer in answers if answer is not None]
    containers = [answer.container for answer in observations if answer.container is not None]
    if len(containers) < len(answers):
        return Presence.WATCHABLE
    begun = [container.running or container.ended for container in containers]
    if not any(begun):
        return Presence.GONE
    if not started_everywhere and (not all(begun) or _waits_for_secrets(session, observations)):
        return Presence.INCOMPLETE
    return Presence.WATCHABLE if any(container.running for container in containers) else Presence.ENDED


def _waits_for_secrets(session: Session, observations: Sequence[Observation]) -> bool:
    """Whether the containers of an attempt of which no start was recorded may wait for secrets that nobody has any
    more: those of an attempt died with the launcher that started it. Then nothing is written yet, and less time has
    passed than they wait."""
    spec, config = session.specification, session.config
    is_sent = config.accelerator.hosts > 1 or (spec is not None and bool(spec.secrets))
    if not session.provider.capabilities.sends_secrets or not is_sent:
        return False
    if any(observation.lines for observation in observations):
        return False
    now, longest = session.machine.clock.time(), config.run.start_minutes * 60 + DELIVERY_SECONDS
    starts = [parse_time(observation.container.started_at) for observation in observations if observation.container]
    return all(start is None or now - start < longest for start in starts)
