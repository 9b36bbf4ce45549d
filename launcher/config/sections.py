"""The sections `slice`, `image`, `run` and `gke` of a run's file, and the types of their values."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Annotated, Any, Literal, TypeVar

from pydantic import AfterValidator, Field, field_validator, model_validator

from training.accelerators import accelerator
from training.registry import BackendName
from training.yaml_file import Section

IMAGE_BY_DIGEST = r"^[^@\s]+@sha256:[0-9a-f]{64}$"

_LABEL = re.compile(r"[a-z0-9_-]{0,63}")
T = TypeVar("T", bound=Iterable[str])


def _matches(pattern: str, problem: str) -> AfterValidator:
    """Returns a validator that raises ValueError ("VALUE problem") unless the pattern matches the whole value."""

    def check(value: str) -> str:
        if not re.fullmatch(pattern, value):
            raise ValueError(f"{value!r} {problem}")
        return value

    return AfterValidator(check)


def _known_accelerator(value: str) -> str:
    """Returns the value unchanged. Raises UnknownAccelerator, a ValueError, for a type that does not exist."""
    accelerator(value)  # UnknownAccelerator is a ValueError: pydantic reports it with its place
    return value


def _labels(value: dict[str, str]) -> dict[str, str]:
    """Returns the labels unchanged. Raises ValueError for a key or a value with other characters than lower-case
    letters, digits, _ and -, or with more than 63, for an empty key, and for one that begins with tpu-launch, which the
    launcher itself gives."""
    for key, text in value.items():
        if not _LABEL.fullmatch(key) or not key or not _LABEL.fullmatch(text):
            raise ValueError(f"label {key}={text}: lower-case letters, digits, '_' and '-' only, 63 characters at most")
        if key.startswith("tpu-launch"):
            raise ValueError(f"label {key}: tpu-launch gives these labels itself, and deletes slices by them")
    return value


def _variables(names: T) -> T:
    """Returns the names unchanged. Raises ValueError for one that no environment variable can have."""
    for name in names:
        if not re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]*", name):
            raise ValueError(f"{name!r} is not the name of an environment variable")
    return names


def _one_line(value: str) -> str:
    """Returns the value unchanged. Raises ValueError, which does not show the value, for a line break or NUL."""
    if "\n" in value or "\0" in value:
        raise ValueError("the value may not contain a line break")
    return value


Name = Annotated[
    str,
    _matches(
        r"[a-z]([-a-z0-9]{0,48}[a-z0-9])?",
        "must be a lower-case letter, then letters, digits or hyphens, 50 characters at most",
    ),
]
AcceleratorType = Annotated[str, AfterValidator(_known_accelerator)]
Labels = Annotated[dict[str, str], AfterValidator(_labels)]
VariableNames = Annotated[list[str], AfterValidator(_variables)]
Environment = Annotated[dict[str, Annotated[str, AfterValidator(_one_line)]], AfterValidator(_variables)]
SecretKey = Annotated[
    str,
    _matches(
        r"[a-z0-9]([-a-z0-9.]*[a-z0-9])?/[-._a-zA-Z0-9]+",
        "must be SECRET/KEY, the names of a Kubernetes Secret and of a key in it",
    ),
]
ClusterSecrets = Annotated[dict[str, SecretKey], AfterValidator(_variables)]
Zone = Annotated[str, _matches(r"[a-z]+-[a-z]+[0-9]+-[a-z0-9]+", "is not the name of a zone, like us-central2-b")]
_PART = r"[a-z0-9]+([._-]+[a-z0-9]+)*"
Repository = Annotated[
    str,
    _matches(
        rf"([a-zA-Z0-9.-]+(:[0-9]+)?/)?{_PART}(/{_PART})*",
        "must be a repository's name in lower-case letters, without https://, tag or digest, like "
        "us-central2-docker.pkg.dev/my-project/images/bert",
    ),
]


class FilledSection(Section):
    """A section whose texts may not be empty, other than in lists and maps: an empty one would fail only later."""

    @field_validator("*", mode="before")
    @classmethod
    def _refuse_empty(cls, value: Any) -> Any:
        """Returns the value unchanged. Raises ValueError for a text that is empty or blank."""
        if isinstance(value, str) and not value.strip():
            raise ValueError(f"{value!r} is empty: write a value, or leave out the key")
        return value


class QueuedSection(Section):
    """`slice.queued`: ask through a queued resource, which waits for capacity, instead of creating the node at once."""

    valid_until_hours: float = Field(default=24, gt=0)
    """Hours after which the request is no longer granted. Change it when capacity is worth a longer wait."""


Capacity = Literal["on-demand", "spot", "reserved", "flex-start", "calendar"]


class CandidateSection(Section):
    """An entry of `slice.candidates`: other slices that would do."""

    accelerator_type: AcceleratorType | list[AcceleratorType] | None = None
    """One type or several; slice.accelerator_type when absent."""

    zones: list[Zone] = []
    """Zones to ask in; all in which Google offers the type when absent."""

    capacity: Capacity | list[Capacity] | None = None
    """One kind or several; slice.capacity when absent."""


class SliceSection(FilledSection):
    """`slice`: the TPU node to create."""

    name: Name
    """Name of the TPU node (on GKE: label of the run's objects). Give each slice that exists at the same time its
    own."""

    accelerator_type: AcceleratorType
    """Size and generation, as Google names it: v2-8 ... v6e-256. The number counts cores (v2 to v4, v5p) or chips."""

    runtime_version: str | None = None
    """Software version of the TPU VM; the generation's recommended one when absent."""

    capacity: Capacity = "on-demand"
    """How capacity is bought. `spot` is cheap, and Google may take it away at any time: set run.preemption_retries too.
    `reserved` uses a reservation of the project. With slice.queued also `flex-start`, which ends by itself after
    slice.max_run_hours (v5e and v6e), and `calendar`, a reservation for a time in the future (slice.reservation)."""

    reservation: Name | None = None
    """Name of the reservation, for capacity `calendar`, and for `reserved` in a queue; any of the project's when
    absent."""

    max_run_hours: float | None = Field(default=None, gt=0, le=7 * 24)
    """Hours after which Google takes a slice of capacity `flex-start` away: at most 168."""

    network: str | None = None
    """VPC network of the hosts; the project's `default` when absent."""

    subnetwork: str | None = None
    """Subnetwork of the hosts; needed in networks without automatic subnetworks."""

    internal_ips: bool = False
    """The hosts have no external addresses, and ssh goes to the internal ones. For workstations inside the network."""

    service_account: str | None = None
    """E-mail address of the service account that the hosts act as; the project's default one when absent."""

    labels: Labels = {}
    """More labels of the node, for example to attribute its costs."""

    create_minutes: float = Field(default=30, gt=0, le=7 * 24 * 60)
    """Minutes that `up` waits until the slice is READY."""

    zones: list[Zone] = []
    """Zones that are tried after `zone`, in this order, when there is no capacity."""

    stockout_minutes: float = Field(default=0, ge=0)
    """Minutes to go on trying when no zone has capacity; 0 gives up at once."""

    candidates: list[CandidateSection] = []
    """Other slices that would do. They and the slice above are asked for at once, and all requests but one are
    withdrawn: the first in this order that is granted is taken, and one that is granted waits two minutes at most for
    those before it. The run goes on with any of them: same global batches, same schedule."""

    price_limit: float | None = Field(default=None, gt=0)
    """US dollars an hour, by list prices, of all candidates that are asked for together, because all of them may be
    granted; those beyond it are asked for in turn."""

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


class ImageSection(FilledSection):
    """`image`: what runs on every host."""

    reference: Annotated[str, Field(pattern=IMAGE_BY_DIGEST)] | None = None
    """REPOSITORY@sha256:...: run this image, and build nothing."""

    backend: BackendName | None = None
    """The image to build: torch-xla, torch-tpu or tensorflow; the trainer's `backend` when absent. For programs of
    your own: `tpu-train exec --runtime torch-tpu` needs torch-tpu, on v4 and newer."""

    repository: Repository | None = None
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
    `<Dockerfile>.dockerignore` or .dockerignore names, and all that image.code leaves out."""

    build: Literal["auto", "engine", "registry"] = "auto"
    """How the image is made. engine: with this machine's container engine. registry: without one; our trainer and
    image.code are appended to a base image in the registry, which `tpu-launch image base` puts there once. auto: with
    the engine where one answers, else in the registry."""

    base: str | None = None
    """HOST/PATH:TAG or HOST/PATH@sha256:...: a base image of your own for image.build: registry, in the registry of
    image.repository. image.code is appended to its working directory."""

    target: str | None = None
    """Stage of the Dockerfile at which the build stops; the last one when absent."""

    build_args: dict[str, str] = {}
    """Arguments of the build (`ARG`). They stay visible in the image: no secrets. `{REQUIREMENTS:
    requirements-2.8.txt}` takes torch_xla 2.8, for v2 and v3 hosts on which the newest does not open the chips."""

    ca_bundle: str | None = None
    """A file of CA certificates, given to the build as a secret. For networks behind a TLS proxy."""

    @model_validator(mode="after")
    def _one_way(self) -> ImageSection:
        """Returns the section. Raises ValueError for keys that name more than one way to make the image."""
        if self.code and (self.dockerfile or self.reference):
            raise ValueError(
                "code comes into our image: copy it in your own Dockerfile, "
                "or leave out image.dockerfile and image.reference"
            )
        if self.base and (self.dockerfile or self.reference or self.build == "engine"):
            raise ValueError(
                "base is appended to in the registry: leave out image.dockerfile, image.reference and "
                "image.build: engine"
            )
        if self.build == "registry" and (self.dockerfile or self.target):
            raise ValueError(
                "build: registry runs no Dockerfile: make your image once and name it as image.base, "
                "or leave out image.dockerfile and image.target"
            )
        return self


class RunSection(FilledSection):
    """`run`: one training job on the slice."""

    name: Name | None = None
    """Prefix of run ids; the slice's name when absent."""

    command: list[str] | None = None
    """Program and arguments that run in the container on every host, instead of the trainer."""

    environment: Environment = {}
    """Environment variables of the command. They are visible in files and to `docker inspect`: no secrets."""

    secrets: VariableNames = []
    """Names of variables of this machine's environment that only the command may see. Values travel on standard input
    and are kept nowhere. Not used on GKE, which has `gke.secrets`."""

    shm_size: Annotated[str, Field(pattern=r"^[0-9]+[kmg]$"), _matches("0*[1-9].*", "must be more than 0")] = "16g"
    """Size of the container's /dev/shm: a number and k, m or g. Raise it when data loader workers run out of it."""

    compile_cache_gb: Annotated[float, Field(ge=0, le=1000)] = 4
    """GB of compiled programs that a host's disk keeps, so that a later start on the same host does not compile them
    again; the oldest are removed. 0: none. Used by `backend: torch-xla`; on GKE with gke.node_cache alone."""

    user: str | None = None
    """User inside the container, a name or number; root when absent, to whom the TPU's device files belong. Other users
    need access to these files, and on v2 to v4 probably more: try `tpu-launch doctor --devices`."""

    stop_seconds: int = Field(default=30, ge=1, le=600)
    """Seconds between SIGTERM and SIGKILL when the run is stopped or its host shuts down: the time to save a
    checkpoint."""

    host_lost_seconds: float = Field(default=120, gt=0)
    """Seconds after which a host that does not answer, while others do, counts as lost. It does not while the others do
    training steps: these need every host."""

    unreachable_minutes: float = Field(default=30, gt=0)
    """Minutes after which the attempt counts as lost when no host answers, while Google's API does."""

    start_minutes: float = Field(default=15, gt=0, le=24 * 60)
    """Minutes for pulling the image and starting it, on all hosts."""

    stall_minutes: float | None = Field(default=None, gt=0)
    """Minutes of training without progress after which a hang is explained and the attempt ends: 5 when absent, never
    less than 20 median steps or the longest save. Other phases may take 6 or 12 times as long (docs/guide/hangs.md).
    For a program that reports no progress: minutes without output; absent: never."""

    transport: Literal["auto", "gcloud"] = "auto"
    """How hosts are watched: `auto` keeps ssh connections open, and falls back to gcloud; `gcloud` uses gcloud
    alone."""

    preemption_retries: int = Field(default=0, ge=0)
    """Attempts started again after a preemption, a lost host, or a lost connection between hosts, in the whole run;
    after a lost connection up to 3 even if this is less."""

    failure_retries: int = Field(default=0, ge=0)
    """Attempts started again after the command failed, in the whole run; the delay before each doubles from 5 s."""

    budget: float | None = Field(default=None, gt=0)
    """US dollars, by list prices, for all attempts of the run together. When they are spent, the run saves, stops, and
    its slice is deleted; `run` with a larger budget resumes it."""

    replace_after: int | None = Field(default=None, ge=1)
    """Attempts in a row with the same host as first cause after which the slice is deleted and created again, and so
    is one that is READY and whose hosts can't be contacted; absent: never. Only where not this machine's connections
    alone show it: Google's API, other hosts, or the silence of the trainer's bucket for unreachable_minutes."""

    recovery_minutes: float = Field(default=60, ge=0, le=7 * 24 * 60)
    """Minutes for which a recovery is tried again after its first failure that may pass: the API or a host does not
    answer, there is no capacity, the slice is taken away again. Waiting for capacity (slice.stockout_minutes,
    slice.queued) comes on top."""


class GcsFuseSection(Section):
    """`gke.gcsfuse`: a bucket as a folder of the container, through GKE's Cloud Storage FUSE driver."""

    bucket: Annotated[str, _matches("[a-z0-9][a-z0-9._-]+[a-z0-9]", "must be a bucket's name, without gs://")]
    """Name of the bucket, without gs://."""

    folder: Annotated[str, Field(pattern=r"^/[^:]+$")]
    """Absolute path in the container at which it is mounted."""

    read_only: bool = False
    """Whether the container may not write to it."""

    options: str = "implicit-dirs"
    """The driver's mountOptions, separated by commas."""


class GkeSection(FilledSection):
    """`gke`: the cluster, for `tpu-launch manifest` and `--provider gke`. What belongs to the slice is in `slice`."""

    context: str | None = None
    """Context of kubectl's configuration; absent: the one that is current when the run starts."""

    namespace: Annotated[str, Field(pattern=r"^[a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?$")] = "default"
    """Namespace of the run's objects."""

    topology: str | None = None
    """Topology of the node pool, like 2x2x2; checked against slice.accelerator_type, which implies it."""

    hosts: int | None = None
    """Number of nodes; checked against slice.accelerator_type, which implies it."""

    queue: str | None = None
    """Kueue's LocalQueue that admits the run; absent: no queue."""

    service_account: str | None = None
    """Kubernetes service account of the pods, bound to Google's by Workload Identity; the namespace's default one when
    absent."""

    secrets: ClusterSecrets = {}
    """Environment variables from the namespace's Secrets: NAME: SECRET/KEY."""

    gcsfuse: GcsFuseSection | None = None
    """Mounts a bucket as a folder; absent: none."""

    node_selector: dict[str, str] = {}
    """More labels that the nodes must have: a node pool, a reservation."""

    cpu: str | None = None
    """CPUs that are requested for each host's container, as Kubernetes writes them: "100"."""

    memory: str | None = None
    """Memory that is requested for each host's container, as Kubernetes writes it: "300Gi"."""

    node_cache: Annotated[str, Field(pattern=r"^/[^:]+$")] | None = None
    """Folder of each node, such as /var/lib/tpu-launch, that keeps compiled programs, up to run.compile_cache_gb, for
    later pods on the node; absent: none. The cluster must allow hostPath volumes, which Autopilot does not."""

    restarts: int = Field(default=10, ge=0)
    """Restarts by the cluster of a manifest that was applied with kubectl. `tpu-launch run` counts attempts itself."""

    privileged: bool = False
    """Runs the container privileged, which GKE before 1.28 needs to reach the TPU. Otherwise it has the capability
    SYS_RESOURCE, to raise its locked-memory limit, and DAC_OVERRIDE, to write in the image's folders."""


class Root(FilledSection):
    """The launcher's half of the file."""

    project: str
    """Google Cloud project that owns and pays for the slice."""

    zone: Zone
    """Zone in which the slice is created, like us-central2-b."""

    slice: SliceSection
    image: ImageSection = ImageSection()
    run: RunSection = RunSection()
    gke: GkeSection = GkeSection()
