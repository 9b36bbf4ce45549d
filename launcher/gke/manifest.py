"""The Kubernetes objects of a run, in the order in which they must be created: the ConfigMap with its configuration,
the Secret that its hosts share, and the JobSet that runs its pods. Pure, but for `render`, which may look up the image.

`render` makes the manifest for users who use kubectl alone: the cluster restarts its run, by rules that rest on the
trainer's exit codes (training.errors), all hosts of a slice together.
"""

import base64
import re
from typing import Any

from launcher.config import CONFIG_FILE, IMAGE_BY_DIGEST, Config
from launcher.errors import BadInput
from launcher.gke import workload
from launcher.gke.commented_yaml import Commented, dump_documents
from launcher.gke.workload import CONTAINER, REPLICATED_JOB, Workload, host_name, needs_secret
from launcher.images import local
from launcher.provider import COMPILE_CACHE_FOLDER, Attempt, compile_cache_environment
from training.accelerators import gke_nodes
from training.distributed.cluster import GLOO_PORT, RENDEZVOUS_PORT, SECRET_VARIABLE
from training.errors import Exit
from training.telemetry.progress_line import FILE, FILE_VARIABLE

CONFIG_FOLDER = "/etc/tpu-launch"
SECRET_KEY = "secret"  # in the Secret that has the workload's name
PORTS = (("libtpu", 8471), ("rendezvous", RENDEZVOUS_PORT), ("gloo", GLOO_PORT))

_KEPT_SECONDS = 3 * 24 * 3600  # after which the cluster deletes ended objects
# Google: "You must raise the locked memory limit so the driver can communicate with the TPU chips over DMA", with this
# command (https://cloud.google.com/kubernetes-engine/docs/how-to/tpus). `ulimit` counts KiB: this is 64 TiB, more than
# any host has. A pod has no field for the limit, and a container's default may be 64 KiB.
LOCKED_MEMORY_KIB = 68719476736
RAISE_LOCKED_MEMORY = f"""\
ulimit -l {LOCKED_MEMORY_KIB} 2>/dev/null ||
  echo "tpu-launch: the locked-memory limit stays low, so a TPU may hang: run as root (run.user)" >&2
exec "$@"
"""
_HEADING = "A run on {hosts} host(s) of {accelerator} on GKE, as `tpu-launch manifest` renders it from {file}."


def render(config: Config, *, secret: str, name: str | None = None, image: str | None = None) -> str:
    """Returns the YAML of a run that the cluster restarts, named `name` (None: run.name), with an image
    REPOSITORY@sha256:... (None: the file's published one, for which it may ask the registry) and a secret by which its
    hosts know each other. Raises BadInput if GKE can't run it, or the image's digest is unknown."""
    workload.check(config)  # before the registry is asked
    work = standalone_workload(config, name or config.run_name, _resolve_image(config, image), secret)
    slice_ = config.accelerator
    file = config.document.name.rpartition("/")[2]
    heading = _HEADING.format(hosts=slice_.hosts, accelerator=slice_.name, file=file)
    return dump_documents(make_objects(work), heading)


def standalone_workload(config: Config, name: str, image: str, secret: str) -> Workload:
    """Returns the workload of run `name`, which the cluster restarts; checks nothing. `secret`: shared by its hosts."""
    attempt = Attempt(
        run_id=name,
        number=0,
        image=image,
        command=config.command,
        environment=config.run.environment,
        files={CONFIG_FILE: config.document.dump().encode()},
        shm_size=config.run.shm_size,
        user=config.run.user,
        host_secret=secret,
    )
    return Workload(config, attempt, by_cluster=True)


def make_objects(work: Workload) -> list[Any]:
    """Returns a workload's ConfigMap, its Secret if it needs one, and its JobSet, with comments. Raises BadInput for a
    configuration or name that GKE can't use."""
    workload.check(work.config)
    workload.check_name(work.name)
    files = {name: content.decode() for name, content in work.attempt.files.items()}
    data = Commented(files, f"The files that tpu-train reads from {CONFIG_FOLDER}. They hold no secrets.")
    objects = [{"apiVersion": "v1", "kind": "ConfigMap", "metadata": work.metadata, "data": data}]
    if needs_secret(work.config):
        value = base64.b64encode(work.attempt.host_secret.encode()).decode()
        comment = (
            "Random, for this manifest alone: a host lets in only hosts that have it. Keep it out of repositories."
        )
        data = Commented({SECRET_KEY: value}, comment)
        objects.append({"apiVersion": "v1", "kind": "Secret", "metadata": work.metadata, "data": data})
    return [*objects, _jobset(work)]


