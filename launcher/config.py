"""The launcher's part of the one YAML file: where to run, in which image, how.

`load` returns frozen sections whose mistakes were all named with file:line before anything was created. The trainer's
part of the same file is validated by `training.config`, so that a wrong learning rate is found on the workstation too.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Literal

from pydantic import AfterValidator, Field, model_validator

from launcher.errors import BadInput
from training.accelerators import Accelerator, UnknownAccelerator, accelerator
from training.config import LAUNCHER_SECTIONS, TrainerConfig, from_document
from training.registry import BackendName
from training.yaml_file import ConfigError, Document, Section, refuse_unknown, validate
from training.yaml_file import load as load_document

TRAINER_SECTIONS = tuple(TrainerConfig.model_fields)

_NODE_NAME = re.compile(r"[a-z]([-a-z0-9]{0,48}[a-z0-9])?")
ZONE = r"^[a-z]+-[a-z]+[0-9]+-[a-z0-9]+$"
_LABEL = re.compile(r"[a-z0-9_-]{0,63}")
IMAGE_BY_DIGEST = r"^[^@\s]+@sha256:[0-9a-f]{64}$"

_SECRET_NAME = re.compile(r"(TOKEN|SECRET|PASSWORD|PASSWD|API_?KEY|CREDENTIALS?)$", re.IGNORECASE)
_VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_SECRET_KEY = re.compile(r"[a-z0-9]([-a-z0-9.]*[a-z0-9])?/[-._a-zA-Z0-9]+")


def _name(value: str) -> str:
    if not _NODE_NAME.fullmatch(value):
        raise ValueError(
            f"{value!r} must be a lower-case letter, then letters, digits or hyphens, 50 characters at most"
        )
    return value


def _known_accelerator(value: str) -> str:
    accelerator(value)  # UnknownAccelerator is a ValueError: pydantic reports it with its place
    return value


def _labels(value: dict[str, str]) -> dict[str, str]:
    for key, text in value.items():
        if not _LABEL.fullmatch(key) or not key or not _LABEL.fullmatch(text):
            raise ValueError(f"label {key}={text}: lower-case letters, digits, '_' and '-' only, 63 characters at most")
    return value


def _variable_names(value: list[str]) -> list[str]:
    for name in value:
        if not _VARIABLE.fullmatch(name):
            raise ValueError(f"{name!r} is not the name of an environment variable")
    return value


def _environment(value: dict[str, str]) -> dict[str, str]:
    for key, text in value.items():
        if not _VARIABLE.fullmatch(key):
            raise ValueError(f"{key!r} is not the name of an environment variable")
        if _SECRET_NAME.search(key):
            raise ValueError(
                f"{key} looks like a secret, and values here are visible in files and to `docker inspect`: name it in run.secrets instead"
            )
        if "\n" in text or "\0" in text:
            raise ValueError(f"the value of {key} may not contain a line break")
    return value


def _secrets(value: dict[str, str]) -> dict[str, str]:
    for key, source in value.items():
        if not _VARIABLE.fullmatch(key):
            raise ValueError(f"{key!r} is not the name of an environment variable")
        if not _SECRET_KEY.fullmatch(source):
            raise ValueError(
                f"{key}: {source!r} must be SECRET/KEY, the names of a Kubernetes Secret and of a key in it"
            )
    return value


Name = Annotated[str, AfterValidator(_name)]


class QueuedSection(Section):
    """`slice.queued`: ask through a queued resource, which waits for capacity, instead of creating the node at once."""

    valid_until_hours: float = Field(default=24, gt=0)  # not granted any more after so long


def _zone(value: str) -> str:
    if not re.fullmatch(ZONE, value):
        raise ValueError(f"{value!r} is not the name of a zone, like us-central2-b")
    return value


class SliceSection(Section):
    """`slice`: the TPU node to create."""

    name: Name
    accelerator_type: Annotated[str, AfterValidator(_known_accelerator)]
    runtime_version: str | None = None  # the generation's own when absent
    capacity: Literal["on-demand", "spot", "reserved"] = "on-demand"
    network: str | None = None
    subnetwork: str | None = None
    internal_ips: bool = False  # no external addresses; ssh goes to the internal ones
    service_account: str | None = None
    labels: Annotated[dict[str, str], AfterValidator(_labels)] = {}
    create_minutes: float = Field(default=30, gt=0)  # how long `up` waits for READY
    zones: list[
        Annotated[str, AfterValidator(_zone)]
    ] = []  # tried after `zone`, in this order, when there is no capacity
    stockout_minutes: float = Field(default=0, ge=0)  # without capacity anywhere, go on trying for so long
    queued: QueuedSection | None = None
    iap: bool = False  # ssh goes through Identity-Aware Proxy: no external addresses, no open port
    abandoned_hours: float | None = Field(default=None, gt=0)  # after so long without a run, the slice deletes itself
    expires_hours: float | None = Field(default=None, gt=0)  # after so long `tpu-launch gc` removes it
    max_cost_per_hour: float | None = Field(
        default=None, gt=0
    )  # dollars; what costs more, or an unknown price, is not created


class ImageSection(Section):
    """`image`: what runs on every host."""

    reference: Annotated[str, Field(pattern=IMAGE_BY_DIGEST)] | None = (
        None  # REPOSITORY@sha256:...: this one, and nothing is built
    )

    backend: BackendName | None = None  # whose image; the trainer's `backend` when absent
    repository: str | None = (
        None  # REGION-docker.pkg.dev/PROJECT/REPOSITORY/NAME; absent: the hosts must have the image
    )
    create_repository: bool = False  # make it (private) when a push finds that it is not there
    code: str | None = None  # a folder of your own: it comes to our image's working directory
    dockerfile: str | None = None  # your own Dockerfile instead of ours
    context: str | None = None  # its build context; the Dockerfile's folder when absent
    target: str | None = None
    build_args: dict[str, str] = {}
    ca_bundle: str | None = None  # given to the build as a secret: for networks behind a TLS proxy

    @model_validator(mode="after")
    def _one_way(self) -> ImageSection:
        if self.code and (self.dockerfile or self.reference):
            raise ValueError(
                "code comes into our image: copy it in your own Dockerfile, or leave out image.dockerfile and image.reference"
            )
        return self


class RunSection(Section):
    """`run`: one training job on the slice."""

    name: Name | None = None  # prefix of run ids; the slice's name when absent
    command: list[str] | None = None  # instead of the trainer
    environment: Annotated[dict[str, str], AfterValidator(_environment)] = {}
    secrets: Annotated[
        list[str], AfterValidator(_variable_names)
    ] = []  # variables of your environment that only the command may see
    shm_size: Annotated[str, Field(pattern=r"^[0-9]+[kmg]$")] = "16g"
    user: str | None = None  # inside the container; the image's own when absent
    stop_seconds: int = Field(default=30, ge=1, le=600)  # between SIGTERM and SIGKILL
    host_lost_seconds: float = Field(default=120, gt=0)  # a host unreachable for so long, while others answer, is lost
    start_minutes: float = Field(default=15, gt=0)  # pulling the image and starting, all hosts
    stall_minutes: float | None = Field(
        default=None, gt=0
    )  # no line from any host for so long: save stacks, end the attempt
    transport: Literal["auto", "gcloud"] = (
        "auto"  # how hosts are watched: open ssh connections, and gcloud where those fail; or gcloud alone
    )
    preemption_retries: int = Field(
        default=0, ge=0
    )  # attempts started again after a preemption or a lost host, in the whole run
    failure_retries: int = Field(default=0, ge=0)  # attempts started again after the command failed
    replace_after: int | None = Field(
        default=None, ge=1
    )  # attempts in a row with one host as first cause: then the slice is made anew


class GcsFuseSection(Section):
    """`gke.gcsfuse`: a bucket as a folder of the container, through GKE's Cloud Storage FUSE driver."""

    bucket: Annotated[str, Field(min_length=3)]
    folder: Annotated[str, Field(pattern=r"^/[^:]+$")]  # where it is mounted
    read_only: bool = False
    options: str = "implicit-dirs"  # the driver's mountOptions


