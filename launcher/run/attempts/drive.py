"""Watching attempts, and following each up with the next, as the budgets allow.

`drive` is the whole of it. `_Recovery` is what lies between the end of an attempt and the start of the next one:
rounds, each of which makes the slice READY and starts the attempt, until one succeeds or `recovery.decide_round` gives
up.
"""

from __future__ import annotations

from launcher import costs
from launcher.errors import Exit, LaunchError
from launcher.run import events
from launcher.run.attempts.session import Outcome, RunStopped, Session
from launcher.run.attempts.start import require_inputs, start_next
from launcher.run.recovery import (
    SETTLE_SECONDS,
    Budgets,
    Next,
    NextRound,
    SliceDeleted,
    bad_host,
    classify,
    decide,
    decide_round,
    spent_so_far,
)
from launcher.run.supervise import AttemptRef, explain, last_lines, supervise
from launcher.run.verdict import SLICE_DELETED, Kind, Limits, Verdict

_SETTLE_POLL_SECONDS = 5.0


def drive(session: Session, attempt: AttemptRef | None, *, ready: bool = True) -> Outcome:
    """Watches an attempt, or starts the next one when there is none, and then those that the budgets allow.

    Args:
        session: The run. Its specification names the image.
        attempt: The attempt that runs; None to start the next one.
        ready: Whether the slice was seen to be READY. If not, a failure to start is explained by the slice's state.

    Returns:
        How the last attempt ended.

    Raises:
        LaunchError: An attempt could not be started, or the run could not be recovered.
        BadInput: Another attempt would follow, and secrets or the overlay are missing. The run stays resumable.
        RunStopped: Its owner stopped the run before the first attempt had started.
    """
    while True:
        verdict = None
        if attempt is None:
            attempt, verdict = start_next(session, ready=ready)
        if verdict is None:
            verdict = _supervise(session, attempt)
        following = _recover(session, attempt, verdict)
        if following is None:
            lines = last_lines(session.ledger, attempt.number, verdict)
            return Outcome(session.ledger.run_id, attempt.number, verdict, lines)
        attempt = following


def _supervise(session: Session, attempt: AttemptRef) -> Verdict:
    settings = session.config.run
    stall = None if settings.stall_minutes is None else settings.stall_minutes * 60
    limits = Limits(lost=settings.host_lost_seconds, unreachable=settings.unreachable_minutes * 60, stall=stall)
    return supervise(
        session.provider, session.ledger, attempt, limits=limits, output=session.output, machine=session.machine
    )


def _recover(session: Session, attempt: AttemptRef, verdict: Verdict) -> AttemptRef | None:
    """Starts the attempt that follows, if one does: a recovery."""
    ledger, settings = session.ledger, session.config.run
    decision = decide(
        verdict,
        spent_so_far(ledger.events()),
        Budgets(settings.preemption_retries, settings.failure_retries),
        stop_requested=ledger.stop_requested(),
    )
    if decision.next is Next.END:
        return None
    if session.specification is None:
        session.say(
            ": no attempt follows: an older version of tpu-launch started this run, and its folder does not say what "
            "it is (no specification.yaml); `tpu-launch run` resumes it"
        )
        return None
    for line in explain(verdict):
        session.say(f", attempt {attempt.number}: {line}")
    require_inputs(session, session.specification)
    delay = f" in {decision.delay:.0f} s" if decision.delay else ""
    session.say(f": starting again ({decision.reason}){delay}")
    try:
        ledger.append(events.Recovering(attempt.number, verdict.kind.value, decision.reason, decision.delay))
    except LaunchError as error:
        raise LaunchError(f"{error}\n  {_describe_bill(session)}`tpu-launch run` resumes the run") from error
    try:
        return _Recovery(session).run(decision.delay, settle=verdict.kind is Kind.SAVED)
    except RunStopped:
        session.say(f": its owner stopped it: no attempt follows; {_describe_bill(session)}`tpu-launch run` resumes it")
        return None


