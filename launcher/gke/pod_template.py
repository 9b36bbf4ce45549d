"""The pod of a host: its container, where it may be scheduled, what is mounted. Pure.

Sizes, hosts and chips come from the accelerator table alone.
"""

from __future__ import annotations

from typing import Any

from launcher.config import Config
from launcher.gke.commented_yaml import Commented
from launcher.gke.workload import (
    CONFIG_FOLDER,
    CONTAINER,
    PORTS,
    SECRET_KEY,
    Kind,
    Workload,
    grace_seconds,
    host_name,
    labels,
    literal,
    needs_secret,
    node_selector,
)
from training.accelerators import gke_nodes
from training.distributed.cluster import SECRET_VARIABLE

# Google: "You must raise the locked memory limit so the driver can communicate with the TPU chips over DMA"; this is
# its command (https://cloud.google.com/kubernetes-engine/docs/how-to/tpus). A shell counts in KiB: these are 64 TiB,
# more than any host has. A pod has no key for it, and a container's default may be 64 KiB.
LOCKED_MEMORY_KIB = 68719476736
RAISE_LOCKED_MEMORY = f"""\
ulimit -l {LOCKED_MEMORY_KIB} 2>/dev/null ||
  echo "tpu-launch: the locked-memory limit stays low, and a TPU may hang on it: run as root (run.user)" >&2
exec "$@"
"""


def pod_template(config: Config, work: Workload, kind: Kind) -> dict[str, Any]:
    """The template of every pod of the workload."""
    metadata: dict[str, Any] = {"labels": labels(config, work)}
    if config.gke.gcsfuse:
        annotation = Commented("true", "GKE adds the sidecar that serves the bucket.")
        metadata["annotations"] = {"gke-gcsfuse/volumes": annotation}
    spec = {
        "restartPolicy": "Never",
        **_identity(config, work, kind),
        **_scheduling(config),
        "securityContext": _pod_security(config, work),
        "containers": [_container(config, work, kind)],
        "volumes": _volumes(config, work),
    }
    return {"metadata": metadata, "spec": spec}


def _identity(config: Config, work: Workload, kind: Kind) -> dict[str, Any]:
    """Its name in the network, its account, its time to end."""
    fields: dict[str, Any] = {}
    if kind is Kind.JOB:
        fields["subdomain"] = Commented(work.name, "The Service above.")
    if config.gke.service_account:
        account = Commented(config.gke.service_account, "Reaches the buckets through Workload Identity.")
        fields["serviceAccountName"] = account
    elif not config.gke.gcsfuse:
        fields["automountServiceAccountToken"] = False
    comment = "Between SIGTERM and SIGKILL: time to save."
    if config.slice.capacity == "spot":
        comment += " A spot VM has 30 s in all."
    return {**fields, "terminationGracePeriodSeconds": Commented(grace_seconds(config), comment)}


def _scheduling(config: Config) -> dict[str, Any]:
    slice_, nodes = config.accelerator, gke_nodes(config.accelerator)
    pool = f"{slice_.name}: a node pool of {slice_.hosts} x {nodes.machine_type}, {slice_.devices} devices."
    tolerations: list[Any] = [{"key": "google.com/tpu", "operator": "Exists", "effect": "NoSchedule"}]
    if config.slice.capacity == "spot":
        spot = {"key": "cloud.google.com/gke-spot", "operator": "Equal", "value": "true", "effect": "NoSchedule"}
        tolerations.append(spot)
    return {"nodeSelector": Commented(node_selector(config), pool), "tolerations": tolerations}


def _pod_security(config: Config, work: Workload) -> Any:
    user, _, group = (work.user or "0").partition(":")
    fields: dict[str, Any] = {"runAsUser": int(user)}
    if group:
        fields["runAsGroup"] = int(group)
    if not config.gke.privileged:
        fields["seccompProfile"] = {"type": "RuntimeDefault"}
    return fields if work.user else Commented(fields, "The TPU's device files belong to root.")


def _container_security(config: Config) -> dict[str, Any]:
    if config.gke.privileged:
        return {"privileged": True}
    added = Commented(["SYS_RESOURCE"], "For `ulimit` above, and nothing else.")
    return {"allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"], "add": added}}


