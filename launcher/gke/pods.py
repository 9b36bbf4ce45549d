"""The pods of an attempt: their states and logs, as the Kubernetes API gives them, and the watch that keeps their ends.

A deleted pod (its node was drained, the run was stopped) vanishes from the API with its log a moment after its end, too
fast for polling once a second. So one kubectl command watches all pods, whose last events show how they ended, and
another follows the log of each pod that is being deleted. Listing the pods every few seconds finds what a broken watch
missed, and a cluster that does not answer.
"""

import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from launcher.container_output import LogWindow, kubelet_records, read_log
from launcher.errors import Exit, LaunchError
from launcher.gke.kubectl import Kubectl
from launcher.gke.workload import CONTAINER
from launcher.images.repositories import is_google
from launcher.provider import ContainerState, LogLine
from training.machine import Event

INDEX = "batch.kubernetes.io/job-completion-index"
_DISRUPTIONS = ("Evicted", "Preempting", "NodeShutdown", "Terminated", "NodeLost")  # reasons of a failed pod
# In the message of a container that can't start: the kubelet tries again, mostly with success within minutes.
_PASSING = r"(?i)time(d )?out|deadline exceeded|is reserved for|\b(429|50\d)\b|unavailable|reset by peer|\bEOF\b"
_OWN_END = (0, 2, 75)  # exit codes that say more than that the pod was disrupted
_LIST_EVERY = 10.0  # seconds
_WATCH_SECONDS = 300.0  # then a new watch begins
_FINAL_LOG_SECONDS = 900.0  # longer than any grace period
_EOF_SECONDS = 5.0  # wait for the rest of an ended pod's log


@dataclass(frozen=True)
class Pod:
    """A host's pod. `container` is None until the kubelet reports it."""

    name: str
    uid: str
    worker: int
    created: str
    phase: str
    node: str
    container: ContainerState | None
    waiting: str = ""  # why the container has not started: ImagePullBackOff, CreateContainerConfigError, ...
    message: str = ""  # more about it
    unschedulable: str = ""  # why no node takes it
    deleting: bool = False
    disruption: str = ""  # why it was disrupted: evicted, preempted, its node shut down
    gone: bool = False  # no longer in the API

    @property
    def ended(self) -> bool:
        """Returns whether its container has ended, or never will start."""
        has_ended = self.container is not None and self.container.ended
        return self.gone or has_ended or self.phase in ("Succeeded", "Failed")

    @property
    def started(self) -> bool:
        """Returns whether its container runs or has run."""
        return self.container is not None and self.container.status in ("running", "exited")

    def state(self) -> tuple[ContainerState | None, str]:
        """Returns the container's state and "": "created" while the pod waits, "absent" if the pod is gone without one.
        Returns None and the reason if it failed without a state, or was disrupted and its exit code is not 0, 2 or
        75."""
        code = self.container.exit_code if self.container else None
        if self.disruption and self.ended and code not in _OWN_END:
            return None, f"its pod was disrupted: {self.disruption}"
        if self.container is not None and (self.container.ended or not self.ended):
            return self.container, ""
        if self.gone or self.phase == "Succeeded":
            return ContainerState("absent"), ""
        if self.phase == "Failed":
            return None, f"its pod failed: {self.message or 'no reason given'}"
        return ContainerState("created"), ""


def parse(document: Mapping[str, Any]) -> Pod:
    """Parses a pod, as the API gives it; one without an index is worker 0."""
    metadata, status = document["metadata"], document.get("status", {})
    labels = {**metadata.get("annotations", {}), **metadata.get("labels", {})}
    conditions = {condition["type"]: condition for condition in status.get("conditions", [])}
    containers = {container["name"]: container for container in status.get("containerStatuses", [])}
    container = containers.get(CONTAINER)
    state = container.get("state", {}) if container else {}
    waiting = state.get("waiting", {})
    scheduled = conditions.get("PodScheduled", {})
    disrupted = conditions.get("DisruptionTarget", {})
    failed = status if status.get("phase") == "Failed" and status.get("reason") in _DISRUPTIONS else {}
    return Pod(
        name=metadata["name"],
        uid=metadata.get("uid", ""),
        worker=int(labels.get(INDEX, 0)),
        created=metadata.get("creationTimestamp", ""),
        phase=status.get("phase", ""),
        node=document.get("spec", {}).get("nodeName", ""),
        container=_container_state(state, container.get("imageID", "")) if container else None,
        waiting=waiting.get("reason", ""),
        message=waiting.get("message", "") or status.get("message", "") or status.get("reason", ""),
        unschedulable=_describe(scheduled) if scheduled.get("status") == "False" else "",
        deleting="deletionTimestamp" in metadata,
        disruption=_describe(disrupted if disrupted.get("status") == "True" else failed),
    )


