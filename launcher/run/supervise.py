"""The supervision of one attempt: observe all hosts, judge, act.

One task a host polls the host; the main task delivers log lines, judges, and when the attempt has ended stops the
containers that still run, fetches the last lines and removes the containers. Supervision holds no state that matters:
if its process is killed, the run goes on, and another process attaches to it.
"""

import contextlib
import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace

from launcher.errors import BadInput, LaunchError
from launcher.masking import SecretMasker
from launcher.provider import HostReport, Observation, SliceState
from launcher.run import budget, events, post_mortem
from launcher.run.hang import blame_silent_host, explain_stall
from launcher.run.ledger import Ledger
from launcher.run.logs import AttemptLogs, next_page
from launcher.run.progress import HostsProgress, judge_stall
from launcher.run.session import Session
from launcher.run.state import Phase, recorded_ends, recorded_verdict
from launcher.run.verdict import RECREATED, UNSEEN, HostView, Kind, Limits, Verdict, describe_exit, explain, judge
from training.machine import Queue
from training.telemetry.progress_line import slowest

OBSERVE_EVERY = 1.0  # seconds between two observations of a host
_OBSERVATIONS_A_SECOND = 16  # of all hosts together, so that the load does not grow with the slice
_INBOX_SIZE = 64  # an observation may hold LOG_BYTES: pollers that are faster than this machine must wait
_LONG_TURN_SECONDS, _STANDSTILL_SECONDS = 1.0, 10.0  # a turn of the main task takes a fraction of a second
_INBOX_SECONDS = 0.25  # how long the main task waits for an answer before it judges again
_DESCRIBE_SLICE_EVERY = 15.0  # seconds between two API calls while a host is out of reach
_PROGRESS_EVERY = 5.0  # seconds between two readings of a host's lines of progress
_STOP_AGAIN_SECONDS = 5.0  # before hosts that were missed are stopped again
_API_GAP = 60.0  # seconds between two answers of the API beyond which the time between them does not count
_COUNT_EVERY = 5.0  # seconds between two counts of the run's dollars
_WARN_EVERY = 30.0  # seconds between two warnings that no host answers
_NO_POST_MORTEM = (Kind.FINISHED, Kind.SAVED, Kind.BAD_INPUT, Kind.STOPPED)
_FAILURE_GRACE = 3  # seconds between SIGTERM and SIGKILL for hosts that only wait for a dead peer
_AT_ONCE = 64  # hosts whose last lines are fetched at once: an observation of each is in memory


@dataclass(frozen=True)
class SliceAnswer:
    """The API's answer about the slice."""

    state: str | None  # None: the slice does not exist
    trouble: str = ""  # problems that the API reports


class StartInterrupted(BadInput):
    """The start of an attempt was interrupted: it does not run on all hosts, and would be watched for ever."""

    def __init__(self, run_id: str, attempt: int) -> None:
        super().__init__(
            f"run {run_id}: attempt {attempt} was interrupted while it was started, and does not run on all hosts: "
            "`tpu-launch run` ends it and starts the next"
        )


