"""The provider for GKE: an attempt is a JobSet, a host is one of its pods; everything goes through kubectl.

There is no slice to create: nodes belong to the cluster's node pools. "The slice" is what the JobSets of one
`slice.name` run on, one run at a time. tpu-launch decides about restarts itself, so its JobSets have none
(workload.Restarts.BY_LAUNCHER), and pods stay as they ended until their lines have been fetched.
"""

from __future__ import annotations

import contextlib
import json
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from launcher.config import Config
from launcher.errors import BadInput, Exit, LaunchError
from launcher.gke import CAPABILITIES, checks, pod_status
from launcher.gke.commented_yaml import dump_documents
from launcher.gke.kubectl import Kubectl
from launcher.gke.manifest import make_objects
from launcher.gke.pod_status import Pod
from launcher.gke.watch import PodWatch
from launcher.gke.workload import (
    CONTAINER,
    LABEL_RUN,
    LABEL_SLICE,
    Kind,
    Restarts,
    Workload,
    grace_seconds,
    host_name,
    needs_secret,
    node_selector,
)
from launcher.provider import Attempt, CommandReport, ContainerState, HostReport, LogLine, Observation, SliceState
from training.accelerators import gke_nodes
from training.machine.clock import Clock

LOG_BYTES = 16_000_000  # of one observation
_LOG_SECONDS = 15.0
_GONE_SECONDS = 120.0  # for objects to vanish once they are deleted
_LOGS_AT_ONCE = 8  # kubectl is a heavy client
_STACK = "py-spy dump --nonblocking --pid 1 2>&1 || cat /proc/1/comm /proc/1/wchan /proc/1/status"
_JOBSETS = "jobsets.jobset.x-k8s.io"
_JOBSET_LABEL = "jobset.sigs.k8s.io/jobset-name"


