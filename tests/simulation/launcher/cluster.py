"""A GKE cluster over a virtual clock, and kubectl. The objects and the controllers of JobSet and Job are those of the
test cluster (`tests.kubernetes.cluster`); nodes, kubelets and the way to the API server are simulated here."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import TYPE_CHECKING

import yaml

from launcher.container_output import DUMP_STACKS
from launcher.gke.workload import CONTAINER, LABEL_ATTEMPT, LABEL_RUN
from tests.kubernetes.cluster import controllers
from tests.kubernetes.cluster import store as stores
from tests.kubernetes.cluster.store import Object, Store, has, set_condition
from tests.simulation.launcher.hosts import EPOCH, Container, Host, timestamp
from tests.simulation.scheduler import Task

if TYPE_CHECKING:
    from tests.simulation.launcher.faults import Fault
    from tests.simulation.launcher.world import Actor, World

_WATCH_BREAKS = 40.0  # seconds, at most, while the way to the cluster is disturbed
_GRACE_OF_SPOT = 25.0
_OVER = ("Succeeded", "Failed")
_SWITCHES = ("--timestamps", "--follow", "--watch", "--output-watch-events", "--ignore-not-found")
_REFUSED = "The connection to the server 10.1.1.1 was refused - did you specify the right host or port?"
_ERRORS = {
    "unavailable": _REFUSED,
    "rate": "Error from server (TooManyRequests): the server has received too many requests",
    "permission": 'Error from server (Forbidden): pods is forbidden: User "ann" cannot list resource "pods" in API '
    'group "" in the namespace "default"',
    "signed out": "error: You must be logged in to the server (Unauthorized)",
    "lost": "Unable to connect to the server: unexpected EOF",
    "offline": "Unable to connect to the server: dial tcp: lookup cluster: no such host",
}


class Refused(Exception):
    """Raised where kubectl fails: has what it prints."""


class Cluster:
    """A cluster with one node pool."""

    def __init__(self, world: World, nodes: int) -> None:
        self.world, self.scheduler, self.rng = world, world.scheduler, world.rng
        self.store = Store()
        self.size, self._made, self._numbers = nodes, 0, 0
        self.nodes: list[Host] = []
        self.waiters: dict[Task, None] = {}  # tasks that wait for a change
        self.containers: dict[str, Container] = {}  # by the uid of their pods
        self.creators: dict[str, Actor] = {}  # of JobSets, by name
        self.created: dict[str, float] = {}  # when that was
        self.deleters: dict[str, Actor] = {}  # of pods, by name
        self.deleted: dict[str, Actor | None] = {}  # JobSets, and by whom; None: a colleague
        self.hides_nodes = self.rng.random() < 0.15  # from users, who may not list them
        self.changed_at = 0.0  # when a node was taken or added
        self.resumed = Counter["tuple[Actor, str]"]()  # how often a pod's log was read from a line on, and by whom
        self._lived: set[str] = set()  # uids of pods with a kubelet
        late = self.rng.random() < 0.2  # a node that the pool adds when it is needed
        for _ in range(nodes - late):
            self._add_node()
        if late:
            self.scheduler.call_at(self.rng.uniform(5.0, 200.0), self._add_node)

    def install(self) -> Callable[[], None]:
        """Gives the test cluster this clock and these random numbers. Returns a function that undoes it."""
        kept = [(module, name, vars(module)[name]) for module, name in
                ((stores, "now"), (controllers, "now"), (stores, "uuid"), (controllers, "secrets"))]  # fmt: skip
        stores.now = controllers.now = lambda: timestamp(self.scheduler.now + EPOCH)[:19] + "Z"
        stores.uuid = SimpleNamespace(uuid4=self._number)
        controllers.secrets = SimpleNamespace(token_hex=lambda size: f"{self._number():0>6}")
        return lambda: [setattr(module, name, value) for module, name, value in kept] and None

    def _number(self) -> str:
        self._numbers += 1
        return str(self._numbers)

    def _add_node(self) -> None:
        self._made, self.changed_at = self._made + 1, self.scheduler.now
        host = Host(self.scheduler, f"node-{self._made}", 0, f"10.4.0.{self._made}")
        self.nodes.append(host)
        self.world.add_host(host)
        self.store.create("nodes", {"metadata": {"name": host.slice_name, "labels": {}}})

    # -- what happens to nodes and pods --------------------------------------------------------------------------------

    def strike(self, fault: Fault) -> None:
        """Makes a fault of the slice occur: nodes are taken, a pod is evicted, a colleague deletes the JobSet."""
        if not self.nodes:
            return
        host = self.nodes[fault.number % len(self.nodes)]
        match fault.kind:
            case "preempt":
                for node in [*self.nodes] if fault.number % 4 else [host]:
                    self.scheduler.spawn(self._take, node, fault, name="a node", process=self.scheduler.world)
            case "maintenance":
                for pod in self._pods_on(host):
                    self._disrupt(pod, "EvictionByEvictionAPI")
                    self._delete_pod(pod, 30)
            case "delete":
                for jobset in self.store.all("jobsets"):
                    self.delete("jobsets", jobset["metadata"]["name"], None)

    def _take(self, host: Host, fault: Fault) -> None:
        """Takes a node, with or without a notice, and adds another one later."""
        pods = self._pods_on(host)
        if fault.number % 2:
            for pod in pods:
                self._disrupt(pod, "TerminationByKubelet")
                self._terminate(pod, _GRACE_OF_SPOT, None)
        if host not in self.nodes:  # taken by another fault
            return
        host.die(for_good=True)
        self.nodes.remove(host)
        self.changed_at = self.scheduler.now
        self.store.remove("nodes", host.slice_name)
        self.scheduler.sleep(self.rng.uniform(1.0, 20.0))
        for pod in pods:
            self._disrupt(pod, "DeletionByPodGC", phase="Failed")
            self._delete_pod(pod, 0)
        self.scheduler.sleep(self.rng.uniform(5.0, 100.0))
        if len(self.nodes) < self.size:
            self._add_node()

    def _pods_on(self, host: Host) -> list[Object]:
        pods = [pod for pod in self.store.all("pods") if pod["spec"].get("nodeName") == host.slice_name]
        return [pod for pod in pods if pod["status"]["phase"] not in _OVER]

    def _disrupt(self, pod: Object, reason: str, phase: str = "") -> None:
        container = self.containers.get(pod["metadata"]["uid"])
        if container is not None and container.job is not None and container.running:
            container.job.disturb("host", container.host.worker, "disrupted")

        def change(each: Object) -> None:
            if each["status"]["phase"] not in _OVER:
                set_condition(each, "DisruptionTarget", reason, "simulated")
                each["status"]["phase"] = phase or each["status"]["phase"]

        self._update(pod, change)

    def _update(self, pod: Object, change: Callable[[Object], None]) -> None:
        known = self.store.get("pods", pod["metadata"]["name"])
        if known is not None and known["metadata"]["uid"] == pod["metadata"]["uid"]:
            change(known)
            self.store.put("pods", known)
            self.changed()

    def _delete_pod(self, pod: Object, grace: int) -> None:
        controllers.delete_pod(self.store, pod["metadata"]["name"], grace)
        self.changed()

    # -- controllers and kubelets --------------------------------------------------------------------------------------

    def changed(self) -> None:
        """Lets controllers and watches see a change."""
        self.scheduler.wake_all(self.waiters)
        self.scheduler.call_at(self.scheduler.now + self.rng.uniform(0.1, 0.8), self._reconcile)

    def _reconcile(self) -> None:
        before = self.store.version
        controllers.reconcile(self.store)
        for pod in self.store.all("pods"):
            if pod["metadata"]["uid"] not in self._lived:
                self._lived.add(pod["metadata"]["uid"])
                self.scheduler.spawn(self._live, pod, name="a kubelet", process=self.scheduler.world)
        there = {pod["metadata"]["uid"] for pod in self.store.all("pods")}
        for uid, container in list(self.containers.items()):
            if uid not in there and container.host.containers.get(container.name) is container:
                self.world.remove_container(container, next(iter(self.creators.values())), "its kubelet")
        if self.store.version != before:
            self.changed()

    def _live(self, pod: Object) -> None:
        """The life of a pod: it waits for a node, its image and its end."""
        if self._free_node(pod) is None:
            reason = {"reason": "Unschedulable", "message": "0/0 nodes are available"}
            self._update(pod, lambda each: set_condition(each, "PodScheduled", status="False", **reason))
        while (host := self._free_node(pod)) is None:
            self.scheduler.wait(self.waiters, 5.0, "a node")
            if self._ends_early(pod):
                return
        self._update(pod, lambda each: each["spec"].update(nodeName=host.slice_name))
        self._update(pod, lambda each: set_condition(each, "PodScheduled", "", ""))
        self.scheduler.sleep(self.rng.uniform(0.2, 1.0) * self.world.pull_seconds)
        if self._ends_early(pod) or not host.up:
            return
        labels = pod["metadata"]["labels"]
        jobset, worker = labels[controllers.JOBSET], int(labels[controllers.INDEX])
        name, attempt = f"tpu-launch-{jobset}", int(labels[LABEL_ATTEMPT])
        host.worker = worker
        container = Container(name, labels[LABEL_RUN], attempt, host, host.boot, "r/i", cuts_lines=False)
        host.containers[name] = self.containers[pod["metadata"]["uid"]] = container
        self.world.start_container(container, self.creators[jobset])
        started = timestamp(self.scheduler.now + EPOCH)[:19] + "Z"
        self._show(pod, "Running", {"running": {"startedAt": started}})
        while container.running:
            self.scheduler.wait(container.waiters, 5.0, "the end of a container")
            known = self.store.get("pods", pod["metadata"]["name"])
            if known is None or known["metadata"]["uid"] != pod["metadata"]["uid"]:
                return
            if "deletionTimestamp" in known["metadata"] and container.running:
                grace = float(known["metadata"]["deletionGracePeriodSeconds"])
                self._terminate(pod, grace, self.deleters.get(pod["metadata"]["name"]))
        if container.status != "exited":
            return  # with its node
        self.scheduler.sleep(self.rng.uniform(0.05, 1.0))
        code, finished = container.exit_code, f"{container.finished_at[:19]}Z"
        reason = "OOMKilled" if container.oom_killed else "Error" if code else "Completed"
        ended = {"exitCode": code, "reason": reason, "startedAt": started, "finishedAt": finished}
        self._show(pod, "Failed" if code else "Succeeded", {"terminated": ended})

    def _free_node(self, pod: Object) -> Host | None:
        """Returns a node for a pod; None while pods of another JobSet use the pool (JobSet's exclusive placement)."""
        placed = [each for each in self.store.all("pods") if each["status"]["phase"] not in _OVER]
        placed = [each for each in placed if each["spec"].get("nodeName")]
        jobset = pod["metadata"]["labels"][controllers.JOBSET]
        if any(each["metadata"]["labels"][controllers.JOBSET] != jobset for each in placed):
            return None
        taken = {each["spec"]["nodeName"] for each in placed}
        return next((host for host in self.nodes if host.up and host.slice_name not in taken), None)

    def _ends_early(self, pod: Object) -> bool:
        """Ends a pod that is deleted before its container has started. Returns whether it was."""
        known = self.store.get("pods", pod["metadata"]["name"])
        if known is not None and known["metadata"]["uid"] == pod["metadata"]["uid"]:
            if "deletionTimestamp" not in known["metadata"]:
                return False
            self._update(pod, lambda each: each["status"].update(phase="Failed"))
        return True

    def _terminate(self, pod: Object, grace: float, actor: Actor | None) -> None:
        """Sends SIGTERM to a pod's container, and SIGKILL after its grace period."""
        container = self.containers.get(pod["metadata"]["uid"])
        if container is None or container.job is None or not container.running:
            return
        if actor is not None:
            self.world.stop_container(container, actor, first=not container.stopping)
        else:
            container.job.terminate(container)
        deadline = self.scheduler.now + grace
        while container.running and container.host.up and self.scheduler.now < deadline:
            self.scheduler.wait(container.waiters, deadline - self.scheduler.now, "a grace period")
        if container.running and container.host.up:
            container.job.kill(container)

    def _show(self, pod: Object, phase: str, state: Object) -> None:
        def change(each: Object) -> None:
            if each["status"]["phase"] not in _OVER:
                each["status"] |= {"phase": phase, "containerStatuses": [{"name": CONTAINER, "state": state}]}

        self._update(pod, change)

    def delete(self, kind: str, name: str, actor: Actor | None) -> None:
        """Deletes an object; a JobSet goes with its pods."""
        document = self.store.get(kind, name)
        if document is None:
            return
        if kind != "jobsets":
            self.store.remove(kind, name)
            return
        self.deleted.setdefault(name, actor)
        if actor is None or actor.name == "down":
            self.world.record.deletions.append(self.scheduler.now)
        for pod in self.store.all("pods", {controllers.JOBSET: name}):
            if actor is not None:
                self.deleters[pod["metadata"]["name"]] = actor
            container = self.containers.get(pod["metadata"]["uid"])
            if actor is None and container is not None and container.job is not None:
                container.job.disturb("deleted", container.host.worker)
        document["metadata"].setdefault("deletionTimestamp", stores.now())
        self.store.put(kind, document)
        self.changed()

    def jobsets_of(self, user: str) -> list[str]:
        """Returns the names of a user's JobSets that are there, and not being deleted."""
        there = [each["metadata"] for each in self.store.all("jobsets") if "deletionTimestamp" not in each["metadata"]]
        return [each["name"] for each in there if self.creators[each["name"]].user == user]


class Kubectl:
    """One kubectl process of a command."""

    def __init__(self, cluster: Cluster, actor: Actor, argv: Sequence[str]) -> None:
        self.cluster, self.world, self.scheduler, self.actor = cluster, cluster.world, cluster.scheduler, actor
        words = [word for word in argv[3:] if not word.startswith("--request-timeout")]
        words = words[: words.index("--")] if "--" in words else words
        self.script = argv[-1] if "--" not in argv else " ".join(argv[argv.index("--") + 1 :])
        self.flags: dict[str, str] = {}
        self.words: list[str] = []
        while words:
            word = words.pop(0)
            name, equals, value = word.partition("=")
            if not word.startswith("-"):
                self.words.append(word)
            elif equals or name in _SWITCHES:
                self.flags[name[2:]] = value
            else:
                self.flags[name[2:]] = words.pop(0)

    @property
    def labels(self) -> dict[str, str]:
        return dict(part.split("=", 1) for part in self.flags.get("selector", "").split(",") if part)

    def run(self, input: str | None) -> tuple[int, str, str]:
        """Runs the command. Returns its exit code, output and errors."""
        self.scheduler.sleep(self.world.rng.uniform(0.05, 0.4))
        try:
            self._refuse()
            output = getattr(self, f"_{self.words[0]}")(input)
            if self.world.api_fault("lost") is not None:
                raise Refused(_ERRORS["lost"])
        except Refused as refusal:
            return 1, "", str(refusal)
        return 0, output, ""

    def _refuse(self) -> None:
        """Raises Refused for a fault of the way to the cluster."""
        if self.actor.laptop.offline:
            self.scheduler.sleep(self.world.rng.uniform(1.0, 8.0))
            raise Refused(_ERRORS["offline"])
        if self.world.api_fault("slow") is not None:
            self.scheduler.sleep(self.world.rng.uniform(1.0, 15.0))
        for kind in ("unavailable", "rate", "permission", "signed out"):
            if self.world.api_fault(kind) is not None:
                raise Refused(_ERRORS[kind])

    def _get(self, _input: str | None) -> str:
        kind = self.words[1].partition(".")[0]
        if kind == "nodes" and self.cluster.hides_nodes:
            raise Refused(_ERRORS["permission"].replace("pods", "nodes"))
        found = self.cluster.store.all(kind, {} if kind == "nodes" else self.labels)
        if self.flags["output"] == "name":
            return "".join(f"{kind}/{each['metadata']['name']}\n" for each in found)
        if self.flags["output"] == "json":
            return json.dumps({"items": found})
        document = self.cluster.store.get(kind, self.words[-1])  # events have no name, and none is kept
        if document is None:
            raise Refused(f'Error from server (NotFound): {self.words[1]} "{self.words[-1]}" not found')
        return str(document["metadata"]["uid"])

    def _create(self, input: str | None) -> str:
        for document in yaml.load_all(input or "", yaml.CSafeLoader):
            kind, name = f"{document['kind'].lower()}s", document["metadata"]["name"]
            if self.cluster.store.get(kind, name) is not None:
                raise Refused(f'Error from server (AlreadyExists): {kind} "{name}" already exists')
            if kind == "jobsets":
                self._check_jobset(document)
                self.cluster.creators[name], self.cluster.created[name] = self.actor, self.scheduler.now
            self.cluster.store.create(kind, document)
            self.world.reached("prepare")
        self.cluster.changed()
        return ""

    def _check_jobset(self, jobset: Object) -> None:
        """Checks that each host gets a pod of the run's attempt, with the command of the file."""
        hosts, labels = self.cluster.size, jobset["metadata"]["labels"]
        job = jobset["spec"]["replicatedJobs"][0]["template"]["spec"]
        (container,) = job["template"]["spec"]["containers"]
        given = {each["name"]: each.get("value") for each in container["env"]}
        wanted = {"A": "b", "TPU_LAUNCH_RUN_ID": labels[LABEL_RUN], "TPU_LAUNCH_ATTEMPT": labels[LABEL_ATTEMPT]}
        if not (
            job["completions"] == hosts and wanted.items() <= given.items() and container["command"][-1] == "train"
        ):
            self.world.break_promise("a pod gets what its file says", f"{jobset}")

    def _patch(self, _input: str | None) -> str:
        for target in [word for word in self.words[1:] if "/" in word]:
            kind, name = target.split("/")
            document = self.cluster.store.get(kind, name)
            if document is None:
                raise Refused(f'Error from server (NotFound): {kind} "{name}" not found')
            document["metadata"] |= json.loads(self.flags["patch"])["metadata"]
            self.cluster.store.put(kind, document)
        return ""

    def _delete(self, _input: str | None) -> str:
        kinds, names = [kind.partition(".")[0] for kind in self.words[1].split(",")], self.words[2:]
        for kind in kinds:
            for document in self.cluster.store.all(kind):
                name = document["metadata"]["name"]
                if name in names or (not names and has(document, self.labels)):
                    if kind == "pods":
                        self.cluster.deleters[name] = self.actor
                        self.cluster._delete_pod(document, int(self.flags["grace-period"]))
                    else:
                        self.cluster.delete(kind, name, self.actor)
        return ""

    def _container(self) -> Container:
        pod = self.cluster.store.get("pods", self.words[1])
        container = self.cluster.containers.get(pod["metadata"]["uid"]) if pod is not None else None
        if container is None:
            raise Refused(f'Error from server (NotFound): pods "{self.words[1]}" not found')
        if not container.host.up:
            raise Refused("Error from server: Get the log: dial tcp 10.4.0.1:10250: connect: no route to host")
        return container

    def _lines(self, container: Container, since: str) -> list[str]:
        found = container.lines(since, int(self.flags["tail"]) if "tail" in self.flags else None)
        return [f"{at} {text}" for at, text in found]

    def _logs(self, _input: str | None) -> str:
        lines = self._lines(self._container(), self.flags.get("since-time", ""))
        self.cluster.resumed[self.actor, self.words[1]] += "since-time" in self.flags
        return "".join(lines)[: int(self.flags["limit-bytes"])]

    def _exec(self, _input: str | None) -> str:
        container = self._container()
        if DUMP_STACKS not in self.script or container.job is None:
            return container.progress()
        return container.job.stacks(container, self.actor, native=self.script.endswith(" native"))

    def _describe(self, _input: str | None) -> str:
        return f"Name: {self.words[2]}\n"

    def stream(self, on_line: Callable[[str], None], seconds: float, is_over: Callable[[], bool]) -> tuple[int, str]:
        """Follows a log or watches pods until `is_over`. Returns the exit code and what it printed last."""
        deadline = self.scheduler.now + seconds
        try:
            self._refuse()
            follow = self._follow if self.words[0] == "logs" else self._watch
            follow(on_line, deadline, is_over)
        except Refused as refusal:
            return 1, str(refusal)
        return 0, ""

    def _follow(self, on_line: Callable[[str], None], deadline: float, is_over: Callable[[], bool]) -> None:
        container, since, told = self._container(), self.flags.get("since-time", ""), 0
        if not since and self.cluster.resumed[self.actor, self.words[1]] > 1:  # another look may have been under way
            self.world.break_promise("a log is not read twice", " ".join(self.words))
        while self.scheduler.now < deadline and not is_over():
            ended = not container.running
            lines = "".join(self._lines(container, since)).splitlines()
            for line in lines[told:]:
                on_line(f"{line}\n")
            told = len(lines)
            if ended:
                return
            self._refuse()
            self.scheduler.wait(container.waiters, 1.0, "lines of a pod")

    def _watch(self, on_line: Callable[[str], None], deadline: float, is_over: Callable[[], bool]) -> None:
        store, version = self.cluster.store, self.cluster.store.version
        for pod in store.all("pods", self.labels):
            on_line(json.dumps({"type": "ADDED", "object": pod}))
        disturbed = any(fault.kind in ("unavailable", "slow", "lost") for fault in self.world.faults)
        breaks = self.scheduler.now + self.world.rng.uniform(1.0, _WATCH_BREAKS) if disturbed else deadline
        while self.scheduler.now < min(deadline, breaks) and not is_over():
            for event in store.after(version, "pods"):
                version = event.version
                if has(event.object, self.labels):
                    on_line(json.dumps({"type": event.type, "object": event.object}))
            self._refuse()
            self.scheduler.wait(self.cluster.waiters, 2.0, "an event")
