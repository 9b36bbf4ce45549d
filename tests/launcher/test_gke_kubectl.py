"""The meaning of kubectl's errors, of pods and of logs. The errors are those of kubectl 1.32 and API servers."""

import json
import re
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest

from launcher.errors import Exit, LaunchError
from launcher.gke import pods
from launcher.gke.kubectl import Kubectl, NotTaken, explain
from launcher.gke.pods import PodWatch, json_stream
from launcher.provider import ContainerState, LogLine
from launcher.providers import this_machine
from tests.launcher.emulated_gcloud import Clock
from tests.processes import wait_until

ERRORS = [
    ('error: context "x" does not exist', Exit.BAD_INPUT, "no context x"),
    ("error: current-context is not set", Exit.BAD_INPUT, "knows no cluster"),
    ("The connection to the server localhost:8080 was refused", Exit.BAD_INPUT, "knows no cluster"),
    ("Unable to connect to the server: getting credentials: exec: executable gke-gcloud-auth-plugin not found",
     Exit.BAD_INPUT, "install gke-gcloud-auth-plugin"),
    ("print credential failed: (err: ERROR: HTTPSConnectionPool(host='oauth2.googleapis.com'): Max retries exceeded)\n"
     "Unable to connect to the server: getting credentials: exec: it failed", Exit.CLOUD_ERROR, "kubectl's login (Max"),
    ("error: You must be logged in to the server (Unauthorized)", Exit.PERMISSION, "gcloud auth login"),
    ('Error from server (Forbidden): jobsets.jobset.x-k8s.io is forbidden: User "a@b.c" cannot list resource "jobsets" '
     'in API group "jobset.x-k8s.io" in the namespace "research"', Exit.PERMISSION,
     "a@b.c may not list jobsets in namespace research"),
    ('Error from server (Forbidden): error when creating "STDIN": pods "x" is forbidden: exceeded quota: tpus, '
     "requested: requests.google.com/tpu=8, used: requests.google.com/tpu=8, limited: requests.google.com/tpu=8",
     Exit.QUOTA, "ResourceQuota tpus is used up, requested: requests.google.com/tpu=8"),
    ('error: the server doesn\'t have a resource type "jobsets"', Exit.BAD_INPUT, "JobSet: its administrator installs"),
    ('error: resource mapping not found for name: "demo" namespace: "default" from "STDIN": no matches for kind '
     '"JobSet" in version "jobset.x-k8s.io/v1alpha2"\nensure CRDs are installed first', Exit.BAD_INPUT,
     "the cluster has no JobSet"),
    ('Error from server (NotFound): namespaces "n" not found', Exit.BAD_INPUT, "kubectl create namespace n"),
    ('Error from server (BadRequest): error when creating "STDIN": JobSet in version "v1alpha2" cannot be handled as a '
     'JobSet: strict decoding error: unknown field "spec.failurePolicy.rules[0].onJobFailureMessagePatterns"',
     Exit.BAD_INPUT, "older than the release that the manifest needs"),
    ('Error from server (Forbidden): admission webhook "a.io" denied the request: long', Exit.PERMISSION, "a.io"),
    ('Error from server: admission webhook "a.io" denied the request: long', Exit.BAD_INPUT, "a.io refuses it: long"),
    ('Error from server (NotFound): jobsets "demo" not found', Exit.CONFLICT, "run again"),
    ('Error from server (AlreadyExists): jobsets "demo" already exists', Exit.CONFLICT, "already exists"),
    ('The JobSet "demo" is invalid: spec.replicatedJobs[0].name: Required value', Exit.BAD_INPUT, "Required value"),
    ("Unable to connect to the server: x509: certificate signed by unknown authority", Exit.CLOUD_ERROR, "not trusted"),
    ("The connection to the server 10.0.0.2 was refused", Exit.CLOUD_ERROR, "does not answer (10.0.0.2)"),
    ("Unable to connect to the server: dial tcp 34.1.2.3:443: i/o timeout", Exit.CLOUD_ERROR, "does not answer"),
    ("Unable to connect to the server: Client.Timeout exceeded while awaiting headers", Exit.CLOUD_ERROR, "not answer"),
    ("Error from server: Get the log: dial tcp 10.4.0.1:10250: i/o timeout", Exit.CLOUD_ERROR, "does not answer"),
    ("Error from server (TooManyRequests): has asked us to try again later", Exit.CLOUD_ERROR, "try again later"),
    ("Error from server (ServiceUnavailable): unable to handle the request", Exit.CLOUD_ERROR, "unable to handle"),
    ("an unknown error", Exit.CLOUD_ERROR, "an unknown error"),
    ("", Exit.CLOUD_ERROR, "it gave no reason"),
]  # fmt: skip


