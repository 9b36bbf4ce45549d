"""The attempts of a run, one after another: start, watch, decide what follows.

`run_attempts` is the loop. `_Recovery` goes from the end of an attempt to the start of the next one, in rounds, each of
which makes the slice READY and starts the attempt, until one succeeds or `recovery.decide_round` gives up.
"""

import contextlib
from collections.abc import Sequence

from launcher import costs
from launcher.errors import Exit, HostsUnreachable, LaunchError
from launcher.provider import SliceState
from launcher.run import bucket, budget, events
from launcher.run.recovery import (
    SETTLE_SECONDS,
    NextRound,
    Retries,
    SliceDeleted,
    bad_host,
    decide,
    decide_round,
    find_proof,
    last_slice_created,
    spent_so_far,
    unfinished_replacement,
)
from launcher.run.session import Outcome, RunStopped, Session
from launcher.run.start import end_interrupted_start, judge_slice, observe_phase, require_inputs, start_attempt
from launcher.run.state import Phase
from launcher.run.supervise import StartInterrupted, explain, supervise
from launcher.run.verdict import JOBSET_DELETED, SLICE_DELETED, Cause, Kind, Verdict
from training import storage

_SETTLE_POLL_SECONDS = 5.0


def run_attempts(
    session: Session, attempt: int | None = None, verdict: Verdict | None = None, *, in_rounds: bool = False
) -> Outcome:
    """Starts the next attempt, watches it, then further attempts as the budgets allow. Returns how the last one ended.

    Continues an earlier process's recovery, at no cost to retry budgets. Deletes the slice once run.budget is spent.

    Args:
        session: The run. Its specification names the image.
        attempt: Number of an attempt that runs, which is watched first; None: there is none.
        verdict: How that attempt has ended, if that is recorded and what follows is not.
        in_rounds: Start the first attempt in rounds, as after a recovery: no user waits for its error.

    Raises:
        LaunchError: An attempt could not be started, or the run could not be recovered.
        BadInput: Another attempt would follow, and secrets or the overlay are missing. The run stays resumable.
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
                attempt = _Recovery(session, in_use=None if begun is None else False).run()
            except RunStopped:
                _say_stopped(session)
                raise
        elif attempt is None:
            attempt, verdict = start_attempt(session)
        if verdict is None:
            verdict = supervise(session, attempt)
        following = _recover(session, attempt, verdict)
        if following is None:
            if verdict.kind is not Kind.FINISHED and budget.is_spent(session):
                budget.take_down(session)
            # An attempt that a stop has ended since, while it was started, has no lines either.
            ended = next(event for event in reversed(session.ledger.events()) if isinstance(event, events.Ended))
            return Outcome(session.ledger.run_id, attempt, verdict, list(ended.last_lines))
        attempt, verdict = following, None


def resume_open_attempt(session: Session) -> Outcome | None:
    """Watches the attempt whose end is not recorded, or records an end that no process saw; ends an interrupted start.
    Closes the provider. Returns how the run ended; None if the next attempt has to be started."""
    number = session.ledger.state.attempt
    with contextlib.closing(session.provider):
        phase = observe_open_attempt(session)
        if phase is None:
            return None
        session.say(f": attempt {number} is there already; attaching to it")
        try:
            outcome = run_attempts(session, number)
        except StartInterrupted:  # reported by a host that could not be reached before
            end_interrupted_start(session)
            return None
    if phase is not Phase.EXITED or outcome.attempt != number or outcome.verdict.kind is Kind.FINISHED:
        return outcome
    # The attempt had ended while no process watched it: `run` was asked for in order to resume it.
    session.say(f": attempt {number} had ended: {explain(outcome.verdict)[0]}")
    return None


def observe_open_attempt(session: Session) -> Phase | None:
    """Returns the phase of the attempt whose end is not recorded, as its hosts answer. Records the end of one that is
    gone, ends an interrupted start, and returns None."""
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


def _recover(session: Session, attempt: int, verdict: Verdict) -> int | None:
    """Starts the attempt that follows, and returns its number; None if the run is over: by the verdict, a spent budget
    or a stop. Raises LaunchError if the recovery is given up, BadInput if secrets or the overlay are missing."""
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
    require_inputs(session)
    delay = f" in {decision.delay:.0f} s" if decision.delay else ""
    session.say(f": starting again ({decision.reason}){delay}")
    try:
        ledger.append(events.Recovering(attempt, verdict.kind.value, decision.reason, decision.delay))
    except LaunchError as error:
        raise LaunchError(f"{error}\n  {_describe_bill(session)}`tpu-launch run` resumes the run") from error
    try:
        recovery = _Recovery(session, in_use=None)
        recovery.wait(decision.delay, settle=verdict.kind is Kind.SAVED)
        return recovery.run()
    except RunStopped:
        _say_stopped(session)
        return None


def _say_stopped(session: Session) -> None:
    """Says that the run was stopped, how to resume it, and what is still billed, for which it asks the API."""
    session.say(f": it was stopped: no attempt follows; {_describe_bill(session)}`tpu-launch run` resumes it")


class _Recovery:
    """From the end of an attempt until the next one runs on all hosts, in rounds. A stop of the run ends every wait."""

    def __init__(self, session: Session, *, in_use: bool | None) -> None:
        """`in_use`: whether the API last described the slice as READY; None: it has to be asked."""
        self.session = session
        self.in_use = in_use
        self.clock = session.clock
        self.begun = self.clock.monotonic()
        self.failed = 0  # rounds
        self.first_failure = 0.0  # when the first of them failed
        self.replace = ""  # why the slice is to be deleted in the next round; empty: it is not
        self.bad = ""  # when that slice was created; empty: that is not known
        self.files: Sequence[storage.Stat] = ()  # of the trainer, when they were last listed
        self.changed = self.begun  # when they were first seen so

    def wait(self, delay: float, *, settle: bool) -> None:
        """Waits `delay` seconds, and with `settle` until the API reports what became of the slice. Raises SliceDeleted,
        recorded as RecoveryGivenUp, if the slice was in use and a user deleted it."""
        self.clock.sleep(delay)
        if self.in_use is False:
            return
        self.in_use = None
        try:
            self._check_slice(settle=settle)
        except SliceDeleted as error:
            session, what = self.session, str(error)
            session.ledger.note(
                events.RecoveryGivenUp(session.ledger.state.attempt, what, "a user deleted it"),
                session.context.output.say,
            )
            raise SliceDeleted(f"run {session.ledger.run_id}: {what}") from None
        except LaunchError:
            pass  # the next round asks again

    def run(self) -> int:
        """Repeats rounds, with a pause after each failed one, until the next attempt runs; returns its number. Raises
        LaunchError, which says what is billed, if `decide_round` gives up, and RunStopped after a stop."""
        while True:
            try:
                return self._try()
            except RunStopped:
                raise
            except LaunchError as error:
                self._wait_after(error)

    def _check_slice(self, *, settle: bool) -> None:
        """Sets `in_use`. Raises SliceDeleted when the slice was deleted, and the API's error when it does not answer.
        With `settle`, waits SETTLE_SECONDS at most until the API reports that the slice is not READY."""
        session = self.session
        if not session.provider.capabilities.replaces_hosts:
            self.in_use = False
            slice_state = session.provider.describe()
            if slice_state is not None and slice_state.state == "DELETED":
                raise SliceDeleted(JOBSET_DELETED.what)
            return
        if settle:
            session.say(f": saved without a stop: waiting up to {SETTLE_SECONDS:.0f} s for the slice's state")
        deadline = self.clock.monotonic() + (SETTLE_SECONDS if settle else 0.0)
        missing = 0
        while True:
            try:
                slice_state = session.provider.describe()
            except LaunchError:
                if self.clock.monotonic() >= deadline:
                    raise
                missing = 0
            else:
                missing = missing + 1 if slice_state is None or slice_state.state == "DELETING" else 0
                self.in_use = slice_state is not None and slice_state.ready
                if not missing and not self.in_use:
                    return
            if missing > 1:  # one answer may be stale
                raise SliceDeleted(SLICE_DELETED.what)
            if not missing and self.clock.monotonic() >= deadline:
                return
            self.clock.sleep(_SETTLE_POLL_SECONDS)

    def _try(self) -> int:
        """Deletes a bad slice, makes the slice READY, starts the attempt and returns its number: one round. Records
        Recovered. Raises LaunchError if any of it fails, or the slice is taken away meanwhile."""
        session = self.session
        round_begun = self.clock.monotonic()
        session.check_stop()
        if session.ledger.state.phase.is_open and observe_open_attempt(session) is not None:
            session.say(f": attempt {session.ledger.state.attempt} runs; its start could not be recorded")
            return session.ledger.state.attempt
        if self.in_use is None:
            self._check_slice(settle=False)
        self._delete_slice_if_bad()
        # Find the slice READY, wait for it, or delete and create it, as its state demands.
        session.provider.create(self.clock)
        self.in_use = True
        ready = self.clock.monotonic()
        attempt, lost = start_attempt(session)
        if lost is not None and lost.cause is not None:
            if lost.kind is Kind.DELETED:
                raise SliceDeleted(lost.cause.what)
            raise LaunchError(lost.cause.what, exit_code=Exit.PREEMPTED)
        started = self.clock.monotonic()
        steps = {"delay": round_begun - self.begun, "slice": ready - round_begun, "start": started - ready}
        seconds = {name: round(value, 1) for name, value in steps.items()}
        session.ledger.note(events.Recovered(attempt, seconds), session.context.output.say)
        parts = ", ".join(f"{name} {value:.1f} s" for name, value in seconds.items())
        session.say(f": recovered in {started - self.begun:.1f} s ({parts})")
        return attempt

    def _wait_after(self, error: LaunchError) -> None:
        """Records the failed round, and waits for the next, which deletes the slice first if `decide_round` says so.
        Raises LaunchError if the recovery is given up."""
        session, now = self.session, self.clock.monotonic()
        self.failed += 1
        if self.failed == 1:
            self.first_failure = now
        replaces = session.provider.capabilities.replaces_hosts
        decision = decide_round(
            error,
            self.failed,
            now - self.first_failure,
            limit=session.config.run.recovery_minutes * 60,
            may_replace=session.config.run.replace_after is not None if replaces else None,
        )
        problem, note = str(error).splitlines()[0], session.ledger.note
        if decision.next is NextRound.GIVE_UP:
            given_up = events.RecoveryGivenUp(session.ledger.state.attempt, problem, decision.reason)
            note(given_up, session.context.output.say)
            raise LaunchError(
                f"run {session.ledger.run_id} is not recovered ({decision.reason}): {error}\n"
                f"  {_describe_bill(session)}`tpu-launch run` resumes the run",
                exit_code=error.exit_code,
            ) from error
        if decision.next is NextRound.REPLACE:  # as `create` saw it: by now another command may have replaced it
            self.replace, self.bad = problem, session.provider.identity()[0]
        session.say(f": not recovered yet: {problem}; {decision.reason} in {decision.delay:.0f} s")
        failed = events.RoundFailed(session.ledger.state.attempt, problem, decision.reason, decision.delay)
        note(failed, session.context.output.say)
        if isinstance(error, HostsUnreachable):
            self.in_use = True
        self.wait(decision.delay, settle=False)

    def _delete_slice_if_bad(self) -> None:
        """Records SliceReplaced and deletes the slice if its hosts can't be used or one of them fails repeatedly, if
        run.replace_after allows it, `find_proof` gives a proof, and no other slice has its name by now; else keeps it.
        Also finishes a deletion that a killed process had recorded."""
        session = self.session
        worker, count = bad_host(session.ledger.events())
        limit = session.config.run.replace_after
        if count >= (limit or 2) and session.provider.capabilities.replaces_hosts:
            reason = f"host {worker} was the first cause of the last {count} attempts"
            if limit is not None and not self.replace:
                self.replace, self.bad = reason, last_slice_created(session.ledger.events())
            elif self.failed == 0:  # `replace` is set after the first failed round
                session.say(f": {reason}; run.replace_after: 2 recreates the slice then")
        else:
            worker = -1
        if doomed := unfinished_replacement(session.ledger.events()):  # by a process that was killed meanwhile
            session.delete_slice(doomed)
        if not self.replace:
            return
        slice_state = session.provider.describe()
        if slice_state is None or slice_state.state == "CREATING" or self.bad not in ("", slice_state.created):
            session.say(f": {self.replace}, and that slice is gone")  # another command has deleted or replaced it
            self.replace = ""
            return
        if proof := self._find_proof(slice_state, blamed=worker >= 0):
            reason = f"{self.replace}; {proof}"
            session.say(f": {reason}: recreating the slice (run.replace_after)")
            session.check_stop()
            replaced = events.SliceReplaced(session.ledger.state.attempt, worker, reason, slice_state.created)
            session.ledger.append(replaced)
            session.delete_slice(slice_state.created)
            self.in_use, self.files = False, ()  # the trainer's silence counts anew for the next slice
        else:
            session.say(
                f": {self.replace}; the slice is kept, because neither Google's API nor other hosts nor the trainer's "
                "files show that it is broken: if it is, `tpu-launch down`, then `up`, recreates it"
            )
        self.replace = ""

    def _find_proof(self, slice_state: SliceState, *, blamed: bool) -> str:
        """Returns what shows that the slice is broken, besides this machine's own connections; "" for nothing. Counts
        how long the trainer's files have not changed from the first call on. `blamed`: one host was the first cause of
        the last attempts, and its own report of its end counts."""
        session, now = self.session, self.clock.monotonic()
        files = _list_files(session)
        if not files or files != self.files:
            self.files, self.changed = files, now
        ends = [event for event in session.ledger.events() if isinstance(event, events.Ended)]
        last = next((end for end in reversed(ends) if end.outcome not in (events.NOT_STARTED, events.VANISHED)), None)
        if last_slice_created(session.ledger.events()) not in ("", slice_state.created):
            last = None  # that attempt ran on another slice
        limit = session.config.run.unreachable_minutes * 60
        return find_proof(last, slice_state, blamed=blamed, silent=now - self.changed, limit=limit)


def _list_files(session: Session) -> Sequence[storage.Stat]:
    """Returns the trainer's files in the run's bucket; [] if there are none, or this account may not list them."""
    trainer = session.config.trainer
    if trainer is not None and storage.is_remote(trainer.output):
        with contextlib.suppress(storage.StorageError):
            folder = storage.join(trainer.output, session.ledger.run_id)
            own = storage.join(folder, bucket.FOLDER) + "/"
            return [found for found in storage.listing(folder) if not found.url.startswith(own)]
    return []


def _describe_bill(session: Session) -> str:
    """Asks the API, and returns a sentence about what is still billed; "" where the run has no slice of its own."""
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