def _container(config: Config, work: Workload, kind: Kind) -> dict[str, Any]:
    return {
        "name": CONTAINER,
        "image": Commented(work.image, "By digest: every host runs the same."),
        "command": Commented(
            ["sh", "-c", RAISE_LOCKED_MEMORY, "sh", *map(literal, work.command)],
            f"The TPU's driver locks memory for DMA: {LOCKED_MEMORY_KIB} KiB may be; then the command itself.",
        ),
        "env": _environment(config, work, kind),
        "ports": [{"name": name, "containerPort": number} for name, number in PORTS],
        "resources": _resources(config),
        "securityContext": _container_security(config),
        "terminationMessagePolicy": Commented(
            "FallbackToLogsOnError", "`kubectl describe pod` shows the last lines of a failure."
        ),
        "volumeMounts": _mounts(config),
    }


def _resources(config: Config) -> dict[str, Any]:
    chips = str(config.accelerator.chips_per_host)
    requests = {key: value for key, value in (("cpu", config.gke.cpu), ("memory", config.gke.memory)) if value}
    tpu = Commented(chips, "All chips of a node: GKE gives a node's chips to one pod only.")
    return {"requests": {**requests, "google.com/tpu": tpu}, "limits": {"google.com/tpu": chips}}


def _environment(config: Config, work: Workload, kind: Kind) -> list[Any]:
    """The environment of a container, apart from what GKE adds (TPU_WORKER_ID, TPU_WORKER_HOSTNAMES)."""
    run_id = {"name": "TPU_LAUNCH_RUN_ID", "value": work.run_id}
    entries: list[Any] = [
        {"name": "PJRT_DEVICE", "value": "TPU"},
        {"name": "TPU_ACCELERATOR_TYPE", "value": config.accelerator.name},
        Commented(run_id, "Names the run's folder below `output`: the same name goes on there."),
    ]
    if work.attempt is not None:
        entries.append({"name": "TPU_LAUNCH_ATTEMPT", "value": str(work.attempt)})
    elif kind is Kind.JOBSET:
        source = {"fieldRef": {"fieldPath": "metadata.labels['jobset.sigs.k8s.io/restart-attempt']"}}
        attempt = {"name": "TPU_LAUNCH_ATTEMPT", "valueFrom": source}
        entries.append(Commented(attempt, "How often the JobSet has been restarted."))
    if config.accelerator.hosts > 1:
        hosts = {"name": "TPU_LAUNCH_HOSTS", "value": str(config.accelerator.hosts)}
        entries += [
            Commented(hosts, "Where nothing gives TPU_WORKER_HOSTNAMES, the hosts are found by these."),
            {"name": "TPU_LAUNCH_HOST_NAME", "value": host_name(work.name, kind, "*")},
        ]
    if needs_secret(config):
        known = {"name": SECRET_VARIABLE, "valueFrom": {"secretKeyRef": {"name": work.name, "key": SECRET_KEY}}}
        entries.append(Commented(known, "By which the hosts know each other, and let nobody else in."))
    entries += [{"name": key, "value": literal(value)} for key, value in sorted(work.environment.items())]
    for key, source_name in sorted(config.gke.secrets.items()):
        secret, _, item = source_name.partition("/")
        entries.append({"name": key, "valueFrom": {"secretKeyRef": {"name": secret, "key": item}}})
    return entries


def _mounts(config: Config) -> list[Any]:
    mounts: list[Any] = [
        {"name": "config", "mountPath": CONFIG_FOLDER, "readOnly": True},
        {"name": "shm", "mountPath": "/dev/shm"},
    ]
    if fuse := config.gke.gcsfuse:
        mounts.append({"name": "bucket", "mountPath": fuse.folder, **({"readOnly": True} if fuse.read_only else {})})
    return mounts


def _volumes(config: Config, work: Workload) -> list[Any]:
    shm = {"name": "shm", "emptyDir": {"medium": "Memory", "sizeLimit": to_binary_unit(work.shm_size)}}
    volumes: list[Any] = [
        {"name": "config", "configMap": {"name": work.name}},
        Commented(shm, "Shared memory of data workers."),
    ]
    if fuse := config.gke.gcsfuse:
        driver = {
            "driver": "gcsfuse.csi.storage.gke.io",
            **({"readOnly": True} if fuse.read_only else {}),
            "volumeAttributes": {"bucketName": fuse.bucket, "mountOptions": fuse.options},
        }
        volumes.append({"name": "bucket", "csi": driver})
    return volumes


def to_binary_unit(size: str) -> str:
    """Docker's "16g" in Kubernetes' notation, "16Gi"."""
    return size[:-1] + {"k": "Ki", "m": "Mi", "g": "Gi"}[size[-1]]
