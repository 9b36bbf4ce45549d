"""A run as Kubernetes objects: a JobSet, or an Indexed Job with a headless Service; and the ConfigMap with its
configuration. Pure.

Sizes, hosts, chips and names of nodes come from the accelerator table alone. Two parties may restart a run: the
cluster, when a person applies the manifest with kubectl (`Restarts.BY_CLUSTER`), or tpu-launch, which looks at every
host's end itself and therefore must find the pods as they ended (`Restarts.BY_LAUNCHER`).

What the rules of BY_CLUSTER rest on: the trainer's exit codes (training.errors) and that every host of a slice must
start again together.
"""

from __future__ import annotations

import enum
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from launcher.config import Config
from launcher.errors import BadInput
from launcher.gke import yaml_text
from launcher.gke.yaml_text import Noted
from training.accelerators import ACCELERATORS, Accelerator, gke_nodes
from training.distributed.cluster import GLOO_PORT, RENDEZVOUS_PORT
from training.errors import Exit
from training.storage import is_remote

LABEL_RUN = "tpu-launch/run"
LABEL_ATTEMPT = "tpu-launch/attempt"
LABEL_SLICE = "tpu-launch/slice"
CONTAINER = "trainer"
REPLICATED_JOB = "w"  # short: a pod's host name has 63 characters
SPOT_GRACE_SECONDS = 25  # a spot VM has 30 s from the notice to its end, in all
KEPT_SECONDS = 3 * 24 * 3600  # ended objects that nobody fetched
LIBTPU_PORT = 8471

_CONFIG_FOLDER = "/etc/tpu-launch"
_LONGEST_NAME = 63 - len("-w-0-000") - len("-abcde")  # a pod's name: JobSet's part for a host, and a random end


class Restarts(enum.Enum):
    BY_CLUSTER = "by the cluster"
    BY_LAUNCHER = "by tpu-launch"


class Kind(enum.Enum):
    JOBSET = "jobset"
    JOB = "job"


@dataclass(frozen=True)
class Workload:
    """One run, or one attempt of it, as Kubernetes is to know it."""

    name: str  # of every object
    run_id: str
    attempt: int | None  # None: the cluster counts
    image: str
    command: tuple[str, ...]
    environment: Mapping[str, str]
    files: Mapping[str, str]
    shm_size: str = "16g"
    user: str | None = None


def check(config: Config) -> None:
    """Raises BadInput, naming file:line, for what GKE does not have or would refuse."""
    place, slice_ = config.document.place, config.accelerator
    try:
        gke_nodes(slice_)
    except ValueError as error:
        raise BadInput(f"{place(('slice', 'accelerator_type'))}: slice.accelerator_type: {error}") from None
    wanted = config.gke
    if wanted.topology is not None and wanted.topology != slice_.topology_name:
        raise BadInput(
            f"{place(('gke', 'topology'))}: gke.topology: {slice_.name} is {slice_.topology_name}, not {wanted.topology}; {_sizes(slice_)}"
        )
    if wanted.hosts is not None and wanted.hosts != slice_.hosts:
        raise BadInput(
            f"{place(('gke', 'hosts'))}: gke.hosts: {slice_.name} has {slice_.hosts} hosts of {slice_.chips_per_host} chips, not {wanted.hosts}; "
            + _sizes(slice_)
        )
    if config.slice.capacity == "reserved" and not wanted.node_selector:
        raise BadInput(
            f"{place(('slice', 'capacity'))}: slice.capacity: a reservation belongs to a node pool on GKE: name the pool in gke.node_selector, "
            "cloud.google.com/gke-nodepool: NAME"
        )
    without = [name for name in config.run.secrets if name not in wanted.secrets]
    if without:
        raise BadInput(
            f"{place(('run', 'secrets'))}: run.secrets: on GKE, secrets are Kubernetes' own: put {without[0]} into a Secret of namespace "
            f"{wanted.namespace}, and name it in gke.secrets ({without[0]}: SECRET/KEY)"
        )
    doubled = sorted(set(wanted.secrets) & set(config.run.environment))
    if doubled:
        raise BadInput(f"{place(('gke', 'secrets', doubled[0]))}: {doubled[0]} is in run.environment too: remove one")
    mounted = wanted.gcsfuse.folder + "/" if wanted.gcsfuse else None
    if (
        config.trainer
        and not is_remote(config.trainer.output)
        and not (mounted and config.trainer.output.startswith(mounted))
    ):
        raise BadInput(
            f"{place(('output',))}: output: {config.trainer.output} is lost with its pod: give a gs:// folder, or one below gke.gcsfuse.folder"
        )
    if config.run.user is not None and not re.fullmatch(r"\d+(:\d+)?", config.run.user):
        raise BadInput(
            f"{place(('run', 'user'))}: run.user: Kubernetes wants numbers, UID or UID:GID, not {config.run.user!r}"
        )


