"""The workstation's container engine: which docker client to use, whether the engine answers, what its store has.

A machine may have several docker clients. Ours must build with BuildKit, whose secrets and cache mounts keep
credentials and caches out of image layers: clients before 23 have it built in, later ones need the buildx plug-in.
"""

import functools
import os
import re
import shutil
from pathlib import Path

from launcher import shell
from launcher.errors import BadInput, CommandMissing, CommandTimeout, LaunchError

SECONDS = 30.0  # for one question to the client or the engine
_FIRST_WITHOUT_BUILDKIT = 23  # from this version on the client leaves BuildKit to the buildx plug-in
_GET_ONE = "install one that can (Debian: apt-get install docker.io; elsewhere add the docker-buildx plug-in)"


def client() -> str:
    """Returns the first docker client on PATH that builds with BuildKit. Raises CommandMissing with what each lacks."""
    return _find_client(os.environ.get("PATH", os.defpath))


def require_engine() -> str:
    """Returns the docker client's path after its engine has answered (in 30 s). Raises CommandMissing, or BadInput."""
    docker = client()
    try:
        answer = shell.run([docker, "version", "--format", "{{.Server.Version}}"], timeout=SECONDS)
    except CommandTimeout:
        raise BadInput(
            f"the container engine at {_address(docker)} did not answer within {SECONDS:.0f} s: restart it"
        ) from None
    if answer.ok and answer.stdout.strip():
        return docker
    lines = answer.stderr.strip().splitlines()
    if "permission denied" in answer.stderr.lower():
        advice = "your user may not use it: add it to the group docker (and log in again), or run as root"
    else:
        how = "" if os.environ.get("DOCKER_HOST") else " (systemctl start docker, or dockerd as root)"
        advice = f"start it{how}, or set DOCKER_HOST to one that runs"
    raise BadInput(
        f"no container engine answers at {_address(docker)}: {advice}"
        + (f"\n  docker said: {lines[-1]}" if lines else "")
    )


def answers() -> bool:
    """Returns whether a docker client that builds with BuildKit is installed and its engine answers."""
    try:
        require_engine()
    except LaunchError:
        return False
    return True


@functools.cache
def _find_client(search_path: str) -> str:
    """Returns the path of the first docker client in the folders of a search path that builds with BuildKit, or raises
    CommandMissing, with what each lacks. Runs each; keeps the answer for this process."""
    rejected = []
    for candidate in _candidates(search_path):
        version = re.search(r"version v?(\d+)\.", _ask(candidate, "--version") or "")
        if version is None:
            rejected.append(f"{candidate} does not say its version")
        elif int(version[1]) < _FIRST_WITHOUT_BUILDKIT or _ask(candidate, "buildx", "version") is not None:
            return candidate
        else:
            rejected.append(f"{candidate} (version {version[1]}) has no buildx plug-in")
    if rejected:
        raise CommandMissing(
            f"no docker client that can build images with BuildKit: {'; '.join(rejected)}. "
            f"{_GET_ONE[0].upper()}{_GET_ONE[1:]}"
        )
    raise CommandMissing(f"docker was not found on PATH: {_GET_ONE}")


def _candidates(search_path: str) -> list[str]:
    """Returns every `docker` on the search path, in order; a client with two names (/bin is /usr/bin) counts once."""
    clients: dict[Path, str] = {}
    for folder in search_path.split(os.pathsep):
        if found := shutil.which("docker", path=folder or "."):
            clients.setdefault(Path(found).resolve(), found)
    return list(clients.values())


def _ask(*command: str) -> str | None:
    """Returns what a command prints, stripped; None if it fails, can't be run or takes longer than 30 s."""
    try:
        result = shell.run(command, timeout=SECONDS)
    except (CommandTimeout, OSError):
        return None
    return result.stdout.strip() if result.ok else None


def _address(docker: str) -> str:
    """Returns where the client looks for its engine (it is asked, unless DOCKER_HOST says so), for a message."""
    if host := os.environ.get("DOCKER_HOST"):
        return f"{host} (DOCKER_HOST)"
    found = _ask(docker, "context", "inspect", "--format", "{{.Endpoints.docker.Host}}")
    return found or "unix:///var/run/docker.sock"


def find_image_id(docker: str, image: str) -> str | None:
    """Returns the sha256:... of an image in the engine's store; None when the store lacks it, no engine runs, or it
    does not answer in 30 s."""
    return _ask(docker, "image", "inspect", "--format", "{{.Id}}", image)
