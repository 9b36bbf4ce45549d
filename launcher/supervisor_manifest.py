"""Shell scripts that put a supervisor on Google Cloud: a Deployment on GKE, a Cloud Run job, or a small VM. Pure.

Each script first creates a service account with the least rights that supervising needs, then starts the container.
Granting the rights again does no harm; an existing VM must be deleted first. GKE's script needs kubectl.

Sources: permissions of Cloud TPU (https://docs.cloud.google.com/iam/docs/roles-permissions/tpu; queued resources have
none of their own), Workload Identity (https://cloud.google.com/kubernetes-engine/docs/how-to/workload-identity),
Cloud Run's 168 hours a task (https://docs.cloud.google.com/run/docs/configuring/task-timeout), containers by cloud-init
(https://cloud.google.com/container-optimized-os/docs/how-to/create-configure-instance).
"""

import re
import shlex
from dataclasses import dataclass

from launcher.config import IMAGE_BY_DIGEST
from launcher.errors import BadInput
from launcher.gke.commented_yaml import Commented, dump_documents
from launcher.images.repositories import parse_repository

KINDS = ("gke", "cloud-run", "vm")
NAME = "tpu-launch-supervisor"  # of everything that the scripts create, but for the role
ROLE = "tpuLaunchSupervisor"
# What `gcloud compute tpus` needs to create, find, delete and enter slices. Entering adds a key to the node's metadata
# (tpu.nodes.update) and reads the project's (compute.projects.get).
PERMISSIONS = (
    *(f"tpu.nodes.{verb}" for verb in ("create", "delete", "get", "list", "update")),
    *(f"tpu.{kind}.{verb}" for kind in ("locations", "operations") for verb in ("get", "list")),
    "compute.projects.get",
)
_NAMESPACE = "default"
_USER, _HOME = 1000, "/home/launcher"  # of images/launcher
_MEMORY = "512Mi"


@dataclass(frozen=True)
class SupervisorSpec:
    """Where a supervisor runs, and what it supervises."""

    folder: str  # gs://BUCKET/FOLDER with the runs
    image: str  # REPOSITORY@sha256:... of images/launcher
    project: str
    zone: str  # the VM's zone; the Cloud Run job is in its region

    @property
    def account(self) -> str:
        return f"{NAME}@{self.project}.iam.gserviceaccount.com"


def render(kind: str, supervisor: SupervisorSpec) -> str:
    """Returns the shell script for `kind`, one of KINDS. Raises BadInput for a wrong folder or image."""
    if not re.fullmatch(r"gs://[a-z0-9][-a-z0-9_.]+(/[^\s,'\"$`\\]+)?", supervisor.folder):
        raise BadInput(f"{supervisor.folder}: name the folder with the runs as gs://BUCKET/FOLDER")
    if not re.fullmatch(IMAGE_BY_DIGEST, supervisor.image):
        raise BadInput(f"{supervisor.image}: name the image by digest, REPOSITORY@sha256:...")
    steps = {"gke": _on_gke, "cloud-run": _on_cloud_run, "vm": _on_vm}[kind](supervisor)
    title = f"Supervises the runs below {supervisor.folder}; made by `tpu-launch supervise --manifest {kind}`."
    return "\n".join(["#!/bin/sh", f"# {title}", "set -eu", "", *_rights(supervisor, kind), *steps]) + "\n"


def _rights(supervisor: SupervisorSpec, kind: str) -> list[str]:
    """Returns the commands that create the service account and grant it what `kind` needs, and an empty line."""
    project, account = f"--project={supervisor.project}", supervisor.account
    member = f"--member=serviceAccount:{account}"
    role = f"projects/{supervisor.project}/roles/{ROLE}"
    bucket = "/".join(supervisor.folder.split("/")[:3])
    about = ("--title=tpu-launch supervisor", "--stage=GA", f"--permissions={','.join(PERMISSIONS)}")
    grant_account = "iam service-accounts add-iam-policy-binding"
    lines = [
        "# A service account that may manage slices, use the bucket, and act as the slices' own account.",
        _unless("iam service-accounts describe", account, project),
        _gcloud("iam service-accounts create", NAME, project),
        _unless("iam roles describe", ROLE, project),
        _gcloud("iam roles create", ROLE, project, *about),
        _gcloud("projects add-iam-policy-binding", supervisor.project, member, f"--role={role}", "--condition=None"),
        _gcloud("storage buckets add-iam-policy-binding", bucket, member, "--role=roles/storage.objectUser"),
        "# The slices' account: Compute Engine's default, unless slice.service_account names another.",
        f"number=$(gcloud projects describe {supervisor.project} '--format=value(projectNumber)' --quiet)",
        _gcloud(
            *(grant_account, "${number}-compute@developer.gserviceaccount.com", project),
            *(member, "--role=roles/iam.serviceAccountUser"),
        ),
    ]
    repository = parse_repository(supervisor.image.partition("@")[0])
    if kind == "vm" and repository:
        place = (f"--project={repository.project}", f"--location={repository.location}")
        reader = "--role=roles/artifactregistry.reader"
        lines.append(_gcloud("artifacts repositories add-iam-policy-binding", repository.name, *place, member, reader))
    if kind == "gke":
        identity = f"--member=serviceAccount:{supervisor.project}.svc.id.goog[{_NAMESPACE}/{NAME}]"
        lines += [
            "# The pod's Kubernetes service account acts as that account (Workload Identity).",
            _gcloud(grant_account, account, project, identity, "--role=roles/iam.workloadIdentityUser"),
        ]
    return [*lines, ""]


