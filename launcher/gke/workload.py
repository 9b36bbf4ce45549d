"""Names, labels and nodes of a run on Kubernetes, and the configurations that GKE can't run. Pure."""

import re
from collections.abc import Iterator
from dataclasses import dataclass

from launcher.config import Config
from launcher.errors import BadInput
from launcher.provider import Attempt
from training.accelerators import ACCELERATORS, gke_nodes
from training.distributed.cluster import SECRET_VARIABLE
from training.storage import is_remote

LABEL_RUN = "tpu-launch/run"
LABEL_ATTEMPT = "tpu-launch/attempt"
LABEL_SLICE = "tpu-launch/slice"
CONTAINER = "trainer"
REPLICATED_JOB = "w"  # short, because a pod's host name has at most 63 characters

_LONGEST_NAME = 63 - len("-w-0-000") - len("-abcde")  # a pod's name ends with JobSet's host part and a random suffix
_SPOT_GRACE_SECONDS = 25  # a spot VM ends 30 s after the preemption notice


@dataclass(frozen=True)
class Workload:
    """An attempt on Kubernetes, or a run whose attempts the cluster counts."""

    config: Config
    attempt: Attempt

    by_cluster: bool = False
    """The cluster restarts the run, and the user applies its manifest with kubectl. Otherwise tpu-launch judges the end
    of every host, so ended pods must stay as they are."""

    @property
    def name(self) -> str:
        """Returns the name of each of its objects: the JobSet's name."""
        return self.attempt.run_id if self.by_cluster else jobset_name(self.attempt.container)

    @property
    def labels(self) -> dict[str, str]:
        """Returns the labels of the objects and pods, by which they are found."""
        slice_, run = self.config.slice.name, self.attempt.run_id
        common = {"app.kubernetes.io/name": "tpu-launch", LABEL_SLICE: slice_, LABEL_RUN: run}
        return common if self.by_cluster else {**common, LABEL_ATTEMPT: str(self.attempt.number)}


def jobset_name(container: str) -> str:
    """Returns the name of an attempt's JobSet from that of its container."""
    return container.removeprefix("tpu-launch-")


def needs_secret(config: Config) -> bool:
    """Returns whether the workload has a Secret of its own, with SECRET_VARIABLE: there are several hosts, and
    gke.secrets does not have that variable."""
    return config.accelerator.hosts > 1 and SECRET_VARIABLE not in config.gke.secrets


def grace_seconds(config: Config) -> int:
    """Returns the seconds between SIGTERM and SIGKILL: run.stop_seconds, or less where a spot VM ends sooner."""
    wanted = config.run.stop_seconds
    return min(wanted, _SPOT_GRACE_SECONDS) if config.slice.capacity == "spot" else wanted


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


def check_name(name: str) -> str:
    """Returns the name unchanged. Raises BadInput if Kubernetes refuses it, or it is too long for its pods' names."""
    if not re.fullmatch(r"[a-z]([-a-z0-9]*[a-z0-9])?", name):
        raise BadInput(
            f"{name!r} can't name Kubernetes objects: use a lower-case letter, then letters, digits and hyphens"
        )
    if len(name) > _LONGEST_NAME:
        raise BadInput(
            f"{name!r} is too long: the names of its pods have at most 63 characters, so it has at most "
            f"{_LONGEST_NAME}; set a shorter run.name"
        )
    return name


def check(config: Config) -> None:
    """Raises BadInput, naming file:line, for the first mistake of a configuration that GKE can't run."""
    for path, message in (*_slice_mistakes(config), *_pod_mistakes(config)):
        raise BadInput(f"{config.document.place(path)}: {'.'.join(path)}: {message}")


def _slice_mistakes(config: Config) -> Iterator[tuple[tuple[str, ...], str]]:
    """Yields the key and the message of each mistake in what describes the slice."""
    slice_, gke = config.accelerator, config.gke
    family = [size for size in ACCELERATORS.values() if size.generation == slice_.generation]
    sizes = ", ".join(
        f"{each.name} ({each.topology_name}, {each.hosts} host{'s'[: each.hosts > 1]})" for each in family
    )
    if config.slice.candidates:
        yield ("slice", "candidates"), "on GKE, the cluster's own queue has candidates (Kueue): remove the key"
    try:
        gke_nodes(slice_)
    except ValueError as error:
        yield ("slice", "accelerator_type"), str(error)
    if gke.topology not in (None, slice_.topology_name):
        yield ("gke", "topology"), f"{slice_.name} is {slice_.topology_name}, not {gke.topology}; there are {sizes}"
    if gke.hosts not in (None, slice_.hosts):
        hosts = f"{slice_.hosts} hosts of {slice_.chips_per_host} chips"
        yield ("gke", "hosts"), f"{slice_.name} has {hosts}, not {gke.hosts}; there are {sizes}"
    if config.slice.capacity not in ("on-demand", "spot") and not gke.node_selector:
        message = f"on GKE, {config.slice.capacity} capacity belongs to a node pool: select it in gke.node_selector"
        yield ("slice", "capacity"), f"{message}, cloud.google.com/gke-nodepool: NAME"


def _pod_mistakes(config: Config) -> Iterator[tuple[tuple[str, ...], str]]:
    """Yields the key and the message of each mistake in secrets, the output folder and the user."""
    secrets, user = config.gke.secrets, config.run.user
    for name in config.run.secrets:
        if name not in secrets:
            place = f"put {name} into a Secret of namespace {config.gke.namespace}"
            fix = f"{place}, and name it in gke.secrets ({name}: SECRET/KEY)"
            yield ("run", "secrets"), f"on GKE, secrets come from Kubernetes: {fix}"
    for name in sorted(set(secrets) & set(config.run.environment)):
        yield ("gke", "secrets", name), f"{name} is in run.environment too: remove one"
    output = config.trainer.output if config.trainer else None
    bucket = config.gke.gcsfuse
    if output is not None and not is_remote(output):
        if bucket is None or not output.startswith(bucket.folder.rstrip("/") + "/"):
            yield ("output",), f"{output} is lost with its pod: use a gs:// folder, or one below gke.gcsfuse.folder"
        elif bucket.read_only:
            yield ("output",), f"{output} can't be written: gke.gcsfuse.read_only is set"
    if user is not None and not re.fullmatch(r"\d+(:\d+)?", user):
        yield ("run", "user"), f"Kubernetes needs numbers, UID or UID:GID, not {user!r}"