def check_name(name: str) -> str:
    """A name from which host names of pods can be made. Raises BadInput."""
    if not re.fullmatch(r"[a-z]([-a-z0-9]*[a-z0-9])?", name):
        raise BadInput(f"{name!r} can't name Kubernetes objects: a lower-case letter, then letters, digits and hyphens")
    if len(name) > _LONGEST_NAME:
        raise BadInput(
            f"{name!r} is too long: with {_LONGEST_NAME} characters at most, the names of its pods fit 63; set a shorter run.name"
        )
    return name


def render(config: Config, work: Workload, kind: Kind, heading: str = "") -> str:
    """The manifest of a run that the cluster restarts, for people and for kubectl."""
    return yaml_text.documents(objects(config, work, kind, Restarts.BY_CLUSTER), heading)


def objects(config: Config, work: Workload, kind: Kind, restarts: Restarts) -> list[Any]:
    """The objects, with their comments, in the order in which they must be created. Raises BadInput."""
    check(config)
    check_name(work.name)
    if kind is Kind.JOBSET:
        return [_config_map(config, work), _jobset(config, work, restarts)]
    assert restarts is Restarts.BY_CLUSTER
    return [_config_map(config, work), _service(config, work), _job(config, work)]


def grace_seconds(config: Config) -> int:
    """Between SIGTERM and SIGKILL, as far as the capacity type gives it."""
    asked = config.run.stop_seconds
    return min(asked, SPOT_GRACE_SECONDS) if config.slice.capacity == "spot" else asked


def labels(config: Config, work: Workload) -> dict[str, str]:
    """By which the objects and the pods of a run are found."""
    found = {"app.kubernetes.io/name": "tpu-launch", LABEL_SLICE: config.slice.name, LABEL_RUN: work.run_id}
    return found if work.attempt is None else {**found, LABEL_ATTEMPT: str(work.attempt)}


def node_selector(config: Config) -> dict[str, str]:
    """The labels of the nodes that make up the slice."""
    spot = {"cloud.google.com/gke-spot": "true"} if config.slice.capacity == "spot" else {}
    return {
        "cloud.google.com/gke-tpu-accelerator": gke_nodes(config.accelerator).accelerator,
        "cloud.google.com/gke-tpu-topology": config.accelerator.topology_name,
        **spot,
        **config.gke.node_selector,
    }


def _sizes(slice_: Accelerator) -> str:
    family = [each for each in ACCELERATORS.values() if each.generation == slice_.generation]
    return "there are " + ", ".join(
        f"{each.name} ({each.topology_name}, {each.hosts} host{'s'[: each.hosts > 1]})" for each in family
    )


def _metadata(config: Config, work: Workload) -> dict[str, Any]:
    return {"name": work.name, "namespace": config.gke.namespace, "labels": labels(config, work)}


def _config_map(config: Config, work: Workload) -> dict[str, Any]:
    return {
        "apiVersion": "v1",
        "kind": "ConfigMap",
        "metadata": _metadata(config, work),
        "data": Noted(dict(work.files), f"What tpu-train reads, in {_CONFIG_FOLDER}. It holds no secrets."),
    }


