"""Refuses configurations that GKE can't run, before anything is created. Pure; every error names file:line."""

import re
from collections.abc import Iterator
from itertools import chain

from launcher.config import Config
from launcher.errors import BadInput
from training.accelerators import ACCELERATORS, Accelerator, gke_nodes
from training.storage import is_remote

_LONGEST_NAME = 63 - len("-w-0-000") - len("-abcde")  # a pod's name ends with JobSet's host part and a random suffix


def check(config: Config) -> None:
    """Raises BadInput, naming file:line, for the first mistake."""
    for path, message in chain(_slice_mistakes(config), _secret_mistakes(config), _pod_mistakes(config)):
        raise BadInput(f"{config.document.place(path)}: {'.'.join(path)}: {message}")


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


Mistake = tuple[tuple[str, ...], str]  # (path of the key, message)


def _slice_mistakes(config: Config) -> Iterator[Mistake]:
    """Yields the mistakes in what describes the slice: slice.candidates at all, a type that GKE lacks, a gke.topology
    or gke.hosts other than the type's, reserved capacity without gke.node_selector."""
    slice_, gke = config.accelerator, config.gke
    if config.slice.candidates:
        yield ("slice", "candidates"), "on GKE, the cluster's own queue has candidates (Kueue): remove the key"
    try:
        gke_nodes(slice_)
    except ValueError as error:
        yield ("slice", "accelerator_type"), str(error)
    if gke.topology is not None and gke.topology != slice_.topology_name:
        yield ("gke", "topology"), f"{slice_.name} is {slice_.topology_name}, not {gke.topology}; {_sizes(slice_)}"
    if gke.hosts is not None and gke.hosts != slice_.hosts:
        hosts = f"{slice_.hosts} hosts of {slice_.chips_per_host} chips"
        yield ("gke", "hosts"), f"{slice_.name} has {hosts}, not {gke.hosts}; {_sizes(slice_)}"
    if config.slice.capacity == "reserved" and not gke.node_selector:
        message = "on GKE, a reservation belongs to a node pool: select the pool in gke.node_selector"
        yield ("slice", "capacity"), f"{message}, cloud.google.com/gke-nodepool: NAME"


def _secret_mistakes(config: Config) -> Iterator[Mistake]:
    """Yields a mistake for the first name of run.secrets that gke.secrets lacks, and one for each name of gke.secrets
    that run.environment sets too."""
    secrets = config.gke.secrets
    if unknown := [name for name in config.run.secrets if name not in secrets]:
        name = unknown[0]
        yield (
            ("run", "secrets"),
            f"on GKE, secrets come from Kubernetes: put {name} into a Secret of namespace {config.gke.namespace}, and "
            f"name it in gke.secrets ({name}: SECRET/KEY)",
        )
    for name in sorted(set(secrets) & set(config.run.environment)):
        yield ("gke", "secrets", name), f"{name} is in run.environment too: remove one"


def _pod_mistakes(config: Config) -> Iterator[Mistake]:
    """Yields a mistake for an output folder that is lost with its pod, and for a run.user that is not numeric."""
    output = config.trainer.output if config.trainer else None
    mount = config.gke.gcsfuse.folder + "/" if config.gke.gcsfuse else None
    if output is not None and not is_remote(output) and not (mount and output.startswith(mount)):
        yield ("output",), f"{output} is lost with its pod: use a gs:// folder, or one below gke.gcsfuse.folder"
    user = config.run.user
    if user is not None and not re.fullmatch(r"\d+(:\d+)?", user):
        yield ("run", "user"), f"Kubernetes needs numbers, UID or UID:GID, not {user!r}"


def _sizes(slice_: Accelerator) -> str:
    """Returns all sizes of the slice's generation, for a message."""
    family = [accelerator for accelerator in ACCELERATORS.values() if accelerator.generation == slice_.generation]
    return "there are " + ", ".join(
        f"{size.name} ({size.topology_name}, {size.hosts} host{'s'[: size.hosts > 1]})" for size in family
    )
