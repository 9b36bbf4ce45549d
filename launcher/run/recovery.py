"""What to do when an attempt has ended, and when a recovery does not succeed at once. Pure.

There are two retry budgets, because two different things go wrong. *Preemptions* (the slice was taken away, a host was
lost, the trainer was asked to stop by its machine and saved) are the price of cheap capacity: another attempt helps.
*Failures* are the program's own: another attempt rarely helps. A run that its owner stopped, or that was configured
wrongly, is never started again.

A budget is spent once for each attempt that ended and is followed by another one (`decide`). What it takes until that
one runs on all hosts is one recovery, in rounds: make the slice READY, start the attempt. A round that fails costs time
and no budget (`decide_round`).
"""

from __future__ import annotations

import enum
from collections.abc import Sequence
from dataclasses import dataclass

from launcher.errors import Exit, HostsUnreachable, LaunchError
from launcher.run.events import NOT_STARTED, VANISHED, Ended, Event, Recovering, SliceReplaced
from launcher.run.verdict import Kind, Verdict

_PREEMPTIONS = frozenset({Kind.PREEMPTED, Kind.HOST_LOST, Kind.SAVED})
_OF_A_HOST = frozenset({Kind.HOST_LOST.value, Kind.FAILED.value})  # outcomes that one host may be to blame for
_FIRST_DELAY = 5.0  # seconds before the first new attempt after a failure; doubles
_LONGEST_DELAY = 300.0
SETTLE_SECONDS = 60.0
"""How long the API may go on calling a slice READY that it is taking away: a trainer that saved although nobody here
asked it to was stopped by its machine."""


class Next(enum.Enum):
    """What follows an attempt."""

    END = "end"
    RECOVER = "recover"  # make the slice READY again, as the API demands, and start the next attempt


@dataclass(frozen=True)
class Budgets:
    """How many attempts may be started because of each, in the whole run."""

    preemptions: int = 0
    failures: int = 0


@dataclass(frozen=True)
class Spent:
    """How much of the budgets is used."""

    preemptions: int = 0
    failures: int = 0

    def plus(self, kind: Kind) -> Spent:
        """With one more attempt, started because of that end."""
        if kind in _PREEMPTIONS:
            return Spent(self.preemptions + 1, self.failures)
        return Spent(self.preemptions, self.failures + 1)


@dataclass(frozen=True)
class Decision:
    """What follows an attempt, and why."""

    next: Next
    reason: str  # for a person
    delay: float = 0.0  # seconds to wait before recovering


def decide(verdict: Verdict, spent: Spent, budgets: Budgets, *, stop_requested: bool) -> Decision:
    """What follows an attempt that ended with `verdict`. `spent` does not count it yet."""
    kind = verdict.kind
    assert kind.ended
    if kind is Kind.FINISHED:
        return Decision(Next.END, "finished")
    if stop_requested or kind is Kind.STOPPED:
        return Decision(Next.END, "its owner stopped it")
    if kind is Kind.DELETED:
        return Decision(Next.END, "somebody deleted the slice")
    if kind is Kind.BAD_INPUT:
        return Decision(Next.END, "trying again changes nothing")
    if kind in _PREEMPTIONS:
        return _within("preemption", spent.preemptions, budgets.preemptions, 0.0)
    delay = min(_LONGEST_DELAY, _FIRST_DELAY * 2.0**spent.failures)
    return _within("failure", spent.failures, budgets.failures, delay)


class SliceDeleted(LaunchError):
    """Somebody deleted the slice of a run: nobody shall create it again for the run, and pay for it."""

    exit_code = Exit.PREEMPTED


class Trouble(enum.Enum):
    """Why a round of a recovery failed."""

    PREEMPTED = "preempted"  # the slice was taken away again
    UNREACHABLE = "unreachable"  # the slice is READY, and for long not all of its hosts could be contacted
    TRANSIENT = "transient"  # it may pass: the API, a network, a host, a stock-out
    PERMANENT = "permanent"  # somebody must change something: a permission, a quota, the file; or deleted the slice


def classify(error: LaunchError) -> Trouble:
    """What an error means for a recovery."""
    if isinstance(error, SliceDeleted):
        return Trouble.PERMANENT
    if error.exit_code == Exit.PREEMPTED:
        return Trouble.PREEMPTED
    if isinstance(error, HostsUnreachable):
        return Trouble.UNREACHABLE
    return Trouble.TRANSIENT if error.transient else Trouble.PERMANENT


class NextRound(enum.Enum):
    """What follows a round that failed."""

    AGAIN = "again"
    REPLACE = "replace"  # again, with a slice that is deleted and created
    GIVE_UP = "give up"


@dataclass(frozen=True)
class RoundDecision:
    """What follows a round that failed, and why."""

    next: NextRound
    reason: str  # for a person
    delay: float = 0.0  # seconds to wait before the next round


def decide_round(
    trouble: Trouble, failed: int, seconds: float, *, limit: float, may_replace: bool | None
) -> RoundDecision:
    """What follows a round of a recovery that failed.

    Args:
        trouble: Why it failed.
        failed: How many rounds of this recovery have failed.
        seconds: Time since the first of them failed.
        limit: Seconds for which a recovery is tried again (run.recovery_minutes).
        may_replace: Whether the slice may be deleted and created again (run.replace_after); None where that makes no
            sense.
    """
    if trouble is Trouble.PERMANENT:
        return RoundDecision(NextRound.GIVE_UP, "trying again does not help")
    delay = min(_LONGEST_DELAY, _FIRST_DELAY * 2.0 ** min(failed - 1, 10))
    if seconds + delay > limit:
        return RoundDecision(NextRound.GIVE_UP, f"tried for {seconds / 60:.0f} minutes (run.recovery_minutes)")
    if trouble is Trouble.UNREACHABLE and may_replace:
        return RoundDecision(NextRound.REPLACE, "recreating the slice (run.replace_after)", delay)
    if trouble is Trouble.UNREACHABLE and may_replace is not None:
        return RoundDecision(NextRound.AGAIN, "trying again; run.replace_after: 2 would recreate the slice", delay)
    return RoundDecision(NextRound.AGAIN, "trying again", delay)


def spent_so_far(events: Sequence[Event]) -> Spent:
    """What a run's events say was spent: the budgets hold for the run, however often the launcher was started."""
    spent = Spent()
    for event in events:
        if isinstance(event, Recovering):
            spent = spent.plus(Kind(event.after))
    return spent


def bad_host(events: Sequence[Event]) -> tuple[int, int]:
    """The host that was the first cause of the last attempts, and of how many in a row; (-1, 0) when none was.

    A slice that was created again starts afresh.
    """
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


def _within(word: str, spent: int, budget: int, delay: float) -> Decision:
    if budget == 0:
        return Decision(Next.END, f"run.{word}_retries is 0")
    if spent >= budget:
        return Decision(Next.END, f"the {word} budget is used up ({budget})")
    return Decision(Next.RECOVER, f"{word} {spent + 1} of {budget}", delay)
