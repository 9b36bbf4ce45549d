"""Parses pods and their logs, as the Kubernetes API gives them, into the provider's terms. Pure."""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from launcher.errors import Exit, LaunchError
from launcher.gke.workload import CONTAINER
from launcher.log_lines import LogWindow, kubelet_records, read_log
from launcher.provider import ContainerState, LogLine

INDEX = "batch.kubernetes.io/job-completion-index"
_DISRUPTIONS = ("Evicted", "Preempting", "NodeShutdown", "Terminated", "NodeLost")  # reasons of a failed pod
_OWN_END = (0, 2, 75)  # exit codes that say more than that the pod was disrupted


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
        return (
            self.gone or self.phase in ("Succeeded", "Failed") or (self.container is not None and self.container.ended)
        )

    @property
    def started(self) -> bool:
        """Returns whether its container runs or has run."""
        return self.container is not None and self.container.status in ("running", "exited")

    def state(self) -> tuple[ContainerState | None, str]:
        """Returns the container's state and "": "created" while the pod waits, "absent" if the pod is gone without one.
        Returns None and the reason if it can't be known, because the pod was disrupted or failed without a state."""
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
    """Parses a pod, as the API gives it."""
    metadata, status = document["metadata"], document.get("status", {})
    labels = {**metadata.get("annotations", {}), **metadata.get("labels", {})}
    conditions = {condition["type"]: condition for condition in status.get("conditions", [])}
    containers = {container["name"]: container for container in status.get("containerStatuses", [])}
    container = containers.get(CONTAINER)
    state = container.get("state", {}) if container else {}
    waiting = state.get("waiting", {})
    scheduled = conditions.get("PodScheduled", {})
    disrupted = conditions.get("DisruptionTarget", {})
    disruption = ""
    if disrupted.get("status") == "True":
        disruption = _describe(disrupted)
    elif status.get("phase") == "Failed" and status.get("reason") in _DISRUPTIONS:
        disruption = _describe(status)
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
        disruption=disruption,
    )


def _describe(condition: Mapping[str, Any]) -> str:
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


def newest(pods: list[Pod]) -> dict[int, Pod]:
    """Returns the newest pod of each host, by worker number."""
    return {pod.worker: pod for pod in sorted(pods, key=lambda pod: (pod.created, not pod.gone))}


def find_start_error(pod: Pod, image: str) -> LaunchError | None:
    """Returns the error of a pod that can't start without the user's help, because its image can't be pulled or its
    container can't be created; None for any other pod."""
    host = f"host {pod.worker} (pod {pod.name})"
    if pod.waiting in ("ImagePullBackOff", "InvalidImageName", "ErrImageNeverPull"):
        detail = f": {pod.message}" if pod.message else ""
        if re.search(r"40[13]|denied|[Uu]nauthorized|[Ff]orbidden", pod.message):
            return LaunchError(
                f"{host} may not pull {image}{detail}\n  give the node pool's service account "
                "roles/artifactregistry.reader on the repository",
                exit_code=Exit.PERMISSION,
            )
        return LaunchError(
            f"{host} can't pull {image}{detail}\n  was it pushed, and to this repository?", exit_code=Exit.BAD_INPUT
        )
    if pod.waiting in ("CreateContainerConfigError", "CreateContainerError"):
        return LaunchError(
            f"{host} can't create its container: {pod.message or pod.waiting}\n  the Secrets that gke.secrets names "
            "must be in the namespace",
            exit_code=Exit.BAD_INPUT,
        )
    return None


def describe_waiting(pod: Pod) -> str:
    """Returns why a pod has not started yet, for the user."""
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
    """Parses a line and its timestamp, which becomes UTC. A line without a timestamp is kept as it is."""
    return next(iter(read_log(line.encode(), kubelet_records, complete=True).lines), LogLine("", ""))
