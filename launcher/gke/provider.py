"""The provider for GKE: an attempt is a JobSet, a host is a pod of it; everything goes through kubectl.

There is no slice to create: nodes belong to the cluster's node pools. "The slice" is what the JobSets of one
`slice.name` run on, one run at a time. tpu-launch decides about restarts itself, so its JobSets have none
(manifest.Restarts.BY_LAUNCHER), and pods stay as they ended until their lines have been fetched.
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from launcher.config import Config
from launcher.errors import BadInput, Exit, LaunchError
from launcher.gke import CAPABILITIES, yaml_text
from launcher.gke import manifest as manifests
from launcher.gke import pods as parsing
from launcher.gke.kubectl import Kubectl
from launcher.gke.manifest import CONTAINER, LABEL_RUN, LABEL_SLICE, Kind, Restarts, Workload
from launcher.gke.pods import Pod
from launcher.gke.watch import PodWatch
from launcher.provider import Attempt, ContainerState, HostReport, Observation, SliceState
from training.accelerators import gke_nodes

LOG_BYTES = 16_000_000  # of one look
_LOG_SECONDS = 15.0
_GONE_SECONDS = 120.0  # for objects to vanish once they are deleted
_LOOKS_AT_ONCE = 8  # kubectl is a heavy client
_STACK = "py-spy dump --nonblocking --pid 1 2>&1 || cat /proc/1/comm /proc/1/wchan /proc/1/status"
_JOBSETS = "jobsets.jobset.x-k8s.io"
_JOBSET_LABEL = "jobset.sigs.k8s.io/jobset-name"


class Gke:
    """The cluster and namespace of a file. See `launcher.provider.Provider`."""

    capabilities = CAPABILITIES

    def __init__(self, config: Config, say: Callable[[str], None]) -> None:
        manifests.check(config)
        manifests.check_name(
            f"{config.run_name}-0000-000000-0000-00"
        )  # the longest that a run's attempts will be called
        self.config = config
        self.say = say
        self._kubectl = Kubectl(config.gke.context, config.gke.namespace)
        self._watches: dict[str, PodWatch] = {}
        self._lock = threading.Lock()
        self._looks = threading.Semaphore(_LOOKS_AT_ONCE)

    # -- the slice ----------------------------------------------------------------------------------------------------

    def describe(self) -> SliceState:
        """READY when JobSets can be listed; PREEMPTED when every pod that is being watched was taken away."""
        jobsets = self._jobsets()
        state = "PREEMPTED" if any(self._all_disrupted(watch) for watch in self._watching()) else "READY"
        running = [each for each in jobsets if not _terminal(each)]
        names = {each["metadata"]["name"]: each for each in running}
        newest = max(names, default="", key=lambda name: names[name]["metadata"].get("creationTimestamp", ""))
        addresses = [
            manifests.host_name(newest, Kind.JOBSET, str(index)) if newest else ""
            for index in range(self.config.accelerator.hosts)
        ]
        detail = f"GKE, namespace {self._kubectl.namespace}" + (f", JobSet {newest}" if newest else "")
        return SliceState(self.config.slice.name, state, "", self.config.accelerator.name, tuple(addresses), detail)

    def known_ready(self) -> bool:
        return False

    def create(self) -> None:
        """Nothing is made; says when no node of the slice's kind is there now."""
        self._jobsets()
        selector = ",".join(f"{key}={value}" for key, value in manifests.node_selector(self.config).items())
        try:
            nodes = self._kubectl.call("get", "nodes", "--selector", selector, "--output", "name").split()
        except LaunchError as error:
            if error.exit_code is not Exit.PERMISSION:
                raise
            self.say("whether there are nodes is not for you to see; a run will show")
            return
        wanted = self.config.accelerator.hosts
        if len(nodes) < wanted:
            self.say(
                f"{len(nodes)} of {wanted} nodes ({gke_nodes(self.config.accelerator).machine_type}, {self.config.accelerator.topology_name}) are "
                "there now: a run waits until the cluster adds them; docs/guide/gke.md says how to make a node pool"
            )

    def delete(self) -> None:
        """Deletes every JobSet and ConfigMap of the slice. Node pools are the cluster's, and stay."""
        selector = f"{LABEL_SLICE}={self.config.slice.name}"
        self._delete(f"{_JOBSETS},configmaps", "--selector", selector)
        self._wait_gone(selector)
        self.say("the JobSets are gone; the node pool is the cluster's and stays")

    def connect(self) -> None:
        """Nothing is kept open."""

    def close(self) -> None:
        for watch in self._watching():
            watch.close()
        self._watches.clear()

    # -- containers ---------------------------------------------------------------------------------------------------

    def prepare(self, attempt: Attempt) -> list[HostReport]:
        """Refuses a slice that another run uses, removes this run's earlier attempts, and has the cluster check the
        manifest."""
        hosts = range(self.config.accelerator.hosts)
        _require_digest(attempt.image)
        for jobset in self._jobsets():
            name, run = jobset["metadata"]["name"], jobset["metadata"]["labels"].get(LABEL_RUN, "")
            if run == attempt.run_id:
                if name != _name(attempt.container):
                    self._remove(name)
            elif not _terminal(jobset):
                return [HostReport(worker, False, f"run {run} is on this host", occupied_by=run) for worker in hosts]
        self._create(attempt, "--dry-run=server")
        return [HostReport(worker, True, attempt.image) for worker in hosts]

    def start(self, attempt: Attempt) -> list[HostReport]:
        """Creates the JobSet, unless it is there, and waits until every host's container has started. Raises the error
        that keeps one from it."""
        name = _name(attempt.container)
        if not any(jobset["metadata"]["name"] == name for jobset in self._jobsets()):
            self._delete("configmaps", name)  # of a start that broke off half-way
            self._create(attempt)
        try:
            self._wait_started(attempt, name)
        except LaunchError:
            self._remove(name)
            raise
        return [HostReport(worker, True, "") for worker in range(self.config.accelerator.hosts)]

    def observe(self, worker: int, container: str, since: str | None, *, patience: float = 0.0) -> Observation:
        watch = self._watch(container)
        watch.note_cursor(worker, since)
        try:
            pod = watch.pods().get(worker)
            if pod is None:
                return Observation(worker, ContainerState("absent"))
            state, problem = pod.state()
            if not pod.started:
                return Observation(worker, state, problem=problem)
            lines = watch.last_words(pod, since)
            more = False
            if lines is None:  # asked for after the state: an ended pod's log is whole
                lines, more = self._log(pod, since)
        except LaunchError as error:
            return Observation(worker, None, problem=str(error).splitlines()[0])
        return Observation(worker, state, tuple(lines), more=more, problem=problem)

    def stop(
        self, container: str, *, grace: int, remove: bool, workers: Sequence[int] | None = None
    ) -> list[HostReport]:
        wanted = list(range(self.config.accelerator.hosts)) if workers is None else list(workers)
        watch = self._watch(container)
        running = [pod for worker, pod in watch.pods(fresh=True).items() if worker in wanted and not pod.ended]
        if running:
            names = [pod.name for pod in running]
            self._delete("pods", *names, f"--grace-period={grace}")
        late = self._wait_ended(watch, {pod.worker for pod in running}, grace + 30)
        if remove:
            self._remove(_name(container))
            watch.close()
            with self._lock:
                self._watches.pop(container, None)
        return [
            HostReport(
                worker, worker not in late, f"its pod has not ended within {grace + 30} s" if worker in late else ""
            )
            for worker in wanted
        ]

    def evidence(self, container: str, workers: Sequence[int]) -> dict[str, str]:
        """What `kubectl describe` says of the attempt's pods."""
        found = {}
        for worker, pod in self._watch(container).pods().items():
            try:
                found[f"host-{worker}.txt"] = self._kubectl.call("describe", "pod", pod.name)
            except LaunchError as error:  # it may be gone
                found[f"host-{worker}.txt"] = str(error)
        return found

    def stacks(self, container: str) -> dict[int, str]:
        """By `kubectl exec`, for which k8s/role.yaml has a rule of its own."""
        found = {}
        for worker, pod in self._watch(container).pods().items():
            if pod.started and not pod.ended:
                try:
                    found[worker] = self._kubectl.call(
                        "exec", pod.name, "--container", CONTAINER, "--", "sh", "-c", _STACK
                    )
                except LaunchError as error:
                    found[worker] = str(error)
        return found

    # -- parts --------------------------------------------------------------------------------------------------------

    def _jobsets(self) -> list[dict[str, Any]]:
        selector = f"{LABEL_SLICE}={self.config.slice.name}"
        found: list[dict[str, Any]] = json.loads(
            self._kubectl.call("get", _JOBSETS, "--selector", selector, "--output", "json")
        )["items"]
        return found

    def _create(self, attempt: Attempt, *options: str) -> None:
        """The JobSet first: its absence keeps nothing; the ConfigMap belongs to it and goes with it."""
        work = Workload(
            name=_name(attempt.container),
            run_id=attempt.run_id,
            attempt=attempt.number,
            image=attempt.image,
            command=attempt.command,
            environment=attempt.environment,
            files={name: data.decode() for name, data in attempt.files.items()},
            shm_size=attempt.shm_size,
            user=attempt.user,
        )
        objects = manifests.objects(self.config, work, Kind.JOBSET, Restarts.BY_LAUNCHER)
        text = yaml_text.documents(objects)
        self._kubectl.call("create", "--validate=strict", *options, "--filename", "-", input=text)

    def _wait_started(self, attempt: Attempt, name: str) -> None:
        deadline = time.monotonic() + self.config.run.start_minutes * 60
        watch = self._watch(attempt.container)
        hosts = set(range(self.config.accelerator.hosts))
        told = ""
        while True:
            try:
                pods = watch.pods()
            except LaunchError as error:  # the cluster may be back before the time is over
                if error.exit_code is not Exit.CLOUD_ERROR or time.monotonic() > deadline:
                    raise
                self.say(str(error))
                time.sleep(2.0)
                continue
            waiting = {
                worker: pods.get(worker)
                for worker in hosts
                if not ((pod := pods.get(worker)) and (pod.started or pod.ended))
            }
            if not waiting:
                return
            for pod in waiting.values():
                trouble = parsing.trouble(pod, attempt.image) if pod else None
                if trouble:
                    raise trouble
            reasons = _waiting(waiting) if any(waiting.values()) else self._queued(name)
            if time.monotonic() > deadline:
                raise LaunchError(
                    f"not all hosts started within run.start_minutes ({self.config.run.start_minutes:g}): {reasons}"
                    + self._node_advice(pod for pod in waiting.values() if pod),
                    exit_code=Exit.STOCKOUT if _lacks_nodes(waiting.values()) else Exit.CLOUD_ERROR,
                )
            if reasons != told:
                self.say(f"waiting for {len(waiting)} of {len(hosts)} hosts: {reasons}")
                told = reasons
            time.sleep(0.5)

    def _queued(self, name: str) -> str:
        jobset = next((each for each in self._jobsets() if each["metadata"]["name"] == name), None)
        if jobset is None:
            raise LaunchError(f"JobSet {name} was deleted by somebody else before it started", exit_code=Exit.CONFLICT)
        if jobset["spec"].get("suspend"):
            return f"JobSet {name} is suspended: Kueue has not admitted it to queue {self.config.gke.queue} yet"
        return f"JobSet {name} has no pods yet"

    def _node_advice(self, pods: Iterable[Pod]) -> str:
        if not any(pod.unschedulable for pod in pods):
            return ""
        slice_ = self.config.accelerator
        nodes = gke_nodes(slice_)
        return (
            f"\n  it needs {slice_.hosts} nodes that are free, of one node pool: --machine-type {nodes.machine_type} --tpu-topology "
            f"{slice_.topology_name} --num-nodes {slice_.hosts} (docs/guide/gke.md)"
        )

    def _log(self, pod: Pod, since: str | None) -> tuple[list[Any], bool]:
        window = [f"--since-time={since}"] if since else []
        with self._looks:
            said = self._kubectl.call(
                "logs",
                pod.name,
                "--container",
                CONTAINER,
                "--timestamps",
                f"--limit-bytes={LOG_BYTES}",
                *window,
                seconds=_LOG_SECONDS,
            )
        return parsing.log_lines(said, LOG_BYTES)

    def _watch(self, container: str) -> PodWatch:
        with self._lock:
            if container not in self._watches:
                self._watches[container] = PodWatch(self._kubectl, f"{_JOBSET_LABEL}={_name(container)}")
            return self._watches[container]

    def _watching(self) -> list[PodWatch]:
        with self._lock:
            return list(self._watches.values())

    def _all_disrupted(self, watch: PodWatch) -> bool:
        pods = watch.pods()
        return bool(pods) and all(pod.disruption and pod.ended for pod in pods.values())

    def _wait_ended(self, watch: PodWatch, workers: set[int], seconds: float) -> set[int]:
        deadline = time.monotonic() + seconds
        while True:
            pods = watch.pods()
            late = {worker for worker in workers if worker in pods and not pods[worker].ended}
            if not late or time.monotonic() > deadline:
                return late
            time.sleep(0.2)

    def _remove(self, name: str) -> None:
        """Deletes an attempt's objects, and returns when its pods are gone too."""
        self._delete(f"{_JOBSETS},configmaps", name)
        self._wait_gone(f"{_JOBSET_LABEL}={name}")

    def _delete(self, *what: str) -> None:
        self._kubectl.call("delete", *what, "--ignore-not-found", "--wait=false", "--output", "name")

    def _wait_gone(self, selector: str) -> None:
        """Pods that are deleted with their JobSet get their grace period."""
        seconds = _GONE_SECONDS + manifests.grace_seconds(self.config)
        deadline = time.monotonic() + seconds
        while True:
            left = self._kubectl.call("get", "pods", "--selector", selector, "--output", "name").split()
            if not left:
                return
            if time.monotonic() > deadline:
                raise LaunchError(
                    f"{len(left)} pods are still there {seconds:.0f} s after they were deleted: {', '.join(left)}"
                )
            time.sleep(0.5)


def _name(container: str) -> str:
    """The JobSet of an attempt's container."""
    return container.removeprefix("tpu-launch-")


def _terminal(jobset: dict[str, Any]) -> bool:
    return bool(jobset.get("status", {}).get("terminalState"))


def _require_digest(image: str) -> None:
    if "@sha256:" not in image:
        raise BadInput(
            f"the cluster's nodes can't have image {image}: set image.repository, where it is pushed to, or image.reference"
        )


def _lacks_nodes(pods: Iterable[Pod | None]) -> bool:
    """Not started for want of nodes, or of a place in the queue; everything else is trouble."""
    return all(pod is None or bool(pod.unschedulable) for pod in pods)


def _waiting(waiting: dict[int, Pod | None]) -> str:
    """What hosts wait for; hosts that wait for the same are told of together."""
    reasons: dict[str, list[int]] = {}
    for worker, pod in sorted(waiting.items()):
        reasons.setdefault(parsing.waits_for(pod) if pod else "it has no pod yet", []).append(worker)
    return "; ".join(
        f"host{'s'[: len(workers) > 1]} {', '.join(map(str, workers))}: {reason}" for reason, workers in reasons.items()
    )
