"""The supervision of one attempt: observe all hosts, judge, act.

One task a host observes it again and again; the main task delivers log lines, judges, and when the attempt has
ended stops what still runs, fetches the last lines and removes the containers. It holds no state that matters: killed
at any moment, the run goes on, and another process attaches to it.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from typing import Any

from launcher.errors import BadInput, LaunchError, from_disk
from launcher.provider import HostReport, LogLine, Observation, Provider, container_name
from launcher.run import events, post_mortem
from launcher.run.ledger import Ledger
from launcher.run.logs import HostLog, tail
from launcher.run.verdict import HostView, Kind, Limits, Verdict, describe_exit, judge
from launcher.workstation import Workstation
from training.machine.threads import Queue

OBSERVE_EVERY = 1.0  # seconds between two observations of a host
_OBSERVATIONS_A_SECOND = 16  # of all hosts together, so that the cost does not grow with the slice
_INBOX_SIZE = 64  # an observation may hold 4 MB: producers that are faster than this machine must wait
_STANDSTILL_SECONDS = 10.0  # a turn of the main task takes a fraction of a second
_INBOX_SECONDS = 0.25  # how long the main thread waits for news before it judges again
_ASK_SLICE_EVERY = 15.0  # seconds between two questions to the API while a host is out of reach
_DESCRIBE_AGAIN_SECONDS = 5.0  # before a slice that seems to be gone is described again
_STOP_AGAIN_SECONDS = 5.0  # before hosts that were missed are stopped again
_API_GAP = 60.0  # seconds between two answers of the API, between which nothing is known
_COMPLAIN_EVERY = 30.0  # seconds between two complaints that no host answers
_WORTH_A_POST_MORTEM = frozenset((Kind.FAILED, Kind.HOST_LOST, Kind.PREEMPTED, Kind.DELETED, Kind.STALLED))
_FAILURE_GRACE = 3  # seconds between SIGTERM and SIGKILL for hosts that only wait for a dead peer
_LAST_LINES, _LAST_BYTES = 8, 20_000  # of the host that is the cause, in the report
_LAST_OBSERVATIONS = 50  # of 4 MB: bounds the fetching of a huge rest of a log
_ROOM_SECONDS = 40.0  # for which last lines wait on a full disk of this machine
_LAST_TRIES = 3  # of a host that does not answer when its last lines are fetched
_AT_ONCE = 64  # for work on all hosts at once

Say = Callable[[str], None]
Emit = Callable[[int, LogLine], None]


@dataclass(frozen=True)
class Output:
    """Where a person sees what happens."""

    say: Say
    """Takes one line about the launcher's own work."""

    emit: Emit
    """Takes one line of a host: its worker index, the line."""


@dataclass(frozen=True)
class AttemptRef:
    """An attempt that was begun, as far as it must be known to watch or stop it."""

    run_id: str
    number: int
    workers: Sequence[int]
    secrets: Mapping[str, str] = field(default_factory=dict, repr=False)
    """Name -> value that nothing which is kept may show."""
    unknown_secrets: Sequence[str] = ()
    """Names of those whose values this process does not know."""

    @property
    def container(self) -> str:
        """Name of its container, the same on every host."""
        return container_name(self.run_id, self.number)


@dataclass(frozen=True)
class SliceNews:
    """What the API says of the slice."""

    state: str | None
    """None: it does not exist."""

    trouble: str = ""
    """What the API says is wrong with it."""


@dataclass
class ApiAlone:
    """For how long Google's API has answered, and no host has. A gap between two answers of the API does not count:
    this machine may have had no network, or have slept."""

    seconds: float = 0.0
    answered: float | None = None
    """When the API last did, by the monotonic clock."""

    def api_answers(self, now: float) -> None:
        """At this time."""
        before, self.answered = self.answered, now
        if before is not None and now - before < _API_GAP:
            self.seconds += now - before


class StartInterrupted(BadInput):
    """An attempt does not run on all hosts, because its start was interrupted: it would be watched for ever."""


