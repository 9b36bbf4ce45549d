"""The objects that run a workload's pods: a JobSet, or an Indexed Job with a headless Service. Pure.

With `Restarts.BY_CLUSTER` their rules decide what is tried again. They rest on the trainer's exit codes
(training.errors), and on that every host of a slice must start again together.
"""

from __future__ import annotations

from typing import Any

from launcher.config import Config
from launcher.gke.commented_yaml import Commented
from launcher.gke.pod_template import pod_template
from launcher.gke.workload import (
    CONTAINER,
    PORTS,
    REPLICATED_JOB,
    Kind,
    Restarts,
    Workload,
    host_name,
    labels,
    metadata,
)
from training.errors import Exit

KEPT_SECONDS = 3 * 24 * 3600  # ended objects that nobody fetched


def jobset(config: Config, work: Workload, restarts: Restarts) -> dict[str, Any]:
    """The JobSet of a workload: one Job, a pod a host."""
    by_cluster = restarts is Restarts.BY_CLUSTER
    template = {
        "parallelism": config.accelerator.hosts,
        "completions": Commented(config.accelerator.hosts, "One pod a host."),
        "completionMode": Commented(
            "Indexed", "Pod number i is host i; GKE tells each TPU_WORKER_ID and TPU_WORKER_HOSTNAMES."
        ),
        **(_job_rules_of_cluster() if by_cluster else _job_rules_of_launcher()),
        "template": pod_template(config, work, Kind.JOBSET),
    }
    replicated_job = {
        "name": REPLICATED_JOB,
        "replicas": Commented(1, "One slice."),
        "template": {"metadata": {"labels": labels(config, work)}, "spec": template},
    }
    no_restarts = {"maxRestarts": Commented(0, "tpu-launch decides about another attempt.")}
    return {
        "apiVersion": "jobset.x-k8s.io/v1alpha2",
        "kind": "JobSet",
        "metadata": _jobset_metadata(config, work),
        "spec": {
            "ttlSecondsAfterFinished": Commented(KEPT_SECONDS, "An ended run is removed after three days."),
            "network": {
                "enableDNSHostnames": Commented(True, f"Host i is called {host_name(work.name, Kind.JOBSET, '<i>')}."),
                "publishNotReadyAddresses": True,
                "subdomain": work.name,
            },
            "failurePolicy": _jobset_rules_of_cluster(config) if by_cluster else no_restarts,
            "replicatedJobs": [replicated_job],
        },
    }


def _jobset_metadata(config: Config, work: Workload) -> dict[str, Any]:
    fields = metadata(config, work)
    if config.gke.queue:
        queue = Commented(config.gke.queue, "Kueue admits all hosts of the run together.")
        fields["labels"] = {**fields["labels"], "kueue.x-k8s.io/queue-name": queue}
    if config.accelerator.hosts > 1:
        comment = "One slice is one node pool: all hosts in the same one, and no other run's beside them."
        topology = Commented("cloud.google.com/gke-nodepool", comment)
        fields["annotations"] = {"alpha.jobset.sigs.k8s.io/exclusive-topology": topology}
    return fields


def _jobset_rules_of_cluster(config: Config) -> dict[str, Any]:
    refused = Commented(
        f"exit code {int(Exit.BAD_INPUT)} ", "Wrong configuration or data: trying again changes nothing."
    )
    ignore = Commented("RestartJobSetAndIgnoreMaxRestarts", "Saved and left, or lost its node: not a failure.")
    return {
        "maxRestarts": Commented(config.gke.restarts, "For failures; each restart goes on from the newest checkpoint."),
        "rules": [
            {
                "name": "refused",
                "action": "FailJobSet",
                "onJobFailureReasons": ["PodFailurePolicy"],
                "onJobFailureMessagePatterns": [refused],
            },
            {"name": "savedOrDisrupted", "action": ignore, "onJobFailureReasons": ["PodFailurePolicy"]},
        ],
    }


def _job_rules_of_cluster() -> dict[str, Any]:
    refused = "Refused its configuration or data. The JobSet's first rule knows it by this exit code."
    rules = [
        _on_exit("FailJob", Exit.BAD_INPUT, refused),
        _on_exit("FailJob", Exit.SAVED, "Asked to stop (maintenance, preemption), and saved."),
        _on_exit("Ignore", Exit.LOST_PEER, "Lost another host: that host's end decides, not this one's."),
        _on_disruption("FailJob"),
    ]
    return {
        "backoffLimit": Commented(0, "A host that fails ends the Job; the JobSet then starts all hosts again."),
        "podFailurePolicy": {"rules": rules},
    }


def _job_rules_of_launcher() -> dict[str, Any]:
    return {
        "backoffLimitPerIndex": Commented(
            0, "A host that fails does not end the others: tpu-launch finds out who was first, and ends them itself."
        ),
        "podReplacementPolicy": Commented("Failed", "A host that is being stopped has not failed yet: it may save."),
    }


def job(config: Config, work: Workload) -> dict[str, Any]:
    """The Indexed Job of a workload, restarted by the cluster."""
    fields = metadata(config, work)
    if config.gke.queue:
        fields["labels"] = {**fields["labels"], "kueue.x-k8s.io/queue-name": config.gke.queue}
    rules = [
        _on_exit("FailJob", Exit.BAD_INPUT, "Refused its configuration or data: trying again changes nothing."),
        _on_exit("Ignore", Exit.SAVED, "Asked to stop (maintenance, preemption), and saved: not a failure."),
        _on_exit("Ignore", Exit.LOST_PEER, "Lost another host: that host's end counts, not this one's."),
        _on_disruption("Ignore"),
    ]
    return {
        "apiVersion": "batch/v1",
        "kind": "Job",
        "metadata": fields,
        "spec": {
            "ttlSecondsAfterFinished": Commented(KEPT_SECONDS, "An ended run is removed after three days."),
            "parallelism": config.accelerator.hosts,
            "completions": Commented(config.accelerator.hosts, "One pod a host."),
            "completionMode": Commented(
                "Indexed", f"Pod number i is host i and called {host_name(work.name, Kind.JOB, '<i>')}."
            ),
            "backoffLimit": Commented(
                config.gke.restarts,
                "For failures; a host's pod is made again and all go on from the newest checkpoint.",
            ),
            "podFailurePolicy": {"rules": rules},
            "template": pod_template(config, work, Kind.JOB),
        },
    }


def service(config: Config, work: Workload) -> Any:
    """The headless Service that gives the pods of a Job their names."""
    headless = "Headless: it only gives each pod a name, by which the hosts find each other."
    node = {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": metadata(config, work),
        "spec": {
            "clusterIP": Commented("None", headless),
            "publishNotReadyAddresses": True,
            "selector": {"batch.kubernetes.io/job-name": work.name},
            "ports": [{"name": name, "port": number} for name, number in PORTS],
        },
    }
    return Commented(node, "The hosts' names.")


def _on_exit(action: str, code: Exit, comment: str) -> Any:
    condition = {"containerName": CONTAINER, "operator": "In", "values": [int(code)]}
    return Commented({"action": action, "onExitCodes": condition}, comment)


def _on_disruption(action: str) -> Any:
    conditions = [{"type": "DisruptionTarget", "status": "True"}]
    return Commented({"action": action, "onPodConditions": conditions}, "Its node was preempted, drained or lost.")
