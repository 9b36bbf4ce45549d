"""Starting an attempt on GKE: a JobSet owns the objects it reads, and waiting for nodes has a time-out of its own.

kubectl is a script here; tests/rehearsal/test_gke_runs.py runs the real one."""

import json
import re
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
from hypothesis import given
from hypothesis import strategies as st

from launcher.cli.options import _fix_context
from launcher.errors import Exit, LaunchError
from launcher.gke.manifest import literal
from launcher.gke.pods import INDEX
from launcher.gke.provider import Gke
from launcher.gke.workload import LABEL_RUN
from launcher.provider import Attempt, Observation
from launcher.providers import this_machine
from launcher.run.events import AttemptBegan
from tests.kubernetes.cluster.nodes import expand
from tests.kubernetes.golden import IMAGE
from tests.launcher.run_files import SLICE, load_text, new_run
from tests.launcher.script_host import write_program
from tests.processes import wait_until
from training.machine import Clock
from training.telemetry.progress_line import ProgressLine

FILE = f"""\
project: p
zone: us-central2-b
slice: {{name: two, accelerator_type: v4-16, create_minutes: CREATE, stockout_minutes: 0.01}}
image: {{reference: '{IMAGE}'}}
run: {{command: [train], start_minutes: START}}
"""
KUBECTL = """
cd "$(dirname "$0")" || exit 9
echo "$*" >>calls
for refused in refused-*; do
  case "$*" in *" ${refused#refused-} "*) [ ! -f slow ] || sleep 0.3; cat "$refused" >&2; exit 1 ;; esac
done
case "$*" in
  *current-context) cat context ;;
  *--watch*) [ ! -f event ] || cat event; exec sleep 60 ;;
  *" exec "*) [ -f progress ] && cat progress ;;
  *" logs "*) echo "2026-01-01T00:00:00.5Z a line" ;;
  *get\\ events*) cat refusal ;;
  *jsonpath*) echo the-uid ;;
  *get\\ configmaps*) echo configmap/two-0 ;;
  *"output name"*) [ ! -f left ] || cat left ;;
  *get\\ pods*) cat pods ;;
  *get\\ jobsets*) cat jobsets ;;
  *create*) cat >/dev/null ;;
esac
"""
ATTEMPT = Attempt("two-0101-000000-0000", 0, IMAGE, ("train",), {}, host_secret="s" * 64)
CONTAINER, JOBSET = ATTEMPT.container, f"{ATTEMPT.run_id}-0"
NO_ANSWER = "Unable to connect to the server: dial tcp 34.1.2.3:443: i/o timeout\n"