def supervise(session: Session, attempt: int) -> Verdict:
    """Watches an attempt to its end, ends it on the hosts that answer, records its end, and removes its containers.
    Explains a stall before it ends the attempt, and writes a post-mortem of an attempt that failed. KeyboardInterrupt
    leaves everything running. Records as Orphaned the hosts on which a container may be left. Raises StartInterrupted
    if a host says that its container never started, or a cluster that the attempt's JobSet was never made; NotRecorded;
    BadInput, at once, if the env file can't be read."""
    ledger = session.ledger
    secrets, unknown = session.secret_values(), session.unknown_secrets()  # as of now: an env file may change later
    masker = SecretMasker(secrets)
    supervision = _Supervision(session, attempt)
    verdict, reachable = supervision.watch()
    if verdict != supervision.judged:
        running = [worker for worker in reachable if not supervision.views[worker].ended]
        verdict = blame_silent_host(ledger, attempt, verdict, running)
        if verdict.kind is Kind.STALLED:
            since = supervision.progress.moved(supervision.last_line)
            verdict = explain_stall(session, attempt, verdict, supervision.progress.lines, since, masker)
    orphaned = set(session.workers) - set(reachable)
    if verdict.kind not in (Kind.FINISHED, Kind.SAVED):
        orphaned |= _end_on_hosts(session, attempt, verdict, reachable)
    verdict = supervision.confirm_lost(verdict)
    session.machine.threads.map(supervision.logs.fetch_rest, reachable, at_once=_AT_ONCE)
    supervision.progress.draw()
    if orphaned:  # Record Orphaned before Ended: readers of Ended report that nothing runs.
        ledger.append(events.Orphaned(attempt, session.container(attempt), tuple(sorted(orphaned))))
    shareable = ledger.bucket is None or not unknown  # no secret that is not masked goes to the bucket
    last = post_mortem.last_lines(ledger, attempt, verdict, masker) if shareable else ()
    seconds = supervision.progress.step_seconds
    ledger.append(events.Ended(attempt, verdict.kind.value, verdict.cause, verdict.symptoms, last, seconds))
    if verdict.kind not in _NO_POST_MORTEM:
        post_mortem.keep_evidence(session, attempt, reachable, secrets, unknown)
    end_everywhere(session, attempt, reachable, orphaned=orphaned)
    return verdict


def end_everywhere(
    session: Session, attempt: int, workers: Sequence[int], *, grace: int = 1, orphaned: Collection[int] = ()
) -> None:
    """Ends and removes an attempt's containers on `workers` (SIGKILL after `grace` s). Records Orphaned for the hosts
    where that failed, except for those already recorded, `orphaned`: the next start removes these containers."""
    reports = stop_hosts(session, attempt, workers, grace=grace, remove=True)
    if left := tuple(report.worker for report in reports if not report.ok and report.worker not in orphaned):
        session.ledger.append(events.Orphaned(attempt, session.container(attempt), left))


def stop_hosts(session: Session, attempt: int, workers: Sequence[int], *, grace: int, remove: bool) -> list[HostReport]:
    """Stops an attempt's containers on `workers` (SIGKILL after `grace` s); with `remove`, removes them. If the
    provider fails, reports that for each host. First waits until this process's lease, if it has one, is fresh; ends
    this process when another one has it."""
    session.ledger.confirm()
    try:
        return session.provider.stop(session.container(attempt), grace=grace, remove=remove, workers=workers)
    except LaunchError as error:
        return [HostReport(worker, False, str(error).splitlines()[0]) for worker in workers]


def _end_on_hosts(session: Session, attempt: int, verdict: Verdict, reachable: Sequence[int]) -> set[int]:
    """Records the verdict, stops the attempt on the `reachable` hosts, and records what each reports. Returns the hosts
    on which that failed. Containers on other hosts are removed before the next start."""
    say, ledger = session.context.output.say, session.ledger
    ledger.confirm()  # waits for a bucket that does not answer, so that it has the verdict first
    session.note(events.Judged(attempt, verdict.kind.value, verdict.cause, verdict.symptoms))
    say(f"ending the attempt on all hosts: {explain(verdict)[0]}")
    reports = stop_hosts(session, attempt, reachable, grace=_FAILURE_GRACE, remove=False)
    for report in reports:
        session.note(events.HostStopped(attempt, report.worker, report.ok, report.detail))
    return {report.worker for report in reports if not report.ok}


