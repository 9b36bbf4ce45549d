"""The controllers of JobSet and of Indexed Jobs, and what GKE adds to their pods. Each pass handles all objects.

Sources: kubernetes.io/docs/concepts/workloads/controllers/job (pod failure policy, back-off limits, Indexed completion
mode), and the documentation of JobSet's failure policy. There are no back-off delays.
"""

import re
import secrets
from typing import Any

from tests.kubernetes.cluster.store import Object, Store, condition, now, set_condition

INDEX = "batch.kubernetes.io/job-completion-index"
RESTARTS = "jobset.sigs.k8s.io/restart-attempt"
JOBSET = "jobset.sigs.k8s.io/jobset-name"
CONTAINER_DEVICES = "google.com/tpu"


def reconcile(store: Store, *, webhook: bool = True) -> None:
    """Makes one pass. `webhook`: the cluster has GKE's webhook, which sets the worker ids of several hosts."""
    for jobset in store.all("jobsets"):
        _jobset(store, jobset)
    for job in store.all("jobs"):
        _job(store, job, webhook)


# -- JobSet


def _jobset(store: Store, jobset: Object) -> None:
    name = jobset["metadata"]["name"]
    jobs = store.all("jobs", {JOBSET: name})
    if "deletionTimestamp" in jobset["metadata"]:
        for job in jobs:
            _delete_job(store, job)
        if not jobs:
            for service in store.all("services", {JOBSET: name}):
                store.remove("services", service["metadata"]["name"])
            store.remove("jobsets", name)
        return
    status = jobset.setdefault("status", {})
    if jobset["spec"].get("suspend") or status.get("terminalState"):
        return
    subdomain = jobset["spec"].get("network", {}).get("subdomain", name)
    if store.get("services", subdomain) is None:
        metadata = {"name": subdomain, "labels": {JOBSET: name}}
        store.create("services", {"metadata": metadata, "spec": {"clusterIP": "None"}})
    restarts = status.setdefault("restarts", 0)
    status.setdefault("restartsCountTowardsMax", 0)
    current = [job for job in jobs if job["metadata"]["labels"][RESTARTS] == str(restarts)]
    for old in [job for job in jobs if job not in current]:
        _delete_job(store, old)
    if current:
        failed = [(job, found) for job in current if (found := condition(job, "Failed"))]
        if failed:
            _fail(jobset, failed[0][1])
        elif all(condition(job, "Complete") for job in current):
            _end(jobset, "Completed", "AllJobsCompleted", "jobset completed successfully")
    elif not jobs:  # the old Jobs and their pods are gone
        for each in jobset["spec"]["replicatedJobs"]:
            for index in range(each.get("replicas", 1)):
                store.create("jobs", _job_of(jobset, each, index, restarts))
    store.put("jobsets", jobset)


def _fail(jobset: Object, failure: Object) -> None:
    policy = jobset["spec"].get("failurePolicy", {})
    status = jobset["status"]
    action = "RestartJobSet"
    for rule in policy.get("rules", []):
        reasons, patterns = rule.get("onJobFailureReasons", []), rule.get("onJobFailureMessagePatterns", [])
        has_reason = not reasons or failure["reason"] in reasons
        if has_reason and (not patterns or any(re.search(each, failure["message"]) for each in patterns)):
            action = rule["action"]
            break
    if action == "FailJobSet":
        _end(jobset, "Failed", "FailJobSetFailurePolicyAction", failure["message"])
    elif action == "RestartJobSetAndIgnoreMaxRestarts":
        status["restarts"] += 1
    elif status["restartsCountTowardsMax"] >= policy.get("maxRestarts", 0):
        _end(jobset, "Failed", "ReachedMaxRestarts" if policy.get("maxRestarts") else "FailedJobs", failure["message"])
    else:
        status["restarts"] += 1
        status["restartsCountTowardsMax"] += 1


def _end(jobset: Object, state: str, reason: str, message: str) -> None:
    jobset["status"]["terminalState"] = state
    set_condition(jobset, state, reason, message)