def supervise(
    provider: Provider, ledger: Ledger, attempt: AttemptRef, *, limits: Limits, output: Output, machine: Workstation
) -> Verdict:
    """Watches an attempt to its end, ends it on every host, and records how it ended.

    KeyboardInterrupt leaves everything running.

    Raises:
        StartInterrupted: A host whose container was not seen to start says that it never did.
    """
    supervision = _Supervision(provider, ledger, attempt, limits, output, machine)
    verdict, reachable = supervision.watch()
    missed = set(attempt.workers) - set(reachable)
    if verdict.kind not in (Kind.FINISHED, Kind.SAVED):
        missed |= _end_on_hosts(provider, ledger, attempt, verdict, reachable, output.say)
    supervision.fetch_rest(reachable)
    if missed:  # known before the end is: who reads of it may be about to say that nothing runs
        ledger.append(events.LeftBehind(attempt.number, attempt.container, tuple(sorted(missed))))
    ledger.append(
        events.Ended(
            attempt.number,
            outcome=verdict.kind.value,
            cause=verdict.cause,
            symptoms=verdict.symptoms,
            last_lines=tuple(last_lines(ledger, attempt.number, verdict)),
        )
    )
    if verdict.kind in _WORTH_A_POST_MORTEM:
        _keep_post_mortem(provider, ledger, attempt, reachable, output.say)
    reports = stop_hosts(provider, attempt.container, reachable, grace=1, remove=True)
    if left := tuple(report.worker for report in reports if not report.ok and report.worker not in missed):
        ledger.append(events.LeftBehind(attempt.number, attempt.container, left))
    return verdict


def _keep_post_mortem(
    provider: Provider, ledger: Ledger, attempt: AttemptRef, reachable: Sequence[int], say: Say
) -> None:
    """Writes the archive of an attempt that failed. A failure to write it is told, and keeps nothing from following."""
    evidence = provider.evidence(attempt.container, reachable)
    try:
        path = post_mortem.write(ledger, attempt.number, evidence, attempt.secrets)
    except OSError as error:
        say(f"no post-mortem of attempt {attempt.number} could be written: {error}")
        return
    ledger.note(events.PostMortemWritten(attempt.number, str(path)), say)
    unmasked = f"; not masked in it: {', '.join(attempt.unknown_secrets)}" if attempt.unknown_secrets else ""
    say(f"logs, inspection, TPU logs and the slice's state are kept in {path}{unmasked}")


def last_lines(ledger: Ledger, attempt: int, verdict: Verdict) -> list[str]:
    """What the host that is the cause wrote last."""
    if verdict.cause is None or verdict.cause.worker < 0:
        return []
    path = ledger.log_file(attempt, verdict.cause.worker)
    return [line.text for line in tail(path, _LAST_BYTES)[-_LAST_LINES:]] if path.exists() else []


def explain(verdict: Verdict) -> list[str]:
    """A verdict in a few lines for a person, the first cause first."""
    if verdict.cause is None:
        return [verdict.kind.value]
    where = f"host {verdict.cause.worker}: " if verdict.cause.worker >= 0 else ""
    when = f", at {verdict.cause.time}" if verdict.cause.time else ""
    lines = [f"{verdict.kind.value}: {where}{verdict.cause.what}{when}"]
    return lines + [f"because of it: {symptom}" for symptom in verdict.symptoms]


def describe_interrupted_start(run_id: str, attempt: int) -> str:
    """What a person is told of an attempt that does not run on all hosts."""
    return (
        f"run {run_id}: attempt {attempt} was interrupted while it was started, and does not run on all hosts: "
        "`tpu-launch run` ends it and starts the next"
    )


def stop_hosts(
    provider: Provider, container: str, workers: Sequence[int], *, grace: int, remove: bool
) -> list[HostReport]:
    """As `Provider.stop`; when not even the hosts' addresses can be found out, every host's report says so."""
    try:
        return provider.stop(container, grace=grace, remove=remove, workers=workers)
    except LaunchError as error:
        return [HostReport(worker, False, str(error).splitlines()[0]) for worker in workers]


