"""The loop that watches an attempt: observe all hosts, judge, act.

One thread a host looks at it again and again; the main thread delivers log lines, judges, and when the attempt has
ended stops what still runs, fetches the last lines and removes the containers. It holds no state that matters: killed
at any moment, the run goes on, and another process attaches to it.
"""

from __future__ import annotations

import contextlib
import queue
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace

from launcher.errors import LaunchError
from launcher.provider import LogLine, Observation, Provider
from launcher.run import post_mortem
from launcher.run.ledger import Ledger
from launcher.run.logs import HostLog, tail
from launcher.run.verdict import HostView, Kind, Limits, Verdict, describe_exit, judge

LOOK_EVERY = 1.0  # seconds between two looks at a host
_LOOKS_A_SECOND = (
    16  # at all hosts together: what a watch costs does not grow with the slice. Ends are told at once nevertheless
)
_WAITING_LOOKS = 64  # a look may hold 4 MB: who writes faster than this machine takes in must wait
_SLICE_EVERY = 15.0  # seconds between two questions to the API while a host is out of reach
_COMPLAIN_EVERY = 30.0  # seconds between two complaints that nobody answers
_WORTH_A_POST_MORTEM = frozenset((Kind.FAILED, Kind.HOST_LOST, Kind.PREEMPTED, Kind.STALLED))
_FAILURE_GRACE = 3  # seconds between SIGTERM and SIGKILL for hosts that only wait for a dead peer
_LAST_LINES, _LAST_BYTES = 8, 20_000  # of the host that is the cause, in the report
_LAST_LOOKS = 50  # looks of 4 MB: bounds the fetching of a huge rest of a log


@dataclass(frozen=True)
class Watched:
    """The attempt to watch."""

    run_id: str
    number: int
    container: str
    workers: Sequence[int]
    secrets: Sequence[str] = field(default=(), repr=False)  # values that nothing which is kept may show


@dataclass(frozen=True)
class SliceNews:
    """What the API says of the slice; None: it doesn't exist."""

    state: str | None
    detail: str = ""  # what the API says is wrong with it


def supervise(
    provider: Provider,
    ledger: Ledger,
    watched: Watched,
    *,
    limits: Limits,
    emit: Callable[[int, LogLine], None],
    say: Callable[[str], None],
) -> Verdict:
    """Watches an attempt to its end, ends it on every host, and records how it ended. KeyboardInterrupt leaves
    everything running."""
    logs = {worker: HostLog(ledger.log_file(watched.number, worker)) for worker in watched.workers}

    def deliver(observation: Observation) -> bool:
        fresh = logs[observation.worker].take(observation.lines)
        for line in fresh:
            emit(observation.worker, line)
        return bool(fresh)

    verdict, reachable = _watch(provider, ledger, watched, limits, logs, deliver, say)
    if verdict.kind not in (Kind.FINISHED, Kind.SAVED):
        say(f"ending the attempt on all hosts: {explain(verdict)[0]}")
        if verdict.kind is Kind.STALLED:
            _save_stacks(provider, ledger, watched, say)
        # A host that does not answer is not waited for: what it still has or does is ended before the next start.
        reports = provider.stop(watched.container, grace=_FAILURE_GRACE, remove=False, workers=reachable)
        for report in reports:
            ledger.event("stopped", attempt=watched.number, host=report.worker, ok=report.ok, detail=report.detail)
    with ThreadPoolExecutor(max_workers=64) as pool:
        rests = [pool.submit(_fetch_rest, provider, watched.container, worker, logs[worker]) for worker in reachable]
        for rest in rests:
            for observation in rest.result():
                deliver(observation)
    ledger.event(
        "ended",
        attempt=watched.number,
        outcome=verdict.kind.value,
        cause=None if verdict.cause is None else vars(verdict.cause),
        symptoms=list(verdict.symptoms),
        last_lines=last_lines(ledger, watched.number, verdict),
    )
    if verdict.kind in _WORTH_A_POST_MORTEM:
        path = post_mortem.write(
            ledger, watched.number, provider.evidence(watched.container, reachable), watched.secrets
        )
        ledger.event("post-mortem", attempt=watched.number, path=str(path))
        say(f"logs, inspection, TPU logs and the slice's state are kept in {path}")
    cleared = {
        report.worker
        for report in provider.stop(watched.container, grace=1, remove=True, workers=reachable)
        if report.ok
    }
    if left := [worker for worker in watched.workers if worker not in cleared]:
        ledger.event("left behind", attempt=watched.number, container=watched.container, hosts=left)
    return verdict


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


