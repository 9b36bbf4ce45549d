"""Repositories of images: names of images in them, the credentials of their registries, and the creation of one in
Artifact Registry.

Credentials are neither stored nor logged. Credential helpers speak docker's protocol
(https://github.com/docker/docker-credential-helpers): the registry on standard input, JSON on standard output.
"""

import base64
import json
import os
import re
import shlex
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from launcher import shell
from launcher.errors import BadInput, LaunchError
from launcher.gcloud import Conflict, ResourceNotFound, run_gcloud

_GOOGLE = re.compile(r"([a-z0-9-]+-docker\.pkg\.dev|([a-z0-9-]+\.)?gcr\.io)")
DOCKER_HUB = "registry-1.docker.io"
_PATH = re.compile(r"[a-z0-9]+([._-]+[a-z0-9]+)*(/[a-z0-9]+([._-]+[a-z0-9]+)*)*")
_TAG = re.compile(r"\w[\w.-]{0,127}", re.ASCII)
_DIGEST = re.compile(r"sha256:[0-9a-f]{64}")

_CREDENTIALS_SECONDS, _REPOSITORY_SECONDS = 60.0, 120.0  # for one command
_TOKEN_USER = "oauth2accesstoken"  # https://cloud.google.com/artifact-registry/docs/docker/authentication#token
_IDENTITY_USER = "<token>"  # the user name with which a helper returns an identity token


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


def parse_reference(name: str) -> Reference:
    """Parses an image's name by docker's rules: without a host, it is Docker Hub's. A tag or digest that the name lacks
    is "". Raises BadInput for other text."""
    rest, at, digest = name.partition("@")
    first, slash, _ = rest.partition("/")
    host = first if slash and ("." in first or ":" in first or first == "localhost") else ""
    path = rest.removeprefix(f"{host}/")
    path, colon, tag = path.partition(":")
    if not host or host in ("docker.io", "index.docker.io"):
        host, path = DOCKER_HUB, path if "/" in path else f"library/{path}"
    bad_tag, bad_digest = colon and not _TAG.fullmatch(tag), at and not _DIGEST.fullmatch(digest)
    _, colon, port = host.rpartition("]")[2].partition(":")  # an IPv6 address is in brackets
    bad_port = colon and not (re.fullmatch("[0-9]{1,5}", port) and 0 < int(port) < 65536)
    if not _PATH.fullmatch(path) or bad_tag or bad_digest or bad_port:
        raise BadInput(f"{name}: not the name of an image in a registry: HOST/PATH:TAG or HOST/PATH@sha256:...")
    return Reference(host, path, tag, digest)


def is_google(host: str) -> bool:
    """Returns whether a registry is Artifact Registry or Container Registry."""
    return _GOOGLE.fullmatch(host) is not None


@dataclass(frozen=True, repr=False)
class RegistryCredentials:
    """A user name and a password, left out of every message and representation."""

    user: str
    password: str

    @property
    def basic(self) -> str:
        """The value of the header Authorization, or Proxy-Authorization."""
        return "Basic " + base64.b64encode(f"{self.user}:{self.password}".encode()).decode()


def find_credentials(host: str) -> RegistryCredentials | None:
    """Returns gcloud's token for Google's registries, else docker's credentials; None when there are none and requests
    are anonymous. Raises LaunchError when gcloud has no account or a helper fails, CommandTimeout when one of them is
    silent, BadInput when docker's settings are broken."""
    if is_google(host):
        token = run_gcloud(["gcloud", "auth", "print-access-token", "--quiet"], timeout=_CREDENTIALS_SECONDS).strip()
        return RegistryCredentials(_TOKEN_USER, token)
    path = Path(os.environ.get("DOCKER_CONFIG") or Path.home() / ".docker") / "config.json"
    try:
        settings = json.loads(path.read_text(encoding="utf-8"))
        assert isinstance(settings, dict), "not a JSON object"
    except FileNotFoundError:
        return None
    except (OSError, ValueError, AssertionError) as error:
        raise BadInput(f"{path}: can't be read for the credentials of {host}: {error}") from None
    return from_docker_settings(settings, host, path)


