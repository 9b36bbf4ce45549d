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
from launcher.images import engine
from launcher.images.build import ensure_image
from launcher.images.plan import list_commands
from launcher.images.specification import ImageSpec, default_spec, folder_spec

LABEL = "tpu-launch.local"

_DAYS = 7 * 24 * 3600.0  # preparing a large corpus takes as long as it takes; Ctrl-C ends it


def image_spec(config: Config) -> ImageSpec:
    """The image that the `image` section means. Raises BadInput for a Dockerfile or a CA bundle that does not exist."""
    section = config.image
    bundle = (config.folder / section.ca_bundle) if section.ca_bundle else None
    if section.dockerfile is None:
        spec = default_spec(
            config.backend,
            repository=section.repository,
            build_args=section.build_args,
            ca_bundle=bundle,
            target=section.target,
            code=config.folder / section.code if section.code else None,
        )
    else:
        dockerfile = config.folder / section.dockerfile
        context = config.folder / section.context if section.context else dockerfile.parent
        spec = folder_spec(
            f"tpu-launch/{config.run_name}",
            context,
            dockerfile=dockerfile,
            repository=section.repository,
            build_args=section.build_args,
            ca_bundle=bundle,
            target=section.target,
        )
    return replace(spec, create_repository=section.create_repository)


def build_commands(config: Config) -> list[list[str]]:
    """The docker commands that would build and push the image; none when the file names one. Touches nothing."""
    if config.image.reference:
        return []
    commands = list_commands(image_spec(config))
    return [["env", "DOCKER_BUILDKIT=1", *command] if "build" in command[:2] else command for command in commands]


def check(config: Config) -> None:
    """Raises BadInput when the image can't be built here: no engine answers, or its files are missing. An image that is
    only named is not checked."""
    if config.image.reference:
        return
    image_spec(config)
    engine.require_engine()


def image(config: Config, say: Callable[[str], None]) -> str:
    """Builds and pushes the image unless that was done before; returns the reference that hosts run."""
    if config.image.reference:
        return config.image.reference
    return ensure_image(image_spec(config), say).reference


def unpublished(config: Config, say: Callable[[str], None]) -> str:
    """The image for use on this machine only: built unless it was, and not pushed."""
    return config.image.reference or ensure_image(replace(image_spec(config), repository=None), say).reference


def run(
    config: Config,
    command: Sequence[str],
    say: Callable[[str], None],
    emit: Callable[[str], None] = print,
    *,
    reference: str | None = None,
    mounts: Mapping[Path, str] | None = None,
) -> int:
    """Runs a command in the image on this machine, in the current folder, as the current user; returns its exit code.

    Args:
        config: whose image it is.
        command: the command.
        say: is given lines about the image.
        emit: is given the command's output, line by line.
        reference: another image.
        mounts: more files for it to read, each at a path of the container.
    """
    docker = engine.require_engine()
    name = f"tpu-launch-local-{secrets.token_hex(4)}"
    variables = [name for name in config.run.secrets if name in os.environ]
    used = reference or image(config, say)
    argv = local_command(docker, name, used, command, Path.cwd(), Path.home(), variables, mounts or {})
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
    variables: Sequence[str] = (),
    mounts: Mapping[Path, str] = MappingProxyType({}),
) -> list[str]:
    """The `docker run` of `run`. The user's own Google credentials, where there are any, are mounted for reading;
    `variables` are those of this environment whose values the command gets, by name only."""
    argv = [docker, "run", "--rm", "--init", "--name", name, "--label", f"{LABEL}=1", "--network", "host"]
    argv += ["--user", f"{os.getuid()}:{os.getgid()}", "--env", "HOME=/tmp", "--env", "PJRT_DEVICE=CPU"]
    argv += ["--volume", f"{folder}:{folder}", "--workdir", str(folder)]
    credentials = user_home / ".config" / "gcloud" / "application_default_credentials.json"
    if credentials.exists():
        argv += ["--volume", f"{credentials}:/etc/google-credentials.json:ro"]
        argv += ["--env", "GOOGLE_APPLICATION_CREDENTIALS=/etc/google-credentials.json"]
    argv += [word for variable in variables for word in ("--env", variable)]
    for path, inside in mounts.items():
        argv += ["--volume", f"{path}:{inside}:ro"]
    return [*argv, reference, *command]