class GkeSection(Section):
    """`gke`: the cluster, for `tpu-launch manifest` and `--provider gke`. What belongs to the slice is in `slice`."""

    context: str | None = None  # of kubectl's configuration; kubectl's current one when absent
    namespace: Annotated[str, Field(pattern=r"^[a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?$")] = "default"
    topology: str | None = None  # checked against the accelerator type
    hosts: int | None = None  # the same
    queue: Annotated[str, Field(min_length=1)] | None = None  # Kueue's LocalQueue
    service_account: Annotated[str, Field(min_length=1)] | None = (
        None  # Kubernetes', bound to Google's by Workload Identity
    )
    secrets: Annotated[
        dict[str, str], AfterValidator(_secrets)
    ] = {}  # variable: "secret/key", of the namespace's Secrets
    gcsfuse: GcsFuseSection | None = None
    node_selector: dict[str, str] = {}  # more labels that the nodes must have: a node pool, a reservation
    cpu: str | None = None  # requested for each host's container, "100"
    memory: str | None = None  # "300Gi"
    restarts: int = Field(default=10, ge=0)  # by the cluster, of a manifest that is applied with kubectl
    privileged: bool = False  # GKE before 1.28 needs it


class _Root(Section):
    project: Annotated[str, Field(min_length=1)]
    zone: Annotated[str, AfterValidator(_zone)]
    slice: SliceSection
    image: ImageSection = ImageSection()
    run: RunSection = RunSection()
    gke: GkeSection = GkeSection()