def _service(config: Config, work: Workload) -> Any:
    ports = [{"name": name, "port": number} for name, number in _ports()]
    return Noted(
        {
            "apiVersion": "v1",
            "kind": "Service",
            "metadata": _metadata(config, work),
            "spec": {
                "clusterIP": Noted(
                    "None", "Headless: it only gives each pod a name, by which the hosts find each other."
                ),
                "publishNotReadyAddresses": True,
                "selector": {"batch.kubernetes.io/job-name": work.name},
                "ports": ports,
            },
        },
        "The hosts' names.",
    )


def _jobset(config: Config, work: Workload, restarts: Restarts) -> Any:
    hosts = config.accelerator.hosts
    metadata = _metadata(config, work)
    if config.gke.queue:
        metadata["labels"] = {
            **metadata["labels"],
            "kueue.x-k8s.io/queue-name": Noted(config.gke.queue, "Kueue admits all hosts of the run together."),
        }
    if hosts > 1:
        metadata["annotations"] = {
            "alpha.jobset.sigs.k8s.io/exclusive-topology": Noted(
                "cloud.google.com/gke-nodepool",
                "One slice is one node pool: all hosts in the same one, and no other run's beside them.",
            )
        }
    template: dict[str, Any] = {
        "parallelism": hosts,
        "completions": Noted(hosts, "One pod a host."),
        "completionMode": Noted(
            "Indexed", "Pod number i is host i; GKE tells each TPU_WORKER_ID and TPU_WORKER_HOSTNAMES."
        ),
    }
    if restarts is Restarts.BY_CLUSTER:
        policy: Any = {
            "maxRestarts": Noted(config.gke.restarts, "For failures; each restart goes on from the newest checkpoint."),
            "rules": [
                {
                    "name": "refused",
                    "action": "FailJobSet",
                    "onJobFailureReasons": ["PodFailurePolicy"],
                    "onJobFailureMessagePatterns": [
                        Noted(
                            f"exit code {int(Exit.BAD_INPUT)} ",
                            "Wrong configuration or data: trying again changes nothing.",
                        )
                    ],
                },
                {
                    "name": "savedOrDisrupted",
                    "action": Noted(
                        "RestartJobSetAndIgnoreMaxRestarts", "Saved and left, or lost its node: not a failure."
                    ),
                    "onJobFailureReasons": ["PodFailurePolicy"],
                },
            ],
        }
        template["backoffLimit"] = Noted(0, "A host that fails ends the Job; the JobSet then starts all hosts again.")
        template["podFailurePolicy"] = {
            "rules": [
                _on_exit(
                    "FailJob",
                    Exit.BAD_INPUT,
                    "Refused its configuration or data. The JobSet's first rule knows it by this exit code.",
                ),
                _on_exit("FailJob", Exit.SAVED, "Asked to stop (maintenance, preemption), and saved."),
                _on_exit("Ignore", Exit.LOST_PEER, "Lost another host: that host's end decides, not this one's."),
                _on_disruption("FailJob"),
            ]
        }
    else:
        policy = {"maxRestarts": Noted(0, "tpu-launch decides about another attempt.")}
        template["backoffLimitPerIndex"] = Noted(
            0, "A host that fails does not end the others: tpu-launch finds out who was first, and ends them itself."
        )
        template["podReplacementPolicy"] = Noted(
            "Failed", "A host that is being stopped has not failed yet: it may save."
        )
    template["template"] = _pod(config, work, Kind.JOBSET)
    return {
        "apiVersion": "jobset.x-k8s.io/v1alpha2",
        "kind": "JobSet",
        "metadata": metadata,
        "spec": {
            "ttlSecondsAfterFinished": Noted(KEPT_SECONDS, "An ended run is removed after three days."),
            "network": {
                "enableDNSHostnames": Noted(True, f"Host i is called {host_name(work.name, Kind.JOBSET, '<i>')}."),
                "publishNotReadyAddresses": True,
                "subdomain": work.name,
            },
            "failurePolicy": policy,
            "replicatedJobs": [
                {
                    "name": REPLICATED_JOB,
                    "replicas": Noted(1, "One slice."),
                    "template": {"metadata": {"labels": labels(config, work)}, "spec": template},
                }
            ],
        },
    }


