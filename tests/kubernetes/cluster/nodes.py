"""The scheduler and the nodes: selectors, tolerations and chips decide the node of a pod, which runs there as a
container of this machine's engine.

A container gets exactly its pod's image, command, environment, user, capabilities, volumes and grace period, on a
private network with the names that its Service gives it. A node has a CPU instead of chips, so it sets PJRT_DEVICE.
"""

import json
import re
import subprocess
import tempfile
import threading
from base64 import b64decode
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from tests.kubernetes.cluster.controllers import CONTAINER_DEVICES, delete_pod
from tests.kubernetes.cluster.store import Object, Store, now, set_condition

LABEL = "tpu-launch.test-cluster"
POOL = "cloud.google.com/gke-nodepool"


class CanNotStart(Exception):
    """A container can't start. Its arguments are a kubelet's reason and message for a waiting container."""


class Nodes:
    def __init__(self, store: Store, docker: str, identity: str, images: dict[str, str]) -> None:
        self.store = store
        self.docker = docker
        self.network = f"tpu-launch-test-{identity}"
        self.label = f"{LABEL}={identity}"
        self.images = images  # the registry: reference -> image on this machine
        self.environment: dict[str, str] = {}  # of every container
        self._folder = tempfile.TemporaryDirectory(prefix="tpu-launch-test-cluster-")
        self._begun: set[str] = set()
        self._stopping: set[str] = set()
        self.engine("network", "create", "--label", self.label, self.network)
        inspected = json.loads(self.engine("network", "inspect", self.network))[0]
        self.gateway = str(inspected["IPAM"]["Config"][0]["Gateway"])

    def engine(self, *words: str, check: bool = True, seconds: float = 120) -> str:
        command = [self.docker, *words]
        return subprocess.run(command, capture_output=True, text=True, check=check, timeout=seconds).stdout

    def add_pool(self, pool: str, nodes: int, chips: int, labels: dict[str, str]) -> None:
        """As `gcloud container node-pools create` with a machine type of so many chips."""
        for index in range(nodes):
            taints = [{"key": CONTAINER_DEVICES, "value": "present", "effect": "NoSchedule"}]
            if "cloud.google.com/gke-spot" in labels:
                taints.append({"key": "cloud.google.com/gke-spot", "value": "true", "effect": "NoSchedule"})
            metadata = {"name": f"gke-{pool}-{index}", "labels": {POOL: pool, **labels}}
            status = {"allocatable": {CONTAINER_DEVICES: str(chips)}}
            self.store.create("nodes", {"metadata": metadata, "spec": {"taints": taints}, "status": status})

    def reconcile(self) -> None:
        pods = self.store.all("pods")
        for pod in pods:
            name, uid = pod["metadata"]["name"], pod["metadata"]["uid"]
            if pod["status"]["phase"] in ("Succeeded", "Failed"):
                continue
            if "deletionTimestamp" in pod["metadata"]:
                if uid not in self._begun:
                    self._update(name, lambda each: each["status"].update(phase="Failed"))
                elif uid not in self._stopping:
                    self._begin_stop(pod, pod["metadata"]["deletionGracePeriodSeconds"])
            elif "nodeName" not in pod["spec"]:
                self._schedule(pod)
            elif uid not in self._begun:
                self._begun.add(uid)
                threading.Thread(target=self._live, args=(pod,), daemon=True).start()

    def close(self) -> None:
        if left := self.engine("ps", "--all", "--quiet", "--filter", f"label={self.label}").split():
            self.engine("rm", "--force", *left)
        self.engine("network", "rm", self.network, check=False)
        self._folder.cleanup()

    # -- what happens to nodes

    def preempt(self, pool: str, notice: int = 25) -> None:
        """Spot: the nodes are told, their pods have what is left of 30 s, and the nodes are gone."""
        message = "Pod was terminated in response to imminent node shutdown."
        for node in self.store.all("nodes", {POOL: pool}):
            self.store.remove("nodes", node["metadata"]["name"])
            for pod in self.store.all("pods"):
                if pod["spec"].get("nodeName") == node["metadata"]["name"] and pod["status"]["phase"] == "Running":
                    self._disrupt(pod, "TerminationByKubelet", message, status_reason="Terminated")
                    self._begin_stop(pod, min(notice, pod["spec"]["terminationGracePeriodSeconds"]))

    def evict(self, pod: Object) -> None:
        """As `kubectl drain` does."""
        self._disrupt(pod, "EvictionByEvictionAPI", "Eviction API: evicting")
        delete_pod(self.store, pod["metadata"]["name"])

    def _disrupt(self, pod: Object, reason: str, message: str, status_reason: str = "") -> None:
        def change(each: Object) -> None:
            set_condition(each, "DisruptionTarget", reason, message)
            if status_reason:
                each["status"] |= {"reason": status_reason, "message": message}

        self._update(pod["metadata"]["name"], change)

    # -- the scheduler

    def _schedule(self, pod: Object) -> None:
        spec = pod["spec"]
        wanted = int(spec["containers"][0].get("resources", {}).get("limits", {}).get(CONTAINER_DEVICES, 0))
        alive = [each for each in self.store.all("pods") if each["status"]["phase"] in ("Pending", "Running")]
        others = [each for each in alive if "nodeName" in each["spec"]]
        job = pod["metadata"]["labels"]["job-name"]
        siblings = [each for each in others if each["metadata"]["labels"]["job-name"] == job]
        nodes = self.store.all("nodes")
        selector = spec.get("nodeSelector", {}).items()
        selected = [node for node in nodes if selector <= node["metadata"]["labels"].items()]
        tolerated = {each["key"] for each in spec.get("tolerations", [])}
        matching = [node for node in selected if all(taint["key"] in tolerated for taint in node["spec"]["taints"])]
        busy = {each["spec"]["nodeName"] for each in others}
        idle = [node for node in matching if node["metadata"]["name"] not in busy]
        free = [node for node in idle if int(node["status"]["allocatable"][CONTAINER_DEVICES]) == wanted]
        if siblings:  # exclusive topology
            theirs = {each["spec"]["nodeName"] for each in siblings}
            pools = {node["metadata"]["labels"][POOL] for node in nodes if node["metadata"]["name"] in theirs}
            free = [node for node in free if node["metadata"]["labels"][POOL] in pools]
        name = pod["metadata"]["name"]
        if free:
            self._update(name, lambda each: each["spec"].update(nodeName=free[0]["metadata"]["name"]))
            self._update(name, lambda each: set_condition(each, "PodScheduled", "", ""))
            return
        mismatch = f"{len(nodes) - len(matching)} node(s) didn't match Pod's node affinity/selector"
        why = f"{len(matching)} Insufficient {CONTAINER_DEVICES}" if matching else mismatch
        message = f"0/{len(nodes)} nodes are available: {why}." if nodes else "no nodes available to schedule pods"
        self._update(name, lambda each: set_condition(each, "PodScheduled", "Unschedulable", message, status="False"))

    # -- the kubelet

    def _live(self, pod: Object) -> None:
        """A pod's whole life on its node."""
        name = self.container_of(pod)
        try:
            self.engine("create", "--name", name, *self._arguments(pod))
        except CanNotStart as error:
            self._status(pod, "Pending", {"waiting": dict(zip(("reason", "message"), error.args, strict=True))})
            return
        started = subprocess.run([self.docker, "start", name], capture_output=True, text=True, timeout=120)
        if started.returncode:
            state = {"exitCode": 128, "reason": "StartError", "message": started.stderr.strip()}
            self._status(pod, "Failed", {"terminated": {**state, "startedAt": None, "finishedAt": now()}})
            return
        begun = json.loads(self.engine("inspect", name))[0]["State"]["StartedAt"]
        self._status(pod, "Running", {"running": {"startedAt": begun}})
        self.engine("wait", name, seconds=3600)
        found = json.loads(self.engine("inspect", name))[0]["State"]
        code = found["ExitCode"]
        reason = "OOMKilled" if found["OOMKilled"] else "Error" if code else "Completed"
        ended = {"exitCode": code, "reason": reason, "startedAt": found["StartedAt"], "finishedAt": found["FinishedAt"]}
        self._status(pod, "Failed" if code else "Succeeded", {"terminated": ended})

    def _arguments(self, pod: Object) -> list[str]:
        """Of `docker create`. Raises CanNotStart."""
        spec, container = pod["spec"], pod["spec"]["containers"][0]
        assert len(spec["containers"]) == 1
        assert spec["restartPolicy"] == "Never"
        image = self.images.get(container["image"])
        if image is None:
            message = f'Back-off pulling image "{container["image"]}": failed to resolve reference: not found'
            raise CanNotStart("ImagePullBackOff", message)
        arguments = ["--label", self.label, "--network", self.network, "--hostname", spec["hostname"]]
        if "subdomain" in spec and self.store.get("services", spec["subdomain"]):
            arguments += ["--network-alias", f"{spec['hostname']}.{spec['subdomain']}"]
        security = {**spec.get("securityContext", {}), **container.get("securityContext", {})}
        assert not security.get("privileged")
        if user := [str(security[key]) for key in ("runAsUser", "runAsGroup") if key in security]:
            arguments += ["--user", ":".join(user)]
        for change, capabilities in security.get("capabilities", {}).items():
            allowed = [each for each in capabilities if each != "SYS_RESOURCE" or _may_raise_limits()]
            arguments += [f"--cap-{change}={each}" for each in allowed]
        if security.get("allowPrivilegeEscalation") is False:
            arguments += ["--security-opt", "no-new-privileges"]
        arguments += self._volumes(spec, container)
        variables = self._variables(pod, container)
        for key, value in {**variables, "PJRT_DEVICE": "CPU", **self.environment}.items():
            arguments += ["--env", f"{key}={value}"]
        command = [expand(word, variables) for word in container.get("command", [])]
        entry = ["--entrypoint", command[0]] if command else []
        return [*arguments, *entry, image, *command[1:], *container.get("args", [])]

    def _volumes(self, spec: Object, container: Object) -> list[str]:
        volumes = {each["name"]: each for each in spec.get("volumes", [])}
        arguments = []
        for mount in container.get("volumeMounts", []):
            volume = volumes[mount["name"]]
            if "configMap" in volume:
                source = self.store.get("configmaps", volume["configMap"]["name"])
                if source is None:
                    raise CanNotStart("ContainerCreating", f"configmap {volume['configMap']['name']!r} not found")
                folder = Path(tempfile.mkdtemp(dir=self._folder.name))
                folder.chmod(0o755)
                for file, text in source["data"].items():
                    (folder / file).write_text(text)
                arguments += ["--volume", f"{folder}:{mount['mountPath']}:ro"]
            elif volume.get("emptyDir", {}).get("medium") == "Memory":
                size = volume["emptyDir"]["sizeLimit"].removesuffix("i").lower()
                arguments += ["--tmpfs", f"{mount['mountPath']}:rw,mode=1777,size={size}"]
            else:
                raise CanNotStart("ContainerCreating", f"this cluster has no volumes of this kind: {volume}")
        return arguments

    def _variables(self, pod: Object, container: Object) -> dict[str, str]:
        found = {}
        for each in container.get("env", []):
            source = each.get("valueFrom", {})
            if "fieldRef" in source:
                label = re.fullmatch(r"metadata\.labels\['(.*)'\]", source["fieldRef"]["fieldPath"])
                found[each["name"]] = pod["metadata"]["labels"].get(label[1], "")
            elif "secretKeyRef" in source:
                reference = source["secretKeyRef"]
                secret = self.store.get("secrets", reference["name"])
                if secret is None:
                    raise CanNotStart("CreateContainerConfigError", f'secret "{reference["name"]}" not found')
                found[each["name"]] = b64decode(secret["data"][reference["key"]]).decode()
            else:
                found[each["name"]] = expand(each["value"], found)
        return found

    def _status(self, pod: Object, phase: str, state: dict[str, Any]) -> None:
        container = pod["spec"]["containers"][0]
        status = {"name": container["name"], "image": container["image"], "imageID": container["image"]}
        news = {"phase": phase, "containerStatuses": [{**status, "ready": phase == "Running", "state": state}]}
        self._update(pod["metadata"]["name"], lambda each: each["status"].update(news))

    def _begin_stop(self, pod: Object, grace: int) -> None:
        self._stopping.add(pod["metadata"]["uid"])
        threading.Thread(target=self._stop, args=(pod, grace), daemon=True).start()

    def _stop(self, pod: Object, grace: int) -> None:
        self.engine("stop", "--time", str(grace), self.container_of(pod), check=False, seconds=grace + 60)
        found = self.store.get("pods", pod["metadata"]["name"])
        if found and found["status"]["phase"] == "Pending":  # its container could not be created
            self._update(pod["metadata"]["name"], lambda each: each["status"].update(phase="Failed"))

    def container_of(self, pod: Object) -> str:
        return f"k8s-{pod['metadata']['name']}-{pod['metadata']['uid'][:8]}"

    def _update(self, name: str, change: Callable[[Object], Any]) -> None:
        with self.store.lock:
            pod = self.store.get("pods", name)
            if pod is not None:
                change(pod)
                self.store.put("pods", pod)


def _may_raise_limits() -> bool:
    """Returns whether this machine can give a container CAP_SYS_RESOURCE (24); inside a container it often can't."""
    status = Path("/proc/self/status").read_text()
    return bool(int(status.partition("CapBnd:")[2].split()[0], 16) >> 24 & 1)


def expand(text: str, variables: Mapping[str, str]) -> str:
    """Returns what a kubelet makes of a word: `$(NAME)` is the value of a variable that there is, `$$` is `$`.

    As `Expand` in k8s.io/kubernetes/third_party/forked/golang/expansion/expand.go.
    """

    def value(found: re.Match[str]) -> str:
        return "$" if found[1] is None else variables.get(found[1], found[0])

    return re.sub(r"\$(?:\$|\(([^)]*)\))", value, text)
