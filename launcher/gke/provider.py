"""The provider for GKE: an attempt is a JobSet, a host is one of its pods; everything goes through kubectl.

There is no slice to create: nodes belong to the cluster's node pools. "The slice" is the nodes on which the JobSets of
one `slice.name` run, one run at a time. tpu-launch decides about restarts itself, so its JobSets have none, and ended
pods stay until their logs are fetched.
"""

import contextlib
import json
import shlex
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from launcher.config import Config
from launcher.container_output import DUMP_STACKS, READ_PROGRESS, LogWindow, split_progress
from launcher.errors import BadInput, Exit, LaunchError
from launcher.gke import CAPABILITIES, workload
from launcher.gke.kubectl import Kubectl, NotTaken, explain
from launcher.gke.manifest import documents
from launcher.gke.pods import Pod, PodWatch, describe_waiting, find_start_error, parse_log
from launcher.gke.workload import CONTAINER, LABEL_RUN, LABEL_SLICE, Workload, host_name, jobset_name, needs_secret
from launcher.provider import Attempt, CommandReport, ContainerState, HostReport, Observation, SliceState
from launcher.workstation import Workstation
from training.accelerators import gke_nodes
from training.machine import Clock
from training.telemetry.progress_line import FILE, ProgressLine

LOG_BYTES = 16_000_000  # of one observation
_LOG_SECONDS = 15.0
_GONE_SECONDS = 120.0  # in which deleted objects vanish
_LOGS_AT_ONCE = 8  # each takes a kubectl process
_JOBSETS = "jobsets.jobset.x-k8s.io"
_JOBSET_LABEL = "jobset.sigs.k8s.io/jobset-name"