class Gke:
    """The cluster and namespace of a file. See `launcher.provider.Provider`."""

    capabilities = CAPABILITIES

    def __init__(self, config: Config, say: Callable[[str], None]) -> None:
        checks.check(config)
        checks.check_name(f"{config.run_name}-0000-000000-0000-00")  # the longest name of an attempt
        self.config = config
        self.say = say
        self._kubectl = Kubectl(config.gke.context, config.gke.namespace)
        self._watches: dict[str, PodWatch] = {}
        self._lock = threading.Lock()
        self._observations = threading.Semaphore(_LOGS_AT_ONCE)

    @property
    def _workers(self) -> range:
        return range(self.config.accelerator.hosts)

    @property
    def _files(self) -> str:
        """The kinds of objects that an attempt's JobSet reads."""
        return "configmaps,secrets" if needs_secret(self.config) else "configmaps"

    # -- the slice ----------------------------------------------------------------------------------------------------

    def describe(self) -> SliceState:
        """READY when JobSets can be listed; PREEMPTED when every pod that is being watched was taken away."""
        running = {jobset["metadata"]["name"]: jobset for jobset in self._list_jobsets() if not _is_over(jobset)}
        state = "PREEMPTED" if any(_all_disrupted(watch) for watch in self._open_watches()) else "READY"
        newest = max(running, default="", key=lambda name: running[name]["metadata"].get("creationTimestamp", ""))
        addresses = [host_name(newest, Kind.JOBSET, str(worker)) if newest else "" for worker in self._workers]
        detail = f"GKE, namespace {self._kubectl.namespace}" + (f", JobSet {newest}" if newest else "")
        return SliceState(self.config.slice.name, state, "", self.config.accelerator.name, tuple(addresses), detail)

    def known_ready(self) -> bool:
        """Never: nothing is kept about a cluster."""
        return False

    def create(self, clock: Clock | None = None) -> None:
        """Creates nothing; reports when the cluster has too few nodes of the slice's kind now."""
        self._list_jobsets()
        selector = ",".join(f"{key}={value}" for key, value in node_selector(self.config).items())
        try:
            nodes = self._kubectl.call("get", "nodes", "--selector", selector, "--output", "name").split()
        except LaunchError as error:
            if error.exit_code is not Exit.PERMISSION:
                raise
            self.say("you may not list nodes, so whether there are enough will show when a run starts")
            return
        slice_ = self.config.accelerator
        if len(nodes) < slice_.hosts:
            self.say(
                f"{len(nodes)} of {slice_.hosts} nodes ({gke_nodes(slice_).machine_type}, {slice_.topology_name}) are "
                "there now: a run waits until the cluster adds them; docs/guide/gke.md says how to make a node pool"
            )

    def delete(self) -> None:
        """Deletes every JobSet and ConfigMap of the slice; a JobSet's Secret goes with it. Node pools are the
        cluster's, and stay."""
        selector = f"{LABEL_SLICE}={self.config.slice.name}"
        self._delete(f"{_JOBSETS},configmaps", "--selector", selector)
        self._wait_gone(selector)
        self.say("the JobSets are gone; the node pool is the cluster's and stays")

    def connect(self) -> None:
        """Nothing is kept open."""

    def close(self) -> None:
        """Ends the watches of pods."""
        for watch in self._open_watches():
            watch.close()
        self._watches.clear()

    # -- containers ---------------------------------------------------------------------------------------------------

    def prepare(self, attempt: Attempt) -> list[HostReport]:
        """Refuses a slice that another run uses, removes this run's earlier attempts, and has the cluster check the
        manifest."""
        _require_digest(attempt.image)
        for jobset in self._list_jobsets():
            name, run = jobset["metadata"]["name"], jobset["metadata"]["labels"].get(LABEL_RUN, "")
            if run == attempt.run_id:
                if name != _name(attempt.container):
                    self._remove(name)
            elif not _is_over(jobset):
                message = f"run {run} is on this host"
                return [HostReport(worker, False, message, occupied_by=run) for worker in self._workers]
        self._create(attempt, "--dry-run=server")
        return [HostReport(worker, True, attempt.image) for worker in self._workers]

    def start(self, attempt: Attempt) -> list[HostReport]:
        """Creates the JobSet, unless it is there, and waits until every host's container has started. Raises the error
        that keeps one from starting."""
        name = _name(attempt.container)
        try:
            if not any(jobset["metadata"]["name"] == name for jobset in self._list_jobsets()):
                self._delete(self._files, name)  # of a start that broke off half-way
                self._create(attempt)
            self._own_files(name)
            self._wait_started(attempt, name)
        except LaunchError:
            # Also where creating failed: its answer may be all that was lost.
            with contextlib.suppress(LaunchError):
                self._remove(name)
            raise
        return [HostReport(worker, True, "") for worker in self._workers]

    def observe(self, worker: int, container: str, since: str | None, *, patience: float = 0.0) -> Observation:
        """The state of a host's pod, and its log from `since` on. Never waits: the watch already knows the state."""
        watch = self._watch(container)
        watch.note_cursor(worker, since)
        try:
            pod = watch.pods().get(worker)
            if pod is None:
                return Observation(worker, ContainerState("absent"))
            state, problem = pod.state()
            if not pod.started:
                return Observation(worker, state, problem=problem)
            lines = watch.final_lines(pod, since)
            more = False
            if lines is None:  # fetched after the state: an ended pod's log is complete
                lines, more = self._read_log(pod, since)
        except LaunchError as error:
            return Observation(worker, None, problem=str(error).splitlines()[0])
        return Observation(worker, state, tuple(lines), more=more, problem=problem)

    def stop(
        self, container: str, *, grace: int, remove: bool, workers: Sequence[int] | None = None
    ) -> list[HostReport]:
        """Deletes the pods that run, which stops them; with `remove`, the objects of the attempt as well."""
        wanted = list(self._workers) if workers is None else list(workers)
        try:
            late = self._stop_pods(container, wanted, grace)
            if remove:
                self._remove(_name(container))
                self._watch(container).close()
                with self._lock:
                    self._watches.pop(container, None)
        except LaunchError as error:
            if not error.transient:
                raise
            return [HostReport(worker, False, str(error)) for worker in wanted]
        problem = f"its pod has not ended within {grace + 30} s"
        return [HostReport(worker, worker not in late, problem if worker in late else "") for worker in wanted]

    def _stop_pods(self, container: str, workers: Sequence[int], grace: int) -> set[int]:
        """Deletes those of these hosts' pods that run, and waits for their ends. Returns the hosts that are late."""
        watch = self._watch(container)
        running = [pod for worker, pod in watch.pods(fresh=True).items() if worker in workers and not pod.ended]
        if running:
            self._delete("pods", *(pod.name for pod in running), f"--grace-period={grace}")
        return self._wait_ended(watch, {pod.worker for pod in running}, grace + 30)

    def execute(
        self,
        container: str,
        command: Sequence[str],
        workers: Sequence[int],
        *,
        seconds: float,
        on_line: Callable[[int, str], None],
    ) -> list[CommandReport]:
        """Refused: kubectl has it."""
        pod = self._known_pods(container).get(min(workers, default=0))
        raise BadInput(
            "commands in live containers are for TPU VMs; on GKE: "
            f"kubectl --namespace {self._kubectl.namespace} exec {pod.name if pod else 'POD'} -- {' '.join(command)}"
        )

    def evidence(self, container: str, workers: Sequence[int]) -> dict[str, str]:
        """What `kubectl describe` says of the attempt's pods."""
        files = {}
        for worker, pod in self._known_pods(container).items():
            try:
                files[f"host-{worker}.txt"] = self._kubectl.call("describe", "pod", pod.name)
            except LaunchError as error:  # it may be gone
                files[f"host-{worker}.txt"] = str(error)
        return files

    def stacks(self, container: str) -> dict[int, str]:
        """The stack of each container's first process, by `kubectl exec`, for which k8s/role.yaml has a rule."""
        stacks = {}
        for worker, pod in self._known_pods(container).items():
            if not pod.started or pod.ended:
                continue
            command = ("exec", pod.name, "--container", CONTAINER, "--", "sh", "-c", _STACK)
            try:
                stacks[worker] = self._kubectl.call(*command)
            except LaunchError as error:
                stacks[worker] = str(error)
        return stacks

    def _known_pods(self, container: str) -> Mapping[int, Pod]:
        """An attempt's pods; none when the cluster does not answer."""
        try:
            return self._watch(container).pods()
        except LaunchError as error:
            self.say(f"the pods are not known: {error}")
            return {}

    # -- parts --------------------------------------------------------------------------------------------------------

    def _list_jobsets(self) -> list[dict[str, Any]]:
        selector = f"{LABEL_SLICE}={self.config.slice.name}"
        output = self._kubectl.call("get", _JOBSETS, "--selector", selector, "--output", "json")
        jobsets: list[dict[str, Any]] = json.loads(output)["items"]
        return jobsets

    def _create(self, attempt: Attempt, *options: str) -> None:
        """Creates the objects of an attempt, or (--dry-run=server) has the cluster check them."""
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
            secret=attempt.host_secret,
        )
        text = dump_documents(make_objects(self.config, work, Kind.JOBSET, Restarts.BY_LAUNCHER))
        self._kubectl.call("create", "--validate=strict", *options, "--filename", "-", input=text)

    def _own_files(self, name: str) -> None:
        """Has the cluster remove what an attempt's JobSet reads together with it: whoever deletes that, and when
        its time is over."""
        uid = self._kubectl.call("get", _JOBSETS, name, "--output", "jsonpath={.metadata.uid}").strip()
        owner = {"apiVersion": "jobset.x-k8s.io/v1alpha2", "kind": "JobSet", "name": name, "uid": uid}
        patch = json.dumps({"metadata": {"ownerReferences": [owner]}})
        files = [f"{kind}/{name}" for kind in self._files.split(",")]
        self._kubectl.call("patch", *files, "--type", "merge", "--patch", patch, "--output", "name")

    def _wait_started(self, attempt: Attempt, name: str) -> None:
        """Waits until every host's container has started: for nodes as long as for a slice, then for containers. Raises
        what keeps one from starting."""
        run, slice_ = self.config.run, self.config.slice
        node_minutes = max(run.start_minutes, slice_.create_minutes + slice_.stockout_minutes)
        node_deadline = time.monotonic() + node_minutes * 60
        placed: float | None = None  # when every host had a node
        watch = self._watch(attempt.container)
        reported = ""
        while True:
            deadline = node_deadline if placed is None else placed + run.start_minutes * 60
            try:
                pods = watch.pods()
            except LaunchError as error:  # the cluster may be back before the time is over
                if error.exit_code is not Exit.CLOUD_ERROR or time.monotonic() > deadline:
                    raise
                self.say(str(error))
                time.sleep(2.0)
                continue
            waiting = {worker: pods.get(worker) for worker in self._workers if not _has_started(pods.get(worker))}
            if not waiting:
                return
            for pod in waiting.values():
                if pod is not None and (trouble := pod_status.trouble(pod, attempt.image)):
                    raise trouble
            reasons = _describe_waiting(waiting) if any(waiting.values()) else self._describe_queued(name)
            if any(pod is None or not pod.node for pod in waiting.values()):
                if time.monotonic() > node_deadline:
                    raise self._without_nodes(node_minutes, reasons)
                placed = None
            else:
                placed = placed or time.monotonic()
                if time.monotonic() > placed + run.start_minutes * 60:
                    raise LaunchError(
                        f"not all hosts started within run.start_minutes ({run.start_minutes:g}) after they had nodes: "
                        f"{reasons}"
                    )
            if reasons != reported:
                self.say(f"waiting for {len(waiting)} of {len(self._workers)} hosts: {reasons}")
                reported = reasons
            time.sleep(0.5)

    def _without_nodes(self, minutes: float, reasons: str) -> LaunchError:
        slice_ = self.config.accelerator
        return LaunchError(
            f"the cluster had no nodes for all hosts within {minutes:g} minutes (slice.create_minutes, "
            f"slice.stockout_minutes): {reasons}\n"
            f"  it needs {slice_.hosts} nodes that are free, of one node pool: --machine-type "
            f"{gke_nodes(slice_).machine_type} --tpu-topology {slice_.topology_name} --num-nodes {slice_.hosts} "
            "(docs/guide/gke.md)",
            exit_code=Exit.STOCKOUT,
        )

    def _describe_queued(self, name: str) -> str:
        """What a JobSet without pods waits for. Raises LaunchError when it was deleted."""
        jobset = next((jobset for jobset in self._list_jobsets() if jobset["metadata"]["name"] == name), None)
        if jobset is None:
            raise LaunchError(f"JobSet {name} was deleted by somebody else before it started", exit_code=Exit.CONFLICT)
        if jobset["spec"].get("suspend"):
            return f"JobSet {name} is suspended: Kueue has not admitted it to queue {self.config.gke.queue} yet"
        return f"JobSet {name} has no pods yet"

    def _read_log(self, pod: Pod, since: str | None) -> tuple[list[LogLine], bool]:
        """The lines of a pod from `since` on, and whether there are more."""
        window = [f"--since-time={since}"] if since else []
        options = ("--container", CONTAINER, "--timestamps", f"--limit-bytes={LOG_BYTES}")
        with self._observations:
            output = self._kubectl.call("logs", pod.name, *options, *window, seconds=_LOG_SECONDS)
        return pod_status.parse_log(output, LOG_BYTES)

    def _watch(self, container: str) -> PodWatch:
        with self._lock:
            if container not in self._watches:
                self._watches[container] = PodWatch(self._kubectl, f"{_JOBSET_LABEL}={_name(container)}")
            return self._watches[container]

    def _open_watches(self) -> list[PodWatch]:
        with self._lock:
            return list(self._watches.values())

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
        self._delete(f"{_JOBSETS},{self._files}", name)
        self._wait_gone(f"{_JOBSET_LABEL}={name}")

    def _delete(self, *targets: str) -> None:
        self._kubectl.call("delete", *targets, "--ignore-not-found", "--wait=false", "--output", "name")

    def _wait_gone(self, selector: str) -> None:
        """Pods that are deleted with their JobSet get their grace period."""
        seconds = _GONE_SECONDS + grace_seconds(self.config)
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


def _is_over(jobset: dict[str, Any]) -> bool:
    return bool(jobset.get("status", {}).get("terminalState"))


def _all_disrupted(watch: PodWatch) -> bool:
    pods = watch.pods()
    return bool(pods) and all(pod.disruption and pod.ended for pod in pods.values())


def _has_started(pod: Pod | None) -> bool:
    return pod is not None and (pod.started or pod.ended)


def _require_digest(image: str) -> None:
    if "@sha256:" not in image:
        raise BadInput(
            f"the cluster's nodes can't have image {image}: set image.repository, where it is pushed to, or "
            "image.reference"
        )


def _describe_waiting(waiting: Mapping[int, Pod | None]) -> str:
    """The reasons for which hosts wait, each once, with its hosts."""
    workers: dict[str, list[int]] = {}
    for worker, pod in sorted(waiting.items()):
        reason = pod_status.describe_waiting(pod) if pod else "it has no pod yet"
        workers.setdefault(reason, []).append(worker)
    return "; ".join(
        f"host{'s'[: len(indices) > 1]} {', '.join(map(str, indices))}: {reason}" for reason, indices in workers.items()
    )
