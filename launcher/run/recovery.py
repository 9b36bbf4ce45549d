"""Decides what follows an attempt that ended (pure functions), and recovers the run until its next attempt runs.

There are two retry budgets, because two different things go wrong. *Preemptions* (the slice was taken away, a host or
the connection between hosts was lost, the trainer was asked to stop by its machine and saved) are the price of cheap
capacity: another attempt helps. *Failures* are the program's own: another attempt rarely helps. A run that the user
stopped or that is configured wrongly is never started again.

A budget is spent once for each attempt that ended and is followed by another one (`decide`). What it takes until that
one runs on all hosts is one recovery, in rounds: make the slice READY, start the attempt. A round that fails costs time
and no budget (`decide_round`).
"""

import contextlib
from collections.abc import Sequence
from dataclasses import dataclass

from launcher import costs
from launcher.errors import Exit, HostsUnreachable, LaunchError
from launcher.provider import SliceState
from launcher.run import budget, events
from launcher.run.bucket import FOLDER
from launcher.run.session import RunStopped, Session
from launcher.run.start import observe_open_attempt, start_attempt
from launcher.run.verdict import JOBSET_DELETED, SLICE_DELETED, Kind, Verdict
from training import storage

_FINAL = {
    Kind.FINISHED: "finished",
    Kind.STOPPED: "the run was stopped",
    Kind.DELETED: "the slice was deleted",
    Kind.BAD_INPUT: "trying again changes nothing",
}  # ends that no other attempt follows, with the reason
_PREEMPTIONS = frozenset({Kind.PREEMPTED, Kind.HOST_LOST, Kind.CONNECTION_LOST, Kind.SAVED})
_LEAST_OF_CONNECTIONS = 3  # attempts after a lost connection: the slice stays, and a resumed attempt costs little
_OF_A_HOST = frozenset({Kind.HOST_LOST.value, Kind.FAILED.value})  # outcomes that a single host may have caused
_FIRST_DELAY = 5.0  # seconds before the first new attempt after a failure; doubles
_LONGEST_DELAY = 300.0
_SETTLE_POLL_SECONDS = 5.0
SETTLE_SECONDS = 60.0
"""How long the API may report READY for a slice that it is taking away. A trainer that saved without a stop of ours was
stopped by its machine."""


@dataclass(frozen=True)
class Retries:
    """Further attempts in the whole run, by what made them necessary: a budget, or what of it is spent."""

    preemptions: int = 0
    failures: int = 0


@dataclass(frozen=True)
class Decision:
    """Whether another attempt, or another round of a recovery, follows, and why."""

    retry: bool
    reason: str
    delay: float = 0.0  # seconds to wait first
    replace: bool = False  # delete the slice before the next round


def decide(verdict: Verdict, spent: Retries, budgets: Retries, *, stop_requested: bool) -> Decision:
    """Decides whether another attempt follows one that ended with `verdict`, which `spent` does not count yet. Never
    after a finished or stopped run, a deleted slice or bad input; at once, within the budget of preemptions, after a
    preemption, a lost host, a save that no one asked for, or a lost connection (for this alone the budget is 3 at
    least); after other failures within theirs, with a delay that doubles (5 to 300 s)."""
    assert verdict.kind.ended
    kind = Kind.STOPPED if stop_requested and verdict.kind is not Kind.FINISHED else verdict.kind
    if kind in _FINAL:
        return Decision(False, _FINAL[kind])
    if kind in _PREEMPTIONS:
        least = _LEAST_OF_CONNECTIONS if kind is Kind.CONNECTION_LOST else 0
        word, used, budget, delay = "preemption", spent.preemptions, max(budgets.preemptions, least), 0.0
    else:
        word, used, budget = "failure", spent.failures, budgets.failures
        delay = min(_LONGEST_DELAY, _FIRST_DELAY * 2.0**used)
    if budget == 0:
        return Decision(False, f"run.{word}_retries is 0")
    if used >= budget:
        return Decision(False, f"the {word} budget is used up ({budget})")
    return Decision(True, f"{word} {used + 1} of {budget}", delay)


class SliceDeleted(LaunchError):
    """The slice was deleted by a user, so the run must not recreate it: it would be billed."""

    exit_code = Exit.PREEMPTED


