"""The Kubernetes objects of a run, in the order in which they must be created: the ConfigMap with its configuration,
the Secret that its hosts share, and the JobSet that runs its pods (`jobs`). Pure, but for `render`, which may
look up the image.

`render` makes the manifest for users who use kubectl alone: the cluster restarts its run.
"""

import base64
import re
from typing import Any

from launcher.config import CONFIG_FILE, IMAGE_BY_DIGEST, Config
from launcher.errors import BadInput
from launcher.gke import checks, jobs
from launcher.gke.commented_yaml import Commented, dump_documents
from launcher.gke.workload import CONFIG_FOLDER, SECRET_KEY, Restarts, Workload, metadata, needs_secret
from launcher.images import local

_HEADING = "A run on {hosts} host(s) of {accelerator} on GKE, as `tpu-launch manifest` renders it from {file}."


def render(config: Config, *, secret: str, name: str | None = None, image: str | None = None) -> str:
    """Returns the YAML of a run that the cluster restarts.

    Args:
        secret: Shared by the hosts, which let in no others.
        name: Of the objects and of the run; run.name by default.
        image: REPOSITORY@sha256:...; the configuration's by default.

    Raises:
        BadInput: GKE can't run it, or the image has no digest.
    """
    checks.check(config)  # before the registry is asked
    work = standalone_workload(config, name or config.run_name, _resolve_image(config, image), secret)
    slice_ = config.accelerator
    file = config.document.name.rpartition("/")[2]
    heading = _HEADING.format(hosts=slice_.hosts, accelerator=slice_.name, file=file)
    return dump_documents(make_objects(config, work, Restarts.BY_CLUSTER), heading)


def standalone_workload(config: Config, name: str, image: str, secret: str | None) -> Workload:
    """Returns the workload of a run whose attempts the cluster counts. `secret` None: the user creates the Secret."""
    return Workload(
        name=name,
        run_id=name,
        attempt=None,
        image=image,
        command=config.command,
        environment=config.run.environment,
        files={CONFIG_FILE: config.document.dump()},
        shm_size=config.run.shm_size,
        user=config.run.user,
        secret=secret,
    )


def make_objects(config: Config, work: Workload, restarts: Restarts) -> list[Any]:
    """Returns a workload's objects, with comments. Raises BadInput for a configuration or name that GKE can't use."""
    checks.check(config)
    checks.check_name(work.name)
    objects: list[Any] = [_config_map(config, work)]
    if work.secret is not None and needs_secret(config):
        objects.append(_secret(config, work, work.secret))
    return [*objects, jobs.jobset(config, work, restarts)]


def _secret(config: Config, work: Workload, value: str) -> dict[str, Any]:
    comment = "Random, for this manifest alone: a host lets in only hosts that have it. Keep it out of repositories."
    return {
        "apiVersion": "v1",
        "kind": "Secret",
        "metadata": metadata(config, work),
        "data": Commented({SECRET_KEY: base64.b64encode(value.encode()).decode()}, comment),
    }


def _config_map(config: Config, work: Workload) -> dict[str, Any]:
    return {
        "apiVersion": "v1",
        "kind": "ConfigMap",
        "metadata": metadata(config, work),
        "data": Commented(
            dict(work.files), f"The files that tpu-train reads from {CONFIG_FOLDER}. They hold no secrets."
        ),
    }


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
