"""Names of images in a registry: HOST/PATH[:TAG][@DIGEST]."""

import re
from dataclasses import dataclass

from launcher.errors import BadInput

_GOOGLE = re.compile(r"([a-z0-9-]+-docker\.pkg\.dev|([a-z0-9-]+\.)?gcr\.io)")
DOCKER_HUB = "registry-1.docker.io"
_PATH = re.compile(r"[a-z0-9]+([._-]+[a-z0-9]+)*(/[a-z0-9]+([._-]+[a-z0-9]+)*)*")
_TAG = re.compile(r"\w[\w.-]{0,127}", re.ASCII)
_DIGEST = re.compile(r"sha256:[0-9a-f]{64}")


@dataclass(frozen=True)
class Reference:
    """The parsed name of an image."""

    host: str  # the registry, with its port if it has one
    path: str  # the repository within the registry
    tag: str = ""
    digest: str = ""

    @property
    def version(self) -> str:
        """Returns what identifies the image within its repository: the digest, else the tag, else "latest"."""
        return self.digest or self.tag or "latest"

    @property
    def repository(self) -> str:
        """Returns HOST/PATH."""
        return f"{self.host}/{self.path}"

    def __str__(self) -> str:
        return f"{self.repository}@{self.digest}" if self.digest else f"{self.repository}:{self.version}"


def parse(name: str) -> Reference:
    """Parses an image's name by docker's rules: without a host, it is Docker Hub's. Raises BadInput for other text."""
    rest, at, digest = name.partition("@")
    first, slash, _ = rest.partition("/")
    host = first if slash and ("." in first or ":" in first or first == "localhost") else ""
    path = rest.removeprefix(f"{host}/")
    path, colon, tag = path.partition(":")
    if not host or host in ("docker.io", "index.docker.io"):
        host, path = DOCKER_HUB, path if "/" in path else f"library/{path}"
    bad_tag, bad_digest = colon and not _TAG.fullmatch(tag), at and not _DIGEST.fullmatch(digest)
    if not _PATH.fullmatch(path) or bad_tag or bad_digest:
        raise BadInput(f"{name}: not the name of an image in a registry: HOST/PATH:TAG or HOST/PATH@sha256:...")
    return Reference(host, path, tag, digest)


def is_google(host: str) -> bool:
    """Returns whether a registry is Artifact Registry or Container Registry."""
    return _GOOGLE.fullmatch(host) is not None
