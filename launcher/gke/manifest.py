"""The Kubernetes objects of a run, in the order in which they must be created: the ConfigMap with its configuration,
the Secret by which its hosts know each other, and what runs its pods (`jobs`). Pure."""

from __future__ import annotations

import base64
from typing import Any

from launcher.config import Config
from launcher.gke import checks, jobs
from launcher.gke.commented_yaml import Commented, dump_documents
from launcher.gke.workload import CONFIG_FOLDER, SECRET_KEY, Kind, Restarts, Workload, metadata, needs_secret


def render(config: Config, work: Workload, kind: Kind, heading: str = "") -> str:
    """The manifest of a run that the cluster restarts, for people and for kubectl. Raises BadInput."""
    return dump_documents(make_objects(config, work, kind, Restarts.BY_CLUSTER), heading)


def make_objects(config: Config, work: Workload, kind: Kind, restarts: Restarts) -> list[Any]:
    """The objects with their comments. A Job is always restarted by the cluster. Raises BadInput."""
    checks.check(config)
    checks.check_name(work.name)
    files = [_config_map(config, work)]
    if work.secret is not None and needs_secret(config):
        files.append(_secret(config, work, work.secret))
    if kind is Kind.JOBSET:
        return [*files, jobs.jobset(config, work, restarts)]
    assert restarts is Restarts.BY_CLUSTER
    return [*files, jobs.service(config, work), jobs.job(config, work)]


def _secret(config: Config, work: Workload, value: str) -> dict[str, Any]:
    comment = "Random, made for this manifest alone: the hosts let in only who knows it. Keep it out of repositories."
    return {
        "apiVersion": "v1",
        "kind": "Secret",
        "metadata": metadata(config, work),
        "data": Commented({SECRET_KEY: base64.b64encode(value.encode()).decode()}, comment),
    }


def _config_map(config: Config, work: Workload) -> dict[str, Any]:
    return {
        "apiVersion": "v1",
        "kind": "ConfigMap",
        "metadata": metadata(config, work),
        "data": Commented(dict(work.files), f"What tpu-train reads, in {CONFIG_FOLDER}. It holds no secrets."),
    }
