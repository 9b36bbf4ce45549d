"""`tpu-launch supervise gs://bucket/runs`: takes over every unfinished run of a folder that no process supervises.

Looks at the runs every few seconds, and starts a process for each whose lease has expired or was released
(`tpu-launch supervise gs://bucket/runs/ID`, which is `take_over`). A process ends when it loses its lease, so each run
has its own.
"""

import contextlib
import sys
from collections.abc import Callable
from dataclasses import dataclass, field

from launcher.errors import CommandMissing, Exit, LaunchError
from launcher.run import budget, events, specification
from launcher.run.bucket import RunBucket
from launcher.run.launch import run_attempts
from launcher.run.ledger import Ledger
from launcher.run.recovery import Retries, decide, last_slice_created, spent_so_far
from launcher.run.session import Context, Outcome, Session, import_run, open_session, supervising
from launcher.run.start import observe_open_attempt, require_inputs
from launcher.run.state import Phase
from launcher.run.verdict import Verdict
from launcher.shell import Result
from training import storage
from training.machine import Future

POLL_SECONDS = 15.0
_FIRST_PAUSE, _LONGEST_PAUSE = 15.0, 300.0  # seconds, before a run whose process failed is taken over again
_LOOKS_AT_ONCE = 16
_PROCESS_SECONDS = 30 * 86400.0  # after which a run's process ends, and another one takes over


def is_unfinished(ledger: Ledger, now: float) -> bool:
    """Returns whether a run needs a supervisor: an attempt may be running, a recovery has begun, the last attempt's end
    calls for another one, or the budget is spent and the slice may still exist. False for a run that was stopped, given
    up or never started. `now`: Unix seconds. Raises BadInput for a run of another version."""
    state = ledger.state
    if state.phase.is_open or state.recovering is not None or (state.budget_spent and state.phase is Phase.ENDED):
        return True
    return state.phase is Phase.ENDED and not state.stop_requested and _follows(ledger, now)


def _follows(ledger: Ledger, now: float) -> bool:
    """Returns whether another attempt follows the last recorded end or failed round, by budgets and the specification
    in the run's folder, which it reads; False if neither is recorded, or a recovery was given up since. Also True if
    run.budget is spent, as the slice is to be deleted then. Raises BadInput for a missing or damaged specification, or
    a run of another version. `now`: Unix seconds."""
    last = ledger.last(events.Ended, events.RoundFailed, events.RecoveryGivenUp)
    if not isinstance(last, events.Ended):
        return isinstance(last, events.RoundFailed)
    if (verdict := last.verdict) is None:
        return last.outcome == events.VANISHED or (last.cause is not None and last.cause.what == events.INTERRUPTED)
    config = specification.read(ledger.folder).config()
    budgets = Retries(config.run.preemption_retries, config.run.failure_retries)
    exceeds = budget.exceeds(config, ledger.entries(), now)  # then its slice is to be deleted
    return exceeds or decide(verdict, spent_so_far(ledger.events()), budgets, stop_requested=False).retry


def take_over(ledger: Ledger, context: Context) -> Outcome | None:
    """Supervises a run to its end: watches the attempt that is running, or starts the next one, by the run's
    specification and budgets. Deletes unused requests for the slice and, if run.budget is spent, the slice. Returns how
    the last attempt ended; None then, or if the run needs no supervisor. Raises LaunchError if another process
    supervises the run (Exit.CONFLICT), or the run could not be recovered; BadInput if the next attempt lacks secrets or
    the overlay."""
    with supervising(ledger, context.machine, context.output.say):
        if not is_unfinished(ledger, context.machine.clock.time()):
            return None
        session = open_session(context, ledger)
        with contextlib.closing(session.provider):
            session.say(f": taken over by {ledger.state.supervisor}")
            session.provider.withdraw_unused()
            with contextlib.suppress(LaunchError):
                session.provider.describe()  # finds out which candidate the slice is
            if not ledger.state.phase.is_open and budget.is_spent(session):
                # The slice that has the name now may be a later run's; a recovery may have made it.
                last = [event for event in ledger.events() if event.attempt == ledger.state.attempt]
                budget.take_down(session, "" if ledger.state.recovering else last_slice_created(last))
                return None
            if missing := session.describe_missing_secrets():
                first = next(event.holder for event in ledger.events() if isinstance(event, events.Supervised))
                session.say(
                    f": {missing}; no other attempt starts without them: {ledger.record.user} set them on "
                    f"{first.partition(':')[0]} and can continue there with `tpu-launch run`; or set them in this "
                    "process's environment, from Secret Manager"
                )
            attempt, verdict = _last_attempt(session)
            if attempt is None:
                require_inputs(session)
            return run_attempts(session, attempt, verdict, in_rounds=True)


def _last_attempt(session: Session) -> tuple[int | None, Verdict | None]:
    """Returns the open attempt (no verdict), or the ended one and its verdict; (None, None) if the next is to be
    started or a recovery to go on. Asks the hosts about an open attempt: ends it if its start was interrupted, and
    records its end if its containers, or the slice, are gone. Raises LaunchError, BadInput."""
    ledger, state = session.ledger, session.ledger.state
    if not state.phase.is_open:
        ended = ledger.last(events.Ended) if state.recovering is None else None
        return (state.attempt, ended.verdict) if ended is not None and ended.verdict is not None else (None, None)
    return (None if observe_open_attempt(session) is None else state.attempt), None


