"""The run's image on this machine: which image the file means, and running one command in it, on the CPU.

Used for preparing data (`tpu-launch local -- tpu-train shards ...`) and for trying things out with exactly what the
hosts will run.
"""

from __future__ import annotations

import os
import secrets
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType

from launcher import shell
from launcher.config import Config
from launcher.images import build as images
from launcher.images import engine

LABEL = "tpu-launch.local"

_DAYS = 7 * 24 * 3600.0  # preparing a large corpus takes as long as it takes; Ctrl-C ends it


def spec(config: Config) -> images.ImageSpec:
    """The image that the file's `image` section means. Raises BadInput for a Dockerfile or a CA bundle that isn't
    there."""
    wanted = config.image
    bundle = (config.folder / wanted.ca_bundle) if wanted.ca_bundle else None
    if wanted.dockerfile is None:
        found = images.default_spec(
            config.backend,
            repository=wanted.repository,
            build_args=wanted.build_args,
            ca_bundle=bundle,
            target=wanted.target,
            code=config.folder / wanted.code if wanted.code else None,
        )
    else:
        dockerfile = config.folder / wanted.dockerfile
        context = config.folder / wanted.context if wanted.context else dockerfile.parent
        found = images.folder_spec(
            f"tpu-launch/{config.run_name}",
            context,
            dockerfile=dockerfile,
            repository=wanted.repository,
            build_args=wanted.build_args,
            ca_bundle=bundle,
            target=wanted.target,
        )
    return replace(found, create_repository=wanted.create_repository)


def build_commands(config: Config) -> list[list[str]]:
    """The docker commands that would build and push the image; none when the file names one. Touches nothing."""
    if config.image.reference:
        return []
    commands = images.commands(spec(config))
    return [["env", "DOCKER_BUILDKIT=1", *command] if "build" in command[:2] else command for command in commands]


def check(config: Config) -> None:
    """The image could be built here: an engine answers, its files are there. Nothing is asked of one that is only
    named. Raises BadInput."""
    if config.image.reference:
        return
    spec(config)
    engine.require_engine()


def image(config: Config, say: Callable[[str], None]) -> str:
    """Builds and pushes the image unless that was done before; returns what hosts must be told to run."""
    if config.image.reference:
        return config.image.reference
    return images.ensure(spec(config), say).reference


def unpublished(config: Config, say: Callable[[str], None]) -> str:
    """The image for use here alone: built unless it was, and not pushed."""
    return config.image.reference or images.ensure(replace(spec(config), repository=None), say).reference


def run(
    config: Config,
    command: Sequence[str],
    say: Callable[[str], None],
    emit: Callable[[str], None] = print,
    *,
    reference: str | None = None,
    mounts: Mapping[Path, str] | None = None,
) -> int:
    """Runs `command` in the image (that of the file, or `reference`) here, in the current folder, as the current user;
    returns its exit code.

    `mounts`: more files for it to read, each at a path of the container."""
    docker = engine.require_engine()
    name = f"tpu-launch-local-{secrets.token_hex(4)}"
    given = [each for each in config.run.secrets if each in os.environ]
    argv = local_command(
        docker, name, reference or image(config, say), command, Path.cwd(), Path.home(), given, mounts or {}
    )
    try:
        code = shell.stream(argv, emit, timeout=_DAYS).returncode
    finally:
        # The client may have been killed while its container was not.
        shell.run([docker, "rm", "--force", name], timeout=60)
    return code


def local_command(
    docker: str,
    name: str,
    reference: str,
    command: Sequence[str],
    folder: Path,
    user_home: Path,
    given: Sequence[str] = (),
    mounts: Mapping[Path, str] = MappingProxyType({}),
) -> list[str]:
    """The `docker run` of `run`. The user's own Google credentials, where there are any, are mounted for reading;
    `given` are the variables of this environment whose values the command gets, named only."""
    argv = [docker, "run", "--rm", "--init", "--name", name, "--label", f"{LABEL}=1", "--network", "host"]
    argv += ["--user", f"{os.getuid()}:{os.getgid()}", "--env", "HOME=/tmp", "--env", "PJRT_DEVICE=CPU"]
    argv += ["--volume", f"{folder}:{folder}", "--workdir", str(folder)]
    credentials = user_home / ".config" / "gcloud" / "application_default_credentials.json"
    if credentials.exists():
        argv += ["--volume", f"{credentials}:/etc/google-credentials.json:ro"]
        argv += ["--env", "GOOGLE_APPLICATION_CREDENTIALS=/etc/google-credentials.json"]
    argv += [word for each in given for word in ("--env", each)]
    for path, inside in mounts.items():
        argv += ["--volume", f"{path}:{inside}:ro"]
    return [*argv, reference, *command]
