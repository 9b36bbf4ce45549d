"""The specification of a run, from which every attempt is made.

`.tpu-launch/runs/<run id>/specification.yaml` (0600) holds the resolved configuration (the file with everything that
the command line changed), the command, the image, the names of secrets, and the overlay's hash. `tpu-launch run` writes
it when it creates a run, adds the image once it is known, and rewrites it when it resumes the run. Everything that
watches a run (`run --attach`, recovery, `stop`) only reads it. It holds no value of a secret.

`overlay-<sha256>.tar.gz` beside it holds the overlay's files.

Partial failures: each file is written under a temporary name and renamed, the archive before the specification that
names it.
"""

import hashlib
import io
import json
import os
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from dotenv.parser import parse_stream

from launcher.config import CONFIG_FILE, TRAINER_SECTIONS, Config, restore
from launcher.errors import BadInput
from launcher.home import write_private
from launcher.provider import Attempt, Overlay
from training.preflight.checked_programs import CHECKED_PROGRAMS_VARIABLE
from training.yaml_file import ConfigError, Document, Section, load, refuse_unknown, validate

FILE = "specification.yaml"
_VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")


class OverlaySection(Section):
    """Files that are laid over the image's own."""

    digest: str  # SHA-256 of the archive, in hexadecimal; part of its file's name
    target: str  # the folder of the container over which the files are laid


class Specification(Section):
    """The content of specification.yaml."""

    format: Literal[1] = 1
    run: str  # the run's id
    provider: str  # name of the provider
    file: str  # absolute path of the configuration's YAML file, to whose folder its relative paths refer
    configuration: dict[str, Any]  # the resolved document: the file, and every `--set`
    command: list[str] | None = None  # the command that runs in the containers; None for the trainer
    image: str | None = None  # that hosts run: REPOSITORY@sha256:... or an image id; None until the first attempt
    secrets: list[str] = []
    """Names of environment variables whose values only the command may see: `run.secrets`, and those of `env_file`."""

    env_file: str | None = None  # absolute path of the `--env-file`, where later attempts look for values first
    overlay: OverlaySection | None = None
    preflight: list[str] = []  # hashes of the programs that preflight compiled for this configuration
    left_out: list[str] = []  # accelerator types of slice.candidates on which the step does not fit, by preflight

    def config(self) -> Config:
        """Returns the configuration of every attempt. Raises BadInput when this version can't read it."""
        config = restore(self.configuration, name=self.file, command=self.command, provider=self.provider)
        return replace(config, left_out=tuple(self.left_out))


def describe(
    config: Config,
    run_id: str,
    *,
    env_file: Path | None = None,
    variables: Iterable[str] = (),
    overlay: Overlay | None = None,
    preflight: Sequence[str] = (),
) -> Specification:
    """Returns a run's specification, without its image; reads no file. `run_id`: "" before the run has one.
    `variables`: names of the variables in `env_file`. `preflight`: hashes of the programs that preflight compiled."""
    names = [*config.run.secrets, *variables]
    return Specification(
        run=run_id,
        provider=config.provider,
        file=str(Path(config.document.name).absolute()),
        configuration=dict(config.document.value),
        command=config.run.command,
        secrets=list(dict.fromkeys(names)),
        env_file=str(env_file.absolute()) if env_file is not None else None,
        overlay=OverlaySection(digest=overlay.digest, target=overlay.target) if overlay else None,
        preflight=list(preflight),
        left_out=list(config.left_out),
    )


def resume(before: Specification, requested: Specification) -> Specification:
    """Returns the specification of a run that `tpu-launch run` resumes: `requested`, with the id of `before`, its
    secrets besides those of `requested`, and its env file and overlay where `requested` has none."""
    return requested.model_copy(
        update={
            "run": before.run,
            "secrets": list(dict.fromkeys([*requested.secrets, *before.secrets])),
            "env_file": requested.env_file or before.env_file,
            "overlay": requested.overlay or before.overlay,
        }
    )


def make_attempt(
    spec: Specification,
    config: Config,
    number: int,
    image: str,
    *,
    secrets: Mapping[str, str] | None = None,
    overlay: Overlay | None = None,
) -> Attempt:
    """Returns the attempt that every host is given; `image`, not spec.image, counts. `config` is `spec.config()`."""
    checked = {CHECKED_PROGRAMS_VARIABLE: ",".join(spec.preflight)} if spec.preflight else {}
    return Attempt(
        run_id=spec.run,
        number=number,
        image=image,
        command=config.command,
        environment={**config.run.environment, **checked},
        files={CONFIG_FILE: config.document.dump().encode()},
        shm_size=config.run.shm_size,
        compile_cache_gb=config.run.compile_cache_gb,
        stop_seconds=config.run.stop_seconds,
        user=config.run.user,
        secrets=secrets or {},
        overlay=overlay,
        start_seconds=config.run.start_minutes * 60,
    )