def _job_of(jobset: Object, replicated: Object, index: int, restarts: int) -> Object:
    name, template = jobset["metadata"]["name"], replicated["template"]
    labels = {JOBSET: name, "jobset.sigs.k8s.io/replicatedjob-name": replicated["name"]}
    labels |= {"jobset.sigs.k8s.io/job-index": str(index), RESTARTS: str(restarts)}
    pod = template["spec"]["template"]
    pod["metadata"] = {**pod.get("metadata", {}), "labels": {**pod.get("metadata", {}).get("labels", {}), **labels}}
    pod["spec"]["subdomain"] = jobset["spec"].get("network", {}).get("subdomain", name)
    of_job = {**template.get("metadata", {}).get("labels", {}), **labels}
    return {
        "metadata": {"name": f"{name}-{replicated['name']}-{index}", "labels": of_job},
        "spec": {**template["spec"]},
    }


def _delete_job(store: Store, job: Object) -> None:
    """Deletes in the foreground: the pods end first, each with its grace period."""
    pods = _pods(store, job)
    for pod in pods:
        delete_pod(store, pod["metadata"]["name"])
    job["metadata"].setdefault("deletionTimestamp", now())
    store.put("jobs", job)
    if not pods:
        store.remove("jobs", job["metadata"]["name"])


# -- Job


def _pods(store: Store, job: Object) -> list[Object]:
    uid = job["metadata"]["uid"]
    return [pod for pod in store.all("pods") if any(each["uid"] == uid for each in pod["metadata"]["ownerReferences"])]


def _job(store: Store, job: Object, webhook: bool) -> None:
    pods = _pods(store, job)
    for pod in pods:
        if _over(pod) and not pod["metadata"].get("counted"):
            _count(job, pod)
            pod["metadata"]["counted"] = True  # stands for the Job controller's finalizer
            store.put("pods", pod)
        if _over(pod) and "deletionTimestamp" in pod["metadata"]:
            store.remove("pods", pod["metadata"]["name"])
    if "deletionTimestamp" in job["metadata"] or condition(job, "Failed") or condition(job, "Complete"):
        store.put("jobs", job)
        return
    status, spec = job.setdefault("status", {}), job["spec"]
    succeeded, failed = set(status.get("succeededIndexes", [])), set(status.get("failedIndexesList", []))
    target = condition(job, "FailureTarget")
    active = [pod for pod in pods if not _over(pod)]
    if target:
        for pod in active:
            delete_pod(store, pod["metadata"]["name"])
        if not active:
            set_condition(job, "Failed", target["reason"], target["message"])
    elif len(succeeded) == spec["completions"]:
        set_condition(job, "Complete", "CompletionsReached", "Reached expected number of succeeded pods")
    elif len(succeeded | failed) == spec["completions"]:
        set_condition(job, "Failed", "FailedIndexes", "Job has failed indexes")
    else:
        busy = {int(pod["metadata"]["annotations"][INDEX]) for pod in active}
        for index in range(spec["completions"]):
            if index not in busy | succeeded | failed:
                store.create("pods", _pod_of(job, index, webhook))
    store.put("jobs", job)


def _over(pod: Object) -> bool:
    return pod["status"]["phase"] in ("Succeeded", "Failed")


def _count(job: Object, pod: Object) -> None:
    """Updates a Job after the end of a pod."""
    status, spec = job.setdefault("status", {}), job["spec"]
    index = int(pod["metadata"]["annotations"][INDEX])
    if pod["status"]["phase"] == "Succeeded":
        status["succeededIndexes"] = sorted({*status.get("succeededIndexes", []), index})
        return
    action, message = _judge(spec, pod)
    if action == "Ignore":
        return
    if action == "FailJob":
        if not condition(job, "FailureTarget"):
            set_condition(job, "FailureTarget", "PodFailurePolicy", message)
        return
    status["failed"] = status.get("failed", 0) + 1
    if "backoffLimitPerIndex" in spec:
        failures = status.setdefault("failuresByIndex", {})
        failures[str(index)] = failures.get(str(index), 0) + 1
        if failures[str(index)] > spec["backoffLimitPerIndex"]:
            status["failedIndexesList"] = sorted({*status.get("failedIndexesList", []), index})
    elif status["failed"] > spec.get("backoffLimit", 6) and not condition(job, "FailureTarget"):
        set_condition(job, "FailureTarget", "BackoffLimitExceeded", "Job has reached the specified backoff limit")