def _resolve_image(config: Config, given: str | None) -> str:
    """Returns the given image, or the configuration's published one, for which it may ask the registry. Raises BadInput
    for a given image without a digest, and if none was published."""
    if given is not None and not re.match(IMAGE_BY_DIGEST, given):
        raise BadInput(f"--image {given}: give a digest, REPOSITORY@sha256:..., so that all hosts run the same image")
    reference = given or local.published(config)
    if reference is None:
        raise BadInput(
            f"{config.document.name}: the digest of its image is not known: give --image REPOSITORY@sha256:..., or "
            "image.reference, or let `tpu-launch run` build and push it (image.repository) first"
        )
    return reference


# -- the JobSet -------------------------------------------------------------------------------------------------------


def _jobset(work: Workload) -> dict[str, Any]:
    """Returns the JobSet of a workload: one Job with a pod per host."""
    hosts = work.config.accelerator.hosts
    indexed = Commented("Indexed", "Pod number i is host i; GKE tells each TPU_WORKER_ID and TPU_WORKER_HOSTNAMES.")
    template = {
        "parallelism": hosts,
        "completions": Commented(hosts, "One pod per host."),
        "completionMode": indexed,
        **(_rules_of_cluster() if work.by_cluster else _rules_of_launcher()),
        "template": _pod_template(work),
    }
    replicated_job = {
        "name": REPLICATED_JOB,
        "replicas": Commented(1, "One slice."),
        "template": {"metadata": {"labels": work.labels}, "spec": template},
    }
    no_restarts = {"maxRestarts": Commented(0, "tpu-launch decides whether to make another attempt.")}
    return {
        "apiVersion": "jobset.x-k8s.io/v1alpha2",
        "kind": "JobSet",
        "metadata": _jobset_metadata(work),
        "spec": {
            "ttlSecondsAfterFinished": Commented(_KEPT_SECONDS, "The cluster deletes an ended run after three days."),
            "network": {
                "enableDNSHostnames": Commented(True, f"The name of host i is {host_name(work.name, '<i>')}."),
                "publishNotReadyAddresses": True,
                "subdomain": work.name,
            },
            "failurePolicy": _failure_policy(work.config.gke.restarts) if work.by_cluster else no_restarts,
            "replicatedJobs": [replicated_job],
        },
    }


def _jobset_metadata(work: Workload) -> dict[str, Any]:
    """Returns the metadata with Kueue's queue, if given, and, for several hosts, exclusive use of a node pool."""
    fields, config = work.metadata, work.config
    if config.gke.queue:
        queue = Commented(config.gke.queue, "Kueue admits all hosts of the run together.")
        fields["labels"] = {**fields["labels"], "kueue.x-k8s.io/queue-name": queue}
    if config.accelerator.hosts > 1:
        comment = "A slice is a node pool: all hosts of this run in one node pool, and no other run in it."
        topology = Commented("cloud.google.com/gke-nodepool", comment)
        fields["annotations"] = {"alpha.jobset.sigs.k8s.io/exclusive-topology": topology}
    return fields


def _failure_policy(restarts: int) -> dict[str, Any]:
    """Returns the JobSet's rules if the cluster decides about restarts: `restarts` after failures, any number after a
    save or a lost node, none after bad input."""
    refused = Commented(f"exit code {int(Exit.BAD_INPUT)} ", "Bad configuration or data: a restart changes nothing.")
    ignore = Commented("RestartJobSetAndIgnoreMaxRestarts", "A host saved and left, or lost its node: not a failure.")
    reasons = {"onJobFailureReasons": ["PodFailurePolicy"]}
    return {
        "maxRestarts": Commented(restarts, "After failures; each restart resumes from the newest checkpoint."),
        "rules": [
            {"name": "refused", "action": "FailJobSet", **reasons, "onJobFailureMessagePatterns": [refused]},
            {"name": "savedOrDisrupted", "action": ignore, **reasons},
        ],
    }


def _rules_of_cluster() -> dict[str, Any]:
    """Returns the Job's rules if the cluster restarts: which exit codes and disruptions fail it; no pod is retried."""
    refused = "Bad configuration or data. The JobSet's first rule matches this exit code."
    disrupted = {"action": "FailJob", "onPodConditions": [{"type": "DisruptionTarget", "status": "True"}]}
    rules = [
        _on_exit("FailJob", Exit.BAD_INPUT, refused),
        _on_exit("FailJob", Exit.SAVED, "Asked to stop (maintenance, preemption), and saved."),
        _on_exit("Ignore", Exit.LOST_PEER, "Lost another host: the end of that host decides."),
        Commented(disrupted, "Its node was preempted, drained or lost."),
    ]
    once = Commented(0, "A failed host ends the Job; the JobSet then restarts all hosts.")
    return {"backoffLimit": once, "podFailurePolicy": {"rules": rules}}


