"""A run as Kubernetes is to know it: names, labels, nodes and ports, shared by the templates and the provider. Pure."""

from __future__ import annotations

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
REPLICATED_JOB = "w"  # short: a pod's host name has 63 characters
LIBTPU_PORT = 8471
SECRET_KEY = "secret"  # in the Secret that has the workload's name
PORTS = (("libtpu", LIBTPU_PORT), ("rendezvous", RENDEZVOUS_PORT), ("gloo", GLOO_PORT))

_SPOT_GRACE_SECONDS = 25  # a spot VM has 30 s from the notice to its end, in all


class Restarts(enum.Enum):
    """Who decides whether a run that ended is started again."""

    BY_CLUSTER = "by the cluster"
    """A person applies the manifest with kubectl."""

    BY_LAUNCHER = "by tpu-launch"
    """tpu-launch judges every host's end itself, and must find the pods as they ended."""


class Kind(enum.Enum):
    """The Kubernetes object that runs a workload."""

    JOBSET = "jobset"
    JOB = "job"
    """An Indexed Job with a headless Service, for clusters without JobSet."""


@dataclass(frozen=True)
class Workload:
    """One run, or one attempt of it."""

    name: str
    """The name of every object."""

    run_id: str

    attempt: int | None
    """None: the cluster counts."""

    image: str
    command: tuple[str, ...]
    environment: Mapping[str, str]

    files: Mapping[str, str]
    """Name -> content, in CONFIG_FOLDER."""

    shm_size: str = "16g"

    user: str | None = None
    """UID or UID:GID; None: root."""

    secret: str | None = field(default=None, repr=False)
    """By which the hosts know each other; None where somebody else makes the Secret."""


def needs_secret(config: Config) -> bool:
    """Whether the hosts read their secret from the Secret of the workload's name: there are several, and the file names
    no other one."""
    return config.accelerator.hosts > 1 and SECRET_VARIABLE not in config.gke.secrets


def literal(text: str) -> str:
    """A word of a command, or a value of a variable, that a pod gets as it is: the kubelet replaces `$(NAME)`, and `$$`
    by `$` (https://kubernetes.io/docs/tasks/inject-data-application/define-interdependent-environment-variables)."""
    return re.sub(r"\$(?=[$(])", "$$", text)


def grace_seconds(config: Config) -> int:
    """Seconds between SIGTERM and SIGKILL, as far as the capacity type gives them."""
    wanted = config.run.stop_seconds
    return min(wanted, _SPOT_GRACE_SECONDS) if config.slice.capacity == "spot" else wanted


def labels(config: Config, work: Workload) -> dict[str, str]:
    """The labels by which the objects and the pods of a run are found."""
    common = {"app.kubernetes.io/name": "tpu-launch", LABEL_SLICE: config.slice.name, LABEL_RUN: work.run_id}
    return common if work.attempt is None else {**common, LABEL_ATTEMPT: str(work.attempt)}


def metadata(config: Config, work: Workload) -> dict[str, Any]:
    """The metadata of an object."""
    return {"name": work.name, "namespace": config.gke.namespace, "labels": labels(config, work)}


def node_selector(config: Config) -> dict[str, str]:
    """The labels of the nodes that make up the slice."""
    spot = {"cloud.google.com/gke-spot": "true"} if config.slice.capacity == "spot" else {}
    return {
        "cloud.google.com/gke-tpu-accelerator": gke_nodes(config.accelerator).accelerator,
        "cloud.google.com/gke-tpu-topology": config.accelerator.topology_name,
        **spot,
        **config.gke.node_selector,
    }


def host_name(name: str, kind: Kind, index: str) -> str:
    """The DNS name of a host inside the namespace."""
    return f"{name}-{REPLICATED_JOB}-0-{index}.{name}" if kind is Kind.JOBSET else f"{name}-{index}.{name}"
