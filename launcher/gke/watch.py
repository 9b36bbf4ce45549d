"""Watches the pods of one attempt, and keeps how they ended.

A deleted pod (its node was drained, the run was stopped) vanishes from the API with its log a moment after its end, too
fast for polling once a second. So one kubectl command watches all pods, whose last events show how they ended, and
another follows the log of each pod that is being deleted. Listing the pods every few seconds finds what a broken watch
missed, and a cluster that does not answer.
"""

import json
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

from launcher.errors import Exit, LaunchError
from launcher.gke import pod_status
from launcher.gke.kubectl import Kubectl
from launcher.gke.pod_status import Pod
from launcher.gke.workload import CONTAINER
from launcher.provider import LogLine
from training.machine import Event

_LIST_EVERY = 10.0  # seconds
_WATCH_SECONDS = 300.0  # then a new watch begins
_FINAL_LOG_SECONDS = 900.0  # longer than any grace period
_EOF_SECONDS = 5.0  # wait for the rest of an ended pod's log


@dataclass
class _FinalLog:
    """The log of a pod that is being deleted, followed to its end."""

    uid: str
    ended: Event
    lines: list[LogLine] = field(default_factory=list)


class PodWatch:
    """The pods that match a selector, one a host."""

    def __init__(self, kubectl: Kubectl, selector: str) -> None:
        self._kubectl = kubectl
        self._selector = selector
        self._clock, self._threads = kubectl.machine.clock, kubectl.machine.threads
        self._lock = self._threads.lock()
        self._listing = self._threads.lock()
        self._pods: dict[str, Pod] = {}  # by uid
        self._asked = float("-inf")  # when they were last listed
        self._unlisted: LaunchError | None = None  # why that failed
        self._closed = self._threads.event()
        self._kills: set[Callable[[], None]] = set()
        self._watching = False
        self._refused: LaunchError | None = None
        self._log_starts: dict[int, str | None] = {}  # where the next observation of a host's log begins
        self._final_logs: dict[int, _FinalLog] = {}

    def pods(self, *, fresh: bool = False) -> dict[int, Pod]:
        """Returns the newest pod of each host by worker number, including ended and deleted ones. Lists the pods again
        if `fresh`, or if the last list is old, and starts the thread that watches them unless it runs. Raises
        LaunchError when the cluster does not answer or refused the watch."""
        with self._listing:
            now = self._clock.monotonic()
            if fresh or now - self._asked > _LIST_EVERY / (1 if self._unlisted is None else 5):
                self._asked = now  # before the call: a watch that ends meanwhile has the pods listed again
                if (failure := self._list()) is not None:
                    self._asked = self._clock.monotonic()  # it may come late
                self._unlisted = failure
            if self._unlisted is not None:  # also for other hosts: not each of them asks again
                raise self._unlisted
            if not self._watching:
                self._watching = True
                self._threads.start(self._watch, name="watch-pods")
        if self._refused is not None:
            raise self._refused
        with self._lock:
            return pod_status.newest(list(self._pods.values()))

    def note_log_start(self, worker: int, since: str | None) -> None:
        """Records the timestamp from which a host's log lines are still needed."""
        self._log_starts[worker] = since

    def final_lines(self, pod: Pod, since: str | None) -> list[LogLine] | None:
        """Returns the log lines of a pod that is being deleted or is gone, from `since` on; None for other pods, whose
        log can be read. Waits a few seconds for the rest of an ended pod's log."""
        with self._lock:
            log = self._final_logs.get(pod.worker)
        if log is None or log.uid != pod.uid:
            return [] if pod.gone else None
        if pod.ended:
            log.ended.wait(_EOF_SECONDS)
        return [line for line in list(log.lines) if since is None or line.timestamp >= since]

    def close(self) -> None:
        """Ends all kubectl commands that watch or follow."""
        self._closed.set()
        with self._lock:
            kills = list(self._kills)
        for kill in kills:
            kill()

    def _list(self) -> LaunchError | None:
        """Lists the pods: records new states, and marks missing pods as gone. Returns kubectl's error, None without."""
        try:
            answer = json.loads(self._kubectl.call("get", "pods", "--selector", self._selector, "--output", "json"))
        except LaunchError as error:
            return error
        listed = {pod.uid: pod for pod in map(pod_status.parse, answer["items"])}
        with self._lock:
            missing = [pod for uid, pod in self._pods.items() if uid not in listed]
        for pod in missing:
            self._record_pod(replace(pod, gone=True))
        for pod in listed.values():
            self._record_pod(pod)
        return None

    def _watch(self) -> None:
        """Records all changes until closed, in one `kubectl get --watch` after another. Keeps a denied permission in
        `_refused` until a watch shows a pod or ends well: a sign-in may be renewed. Runs in a thread."""
        while not self._closed.is_set():
            reader = JsonStream(self._handle_event)
            command = ["get", "pods", "--selector", self._selector, "--watch", "--output-watch-events"]
            refused, begun = None, self._clock.monotonic()
            try:
                self._follow([*command, "--output", "json"], reader.line, _WATCH_SECONDS)
            except LaunchError as error:
                refused = error if error.exit_code is Exit.PERMISSION else self._refused
            self._refused = refused
            self._closed.wait(max(0.0, begun + 1.0 - self._clock.monotonic()) if refused is None else _LIST_EVERY)
            if self._unlisted is None:
                self._asked = float("-inf")  # list the pods: no watch tells of those that vanish between two

    def _handle_event(self, event: dict[str, Any]) -> None:
        """Records the pod of an ADDED, MODIFIED or DELETED (gone) event and forgets a refusal; ignores other events."""
        if event.get("type") in ("ADDED", "MODIFIED", "DELETED"):
            self._refused = None
            pod = pod_status.parse(event["object"])
            self._record_pod(replace(pod, gone=True) if event["type"] == "DELETED" else pod)

    def _record_pod(self, pod: Pod) -> None:
        """Records a pod's state, except that a late event does not undo a recorded end. Starts a thread that follows
        the pod's log when the pod is being deleted."""
        with self._lock:
            known = self._pods.get(pod.uid)
            if known is not None and known.ended and not (pod.ended and pod.started):
                # A late event, or one without the container's end: keep how it ended.
                pod = replace(known, gone=known.gone or pod.gone, disruption=known.disruption or pod.disruption)
            self._pods[pod.uid] = pod
            followed = self._final_logs.get(pod.worker)
            if not pod.deleting or pod.gone or not pod.started or (followed and followed.uid == pod.uid):
                return
            log = self._final_logs[pod.worker] = _FinalLog(pod.uid, self._threads.event())
        self._threads.start(self._follow_log, pod, log, name=f"final-log-{pod.worker}")

    def _follow_log(self, pod: Pod, log: _FinalLog) -> None:
        """Appends the log lines of a pod that is being deleted to `log` until the pod's end, and sets `log.ended`. Asks
        again if the cluster fails before the first line; later, keeps the lines received. Runs in a thread."""
        since = self._log_starts.get(pod.worker)
        window = [f"--since-time={since}"] if since else []
        command = ["logs", pod.name, "--container", CONTAINER, "--follow", "--timestamps", *window]
        parse, again = pod_status.parse_log_line, True
        while again:
            try:
                self._follow(command, lambda line: log.lines.append(parse(line.rstrip("\n"))), _FINAL_LOG_SECONDS)
                again = False
            except LaunchError:
                again = not (log.lines or self._pods[pod.uid].gone or self._closed.wait(_LIST_EVERY / 5))
        log.ended.set()

    def _follow(self, words: list[str], on_line: Callable[[str], None], seconds: float) -> None:
        """Runs a kubectl command for at most `seconds`, and passes its lines to `on_line`. `close` ends it."""
        kills: list[Callable[[], None]] = []

        def begin(kill: Callable[[], None]) -> None:
            kills.append(kill)
            with self._lock:
                self._kills.add(kill)
            if self._closed.is_set():
                kill()

        try:
            self._kubectl.follow(*words, on_line=on_line, on_start=begin, seconds=seconds)
        finally:
            with self._lock:
                self._kills.difference_update(kills)


class JsonStream:
    """Parses a stream of JSON objects, each on one line or indented, and calls `take` with each complete one."""

    def __init__(self, take: Callable[[dict[str, Any]], None]) -> None:
        self._take = take
        self._open: list[str] = []

    def line(self, line: str) -> None:
        """Takes the next line, and passes an object that it completes to `take`. Skips lines between objects."""
        if line.startswith("{"):
            self._open = []
        elif not self._open:
            return  # a warning between two objects
        self._open.append(line)
        if line.startswith(("{", "}")) and line.endswith("}"):
            document, self._open = "\n".join(self._open), []
            self._take(json.loads(document))