@dataclass
class _Child:
    """The process of one run."""

    end: Callable[[], None] = lambda: None
    result: Future[Result] | None = None
    pause: float = _FIRST_PAUSE
    next_start: float = 0.0  # monotonic clock
    settled: int = 0  # generation of the run's lease when nothing was left to do, or a program was missing here
    over: bool = False  # the run has finished; the supervisor no longer looks at it
    problem: str = ""  # the last one that was said


@dataclass
class Supervisor:
    """The processes that supervise the runs of one folder."""

    folder: str
    context: Context
    require_programs: Callable[[str], None]
    """Raises CommandMissing when a program that the provider of that name needs is not installed."""
    _children: dict[str, _Child] = field(default_factory=dict)

    def watch(self) -> None:
        """Starts a process for each unsupervised run of the folder, looking every 15 s. Returns after Ctrl-C, which
        ends these processes; the runs go on on their hosts, and their leases are released."""
        say, clock = self.context.output.say, self.context.machine.clock
        say(f"supervising the runs of {self.folder}")
        try:
            while True:
                try:
                    names = storage.folders(self.folder)
                except storage.StorageError as error:
                    say(f"{self.folder} can't be read, trying again: {error}")
                    names = []
                children = [(name, self._children.setdefault(name, _Child())) for name in names]
                needed = self.context.machine.threads.map(self._look, children, at_once=_LOOKS_AT_ONCE)
                for name, child in (each for each, is_needed in zip(children, needed, strict=True) if is_needed):
                    self._start(name, child)
                clock.sleep(POLL_SECONDS)
        except KeyboardInterrupt:
            running = [child for child in self._children.values() if child.result and not child.result.done()]
            say(f"ending: {len(running)} runs continue without this supervisor")
            self.context.machine.threads.map(lambda child: child.end(), running, at_once=len(running))

    def _look(self, named: tuple[str, _Child]) -> bool:
        """Says how a run's process has ended; returns whether the run (its name, its child) needs one now. An error is
        said once until it changes, and the run then needs none."""
        name, child = named
        if child.result is not None and child.result.done():
            self._report_end(name, child)
        if child.result is not None or child.over or self.context.machine.clock.monotonic() < child.next_start:
            return False
        try:
            needed, child.problem = self._needs_process(name, child), ""
        except (LaunchError, storage.StorageError, OSError, ValueError, LookupError, TypeError) as error:
            needed = False  # a full disk, or a lease or a record that is damaged, must not end the others
            if str(error) != child.problem:
                self.context.output.say(f"run {name}: its ledger can't be read: {error}")
            child.problem = str(error)
        return needed

    def _needs_process(self, name: str, child: _Child) -> bool:
        """Returns whether the run is unfinished, its lease has expired or was released (False if it never had one), and
        no program that it needs is missing here, else says which; may wait 30 s. Copies a run with such a lease here.
        Notes in `child` the lease for which there is nothing to do: until it changes, the answer is False.
        Raises LaunchError, BadInput, StorageError (also for a damaged lease); ValueError, LookupError or TypeError for
        a damaged record."""
        url, machine = storage.join(self.folder, name), self.context.machine
        lease = RunBucket.of_run(url).judge_lease(machine.clock, seen=child.settled)
        if lease is None or lease.is_live:
            return False
        ledger = import_run(self.context.home, machine, url, overlays=False)
        if is_unfinished(ledger, machine.clock.time()):
            try:
                self.require_programs(ledger.record.provider)
                return True
            except CommandMissing as error:
                self.context.output.say(f"run {name}: left to supervisors elsewhere: {error}")
        child.settled, child.over = lease.generation, ledger.state.phase is Phase.FINISHED
        return False

    def _start(self, name: str, child: _Child) -> None:
        """Runs `tpu-launch supervise` for the run in a thread, and says its lines. Sets `child.result`, which is done
        when the process ends; the thread sets `child.end`, which ends it, once it has started. Returns at once."""
        say, machine = self.context.output.say, self.context.machine
        argv = [sys.executable, "-m", "launcher.cli", "supervise", storage.join(self.folder, name)]

        def keep_end(end: Callable[[], None]) -> None:
            child.end = end

        def run() -> Result:
            def pass_on(line: str) -> None:
                if text := (line.partition("s  ")[2] or line).strip():  # without the seconds since the process began
                    say(text if text.startswith("run ") else f"run {name}: {text}")

            return machine.stream(argv, pass_on, timeout=_PROCESS_SECONDS, on_start=keep_end)

        say(f"run {name}: no process supervises it: taking over")
        child.result = machine.threads.submit(run)

    def _report_end(self, name: str, child: _Child) -> None:
        """Says how a run's process ended, and sets when the next one may start: 15 s from now after exit code 0, else
        after twice the last pause (300 s at most)."""
        assert child.result is not None
        error = child.result.exception()
        code = None if error is not None else child.result.result().returncode
        self.context.output.say(f"run {name}: its process ended {f'with {code}' if error is None else error}")
        child.pause = _FIRST_PAUSE if code == Exit.OK else min(2 * child.pause, _LONGEST_PAUSE)
        child.next_start = self.context.machine.clock.monotonic() + child.pause
        child.result = None
