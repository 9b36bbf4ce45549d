"""Questions to the engine's store of images on this machine. Nothing is changed, and no engine has to run."""

from __future__ import annotations

import contextlib
import json

from launcher import shell
from launcher.errors import LaunchError
from launcher.images import engine

SECONDS = 30.0  # for one question
_UNPACKED = 2.5  # size on a disk, as a multiple of what a registry holds, about


def find_id(docker: str, image: str) -> str | None:
    """sha256:... of an image; None when the store has none of that name, or when no engine answers."""
    return _inspect(docker, image, "{{.Id}}")


def find_digests(docker: str, remote: str) -> list[str]:
    """The sha256:... that an image of the store has in the repository of `remote` (repository:tag). With the containerd
    image store they are known before anything was pushed (launcher.images.pushed)."""
    repository = remote.rpartition(":")[0].removeprefix("docker.io/")
    references = json.loads(_inspect(docker, remote, "{{json .RepoDigests}}") or "null") or []
    return [
        str(reference).rpartition("@")[2] for reference in references if str(reference).startswith(f"{repository}@")
    ]


def unpacked_size(reference: str) -> int | None:
    """Bytes of an image's layers on a disk: exact when the store has it, else estimated from what its registry says of
    the packed layers; None when neither knows it."""
    try:
        docker = engine.client()
    except LaunchError:
        return None
    if size := _inspect(docker, reference, "{{.Size}}"):
        return int(size)
    result = shell.run([docker, "manifest", "inspect", reference], timeout=SECONDS)
    with contextlib.suppress(ValueError, KeyError, TypeError):
        return round(_UNPACKED * sum(int(layer["size"]) for layer in json.loads(result.stdout)["layers"]))
    return None


def _inspect(docker: str, image: str, template: str) -> str | None:
    result = shell.run([docker, "image", "inspect", "--format", template, image], timeout=SECONDS)
    return result.stdout.strip() if result.ok else None
