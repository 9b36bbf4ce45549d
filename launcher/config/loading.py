"""A run's file as frozen sections: read, checked, and restored from what a run's folder keeps."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from launcher.config import refused
from launcher.config.gke import GkeSection
from launcher.config.sections import ImageSection, Root, RunSection, SliceSection
from launcher.errors import BadInput
from training.accelerators import Accelerator, UnknownAccelerator, accelerator
from training.config import LAUNCHER_SECTIONS, TrainerConfig, from_document
from training.yaml_file import ConfigError, Document, refuse_unknown, validate
from training.yaml_file import load as load_document

TRAINER_SECTIONS = tuple(TrainerConfig.model_fields)

CONFIG_FILE = "config.yaml"  # below /etc/tpu-launch in every container
TRAINER_COMMAND = ("tpu-train", "train", f"/etc/tpu-launch/{CONFIG_FILE}")


@dataclass(frozen=True)
class Config:
    """Everything one file says."""

    document: Document
    """The file's content with every `--set`, as it is given to hosts."""

    project: str
    zone: str
    slice: SliceSection
    image: ImageSection
    run: RunSection

    trainer: TrainerConfig | None
    """None when the run has a command of its own, or the file no trainer sections."""

    gke: GkeSection = field(default_factory=GkeSection)

    provider: str = "tpu-vm"
    """Name of the provider: the command line's choice, not the file's."""

    any_owner: bool = False
    """Whether a slice that somebody else made may be used and deleted: the command line's choice, for one command."""

    @property
    def accelerator(self) -> Accelerator:
        """Size and generation of the slice."""
        return accelerator(self.slice.accelerator_type)

    @property
    def backend(self) -> str:
        """Whose image is built: `image.backend`, or the trainer's `backend`."""
        return self.image.backend or (
            self.trainer.backend if self.trainer else str(self.document.value.get("backend", "torch-xla"))
        )

    @property
    def command(self) -> tuple[str, ...]:
        """What runs in the container on every host: the run's own command, or the trainer."""
        return tuple(self.run.command or TRAINER_COMMAND)

    @property
    def zones(self) -> list[str]:
        """The zones in which the slice may be, in the order in which they are tried."""
        return list(dict.fromkeys([self.zone, *self.slice.zones]))

    @property
    def runtime_version(self) -> str:
        """Software version of the TPU VM."""
        return self.slice.runtime_version or self.accelerator.generation.runtime_version

    @property
    def run_name(self) -> str:
        """Prefix of run ids."""
        return self.run.name or self.slice.name

    @property
    def folder(self) -> Path:
        """What relative paths in the file are relative to."""
        return Path(self.document.name).absolute().parent

    def require_something_to_run(self) -> None:
        """Raises BadInput for a file that describes a slice only."""
        if self.trainer is None and not self.run.command:
            raise BadInput(
                f"{self.document.name}: says nothing to run: give run.command, a command after `--`, "
                "or the trainer's sections (model, data, train, output)"
            )


def load(path: str | Path, overrides: Iterable[str] = (), *, command: Iterable[str] = ()) -> Config:
    """Reads and checks a run's file.

    Args:
        path: The YAML file.
        overrides: Changes of keys, KEY=VALUE, where the value is YAML.
        command: Replaces the trainer and `run.command`.

    Raises:
        BadInput: The file is wrong; the message names file:line of every mistake.
    """
    try:
        document = load_document(path, overrides)
        config = _from_document(document, tuple(command))
        refused.refuse(document)
        return config
    except (ConfigError, UnknownAccelerator) as error:
        raise BadInput(str(error)) from None


def restore(value: Mapping[str, Any], *, name: str, command: Iterable[str] | None, provider: str) -> Config:
    """The configuration of a document that was loaded before and kept.

    Args:
        value: The document's value.
        name: Path of the file that it came from.
        command: Replaces the trainer and `run.command`; None for what the document says.
        provider: Name of the provider.

    Raises:
        BadInput: This version can't read it.
    """
    try:
        config = _from_document(Document(name, dict(value), {}), tuple(command or ()))
    except (ConfigError, UnknownAccelerator) as error:
        raise BadInput(str(error)) from None
    return replace(config, provider=provider)


def _from_document(document: Document, command: tuple[str, ...]) -> Config:
    refuse_unknown(document, (*LAUNCHER_SECTIONS, *TRAINER_SECTIONS))
    mine = Document(document.name, {k: v for k, v in document.value.items() if k in LAUNCHER_SECTIONS}, document.places)
    root = validate(Root, mine)
    has_trainer = any(key in document.value for key in TRAINER_SECTIONS)
    run = root.run.model_copy(update={"command": list(command)}) if command else root.run
    trainer = from_document(document) if has_trainer and not run.command else None
    if trainer and root.image.backend not in (None, trainer.backend):
        raise ConfigError(
            f"{document.place(('image', 'backend'))}: image.backend: this image is of {root.image.backend}, "
            f"and `backend` is {trainer.backend}: remove image.backend"
        )
    return Config(document, root.project, root.zone, root.slice, root.image, run, trainer, root.gke)
