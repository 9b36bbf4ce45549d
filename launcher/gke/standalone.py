"""A manifest for people who use kubectl alone: the file's run under a name of its own, restarted by the cluster."""

from __future__ import annotations

import re
import secrets

from launcher.config import CONFIG_FILE, IMAGE_BY_DIGEST, Config
from launcher.errors import BadInput
from launcher.gke import checks
from launcher.gke.manifest import render
from launcher.gke.workload import Kind, Workload
from launcher.images import local

HEADING = "A run on {hosts} host(s) of {accelerator} on GKE, as `tpu-launch manifest` renders it from {file}."


def manifest(
    config: Config,
    *,
    kind: str = "jobset",
    name: str | None = None,
    image: str | None = None,
    secret: str | None = None,
) -> str:
    """The manifest's text. Raises BadInput for what GKE does not have, and for an image without a digest.

    `secret`: by which the hosts are to know each other; a random one unless it is given.
    """
    checks.check(config)
    work = workload(config, name or config.run_name, _image(config, image), secret or secrets.token_hex(32))
    slice_ = config.accelerator
    file = config.document.name.rpartition("/")[2]
    heading = HEADING.format(hosts=slice_.hosts, accelerator=slice_.name, file=file)
    return render(config, work, Kind(kind), heading)


def workload(config: Config, name: str, image: str, secret: str | None) -> Workload:
    """The run of that name, whose attempts the cluster counts. `secret`: None where somebody else makes the Secret."""
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


def _image(config: Config, given: str | None) -> str:
    if given is not None and not re.match(IMAGE_BY_DIGEST, given):
        raise BadInput(f"--image {given}: name it by digest, REPOSITORY@sha256:..., so that every host runs the same")
    reference = given or local.published(config)
    if reference is None:
        raise BadInput(
            f"{config.document.name}: no image is known by digest: give --image REPOSITORY@sha256:..., or "
            "image.reference, or build and push the file's own with `tpu-launch run` (image.repository) first"
        )
    return reference
