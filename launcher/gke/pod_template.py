"""The pod of a host: its container, its scheduling, its volumes. Pure.

Sizes, hosts and chips come from the accelerator table alone.
"""

from typing import Any

from launcher.config import Config
from launcher.gke.commented_yaml import Commented
from launcher.gke.workload import (
    CONFIG_FOLDER,
    CONTAINER,
    PORTS,
    SECRET_KEY,
    Workload,
    grace_seconds,
    host_name,
    labels,
    literal,
    needs_secret,
    node_selector,
)
from launcher.provider import COMPILE_CACHE_FOLDER, compile_cache_environment
from training.accelerators import gke_nodes
from training.distributed.cluster import SECRET_VARIABLE
from training.telemetry.progress_line import FILE, FILE_VARIABLE

# Google: "You must raise the locked memory limit so the driver can communicate with the TPU chips over DMA", with this
# command (https://cloud.google.com/kubernetes-engine/docs/how-to/tpus). `ulimit` counts KiB: this is 64 TiB, more than
# any host has. A pod has no field for the limit, and a container's default may be 64 KiB.
LOCKED_MEMORY_KIB = 68719476736
RAISE_LOCKED_MEMORY = f"""\
ulimit -l {LOCKED_MEMORY_KIB} 2>/dev/null ||
  echo "tpu-launch: the locked-memory limit stays low, so a TPU may hang: run as root (run.user)" >&2
exec "$@"
"""


def pod_template(config: Config, work: Workload) -> dict[str, Any]:
    """Returns the template of all pods of a workload."""
    metadata: dict[str, Any] = {"labels": labels(config, work)}
    if config.gke.gcsfuse:
        annotation = Commented("true", "GKE adds the sidecar that mounts the bucket.")
        metadata["annotations"] = {"gke-gcsfuse/volumes": annotation}
    spec = {
        "restartPolicy": "Never",
        **_identity(config),
        **_scheduling(config),
        "securityContext": _pod_security(config, work),
        "containers": [_container(config, work)],
        "volumes": _volumes(config, work),
    }
    return {"metadata": metadata, "spec": spec}


def _identity(config: Config) -> dict[str, Any]:
    """Returns the pod's fields for its service account and grace period; with neither account nor gcsfuse, no token."""
    fields: dict[str, Any] = {}
    if config.gke.service_account:
        account = Commented(config.gke.service_account, "Gives access to the buckets through Workload Identity.")
        fields["serviceAccountName"] = account
    elif not config.gke.gcsfuse:
        fields["automountServiceAccountToken"] = False
    comment = "Between SIGTERM and SIGKILL: time to save."
    if config.slice.capacity == "spot":
        comment += " A spot VM has 30 s in all."
    return {**fields, "terminationGracePeriodSeconds": Commented(grace_seconds(config), comment)}


def _scheduling(config: Config) -> dict[str, Any]:
    """Returns the node selector, and tolerations of the taints of TPU and spot nodes."""
    slice_, nodes = config.accelerator, gke_nodes(config.accelerator)
    pool = f"{slice_.name}: a node pool of {slice_.hosts} x {nodes.machine_type}, {slice_.devices} devices."
    tolerations: list[Any] = [{"key": "google.com/tpu", "operator": "Exists", "effect": "NoSchedule"}]
    if config.slice.capacity == "spot":
        spot = {"key": "cloud.google.com/gke-spot", "operator": "Equal", "value": "true", "effect": "NoSchedule"}
        tolerations.append(spot)
    return {"nodeSelector": Commented(node_selector(config), pool), "tolerations": tolerations}


def _pod_security(config: Config, work: Workload) -> Any:
    """Returns the pod's securityContext: the workload's user, else root, and seccomp unless gke.privileged."""
    user, _, group = (work.user or "0").partition(":")
    fields: dict[str, Any] = {"runAsUser": int(user)}
    if group:
        fields["runAsGroup"] = int(group)
    if not config.gke.privileged:
        fields["seccompProfile"] = {"type": "RuntimeDefault"}
    return fields if work.user else Commented(fields, "The TPU's device files belong to root.")


def _container_security(config: Config) -> dict[str, Any]:
    """Returns the securityContext: privileged if gke.privileged, else two capabilities only, with no way to more."""
    if config.gke.privileged:
        return {"privileged": True}
    added = Commented(
        ["DAC_OVERRIDE", "SYS_RESOURCE"], "To write in folders of the image, which another user owns; for `ulimit`."
    )
    return {"allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"], "add": added}}


