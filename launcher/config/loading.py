"""Loads a run's file into frozen sections, and restores them from the document in a run's folder."""

from __future__ import annotations

import contextlib
import itertools
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from launcher.config.sections import GkeSection, ImageSection, Root, RunSection, SliceSection
from launcher.errors import BadInput
from training.accelerators import Accelerator, Api, UnknownAccelerator, accelerator
from training.config import IGNORED_SECTIONS as LAUNCHER_SECTIONS
from training.config import TrainerConfig, batch_mistake, from_document
from training.distributed import torch_tpu
from training.yaml_file import ConfigError, Document, refuse_unknown, validate
from training.yaml_file import load as load_document

TRAINER_SECTIONS = tuple(TrainerConfig.model_fields)

CONFIG_FILE = "config.yaml"  # below /etc/tpu-launch in every container
TRAINER_COMMAND = ("tpu-train", "train", f"/etc/tpu-launch/{CONFIG_FILE}")

_SECRET_NAME = re.compile(
    r"(TOKEN|CREDENTIALS?|API_?KEY|PASSPHRASE|PWD)$"
    r"|PASSWORD|PASSWD|(^|_)SECRETS?(_|$)"
    r"|(^|_)(ACCESS|ACCOUNT|AUTH|DEPLOY|ENCRYPTION|MASTER|PRIVATE|SERVICE|SIGNING|SSH|STORAGE)_([A-Z0-9]+_)*KEY"
    r"(_(BASE64|B64|JSON|PEM))?$",
    re.IGNORECASE,
)
_NO_SECRET = re.compile(r"_(ID|NAME|FILE|PATH|DIR)$|^(OLD)?PWD$", re.IGNORECASE)
_CREDENTIALS_IN_VALUE = re.compile(r"://[^/\s:@]+:[^/\s@]+@|://[^/\s:@]{20,}@|PRIVATE KEY-----")

# Key -> why a secret does not belong there, and what to do instead.
_VISIBLE = {
    "run.environment": "values here are visible in files and to `docker inspect`: name it in run.secrets instead",
    "image.build_args": (
        "build arguments stay visible in the image, in its log and in `tpu-launch plan`: build the image with a build "
        "secret yourself, and name it in image.reference"
    ),
}


@dataclass(frozen=True)
class Candidate:
    """A slice that would do."""

    accelerator_type: str
    zone: str
    capacity: str

    def __str__(self) -> str:
        return f"{self.accelerator_type} ({self.capacity}) in {self.zone}"


@dataclass(frozen=True)
class Config:
    """The content of a run's file, with the choices of one command line."""

    document: Document  # the file's content with every `--set`; hosts get it
    project: str
    zone: str
    slice: SliceSection
    image: ImageSection
    run: RunSection
    trainer: TrainerConfig | None  # None when the run has a command of its own, or the file has no trainer sections
    gke: GkeSection = field(default_factory=GkeSection)
    provider: str = "tpu-vm"  # the command line chooses it
    any_owner: bool = False  # whether this command may use and delete a slice of another owner: --any-owner
    left_out: tuple[str, ...] = ()  # types of `slice.candidates` on which the step does not fit, as preflight found
    node_name: str = ""  # of the candidate's node, when it is not slice.name

    @property
    def accelerator(self) -> Accelerator:
        return accelerator(self.slice.accelerator_type)

    @property
    def backend(self) -> str:
        """Returns the backend whose image is built: `image.backend`, or the file's `backend`, or torch-xla."""
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
    def node(self) -> str:
        """Returns the node's ID in Google's API, without project and zone: slice.name, unless `placed` gave another."""
        return self.node_name or self.slice.name

    @property
    def candidates(self) -> list[Candidate]:
        """Returns `all_candidates` without the types that are left out."""
        return [candidate for candidate in self.all_candidates if candidate.accelerator_type not in self.left_out]

    @property
    def all_candidates(self) -> list[Candidate]:
        """Returns all slices that would do, each once: the slice itself in its zones, then `slice.candidates`, in all
        zones that have the type unless they name zones."""
        slice_ = self.slice
        found = [Candidate(slice_.accelerator_type, zone, slice_.capacity) for zone in self.zones]
        for entry in slice_.candidates:
            for name in _as_list(entry.accelerator_type or slice_.accelerator_type):
                zones = entry.zones or accelerator(name).zones(Api.CLOUD_TPU)
                capacities = _as_list(entry.capacity or slice_.capacity)
                found += [Candidate(name, zone, capacity) for capacity in capacities for zone in zones]
        return list(dict.fromkeys(found))

    def placed(self, candidate: Candidate, node: str = "") -> Config:
        """Returns the configuration of this candidate only, without slice.runtime_version if the generation is another
        one. Its node is `node`, else that of a placed configuration, slice.name, or slice.name-N if it is the N-th
        candidate of its zone in the file (N > 1)."""
        beside = [other for other in self.all_candidates if other.zone == candidate.zone]
        kind, capacity = candidate.accelerator_type, candidate.capacity
        update: dict[str, Any] = {"accelerator_type": kind, "capacity": capacity, "zones": [], "candidates": []}
        if accelerator(kind).generation is not self.accelerator.generation:
            update["runtime_version"] = None
        if not node and (number := beside.index(candidate) + 1) > 1:
            node = f"{self.slice.name}-{number}"
        slice_ = self.slice.model_copy(update=update)
        return replace(self, zone=candidate.zone, node_name=node or self.node_name, left_out=(), slice=slice_)

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
    """Reads and checks a run's YAML file, with changes of keys (KEY=VALUE, where the value is YAML). A command replaces
    the trainer and `run.command`. Raises BadInput with file:line of the mistakes found first: unknown sections, else
    the launcher's, else the trainer's, else the first one that concerns several keys."""
    with _mistakes_as_bad_input():
        return _from_document(load_document(path, overrides), tuple(command))