def _on_exit(action: str, code: Exit, comment: str) -> Any:
    """Returns the rule for pods whose container exits with `code`, below a comment."""
    condition = {"containerName": CONTAINER, "operator": "In", "values": [int(code)]}
    return Commented({"action": action, "onExitCodes": condition}, comment)


def _rules_of_launcher() -> dict[str, Any]:
    """Returns the Job's rules if tpu-launch decides about restarts: no pod is retried, none replaced while it saves."""
    once = "A failed host does not end the others: tpu-launch finds the first failure, and ends them itself."
    failed = "A host that is being stopped may still save: it has not failed yet."
    return {"backoffLimitPerIndex": Commented(0, once), "podReplacementPolicy": Commented("Failed", failed)}


# -- the pod of a host ------------------------------------------------------------------------------------------------


def _pod_template(work: Workload) -> dict[str, Any]:
    """Returns the template of all pods of a workload."""
    config = work.config
    metadata: dict[str, Any] = {"labels": work.labels}
    spec: dict[str, Any] = {"restartPolicy": "Never"}
    if config.gke.gcsfuse:
        metadata["annotations"] = {
            "gke-gcsfuse/volumes": Commented("true", "GKE adds the sidecar that mounts the bucket.")
        }
    if config.gke.service_account:
        account = Commented(config.gke.service_account, "Gives access to the buckets through Workload Identity.")
        spec["serviceAccountName"] = account
    elif not config.gke.gcsfuse:
        spec["automountServiceAccountToken"] = False
    grace = "Between SIGTERM and SIGKILL: time to save."
    slice_, nodes = config.accelerator, gke_nodes(config.accelerator)
    pool = f"{slice_.name}: a node pool of {slice_.hosts} x {nodes.machine_type}, {slice_.devices} devices."
    tolerations: list[Any] = [{"key": "google.com/tpu", "operator": "Exists", "effect": "NoSchedule"}]
    if config.slice.capacity == "spot":
        grace += " A spot VM has 30 s in all."
        spot = {"key": "cloud.google.com/gke-spot", "operator": "Equal", "value": "true", "effect": "NoSchedule"}
        tolerations.append(spot)
    spec |= {
        "terminationGracePeriodSeconds": Commented(workload.grace_seconds(config), grace),
        "nodeSelector": Commented(workload.node_selector(config), pool),
        "tolerations": tolerations,
        "securityContext": _pod_security(work),
        "containers": [_container(work)],
        "volumes": _volumes(work),
    }
    return {"metadata": metadata, "spec": spec}


def _pod_security(work: Workload) -> Any:
    """Returns the pod's securityContext: the workload's user, else root, and seccomp unless gke.privileged."""
    user, _, group = (work.attempt.user or "0").partition(":")
    fields: dict[str, Any] = {"runAsUser": int(user)}
    if group:
        fields["runAsGroup"] = int(group)
    if not work.config.gke.privileged:
        fields["seccompProfile"] = {"type": "RuntimeDefault"}
    return fields if work.attempt.user else Commented(fields, "The TPU's device files belong to root.")


def _container_security(privileged: bool) -> dict[str, Any]:
    """Returns the container's securityContext: privileged, or two capabilities only, with no way to more."""
    if privileged:
        return {"privileged": True}
    comment = "To write in folders of the image, which another user owns; for `ulimit`."
    added = Commented(["DAC_OVERRIDE", "SYS_RESOURCE"], comment)
    return {"allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"], "add": added}}


def _container(work: Workload) -> dict[str, Any]:
    """Returns the pod's container, which gets all chips of a node and raises its locked-memory limit first."""
    gke, chips = work.config.gke, str(work.config.accelerator.chips_per_host)
    requests = {key: value for key, value in (("cpu", gke.cpu), ("memory", gke.memory)) if value}
    tpu = Commented(chips, "All chips of the node: GKE gives them to one pod only.")
    return {
        "name": CONTAINER,
        "image": Commented(work.attempt.image, "By digest, so that all hosts run the same image."),
        "command": Commented(
            ["sh", "-c", RAISE_LOCKED_MEMORY, "sh", *map(literal, work.attempt.command)],
            "Raises the locked-memory limit for the TPU's driver (DMA), then runs the command.",
        ),
        "env": _environment(work),
        "ports": [{"name": name, "containerPort": number} for name, number in PORTS],
        "resources": {"requests": {**requests, "google.com/tpu": tpu}, "limits": {"google.com/tpu": chips}},
        "securityContext": _container_security(gke.privileged),
        "terminationMessagePolicy": Commented(
            "FallbackToLogsOnError", "`kubectl describe pod` shows the last lines of a failed container."
        ),
        "volumeMounts": _mounts(work.config),
    }


