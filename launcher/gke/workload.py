"""Names, labels, nodes and ports of a run on Kubernetes, shared by the templates and the provider. Pure."""

import enum
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from launcher.config import Config
from training.accelerators import gke_nodes
from training.distributed.cluster import GLOO_PORT, RENDEZVOUS_PORT, SECRET_VARIABLE

LABEL_RUN = "tpu-launch/run"
LABEL_ATTEMPT = "tpu-launch/attempt"
LABEL_SLICE = "tpu-launch/slice"
CONTAINER = "trainer"
CONFIG_FOLDER = "/etc/tpu-launch"
REPLICATED_JOB = "w"  # short, because a pod's host name has at most 63 characters
LIBTPU_PORT = 8471
SECRET_KEY = "secret"  # in the Secret that has the workload's name
PORTS = (("libtpu", LIBTPU_PORT), ("rendezvous", RENDEZVOUS_PORT), ("gloo", GLOO_PORT))

_SPOT_GRACE_SECONDS = 25  # a spot VM ends 30 s after the preemption notice


class Restarts(enum.Enum):
    """Names who restarts an ended run."""

    BY_CLUSTER = "by the cluster"
    """The user applies the manifest with kubectl."""

    BY_LAUNCHER = "by tpu-launch"
    """tpu-launch judges the end of every host, so ended pods must stay as they are."""


@dataclass(frozen=True)
class Workload:
    """A run, or one attempt of it."""

    name: str
    """The name of every object."""

    run_id: str

    attempt: int | None
    """None: the cluster counts attempts."""

    image: str
    command: tuple[str, ...]
    environment: Mapping[str, str]

    files: Mapping[str, str]
    """Name -> content of the files in CONFIG_FOLDER."""

    shm_size: str = "16g"

    user: str | None = None
    """UID or UID:GID; None: root."""

    secret: str | None = field(default=None, repr=False)
    """Shared by the hosts; None if the user creates the Secret."""


def needs_secret(config: Config) -> bool:
    """Returns whether the hosts read their shared secret from the workload's own Secret: there are several hosts, and
    gke.secrets names no other Secret for it."""
    return config.accelerator.hosts > 1 and SECRET_VARIABLE not in config.gke.secrets


def literal(text: str) -> str:
    """Escapes an argument or the value of a variable so that a pod gets it unchanged: the kubelet expands `$(NAME)` and
    `$$` (https://kubernetes.io/docs/tasks/inject-data-application/define-interdependent-environment-variables)."""
    return re.sub(r"\$(?=[$(])", "$$", text)


def grace_seconds(config: Config) -> int:
    """Returns the seconds between SIGTERM and SIGKILL: run.stop_seconds, or less where a spot VM ends sooner."""
    wanted = config.run.stop_seconds
    return min(wanted, _SPOT_GRACE_SECONDS) if config.slice.capacity == "spot" else wanted


def labels(config: Config, work: Workload) -> dict[str, str]:
    """Returns the labels of the objects and pods of a run, by which they are found."""
    common = {"app.kubernetes.io/name": "tpu-launch", LABEL_SLICE: config.slice.name, LABEL_RUN: work.run_id}
    return common if work.attempt is None else {**common, LABEL_ATTEMPT: str(work.attempt)}


def metadata(config: Config, work: Workload) -> dict[str, Any]:
    return {"name": work.name, "namespace": config.gke.namespace, "labels": labels(config, work)}


def node_selector(config: Config) -> dict[str, str]:
    """Returns the labels of the nodes on which the run may be scheduled."""
    spot = {"cloud.google.com/gke-spot": "true"} if config.slice.capacity == "spot" else {}
    return {
        "cloud.google.com/gke-tpu-accelerator": gke_nodes(config.accelerator).accelerator,
        "cloud.google.com/gke-tpu-topology": config.accelerator.topology_name,
        **spot,
        **config.gke.node_selector,
    }


def host_name(name: str, index: str) -> str:
    """Returns the DNS name, inside the namespace, of host `index` of the workload `name`."""
    return f"{name}-{REPLICATED_JOB}-0-{index}.{name}"