def restore(value: Mapping[str, Any], *, name: str, command: Iterable[str] | None, provider: str) -> Config:
    """Returns the configuration of a document that `load` read before: its value and its file's path, with a command
    in place of its own, if given. Raises BadInput if this version refuses it."""
    with _mistakes_as_bad_input():
        return replace(_from_document(Document(name, dict(value), {}), tuple(command or ())), provider=provider)


@contextlib.contextmanager
def _mistakes_as_bad_input() -> Iterator[None]:
    """Turns ConfigError and UnknownAccelerator of the block into BadInput with the same message."""
    try:
        yield
    except (ConfigError, UnknownAccelerator) as error:
        raise BadInput(str(error)) from None


def _from_document(document: Document, command: tuple[str, ...]) -> Config:
    """Validates a document and returns its configuration; the trainer's sections only if no command replaces the
    trainer (`command`, else `run.command`). Raises ConfigError for wrong, unknown and refused values."""
    refuse_unknown(document, (*LAUNCHER_SECTIONS, *TRAINER_SECTIONS))
    launcher_sections = {key: value for key, value in document.value.items() if key in LAUNCHER_SECTIONS}
    root = validate(Root, Document(document.name, launcher_sections, document.places))
    has_trainer = any(key in document.value for key in TRAINER_SECTIONS)
    run = root.run.model_copy(update={"command": list(command)}) if command else root.run
    trainer = from_document(document) if has_trainer and not run.command else None
    config = Config(document, root.project, root.zone, root.slice, root.image, run, trainer, root.gke)
    _check_secrets(config)
    for key, text in itertools.chain(_slice_mistakes(config), _backend_mistakes(config)):
        raise ConfigError(f"{document.locate(key)}: {text}")
    return config


def _slice_mistakes(config: Config) -> Iterator[tuple[str, str]]:
    """Yields key and message for capacities without their keys, and for candidates' types that Cloud TPU or the batch
    excludes."""
    for candidate in config.all_candidates:
        capacity = candidate.capacity
        needed = {"flex-start": ["queued", "max_run_hours"], "calendar": ["queued", "reservation"]}.get(capacity, [])
        if capacity == "reserved" and config.slice.reservation is not None:
            needed = ["queued"]
        if lacking := [f"slice.{key}" for key in needed if getattr(config.slice, key) is None]:
            yield "slice.capacity", f"{capacity} needs {' and '.join(lacking)}"
    for name in dict.fromkeys(item.accelerator_type for item in config.candidates) if config.slice.candidates else ():
        size = accelerator(name)
        if not size.zones(Api.CLOUD_TPU):
            yield "slice.candidates", f"the Cloud TPU API has no {name}"
        elif config.trainer and (mistake := batch_mistake(config.trainer, size.hosts, size.devices)):
            yield "slice.candidates", f"{name}: {mistake}"


def _backend_mistakes(config: Config) -> Iterator[tuple[str, str]]:
    """Yields key and message for an image of another backend than the trainer's, and, if the backend or `--runtime` is
    torch-tpu, for possible slices and an image that can't run it."""
    trainer, image, runtime = config.trainer, config.image, torch_tpu.RUNTIME
    if trainer and image.backend not in (None, trainer.backend):
        mistake = f"this image is of {image.backend}, and `backend` is {trainer.backend}: remove image.backend"
        yield "image.backend", mistake
    words = [word for argument in config.run.command or () for word in argument.split("=")]
    wanted = ("--runtime", runtime) in itertools.pairwise(words)
    for candidate in config.all_candidates if wanted or config.backend == runtime else ():
        if reason := torch_tpu.find_unsupported(accelerator(candidate.accelerator_type)):
            yield "slice.accelerator_type", reason
    if wanted and config.backend != runtime and not (image.dockerfile or image.reference or image.base):
        yield "run.command", f"--runtime {runtime} needs image.backend: {runtime}"


def _as_list(value: str | Sequence[str]) -> list[str]:
    return [value] if isinstance(value, str) else list(value)


def _check_secrets(config: Config) -> None:
    """Raises ConfigError for the first secret in run.environment or image.build_args. The message lacks its value."""
    values = {"run.environment": config.run.environment, "image.build_args": config.image.build_args}
    for key, reason in _VISIBLE.items():
        for name, value in values[key].items():
            if _is_secret(name, value):
                place = config.document.place((*key.split("."), name))
                raise ConfigError(f"{place}: {key}: {name} looks like a secret, and {reason}")


def _is_secret(name: str, value: str) -> bool:
    """Returns whether a value holds a password, a token in a URL or a private key, or its variable is named like a
    secret; not for names of files and ids, nor for CREDENTIALS that hold a path."""
    if _CREDENTIALS_IN_VALUE.search(value):
        return True
    if name.upper().endswith("CREDENTIALS") and re.fullmatch(r"/[\w./-]+\.\w+", value):
        return False  # the path of a credentials file
    return _SECRET_NAME.search(name) is not None and not _NO_SECRET.search(name)
