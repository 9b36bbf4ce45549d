"""The run's image, from this machine: finds or makes the image that the file names, with or without an engine, and runs
a command in it on the CPU (`tpu-launch local`).
"""

import os
import secrets
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from launcher import shell
from launcher.config import Config
from launcher.errors import BadInput
from launcher.images import appended, build_context, engine
from launcher.images.build import Image, ensure_image, find_pushed
from launcher.images.repositories import parse_reference
from launcher.images.specification import ImageSpec, default_spec, folder_spec, own_files, training_files

_DAYS = 7 * 24 * 3600.0  # preparing a large corpus takes as long as it takes; Ctrl-C ends it


def image_spec(config: Config) -> ImageSpec:
    """Returns what the image is made from by an engine (`image` section, without image.reference and image.base).
    Raises BadInput without its Dockerfile, its folder or its CA bundle, or for a folder `image.code` without files;
    LaunchError if this installation has no images."""
    section = config.image
    bundle = (config.folder / section.ca_bundle) if section.ca_bundle else None
    telemetry = config.document.value.get("telemetry")  # not of the trainer, whom a command replaces: one image a file
    has_trackers = isinstance(telemetry, dict) and telemetry.get("trackers")
    tracker_packages = {"EXTRA": "requirements-trackers.txt"} if has_trackers else {}
    folder, dockerfile = _own_folder(config)
    if folder is None or dockerfile is None:
        build_args = {**tracker_packages, **section.build_args}
        spec = default_spec(config.backend, build_args=build_args, ca_bundle=bundle, code=folder)
    else:
        name, build_args = f"tpu-launch/{config.run_name}", dict(section.build_args)
        spec = folder_spec(name, folder, dockerfile=dockerfile, build_args=build_args, ca_bundle=bundle)
    return replace(
        spec, repository=section.repository, target=section.target, create_repository=section.create_repository
    )


def _own_folder(config: Config) -> tuple[Path | None, Path | None]:
    """Returns the user's folder and Dockerfile: image.context (default: the Dockerfile's folder) and image.dockerfile;
    without a Dockerfile image.code, or None, and None. Does not look whether they exist."""
    section = config.image
    if section.dockerfile is None:
        return config.folder / section.code if section.code else None, None
    dockerfile = config.folder / section.dockerfile
    return config.folder / section.context if section.context else dockerfile.parent, dockerfile


def needs_engine(config: Config) -> bool:
    """Returns whether this machine's engine makes the image, and not the registry; has no meaning with image.reference.
    If both could (image.build auto), asks whether an engine answers."""
    section = config.image
    if section.base or section.build == "registry":
        return False
    possible = section.repository is not None and section.dockerfile is None and section.target is None
    return section.build == "engine" or not possible or engine.answers()


def append_spec(config: Config) -> appended.AppendSpec:
    """Returns what the image is made from in the registry; asks nothing. Raises BadInput for a missing key or file, or
    an image.base in another registry than image.repository."""
    section = config.image
    if section.repository is None:
        raise BadInput(
            f"{config.document.name}: image.repository is needed, because the image is made in a registry "
            "(image.build): REGION-docker.pkg.dev/PROJECT/REPOSITORY/NAME"
        )
    spec = image_spec(config)
    if section.base:
        reference, advice = parse_reference(section.base), "push it there, or correct image.base"
    else:
        reference = appended.base_reference(spec)
        advice = (
            f"make it once with `tpu-launch image base -f {config.document.name}` where a container engine runs; "
            "with --cloud-build it prints the commands that make it by Cloud Build"
        )
    host = parse_reference(section.repository).host
    if reference.host != host:
        raise BadInput(
            f"image.base {reference} is in another registry than image.repository {section.repository}: copy it to a "
            f"repository of {host} once"
        )
    return appended.AppendSpec(
        base=reference,
        advice=advice,
        repository=section.repository,
        training=training_files(),
        code=own_files(config.folder / section.code) if section.code else (),
        create_repository=section.create_repository,
        ca_bundle=spec.ca_bundle,
    )


def check(config: Config) -> None:
    """Raises BadInput when the image can't be made: no engine answers where one is needed, or image.repository or a
    file is missing. Asks no registry; checks nothing with image.reference."""
    if config.image.reference:
        return
    if not needs_engine(config):
        append_spec(config)
        return
    image_spec(config)
    engine.require_engine()


def image(config: Config, say: Callable[[str], None]) -> Image:
    """Returns the image of image.reference, unchecked, else the file's own, after making and pushing it unless it
    exists. Says which files it leaves out as credentials. Raises BadInput without an engine, a usable base or a file,
    LaunchError when a build, a push or the registry fails."""
    if config.image.reference:
        return Image(config.image.reference)
    folder, dockerfile = _own_folder(config)
    if folder is not None:
        build_context.report_credentials(folder, dockerfile, say)
    if not needs_engine(config):
        if config.image.build == "auto" and not config.image.base:
            say("no container engine answers here: making the image in the registry")
        return appended.ensure(append_spec(config), say)
    return ensure_image(image_spec(config), say)


def published(config: Config) -> str | None:
    """Returns image.reference, else the name by digest of the file's image if the registry has it or, for an engine's
    image, of its last push recorded here; None without these or image.repository. Sends nothing. Raises BadInput,
    LaunchError."""
    if config.image.reference or config.image.repository is None:
        return config.image.reference
    return find_pushed(image_spec(config)) if needs_engine(config) else appended.find(append_spec(config))


def unpublished(config: Config, say: Callable[[str], None]) -> str:
    """Returns the name of the image for use on this machine: image.reference, else the local image, which it builds if
    needed and does not push. With image.base, the image is made in the registry all the same. Raises as `image`."""
    if config.image.base:
        return image(config, say).reference
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
    """Runs a command in the image (`reference`, else as `image`, which may push it) on this machine's engine and CPU,
    with the current folder mounted to write, as the current user, with the user's Google credentials and the values of
    `run.secrets` that exist here, and `mounts` (files, and their paths in the container), read-only. `say` receives
    lines about the image, `emit` the command's. Returns its exit code. Raises as `image`."""
    docker = engine.require_engine()
    used = reference or image(config, say).reference
    name = f"tpu-launch-local-{secrets.token_hex(4)}"
    folder = Path.cwd()
    argv = [docker, "run", "--rm", "--init", "--entrypoint", "", "--name", name, "--network", "host"]
    argv += ["--user", f"{os.getuid()}:{os.getgid()}", "--env", "HOME=/tmp", "--env", "PJRT_DEVICE=CPU"]
    argv += ["--volume", f"{folder}:{folder}", "--workdir", str(folder)]
    gcloud = os.environ.get("CLOUDSDK_CONFIG") or Path.home() / ".config" / "gcloud"
    given = os.environ.get("GOOGLE_APPLICATION_CREDENTIALS")  # looked for as Google's libraries do
    if os.path.exists(credentials := Path(given or Path(gcloud) / "application_default_credentials.json")):
        argv += ["--volume", f"{credentials.absolute()}:/etc/google-credentials.json:ro"]
        argv += ["--env", "GOOGLE_APPLICATION_CREDENTIALS=/etc/google-credentials.json"]
    argv += [f"--env={variable}" for variable in config.run.secrets if variable in os.environ]
    argv += [f"--volume={path}:{inside}:ro" for path, inside in (mounts or {}).items()]
    try:
        return shell.stream([*argv, used, *command], emit, timeout=_DAYS).returncode
    finally:
        # The client may have been killed while its container was not.
        shell.run([docker, "rm", "--force", name], timeout=60)