class _Recovery:
    """From the end of an attempt until the next one runs on all hosts, in rounds. Stopping the run ends every wait."""

    def __init__(self, session: Session) -> None:
        self.session = session
        self.clock = session.clock
        self.begun = self.clock.monotonic()
        self.failed = 0  # rounds
        self.first_failure = 0.0  # when the first of them failed
        self.replace = ""  # why the slice is deleted in the next round; empty: it is not

    def run(self, delay: float, *, settle: bool) -> AttemptRef:
        """The next attempt, started.

        Args:
            delay: Seconds to wait first.
            settle: Whether to wait until the API knows what became of the slice.

        Raises:
            LaunchError: It can't be started, or not in time; the message says what is billed.
        """
        self.clock.sleep(delay)
        if self.session.provider.capabilities.replaces_hosts:
            self._look_at_slice(settle=settle)
        while True:
            try:
                return self._try()
            except RunStopped:
                raise
            except LaunchError as error:
                self._wait_after(error)

    def _look_at_slice(self, *, settle: bool) -> None:
        """Raises SliceDeleted when somebody deleted the slice. With `settle`, waits for a short time until the API says
        that the slice is not READY any more."""
        session = self.session
        if settle:
            session.say(f": waiting for the slice's state, for {SETTLE_SECONDS:.0f} s at most: nobody here stopped it")
        deadline = self.clock.monotonic() + (SETTLE_SECONDS if settle else 0.0)
        missing = 0
        while True:
            try:
                slice_state = session.provider.describe()
            except LaunchError:  # the API does not answer: nothing is known yet
                missing = 0
            else:
                missing = missing + 1 if slice_state is None or slice_state.state == "DELETING" else 0
                if slice_state is not None and slice_state.state != "DELETING" and not slice_state.ready:
                    return
            if missing > 1:  # one answer may be stale
                raise SliceDeleted(f"run {session.ledger.run_id}: {SLICE_DELETED.what}")
            if not missing and self.clock.monotonic() >= deadline:
                return
            self.clock.sleep(_SETTLE_POLL_SECONDS)

    def _try(self) -> AttemptRef:
        """One round: the slice READY, the attempt started."""
        session = self.session
        round_begun = self.clock.monotonic()
        self._delete_slice_if_bad()
        # Finds the slice READY, waits for it, or deletes and creates it, as its state demands.
        session.provider.create(self.clock)
        ready = self.clock.monotonic()
        attempt, preempted = start_next(session, ready=True)
        if preempted is not None and preempted.cause is not None:
            if preempted.kind is Kind.DELETED:
                raise SliceDeleted(preempted.cause.what)
            raise LaunchError(preempted.cause.what, exit_code=Exit.PREEMPTED)
        started = self.clock.monotonic()
        steps = {"delay": round_begun - self.begun, "slice": ready - round_begun, "start": started - ready}
        seconds = {name: round(value, 1) for name, value in steps.items()}
        session.ledger.note(events.Recovered(attempt.number, seconds), session.output.say)
        parts = ", ".join(f"{name} {value:.1f} s" for name, value in seconds.items())
        session.say(f": recovered in {started - self.begun:.1f} s ({parts})")
        return attempt

    def _wait_after(self, error: LaunchError) -> None:
        """Waits for the next round. Raises LaunchError when there is none."""
        session, now = self.session, self.clock.monotonic()
        self.failed += 1
        if self.failed == 1:
            self.first_failure = now
        replaces = session.provider.capabilities.replaces_hosts
        decision = decide_round(
            classify(error),
            self.failed,
            now - self.first_failure,
            limit=session.config.run.recovery_minutes * 60,
            may_replace=session.config.run.replace_after is not None if replaces else None,
        )
        if decision.next is NextRound.GIVE_UP:
            raise LaunchError(
                f"run {session.ledger.run_id} is not recovered ({decision.reason}): {error}\n"
                f"  {_describe_bill(session)}`tpu-launch run` resumes the run",
                exit_code=error.exit_code,
            ) from error
        problem = str(error).splitlines()[0]
        if decision.next is NextRound.REPLACE:
            self.replace = problem
        session.say(f": not recovered yet: {problem}; {decision.reason} in {decision.delay:.0f} s")
        number = session.ledger.attempts - 1
        failed = events.RoundFailed(number, problem, decision.reason, decision.delay)
        session.ledger.note(failed, session.output.say)
        self.clock.sleep(decision.delay)

    def _delete_slice_if_bad(self) -> None:
        """Deletes a slice whose hosts can't be used, or one of whose hosts fails again and again, where
        run.replace_after says so: one host of a slice can't be exchanged."""
        session = self.session
        worker, count = bad_host(session.ledger.events())
        limit = session.config.run.replace_after
        if count >= (limit or 2) and session.provider.capabilities.replaces_hosts:
            reason = f"host {worker} was the first cause of the last {count} attempts"
            if limit is not None:
                self.replace = self.replace or reason
            elif self.failed == 0:
                session.say(f": {reason}; run.replace_after: 2 makes the slice anew then")
        else:
            worker = -1
        if not self.replace:
            return
        session.say(f": {self.replace}: making the slice anew (run.replace_after)")
        session.check_stop()
        session.provider.delete()
        session.ledger.append(events.SliceReplaced(session.ledger.attempts - 1, worker, self.replace))
        self.replace = ""


def _describe_bill(session: Session) -> str:
    """What goes on being paid for, a sentence; empty where there is no slice of the run's own."""
    if not session.provider.capabilities.cloud_tpu_node:
        return ""
    name = session.config.slice.name
    try:
        slice_state = session.provider.describe()
    except LaunchError:
        return f"slice {name} may be there and billed: `tpu-launch status` looks, `tpu-launch down` deletes it; "
    if slice_state is None:
        return f"there is no slice {name}, nothing of it is billed; "
    cost = costs.since(session.config, slice_state.created, session.machine.clock.time())
    return (
        f"slice {name} is {slice_state.state} and billed{f' ({cost})' if cost else ''}: `tpu-launch down` deletes it; "
    )
