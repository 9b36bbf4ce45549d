"""The dollars of a run (`run.budget`): what its attempts have cost by list prices, and the end when they are spent.

Counts each attempt's slice from the attempt's begin to its end, and each recovery until it begins to delete the slice,
or is stopped, unless the slice was preempted or deleted before. A slice that is taken counts until that is seen, in a
recovery to its end. The price is recorded when the attempt begins: the sum does not change with the file or the table
of prices.
"""

from collections.abc import Sequence

from launcher import costs
from launcher.config import Config
from launcher.errors import BadInput, Exit, LaunchError
from launcher.home import hold_shared
from launcher.run import events
from launcher.run.events import Entry
from launcher.run.session import Session, deletion_mark, runs_on_slice
from launcher.run.verdict import Kind
from training.machine import parse_time

_SLICE_LOST = (Kind.PREEMPTED.value, Kind.DELETED.value)
_CHANGES = events.AttemptBegan, events.RunStopRequested, events.Ended, events.RecoveryGivenUp, events.SliceReplaced


def spent(entries: Sequence[Entry], now: float) -> float:
    """Returns the dollars of a run with these events until `now` (Unix seconds), by recorded prices: each attempt's
    slice, also while a recovery that is not stopped keeps it. Unknown prices count 0."""
    total = rate = price = begun = 0.0  # rate, price: dollars a second now, and of the last attempt's slice
    is_open = is_lost = is_stopped = False  # the last attempt, its slice, the run
    for entry in entries:
        time, event = parse_time(entry.time) or begun, entry.event
        if isinstance(event, events.Recovering | events.RoundFailed):
            rate = 0.0 if is_lost or (is_stopped and not is_open) else price  # since the attempt's end: it stays billed
        elif isinstance(event, _CHANGES):
            total, begun = total + rate * max(0.0, time - begun), time
            if isinstance(event, events.AttemptBegan):
                rate = price = (event.dollars_an_hour or 0.0) / 3600
                is_open, is_lost, is_stopped = True, False, False
            elif isinstance(event, events.RunStopRequested):
                rate, is_stopped = rate if is_open else 0.0, True
            else:
                rate, is_open = 0.0, False
                is_lost = not isinstance(event, events.Ended) or event.outcome in _SLICE_LOST
    return total + rate * max(0.0, now - begun)


def is_spent(session: Session) -> bool:
    """Returns whether the budget stopped the run and its slice may still be there, or `exceeds` is true now. Raises
    BadInput as `Ledger.entries`."""
    entries, now = session.ledger.entries(), session.machine.clock.time()
    return session.ledger.state.budget_spent or exceeds(session.config, entries, now)


def exceeds(config: Config, entries: Sequence[Entry], now: float) -> bool:
    """Returns whether a run with these events has spent run.budget, or would within run.stop_seconds after `now` (Unix
    seconds), as a save costs; False without a budget."""
    budget = config.run.budget
    return budget is not None and spent(entries, now + config.run.stop_seconds) >= budget


def require_prices(config: Config) -> None:
    """Raises BadInput if run.budget is set and the table of prices lacks a candidate; asks no API."""
    for candidate in config.candidates if config.run.budget is not None else ():
        if costs.per_hour(candidate.accelerator_type, candidate.zone, candidate.capacity) is None:
            raise BadInput(
                f"run.budget: the price of {candidate} is not in the table of {costs.AS_OF}: remove the candidate, or "
                "the budget"
            )


def require_left(session: Session) -> None:
    """If the run's budget is spent, deletes its slice as `take_down` does and raises LaunchError (Exit.STOPPED)."""
    if is_spent(session):
        take_down(session)
        raise LaunchError(
            f"run {session.ledger.run_id} has spent its budget ({describe(session)}): raise run.budget to go on",
            exit_code=Exit.STOPPED,
        )


def request_stop(session: Session, attempt: int, created: str = "") -> None:
    """Appends to the ledger a request to stop the run for its budget; stops nothing itself. `created`: the creation
    time of the slice to delete then ("": as the provider knows it, without asking the API). Raises NotRecorded."""
    stop_seconds, created = session.config.run.stop_seconds, created or session.provider.identity()[0]
    session.ledger.append(events.RunStopRequested(attempt, stop_seconds, by_budget=True, slice_created=created))


def take_down(session: Session, created: str = "") -> None:
    """Requests a stop by the budget, unless one is recorded, with the creation time of the run's slice (`created`; "":
    of the slice there is now), deletes the slice and records RecoveryGivenUp. Keeps a slice that was created at another
    time (a killed process may have deleted the run's), or has another supervised run. Raises LaunchError."""
    ledger, attempt = session.ledger, max(0, session.ledger.state.attempt)
    ledger.confirm()
    if not ledger.state.budget_spent:
        request_stop(session, attempt, created)
    stops = [event for event in ledger.events() if isinstance(event, events.RunStopRequested) and event.by_budget]
    with hold_shared(deletion_mark(session.config)):  # from here on no run begins on the slice
        others = runs_on_slice(session.config, session.context.home, session.machine)
        user = next((other.run_id for other in others if other.run_id != ledger.run_id and other.supervised()), None)
        what = "deleting its slice" if user is None else f"its slice is left to run {user}"
        session.say(f": the budget is spent ({describe(session)}): {what}; raise run.budget to go on")
        if user is None:
            session.delete_slice(stops[-1].slice_created)
    ledger.append(events.RecoveryGivenUp(attempt, "the budget is spent", "no slice is left" if user is None else what))


def describe(session: Session) -> str:
    """Returns how much of run.budget, which must be set, is spent: "about $3.10 of $10.00, by list prices of ...".
    Raises BadInput as `Ledger.entries`."""
    dollars = spent(session.ledger.entries(), session.machine.clock.time())
    return f"about ${dollars:.2f} of ${session.config.run.budget:.2f}, by list prices of {costs.AS_OF}"