def _describe(condition: Mapping[str, Any]) -> str:
    """Returns a condition's "reason: message", as far as it has them."""
    return ": ".join(part for part in (condition.get("reason", ""), condition.get("message", "")) if part)


def _container_state(state: Mapping[str, Any], image: str) -> ContainerState:
    """Returns a container's state, parsed from the `state` of its status, with the id of its image."""
    ended = state.get("terminated")
    if ended:
        reason = ended.get("reason", "")
        holds_log_lines = reason in ("Completed", "Error", "OOMKilled")
        message = "" if holds_log_lines else ended.get("message", "")
        return ContainerState(
            "exited",
            exit_code=int(ended["exitCode"]),
            oom_killed=reason == "OOMKilled",
            started_at=ended.get("startedAt") or "",
            finished_at=ended.get("finishedAt") or "",
            error=message,
            image=image,
        )
    if "running" in state:
        return ContainerState("running", started_at=state["running"].get("startedAt") or "", image=image)
    return ContainerState("created", image=image)


def find_start_error(pod: Pod, image: str) -> LaunchError | None:
    """Returns the error (BAD_INPUT or PERMISSION) of a pod that can't start without the user's help, because its image
    can't be pulled or its container can't be created; None for any other pod, and for an error that may pass, such as a
    registry's 503: the kubelet tries again. `image`: for the message."""
    code = Exit.BAD_INPUT
    if re.search(_PASSING, pod.message.replace(image.partition("@")[0].partition("/")[2], "")):  # without its name
        return None
    if pod.waiting in ("ImagePullBackOff", "InvalidImageName", "ErrImageNeverPull"):
        detail = f": {pod.message}" if pod.message else ""
        problem, advice = f"can't pull {image}{detail}", "was it pushed, and to this repository?"
        if re.search(r"\b40[13]\b|denied|[Uu]nauthorized|[Ff]orbidden", pod.message):
            problem, code = f"may not pull {image}{detail}", Exit.PERMISSION
            advice = "give the node pool's service account roles/artifactregistry.reader on the repository"
            if not is_google(image.partition("/")[0]):
                advice = "give the pods' service account (gke.service_account) imagePullSecrets for that registry"
    elif pod.waiting in ("CreateContainerConfigError", "CreateContainerError"):
        problem = f"can't create its container: {pod.message or pod.waiting}"
        advice = "the Secrets that gke.secrets names must be in the namespace"
    else:
        return None
    return LaunchError(f"host {pod.worker} (pod {pod.name}) {problem}\n  {advice}", exit_code=code)


def describe_waiting(waiting: Mapping[int, Pod | None]) -> str:
    """Returns why hosts wait, for the user: each reason once, with its hosts."""
    workers: dict[str, list[int]] = {}
    for worker, pod in sorted(waiting.items()):
        workers.setdefault(_why_waiting(pod), []).append(worker)
    return "; ".join(
        f"host{'s'[: len(indices) > 1]} {', '.join(map(str, indices))}: {reason}" for reason, indices in workers.items()
    )


def _why_waiting(pod: Pod | None) -> str:
    """Returns why a host waits, in words, by its pod; None: the pod does not exist yet."""
    if pod is None:
        return "its pod does not exist yet"
    if pod.unschedulable:
        return f"no node takes its pod ({pod.unschedulable})"
    if pod.waiting:
        return f"{pod.waiting}: {pod.message}" if pod.message else pod.waiting
    return f"its container is being created on {pod.node}" if pod.node else "it is not scheduled yet"


def parse_log(output: str, limit: int, *, ended: bool) -> tuple[LogWindow, bool]:
    """Parses what `kubectl logs --timestamps --limit-bytes=limit` prints. Returns its lines, and whether it was cut off
    at the limit. If the pod has `ended` and nothing was cut, a last line without a line end is whole too."""
    data = output.encode()
    cut = len(data) >= limit
    return read_log(data, kubelet_records, complete=ended and not cut), cut


def parse_log_line(line: str) -> LogLine:
    """Parses a line of `kubectl logs --timestamps`: time in UTC ("" without one), and text, cut after LINE_BYTES."""
    return next(iter(read_log(line.encode(), kubelet_records, complete=True).lines), LogLine("", ""))