def _job(config: Config, work: Workload) -> Any:
    hosts = config.accelerator.hosts
    metadata = _metadata(config, work)
    if config.gke.queue:
        metadata["labels"] = {**metadata["labels"], "kueue.x-k8s.io/queue-name": config.gke.queue}
    return {
        "apiVersion": "batch/v1",
        "kind": "Job",
        "metadata": metadata,
        "spec": {
            "ttlSecondsAfterFinished": Noted(KEPT_SECONDS, "An ended run is removed after three days."),
            "parallelism": hosts,
            "completions": Noted(hosts, "One pod a host."),
            "completionMode": Noted(
                "Indexed", f"Pod number i is host i and called {host_name(work.name, Kind.JOB, '<i>')}."
            ),
            "backoffLimit": Noted(
                config.gke.restarts,
                "For failures; a host's pod is made again and all go on from the newest checkpoint.",
            ),
            "podFailurePolicy": {
                "rules": [
                    _on_exit(
                        "FailJob", Exit.BAD_INPUT, "Refused its configuration or data: trying again changes nothing."
                    ),
                    _on_exit(
                        "Ignore", Exit.SAVED, "Asked to stop (maintenance, preemption), and saved: not a failure."
                    ),
                    _on_exit("Ignore", Exit.LOST_PEER, "Lost another host: that host's end counts, not this one's."),
                    _on_disruption("Ignore"),
                ]
            },
            "template": _pod(config, work, Kind.JOB),
        },
    }


def _on_exit(action: str, code: Exit, comment: str) -> Any:
    return Noted(
        {"action": action, "onExitCodes": {"containerName": CONTAINER, "operator": "In", "values": [int(code)]}},
        comment,
    )


def _on_disruption(action: str) -> Any:
    return Noted(
        {"action": action, "onPodConditions": [{"type": "DisruptionTarget", "status": "True"}]},
        "Its node was preempted, drained or lost.",
    )


def host_name(name: str, kind: Kind, index: str) -> str:
    """The DNS name of a host inside the namespace."""
    return f"{name}-{REPLICATED_JOB}-0-{index}.{name}" if kind is Kind.JOBSET else f"{name}-{index}.{name}"


def _ports() -> list[tuple[str, int]]:
    return [("libtpu", LIBTPU_PORT), ("rendezvous", RENDEZVOUS_PORT), ("gloo", GLOO_PORT)]