@pytest.mark.parametrize(("said", "code", "words"), ERRORS, ids=[said[:40] for said, _, _ in ERRORS])
def test_errors_of_kubectl_say_what_to_do(said: str, code: Exit, words: str) -> None:
    error = explain(said, ["kubectl", "get", "jobsets"])
    assert error.exit_code is code, str(error)
    assert words in str(error)
    assert isinstance(error, NotTaken) == bool(re.search("server: dial|^The conn|TooMany|credentials:|logged", said))
    assert "{" not in str(error)


def test_commands_name_the_context_and_are_bounded() -> None:
    command = "kubectl --context c --namespace n --request-timeout=20s get pods"
    assert Kubectl(this_machine(), "c", "n").argv("get", "pods") == command.split()
    assert "--context" not in Kubectl(this_machine(), None, "n").argv("get", "pods")


def pod(
    phase: str, state: dict[str, Any] | None = None, conditions: list[dict[str, str]] | None = None, **status: str
) -> pods.Pod:
    statuses = [] if state is None else [{"name": "trainer", "imageID": "i", "state": state}]
    metadata = {"name": "p", "uid": "u", "creationTimestamp": "2026-11-20T00:00:00Z", "labels": {pods.INDEX: "3"}}
    told = {"phase": phase, "containerStatuses": statuses, "conditions": conditions or [], **status}
    return pods.parse({"metadata": metadata, "status": told})


def ended(code: int, reason: str = "Error", message: str = "") -> dict[str, Any]:
    return {"terminated": {"exitCode": code, "reason": reason, "message": message, "startedAt": "a", "finishedAt": "b"}}


WHY = "EvictionByEvictionAPI: Eviction API: evicting"
TAKEN = [{"type": "DisruptionTarget", "status": "True", "reason": WHY[:21], "message": WHY[23:]}]
EXITED = ContainerState("exited", 3, False, "a", "b", image="i")
RUNS = pod("Running", {"running": {}})
RUNNING, GONE = ContainerState("running", image="i"), ContainerState("absent")


@pytest.mark.parametrize(
    ("found", "over", "state", "problem"),
    [
        (pod("Running", {"running": {"startedAt": "a"}}), False, replace(RUNNING, started_at="a"), ""),
        (replace(RUNS, gone=True), True, GONE, ""),
        (pod("Failed", ended(3, message="lines of its log")), True, EXITED, ""),
        (pod("Running", ended(3)), True, EXITED, ""),
        (pod("Failed", ended(137, "OOMKilled")), True, replace(EXITED, exit_code=137, oom_killed=True), ""),
        (pod("Failed", ended(128, "StartError", "no x")), True, replace(EXITED, exit_code=128, error="no x"), ""),
        (pod("Failed", {"terminated": {"exitCode": 3, "startedAt": None, "finishedAt": None}}), True,
         ContainerState("exited", 3, image="i"), ""),
        (pod("Pending"), False, ContainerState("created"), ""),
        (replace(pod("Pending"), gone=True), True, GONE, ""),
        (pod("Succeeded"), True, GONE, ""),
        (pod("Failed", {"waiting": {}}, reason="OutOfcpu"), True, None, "its pod failed: OutOfcpu"),
        (pod("Failed"), True, None, "its pod failed: no reason given"),
        *((pod("Failed", ended(code), TAKEN), True, None, f"its pod was disrupted: {WHY}") for code in (137, 143, 1)),
        *((pod("Failed", ended(code), TAKEN), True, replace(EXITED, exit_code=code), "") for code in (0, 2, 75)),
        (pod("Failed", reason="Evicted", message="The node was low on resource: memory."), True, None,
         "its pod was disrupted: Evicted: The node was low on resource: memory."),
        (pod("Running", {"running": {}}, TAKEN), False, RUNNING, ""),  # it may save
        (replace(pod("Running", {"running": {}}, reason="Evicted"), gone=True), True, GONE, ""),  # Failed alone tells
    ],
)  # fmt: skip
def test_the_state_of_a_host_follows_from_its_container_its_pods_phase_and_its_disruption(
    found: pods.Pod, over: bool, state: ContainerState | None, problem: str
) -> None:
    assert (found.worker, found.ended, found.state()) == (3, over, (state, problem))