def from_docker_settings(settings: Mapping[str, Any], host: str, path: Path) -> RegistryCredentials | None:
    """Returns a registry's credentials from docker's config.json (`path`: its name in messages): from the registry's
    helper (without one, the common store), else from the file itself; None without an entry. Raises BadInput for a
    damaged entry, and as `_ask_helper`."""
    names = [host, f"https://{host}"]
    if host == DOCKER_HUB:
        names.append("https://index.docker.io/v1/")
    for name in names:
        helper = (settings.get("credHelpers") or {}).get(name) or settings.get("credsStore")
        if helper and (found := _ask_helper(str(helper), name)):
            return found
        entry = (settings.get("auths") or {}).get(name) or {}
        if encoded := entry.get("auth"):
            try:
                user, _, password = base64.b64decode(encoded).decode().partition(":")
            except ValueError:
                raise BadInput(f"{path}: the entry of {name} can't be read: `docker login {host}` again") from None
            return RegistryCredentials(user, password.rstrip("\0"))
    return None


def _ask_helper(helper: str, name: str) -> RegistryCredentials | None:
    """Runs docker-credential-HELPER for a registry; None if it has no entry. Raises LaunchError, BadInput."""
    command = [f"docker-credential-{helper}", "get"]
    result = shell.run(command, timeout=_CREDENTIALS_SECONDS, input=name)
    if not result.ok:
        if "not found" in (result.stdout + result.stderr).lower():
            return None
        lines = (result.stderr or result.stdout).strip().splitlines() or ["no reason given"]
        raise LaunchError(f"{shlex.join(command)} gave no credentials for {name}: {lines[-1]}")
    try:
        answer = json.loads(result.stdout)
        user, secret = str(answer["Username"]), str(answer["Secret"])
    except (ValueError, KeyError, TypeError):
        raise LaunchError(f"{shlex.join(command)} did not answer with Username and Secret for {name}") from None
    if user == _IDENTITY_USER:
        raise BadInput(f"{shlex.join(command)} has an identity token for {name}, which is not supported: log in again")
    return RegistryCredentials(user, secret)


@dataclass(frozen=True)
class ArtifactRepository:
    """LOCATION-docker.pkg.dev/PROJECT/NAME"""

    location: str
    project: str
    name: str

    def command(self, verb: str, *flags: str) -> list[str]:
        """Returns the gcloud command for a verb on the repository."""
        place = [f"--project={self.project}", f"--location={self.location}", "--quiet"]
        return ["gcloud", "artifacts", "repositories", verb, self.name, *place, *flags]

    @property
    def create_command(self) -> list[str]:
        return self.command("create", "--repository-format=docker", "--description=images of tpu-launch")


def parse_repository(image: str) -> ArtifactRepository | None:
    """Returns the repository of an image's name; None when it is not in Artifact Registry."""
    match = re.fullmatch(r"([a-z0-9-]+)-docker\.pkg\.dev/([^/]+)/([^/:@]+)(/.+)?", image)
    return ArtifactRepository(match[1], match[2], match[3]) if match else None


def require_repository(image: str) -> bool:
    """Creates the image's repository by gcloud if it is missing, and returns whether it did; False also for registries
    other than Artifact Registry. Raises LaunchError if gcloud fails."""
    repository = parse_repository(image)
    if repository is None:
        return False
    try:
        run_gcloud(repository.command("describe", "--format=value(name)"), timeout=_REPOSITORY_SECONDS)
        return False
    except ResourceNotFound:
        pass
    try:
        run_gcloud(repository.create_command, timeout=_REPOSITORY_SECONDS)
    except Conflict:  # another process created it
        return False
    return True


def advise_creation(image: str) -> str:
    """Returns what to do when a push reports that the image's repository does not exist, for messages."""
    repository = parse_repository(image)
    fix = "create it in that registry"
    if repository is not None:
        fix = f"`{shlex.join(repository.create_command)}`, or set image.create_repository: true"
    return f"the repository does not exist, or may not be seen: {fix}"
