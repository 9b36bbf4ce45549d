"""The Artifact Registry repository that images are pushed to, created on request (`image.create_repository`).

Only its creation is requested: who may read it follows from the project. Calls may be repeated.
"""

import re
from dataclasses import dataclass

from launcher import shell
from launcher.gcloud.calls import run_gcloud
from launcher.gcloud.errors import Conflict, ResourceNotFound

_SECONDS = 120.0


@dataclass(frozen=True)
class Repository:
    """LOCATION-docker.pkg.dev/PROJECT/NAME"""

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
        """The command that succeeds if the repository exists."""
        return [*self._command("describe"), "--format=value(name)"]

    @property
    def create_command(self) -> list[str]:
        return [*self._command("create"), "--repository-format=docker", "--description=images of tpu-launch"]


def parse(image: str) -> Repository | None:
    """Returns the repository of an image's name; None when it is not in Artifact Registry."""
    match = re.fullmatch(r"([a-z0-9-]+)-docker\.pkg\.dev/([^/]+)/([^/:@]+)(/.+)?", image)
    return Repository(match[1], match[2], match[3]) if match else None


def require(image: str) -> bool:
    """Creates the image's repository by gcloud if it is missing, and returns whether it did; False also for registries
    other than Artifact Registry. Raises LaunchError if gcloud fails."""
    repository = parse(image)
    if repository is None:
        return False
    try:
        run_gcloud(repository.describe_command, timeout=_SECONDS)
        return False
    except ResourceNotFound:
        pass
    try:
        run_gcloud(repository.create_command, timeout=_SECONDS)
    except Conflict:  # another process created it
        return False
    return True


def advice(image: str) -> str:
    """Returns what to do when a push reports that the image's repository does not exist, for messages."""
    repository = parse(image)
    fix = "create it in that registry"
    if repository is not None:
        fix = f"`{shell.quote(repository.create_command)}`, or set image.create_repository: true"
    return f"the repository does not exist, or may not be seen: {fix}"