def _watch(
    provider: Provider,
    ledger: Ledger,
    watched: Watched,
    limits: Limits,
    logs: dict[int, HostLog],
    deliver: Callable[[Observation], bool],
    say: Callable[[str], None],
) -> tuple[Verdict, list[int]]:
    """The verdict that ends the attempt, and the hosts that answer."""
    begun = time.monotonic()
    views = {worker: HostView(worker, None, seen=begun) for worker in watched.workers}
    inbox: queue.Queue[Observation | SliceNews] = queue.Queue(maxsize=_WAITING_LOOKS)
    over = threading.Event()
    interval = max(LOOK_EVERY, len(watched.workers) / _LOOKS_A_SECOND)
    lookers = [
        threading.Thread(
            target=_look,
            args=(provider, watched.container, logs[worker], worker, inbox, over, interval),
            daemon=True,
            name=f"look-{worker}",
        )
        for worker in watched.workers
    ]
    for looker in lookers:
        looker.start()
    hurried = False
    slice_state: str | None = "READY"
    slice_detail = ""
    complained = last_line = begun
    slice_asked = begun - _SLICE_EVERY
    try:
        while True:
            try:
                news = inbox.get(timeout=0.25)
            except queue.Empty:
                pass
            else:
                if isinstance(news, SliceNews):
                    slice_state = news.state
                    if news.detail and news.detail != slice_detail:
                        say(f"the slice: {news.detail}")
                    slice_detail = news.detail or slice_detail
                else:
                    if deliver(news) or news.problem:  # what an unreachable host does is not known
                        last_line = time.monotonic()
                    views[news.worker] = _update(views[news.worker], news, ledger, watched.number, say)
            now = time.monotonic()
            if any(not view.reachable for view in views.values()) and now - slice_asked > _SLICE_EVERY:
                slice_asked = now
                threading.Thread(target=_ask_slice, args=(provider, inbox), daemon=True).start()
            if not any(view.reachable for view in views.values()) and now - complained > _COMPLAIN_EVERY:
                complained = now
                say(
                    f"no host answers ({views[watched.workers[0]].problem}); still trying. The run goes on without us: Ctrl-C detaches"
                )
            requested = ledger.stop_requested(watched.number)
            verdict = judge(
                list(views.values()),
                now,
                limits,
                slice_state=slice_state,
                stop_requested=requested,
                quiet=now - last_line,
            )
            if verdict.kind is Kind.SETTLING and not hurried:
                # The other looks wait on their hosts: nobody who is well may seem silent.
                hurried = True
                for view in views.values():
                    if view.ended_seen is None:
                        args = (provider, watched.container, logs[view.worker], view.worker, inbox)
                        threading.Thread(target=_look_once, args=args, daemon=True).start()
            if verdict.kind.ended:
                silent = {verdict.cause.worker} if verdict.kind is Kind.HOST_LOST and verdict.cause else set()
                if verdict.kind is Kind.HOST_LOST and verdict.cause and slice_detail:
                    verdict = replace(
                        verdict, cause=replace(verdict.cause, what=f"{verdict.cause.what} (the slice: {slice_detail})")
                    )
                return verdict, [view.worker for view in views.values() if view.reachable and view.worker not in silent]
    finally:
        over.set()  # not joined: one may be waiting for a host that is gone
        with contextlib.suppress(queue.Empty):  # nor may one wait for a place in the inbox
            while True:
                inbox.get_nowait()


