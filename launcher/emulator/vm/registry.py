"""Artifact Registry as engines see it: which images were pushed under which names. Pure functions of the state's
`pushed`.

Names under *-docker.pkg.dev and gcr.io are a registry's; all others belong to the engine. An image that docker pushed
stays in the workstation's store; its "digest" is its image id, unless pushes send bytes (`State.full_pushes`). Hosts
can pull what was pushed, and what the registry holds in bytes (launcher/emulator/registry), and nothing else.
"""

from __future__ import annotations

import base64
import json
import re
from dataclasses import dataclass
from typing import Any

_REGISTRY = re.compile(r"^([a-z0-9-]+-docker\.pkg\.dev|([a-z0-9-]+\.)?gcr\.io)/")


@dataclass(frozen=True)
class Reference:
    """repository[:tag][@digest]"""

    repository: str
    tag: str
    digest: str

    @property
    def version(self) -> str:
        """What identifies it within the repository: the digest where there is one."""
        return self.digest or self.tag or "latest"


def is_registry(name: str) -> bool:
    """Whether an image's name is one of an emulated registry."""
    return _REGISTRY.match(name) is not None


def parse(name: str) -> Reference:
    """The parts of an image's name."""
    rest, _, digest = name.partition("@")
    head, separator, tag = rest.rpartition(":")
    if separator and "/" not in tag:
        return Reference(head, tag, digest)
    return Reference(rest, "", digest)


def resolve(pushed: dict[str, dict[str, str]], name: str) -> str | None:
    """The image id that a registry's name means, or None when it was never pushed."""
    reference = parse(name)
    return pushed.get(reference.repository, {}).get(reference.version)


def password(header: str) -> str | None:
    """The password in an X-Registry-Auth header; None when there is none that can be read."""
    try:
        credentials = json.loads(base64.urlsafe_b64decode(header + "=" * (-len(header) % 4)))
        return str(credentials["password"])
    except (ValueError, KeyError, TypeError):
        return None


def unauthenticated(reference: Reference) -> str:
    """Artifact Registry's answer to a request without a service account's token."""
    host, _, path = reference.repository.partition("/")
    return (
        f'Head "https://{host}/v2/{path}/manifests/{reference.version}": denied: Unauthenticated request. '
        'Unauthenticated requests do not have permission "artifactregistry.repositories.downloadArtifacts" on '
        f'resource "{path}" (or it may not exist)'
    )


def push(pushed: dict[str, dict[str, str]], repository: str, tag: str, image: str, digest: str = "") -> None:
    """Enters an image under its tag and its digest in `pushed` (repository -> tag or digest -> image id). Without
    bytes, its digest is its id."""
    pushed.setdefault(repository, {}).update({tag: image, digest or image: image})


def push_progress(repository: str, tags: list[str], image: dict[str, Any], digest: str = "") -> bytes:
    """What the engine streams during a push: JSON lines, with the digest in an `aux` record at the end."""
    lines: list[dict[str, Any]] = [{"status": f"The push refers to repository [{repository}]"}]
    for layer in image.get("RootFS", {}).get("Layers") or []:
        lines.append({"status": "Layer already exists", "progressDetail": {}, "id": layer.removeprefix("sha256:")[:12]})
    for tag in tags:
        digest, size = digest or image["Id"], 2000
        lines.append({"status": f"{tag}: digest: {digest} size: {size}"})
        lines.append({"progressDetail": {}, "aux": {"Tag": tag, "Digest": digest, "Size": size}})
    return "".join(json.dumps(line) + "\r\n" for line in lines).encode()


def pull_progress(reference: Reference, image: str) -> bytes:
    """What the engine streams during a pull of what it has."""
    name = (
        f"{reference.repository}@{reference.digest}"
        if reference.digest
        else f"{reference.repository}:{reference.tag or 'latest'}"
    )
    path = reference.repository.split("/", 1)[1]
    lines = [
        {"status": f"Pulling from {path}", "id": reference.version},
        {"status": f"Digest: {image}"},
        {"status": f"Status: Image is up to date for {name}"},
    ]
    return "".join(json.dumps(line) + "\r\n" for line in lines).encode()


def unknown(reference: Reference) -> str:
    """The message of a pull that finds nothing."""
    at = "@" if reference.digest else ":"
    name = f"{reference.repository}{at}{reference.version}"
    return f'manifest for {name} not found: manifest unknown: Failed to fetch "{reference.version}"'


def with_digests(image: dict[str, Any], pushed: dict[str, dict[str, str]]) -> dict[str, Any]:
    """An image's inspect answer, with the digests under which it was pushed."""
    own = [
        f"{repository}@{version}"
        for repository, versions in sorted(pushed.items())
        for version, known in versions.items()
        if known == image["Id"] and version.startswith("sha256:")
    ]
    digests = [digest for digest in image.get("RepoDigests") or [] if digest not in own]
    return {**image, "RepoDigests": digests + own}
