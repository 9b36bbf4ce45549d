"""Artifact Registry: the repository that images are pushed to, created on request (`image.create_repository`), always
private.

Nothing but the request to create it is sent; who may read it stays what the project says. Calls may be repeated.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from launcher import shell
from launcher.gcloud.calls import ask_gcloud
from launcher.gcloud.errors import Conflict, NotFound

_SECONDS = 120.0
_HOST = "-docker.pkg.dev"


@dataclass(frozen=True)
class Repository:
    """A repository of Artifact Registry: LOCATION-docker.pkg.dev/PROJECT/NAME."""

    location: str
    project: str
    name: str

    def _command(self, verb: str) -> list[str]:
        return [
            *("gcloud", "artifacts", "repositories", verb, self.name),
            *(f"--project={self.project}", f"--location={self.location}", "--quiet"),
        ]

    @property
    def describe_command(self) -> list[str]:
        """Succeeds when the repository is there."""
        return [*self._command("describe"), "--format=value(name)"]

    @property
    def create_command(self) -> list[str]:
        """Creates the repository, readable as the project says."""
        return [*self._command("create"), "--repository-format=docker", "--description=images of tpu-launch"]


def parse(repository: str) -> Repository | None:
    """The repository of an image's name; None for one that is not in Artifact Registry."""
    match = re.fullmatch(rf"([a-z0-9-]+){re.escape(_HOST)}/([^/]+)/([^/:@]+)(/.+)?", repository)
    return Repository(match[1], match[2], match[3]) if match else None


def require(repository: str) -> bool:
    """Creates the repository unless it is there; returns whether it was created. Raises the LaunchError that gcloud's
    message means."""

    parsed = parse(repository)
    if parsed is None:
        return False
    try:
        ask_gcloud(parsed.describe_command, timeout=_SECONDS)
        return False
    except NotFound:
        pass
    try:
        ask_gcloud(parsed.create_command, timeout=_SECONDS)
    except Conflict:  # somebody else was quicker
        return False
    return True


def advice(repository: str) -> str:
    """What to do when a push says that there is no such repository."""
    parsed = parse(repository)
    fix = "create it in that registry"
    if parsed is not None:
        fix = f"`{shell.quote(parsed.create_command)}`, or set image.create_repository: true"
    return f"the repository does not exist, or may not be seen: {fix}"