def _judge(spec: Object, pod: Object) -> tuple[str, str]:
    """Returns the action of the first matching rule of the pod failure policy, with Kubernetes' message."""
    full = f"{pod['metadata']['namespace']}/{pod['metadata']['name']}"
    states = {each["name"]: each["state"] for each in pod["status"].get("containerStatuses", [])}
    ended = {name: state["terminated"]["exitCode"] for name, state in states.items() if "terminated" in state}
    for number, rule in enumerate(spec.get("podFailurePolicy", {}).get("rules", [])):
        matching = f"matching {rule['action']} rule at index {number}"
        if codes := rule.get("onExitCodes"):
            code = ended.get(codes["containerName"])
            if code is not None and code != 0 and (code in codes["values"]) == (codes["operator"] == "In"):
                text = f"Container {codes['containerName']} for pod {full} failed with exit code {code} {matching}"
                return rule["action"], text
        for wanted in rule.get("onPodConditions", []):
            if condition(pod, wanted["type"]):
                return rule["action"], f"Pod {full} has condition {wanted['type']} {matching}"
    return "Count", ""


def _pod_of(job: Object, index: int, webhook: bool) -> Object:
    template, name = job["spec"]["template"], job["metadata"]["name"]
    metadata = template.get("metadata", {})
    spec: Object = {**template["spec"], "hostname": f"{name}-{index}"}
    spec["containers"] = [_injected(container, job, index, webhook) for container in spec["containers"]]
    labels = {**metadata.get("labels", {}), INDEX: str(index), "batch.kubernetes.io/job-name": name, "job-name": name}
    owner = {"apiVersion": "batch/v1", "kind": "Job", "name": name, "uid": job["metadata"]["uid"], "controller": True}
    annotations = {**metadata.get("annotations", {}), INDEX: str(index)}
    own = {"name": f"{name}-{index}-{secrets.token_hex(3)[:5]}", "labels": labels, "annotations": annotations}
    return {"metadata": {**own, "ownerReferences": [owner]}, "spec": spec, "status": {"phase": "Pending"}}


def _injected(container: Object, job: Object, index: int, webhook: bool) -> Object:
    """Adds the variables of the Job controller (the index) and of GKE, for pods that request chips: its device plugin
    sets them for a single host, its webhook for several with names (Indexed, parallelism above 1, a subdomain)."""
    added: list[Any] = [{"name": "JOB_COMPLETION_INDEX", "value": str(index)}]
    if CONTAINER_DEVICES in container.get("resources", {}).get("limits", {}):
        spec = job["spec"]
        added.append({"name": "TPU_SKIP_MDS_QUERY", "value": "true"})
        if spec["parallelism"] == 1:
            added += [{"name": "TPU_WORKER_ID", "value": "0"}, {"name": "TPU_WORKER_HOSTNAMES", "value": "localhost"}]
        elif webhook and spec["completionMode"] == "Indexed" and "subdomain" in spec["template"]["spec"]:
            subdomain = spec["template"]["spec"]["subdomain"]
            names = ",".join(f"{job['metadata']['name']}-{each}.{subdomain}" for each in range(spec["parallelism"]))
            added += [{"name": "TPU_WORKER_ID", "value": str(index)}, {"name": "TPU_WORKER_HOSTNAMES", "value": names}]
    return {**container, "env": [*container.get("env", []), *added]}


def delete_pod(store: Store, name: str, grace: int | None = None) -> None:
    """Requests the deletion of a pod, which stays until its container has ended."""
    with store.lock:
        pod = store.get("pods", name)
        if pod is None:
            return
        if not pod["metadata"].get("deletionTimestamp"):
            pod["metadata"]["deletionTimestamp"] = now()
            seconds = pod["spec"].get("terminationGracePeriodSeconds", 30) if grace is None else grace
            pod["metadata"]["deletionGracePeriodSeconds"] = seconds
            store.put("pods", pod)