def _is_another(slice_state: SliceState, ledger: Ledger, attempt: int) -> bool:
    """Returns whether the slice was recreated since the attempt started: it is CREATING, or its creation time and first
    address both differ, as a restart may change addresses, and a kept creation time may be old. Raises BadInput as
    `Ledger.last`."""
    if slice_state.state == "CREATING":
        return True
    last = ledger.last(events.Started)
    if last is None or last.attempt != attempt:
        return False
    if not (last.slice_created and slice_state.created and slice_state.hosts):
        return False
    return last.slice_created != slice_state.created and last.address != slice_state.hosts[0]


class _Supervision:
    """The state of watching one attempt. Its threads share nothing but the inbox."""

    def __init__(self, session: Session, attempt: int) -> None:
        """Opens the hosts' logs at their ends. Starts no thread: `watch` does."""
        ledger, machine, settings = session.ledger, session.machine, session.config.run
        self.session, self.attempt, self.container = session, attempt, session.container(attempt)
        self.provider, self.ledger, self.say = session.provider, ledger, session.context.output.say
        self.clock, self.threads = machine.clock, machine.threads
        self.limits = Limits(lost=settings.host_lost_seconds, unreachable=settings.unreachable_minutes * 60)
        self.logs = AttemptLogs(session, attempt)
        self.inbox: Queue[Observation | SliceAnswer] = self.threads.queue(_INBOX_SIZE)
        self.over = self.threads.event()
        self.interval = max(OBSERVE_EVERY, len(session.workers) / _OBSERVATIONS_A_SECOND)
        self.started_everywhere = ledger.state.phase is Phase.RUNNING
        begun = self.clock.monotonic()
        self.views = {worker: HostView(worker, UNSEEN, seen=begun) for worker in session.workers}
        for worker, state in recorded_ends(ledger.events(), attempt).items():  # the host may be out of reach by now
            self.views[worker] = HostView(worker, state, seen=begun, ended_seen=begun - 0.1)  # before any answer
        self.judged = recorded_verdict(ledger.events(), attempt)
        self.open_lines: dict[int, Mapping[str, int]] = {}  # by worker, as last observed
        self.slice = SliceAnswer("READY")
        self.slice_described = begun - _DESCRIBE_SLICE_EVERY
        self.api_only_seconds = 0.0  # for which Google's API has answered while no host has
        self.api_answered = float("-inf")
        self.warned = begun
        self.counted = begun  # when the run's dollars were last counted
        self.progress = HostsProgress(ledger, attempt, self.say)
        self.last_line = begun  # when a host last wrote a line, or could not be asked whether it did
        self.turned, self.date = begun, self.clock.time()  # when the main task last began a turn of its loop
        self.polled_all = False
        self.stopping = False

    def watch(self) -> tuple[Verdict, list[int]]:
        """Polls all hosts, each in a thread, and delivers their lines; blocks until a verdict ends the attempt.
        Requests a stop once run.budget is spent, and after a stop of the run stops the hosts. Says when hosts stop
        answering. Returns the verdict, and the hosts that answer. Raises StartInterrupted, NotRecorded."""
        for worker in self.session.workers:
            self.threads.start(self._poll_repeatedly, worker)
        try:
            while True:
                self._receive()
                now = self.clock.monotonic()
                self._forgive_standstill(now)  # before anything is judged by that time
                self._ask_about_unreachable(now)
                self._stop_if_budget_is_spent(now)
                stop_requested = self.ledger.state.stop_requested
                if stop_requested and not self.stopping:
                    self.stopping = True
                    self.threads.start(self._stop_hosts)
                verdict = self._resumed_verdict() or self._judge(now, stop_requested)
                if verdict.kind is Kind.SETTLING:
                    self._poll_all_now()
                if verdict.kind.ended:
                    return verdict, self._reachable(verdict)
        finally:
            self.over.set()  # do not wait for tasks: one may wait for a host that is gone
            while self.inbox.get(timeout=0.0) is not None:  # let go of tasks that wait for a place in the inbox
                pass

    def _resumed_verdict(self) -> Verdict | None:
        """Returns the verdict by which an earlier supervisor has begun to end the attempt, once all hosts were asked;
        None without one. Drops it if no container has ended by then: that supervisor was killed before it ended any."""
        views = self.views.values()
        if not all(view.problem or view.asked < math.inf for view in views):
            return None
        if not any(view.ended or view.removed for view in views):
            self.judged = None
        return self.judged

    def _judge(self, now: float, stop_requested: bool) -> Verdict:
        """Returns the verdict by what is known of hosts, slice and progress at `now` (monotonic clock)."""
        quiet = min(view.seen for view in self.views.values()) - self.last_line
        progress = {worker: view for worker, view in self.progress.views.items() if not self.views[worker].ended}
        return judge(
            list(self.views.values()),
            now,
            self.limits,
            slice_state=self.slice.state,
            stop_requested=stop_requested,
            stall=judge_stall(progress, self.session.config.run.stall_minutes, quiet),
            api_only_seconds=self.api_only_seconds,
            stepped=self.progress.stepped,
        )

    def confirm_lost(self, verdict: Verdict) -> Verdict:
        """Returns the verdict. If it is a lost host, or a failure without exit code (a removed container), asks the API
        first: returns DELETED or PREEMPTED if the slice is gone, else adds the slice's trouble to the cause."""
        cause = verdict.cause
        if cause is None or not (
            verdict.kind is Kind.HOST_LOST or (verdict.kind, cause.exit_code) == (Kind.FAILED, None)
        ):
            return verdict
        if (answer := self._ask_for_slice(self.clock.sleep)) is not None:
            self.slice = replace(answer, trouble=answer.trouble or self.slice.trouble)
            judged = self._judge(self.clock.monotonic(), self.ledger.state.stop_requested)
            if judged.kind in (Kind.DELETED, Kind.PREEMPTED):
                return judged
        if self.slice.trouble:
            cause = replace(cause, what=f"{cause.what} (the slice: {self.slice.trouble})")
        return replace(verdict, cause=cause)

    # -- the main task -----------------------------------------------------------------------------------------------

    def _forgive_standstill(self, now: float) -> None:
        """Excludes the time in which this process stood still (stopped, machine asleep, a bucket that does not answer)
        from the time for settling, and if it was 10 s or more from the hosts' silence. Gives hosts time to reconnect
        after 10 s, also by the wall clock: the monotonic one may stand still while the machine sleeps."""
        still, date = now - self.turned, self.clock.time()
        slept = max(still, date - self.date) >= _STANDSTILL_SECONDS
        self.turned, self.date = now, date
        for worker, view in self.views.items():
            if view.ended_seen is not None and still > _LONG_TURN_SECONDS:
                view = replace(view, ended_seen=min(now, view.ended_seen + still))
            if still >= _STANDSTILL_SECONDS:
                view = replace(view, seen=min(now, view.seen + still), failing_since=view.failing_since + still)
            if slept:
                view = replace(view, answering_since=now)
            self.views[worker] = view
        if still >= _STANDSTILL_SECONDS:
            self.last_line = min(now, self.last_line + still)
            self.progress.forgive(still)

    def _receive(self) -> None:
        """Takes an answer from the inbox, if one comes within 0.25 s: delivers a host's lines and updates its view, or
        takes over the slice's state. New lines, lines that grow, new progress and a host that is out of reach count as
        output (`last_line`). Raises StartInterrupted."""
        answer = self.inbox.get(timeout=_INBOX_SECONDS)
        if answer is None:
            return
        if isinstance(answer, SliceAnswer):
            if answer.state == "DELETED" and not self.started_everywhere:  # its JobSet was never made
                raise StartInterrupted(self.ledger.run_id, self.attempt)
            if answer.trouble and answer.trouble != self.slice.trouble:
                self.say(f"the slice: {answer.trouble}")
            self.slice = SliceAnswer(answer.state, answer.trouble or self.slice.trouble)
            before, self.api_answered = self.api_answered, self.clock.monotonic()
            if self.api_answered - before < _API_GAP:  # longer: this machine may have had no network, or have slept
                self.api_only_seconds += self.api_answered - before
            return
        grows = answer.open != self.open_lines.get(answer.worker, {})  # a progress bar without line ends
        if self.logs.deliver(answer) or grows or answer.problem:  # an unreachable host may be writing
            self.last_line = self.clock.monotonic()
        self.open_lines[answer.worker] = answer.open
        self._update_view(answer)
        now = self.clock.monotonic()
        if (line := slowest(answer.progress)) and self.progress.update(answer.worker, line, now):
            self.last_line = now  # counts as output too, for when hosts that tell their progress have ended

    def _update_view(self, answer: Observation) -> None:
        """Updates what is known of a host by its answer, or the lack of one; records and says that it is away or back,
        records its end. Raises StartInterrupted if its container never started."""
        number, worker, now = self.attempt, answer.worker, self.clock.monotonic()
        view = self.views[worker]
        if answer.container is None:
            if view.reachable:
                self.session.note(events.HostOutOfReach(number, worker, answer.problem))
                self.say(f"host {worker} does not answer: {answer.problem}")
                view = replace(view, failing_since=float("inf"))
            failing_since = view.failing_since if answer.not_taken else min(view.failing_since, now)
            self.views[worker] = replace(view, problem=answer.problem or "no answer", failing_since=failing_since)
            return
        if not view.reachable:
            self.session.note(events.HostBack(number, worker))
            self.say(f"host {worker} answers again")
            view = replace(view, answering_since=now)
        if not self.started_everywhere and answer.container.status in ("created", "absent"):
            raise StartInterrupted(self.ledger.run_id, number)
        self.api_only_seconds, self.api_answered = 0.0, float("-inf")
        if not view.ended or view.rebooted:  # what a later reboot or removal makes of an end changes nothing
            view = replace(view, container=answer.container)
        end = view.container
        if (end.ended or end.status == "absent") and view.ended_seen is None:
            view = replace(view, ended_seen=now, ended_away=bool(view.problem))
            what = describe_exit(end) if end.ended else "its container is gone"
            code = None if view.rebooted else end.exit_code
            self.session.note(events.HostEnded(number, worker, code, end.oom_killed, what, end.finished_at))
        self.views[worker] = replace(view, seen=now, asked=answer.asked, problem="")

    def _ask_about_unreachable(self, now: float) -> None:
        """While a host is unreachable, asks the API for the slice's state every 15 s, in a thread; while all are, says
        so every 30 s, with host 0's problem."""
        reachable = [view.reachable for view in self.views.values()]
        if not all(reachable) and now - self.slice_described > _DESCRIBE_SLICE_EVERY:
            self.slice_described = now
            self.threads.start(self._describe_slice)
        if any(reachable):
            self.warned = now
        elif now - self.warned > _WARN_EVERY:
            self.warned = now
            self.say(f"no host answers ({self.views[0].problem}); still trying; the run continues. Ctrl-C detaches")

    def _stop_if_budget_is_spent(self, now: float) -> None:
        """Requests a stop if run.budget is spent (counted every 5 s) and none is requested yet. Raises NotRecorded."""
        if now - self.counted > _COUNT_EVERY and not self.ledger.state.stop_requested:
            self.counted = now
            if budget.is_spent(self.session):
                self.session.say(
                    f": the budget is spent ({budget.describe(self.session)}): stopping it, so that it saves"
                )
                budget.request_stop(self.session, self.attempt)

    def _poll_all_now(self) -> None:
        """On its first call, while a failure's cause may still come (SETTLING), polls each host not seen to end, in
        threads that put answers into the inbox, without waiting on the host: a long poll must not count as silence.
        Later calls do nothing."""
        if self.polled_all:
            return
        self.polled_all = True

        def poll(worker: int) -> None:
            self.inbox.put(self.session.observe(worker, self.attempt, self.logs.hosts[worker].cursor.since))

        for view in self.views.values():
            if view.ended_seen is None:
                self.threads.start(poll, view.worker)

    def _reachable(self, verdict: Verdict) -> list[int]:
        """Returns the hosts that answer, without the host that the verdict calls lost."""
        lost = {verdict.cause.worker} if verdict.kind is Kind.HOST_LOST and verdict.cause else set()
        return [view.worker for view in self.views.values() if view.reachable and view.worker not in lost]

    # -- threads ----------------------------------------------------------------------------------------------------

    def _poll_repeatedly(self, worker: int) -> None:
        """Observes one host until the supervision is over, and puts every observation, failed ones too, into the
        inbox. Blocks: run it in a thread. An observation waits on the host (long poll), which sees the container's
        end at once; further pages of a long log follow without a wait."""
        log = self.logs.hosts[worker]
        patience, since, is_long = 0.0, log.cursor.since, False
        asked = float("-inf")  # when its progress was last read
        while not self.over.is_set():
            begun = self.clock.monotonic()
            progress = begun - asked >= _PROGRESS_EVERY
            asked = begun if progress else asked
            observation = self.session.observe(worker, self.attempt, since, patience=patience, progress=progress)
            if self.over.is_set():
                return
            cursor = log.cursor
            self.inbox.put(observation)
            since = log.cursor.since if log.behind else log.cursor.since or since
            if (page := next_page(observation)) and not log.behind:
                if not is_long:
                    self.threads.start(self._watch_state, worker)
                patience, since, is_long = 0.0, page, True
                while log.cursor is cursor and not log.behind and not self.over.wait(0.05):
                    pass  # one page in memory: this task reads faster than the main task writes
                continue
            ended = observation.container is not None and observation.container.ended
            patience = 0.0 if observation.container is None or ended else self.interval
            elapsed = self.clock.monotonic() - begun
            self.over.wait(self.interval * 5 if ended else max(0.0, self.interval - elapsed))

    def _watch_state(self, worker: int) -> None:
        """Puts a container's state, no lines, into the inbox until `over`: a page of a huge log takes long to find."""
        while not self.over.wait(self.interval * 3):
            with contextlib.suppress(LaunchError):
                asked = self.clock.monotonic()
                observation = self.provider.look(worker, self.container)
                if observation.container is not None:
                    self.inbox.put(replace(observation, open=self.open_lines.get(worker, {}), asked=asked))

    def _stop_hosts(self) -> None:
        """Repeats the requested stop until all hosts report success or the attempt is over. Blocks. The process that
        requested the stop may be gone, or have missed a host, or containers may have started after it."""
        stop = self.ledger.last(events.RunStopRequested)
        assert stop is not None
        while not self.over.is_set():
            with contextlib.suppress(LaunchError):
                if all(report.ok for report in self.provider.stop(self.container, grace=stop.grace, remove=False)):
                    return
            self.over.wait(_STOP_AGAIN_SECONDS)

    def _describe_slice(self) -> None:
        """Puts the slice's state into the inbox, if the API answers."""
        if (answer := self._ask_for_slice(self.over.wait)) is not None:
            self.inbox.put(answer)

    def _ask_for_slice(self, wait: Callable[[float], object]) -> SliceAnswer | None:
        """Returns the slice's state and trouble by the API: state None if it is gone, RECREATED if another one has its
        name. Asks again after a `wait` of 5 s before it says so. Returns None if the API does not answer."""
        try:
            slice_state = self.session.describe_slice(wait, doubted="CREATING")  # a stale answer must not end a run
        except LaunchError:
            return None
        if slice_state is None:
            return SliceAnswer(None)
        state = RECREATED if _is_another(slice_state, self.ledger, self.attempt) else slice_state.state
        return SliceAnswer(state, slice_state.trouble)