def _container(config: Config, work: Workload) -> dict[str, Any]:
    return {
        "name": CONTAINER,
        "image": Commented(work.image, "By digest, so that all hosts run the same image."),
        "command": Commented(
            ["sh", "-c", RAISE_LOCKED_MEMORY, "sh", *map(literal, work.command)],
            "Raises the locked-memory limit for the TPU's driver (DMA), then runs the command.",
        ),
        "env": _environment(config, work),
        "ports": [{"name": name, "containerPort": number} for name, number in PORTS],
        "resources": _resources(config),
        "securityContext": _container_security(config),
        "terminationMessagePolicy": Commented(
            "FallbackToLogsOnError", "`kubectl describe pod` shows the last lines of a failed container."
        ),
        "volumeMounts": _mounts(config),
    }


def _resources(config: Config) -> dict[str, Any]:
    """Returns all chips of a node, as request and limit, with gke.cpu and gke.memory as requests only."""
    chips = str(config.accelerator.chips_per_host)
    requests = {key: value for key, value in (("cpu", config.gke.cpu), ("memory", config.gke.memory)) if value}
    tpu = Commented(chips, "All chips of the node: GKE gives them to one pod only.")
    return {"requests": {**requests, "google.com/tpu": tpu}, "limits": {"google.com/tpu": chips}}


def _environment(config: Config, work: Workload) -> list[Any]:
    """Returns a container's environment without GKE's variables (TPU_WORKER_ID, TPU_WORKER_HOSTNAMES)."""
    run_id = {"name": "TPU_LAUNCH_RUN_ID", "value": work.run_id}
    entries: list[Any] = [
        {"name": "PJRT_DEVICE", "value": "TPU"},
        {"name": "TPU_ACCELERATOR_TYPE", "value": config.accelerator.name},
        Commented(run_id, "Names the run's folder below `output`; a run with the same name resumes from it."),
    ]
    if work.attempt is not None:
        entries.append({"name": "TPU_LAUNCH_ATTEMPT", "value": str(work.attempt)})
    else:
        source = {"fieldRef": {"fieldPath": "metadata.labels['jobset.sigs.k8s.io/restart-attempt']"}}
        attempt = {"name": "TPU_LAUNCH_ATTEMPT", "valueFrom": source}
        entries.append(Commented(attempt, "The number of restarts of the JobSet."))
    entries.append(Commented({"name": FILE_VARIABLE, "value": FILE}, "Where the program reports its progress."))
    if config.accelerator.hosts > 1:
        hosts = {"name": "TPU_LAUNCH_HOSTS", "value": str(config.accelerator.hosts)}
        entries += [
            Commented(hosts, "How hosts find each other where TPU_WORKER_HOSTNAMES is not set."),
            {"name": "TPU_LAUNCH_HOST_NAME", "value": host_name(work.name, "*")},
        ]
    if needs_secret(config):
        secret_entry = {"name": SECRET_VARIABLE, "valueFrom": {"secretKeyRef": {"name": work.name, "key": SECRET_KEY}}}
        entries.append(Commented(secret_entry, "Shared by the hosts, which let in no others."))
    if config.gke.node_cache:
        cache = compile_cache_environment(config.run.compile_cache_gb)
        entries += [{"name": key, "value": literal(value)} for key, value in cache.items()]
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
    if config.gke.node_cache:
        mounts.append({"name": "node-cache", "mountPath": COMPILE_CACHE_FOLDER})
    return mounts


def _volumes(config: Config, work: Workload) -> list[Any]:
    shm = {"name": "shm", "emptyDir": {"medium": "Memory", "sizeLimit": to_binary_unit(work.shm_size)}}
    volumes: list[Any] = [
        {"name": "config", "configMap": {"name": work.name}},
        Commented(shm, "Shared memory for data workers."),
    ]
    if fuse := config.gke.gcsfuse:
        driver = {
            "driver": "gcsfuse.csi.storage.gke.io",
            **({"readOnly": True} if fuse.read_only else {}),
            "volumeAttributes": {"bucketName": fuse.bucket, "mountOptions": fuse.options},
        }
        volumes.append({"name": "bucket", "csi": driver})
    if folder := config.gke.node_cache:
        on_node = {"name": "node-cache", "hostPath": {"path": folder, "type": "DirectoryOrCreate"}}
        volumes.append(Commented(on_node, "Compiled programs, for later pods on the node."))
    return volumes


def to_binary_unit(size: str) -> str:
    """Converts Docker's "16g" to Kubernetes' "16Gi"."""
    return size[:-1] + {"k": "Ki", "m": "Mi", "g": "Gi"}[size[-1]]