def decide_round(
    error: LaunchError, failed: int, seconds: float, *, limit: float, may_replace: bool | None
) -> Decision:
    """Returns what follows a failed round: give up (permanent error, or no time left for the delay), recreate the slice
    if it proves broken (hosts unreachable), or try again; the delay doubles with each failure, from 5 to 300 s.

    Args:
        error: Why it failed. Permanent is one that is not transient, and SliceDeleted.
        failed, seconds: How many rounds of this recovery have failed, and the time since the first did.
        limit: Seconds after which a recovery is given up (run.recovery_minutes).
        may_replace: Whether the slice may be deleted and recreated (run.replace_after). None, where the platform
            chooses the hosts of each attempt, forbids it too: the reason then does not advise to set the key.
    """
    if isinstance(error, SliceDeleted) or not error.transient:
        return Decision(False, "trying again does not help")
    delay = min(_LONGEST_DELAY, _FIRST_DELAY * 2.0 ** min(failed - 1, 10))
    if seconds + delay > limit:
        return Decision(False, f"tried for {seconds / 60:.0f} minutes (run.recovery_minutes)")
    unreachable = isinstance(error, HostsUnreachable)
    if unreachable and may_replace:
        return Decision(True, "recreating the slice if it proves broken (run.replace_after)", delay, replace=True)
    if unreachable and may_replace is not None:
        return Decision(True, "trying again; run.replace_after: 2 would recreate the slice", delay)
    return Decision(True, "trying again", delay)


def spent_so_far(recorded: Sequence[events.RunEvent]) -> Retries:
    """Returns the retries, of preemptions and of failures, that a run's events record, across launcher processes."""
    ends = [Kind(event.after) for event in recorded if isinstance(event, events.Recovering)]
    preemptions = sum(kind in _PREEMPTIONS for kind in ends)
    return Retries(preemptions, len(ends) - preemptions)


def bad_host(recorded: Sequence[events.RunEvent]) -> tuple[int, int]:
    """Returns the host that was the first cause of the last attempts' ends, and of how many in a row; (-1, 0) if the
    last had no single host as its cause. Skips attempts that did not start or vanished; stops at a replaced slice."""
    worker, count = -1, 0
    for event in reversed(recorded):
        if isinstance(event, events.SliceReplaced):
            break
        if isinstance(event, events.Ended) and event.verdict is not None:
            blamed = event.cause.worker if event.cause is not None else -1
            if event.outcome not in _OF_A_HOST or blamed < 0 or (count and blamed != worker):
                break
            worker, count = blamed, count + 1
    return worker, count


def last_slice_created(recorded: Sequence[events.RunEvent]) -> str:
    """Returns the creation time of the slice on which an attempt last started; "" if that is not known."""
    return next((event.slice_created for event in reversed(recorded) if isinstance(event, events.Started)), "")


def find_proof(last: events.Ended | None, slice_state: SliceState, *, blamed: bool, silent: float, limit: float) -> str:
    """Returns evidence, other than this machine's own connections, that hosts are broken; "" if there is none: Google's
    API reports trouble, other hosts lost a host too, the blamed host reported its own exit, or the trainer has written
    nothing to its bucket for `limit` seconds (run.unreachable_minutes).

    Args:
        last: The end of the last attempt that ran, if it ran on this slice; else None.
        blamed: Whether a host was the first cause of attempts; otherwise hosts can't be contacted now.
        silent: Seconds for which the trainer has written nothing; 0 if that is not known.
    """
    if not slice_state.ready or slice_state.health.startswith("UNHEALTHY"):
        return f"Google's API says {slice_state.trouble}"
    if last is not None and last.outcome in _OF_A_HOST and last.cause is not None:
        if last.outcome == Kind.HOST_LOST.value and last.symptoms:
            return "other hosts have lost a host too"
        if blamed and last.cause.exit_code is not None:
            return f"host {last.cause.worker} itself reported its end"
    return f"its trainer has written nothing for {silent / 60:.0f} minutes" if silent >= limit else ""