def _look(
    provider: Provider,
    container: str,
    log: HostLog,
    worker: int,
    inbox: queue.Queue[Observation | SliceNews],
    over: threading.Event,
    interval: float,
) -> None:
    """Looks at one host until told to stop. Every look is answered into `inbox`, whatever happened. It waits on the
    host, where an end is seen at once."""
    patience, asked_from = 0.0, log.cursor.since
    while not over.is_set():
        begun = time.monotonic()
        observation = _one_look(provider, container, worker, asked_from, patience)
        if over.is_set():
            return
        inbox.put(observation)
        asked_from = log.cursor.since or asked_from
        if observation.more:
            # From its last line on, without the overlap: that may hold more than a look does.
            patience, asked_from = 0.0, max(asked_from or "", observation.lines[-1].timestamp)
            continue
        ended = observation.container is not None and observation.container.ended
        patience = 0.0 if observation.container is None or ended else interval
        over.wait(
            interval * 5 if ended else max(0.0, interval - (time.monotonic() - begun))
        )  # from one that has ended nothing new will come


def _look_once(
    provider: Provider, container: str, log: HostLog, worker: int, inbox: queue.Queue[Observation | SliceNews]
) -> None:
    inbox.put(_one_look(provider, container, worker, log.cursor.since, 0.0))


def _one_look(provider: Provider, container: str, worker: int, since: str | None, patience: float) -> Observation:
    try:
        return provider.observe(worker, container, since, patience=patience)
    except LaunchError as error:
        return Observation(worker, None, problem=str(error).splitlines()[0])


def _ask_slice(provider: Provider, inbox: queue.Queue[Observation | SliceNews]) -> None:
    try:
        found = provider.describe()
    except LaunchError:
        return  # the API does not answer either: nothing is known
    inbox.put(SliceNews(None) if found is None else SliceNews(found.state, found.trouble))


def _update(view: HostView, news: Observation, ledger: Ledger, attempt: int, say: Callable[[str], None]) -> HostView:
    now = time.monotonic()
    if news.container is None:
        if view.reachable:
            ledger.event("host out of reach", attempt=attempt, host=view.worker, problem=news.problem)
            say(f"host {view.worker} does not answer: {news.problem}")
        return replace(view, problem=news.problem or "no answer")
    if not view.reachable:
        ledger.event("host back", attempt=attempt, host=view.worker)
        say(f"host {view.worker} answers again")
    ended_seen, ended_away = view.ended_seen, view.ended_away
    if (news.container.ended or news.container.status == "absent") and ended_seen is None:
        ended_seen, ended_away = now, not view.reachable
        what = describe_exit(news.container) if news.container.ended else "its container is gone"
        ledger.event(
            "host ended",
            attempt=attempt,
            host=view.worker,
            exit_code=news.container.exit_code,
            oom=news.container.oom_killed,
            what=what,
        )
    return replace(view, container=news.container, seen=now, problem="", ended_seen=ended_seen, ended_away=ended_away)


def _save_stacks(provider: Provider, ledger: Ledger, watched: Watched, say: Callable[[str], None]) -> None:
    """Where every host's processes are: the one thing that tells why a run hangs, gone once they are stopped."""
    for worker, text in provider.stacks(watched.container).items():
        ledger.write_stack(watched.number, worker, text)
    say(f"the stacks of all hosts' processes are in {ledger.stacks_folder(watched.number)}")


def _fetch_rest(provider: Provider, container: str, worker: int, log: HostLog) -> list[Observation]:
    """The looks that bring a host's last lines, in order."""
    looks: list[Observation] = []
    since = log.cursor.since
    for _ in range(_LAST_LOOKS):
        try:
            look = provider.observe(worker, container, since)
        except LaunchError:
            break
        looks.append(look)
        if not look.more:
            break
        since = look.lines[-1].timestamp
    return looks