@dataclass
class _FinalLog:
    """The log of a pod that is being deleted, followed to its end."""

    uid: str
    ended: Event
    lines: list[LogLine] = field(default_factory=list)


class PodWatch:
    """The pods that match a selector, one a host."""

    def __init__(self, kubectl: Kubectl, selector: str) -> None:
        """Asks the cluster nothing yet. `selector`: kubectl's label selector."""
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
        if `fresh` or after 10 s, and starts the thread that watches them unless it runs. Raises LaunchError when the
        cluster refused the watch or does not answer; then again for 2 s, without asking."""
        with self._listing:
            now = self._clock.monotonic()
            if fresh or now - self._asked > _LIST_EVERY / (1 if self._unlisted is None else 5):
                self._asked = now  # before the call: a watch that ends meanwhile has the pods listed again
                try:
                    self._list()
                    self._unlisted = None
                except LaunchError as error:
                    self._asked, self._unlisted = self._clock.monotonic(), error  # it may come late
            if self._unlisted is not None:  # also for other hosts: not each of them asks again
                raise self._unlisted
            if not self._watching:
                self._watching = True
                self._threads.start(self._watch, name="watch-pods")
        if self._refused is not None:
            raise self._refused
        with self._lock:
            pods = sorted(self._pods.values(), key=lambda pod: (pod.created, not pod.gone))
        return {pod.worker: pod for pod in pods}

    def note_log_start(self, worker: int, since: str | None) -> None:
        """Records the timestamp from which a host's log lines are still needed."""
        self._log_starts[worker] = since

    def final_lines(self, pod: Pod, since: str | None) -> list[LogLine] | None:
        """Returns the log lines of a pod that is being deleted or is gone, from `since` (None: the first) on, [] if its
        log was not followed; None for other pods, whose log can be read. Waits up to 5 s for the rest of an ended pod's
        log."""
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

    def _list(self) -> None:
        """Lists the pods: records new states, and marks missing pods as gone. Raises LaunchError."""
        with self._lock:
            known = list(self._pods)  # the answer may lack a pod that appears during the call
        answer = json.loads(self._kubectl.call("get", "pods", "--selector", self._selector, "--output", "json"))
        listed = {pod.uid: pod for pod in map(parse, answer["items"])}
        with self._lock:
            missing = [self._pods[uid] for uid in known if uid not in listed]
        for pod in missing:
            self._record_pod(replace(pod, gone=True))
        for pod in listed.values():
            self._record_pod(pod)

    def _watch(self) -> None:
        """Records all changes until closed, in one `kubectl get --watch` after another. Keeps a denied permission in
        `_refused` until a watch shows a pod or ends well: a sign-in may be renewed. Runs in a thread."""
        while not self._closed.is_set():
            command = ["get", "pods", "--selector", self._selector, "--watch", "--output-watch-events"]
            refused, begun = None, self._clock.monotonic()
            try:
                self._follow([*command, "--output", "json"], json_stream(self._handle_event), _WATCH_SECONDS)
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
            pod = parse(event["object"])
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

        def keep(text: str) -> None:
            line = parse_log_line(text.rstrip("\n"))
            if line.timestamp or log.lines:  # else kubectl says why it fails
                log.lines.append(line)

        again = True
        while again:
            try:
                self._follow(command, keep, _FINAL_LOG_SECONDS)
                again = False
            except LaunchError:
                again = not (log.lines or self._pods[pod.uid].gone or self._closed.wait(_LIST_EVERY / 5))
        log.ended.set()

    def _follow(self, words: list[str], on_line: Callable[[str], None], seconds: float) -> None:
        """Runs a kubectl command as `Kubectl.follow`, for `seconds` at most; `close` ends it, which is no error. Raises
        LaunchError."""
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


def json_stream(take: Callable[[dict[str, Any]], None]) -> Callable[[str], None]:
    """Returns a function that is given the lines of a stream of JSON objects, each on one line or indented, and calls
    `take` with each complete object. It skips lines between objects."""
    lines: list[str] = []  # of the object that is not complete

    def add(line: str) -> None:
        if line.startswith("{"):
            lines.clear()
        elif not lines:
            return  # a warning between two objects
        lines.append(line)
        if line.startswith(("{", "}")) and line.endswith("}"):
            document = "\n".join(lines)
            lines.clear()
            take(json.loads(document))

    return add