def _environment(work: Workload) -> list[Any]:
    """Returns the container's variables, secrets by reference; GKE adds TPU_WORKER_ID, TPU_WORKER_HOSTNAMES."""
    config, attempt = work.config, work.attempt
    run_id = _variable("TPU_LAUNCH_RUN_ID", attempt.run_id)
    source = {"fieldRef": {"fieldPath": "metadata.labels['jobset.sigs.k8s.io/restart-attempt']"}}
    restart = Commented({"name": "TPU_LAUNCH_ATTEMPT", "valueFrom": source}, "The number of restarts of the JobSet.")
    entries: list[Any] = [
        _variable("PJRT_DEVICE", "TPU"),
        _variable("TPU_ACCELERATOR_TYPE", config.accelerator.name),
        Commented(run_id, "Names the run's folder below `output`; a run with the same name resumes from it."),
        restart if work.by_cluster else _variable("TPU_LAUNCH_ATTEMPT", str(attempt.number)),
        Commented(_variable(FILE_VARIABLE, FILE), "Where the program reports its progress."),
    ]
    if config.accelerator.hosts > 1:
        hosts = _variable("TPU_LAUNCH_HOSTS", str(config.accelerator.hosts))
        entries += [
            Commented(hosts, "How hosts find each other where TPU_WORKER_HOSTNAMES is not set."),
            _variable("TPU_LAUNCH_HOST_NAME", host_name(work.name, "*")),
        ]
    if needs_secret(config):
        secret = _secret_variable(SECRET_VARIABLE, work.name, SECRET_KEY)
        entries.append(Commented(secret, "Shared by the hosts, which let in no others."))
    cache = compile_cache_environment(config.run.compile_cache_gb) if config.gke.node_cache else {}
    for key, value in (*cache.items(), *sorted(attempt.environment.items())):
        entries.append(_variable(key, literal(value)))
    for key, source_name in sorted(config.gke.secrets.items()):
        secret_name, _, item = source_name.partition("/")
        entries.append(_secret_variable(key, secret_name, item))
    return entries


def _variable(name: str, value: str) -> dict[str, Any]:
    return {"name": name, "value": value}


def _secret_variable(name: str, secret: str, key: str) -> dict[str, Any]:
    return {"name": name, "valueFrom": {"secretKeyRef": {"name": secret, "key": key}}}


def literal(text: str) -> str:
    """Escapes an argument or the value of a variable so that a pod gets it unchanged: the kubelet expands `$(NAME)` and
    `$$` (https://kubernetes.io/docs/tasks/inject-data-application/define-interdependent-environment-variables)."""
    return re.sub(r"\$(?=[$(])", "$$", text)


def _mounts(config: Config) -> list[Any]:
    """Returns the container's mounts: configuration, /dev/shm and, if given, gke.gcsfuse and gke.node_cache."""
    mounts: list[Any] = [
        {"name": "config", "mountPath": CONFIG_FOLDER, "readOnly": True},
        {"name": "shm", "mountPath": "/dev/shm"},
    ]
    if fuse := config.gke.gcsfuse:
        mounts.append({"name": "bucket", "mountPath": fuse.folder, **({"readOnly": True} if fuse.read_only else {})})
    if config.gke.node_cache:
        mounts.append({"name": "node-cache", "mountPath": COMPILE_CACHE_FOLDER})
    return mounts


def _volumes(work: Workload) -> list[Any]:
    """Returns the pod's volumes for `_mounts`."""
    size = work.attempt.shm_size  # Docker's "16g" is Kubernetes' "16Gi"
    memory = {"medium": "Memory", "sizeLimit": size[:-1] + {"k": "Ki", "m": "Mi", "g": "Gi"}[size[-1]]}
    volumes: list[Any] = [
        {"name": "config", "configMap": {"name": work.name}},
        Commented({"name": "shm", "emptyDir": memory}, "Shared memory for data workers."),
    ]
    if fuse := work.config.gke.gcsfuse:
        driver = {
            "driver": "gcsfuse.csi.storage.gke.io",
            **({"readOnly": True} if fuse.read_only else {}),
            "volumeAttributes": {"bucketName": fuse.bucket, "mountOptions": fuse.options},
        }
        volumes.append({"name": "bucket", "csi": driver})
    if folder := work.config.gke.node_cache:
        on_node = {"name": "node-cache", "hostPath": {"path": folder, "type": "DirectoryOrCreate"}}
        volumes.append(Commented(on_node, "Compiled programs, for later pods on the node."))
    return volumes