def hash_configuration(config: Config) -> str:
    """Returns the configuration hash: of the command and the trainer's sections, without the backend and train.mesh. It
    is equal for all starts of one run, on any slice."""
    sections = config.document.value
    trainer = {key: sections[key] for key in TRAINER_SECTIONS if key in sections and key != "backend"}
    if "train" in trainer:
        trainer["train"] = {key: value for key, value in trainer["train"].items() if key != "mesh"}
    document = json.dumps(trainer, sort_keys=True, default=str)
    return hashlib.sha256(json.dumps([document, config.run.command or []]).encode()).hexdigest()[:16]


def write(folder: Path, specification: Specification) -> None:
    """Writes the specification into a run's folder, atomically."""
    write_private(folder / FILE, Document(FILE, specification.model_dump(), {}).dump())


def read(folder: Path) -> Specification:
    """Returns the specification of a run's folder. Raises BadInput if it is missing or damaged."""
    path = folder / FILE
    try:
        document = load(path)
        refuse_unknown(document, Specification.model_fields)
        return validate(Specification, document)
    except ConfigError as error:
        raise BadInput(
            f"{path} can't be used: {error}\n  it was damaged, or written by another version of tpu-launch"
        ) from None


def write_overlay(folder: Path, overlay: Overlay) -> None:
    """Writes the overlay's archive into a run's folder, for later attempts, unless it is there."""
    path = _overlay_path(folder, overlay.digest)
    if not path.exists():
        write_private(path, overlay.archive)


def read_overlay(folder: Path, specification: Specification) -> Overlay | None:
    """Returns the run's overlay; None without one. Raises BadInput when its archive is missing or was changed."""
    section = specification.overlay
    if section is None:
        return None
    path = _overlay_path(folder, section.digest)
    try:
        overlay = Overlay(section.target, path.read_bytes())
    except OSError as error:
        raise BadInput(f"{path}: the run's overlay can't be read: {error.strerror}") from None
    if overlay.digest != section.digest:
        raise BadInput(f"{path}: the run's overlay was changed: its SHA-256 is {overlay.digest}")
    return overlay


def _overlay_path(folder: Path, digest: str) -> Path:
    return folder / f"overlay-{digest}.tar.gz"


@dataclass(frozen=True)
class SecretSource:
    """Where this process finds values of secrets, which it holds in memory only."""

    environment: Mapping[str, str]  # this process's environment
    given: Mapping[str, str]  # values of an `--env-file` on this command line, which win

    def values(self, specification: Specification) -> dict[str, str]:
        """Returns the known values of a run's secrets, by name: from `given`, else (only if `given` is empty) from the
        run's env file, else from the environment. Raises BadInput if that file is there and can't be read."""
        recorded: dict[str, str] = {}
        if specification.env_file is not None and not self.given and os.path.exists(specification.env_file):
            recorded = read_env_file(Path(specification.env_file))
        known = {**self.environment, **recorded, **self.given}
        return {name: known[name] for name in specification.secrets if name in known}


def read_env_file(path: Path) -> dict[str, str]:
    """Returns the variables of `run --env-file`, by name. python-dotenv parses the lines; nothing is expanded, and this
    process's environment stays as it is. Raises BadInput, with file:line and no value, for a file that can't be read
    or a line that is not NAME=VALUE."""
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise BadInput(f"--env-file {path}: can't be read: {error}") from None
    values = {}
    for binding in parse_stream(io.StringIO(text)):
        if binding.key is None and not binding.error:
            continue  # a comment, or nothing
        if binding.key is None or binding.value is None or not _VARIABLE.fullmatch(binding.key):
            text_before = binding.original.string[: -len(binding.original.string.lstrip())]
            raise BadInput(f"{path}:{binding.original.line + text_before.count(chr(10))}: must be NAME=VALUE")
        if "\0" in binding.value:
            raise BadInput(f"{path}: the value of {binding.key} holds a NUL byte, which no variable can")
        values[binding.key] = binding.value
    return values
