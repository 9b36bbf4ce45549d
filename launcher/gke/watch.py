"""The pods of one attempt, as they are now and as they ended.

A pod that is deleted (a node drained, a stop) vanishes from the API together with its log a moment after its end, too
fast for polling once a second. So two things are followed: a watch of all pods, whose last event shows how each ended;
and the log of every pod that is being deleted. A list every few seconds repairs what a broken watch missed, and notices
a cluster that does not answer.
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

from launcher.errors import Exit, LaunchError
from launcher.gke import pod_status
from launcher.gke.kubectl import Kubectl
from launcher.gke.pod_status import Pod
from launcher.gke.workload import CONTAINER
from launcher.provider import LogLine

_LIST_EVERY = 10.0  # seconds
_WATCH_SECONDS = 300.0  # then the watch is begun again
_FINAL_LOG_SECONDS = 900.0  # longer than any grace period
_EOF_SECONDS = 5.0  # for the rest of an ended pod's log


@dataclass
class _FinalLog:
    """The log of a pod that is being deleted, followed to its end."""

    uid: str
    lines: list[LogLine] = field(default_factory=list)
    ended: threading.Event = field(default_factory=threading.Event)


class PodWatch:
    """The pods that a selector finds, one a host."""

    def __init__(self, kubectl: Kubectl, selector: str) -> None:
        self._kubectl = kubectl
        self._selector = selector
        self._lock = threading.Lock()
        self._listing = threading.Lock()
        self._pods: dict[str, Pod] = {}  # by uid
        self._listed = float("-inf")
        self._closed = threading.Event()
        self._kills: set[Callable[[], None]] = set()
        self._watching = False
        self._refused: LaunchError | None = None
        self._cursors: dict[int, str | None] = {}  # where the next observation of a host's log begins
        self._final_logs: dict[int, _FinalLog] = {}

    def pods(self, *, fresh: bool = False) -> dict[int, Pod]:
        """The last pod of each host, ended and gone ones too. Raises LaunchError when the cluster does not answer."""
        with self._listing:
            if fresh or time.monotonic() - self._listed > _LIST_EVERY:
                self._list()
            if not self._watching and not self._closed.is_set():
                self._watching = True
                threading.Thread(target=self._watch, name="watch-pods", daemon=True).start()
        if self._refused is not None:
            raise self._refused
        with self._lock:
            return pod_status.newest(list(self._pods.values()))

    def note_cursor(self, worker: int, since: str | None) -> None:
        """Takes note of the time from which a host's lines are wanted."""
        self._cursors[worker] = since

    def final_lines(self, pod: Pod, since: str | None) -> list[LogLine] | None:
        """The lines of a pod that is being deleted, or was; None for any other, whose log can be read. Waits for the
        end of an ended one's."""
        with self._lock:
            log = self._final_logs.get(pod.worker)
        if log is None or log.uid != pod.uid:
            return [] if pod.gone else None
        if pod.ended:
            log.ended.wait(_EOF_SECONDS)
        return [line for line in list(log.lines) if since is None or line.timestamp >= since]

    def close(self) -> None:
        """Ends the watch, and every log that is being followed."""
        self._closed.set()
        with self._lock:
            kills = list(self._kills)
        for kill in kills:
            kill()

    def _list(self) -> None:
        answer = json.loads(self._kubectl.call("get", "pods", "--selector", self._selector, "--output", "json"))
        listed = {pod.uid: pod for pod in map(pod_status.parse, answer["items"])}
        with self._lock:
            missing = [pod for uid, pod in self._pods.items() if uid not in listed]
        for pod in missing:
            self._take(replace(pod, gone=True))
        for pod in listed.values():
            self._take(pod)
        self._listed = time.monotonic()

    def _watch(self) -> None:
        """Follows all changes until closed. A watch that ends is begun again; the list shows whether the cluster
        answers at all."""
        while not self._closed.is_set():
            reader = JsonStream(self._event)
            try:
                self._follow(
                    [
                        "get",
                        "pods",
                        "--selector",
                        self._selector,
                        "--watch",
                        "--output-watch-events",
                        "--output",
                        "json",
                    ],
                    reader.line,
                    _WATCH_SECONDS,
                )
            except LaunchError as error:
                if error.exit_code is Exit.PERMISSION:
                    self._refused = error
                    return
            self._closed.wait(1.0)

    def _event(self, event: dict[str, Any]) -> None:
        if event.get("type") in ("ADDED", "MODIFIED", "DELETED"):
            pod = pod_status.parse(event["object"])
            self._take(replace(pod, gone=True) if event["type"] == "DELETED" else pod)

    def _take(self, pod: Pod) -> None:
        with self._lock:
            known = self._pods.get(pod.uid)
            if known is not None and known.ended and not (pod.ended and pod.started):
                # A late event, or one without the container's end: how it ended is known already.
                pod = replace(known, gone=known.gone or pod.gone, disruption=known.disruption or pod.disruption)
            self._pods[pod.uid] = pod
            follow = (
                pod.deleting
                and not pod.gone
                and pod.started
                and self._final_logs.get(pod.worker, _FinalLog("")).uid != pod.uid
            )
            if follow:
                log = self._final_logs[pod.worker] = _FinalLog(pod.uid)
        if follow:
            threading.Thread(
                target=self._follow_log, args=(pod, log), name=f"final-log-{pod.worker}", daemon=True
            ).start()

    def _follow_log(self, pod: Pod, log: _FinalLog) -> None:
        since = self._cursors.get(pod.worker)
        window = [f"--since-time={since}"] if since else []
        try:
            self._follow(
                ["logs", pod.name, "--container", CONTAINER, "--follow", "--timestamps", *window],
                lambda line: log.lines.append(pod_status.parse_log_line(line.rstrip("\n"))),
                _FINAL_LOG_SECONDS,
            )
        except LaunchError:
            pass  # its lines up to here are there
        finally:
            log.ended.set()

    def _follow(self, words: list[str], on_line: Callable[[str], None], seconds: float) -> None:
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
    """The JSON objects in a stream, one a line or indented, each handed over when its last line has come."""

    def __init__(self, take: Callable[[dict[str, Any]], None]) -> None:
        self._take = take
        self._open: list[str] = []

    def line(self, line: str) -> None:
        """Takes the next line of the stream."""
        if line.startswith("{"):
            self._open = []
        elif not self._open:
            return  # a warning between two objects
        self._open.append(line)
        if line.startswith(("{", "}")) and line.endswith("}"):
            document, self._open = "\n".join(self._open), []
            self._take(json.loads(document))