class Cluster:
    """Answers as kubectl: at first with two running pods and no JobSet; files of `folder` change its answers."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.said, self.opened = folder, list[str](), list[Gke]()
        self.show_jobsets()
        self.show("a", "b")

    def show(self, *nodes: str, started: bool = True, ended: Any = (), taken: Any = ()) -> None:
        """Shows a pod for each node; an empty name is an unschedulable pod."""
        over = {"terminated": {"exitCode": 3, "finishedAt": "2026-01-01T00:00:01Z"}}
        running = {"running": {"startedAt": "2026-01-01T00:00:00Z"}} if started else {}
        waits = {"type": "PodScheduled", "status": "False", "reason": "Unschedulable", "message": "0/0 nodes"}
        lost = {"type": "DisruptionTarget", "status": "True", "reason": "DeletionByPodGC"}
        pods = []
        for worker, node in enumerate(nodes):
            phase = "Running" if node and started else "Pending"
            status: dict[str, Any] = {"phase": phase, "conditions": [lost] * (worker in taken) if node else [waits]}
            if node:
                status["containerStatuses"] = [{"name": "trainer", "state": over if worker in ended else running}]
            metadata = {"name": f"pod-{worker}", "uid": str(worker), "labels": {INDEX: str(worker)}}
            pods.append({"metadata": metadata, "spec": {"nodeName": node} if node else {}, "status": status})
        self.write("pods.new", json.dumps({"items": pods}))
        (self.folder / "pods.new").replace(self.folder / "pods")

    def show_jobsets(self, *names: str, run: str = ATTEMPT.run_id, **status: str) -> None:
        labels = {LABEL_RUN: run}
        each = [{"metadata": {"name": name, "labels": labels}, "spec": {}, "status": status} for name in names]
        self.write("jobsets", json.dumps({"items": each}))

    def write(self, file: str, text: str) -> None:
        (self.folder / file).write_text(text)

    def calls(self, verb: str) -> list[str]:
        return [call for call in (self.folder / "calls").read_text().splitlines() if f" {verb} " in call]

    @cached_property
    def gke(self) -> Gke:
        return self.new(1, 1)

    def new(self, create: float, start: float, section: str = "") -> Gke:
        """Returns a provider with these time-outs, in minutes."""
        text = FILE.replace("CREATE", str(create)).replace("START", str(start)) + section
        self.opened.append(Gke(load_text(self.folder, text), self.said.append, this_machine()))
        return self.opened[-1]

    def observe(self, worker: int, *, progress: bool = False) -> Observation:
        return self.gke.observe(worker, CONTAINER, None, progress=progress)


@pytest.fixture
def cluster(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Cluster]:
    cluster = Cluster(write_program(tmp_path / "bin", "kubectl", KUBECTL).parent)
    monkeypatch.setenv("PATH", f"{cluster.folder}:/usr/bin:/bin")
    monkeypatch.setattr("launcher.gke.pods._LIST_EVERY", 0.2)
    yield cluster
    for gke in cluster.opened:
        gke.close()


@pytest.mark.parametrize(("there", "is_earlier"), [(0, True), (1, False)])
def test_a_start_removes_earlier_attempts_of_a_run(cluster: Cluster, there: int, is_earlier: bool) -> None:
    cluster.show_jobsets(name := f"{ATTEMPT.run_id}-{there}")
    cluster.gke.start(replace(ATTEMPT, number=1))
    (owned,) = cluster.calls("patch")
    assert f" configmaps/{ATTEMPT.run_id}-1 secrets/{ATTEMPT.run_id}-1 " in owned
    assert "the-uid" in owned
    assert any("jobsets" in call and name in call for call in cluster.calls("delete")) == is_earlier
    assert bool(cluster.calls("create")) == is_earlier


def test_a_node_may_come_later_than_a_container_may_take_to_start(cluster: Cluster) -> None:
    cluster.show("a", "")
    threading.Timer(3.5, cluster.show, ("a", "b")).start()
    cluster.new(create=1, start=0.03).start(ATTEMPT)
    assert cluster.said == ["waiting for 1 of 2 hosts: host 1: no node takes its pod (Unschedulable: 0/0 nodes)"]


@pytest.mark.parametrize("pods", [(), ("a",)])
def test_a_jobset_that_ended_unseen_is_not_waited_for(cluster: Cluster, pods: tuple[str, ...]) -> None:
    cluster.show(*pods, ended={0})
    cluster.show_jobsets(JOBSET, terminalState="Failed")
    if pods:
        assert all(report.ok for report in cluster.gke.start(ATTEMPT))
    else:
        with pytest.raises(LaunchError, match="lost its pods") as bad:
            cluster.gke.start(ATTEMPT)
        assert bad.value.exit_code is Exit.HOST_LOST


def test_only_hosts_without_nodes_are_a_stockout(cluster: Cluster) -> None:
    for node, create, told, code in (
        ("b", 30, r"within run\.start_minutes \(0\.02\) after they had nodes", Exit.CLOUD_ERROR),
        ("", 0.02, r"no nodes for all hosts within 0\.03 minutes", Exit.STOCKOUT),
    ):
        cluster.show("a", node, started=False)
        with pytest.raises(LaunchError, match=told) as bad:
            cluster.new(create, start=0.02).start(ATTEMPT)
        assert bad.value.exit_code is code


def test_a_namespace_that_refuses_the_pods_is_told(cluster: Cluster) -> None:
    cluster.show()
    cluster.show_jobsets(JOBSET)
    transient = 'admission webhook "vpod.kb.io" denied the request: leader pod not yet scheduled'  # JobSet's
    told = {Exit.QUOTA: "exceeded quota: tpus, used: 8", Exit.BAD_INPUT: "violates PodSecurity baseline"}
    for code, why in {**told, Exit.STOCKOUT: transient}.items():
        cluster.write("refusal", f'Error creating: pods "a" is forbidden: {why}')
        with pytest.raises(LaunchError, match=r"ResourceQuota tpus|PodSecurity baseline|leader pod") as bad:
            cluster.new(0.02, start=0.02).start(ATTEMPT)
        assert bad.value.exit_code is code


def test_a_failed_creation_is_removed_and_explained(cluster: Cluster) -> None:
    cluster.write("refused-create", NO_ANSWER)
    with pytest.raises(LaunchError, match="does not answer"):
        cluster.gke.start(ATTEMPT)
    assert "jobsets" in cluster.calls("delete")[-1]
    cluster.write("refused-delete", 'Error from server (InternalError): "etcd" leader changed\n')
    with pytest.raises(LaunchError, match=r"leader changed|does not answer") as bad:
        cluster.gke.start(ATTEMPT)
    assert bad.value.transient


def test_a_start_waits_for_a_silent_cluster_until_its_time_is_over_and_for_no_permission(cluster: Cluster) -> None:
    for answer, create, code in (
        (NO_ANSWER, 0.02, Exit.CLOUD_ERROR),
        ('Error from server (Forbidden): pods is forbidden: User "a@b.c" cannot list\n', 30, Exit.PERMISSION),
    ):
        cluster.write("refused-get", answer)
        with pytest.raises(LaunchError) as bad:
            cluster.new(create, start=0.03)._wait_started(ATTEMPT, "demo", Clock())
        assert bad.value.exit_code is code
        assert ["does not answer" in text for text in cluster.said] == [True]
    with pytest.raises(LaunchError) as bad:
        cluster.gke.stop(CONTAINER, grace=1, remove=True)
    assert bad.value.exit_code is Exit.PERMISSION


def test_a_cluster_that_does_not_answer_fails_no_ended_run(cluster: Cluster) -> None:
    cluster.write("refused-get", NO_ANSWER)
    reports = cluster.gke.stop(CONTAINER, grace=1, remove=True)
    assert [(report.ok, "does not answer" in report.detail) for report in reports] == [(False, True)] * 2
    assert cluster.gke.evidence(CONTAINER, [0, 1]) == cluster.gke.stacks(CONTAINER) == {}


def test_a_missing_pod_is_not_absent_and_hosts_share_a_list(cluster: Cluster, monkeypatch: pytest.MonkeyPatch) -> None:
    cluster.show("a")
    assert cluster.observe(1) == Observation(1, None, problem="its pod is gone")
    for name in ("refused-get", "slow"):
        cluster.write(name, NO_ANSWER)
    time.sleep(0.3)
    assert "does not answer" in cluster.observe(0).problem
    monkeypatch.setattr("launcher.gke.pods._LIST_EVERY", 1.0)  # a failed list counts for 0.2 s, and takes 0.3 s
    before = len(cluster.calls("get"))
    assert all("does not answer" in cluster.observe(worker).problem for worker in range(50))
    assert len(cluster.calls("get")) - before < 10


def test_a_watch_that_was_refused_is_tried_again_and_counts_with_its_first_pod(cluster: Cluster) -> None:
    cluster.write("refused---watch", "error: You must be logged in to the server (Unauthorized)\n")
    wait_until(lambda: cluster.observe(0).problem.startswith("the cluster does not accept"), 60)
    pod = json.loads((cluster.folder / "pods").read_text())["items"][0]
    cluster.write("event", json.dumps({"type": "ADDED", "object": pod}) + "\n")
    (cluster.folder / "refused---watch").unlink()
    wait_until(lambda: cluster.observe(0).problem == "", 60)


def test_a_line_of_progress_is_read_where_it_is_asked_for_and_its_refusal_is_no_problem(cluster: Cluster) -> None:
    cluster.show("a", "b", ended={0})
    cluster.write("progress", 'progress {"step": 3}\n')
    assert cluster.observe(1).progress == cluster.observe(0, progress=True).progress == ()
    assert not cluster.calls("exec")
    assert cluster.observe(1, progress=True).progress == (ProgressLine(3),)
    assert "exec pod-1 --container trainer" in cluster.calls("exec")[0]
    cluster.write("refused-exec", "Error from server (Forbidden): cannot create resource pods/exec\n")
    seen = cluster.observe(1, progress=True)
    assert (seen.progress, seen.problem, [line.text for line in seen.lines]) == ((), "", ["a line"])


@pytest.mark.parametrize("pods", [(), ("a", "")])
def test_a_stop_before_any_pod_has_started_deletes_the_jobset(cluster: Cluster, pods: tuple[str, ...]) -> None:
    cluster.show(*pods, started=False)  # its JobSet waits for nodes, or for Kueue, and would start after the stop
    assert all(report.ok for report in cluster.gke.stop(CONTAINER, grace=1, remove=False))
    assert any("jobsets" in call and JOBSET in call for call in cluster.calls("delete"))


def test_a_stop_that_came_before_the_jobset_ends_its_start(cluster: Cluster) -> None:
    stopped = Mock(sleep=Mock(side_effect=LaunchError("it was stopped")))
    with pytest.raises(LaunchError, match="it was stopped"):
        cluster.gke.start(ATTEMPT, stopped)
    assert "jobsets" in cluster.calls("delete")[-1]
    assert not cluster.calls("create")
    cluster.show_jobsets(JOBSET)  # of an interrupted start
    with pytest.raises(LaunchError, match="it was stopped"):
        cluster.gke.start(ATTEMPT, stopped)


def test_a_start_refuses_an_image_that_nodes_can_not_pull_and_a_slice_that_another_run_uses(cluster: Cluster) -> None:
    with pytest.raises(LaunchError, match="can't pull image trainer:latest") as bad:
        cluster.gke.start(replace(ATTEMPT, image="trainer:latest"))
    assert bad.value.exit_code is Exit.BAD_INPUT
    cluster.show_jobsets("other-0", run="other")
    assert [(report.ok, report.occupied_by) for report in cluster.gke.start(ATTEMPT)] == [(False, "other")] * 2
    cluster.show_jobsets("other-0", run="other", terminalState="Failed")
    assert all(report.ok for report in cluster.gke.start(ATTEMPT))


def test_an_up_tells_of_nodes_that_are_missing_or_hidden_and_fails_without_an_answer(cluster: Cluster) -> None:
    cluster.write("left", "node/a\nnode/b\n")
    cluster.gke.create()
    cluster.write("left", "")
    cluster.gke.create()
    cluster.write("refused-nodes", 'Error from server (Forbidden): User "a" cannot list resource "nodes"\n')
    cluster.gke.create()
    assert [text[:25] for text in cluster.said] == ["the cluster has 0 of 2 no", "you may not list nodes: o"]
    cluster.write("refused-nodes", NO_ANSWER)
    with pytest.raises(LaunchError, match="does not answer"):
        cluster.gke.create()


@pytest.mark.parametrize(
    ("taken", "ended", "attempt", "state"),
    [({0, 1}, {0, 1}, 0, "PREEMPTED"), ({0, 1}, {0, 1}, 1, "READY"), ({0, 1}, {0}, 0, "READY"),
     ({0}, {0, 1}, 0, "READY"), (None, (), 0, "READY")],
)  # fmt: skip
def test_a_slice_is_preempted_once_all_its_pods_were_disrupted_and_have_ended(
    cluster: Cluster, taken: Any, ended: Any, attempt: int, state: str
) -> None:
    cluster.show(*("" if taken is None else "ab"), ended=ended, taken=taken)
    cluster.show_jobsets(f"{ATTEMPT.run_id}-{attempt}")
    cluster.observe(0)
    assert cluster.gke.describe().state == state


def test_how_a_pod_ended_is_known_without_its_log_which_may_be_gone_with_its_node(cluster: Cluster) -> None:
    cluster.show("a", "b", ended={0})
    cluster.write("refused-logs", "Error from server: dial tcp 10.4.0.1:10250: connect: no route to host\n")
    ended, runs = cluster.observe(0), cluster.observe(1)
    assert (ended.container.exit_code, runs.container) == (3, None)
    assert ("no route to host" in ended.problem, runs.not_taken) == (True, False)
    cluster.write("refused-logs", NO_ANSWER)
    assert cluster.observe(1).not_taken, "it says nothing about the host"


def test_only_pods_that_run_are_stopped_and_asked_for_stacks_and_each_host_is_reported(cluster: Cluster) -> None:
    cluster.show("a", "b", "", ended={0})
    for words in ({}, {"native": True}):
        assert set(cluster.gke.stacks(CONTAINER, **words)) == {1}
        assert ("\n native\n" in (cluster.folder / "calls").read_text()) == bool(words)
    reports = cluster.gke.stop(CONTAINER, grace=-29, remove=False)
    assert [(report.ok, report.detail) for report in reports] == [(True, ""), (False, "its pod did not end within 1 s")]
    assert [("pod-1" in call, "pod-0" in call) for call in cluster.calls("delete")] == [(True, False)]
    assert [report.ok for report in cluster.gke.stop(CONTAINER, grace=-29, remove=False, workers=[0])] == [True]
    assert len(cluster.calls("delete")) == 1
    assert not cluster.gke.known_ready(), "a cluster may lose nodes at any time"


@pytest.mark.parametrize(("section", "context"), [("", ""), ("gke: {context: east}\n", "--context east ")])
def test_the_kubectl_command_to_use_instead_of_exec_can_be_pasted(cluster: Cluster, section: str, context: str) -> None:
    gke = cluster.new(1, 1, section)
    told = f"kubectl {context}--namespace default exec pod-1 --container trainer -- sh -c 'df -h; free -g'"
    with pytest.raises(LaunchError, match=f"on GKE: {re.escape(told)}$"):
        gke.execute(CONTAINER, ["sh", "-c", "df -h; free -g"], [1], seconds=1, on_line=print)


def test_a_jobset_that_another_client_deleted_is_told_from_one_that_this_process_removed(cluster: Cluster) -> None:
    cluster.show_jobsets(JOBSET)
    cluster.observe(0)
    assert (cluster.gke.describe().state, cluster.gke.describe().trouble) == ("READY", "")
    assert cluster.gke.describe().hosts[0].startswith(JOBSET)
    cluster.show_jobsets(JOBSET, terminalState="Failed")
    assert cluster.gke.describe().hosts == ("", "")
    cluster.show_jobsets()
    assert cluster.gke.describe().state == "DELETED"
    cluster.show_jobsets(f"{ATTEMPT.run_id}-1")  # the run's launcher has started its next attempt
    assert cluster.gke.describe().state == "READY"
    removing = cluster.new(1, 1)
    removing.observe(0, CONTAINER, None)
    cluster.show_jobsets(JOBSET)
    removing.stop(CONTAINER, grace=-29, remove=True)
    cluster.show_jobsets()
    assert (removing.describe().state, removing._watches) == ("READY", {})
    cluster.observe(0)
    cluster.gke.stop(CONTAINER, grace=-29, remove=True)
    assert cluster.gke.describe().state == "DELETED", "before the stop"


def test_a_change_of_the_context_moves_no_run(cluster: Cluster, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TPU_LAUNCH_HOME", str(cluster.folder))
    config = replace(load_text(cluster.folder, SLICE.replace("demo", "s")), provider="gke")
    cluster.write("context", "east\n")
    begun = _fix_context(config, "run").document.value
    run = new_run(cluster.folder, "s-1", this_machine(), provider="gke", configuration=begun)
    cluster.write("context", "west\n")
    assert [_fix_context(config, each).gke.context for each in ("down", "run", "logs")] == ["east", "west", None]
    run.append(AttemptBegan(0))
    assert _fix_context(config, "run").gke.context == "east", "in which the attempt goes on"


def test_pods_that_outlive_their_deletion_are_told(cluster: Cluster, monkeypatch: pytest.MonkeyPatch) -> None:
    cluster.gke.delete()
    assert cluster.said == ["GKE, namespace default: the JobSets are deleted; the node pool stays"]
    secret, delete = cluster.calls("delete")
    assert " delete secret/two-0 " in secret, "of a start that was killed before its JobSet owned it"
    assert "delete jobsets.jobset.x-k8s.io,configmaps --selector tpu-launch/slice=two " in delete
    cluster.write("left", "pod/pod-0\n")
    monkeypatch.setattr("launcher.gke.provider._GONE_SECONDS", -cluster.gke.config.run.stop_seconds - 1)
    with pytest.raises(LaunchError, match=r"1 pods are still there -1 s after deletion: pod/pod-0"):
        cluster.gke.delete()
    assert all("still there" in report.detail for report in cluster.gke.stop(CONTAINER, grace=-29, remove=True))


def test_a_look_tells_the_state_of_a_pod_and_its_newest_lines(cluster: Cluster) -> None:
    cluster.show("a", "b", "", ended={0})
    states = [cluster.gke.look(worker, CONTAINER).container for worker in range(4)]
    assert [(state.status, state.exit_code) for state in states] == [
        ("exited", 3), ("running", None), ("created", None), ("absent", None),
    ]  # fmt: skip
    assert not cluster.calls("logs")
    assert all(cluster.gke.look(worker, CONTAINER, lines=5).container is not None for worker in (0, 2))
    (log,) = cluster.calls("logs")
    assert "--tail=5" in log
    cluster.show("a", taken={0}, ended={0})
    wait_until(lambda: cluster.gke.look(0, CONTAINER).problem == "its pod was disrupted: DeletionByPodGC")
    cluster.gke._kubectl.follow("logs", "pod-0", on_line=print, on_start=lambda end: None, seconds=9)  # ends well


@given(st.text("$()Aa =", max_size=12), st.dictionaries(st.text("Aa", min_size=1), st.text(max_size=3)))
def test_a_pod_gets_every_argument_unchanged(text: str, variables: dict[str, str]) -> None:
    assert expand(literal(text), variables) == text