@pytest.mark.parametrize(
    ("state", "started", "words"),
    [
        ({}, False, "it is not scheduled yet"),
        ({"waiting": {"reason": "ErrImagePull"}}, False, "ErrImagePull"),
        ({"waiting": {"reason": "ErrImagePull", "message": "try later"}}, False, "ErrImagePull: try later"),
        ({"running": {}}, True, "it is not scheduled yet"),
    ],
)
def test_a_pod_that_has_not_started_says_why(state: dict[str, Any] | None, started: bool, words: str) -> None:
    found = pod("Pending", state)
    assert (found.started, pods.describe_waiting({3: found})) == (started, f"host 3: {words}")


@pytest.mark.parametrize(
    ("reason", "message", "code", "words"),
    [
        ("ImagePullBackOff", "resolve reference i@sha256:a403: not found", Exit.BAD_INPUT, "a403: not found"),
        ("ImagePullBackOff", "/v2/repo/timeout/manifests/sha256:1: not found", Exit.BAD_INPUT, "timeout/m"),
        ("ImagePullBackOff", "unexpected status: 503 Service Unavailable", None, ""),
        ("ImagePullBackOff", "failed to fetch oauth token: 403 Forbidden", Exit.PERMISSION, "imagePullSecrets for"),
        ("InvalidImageName", "", Exit.BAD_INPUT, "can't pull host/repo"),
        ("CreateContainerConfigError", 'secret "x" not found', Exit.BAD_INPUT, 'secret "x" not found'),
        ("CreateContainerConfigError", "failed to sync secret cache: timed out waiting for the condition", None, ""),
        ("CreateContainerError", "", Exit.BAD_INPUT, "CreateContainerError"),
        ("ErrImagePull", "", None, ""),
    ],
)  # fmt: skip
def test_a_pod_that_can_never_start_is_an_error(reason: str, message: str, code: Exit | None, words: str) -> None:
    waiting = pod("Pending", {"waiting": {"reason": reason, "message": message}})
    error = pods.find_start_error(waiting, "host/repo/timeout@sha256:1")
    assert (error and error.exit_code) is code
    assert words in str(error)


def test_hosts_that_wait_for_the_same_are_told_together() -> None:
    why = {"reason": "Unschedulable", "message": "0/3 nodes are available"}
    waiting = pod("Pending", None, [{"type": "PodScheduled", "status": "False", **why}])
    assert pods.find_start_error(waiting, "i") is None
    assert pods.describe_waiting({0: waiting, 1: waiting, 2: None, 3: pod("Pending")}) == (
        "hosts 0, 1: no node takes its pod (Unschedulable: 0/3 nodes are available); host 2: its pod does not exist "
        "yet; host 3: it is not scheduled yet"
    )


def test_timestamps_of_lines_compare_as_text() -> None:
    assert pods.parse_log_line("2026-11-20T08:00:00.5Z x").timestamp == "2026-11-20T08:00:00.500000000Z"
    line = pods.parse_log_line("2026-11-20T09:00:00.123456789+01:00 x y")
    assert line == LogLine("2026-11-20T08:00:00.123456789Z", "x y")
    assert pods.parse_log_line("no time") == LogLine("", "no time")


def test_a_line_cut_by_the_limit_is_left_out() -> None:
    text = "2026-11-20T08:00:00.000000000Z one\n2026-11-20T08:00:00.000000001Z tw"
    for limit, was_cut, texts in ((len(text), True, ["one"]), (1000, False, ["one", "tw"])):
        window, cut = pods.parse_log(text, limit, ended=True)
        assert (cut, [line.text for line in window.lines]) == (was_cut, texts)
    assert [line.text for line in pods.parse_log(text, 1000, ended=False)[0].lines] == ["one"]


class WatchedCluster:
    """kubectl, over a cluster that has `pods`; each log has two lines, and a watch ends when it is closed."""

    def __init__(self) -> None:
        self.clock, self.pods, self.followed = Clock(), list[dict[str, Any]](), list[str]()
        self.machine = replace(this_machine(), clock=self.clock)
        self.refusals, self.breaks = 0, False  # of the next logs; each log, after its lines
        self.watch = PodWatch(self, "a=b")  # type: ignore[arg-type]

    def show(self, uid: str, **metadata: str) -> None:
        labels = {pods.INDEX: "0"}
        status = {"phase": "Running", "containerStatuses": [{"name": "trainer", "state": {"running": {}}}]}
        self.pods = [{"metadata": {"name": uid, "uid": uid, "labels": labels, **metadata}, "status": status}]

    def call(self, *_words: str) -> str:
        return json.dumps({"items": self.pods})

    def follow(self, *words: str, on_line: Callable[[str], None], on_start: Callable[..., object], **_: float) -> None:
        self.followed.append(" ".join([*words[:2], *(word for word in words if "since" in word)]))
        ended = threading.Event()
        on_start(ended.set)
        if words[0] == "logs":
            if self.refusals:
                self.refusals -= 1
                on_line("Error from server (TooManyRequests): has asked us to try again later\n")
                raise LaunchError("too many requests")
            threading.Event().wait(0.1)  # the log comes later than its pod's end is seen
            for second in range(2):
                on_line(f"2026-11-20T08:00:0{second}Z {second}\n")
            if self.breaks:
                raise LaunchError("unexpected EOF")
        else:
            assert ended.wait(20)