def _on_gke(supervisor: SupervisorSpec) -> list[str]:
    """Returns the kubectl command that creates a Kubernetes service account and a Deployment of one pod."""
    metadata, labels = {"name": NAME, "namespace": _NAMESPACE}, {"app": NAME}
    identity = {"annotations": {"iam.gke.io/gcp-service-account": supervisor.account}}
    confined = {"allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"]}, "readOnlyRootFilesystem": True}
    container = {
        "name": "supervisor",
        "image": supervisor.image,
        "args": ["supervise", supervisor.folder],
        "resources": {"requests": {"cpu": "250m", "memory": _MEMORY}, "limits": {"memory": "1Gi"}},
        "securityContext": confined,
        "volumeMounts": [{"name": "home", "mountPath": _HOME}, {"name": "tmp", "mountPath": "/tmp"}],
    }
    folders = [{"name": "home", "emptyDir": {}}, {"name": "tmp", "emptyDir": {}}]
    user = {"runAsNonRoot": True, "runAsUser": _USER, "fsGroup": _USER, "seccompProfile": {"type": "RuntimeDefault"}}
    pod = {
        "serviceAccountName": NAME,
        "terminationGracePeriodSeconds": 30,
        "securityContext": user,
        "containers": [container],
        "volumes": Commented(folders, "Caches and gcloud's ssh key. The ledger is in the bucket."),
    }
    spec = {
        "replicas": 1,
        "strategy": {"type": "Recreate"},
        "selector": {"matchLabels": labels},
        "template": {"metadata": {"labels": labels}, "spec": pod},
    }
    account = {"apiVersion": "v1", "kind": "ServiceAccount", "metadata": {**metadata, **identity}}
    deployment = {"apiVersion": "apps/v1", "kind": "Deployment", "metadata": metadata, "spec": spec}
    place = "# In the cluster of kubectl's current context: one replica; the lease keeps a second one idle."
    return [place, "kubectl apply --filename=- <<'EOF'", dump_documents([account, deployment]).rstrip("\n"), "EOF"]


def _on_cloud_run(supervisor: SupervisorSpec) -> list[str]:
    """Returns the commands that create a Cloud Run job of one task, and start it."""
    place = (f"--project={supervisor.project}", f"--region={supervisor.zone.rpartition('-')[0]}")
    return [
        "# One task of at most 168 hours; Cloud Run retries it when it fails or times out.",
        _gcloud(
            *("run jobs deploy", NAME, *place, f"--image={supervisor.image}"),
            *(f"--service-account={supervisor.account}", f"--args=supervise,{supervisor.folder}"),
            *("--tasks=1", "--task-timeout=168h", "--max-retries=10", "--cpu=1", f"--memory={_MEMORY}"),
        ),
        _gcloud("run jobs execute", NAME, *place, "--async"),
    ]


def _on_vm(supervisor: SupervisorSpec) -> list[str]:
    """Returns the commands that create a small VM whose systemd runs the container and restarts it."""
    registry = supervisor.image.partition("/")[0]
    return [
        "# Container-Optimized OS starts the container, and restarts it when it exits and after a reboot.",
        "settings=$(mktemp)",
        "cat >\"$settings\" <<'EOF'",
        "#cloud-config",
        "write_files:",
        f"- path: /etc/systemd/system/{NAME}.service",
        "  content: |",
        "    [Unit]",
        "    Wants=docker.service network-online.target",
        "    After=docker.service network-online.target",
        "    [Service]",
        f"    Environment=HOME=/home/{NAME}",
        f"    ExecStartPre=/usr/bin/docker-credential-gcr configure-docker --registries={registry}",
        f"    ExecStartPre=-/usr/bin/docker rm --force {NAME}",
        f"    ExecStart=/usr/bin/docker run --rm --init --name={NAME} --network=host {supervisor.image} "
        f"supervise {shlex.quote(supervisor.folder)}",
        f"    ExecStop=/usr/bin/docker stop --time=30 {NAME}",
        "    Restart=always",
        "    RestartSec=10",
        "runcmd:",
        "- systemctl daemon-reload",
        f"- systemctl start {NAME}.service",
        "EOF",
        _gcloud(
            *("compute instances create", NAME, f"--project={supervisor.project}", f"--zone={supervisor.zone}"),
            *("--machine-type=e2-micro", "--image-family=cos-stable", "--image-project=cos-cloud"),
            *("--boot-disk-size=10GB", "--boot-disk-type=pd-standard", f"--service-account={supervisor.account}"),
            *("--scopes=cloud-platform", "--metadata-from-file=user-data=$settings"),
        ),
        'rm "$settings"',
    ]


def _gcloud(verb: str, *arguments: str) -> str:
    """Returns a gcloud command, an argument a line. The shell expands variables in arguments and nothing else."""
    quoted = [f'"{each}"' if "$" in each else shlex.quote(each) for each in arguments]
    return " \\\n    ".join([f"gcloud {verb} {quoted[0]}", *quoted[1:], "--quiet"])


def _unless(verb: str, *arguments: str) -> str:
    """Returns `gcloud VERB ... ||`, where VERB describes a resource: a creation after it runs only if there is none."""
    return f"gcloud {verb} {shlex.join(arguments)} --quiet >/dev/null 2>&1 ||"
