"""The launcher's part of the run's YAML file: where to run, in which image, how.

`load` returns frozen sections; every mistake is named with file:line before anything is created. The trainer's part of
the same file is validated by `training.config`, so that a wrong learning rate is found on the workstation too. The
docstrings of the fields are the reference of the keys (docs/).
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, ConfigDict, Field, model_validator

from launcher.errors import BadInput
from training.accelerators import Accelerator, UnknownAccelerator, accelerator
from training.config import LAUNCHER_SECTIONS, TrainerConfig, from_document
from training.registry import BackendName
from training.yaml_file import ConfigError, Document, Section, refuse_unknown, validate
from training.yaml_file import load as load_document

TRAINER_SECTIONS = tuple(TrainerConfig.model_fields)

CONFIG_FILE = "config.yaml"  # below /etc/tpu-launch in every container
TRAINER_COMMAND = ("tpu-train", "train", f"/etc/tpu-launch/{CONFIG_FILE}")

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
                f"{key} looks like a secret, and values here are visible in files and to `docker inspect`: "
                "name it in run.secrets instead"
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


def _zone(value: str) -> str:
    if not re.fullmatch(ZONE, value):
        raise ValueError(f"{value!r} is not the name of a zone, like us-central2-b")
    return value


Zone = Annotated[str, AfterValidator(_zone)]


class _Documented(Section):
    """A section whose fields are documented by the strings below them."""

    model_config = ConfigDict(use_attribute_docstrings=True)


class QueuedSection(_Documented):
    """`slice.queued`: ask through a queued resource, which waits for capacity, instead of creating the node at once."""

    valid_until_hours: float = Field(default=24, gt=0)
    """Hours after which the request is no longer granted. Change it when capacity is worth a longer wait."""


class SliceSection(_Documented):
    """`slice`: the TPU node to create."""

    name: Name
    """Name of the TPU node (on GKE: label of the run's objects). Give each slice that exists at the same time its
    own."""

    accelerator_type: Annotated[str, AfterValidator(_known_accelerator)]
    """Size and generation, as Google names it: v2-8 ... v6e-256. The number counts cores (v2 to v4, v5p) or chips."""

    runtime_version: str | None = None
    """Software version of the TPU VM; the generation's recommended one when absent."""

    capacity: Literal["on-demand", "spot", "reserved"] = "on-demand"
    """What is paid for. `spot` is cheap and can be taken away at any time: set run.preemption_retries with it.
    `reserved` uses a reservation of the project."""

    network: str | None = None
    """VPC network of the hosts; the project's `default` when absent."""

    subnetwork: str | None = None
    """Subnetwork of the hosts; needed in networks without automatic subnetworks."""

    internal_ips: bool = False
    """The hosts have no external addresses, and ssh goes to the internal ones. For workstations inside the network."""

    service_account: str | None = None
    """E-mail address of the service account that the hosts act as; the project's default one when absent."""

    labels: Annotated[dict[str, str], AfterValidator(_labels)] = {}
    """More labels of the node, for example to attribute its costs."""

    create_minutes: float = Field(default=30, gt=0, le=7 * 24 * 60)
    """Minutes that `up` waits until the slice is READY."""

    zones: list[Zone] = []
    """Zones that are tried after `zone`, in this order, when there is no capacity."""

    stockout_minutes: float = Field(default=0, ge=0)
    """Minutes to go on trying when no zone has capacity; 0 gives up at once."""

    queued: QueuedSection | None = None
    """Ask through a queued resource, which waits for capacity; `{}` for its defaults."""

    iap: bool = False
    """ssh goes through Identity-Aware Proxy: the hosts need no external addresses and no open port. Slower."""

    abandoned_hours: float | None = Field(default=None, gt=0)
    """Hours without a run after which the slice deletes itself. Guards against forgotten slices even when this machine
    is off."""

    expires_hours: float | None = Field(default=None, gt=0, le=10 * 365 * 24)
    """Hours after which `tpu-launch gc` removes the slice, whatever it does."""

    max_cost_per_hour: float | None = Field(default=None, gt=0)
    """US dollars an hour, by list prices. A slice that costs more, or whose price is not known, is not created."""


class ImageSection(_Documented):
    """`image`: what runs on every host."""

    reference: Annotated[str, Field(pattern=IMAGE_BY_DIGEST)] | None = None
    """REPOSITORY@sha256:...: run this image, and build nothing."""

    backend: BackendName | None = None
    """Whose image is built: torch-xla or tensorflow; the trainer's `backend` when absent. For programs of your own."""

    repository: str | None = None
    """REGION-docker.pkg.dev/PROJECT/REPOSITORY/NAME: where the image is pushed. When absent the hosts must have the
    image, as emulated ones do."""

    create_repository: bool = False
    """Make the repository (private) when a push finds that it does not exist."""

    code: str | None = None
    """A folder of your own, relative to this file: it is copied into our image's working directory, without what its
    .dockerignore names, and without secrets and caches (`.env`, `.git`, `.tpu-launch`, keys, credentials)."""

    dockerfile: str | None = None
    """Your own Dockerfile instead of ours, relative to this file."""

    context: str | None = None
    """Build context of your Dockerfile, relative to this file; the Dockerfile's folder when absent. Left out is what
    `<Dockerfile>.dockerignore` or .dockerignore names, and what is left out of image.code."""

    target: str | None = None
    """Stage of the Dockerfile at which the build stops; the last one when absent."""

    build_args: dict[str, str] = {}
    """Arguments of the build (`ARG`). They stay visible in the image: no secrets. `{REQUIREMENTS:
    requirements-2.8.txt}` takes torch_xla 2.8, for v2 and v3 hosts on which the newest does not open the chips."""

    ca_bundle: str | None = None
    """A file of CA certificates, given to the build as a secret. For networks behind a TLS proxy."""

    @model_validator(mode="after")
    def _one_way(self) -> ImageSection:
        if self.code and (self.dockerfile or self.reference):
            raise ValueError(
                "code comes into our image: copy it in your own Dockerfile, "
                "or leave out image.dockerfile and image.reference"
            )
        return self


class RunSection(_Documented):
    """`run`: one training job on the slice."""

    name: Name | None = None
    """Prefix of run ids; the slice's name when absent."""

    command: list[str] | None = None
    """Program and arguments that run in the container on every host, instead of the trainer."""

    environment: Annotated[dict[str, str], AfterValidator(_environment)] = {}
    """Environment variables of the command. They are visible in files and to `docker inspect`: no secrets."""

    secrets: Annotated[list[str], AfterValidator(_variable_names)] = []
    """Names of variables of this machine's environment that only the command may see. Values travel on standard input
    and are kept nowhere. Not used on GKE, which has `gke.secrets`."""

    shm_size: Annotated[str, Field(pattern=r"^[0-9]+[kmg]$")] = "16g"
    """Size of the container's /dev/shm: a number and k, m or g. Raise it when data loader workers run out of it."""

    user: str | None = None
    """User inside the container, a name or number; the image's own when absent."""

    stop_seconds: int = Field(default=30, ge=1, le=600)
    """Seconds between SIGTERM and SIGKILL when the run is stopped or its host shuts down: the time to save a
    checkpoint."""

    host_lost_seconds: float = Field(default=120, gt=0)
    """Seconds after which a host that does not answer, while others do, counts as lost."""

    start_minutes: float = Field(default=15, gt=0, le=24 * 60)
    """Minutes for pulling the image and starting it, on all hosts."""

    stall_minutes: float | None = Field(default=None, gt=0)
    """Minutes without a line from any host after which the stacks of all processes are saved and the attempt ends;
    absent: never."""

    transport: Literal["auto", "gcloud"] = "auto"
    """How hosts are watched: `auto` keeps ssh connections open, and falls back to gcloud; `gcloud` uses gcloud
    alone."""

    preemption_retries: int = Field(default=0, ge=0)
    """Attempts started again after a preemption or a lost host, in the whole run."""

    failure_retries: int = Field(default=0, ge=0)
    """Attempts started again after the command failed, in the whole run; the delay before each doubles from 5 s."""

    replace_after: int | None = Field(default=None, ge=1)
    """Attempts in a row with the same host as first cause after which the slice is deleted and created again; absent:
    never."""


class GcsFuseSection(_Documented):
    """`gke.gcsfuse`: a bucket as a folder of the container, through GKE's Cloud Storage FUSE driver."""

    bucket: Annotated[str, Field(min_length=3)]
    """Name of the bucket, without gs://."""

    folder: Annotated[str, Field(pattern=r"^/[^:]+$")]
    """Absolute path in the container at which it is mounted."""

    read_only: bool = False
    """Whether the container may not write to it."""

    options: str = "implicit-dirs"
    """The driver's mountOptions, separated by commas."""


class GkeSection(_Documented):
    """`gke`: the cluster, for `tpu-launch manifest` and `--provider gke`. What belongs to the slice is in `slice`."""

    context: str | None = None
    """Context of kubectl's configuration; kubectl's current one when absent."""

    namespace: Annotated[str, Field(pattern=r"^[a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?$")] = "default"
    """Namespace of the run's objects."""

    topology: str | None = None
    """Topology of the node pool, like 2x2x2; checked against slice.accelerator_type, which implies it."""

    hosts: int | None = None
    """Number of nodes; checked against slice.accelerator_type, which implies it."""

    queue: Annotated[str, Field(min_length=1)] | None = None
    """Kueue's LocalQueue that admits the run; absent: no queue."""

    service_account: Annotated[str, Field(min_length=1)] | None = None
    """Kubernetes service account of the pods, bound to Google's by Workload Identity; the namespace's default one when
    absent."""

    secrets: Annotated[dict[str, str], AfterValidator(_secrets)] = {}
    """Environment variables from the namespace's Secrets: NAME: SECRET/KEY."""

    gcsfuse: GcsFuseSection | None = None
    """Mounts a bucket as a folder; absent: none."""

    node_selector: dict[str, str] = {}
    """More labels that the nodes must have: a node pool, a reservation."""

    cpu: str | None = None
    """CPUs that are requested for each host's container, as Kubernetes writes them: "100"."""

    memory: str | None = None
    """Memory that is requested for each host's container, as Kubernetes writes it: "300Gi"."""

    restarts: int = Field(default=10, ge=0)
    """How often the cluster restarts a manifest that was applied with kubectl. Runs of `tpu-launch run` count attempts
    themselves."""

    privileged: bool = False
    """Runs the container privileged, which GKE before 1.28 needs to reach the TPU. Otherwise it has the capability
    SYS_RESOURCE alone, to raise its locked-memory limit."""


class Root(_Documented):
    """The launcher's half of the file."""

    project: Annotated[str, Field(min_length=1)]
    """Google Cloud project that owns and pays for the slice."""

    zone: Zone
    """Zone in which the slice is created, like us-central2-b."""

    slice: SliceSection
    image: ImageSection = ImageSection()
    run: RunSection = RunSection()
    gke: GkeSection = GkeSection()


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
        return _from_document(load_document(path, overrides), tuple(command))
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