class Gke:
    """Runs attempts as JobSets in one namespace of a cluster. See `launcher.provider.Provider`."""

    capabilities = CAPABILITIES

    def __init__(self, config: Config, say: Callable[[str], None], machine: Workstation) -> None:
        """Raises BadInput for a configuration that GKE can't run, or a run.name that is too long."""
        workload.check(config)
        workload.check_name(f"{config.run_name}-0000-000000-0000-00")  # the longest name of an attempt
        self.config = config
        self.say = say
        self._clock = machine.clock
        self.host_count = config.accelerator.hosts
        self._workers = range(self.host_count)
        self._mounted_kinds = "configmaps,secrets" if needs_secret(config) else "configmaps"  # that a JobSet reads
        self._kubectl = Kubectl(machine, config.gke.context, config.gke.namespace)
        context = f"context {config.gke.context}, " if config.gke.context else ""
        self._place = f"GKE, {context}namespace {config.gke.namespace}"
        self._watches: dict[str, PodWatch] = {}
        self._observed = ""  # the JobSet of the attempt that was last observed
        self._removed: set[str] = set()  # JobSets that this process removed
        self._deleted = False  # whether another client deleted the observed JobSet
        self._lock = machine.threads.lock()
        self._log_slots = machine.threads.semaphore(_LOGS_AT_ONCE)

    def withdraw_unused(self) -> None:
        """Does nothing: the cluster's own queue has the requests."""

    # -- the slice ----------------------------------------------------------------------------------------------------

    def describe(self) -> SliceState:
        """Returns DELETED if another client deleted the observed attempt's JobSet, PREEMPTED if all pods of a JobSet
        that is there and watched were disrupted, else READY. The addresses are the pods' host names in the JobSet that
        has not ended, "" without one. Raises LaunchError if JobSets or pods can't be listed."""
        jobsets = {each["metadata"]["name"]: each for each in self._list_jobsets()}
        running = next((name for name, each in jobsets.items() if not _is_over(each)), "")
        watched = [watch.pods().values() for key, watch in self._watches.copy().items() if jobset_name(key) in jobsets]
        disrupted = any(pods and all(pod.disruption and pod.ended for pod in pods) for pods in watched)
        state = "DELETED" if self._deleted else "PREEMPTED" if disrupted else "READY"
        addresses = [host_name(running, str(worker)) if running else "" for worker in self._workers]
        detail = self._place + (f", JobSet {running}" if running else "")
        return SliceState(self.config.slice.name, state, "", self.config.accelerator.name, tuple(addresses), detail)

    def known_ready(self) -> bool:
        """Returns False: nothing is cached about a cluster."""
        return False

    def identity(self) -> tuple[str, str]:
        """Returns "" for the slice's creation time and for host 0's address: the nodes belong to the cluster."""
        return "", ""

    def create(self, clock: Clock | None = None) -> None:
        """Creates nothing: warns if the cluster has too few nodes, or this account may not list nodes. Raises
        LaunchError if JobSets can't be listed, or the cluster does not answer."""
        self._list_jobsets()
        selector = ",".join(f"{key}={value}" for key, value in workload.node_selector(self.config).items())
        try:
            nodes = self._kubectl.call("get", "nodes", "--selector", selector, "--output", "name").split()
        except LaunchError as error:
            if error.exit_code is not Exit.PERMISSION:
                raise
            self.say("you may not list nodes: only the start of a run shows whether there are enough")
            return
        slice_ = self.config.accelerator
        if len(nodes) < slice_.hosts:
            self.say(
                f"the cluster has {len(nodes)} of {slice_.hosts} nodes ({gke_nodes(slice_).machine_type}, "
                f"{slice_.topology_name}) now: a run waits until it adds them; docs/guide/gke.md says how to make a "
                "node pool"
            )

    def delete(self) -> None:
        """Deletes the slice's JobSets, Secrets and ConfigMaps, and waits until the pods are gone; node pools stay.
        Raises LaunchError if pods are still there two minutes after their grace period."""
        selector = f"{LABEL_SLICE}={self.config.slice.name}"
        # An interrupted start leaves a Secret that no JobSet owns, named as its ConfigMap: users may not list Secrets.
        if files := self._kubectl.call("get", "configmaps", "--selector", selector, "--output", "name"):
            self._delete(*files.replace("configmap/", "secret/").split())
        self._delete(f"{_JOBSETS},configmaps", "--selector", selector)
        self._wait_gone(selector)
        self.say(f"{self._place}: the JobSets are deleted; the node pool stays")

    def connect(self) -> None:
        """Does nothing: kubectl opens a connection for each command."""

    def close(self) -> None:
        """Ends the watches of pods. Pods go on."""
        for watch in self._watches.copy().values():  # other threads add some
            watch.close()

    # -- containers ---------------------------------------------------------------------------------------------------

    def start(self, attempt: Attempt, clock: Clock | None = None) -> list[HostReport]:
        """Removes this run's earlier attempts, creates the JobSet, unless it exists, and waits until every host's
        container has started. Reports failure on all hosts when another run uses the slice. If the start fails, removes
        the JobSet and raises the reason. Raises BadInput for an image without a digest."""
        if "@sha256:" not in attempt.image:  # it is only on this machine
            raise BadInput(
                f"the cluster's nodes can't pull image {attempt.image}: set image.repository, to which tpu-launch "
                "pushes it, or image.reference"
            )
        jobsets = self._list_jobsets()
        for jobset in jobsets:
            name, run = jobset["metadata"]["name"], jobset["metadata"]["labels"].get(LABEL_RUN, "")
            if run == attempt.run_id:
                if name != jobset_name(attempt.container):
                    self._remove(name)
            elif not _is_over(jobset):
                message = f"run {run} is on this host"
                return [HostReport(worker, False, message, occupied_by=run) for worker in self._workers]
        name = jobset_name(attempt.container)
        self._deleted = False
        try:
            if not any(jobset["metadata"]["name"] == name for jobset in jobsets):
                self._delete(self._mounted_kinds, name)  # left by an interrupted start
                (clock or self._clock).sleep(0.0)  # a stop that came while this machine slept
                text = "---\n".join(documents(Workload(self.config, attempt)))
                self._kubectl.call("create", "--validate=strict", "--filename", "-", input=text)
            self._own_files(name)
            self._wait_started(attempt, name, clock or self._clock)
        except LaunchError:
            # Also when the creation failed: perhaps only its answer was lost.
            with contextlib.suppress(LaunchError):
                self._remove(name)
            raise
        return [HostReport(worker, True, attempt.image) for worker in self._workers]

    def observe(
        self, worker: int, container: str, since: str | None, *, patience: float = 0.0, progress: bool = False
    ) -> Observation:
        """Returns the state of a host's pod, its log from `since` on and, with `progress`, lines of progress while it
        runs; "absent" if the attempt has no pods. The state is None, and `problem` says why, when the cluster does not
        answer, only this pod is missing, or `Pod.state` knows none; an ended pod whose log can't be read keeps its
        state. From now on `describe` tells if this attempt's JobSet is deleted. Ignores `patience`."""
        watch = self._watch_pods(container)
        watch.note_log_start(worker, since)
        self._observed = jobset_name(container)
        pod = state = None
        try:
            pods = watch.pods()
            if (pod := pods.get(worker)) is None:  # with its node, perhaps
                absent = None if pods else ContainerState("absent")
                return Observation(worker, absent, problem="its pod is gone" if pods else "")
            state, problem = pod.state()
            if not pod.started:
                return Observation(worker, state, problem=problem)
            if (lines := watch.final_lines(pod, since)) is not None:
                return Observation(worker, state, tuple(lines), problem=problem)
            options = [f"--since-time={since}"] if since else []
            window, more = self._read_log(pod, *options)  # after the state, so that an ended pod's log is complete
        except LaunchError as error:  # the log of an ended pod may be gone with its node: its end still counts
            known, not_taken = state if pod and pod.ended else None, isinstance(error, NotTaken)
            return Observation(worker, known, problem=str(error).splitlines()[0], not_taken=not_taken)
        told = self._read_progress(pod) if progress and not pod.ended else ()
        return Observation(worker, state, window.lines, more=more, problem=problem, open=window.open, progress=told)

    def look(self, worker: int, container: str, *, lines: int = 0) -> Observation:
        """Returns the state of a host's pod, as the watch knows it, and its `lines` newest lines; "absent" without a
        pod. The state is None, and `problem` says why, where `Pod.state` knows none, or the cluster or the pod's log
        does not answer."""
        try:
            pod = self._watch_pods(container).pods().get(worker)
            if pod is None:
                return Observation(worker, ContainerState("absent"))
            window = self._read_log(pod, f"--tail={lines}")[0] if lines and pod.started else LogWindow()
        except LaunchError as error:
            return Observation(worker, None, problem=str(error).splitlines()[0])
        state, problem = pod.state()
        return Observation(worker, state, window.lines, problem=problem)

    def stop(
        self, container: str, *, grace: int, remove: bool, workers: Sequence[int] | None = None
    ) -> list[HostReport]:
        """Deletes the running pods of `workers` (None: all) and waits `grace` + 30 s for their end; reports those that
        go on, and a transient error; raises others. With `remove`, or before any pod started, deletes the attempt's
        objects too and waits until its pods are gone."""
        wanted = list(self._workers) if workers is None else list(workers)
        try:
            if remove:
                self._list_jobsets()  # records a deletion by another client
            late = self._stop_pods(container, wanted, grace)
            if remove:
                self._remove(jobset_name(container))
                self._watch_pods(container).close()
                self._watches.pop(container, None)
        except LaunchError as error:
            if not error.transient:
                raise
            return [HostReport(worker, False, str(error)) for worker in wanted]
        problem = f"its pod did not end within {grace + 30} s"
        return [HostReport(worker, worker not in late, problem if worker in late else "") for worker in wanted]

    def _stop_pods(self, container: str, workers: Sequence[int], grace: int) -> set[int]:
        """Deletes the running pods of these hosts, with SIGKILL after `grace` s, and waits for their end, `grace` + 30
        s at most; deletes the attempt's objects if no pod has started: the cluster may create pods later. Returns the
        workers that go on. Raises LaunchError."""
        watch = self._watch_pods(container)
        pods = watch.pods(fresh=True)
        if not any(_has_started(pod) for pod in pods.values()):
            self._remove(jobset_name(container))
            return set()
        running = {worker: pod for worker, pod in pods.items() if worker in workers and not pod.ended}
        if running:
            self._delete("pods", *(pod.name for pod in running.values()), f"--grace-period={grace}")
        deadline = self._clock.monotonic() + grace + 30
        while True:
            pods = watch.pods()
            late = {worker for worker in running if worker in pods and not pods[worker].ended}
            if not late or self._clock.monotonic() > deadline:
                return late
            self._clock.sleep(0.2)

    def execute(
        self,
        container: str,
        command: Sequence[str],
        workers: Sequence[int],
        *,
        seconds: float,
        on_line: Callable[[int, str], None],
    ) -> list[CommandReport]:
        """Always raises BadInput, with the `kubectl exec` command to use instead."""
        pod = self._known_pods(container).get(min(workers, default=0))
        words = ["exec", pod.name if pod else "POD", "--container", CONTAINER, "--", *command]
        instead = shlex.join(self._kubectl.argv(*words, seconds=None))
        raise BadInput(f"commands in live containers are for TPU VMs; on GKE: {instead}")

    def evidence(self, container: str, workers: Sequence[int]) -> dict[str, str]:
        """Returns `kubectl describe`'s output or error by file name, for each pod of the attempt, not only
        `workers`."""
        pods = self._known_pods(container).items()
        return {f"host-{worker}.txt": self._call_or_say_why("describe", "pod", pod.name) for worker, pod in pods}

    def stacks(self, container: str, *, native: bool = False) -> dict[int, str]:
        """Returns by worker the stack traces in running containers, with `native` those of native code too, or
        kubectl's error; {} if pods can't be listed."""

        def dump(pod: Pod) -> str:
            command = ("exec", pod.name, "--container", CONTAINER, "--", "sh", "-c", DUMP_STACKS)
            return self._call_or_say_why(*command, *["native"] * native)

        pods = {worker: pod for worker, pod in self._known_pods(container).items() if pod.started and not pod.ended}
        dumps = self._kubectl.machine.threads.map(dump, [*pods.values()], at_once=_LOGS_AT_ONCE)
        return dict(zip(pods, dumps, strict=True))

    def _call_or_say_why(self, *words: str) -> str:
        """Runs kubectl and returns its output, or its error: the pod may be gone."""
        try:
            return self._kubectl.call(*words)
        except LaunchError as error:
            return str(error)

    def _known_pods(self, container: str) -> Mapping[int, Pod]:
        """Returns an attempt's newest pod of each host by worker number, including ended and deleted ones, as its watch
        knows them, which this starts; {}, with a warning, when the cluster refuses or does not answer."""
        try:
            return self._watch_pods(container).pods()
        except LaunchError as error:
            self.say(f"can't list the run's pods: {error}")
            return {}

    # -- parts --------------------------------------------------------------------------------------------------------

    def _list_jobsets(self) -> list[dict[str, Any]]:
        """Returns the slice's JobSets as the API gives them, of all runs, also ended ones. Records a deletion of the
        observed one by another client (missing, not removed here, no later attempt follows). Raises LaunchError."""
        words = ("get", _JOBSETS, "--selector", f"{LABEL_SLICE}={self.config.slice.name}", "--output", "json")
        jobsets: list[dict[str, Any]] = json.loads(self._kubectl.call(*words))["items"]
        names = {jobset["metadata"]["name"] for jobset in jobsets}
        if self._observed not in {"", *self._removed, *names}:
            run, _, number = self._observed.rpartition("-")
            self._deleted = not names & {f"{run}-{int(number) + later}" for later in range(1, 100)}
        return jobsets

    def _own_files(self, name: str) -> None:
        """Makes an attempt's JobSet the owner of its ConfigMap and Secret, so that the cluster deletes them with it."""
        uid = self._kubectl.call("get", _JOBSETS, name, "--output", "jsonpath={.metadata.uid}").strip()
        owner = {"apiVersion": "jobset.x-k8s.io/v1alpha2", "kind": "JobSet", "name": name, "uid": uid}
        patch = json.dumps({"metadata": {"ownerReferences": [owner]}})
        files = [f"{kind}/{name}" for kind in self._mounted_kinds.split(",")]
        self._kubectl.call("patch", *files, "--type", "merge", "--patch", patch, "--output", "name")

    def _wait_started(self, attempt: Attempt, name: str, clock: Clock) -> None:
        """Waits until every host's container has started or ended: first for nodes, as long as for a slice, then for
        containers. Raises LaunchError for one that can't start, or after that time, and what `clock` raises."""
        run, slice_ = self.config.run, self.config.slice
        node_minutes = max(run.start_minutes, slice_.create_minutes + slice_.stockout_minutes)
        now = self._clock.monotonic
        deadline = node_deadline = now() + node_minutes * 60
        placed = False  # whether every host has a node
        watch = self._watch_pods(attempt.container)
        reported = ""
        clock.sleep(0.0)  # a stop that came before the JobSet has deleted nothing
        while True:
            try:
                pods = watch.pods()
            except LaunchError as error:  # the cluster may answer again before the deadline
                if error.exit_code is not Exit.CLOUD_ERROR or now() > deadline:
                    raise
                if str(error) != reported:
                    self.say(reported := str(error))
                clock.sleep(2.0)
                continue
            waiting = {worker: pods.get(worker) for worker in self._workers if not _has_started(pods.get(worker))}
            if not waiting:
                return
            for pod in waiting.values():
                if pod is not None and (trouble := find_start_error(pod, attempt.image)):
                    raise trouble
            reasons = describe_waiting(waiting) if any(waiting.values()) else self._describe_queued(name, bool(pods))
            if not reasons:
                return
            if any(pod is None or not pod.node for pod in waiting.values()):
                deadline, placed = node_deadline, False
            elif not placed:
                deadline, placed = now() + run.start_minutes * 60, True
            if now() > deadline:
                if not placed:
                    raise self._stockout_error(node_minutes, reasons)
                limit = f"run.start_minutes ({run.start_minutes:g})"
                raise LaunchError(f"not all hosts started within {limit} after they had nodes: {reasons}")
            if reasons != reported:
                self.say(f"waiting for {len(waiting)} of {len(self._workers)} hosts: {reasons}")
                reported = reasons
            clock.sleep(0.5 if any(waiting.values()) else 2.0)

    def _stockout_error(self, minutes: float, reasons: str) -> LaunchError:
        """Returns the error for a cluster without enough nodes: what it needs and why it waits."""
        slice_ = self.config.accelerator
        return LaunchError(
            f"the cluster had no nodes for all hosts within {minutes:g} minutes (slice.create_minutes, "
            f"slice.stockout_minutes): {reasons}\n"
            f"  it needs {slice_.hosts} free nodes of one node pool: --machine-type {gke_nodes(slice_).machine_type} "
            f"--tpu-topology {slice_.topology_name} --num-nodes {slice_.hosts}: see docs/guide/gke.md, then run again",
            exit_code=Exit.QUOTA if "ResourceQuota" in reasons else Exit.STOCKOUT,
        )

    def _describe_queued(self, name: str, had_pods: bool) -> str:
        """Returns why a JobSet lacks pods, for the user; "" if it has ended and pods were seen (`had_pods`), which tell
        why. Raises LaunchError if another client deleted it (CONFLICT), it ended before pods were seen (HOST_LOST), or
        Pod Security never takes its pods (BAD_INPUT): JobSet's webhook refuses some until host 0 has a node."""
        jobset = next((jobset for jobset in self._list_jobsets() if jobset["metadata"]["name"] == name), None)
        if jobset is None:
            raise LaunchError(f"another client deleted JobSet {name} before it started", exit_code=Exit.CONFLICT)
        if _is_over(jobset):
            if had_pods:
                return ""
            raise LaunchError(f"JobSet {name} lost its pods before they were seen to start", exit_code=Exit.HOST_LOST)
        if jobset["spec"].get("suspend"):
            return f"JobSet {name} is suspended: Kueue has not admitted it to queue {self.config.gke.queue} yet"
        job = f"involvedObject.kind=Job,involvedObject.name={name}-{workload.REPLICATED_JOB}-0,reason=FailedCreate"
        words = ("get", "events", "--field-selector", job, "--output", "jsonpath={.items[0].message}")
        refusal = LaunchError(f"JobSet {name} has no pods yet")
        with contextlib.suppress(LaunchError):  # there is no such event, or the role may not read it
            refusal = explain(self._kubectl.call(*words), ["job-controller"])
        if "PodSecurity" in str(refusal):
            raise refusal
        return str(refusal)

    def _read_log(self, pod: Pod, *window: str) -> tuple[LogWindow, bool]:
        """Returns a pod's log, as options of `kubectl logs` restrict it, and if it was cut at LOG_BYTES. Raises
        LaunchError."""
        options = ("--container", CONTAINER, "--timestamps", f"--limit-bytes={LOG_BYTES}")
        with self._log_slots:
            output = self._kubectl.call("logs", pod.name, *options, *window, seconds=_LOG_SECONDS)
        return parse_log(output, LOG_BYTES, ended=pod.ended)

    def _read_progress(self, pod: Pod) -> tuple[ProgressLine, ...]:
        """Returns the newest line of progress of each process of a pod, by `kubectl exec`; () where that fails."""
        command = ("exec", pod.name, "--container", CONTAINER, "--", "sh", "-c", READ_PROGRESS, FILE)
        with contextlib.suppress(LaunchError), self._log_slots:
            return split_progress(self._kubectl.call(*command, seconds=_LOG_SECONDS))[0]
        return ()

    def _watch_pods(self, container: str) -> PodWatch:
        """Returns the watch of an attempt's pods; makes it on first use."""
        with self._lock:
            if container not in self._watches:
                self._watches[container] = PodWatch(self._kubectl, f"{_JOBSET_LABEL}={jobset_name(container)}")
            return self._watches[container]

    def _remove(self, name: str) -> None:
        """Deletes the objects of the attempt with the JobSet `name`, and waits until its pods are gone. A later
        `describe` does not report the JobSet as deleted by another client. Raises LaunchError as `_wait_gone`."""
        self._removed.add(name)
        self._delete(f"{_JOBSETS},{self._mounted_kinds}", name)
        self._wait_gone(f"{_JOBSET_LABEL}={name}")

    def _delete(self, *targets: str) -> None:
        """Deletes objects without waiting for their end; ignores missing ones."""
        self._kubectl.call("delete", *targets, "--ignore-not-found", "--wait=false", "--output", "name")

    def _wait_gone(self, selector: str) -> None:
        """Waits until no pod matches the label selector. Raises LaunchError two minutes after their grace period."""
        seconds = _GONE_SECONDS + workload.grace_seconds(self.config)
        deadline = self._clock.monotonic() + seconds
        while True:
            left = self._kubectl.call("get", "pods", "--selector", selector, "--output", "name").split()
            if not left:
                return
            if self._clock.monotonic() > deadline:
                raise LaunchError(f"{len(left)} pods are still there {seconds:.0f} s after deletion: {', '.join(left)}")
            self._clock.sleep(1.0)


def _is_over(jobset: dict[str, Any]) -> bool:
    return bool(jobset.get("status", {}).get("terminalState"))


def _has_started(pod: Pod | None) -> bool:
    """Returns whether a pod's container runs, has run, or never will."""
    return pod is not None and (pod.started or pod.ended)