def _end_on_hosts(
    provider: Provider, ledger: Ledger, attempt: AttemptRef, verdict: Verdict, reachable: Sequence[int], say: Say
) -> set[int]:
    """Stops an attempt that has failed on all hosts that answer. Returns those that did not do it.

    A host that does not answer is not waited for: what it still runs is ended before the next start.
    """
    say(f"ending the attempt on all hosts: {explain(verdict)[0]}")
    if verdict.kind is Kind.STALLED:
        with contextlib.suppress(LaunchError):
            for worker, text in provider.stacks(attempt.container).items():
                ledger.write_stack(attempt.number, worker, text)
        say(f"the stacks of all hosts' processes are in {ledger.stacks_folder(attempt.number)}")
    reports = stop_hosts(provider, attempt.container, reachable, grace=_FAILURE_GRACE, remove=False)
    for report in reports:
        ledger.note(events.HostStopped(attempt.number, report.worker, report.ok, report.detail), say)
    return {report.worker for report in reports if not report.ok}


class _Supervision:
    """The state of watching one attempt. The inbox is the only thing that its tasks share."""

    def __init__(
        self,
        provider: Provider,
        ledger: Ledger,
        attempt: AttemptRef,
        limits: Limits,
        output: Output,
        machine: Workstation,
    ) -> None:
        self.provider, self.ledger, self.attempt = provider, ledger, attempt
        self.limits, self.output, self.clock, self.threads = limits, output, machine.clock, machine.threads
        self.logs = {worker: HostLog(ledger.log_file(attempt.number, worker)) for worker in attempt.workers}
        self.inbox: Queue[Observation | SliceNews] = self.threads.queue(_INBOX_SIZE)
        self.over = self.threads.event()
        self.interval = max(OBSERVE_EVERY, len(attempt.workers) / _OBSERVATIONS_A_SECOND)
        self.started = ledger.started_everywhere
        begun = self.clock.monotonic()
        self.views = {worker: HostView(worker, None, seen=begun) for worker in attempt.workers}
        self.slice = SliceNews("READY")
        self.slice_asked = begun - _ASK_SLICE_EVERY
        self.api_alone = ApiAlone()
        self.complained = begun
        self.last_line = begun  # when a host last wrote a line, or could not be asked whether it did
        self.turned = begun  # when the main task last began a turn of its loop
        self.hurried = False
        self.stopping = False
        self.no_room = False  # for lines, on this machine's disk

    def watch(self) -> tuple[Verdict, list[int]]:
        """The verdict that ends the attempt, and the hosts that answer."""
        for worker in self.attempt.workers:
            self._start_task(self._observe_repeatedly, worker)
        try:
            while True:
                self._take_news()
                now = self.clock.monotonic()
                self._forgive_standstill(now)  # before anything is judged by that time
                self._ask_about_slice()
                self._complain()
                stop_requested = self.ledger.stop_requested()
                if stop_requested and not self.stopping:
                    self.stopping = True
                    self._start_task(self._stop_hosts)
                verdict = judge(
                    list(self.views.values()),
                    now,
                    self.limits,
                    slice_state=self.slice.state,
                    stop_requested=stop_requested,
                    quiet=min(view.seen for view in self.views.values()) - self.last_line,
                    api_alone=self.api_alone.seconds,
                )
                if verdict.kind is Kind.SETTLING:
                    self._hurry()
                if verdict.kind.ended:
                    return self._with_trouble_of_slice(verdict), self._answering(verdict)
        finally:
            self.over.set()  # tasks are not waited for: one may be waiting for a host that is gone
            while self.inbox.get(timeout=0.0) is not None:  # nor may one wait for a place in the inbox
                pass

    def fetch_rest(self, workers: Sequence[int]) -> None:
        """Delivers the last lines of these hosts. A task a host holds one observation until it is its turn to
        deliver."""
        turn = self.threads.lock()
        self.threads.map(lambda worker: self._fetch_rest_of(worker, turn), workers, at_once=_AT_ONCE)

    # -- the main task -----------------------------------------------------------------------------------------------

    def _forgive_standstill(self, now: float) -> None:
        """While this process stood still (stopped, or its machine asleep) it looked at nothing: that time is no host's
        silence."""
        still = now - self.turned
        self.turned = now
        if still < _STANDSTILL_SECONDS:
            return
        self.last_line = min(now, self.last_line + still)
        for worker, view in self.views.items():
            ended_seen = min(now, view.ended_seen + still) if view.ended_seen is not None else None
            self.views[worker] = replace(view, seen=min(now, view.seen + still), ended_seen=ended_seen)

    def _take_news(self) -> None:
        news = self.inbox.get(timeout=_INBOX_SECONDS)
        if news is None:
            return
        if isinstance(news, SliceNews):
            if news.trouble and news.trouble != self.slice.trouble:
                self.output.say(f"the slice: {news.trouble}")
            self.slice = SliceNews(news.state, news.trouble or self.slice.trouble)
            self.api_alone.api_answers(self.clock.monotonic())
            return
        if self._deliver(news) or news.problem:  # what an unreachable host does is not known
            self.last_line = self.clock.monotonic()
        self._update_view(news)

    def _deliver(self, observation: Observation) -> bool:
        """Hands on the lines that are new. Whether there were any. While this machine's disk is full, they stay new."""
        try:
            fresh = self.logs[observation.worker].take(observation.lines, observation.since)
        except OSError as error:
            if from_disk(error) is None:
                raise
            if not self.no_room:
                self.no_room = True
                self.output.say(
                    f"this machine's disk: {error.strerror}: lines wait on their hosts until there is room, and the "
                    "run is watched meanwhile"
                )
            return True
        self.no_room = False
        for line in fresh:
            self.output.emit(observation.worker, line)
        return bool(fresh)

    def _update_view(self, news: Observation) -> None:
        number, worker, now = self.attempt.number, news.worker, self.clock.monotonic()
        view = self.views[worker]
        if news.container is None:
            if view.reachable:
                self.ledger.note(events.HostOutOfReach(number, worker, news.problem), self.output.say)
                self.output.say(f"host {worker} does not answer: {news.problem}")
            self.views[worker] = replace(view, problem=news.problem or "no answer")
            return
        if not view.reachable:
            self.ledger.note(events.HostBack(number, worker), self.output.say)
            self.output.say(f"host {worker} answers again")
            view = replace(view, answering_since=now)
        if not self.started and news.container.status in ("created", "absent"):
            raise StartInterrupted(describe_interrupted_start(self.attempt.run_id, number))
        self.api_alone = ApiAlone()
        container, ended_seen, ended_away = news.container, view.ended_seen, view.ended_away
        if (container.ended or container.status == "absent") and ended_seen is None:
            ended_seen, ended_away = now, bool(view.problem)
            what = describe_exit(container) if container.ended else "its container is gone"
            ended = events.HostEnded(number, worker, container.exit_code, container.oom_killed, what)
            self.ledger.note(ended, self.output.say)
        self.views[worker] = replace(
            view, container=container, seen=now, problem="", ended_seen=ended_seen, ended_away=ended_away
        )

    def _ask_about_slice(self) -> None:
        """Asks the API in the background while a host is out of reach."""
        now = self.clock.monotonic()
        if any(not view.reachable for view in self.views.values()) and now - self.slice_asked > _ASK_SLICE_EVERY:
            self.slice_asked = now
            self._start_task(self._describe_slice)

    def _complain(self) -> None:
        now = self.clock.monotonic()
        if not any(view.reachable for view in self.views.values()) and now - self.complained > _COMPLAIN_EVERY:
            self.complained = now
            problem = self.views[self.attempt.workers[0]].problem
            self.output.say(f"no host answers ({problem}); still trying. The run goes on without us: Ctrl-C detaches")

    def _hurry(self) -> None:
        """Observes every other host once at once: the regular observations wait on their hosts, and nobody who is well
        may seem silent."""
        if self.hurried:
            return
        self.hurried = True
        for view in self.views.values():
            if view.ended_seen is None:
                self._start_task(self._observe_once, view.worker)

    def _answering(self, verdict: Verdict) -> list[int]:
        lost = {verdict.cause.worker} if verdict.kind is Kind.HOST_LOST and verdict.cause else set()
        return [view.worker for view in self.views.values() if view.reachable and view.worker not in lost]

    def _with_trouble_of_slice(self, verdict: Verdict) -> Verdict:
        if verdict.kind is not Kind.HOST_LOST or verdict.cause is None or not self.slice.trouble:
            return verdict
        what = f"{verdict.cause.what} (the slice: {self.slice.trouble})"
        return replace(verdict, cause=replace(verdict.cause, what=what))

    # -- threads ------------------------------------------------------------------------------------------------------

    def _start_task(self, function: Callable[..., None], *arguments: int) -> None:
        self.threads.start(function, *arguments)

    def _observe_repeatedly(self, worker: int) -> None:
        """Observes one host until the supervision is over. Every observation goes to the inbox, whatever happened.

        An observation waits on the host, where the end of the container is seen at once.
        """
        log = self.logs[worker]
        patience, since = 0.0, log.cursor.since
        while not self.over.is_set():
            begun = self.clock.monotonic()
            observation = self._observe(worker, since, patience)
            if self.over.is_set():
                return
            self.inbox.put(observation)
            since = log.cursor.since if log.behind else log.cursor.since or since
            if observation.more and not log.behind:
                # From its last line on, without the overlap: that may hold more than an observation does.
                patience, since = 0.0, max(since or "", observation.lines[-1].timestamp)
                continue
            ended = observation.container is not None and observation.container.ended
            patience = 0.0 if observation.container is None or ended else self.interval
            elapsed = self.clock.monotonic() - begun
            self.over.wait(self.interval * 5 if ended else max(0.0, self.interval - elapsed))

    def _observe_once(self, worker: int) -> None:
        self.inbox.put(self._observe(worker, self.logs[worker].cursor.since, 0.0))

    def _observe(self, worker: int, since: str | None, patience: float) -> Observation:
        try:
            observation = self.provider.observe(worker, self.attempt.container, since, patience=patience)
            return replace(observation, since=since)
        except LaunchError as error:
            return Observation(worker, None, problem=str(error).splitlines()[0])

    def _stop_hosts(self) -> None:
        """Carries out the stop that the run's owner requested, until every host has: whoever requested it may be gone,
        or have missed a host, or the containers may have started after it."""
        grace = next(event.grace for event in reversed(self.ledger.events()) if isinstance(event, events.StopRequested))
        while not self.over.is_set():
            with contextlib.suppress(LaunchError):
                reports = self.provider.stop(self.attempt.container, grace=grace, remove=False)
                if all(report.ok for report in reports):
                    return
            self.over.wait(_STOP_AGAIN_SECONDS)

    def _describe_slice(self) -> None:
        with contextlib.suppress(LaunchError):  # the API does not answer either: nothing is known
            slice_state = self.provider.describe()
            if slice_state is None:  # an answer that is stale or of another replica must not end a run
                self.over.wait(_DESCRIBE_AGAIN_SECONDS)
                slice_state = self.provider.describe()
            news = SliceNews(None) if slice_state is None else SliceNews(slice_state.state, slice_state.trouble)
            self.inbox.put(news)

    def _fetch_rest_of(self, worker: int, turn: AbstractContextManager[Any]) -> None:
        """Delivers a host's last lines. One that does not answer is asked again: its container is removed next."""
        log = self.logs[worker]
        since, failures, begun = log.cursor.since, 0, self.clock.monotonic()
        for _ in range(_LAST_OBSERVATIONS):
            observation = self._observe(worker, since, 0.0)
            if observation.container is None:
                failures += 1
                problem, last = observation.problem or "no answer", failures == _LAST_TRIES
            else:
                with turn:
                    self._deliver(observation)
                problem = "this machine's disk is full" if log.behind else ""
                last = self.clock.monotonic() - begun > _ROOM_SECONDS
            if problem:
                if last:
                    with turn:
                        self.output.say(f"host {worker}: its last lines may be missing: {problem}")
                    return
                self.clock.sleep(OBSERVE_EVERY)
                continue
            if not observation.more:
                return
            since = observation.lines[-1].timestamp
