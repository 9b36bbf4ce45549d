"""Decides what follows an attempt that ended, and a round of a recovery that failed. Pure.

There are two retry budgets, because two different things go wrong. *Preemptions* (the slice was taken away, a host or
the connection between hosts was lost, the trainer was asked to stop by its machine and saved) are the price of cheap
capacity: another attempt helps.
*Failures* are the program's own: another attempt rarely helps. A run that the user stopped or that is configured
wrongly is never started again.

A budget is spent once for each attempt that ended and is followed by another one (`decide`). What it takes until that
one runs on all hosts is one recovery, in rounds: make the slice READY, start the attempt. A round that fails costs time
and no budget (`decide_round`).
"""

import enum
from collections.abc import Sequence
from dataclasses import dataclass

from launcher.errors import Exit, HostsUnreachable, LaunchError
from launcher.provider import SliceState
from launcher.run.events import NOT_STARTED, VANISHED, AttemptBegan, Ended, Recovering, RunEvent, SliceReplaced, Started
from launcher.run.verdict import Kind, Verdict

_PREEMPTIONS = frozenset({Kind.PREEMPTED, Kind.HOST_LOST, Kind.CONNECTION_LOST, Kind.SAVED})
_LEAST_OF_CONNECTIONS = 3  # attempts after a lost connection: the slice stays, and a resumed attempt costs little
_OF_A_HOST = frozenset({Kind.HOST_LOST.value, Kind.FAILED.value})  # outcomes that a single host may have caused
_FIRST_DELAY = 5.0  # seconds before the first new attempt after a failure; doubles
_LONGEST_DELAY = 300.0
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
    """Whether another attempt follows, and why."""

    retry: bool
    reason: str
    delay: float = 0.0  # seconds to wait before the recovery


def decide(verdict: Verdict, spent: Retries, budgets: Retries, *, stop_requested: bool) -> Decision:
    """Decides whether another attempt follows one that ended with `verdict`, which `spent` does not count yet. Never
    after a finished or stopped run, a deleted slice or bad input; after a preemption at once, after a failure with a
    delay that doubles, both within their budget."""
    kind = verdict.kind
    assert kind.ended
    if kind is Kind.FINISHED:
        return Decision(False, "finished")
    if stop_requested or kind is Kind.STOPPED:
        return Decision(False, "the run was stopped")
    if kind is Kind.DELETED:
        return Decision(False, "the slice was deleted")
    if kind is Kind.BAD_INPUT:
        return Decision(False, "trying again changes nothing")
    if kind in _PREEMPTIONS:
        least = _LEAST_OF_CONNECTIONS if kind is Kind.CONNECTION_LOST else 0
        return _retry_within_budget("preemption", spent.preemptions, max(budgets.preemptions, least), 0.0)
    delay = min(_LONGEST_DELAY, _FIRST_DELAY * 2.0**spent.failures)
    return _retry_within_budget("failure", spent.failures, budgets.failures, delay)


class SliceDeleted(LaunchError):
    """The slice was deleted by a user, so the run must not recreate it: it would be billed."""

    exit_code = Exit.PREEMPTED


class NextRound(enum.Enum):
    """The step after a round that failed."""

    AGAIN = "again"
    REPLACE = "replace"  # again, after the slice was deleted
    GIVE_UP = "give up"


@dataclass(frozen=True)
class RoundDecision:
    """The step after a round that failed, and why."""

    next: NextRound
    reason: str
    delay: float = 0.0  # seconds to wait before the next round