@dataclass(frozen=True)
class Config:
    """Everything one file says. `trainer` is None when the run has a command of its own, or the file no trainer
    sections."""

    document: Document
    project: str
    zone: str
    slice: SliceSection
    image: ImageSection
    run: RunSection
    trainer: TrainerConfig | None
    gke: GkeSection = field(default_factory=GkeSection)
    overlay: str | None = None  # FOLDER=TARGET, the command line's choice
    provider: str = "tpu-vm"  # or "gke": the command line's choice, not the file's

    @property
    def accelerator(self) -> Accelerator:
        return accelerator(self.slice.accelerator_type)

    @property
    def backend(self) -> str:
        """Whose image is built: `image.backend`, or the trainer's `backend`."""
        return self.image.backend or (
            self.trainer.backend if self.trainer else str(self.document.value.get("backend", "torch-xla"))
        )

    @property
    def zones(self) -> list[str]:
        """The zones in which the slice may be, in the order in which they are tried."""
        return list(dict.fromkeys([self.zone, *self.slice.zones]))

    @property
    def runtime_version(self) -> str:
        return self.slice.runtime_version or self.accelerator.generation.runtime_version

    @property
    def run_name(self) -> str:
        return self.run.name or self.slice.name

    @property
    def folder(self) -> Path:
        """What relative paths in the file are relative to."""
        return Path(self.document.name).absolute().parent

    def require_something_to_run(self) -> None:
        """Raises BadInput for a file that describes a slice only."""
        if self.trainer is None and not self.run.command:
            raise BadInput(
                f"{self.document.name}: says nothing to run: give run.command, a command after `--`, or the trainer's sections (model, data, train, output)"
            )


def load(path: str | Path, overrides: Iterable[str] = (), *, command: Iterable[str] = ()) -> Config:
    """Reads and checks a run's file. `command` replaces the trainer. Raises BadInput naming file:line of every
    mistake."""
    try:
        return _from_document(load_document(path, overrides), tuple(command))
    except (ConfigError, UnknownAccelerator) as error:
        raise BadInput(str(error)) from None


def _from_document(document: Document, command: tuple[str, ...]) -> Config:
    refuse_unknown(document, (*LAUNCHER_SECTIONS, *TRAINER_SECTIONS))
    mine = Document(document.name, {k: v for k, v in document.value.items() if k in LAUNCHER_SECTIONS}, document.places)
    root = validate(_Root, mine)
    has_trainer = any(key in document.value for key in TRAINER_SECTIONS)
    run = root.run.model_copy(update={"command": list(command)}) if command else root.run
    trainer = from_document(document) if has_trainer and not run.command else None
    if trainer and root.image.backend not in (None, trainer.backend):
        raise ConfigError(
            f"{document.place(('image', 'backend'))}: image.backend: this image is of {root.image.backend}, and `backend` is {trainer.backend}: "
            "remove image.backend"
        )
    return Config(document, root.project, root.zone, root.slice, root.image, run, trainer, root.gke)
