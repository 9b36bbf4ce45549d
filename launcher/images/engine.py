"""The workstation's container engine: which docker client to use, and whether the engine answers.

A machine may have several docker clients. Ours must build with BuildKit, whose secrets and cache mounts keep
credentials and caches out of image layers: clients before 23 have it built in, later ones need the buildx plug-in.
"""

from __future__ import annotations

import functools
import os
import re
from pathlib import Path

from launcher import shell
from launcher.errors import BadInput, CommandMissing, CommandTimeout, LaunchError

_SECONDS = 20.0  # for one question to the client or the engine
_FIRST_WITHOUT_BUILDKIT = 23  # from this version on the client leaves BuildKit to the buildx plug-in
_GET_ONE = "install one that can (Debian: apt-get install docker.io; elsewhere add the docker-buildx plug-in)"


def client() -> str:
    """The path of the first docker client on PATH that can build with BuildKit. CommandMissing says what is wrong with
    each."""
    return _client_on(os.environ.get("PATH", os.defpath))


def require_engine() -> str:
    """The docker client, once the engine that it talks to has answered. Raises BadInput with the engine's address and
    what to do."""
    docker = client()
    try:
        answer = shell.run([docker, "version", "--format", "{{.Server.Version}}"], timeout=_SECONDS)
    except CommandTimeout:
        raise BadInput(
            f"the container engine at {_address(docker)} did not answer within {_SECONDS:.0f} s: restart it"
        ) from None
    if answer.ok and answer.stdout.strip():
        return docker
    lines = answer.stderr.strip().splitlines()
    if "permission denied" in answer.stderr.lower():
        advice = "your user may not use it: add it to the group docker (and log in again), or run as root"
    elif os.environ.get("DOCKER_HOST"):
        advice = "start it, or set DOCKER_HOST to one that runs"
    else:
        advice = "start it (systemctl start docker, or dockerd as root), or set DOCKER_HOST to one that runs"
    raise BadInput(
        f"no container engine answers at {_address(docker)}: {advice}"
        + (f"\n  docker said: {lines[-1]}" if lines else "")
    )


def answers() -> bool:
    """Whether a container engine can be used here."""
    try:
        require_engine()
    except LaunchError:
        return False
    return True


@functools.cache
def _client_on(search_path: str) -> str:
    rejected = []
    for candidate in _candidates(search_path):
        version = _major_version(candidate)
        if version is None:
            rejected.append(f"{candidate} does not say its version")
        elif version < _FIRST_WITHOUT_BUILDKIT or _has_buildx(candidate):
            return candidate
        else:
            rejected.append(f"{candidate} (version {version}) has no buildx plug-in")
    if rejected:
        raise CommandMissing(
            f"no docker client that can build images with BuildKit: {'; '.join(rejected)}. "
            f"{_GET_ONE[0].upper()}{_GET_ONE[1:]}"
        )
    raise CommandMissing(f"docker was not found on PATH: {_GET_ONE}")


def _candidates(search_path: str) -> list[str]:
    """Every `docker` on the search path, in order; one that is reached by two names (/bin is /usr/bin) counts once."""
    clients: dict[Path, str] = {}
    for folder in search_path.split(os.pathsep):
        path = Path(folder or ".", "docker")
        if path.is_file() and os.access(path, os.X_OK):
            clients.setdefault(path.resolve(), str(path))
    return list(clients.values())


def _major_version(candidate: str) -> int | None:
    try:
        result = shell.run([candidate, "--version"], timeout=_SECONDS)
    except (CommandTimeout, OSError):
        return None
    match = re.search(r"version v?(\d+)\.", result.stdout)
    return int(match.group(1)) if result.ok and match else None


def _has_buildx(candidate: str) -> bool:
    try:
        return shell.run([candidate, "buildx", "version"], timeout=_SECONDS).ok
    except CommandTimeout:
        return False


def _address(docker: str) -> str:
    """Where the client looks for its engine."""
    host = os.environ.get("DOCKER_HOST")
    if host:
        return f"{host} (DOCKER_HOST)"
    result = shell.run([docker, "context", "inspect", "--format", "{{.Endpoints.docker.Host}}"], timeout=_SECONDS)
    return result.stdout.strip() if result.ok and result.stdout.strip() else "unix:///var/run/docker.sock"