def decide_round(
    error: LaunchError, failed: int, seconds: float, *, limit: float, may_replace: bool | None
) -> RoundDecision:
    """Returns what follows a failed round: give up (permanent error, or no time left), recreate the slice (hosts
    unreachable), or try again; the delay doubles with each failure.

    Args:
        error: Why it failed. Permanent is one that is not transient, and SliceDeleted.
        failed: Number of rounds of this recovery that have failed.
        seconds: Time since the first of them failed.
        limit: Seconds after which a recovery is given up (run.recovery_minutes).
        may_replace: Whether the slice may be deleted and recreated (run.replace_after). None, where the platform
            chooses the hosts of each attempt, forbids it too: the reason then does not advise to set the key.
    """
    if isinstance(error, SliceDeleted) or not error.transient:
        return RoundDecision(NextRound.GIVE_UP, "trying again does not help")
    delay = min(_LONGEST_DELAY, _FIRST_DELAY * 2.0 ** min(failed - 1, 10))
    if seconds + delay > limit:
        return RoundDecision(NextRound.GIVE_UP, f"tried for {seconds / 60:.0f} minutes (run.recovery_minutes)")
    unreachable = isinstance(error, HostsUnreachable)
    if unreachable and may_replace:
        return RoundDecision(NextRound.REPLACE, "recreating the slice if it proves broken (run.replace_after)", delay)
    if unreachable and may_replace is not None:
        return RoundDecision(NextRound.AGAIN, "trying again; run.replace_after: 2 would recreate the slice", delay)
    return RoundDecision(NextRound.AGAIN, "trying again", delay)


def spent_so_far(events: Sequence[RunEvent]) -> Retries:
    """Returns the retries that a run's events record: the budgets hold for the run, across launcher processes."""
    ends = [Kind(event.after) for event in events if isinstance(event, Recovering)]
    preemptions = sum(kind in _PREEMPTIONS for kind in ends)
    return Retries(preemptions, len(ends) - preemptions)


def bad_host(events: Sequence[RunEvent]) -> tuple[int, int]:
    """Returns the host that was the first cause of the last attempts, and of how many in a row; (-1, 0) if the last one
    had no single host as its cause, or the slice was replaced after it. Counts only attempts since a replacement."""
    worker, count = -1, 0
    for event in reversed(events):
        if isinstance(event, SliceReplaced):
            break
        if isinstance(event, Ended) and event.outcome not in (NOT_STARTED, VANISHED):
            blamed = event.cause.worker if event.cause is not None else -1
            if event.outcome not in _OF_A_HOST or blamed < 0 or (count and blamed != worker):
                break
            worker, count = blamed, count + 1
    return worker, count


def last_slice_created(events: Sequence[RunEvent]) -> str:
    """Returns the creation time of the slice on which an attempt last started; "" if that is not known."""
    return next((event.slice_created for event in reversed(events) if isinstance(event, Started)), "")


def unfinished_replacement(events: Sequence[RunEvent]) -> str:
    """Returns the creation time of the slice of a SliceReplaced that no attempt has followed; "" if there is none."""
    last = next((event for event in reversed(events) if isinstance(event, SliceReplaced | AttemptBegan)), None)
    return last.slice_created if isinstance(last, SliceReplaced) else ""


def find_proof(last: Ended | None, slice_state: SliceState, *, blamed: bool, silent: float, limit: float) -> str:
    """Returns evidence, other than this machine's own connections, that hosts are broken; "" if there is none.

    Evidence is: Google's API reports trouble, other hosts lost a host too, the blamed host reported its own exit, or
    the trainer wrote nothing for `limit` seconds.

    Args:
        last: The end of the last attempt that ran; None before the first.
        slice_state: The slice as Google's API describes it.
        blamed: Whether a host was the first cause of attempts; otherwise hosts can't be contacted now.
        silent: Seconds for which the trainer has written nothing to its bucket; 0 if that is not known.
        limit: Seconds of such silence that are a proof (run.unreachable_minutes).
    """
    if not slice_state.ready or slice_state.health.startswith("UNHEALTHY"):
        return f"Google's API says {slice_state.trouble}"
    if last is not None and last.outcome in _OF_A_HOST and last.cause is not None:
        if last.outcome == Kind.HOST_LOST.value and last.symptoms:
            return "other hosts have lost a host too"
        if blamed and last.cause.exit_code is not None:
            return f"host {last.cause.worker} itself reported its end"
    return f"its trainer has written nothing for {silent / 60:.0f} minutes" if silent >= limit else ""


def _retry_within_budget(word: str, spent: int, budget: int, delay: float) -> Decision:
    """Returns the decision to retry, unless the budget of that name ("preemption", "failure") is spent."""
    if budget == 0:
        return Decision(False, f"run.{word}_retries is 0")
    if spent >= budget:
        return Decision(False, f"the {word} budget is used up ({budget})")
    return Decision(True, f"{word} {spent + 1} of {budget}", delay)
