"""The Kubernetes objects of a run, in the order in which they must be created: the ConfigMap with its configuration,
and what runs its pods (`jobs`). Pure."""

from __future__ import annotations

from typing import Any

from launcher.config import Config
from launcher.gke import checks, jobs
from launcher.gke.commented_yaml import Commented, dump_documents
from launcher.gke.workload import CONFIG_FOLDER, Kind, Restarts, Workload, metadata


def render(config: Config, work: Workload, kind: Kind, heading: str = "") -> str:
    """The manifest of a run that the cluster restarts, for people and for kubectl. Raises BadInput."""
    return dump_documents(make_objects(config, work, kind, Restarts.BY_CLUSTER), heading)


def make_objects(config: Config, work: Workload, kind: Kind, restarts: Restarts) -> list[Any]:
    """The objects with their comments. A Job is always restarted by the cluster. Raises BadInput."""
    checks.check(config)
    checks.check_name(work.name)
    if kind is Kind.JOBSET:
        return [_config_map(config, work), jobs.jobset(config, work, restarts)]
    assert restarts is Restarts.BY_CLUSTER
    return [_config_map(config, work), jobs.service(config, work), jobs.job(config, work)]


def _config_map(config: Config, work: Workload) -> dict[str, Any]:
    return {
        "apiVersion": "v1",
        "kind": "ConfigMap",
        "metadata": metadata(config, work),
        "data": Commented(dict(work.files), f"What tpu-train reads, in {CONFIG_FOLDER}. It holds no secrets."),
    }