@pytest.fixture
def cluster() -> Iterator[WatchedCluster]:
    cluster = WatchedCluster()
    yield cluster
    cluster.watch.close()


def test_a_watch_keeps_the_log_and_the_end_of_a_deleted_pod(cluster: WatchedCluster) -> None:
    watch = cluster.watch
    watch.note_log_start(0, "2026-11-20T08:00:00Z")
    cluster.show("one")
    assert watch.final_lines(watch.pods()[0], None) is None, "its log can be read"
    cluster.show("one", deletionTimestamp="2026-11-20T08:00:00Z")
    assert not watch.pods()[0].deleting, "no list is as old as ten seconds"
    assert watch.pods(fresh=True)[0].deleting
    cluster.clock.sleep(11)
    cluster.pods = []
    gone = watch.pods()[0]
    assert gone.gone
    assert [line.text for line in watch.final_lines(gone, "2026-11-20T08:00:01.000000000Z")] == ["1"]
    assert watch.final_lines(replace(gone, uid="two"), None) == [], "it vanished unseen"
    cluster.show("three", creationTimestamp="2026-11-20T08:00:00Z", deletionTimestamp="2026-11-20T08:00:00Z")
    assert watch.final_lines(replace(watch.pods(fresh=True)[0], phase="Failed"), None)
    watch.pods(fresh=True)
    watch.close()
    watch.pods(fresh=True)
    since = "--since-time=2026-11-20T08:00:00Z"
    assert sorted(cluster.followed) == ["get pods", f"logs one {since}", f"logs three {since}"]
    wait_until(lambda: all(thread.name != "watch-pods" for thread in threading.enumerate()), 10)


def test_a_late_event_does_not_undo_how_a_pod_ended() -> None:
    over, lost = pod("Failed", ended(3)), replace(pod("Failed", None, TAKEN), gone=True)
    told = replace(over, gone=True, disruption=lost.disruption)
    for first, second, kept in ((over, RUNS, over), (over, lost, told), (told, RUNS, told), (lost, over, over)):
        watch = WatchedCluster().watch
        watch._record_pod(first)
        watch._record_pod(second)
        assert [*watch._pods.values()] == [kept]


def test_a_pod_that_appears_during_a_list_is_not_gone(cluster: WatchedCluster, monkeypatch: pytest.MonkeyPatch) -> None:
    def answer_late(*_words: str) -> str:
        cluster.watch._record_pod(RUNS)
        return '{"items": []}'

    monkeypatch.setattr(cluster, "call", answer_late)
    assert [cluster.watch.pods(fresh=True)[3].gone for _ in range(2)] == [False, True]


@pytest.mark.parametrize("gone", [False, True])
def test_the_log_of_a_pod_that_is_being_deleted_is_asked_for_until_the_cluster_gives_it(
    cluster: WatchedCluster, monkeypatch: pytest.MonkeyPatch, gone: bool
) -> None:
    """Keeps its silence from counting as a hang; nobody has the log of a pod that is gone."""
    watch = cluster.watch
    monkeypatch.setattr("launcher.gke.pods._LIST_EVERY", 0.1)
    cluster.refusals, cluster.breaks = 1000 if gone else 2, True
    cluster.show("one", deletionTimestamp="2026-11-20T08:00:00Z")
    pod = watch.pods()[0]
    if gone:
        cluster.pods = []
        watch.pods(fresh=True)
    assert watch._final_logs[0].ended.wait(20)
    assert [line.text for line in watch.final_lines(pod, None) or []] == ([] if gone else ["0", "1"])


def test_watched_objects_are_parsed_in_both_forms_without_warnings() -> None:
    seen: list[dict[str, Any]] = []
    add = json_stream(seen.append)
    deleted = ["{", '    "type": "DELETED",', '    "object": {', "    }", "}"]
    for line in ['{"type":"ADDED"}', "warning: something", *deleted, '{"type":"MODIFIED"}']:
        add(line)
    assert [each["type"] for each in seen] == ["ADDED", "DELETED", "MODIFIED"]