class Recovery:
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
        """Waits `delay` seconds. Then, unless `in_use` is False, sets it as `_check_slice` does, which asks the API
        (with `settle` for up to 60 s); None if the API gives no answer. Raises SliceDeleted, recorded as
        RecoveryGivenUp, if a user deleted the slice; RunStopped after a stop."""
        self.clock.sleep(delay)
        if self.in_use is False:
            return
        self.in_use = None
        try:
            self._check_slice(settle=settle)
        except SliceDeleted as error:
            ledger = self.session.ledger
            self.session.note(events.RecoveryGivenUp(ledger.state.attempt, str(error), "a user deleted it"))
            raise SliceDeleted(f"run {ledger.run_id}: {error}") from None
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
        """Sets `in_use`: whether the slice is READY (False where the platform chooses the hosts of each attempt).
        Raises SliceDeleted when two answers say that it is gone, or a JobSet is DELETED, and the API's error when it
        does not answer. With `settle`, says so and waits 60 s at most until the API says that the slice is not
        READY."""
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
        while True:
            try:
                slice_state = session.describe_slice(self.clock.sleep, doubted="DELETING")
            except LaunchError:
                if self.clock.monotonic() >= deadline:
                    raise
            else:
                if slice_state is None or slice_state.state == "DELETING":
                    raise SliceDeleted(SLICE_DELETED.what)
                self.in_use = slice_state.ready
                if not self.in_use or self.clock.monotonic() >= deadline:
                    return
            self.clock.sleep(_SETTLE_POLL_SECONDS)

    def _try(self) -> int:
        """Deletes a bad slice, makes the slice READY, starts the attempt, records Recovered and returns the attempt's
        number: one round. Only returns the number of an attempt that runs already. Raises RunStopped after a stop,
        SliceDeleted if the slice is deleted meanwhile, and other LaunchErrors if any of it fails."""
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
        session.note(events.Recovered(attempt, seconds))
        parts = ", ".join(f"{name} {value:.1f} s" for name, value in seconds.items())
        session.say(f": recovered in {started - self.begun:.1f} s ({parts})")
        return attempt

    def _wait_after(self, error: LaunchError) -> None:
        """Records the failed round and waits for the next, which recreates the slice if `decide_round` says so and a
        proof is found. Raises LaunchError, with what is billed, if `decide_round` gives up."""
        session, now = self.session, self.clock.monotonic()
        self.failed += 1
        self.first_failure = self.first_failure if self.failed > 1 else now
        replaces = session.provider.capabilities.replaces_hosts
        decision = decide_round(
            error,
            self.failed,
            now - self.first_failure,
            limit=session.config.run.recovery_minutes * 60,
            may_replace=session.config.run.replace_after is not None if replaces else None,
        )
        problem, attempt = str(error).splitlines()[0], session.ledger.state.attempt
        if not decision.retry:
            session.note(events.RecoveryGivenUp(attempt, problem, decision.reason))
            raise LaunchError(
                f"run {session.ledger.run_id} is not recovered ({decision.reason}): {error}\n"
                f"  {describe_bill(session)}`tpu-launch run` resumes the run",
                exit_code=error.exit_code,
            ) from error
        if decision.replace:  # as `create` saw it: by now another command may have replaced it
            self.replace, self.bad = problem, session.provider.identity()[0]
        session.say(f": not recovered yet: {problem}; {decision.reason} in {decision.delay:.0f} s")
        session.note(events.RoundFailed(attempt, problem, decision.reason, decision.delay))
        if isinstance(error, HostsUnreachable):
            self.in_use = True
        self.wait(decision.delay, settle=False)
        if not session.ledger.state.phase.is_open:  # else it may run, and saves first
            budget.require_left(session)

    def _delete_slice_if_bad(self) -> None:
        """Records SliceReplaced and deletes the slice if its hosts can't be used or one of them fails repeatedly, if
        run.replace_after allows it, `find_proof` gives a proof, and no other slice has its name by now; else keeps it.
        Also finishes a deletion that a killed process had recorded. Raises LaunchError, BadInput, RunStopped."""
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
        doomed = session.ledger.last(events.SliceReplaced, events.AttemptBegan)
        if isinstance(doomed, events.SliceReplaced) and doomed.slice_created:  # by a process that was killed meanwhile
            session.delete_slice(doomed.slice_created)
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
        ends = [event for event in session.ledger.events() if isinstance(event, events.Ended) and event.verdict]
        last = ends[-1] if ends else None
        if last_slice_created(session.ledger.events()) not in ("", slice_state.created):
            last = None  # that attempt ran on another slice
        limit = session.config.run.unreachable_minutes * 60
        return find_proof(last, slice_state, blamed=blamed, silent=now - self.changed, limit=limit)


def _list_files(session: Session) -> Sequence[storage.Stat]:
    """Returns the trainer's files in the run's bucket; [] without any, for a local output, or without an answer."""
    trainer = session.config.trainer
    if trainer is not None and storage.is_remote(trainer.output):
        with contextlib.suppress(storage.StorageError):
            folder = storage.join(trainer.output, session.ledger.run_id)
            own = storage.join(folder, FOLDER) + "/"
            return [found for found in storage.listing(folder) if not found.url.startswith(own)]
    return []


def describe_bill(session: Session) -> str:
    """Asks the API; returns what is still billed, with "; " at its end, or "" where the run has no slice of its own."""
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
