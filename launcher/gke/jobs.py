"""The JobSet that runs a workload's pods. Pure.

With `Restarts.BY_CLUSTER`, their rules decide which ends lead to a restart. The rules rest on the trainer's exit codes
(training.errors), and restart all hosts of a slice together.
"""

from typing import Any

from launcher.config import Config
from launcher.gke.commented_yaml import Commented
from launcher.gke.pod_template import pod_template
from launcher.gke.workload import CONTAINER, REPLICATED_JOB, Restarts, Workload, host_name, labels, metadata
from training.errors import Exit

_DISRUPTED = Commented(
    {"action": "FailJob", "onPodConditions": [{"type": "DisruptionTarget", "status": "True"}]},
    "Its node was preempted, drained or lost.",
)
_KEPT_SECONDS = 3 * 24 * 3600  # after which the cluster deletes ended objects


def jobset(config: Config, work: Workload, restarts: Restarts) -> dict[str, Any]:
    """Returns the JobSet of a workload: one Job with a pod per host."""
    by_cluster = restarts is Restarts.BY_CLUSTER
    template = {
        "parallelism": config.accelerator.hosts,
        "completions": Commented(config.accelerator.hosts, "One pod per host."),
        "completionMode": Commented(
            "Indexed", "Pod number i is host i; GKE tells each TPU_WORKER_ID and TPU_WORKER_HOSTNAMES."
        ),
        **(_job_rules_of_cluster() if by_cluster else _job_rules_of_launcher()),
        "template": pod_template(config, work),
    }
    replicated_job = {
        "name": REPLICATED_JOB,
        "replicas": Commented(1, "One slice."),
        "template": {"metadata": {"labels": labels(config, work)}, "spec": template},
    }
    no_restarts = {"maxRestarts": Commented(0, "tpu-launch decides whether to make another attempt.")}
    return {
        "apiVersion": "jobset.x-k8s.io/v1alpha2",
        "kind": "JobSet",
        "metadata": _jobset_metadata(config, work),
        "spec": {
            "ttlSecondsAfterFinished": Commented(_KEPT_SECONDS, "The cluster deletes an ended run after three days."),
            "network": {
                "enableDNSHostnames": Commented(True, f"The name of host i is {host_name(work.name, '<i>')}."),
                "publishNotReadyAddresses": True,
                "subdomain": work.name,
            },
            "failurePolicy": _jobset_rules_of_cluster(config) if by_cluster else no_restarts,
            "replicatedJobs": [replicated_job],
        },
    }


def _jobset_metadata(config: Config, work: Workload) -> dict[str, Any]:
    """Returns the metadata with Kueue's queue and, for several hosts, exclusive use of a node pool."""
    fields = metadata(config, work)
    if config.gke.queue:
        queue = Commented(config.gke.queue, "Kueue admits all hosts of the run together.")
        fields["labels"] = {**fields["labels"], "kueue.x-k8s.io/queue-name": queue}
    if config.accelerator.hosts > 1:
        comment = "A slice is a node pool: all hosts of this run in one node pool, and no other run in it."
        topology = Commented("cloud.google.com/gke-nodepool", comment)
        fields["annotations"] = {"alpha.jobset.sigs.k8s.io/exclusive-topology": topology}
    return fields


def _jobset_rules_of_cluster(config: Config) -> dict[str, Any]:
    """Returns the JobSet's failure policy if the cluster decides about restarts."""
    refused = Commented(f"exit code {int(Exit.BAD_INPUT)} ", "Bad configuration or data: a restart changes nothing.")
    ignore = Commented("RestartJobSetAndIgnoreMaxRestarts", "A host saved and left, or lost its node: not a failure.")
    return {
        "maxRestarts": Commented(
            config.gke.restarts, "After failures; each restart resumes from the newest checkpoint."
        ),
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
    """Returns the Job's rules if the cluster decides about restarts: which exit codes fail it; no pod is retried."""
    refused = "Bad configuration or data. The JobSet's first rule matches this exit code."
    rules = [
        _on_exit("FailJob", Exit.BAD_INPUT, refused),
        _on_exit("FailJob", Exit.SAVED, "Asked to stop (maintenance, preemption), and saved."),
        _on_exit("Ignore", Exit.LOST_PEER, "Lost another host: the end of that host decides."),
        _DISRUPTED,
    ]
    return {
        "backoffLimit": Commented(0, "A failed host ends the Job; the JobSet then restarts all hosts."),
        "podFailurePolicy": {"rules": rules},
    }


def _job_rules_of_launcher() -> dict[str, Any]:
    """Returns the Job's rules if tpu-launch decides about restarts: no pod is retried, none replaced while it saves."""
    return {
        "backoffLimitPerIndex": Commented(
            0, "A failed host does not end the others: tpu-launch finds the first failure, and ends them itself."
        ),
        "podReplacementPolicy": Commented(
            "Failed", "A host that is being stopped may still save: it has not failed yet."
        ),
    }


def _on_exit(action: str, code: Exit, comment: str) -> Any:
    condition = {"containerName": CONTAINER, "operator": "In", "values": [int(code)]}
    return Commented({"action": action, "onExitCodes": condition}, comment)
