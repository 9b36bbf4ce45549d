"""Loads a run's file into frozen sections, and restores them from the document in a run's folder."""

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
from training.config import IGNORED_SECTIONS as LAUNCHER_SECTIONS
from training.config import TrainerConfig, from_document
from training.yaml_file import ConfigError, Document, refuse_unknown, validate
from training.yaml_file import load as load_document

TRAINER_SECTIONS = tuple(TrainerConfig.model_fields)

CONFIG_FILE = "config.yaml"  # below /etc/tpu-launch in every container
TRAINER_COMMAND = ("tpu-train", "train", f"/etc/tpu-launch/{CONFIG_FILE}")


@dataclass(frozen=True)
class Config:
    """The content of a run's file, with the choices of one command line."""

    document: Document
    """The file's content with every `--set`; hosts get it."""

    project: str
    zone: str
    slice: SliceSection
    image: ImageSection
    run: RunSection

    trainer: TrainerConfig | None
    """None when the run has a command of its own, or the file has no trainer sections."""

    gke: GkeSection = field(default_factory=GkeSection)

    provider: str = "tpu-vm"
    """Name of the provider; the command line chooses it."""

    any_owner: bool = False
    """Whether this command may use and delete a slice of another owner; the command line chooses it."""

    @property
    def accelerator(self) -> Accelerator:
        return accelerator(self.slice.accelerator_type)

    @property
    def backend(self) -> str:
        """Returns the backend whose image is built: `image.backend`, or the trainer's `backend`."""
        return self.image.backend or (
            self.trainer.backend if self.trainer else str(self.document.value.get("backend", "torch-xla"))
        )

    @property
    def command(self) -> tuple[str, ...]:
        """Returns the command in the container of every host: the run's own, or the trainer."""
        return tuple(self.run.command or TRAINER_COMMAND)

    @property
    def zones(self) -> list[str]:
        """Returns the zones in which the slice may be, in the order in which they are tried."""
        return list(dict.fromkeys([self.zone, *self.slice.zones]))

    @property
    def runtime_version(self) -> str:
        """Returns `slice.runtime_version`, or the one recommended for the accelerator's generation."""
        return self.slice.runtime_version or self.accelerator.generation.runtime_version

    @property
    def run_name(self) -> str:
        """Returns the prefix of run ids: `run.name`, else the slice's name."""
        return self.run.name or self.slice.name

    @property
    def folder(self) -> Path:
        """Returns the file's folder, the base of relative paths in the file."""
        return Path(self.document.name).absolute().parent

    def require_something_to_run(self) -> None:
        """Raises BadInput when the file only describes a slice: no trainer's sections and no command."""
        if self.trainer is None and not self.run.command:
            raise BadInput(
                f"{self.document.name}: nothing to run: give run.command, a command after `--`, "
                "or the trainer's sections (model, data, train, output)"
            )


def load(path: str | Path, overrides: Iterable[str] = (), *, command: Iterable[str] = ()) -> Config:
    """Reads and checks a run's YAML file.

    Args:
        overrides: changes of keys, KEY=VALUE, where the value is YAML.
        command: replaces the trainer and `run.command`; () for none.

    Raises:
        BadInput: the file is wrong; the message names file:line of every mistake.
    """
    try:
        return _from_document(load_document(path, overrides), tuple(command))
    except (ConfigError, UnknownAccelerator) as error:
        raise BadInput(str(error)) from None


def restore(value: Mapping[str, Any], *, name: str, command: Iterable[str] | None, provider: str) -> Config:
    """Returns the configuration of a document that `load` read before. Raises BadInput if this version refuses it.

    Args:
        value: the document's value.
        name: path of the document's file.
        command: replaces the trainer and `run.command`; None: the document's own.
        provider: name of the provider.
    """
    try:
        config = _from_document(Document(name, dict(value), {}), tuple(command or ()))
    except (ConfigError, UnknownAccelerator) as error:
        raise BadInput(str(error)) from None
    return replace(config, provider=provider)


def _from_document(document: Document, command: tuple[str, ...]) -> Config:
    """Validates a document and returns its configuration; the trainer's sections only if no command replaces the
    trainer (`command`, else `run.command`). Raises ConfigError for wrong, unknown and refused values."""
    refuse_unknown(document, (*LAUNCHER_SECTIONS, *TRAINER_SECTIONS))
    launcher_sections = {key: value for key, value in document.value.items() if key in LAUNCHER_SECTIONS}
    root = validate(Root, Document(document.name, launcher_sections, document.places))
    has_trainer = any(key in document.value for key in TRAINER_SECTIONS)
    run = root.run.model_copy(update={"command": list(command)}) if command else root.run
    trainer = from_document(document) if has_trainer and not run.command else None
    if trainer and root.image.backend not in (None, trainer.backend):
        raise ConfigError(
            f"{document.place(('image', 'backend'))}: image.backend: this image is of {root.image.backend}, "
            f"and `backend` is {trainer.backend}: remove image.backend"
        )
    refused.refuse(document)
    return Config(document, root.project, root.zone, root.slice, root.image, run, trainer, root.gke)