def _pod(config: Config, work: Workload, kind: Kind) -> dict[str, Any]:
    spec: dict[str, Any] = {"restartPolicy": "Never"}
    if kind is Kind.JOB:
        spec["subdomain"] = Noted(work.name, "The Service above.")
    if config.gke.service_account:
        spec["serviceAccountName"] = Noted(config.gke.service_account, "Reaches the buckets through Workload Identity.")
    elif not config.gke.gcsfuse:
        spec["automountServiceAccountToken"] = False
    grace = grace_seconds(config)
    spec["terminationGracePeriodSeconds"] = (
        Noted(grace, "Between SIGTERM and SIGKILL: time to save. A spot VM has 30 s in all.")
        if config.slice.capacity == "spot"
        else Noted(grace, "Between SIGTERM and SIGKILL: time to save.")
    )
    nodes = gke_nodes(config.accelerator)
    spec["nodeSelector"] = Noted(
        node_selector(config),
        f"{config.accelerator.name}: a node pool of {config.accelerator.hosts} x {nodes.machine_type}, {config.accelerator.devices} devices.",
    )
    tolerations: list[Any] = [{"key": "google.com/tpu", "operator": "Exists", "effect": "NoSchedule"}]
    if config.slice.capacity == "spot":
        tolerations.append(
            {"key": "cloud.google.com/gke-spot", "operator": "Equal", "value": "true", "effect": "NoSchedule"}
        )
    spec["tolerations"] = tolerations
    if config.gke.privileged:
        pod_security: dict[str, Any] = {}
        security: dict[str, Any] = {"privileged": True}
    else:
        pod_security = {"seccompProfile": {"type": "RuntimeDefault"}}
        security = {"allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"]}}
    user, _, group = (work.user or "0").partition(":")
    pod_security = {"runAsUser": int(user), **({"runAsGroup": int(group)} if group else {}), **pod_security}
    spec["securityContext"] = (
        pod_security if work.user else Noted(pod_security, "The TPU's device files belong to root.")
    )
    chips = str(config.accelerator.chips_per_host)
    requests = {key: value for key, value in (("cpu", config.gke.cpu), ("memory", config.gke.memory)) if value}
    mounts: list[Any] = [
        {"name": "config", "mountPath": _CONFIG_FOLDER, "readOnly": True},
        {"name": "shm", "mountPath": "/dev/shm"},
    ]
    container = {
        "name": CONTAINER,
        "image": Noted(work.image, "By digest: every host runs the same."),
        "command": list(work.command),
        "env": _environment(config, work, kind),
        "ports": [{"name": name, "containerPort": number} for name, number in _ports()],
        "resources": {
            "requests": {
                **requests,
                "google.com/tpu": Noted(chips, "All chips of a node: GKE gives a node's chips to one pod only."),
            },
            "limits": {"google.com/tpu": chips},
        },
        "securityContext": security,
        "terminationMessagePolicy": Noted(
            "FallbackToLogsOnError", "`kubectl describe pod` shows the last lines of a failure."
        ),
        "volumeMounts": mounts,
    }
    volumes: list[Any] = [
        {"name": "config", "configMap": {"name": work.name}},
        Noted(
            {"name": "shm", "emptyDir": {"medium": "Memory", "sizeLimit": _binary_unit(work.shm_size)}},
            "Shared memory of data workers.",
        ),
    ]
    metadata: dict[str, Any] = {"labels": labels(config, work)}
    fuse = config.gke.gcsfuse
    if fuse:
        metadata["annotations"] = {"gke-gcsfuse/volumes": Noted("true", "GKE adds the sidecar that serves the bucket.")}
        mounts.append({"name": "bucket", "mountPath": fuse.folder, **({"readOnly": True} if fuse.read_only else {})})
        attributes = {"bucketName": fuse.bucket, "mountOptions": fuse.options}
        driver = {
            "driver": "gcsfuse.csi.storage.gke.io",
            **({"readOnly": True} if fuse.read_only else {}),
            "volumeAttributes": attributes,
        }
        volumes.append({"name": "bucket", "csi": driver})
    spec["containers"] = [container]
    spec["volumes"] = volumes
    return {"metadata": metadata, "spec": spec}


def _environment(config: Config, work: Workload, kind: Kind) -> list[Any]:
    hosts = config.accelerator.hosts
    entries: list[Any] = [
        {"name": "PJRT_DEVICE", "value": "TPU"},
        {"name": "TPU_ACCELERATOR_TYPE", "value": config.accelerator.name},
        Noted(
            {"name": "TPU_LAUNCH_RUN_ID", "value": work.run_id},
            "Names the run's folder below `output`: the same name goes on there.",
        ),
    ]
    if work.attempt is not None:
        entries.append({"name": "TPU_LAUNCH_ATTEMPT", "value": str(work.attempt)})
    elif kind is Kind.JOBSET:
        field = {"fieldRef": {"fieldPath": "metadata.labels['jobset.sigs.k8s.io/restart-attempt']"}}
        entries.append(
            Noted({"name": "TPU_LAUNCH_ATTEMPT", "valueFrom": field}, "How often the JobSet has been restarted.")
        )
    if hosts > 1:
        entries += [
            Noted(
                {"name": "TPU_LAUNCH_HOSTS", "value": str(hosts)},
                "Where nothing gives TPU_WORKER_HOSTNAMES, the hosts are found by these.",
            ),
            {"name": "TPU_LAUNCH_HOST_NAME", "value": host_name(work.name, kind, "*")},
        ]
    entries += [{"name": key, "value": value} for key, value in sorted(work.environment.items())]
    for key, source in sorted(config.gke.secrets.items()):
        secret, _, item = source.partition("/")
        entries.append({"name": key, "valueFrom": {"secretKeyRef": {"name": secret, "key": item}}})
    return entries


def _binary_unit(size: str) -> str:
    """Docker's "16g" is Kubernetes' "16Gi"."""
    return size[:-1] + {"k": "Ki", "m": "Mi", "g": "Gi"}[size[-1]]
