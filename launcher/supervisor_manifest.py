"""Shell scripts that put a supervisor on Google Cloud: a Deployment on GKE, a Cloud Run job, or a small VM. Pure.

Each script first creates a service account with the least rights that supervising needs (supervisor_scripts/rights.sh),
then starts the container. Granting the rights again does no harm; an existing VM must be deleted first. GKE's script
needs kubectl.

Sources: permissions of Cloud TPU (https://docs.cloud.google.com/iam/docs/roles-permissions/tpu; queued resources have
none of their own), Workload Identity (https://cloud.google.com/kubernetes-engine/docs/how-to/workload-identity),
Cloud Run's 168 hours a task (https://docs.cloud.google.com/run/docs/configuring/task-timeout), containers by cloud-init
(https://cloud.google.com/container-optimized-os/docs/how-to/create-configure-instance).
"""

import re
import shlex
from dataclasses import asdict, dataclass
from importlib import resources

from launcher.config import IMAGE_BY_DIGEST
from launcher.errors import BadInput
from launcher.images.repositories import parse_repository

KINDS = ("gke", "cloud-run", "vm")


@dataclass(frozen=True)
class SupervisorSpec:
    """Where a supervisor runs, and what it supervises."""

    folder: str  # gs://BUCKET/FOLDER with the runs
    image: str  # REPOSITORY@sha256:... of images/launcher
    project: str
    zone: str  # the VM's zone; the Cloud Run job is in its region


def render(kind: str, supervisor: SupervisorSpec) -> str:
    """Returns the shell script for `kind`, one of KINDS: variables, the rights, and the start of the container, with
    empty lines between them. Raises BadInput for a wrong folder or image."""
    if not re.fullmatch(r"gs://[a-z0-9][-a-z0-9_.]+(/[^\s,'\"$`\\]+)?", supervisor.folder):
        raise BadInput(f"{supervisor.folder}: name the folder with the runs as gs://BUCKET/FOLDER")
    if not re.fullmatch(IMAGE_BY_DIGEST, supervisor.image):
        raise BadInput(f"{supervisor.image}: name the image by digest, REPOSITORY@sha256:...")
    variables = {
        **asdict(supervisor),
        "account": f"tpu-launch-supervisor@{supervisor.project}.iam.gserviceaccount.com",
        "bucket": "/".join(supervisor.folder.split("/")[:3]),
    }
    if kind == "vm":
        found = parse_repository(supervisor.image.partition("@")[0])
        variables["repository"] = found.name if found else ""
        variables |= {"repository_project": found.project, "location": found.location} if found else {}
    title = f"Supervises the runs below {supervisor.folder}; made by `tpu-launch supervise --manifest {kind}`."
    assignments = "".join(f"{name}={shlex.quote(value)}\n" for name, value in variables.items())
    return "\n".join([f"#!/bin/sh\n# {title}\nset -eu\n{assignments}", _load_script("rights"), _load_script(kind)])


def _load_script(name: str) -> str:
    """Returns the text of supervisor_scripts/NAME.sh without directives to shellcheck."""
    text = (resources.files(__package__) / f"supervisor_scripts/{name}.sh").read_text(encoding="utf-8")
    return re.sub(r"^# shellcheck .*\n", "", text, flags=re.MULTILINE)
