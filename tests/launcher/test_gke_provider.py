"""Starting an attempt on GKE: a JobSet owns the objects it reads, and waiting for nodes has a time-out of its own.

kubectl is a script here; tests/rehearsal/test_gke_runs.py runs the real one."""

import json
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from launcher.errors import Exit, LaunchError
from launcher.gke.manifest import literal
from launcher.gke.pods import INDEX
from launcher.gke.provider import Gke
from launcher.gke.workload import LABEL_RUN
from launcher.provider import Attempt, Observation
from launcher.providers import this_machine
from tests.kubernetes.cluster.nodes import expand
from tests.kubernetes.golden import IMAGE
from tests.launcher.run_files import load_text
from tests.launcher.script_host import write_program
from tests.processes import wait_until
from training.machine import Clock
from training.telemetry.progress_line import ProgressLine

FILE = """\
project: p
zone: us-central2-b
slice: {name: two, accelerator_type: v4-16, create_minutes: CREATE, stockout_minutes: 0.01}
image: {reference: 'IMAGE'}
run: {command: [train], start_minutes: START}
"""
KUBECTL = """
cd "$(dirname "$0")" || exit 9
echo "$*" >>calls
for refused in refused-*; do
  case "$*" in *" ${refused#refused-} "*) [ ! -f slow ] || sleep 0.3; cat "$refused" >&2; exit 1 ;; esac
done
case "$*" in
  *--watch*) [ ! -f event ] || cat event; exec sleep 60 ;;
  *" exec "*) [ -f progress ] && cat progress ;;
  *" logs "*) echo "2026-01-01T00:00:00.5Z a line" ;;
  *jsonpath*) echo the-uid ;;
  *"output name"*) [ ! -f left ] || cat left ;;
  *get\\ pods*) cat pods ;;
  *get\\ jobsets*) cat jobsets ;;
  *create*) cat >/dev/null ;;
esac
"""


@pytest.fixture
def kubectl(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    folder = write_program(tmp_path / "bin", "kubectl", KUBECTL).parent
    show_jobsets(folder)
    show(folder)
    monkeypatch.setenv("PATH", f"{folder}:/usr/bin:/bin")
    monkeypatch.setattr("launcher.gke.pods._LIST_EVERY", 0.2)
    yield folder
    while _opened:
        _opened.pop().close()


def show(folder: Path, *nodes: str, started: bool = True, ended: Any = (), taken: Any = ()) -> None:
    """Lets the cluster show a pod for each node; an empty name is an unschedulable pod."""
    over = {"terminated": {"exitCode": 3, "finishedAt": "2026-01-01T00:00:01Z"}}
    running = {"running": {"startedAt": "2026-01-01T00:00:00Z"}} if started else {}
    waits = {"type": "PodScheduled", "status": "False", "reason": "Unschedulable", "message": "0/0 nodes"}
    lost = {"type": "DisruptionTarget", "status": "True", "reason": "DeletionByPodGC"}
    pods = []
    for worker, node in enumerate(nodes):
        phase = "Running" if node and started else "Pending"
        status: dict[str, Any] = {"phase": phase, "conditions": [lost] * (worker in taken) if node else [waits]}
        if node:
            state = over if worker in ended else running
            status["containerStatuses"] = [{"name": "trainer", "state": state}]
        metadata = {"name": f"pod-{worker}", "uid": str(worker), "labels": {INDEX: str(worker)}}
        pods.append({"metadata": metadata, "spec": {"nodeName": node} if node else {}, "status": status})
    temporary = folder / "pods.new"
    temporary.write_text(json.dumps({"items": pods}))
    temporary.replace(folder / "pods")


_opened: list[Gke] = []


def provider(folder: Path, create: float, start: float) -> Gke:
    text = FILE.replace("IMAGE", IMAGE).replace("CREATE", str(create)).replace("START", str(start))
    gke = Gke(load_text(folder, text), print, this_machine())
    _opened.append(gke)
    return gke


ATTEMPT = Attempt("two-0101-000000-0000", 0, IMAGE, ("train",), {}, host_secret="s" * 64)


def show_jobsets(folder: Path, *names: str, run: str = ATTEMPT.run_id, **status: str) -> None:
    each = [{"metadata": {"name": name, "labels": {LABEL_RUN: run}}, "spec": {}, "status": status} for name in names]
    (folder / "jobsets").write_text(json.dumps({"items": each}))


@pytest.mark.parametrize(("there", "deleted", "created"), [(0, True, True), (1, False, False)])
def test_a_start_removes_earlier_attempts_of_its_run(kubectl: Path, there: int, deleted: bool, created: bool) -> None:
    show(kubectl, "a", "b")
    attempt = replace(ATTEMPT, number=1)
    show_jobsets(kubectl, name := f"{attempt.run_id}-{there}")
    gke = provider(kubectl, 1, 1)
    gke.start(attempt)
    (owned,) = calls(kubectl, "patch")
    assert f" configmaps/{attempt.run_id}-1 secrets/{attempt.run_id}-1 " in owned
    assert "the-uid" in owned
    assert any("jobsets" in call and name in call for call in calls(kubectl, "delete")) == deleted
    assert bool(calls(kubectl, "create")) == created


def test_a_node_may_come_later_than_a_container_may_take_to_start(kubectl: Path) -> None:
    show(kubectl, "a", "")
    gke, said = provider(kubectl, create=1, start=0.03), list[str]()
    gke.say = said.append
    threading.Timer(3.5, show, (kubectl, "a", "b")).start()
    gke.start(ATTEMPT)
    assert said == ["waiting for 1 of 2 hosts: host 1: no node takes its pod (Unschedulable: 0/0 nodes)"]


@pytest.mark.parametrize("pods", [(), ("a",)])
def test_a_jobset_that_ended_unseen_is_not_waited_for(kubectl: Path, pods: tuple[str, ...]) -> None:
    show(kubectl, *pods, ended={0})
    show_jobsets(kubectl, f"{ATTEMPT.run_id}-0", terminalState="Failed")
    gke = provider(kubectl, 1, 1)
    if pods:
        assert all(report.ok for report in gke.start(ATTEMPT))
    else:
        with pytest.raises(LaunchError, match="lost its pods") as bad:
            gke.start(ATTEMPT)
        assert bad.value.exit_code is Exit.HOST_LOST


def test_only_hosts_without_nodes_are_a_stockout(kubectl: Path) -> None:
    for node, create, told, code in (
        ("b", 30, r"within run\.start_minutes \(0\.02\) after they had nodes", Exit.CLOUD_ERROR),
        ("", 0.02, r"no nodes for all hosts within 0\.03 minutes", Exit.STOCKOUT),
    ):
        show(kubectl, "a", node, started=False)
        with pytest.raises(LaunchError, match=told) as bad:
            provider(kubectl, create, start=0.02).start(ATTEMPT)
        assert bad.value.exit_code is code


NO_ANSWER = "Unable to connect to the server: dial tcp 34.1.2.3:443: i/o timeout\n"


def calls(kubectl: Path, verb: str) -> list[str]:
    return [call for call in (kubectl / "calls").read_text().splitlines() if f" {verb} " in call]


def test_a_failed_creation_is_removed_and_explained(kubectl: Path) -> None:
    (kubectl / "refused-create").write_text(NO_ANSWER)
    gke = provider(kubectl, 1, 1)
    with pytest.raises(LaunchError, match="does not answer"):
        gke.start(ATTEMPT)
    assert "jobsets" in calls(kubectl, "delete")[-1]
    (kubectl / "refused-delete").write_text('Error from server (InternalError): "etcd" leader changed\n')
    with pytest.raises(LaunchError, match=r"leader changed|does not answer") as bad:
        gke.start(ATTEMPT)
    assert bad.value.transient


def test_a_start_waits_for_a_silent_cluster_until_its_time_is_over(kubectl: Path) -> None:
    (kubectl / "refused-get").write_text(NO_ANSWER)
    gke, said = provider(kubectl, create=0.02, start=0.03), list[str]()
    gke.say = said.append
    with pytest.raises(LaunchError, match="does not answer") as bad:
        gke._wait_started(ATTEMPT, "demo", Clock())
    assert bad.value.exit_code is Exit.CLOUD_ERROR
    assert len(said) == 1


def test_neither_a_start_nor_a_stop_waits_for_a_permission(kubectl: Path) -> None:
    (kubectl / "refused-get").write_text('Error from server (Forbidden): pods is forbidden: User "a@b.c" cannot list\n')
    gke = provider(kubectl, create=30, start=30)
    with pytest.raises(LaunchError) as bad:
        gke._wait_started(ATTEMPT, "demo", Clock())
    with pytest.raises(LaunchError) as refused:
        gke.stop(ATTEMPT.container, grace=1, remove=True)
    assert bad.value.exit_code is refused.value.exit_code is Exit.PERMISSION


def test_a_cluster_that_does_not_answer_fails_no_ended_run(kubectl: Path) -> None:
    show(kubectl, "a", "b")
    gke = provider(kubectl, 1, 1)
    (kubectl / "refused-get").write_text(NO_ANSWER)
    reports = gke.stop(ATTEMPT.container, grace=1, remove=True)
    assert [report.ok for report in reports] == [False, False]
    assert "does not answer" in reports[0].detail
    assert gke.evidence(ATTEMPT.container, [0, 1]) == {}
    assert gke.stacks(ATTEMPT.container) == {}


def test_a_missing_pod_is_not_absent_and_hosts_share_a_list(kubectl: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    show(kubectl, "a")
    gke = provider(kubectl, 1, 1)
    assert gke.observe(1, ATTEMPT.container, None) == Observation(1, None, problem="its pod is gone")
    for name in ("refused-get", "slow"):
        (kubectl / name).write_text(NO_ANSWER)
    time.sleep(0.3)
    assert "does not answer" in gke.observe(0, ATTEMPT.container, None).problem
    monkeypatch.setattr("launcher.gke.pods._LIST_EVERY", 1.0)  # a failed list counts for 0.2 s, and takes 0.3 s
    before = len(calls(kubectl, "get"))
    assert all("does not answer" in gke.observe(worker, ATTEMPT.container, None).problem for worker in range(50))
    assert len(calls(kubectl, "get")) - before < 10


def test_a_watch_that_was_refused_is_tried_again_and_counts_with_its_first_pod(kubectl: Path) -> None:
    show(kubectl, "a", "b")
    (kubectl / "refused---watch").write_text("error: You must be logged in to the server (Unauthorized)\n")
    gke = provider(kubectl, 1, 1)

    def wait_for(problem: str) -> None:
        wait_until(lambda: gke.observe(0, ATTEMPT.container, None).problem[:27] == problem, 60)

    wait_for("the cluster does not accept")
    pod = json.loads((kubectl / "pods").read_text())["items"][0]
    (kubectl / "event").write_text(json.dumps({"type": "ADDED", "object": pod}) + "\n")
    (kubectl / "refused---watch").unlink()
    wait_for("")


def test_a_line_of_progress_is_read_where_it_is_asked_for_and_its_refusal_is_no_problem(kubectl: Path) -> None:
    show(kubectl, "a", "b", ended={0})
    (kubectl / "progress").write_text('progress {"step": 3}\n')
    gke = provider(kubectl, 1, 1)
    assert gke.observe(1, ATTEMPT.container, None).progress == ()
    assert gke.observe(0, ATTEMPT.container, None, progress=True).progress == ()
    assert not calls(kubectl, "exec")
    seen = gke.observe(1, ATTEMPT.container, None, progress=True)
    assert seen.progress == (ProgressLine(3),)
    assert "exec pod-1 --container trainer" in calls(kubectl, "exec")[0]
    (kubectl / "refused-exec").write_text("Error from server (Forbidden): cannot create resource pods/exec\n")
    seen = gke.observe(1, ATTEMPT.container, None, progress=True)
    assert (seen.progress, seen.problem, [line.text for line in seen.lines]) == ((), "", ["a line"])


@pytest.mark.parametrize("pods", [(), ("a", "")])
def test_a_stop_before_any_pod_has_started_deletes_the_jobset(kubectl: Path, pods: tuple[str, ...]) -> None:
    """A JobSet that waits for nodes, or for Kueue, would start after the stop."""
    show(kubectl, *pods, started=False)
    reports = provider(kubectl, 1, 1).stop(ATTEMPT.container, grace=1, remove=False)
    assert all(report.ok for report in reports)
    assert any("jobsets" in call and "two-0101-000000-0000-0" in call for call in calls(kubectl, "delete"))


def test_a_stop_that_came_before_the_jobset_ends_its_start(kubectl: Path) -> None:
    class Stopped(Clock):
        def sleep(self, seconds: float) -> None:
            raise LaunchError("it was stopped")

    with pytest.raises(LaunchError, match="it was stopped"):
        provider(kubectl, 1, 1).start(ATTEMPT, Stopped())
    assert "jobsets" in calls(kubectl, "delete")[-1]
    assert not calls(kubectl, "create")
    show_jobsets(kubectl, f"{ATTEMPT.run_id}-0")  # of an interrupted start
    show(kubectl, "a", "b")
    with pytest.raises(LaunchError, match="it was stopped"):
        provider(kubectl, 1, 1).start(ATTEMPT, Stopped())


def test_a_start_refuses_an_image_that_nodes_can_not_pull_and_a_slice_that_another_run_uses(kubectl: Path) -> None:
    show(kubectl, "a", "b")
    gke = provider(kubectl, 1, 1)
    with pytest.raises(LaunchError, match="can't pull image trainer:latest") as bad:
        gke.start(replace(ATTEMPT, image="trainer:latest"))
    assert bad.value.exit_code is Exit.BAD_INPUT
    show_jobsets(kubectl, "other-0", run="other")
    assert [(report.ok, report.occupied_by) for report in gke.start(ATTEMPT)] == [(False, "other")] * 2
    show_jobsets(kubectl, "other-0", run="other", terminalState="Failed")
    assert all(report.ok for report in gke.start(ATTEMPT))


def test_an_up_tells_of_nodes_that_are_missing_or_hidden_and_fails_without_an_answer(kubectl: Path) -> None:
    gke, said = provider(kubectl, 1, 1), list[str]()
    gke.say = said.append
    gke.create()
    (kubectl / "refused-nodes").write_text('Error from server (Forbidden): User "a" cannot list resource "nodes"\n')
    gke.create()
    assert [text[:25] for text in said] == ["the cluster has 0 of 2 no", "you may not list nodes: o"]
    (kubectl / "refused-nodes").write_text(NO_ANSWER)
    with pytest.raises(LaunchError, match="does not answer"):
        gke.create()


def test_a_slice_is_preempted_once_all_its_pods_were_disrupted_and_have_ended(kubectl: Path) -> None:
    both, one = {0, 1}, {0}
    for pods, taken, ended, attempt in (("ab", both, both, 0), ("ab", both, both, 1), ("ab", both, one, 0),
                                        ("ab", one, both, 0), ("", (), (), 0)):  # fmt: skip
        show(kubectl, *pods, ended=ended, taken=taken)
        show_jobsets(kubectl, f"{ATTEMPT.run_id}-{attempt}")
        gke = provider(kubectl, 1, 1)
        gke.observe(0, ATTEMPT.container, None)
        preempted = taken == ended == both and attempt == 0
        assert gke.describe().state == ("PREEMPTED" if preempted else "READY")


def test_how_a_pod_ended_is_known_without_its_log_which_may_be_gone_with_its_node(kubectl: Path) -> None:
    show(kubectl, "a", "b", ended={0})
    (kubectl / "refused-logs").write_text("Error from server: dial tcp 10.4.0.1:10250: connect: no route to host\n")
    gke = provider(kubectl, 1, 1)
    ended, runs = (gke.observe(worker, ATTEMPT.container, None) for worker in range(2))
    assert ended.container.exit_code == 3
    assert runs.container is None
    assert ("no route to host" in ended.problem, runs.not_taken) == (True, False)
    (kubectl / "refused-logs").write_text(NO_ANSWER)
    assert gke.observe(1, ATTEMPT.container, None).not_taken, "it says nothing about the host"


def test_only_pods_that_run_are_stopped_and_asked_for_stacks_and_each_host_is_reported(kubectl: Path) -> None:
    show(kubectl, "a", "b", "", ended={0})
    gke = provider(kubectl, 1, 1)
    assert set(gke.stacks(ATTEMPT.container)) == {1}
    reports = gke.stop(ATTEMPT.container, grace=-29, remove=False)
    assert [(report.ok, report.detail) for report in reports] == [(True, ""), (False, "its pod did not end within 1 s")]
    (delete,) = calls(kubectl, "delete")
    assert ("pod-1" in delete, "pod-0" in delete) == (True, False)
    assert [report.ok for report in gke.stop(ATTEMPT.container, grace=-29, remove=False, workers=[0])] == [True]
    assert len(calls(kubectl, "delete")) == 1
    assert not gke.known_ready(), "a cluster may lose nodes at any time"


def test_a_jobset_that_another_client_deleted_is_told_from_one_that_this_process_removed(kubectl: Path) -> None:
    show(kubectl, "a", "b")
    gke = provider(kubectl, 1, 1)
    show_jobsets(kubectl, ATTEMPT.run_id + "-0")
    gke.observe(0, ATTEMPT.container, None)
    assert (gke.describe().state, gke.describe().trouble) == ("READY", "")
    show_jobsets(kubectl)
    assert gke.describe().state == "DELETED"
    show_jobsets(kubectl, ATTEMPT.run_id + "-1")  # the run's launcher has started its next attempt
    assert gke.describe().state == "READY"
    removing = provider(kubectl, 1, 1)
    removing.observe(0, ATTEMPT.container, None)
    show_jobsets(kubectl, ATTEMPT.run_id + "-0")
    removing.stop(ATTEMPT.container, grace=-29, remove=True)
    show_jobsets(kubectl)
    assert (removing.describe().state, removing._watches) == ("READY", {})
    gke.observe(0, ATTEMPT.container, None)
    gke.stop(ATTEMPT.container, grace=-29, remove=True)
    assert gke.describe().state == "DELETED", "before the stop"


def test_pods_that_outlive_their_deletion_are_told(kubectl: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[str] = []
    gke = provider(kubectl, 1, 1)
    gke.say = said.append
    gke.delete()
    assert said == ["the JobSets are deleted; the node pool stays"]
    (delete,) = calls(kubectl, "delete")
    assert "delete jobsets.jobset.x-k8s.io,configmaps --selector tpu-launch/slice=two " in delete
    (kubectl / "left").write_text("pod/pod-0\n")
    monkeypatch.setattr("launcher.gke.provider._GONE_SECONDS", -gke.config.run.stop_seconds - 1)
    with pytest.raises(LaunchError, match=r"1 pods are still there -1 s after deletion: pod/pod-0"):
        gke.delete()
    assert all("still there" in report.detail for report in gke.stop(ATTEMPT.container, grace=-29, remove=True))


def test_a_look_tells_the_state_of_a_pod_and_its_newest_lines(kubectl: Path) -> None:
    show(kubectl, "a", "b", "", ended={0})
    gke = provider(kubectl, 1, 1)
    states = [gke.look(worker, ATTEMPT.container).container for worker in range(4)]
    assert [state.status for state in states] == ["exited", "running", "created", "absent"]
    assert [state.exit_code for state in states] == [3, None, None, None]
    assert not calls(kubectl, "logs")
    assert all(gke.look(worker, ATTEMPT.container, lines=5).container is not None for worker in (0, 2))
    (log,) = calls(kubectl, "logs")
    assert "--tail=5" in log
    show(kubectl, "a", taken={0}, ended={0})
    wait_until(lambda: gke.look(0, ATTEMPT.container).problem == "its pod was disrupted: DeletionByPodGC")
    gke._kubectl.follow("logs", "pod-0", on_line=print, on_start=lambda end: None, seconds=9)  # ends well


@given(st.text("$()Aa =", max_size=12), st.dictionaries(st.text("Aa", min_size=1), st.text(max_size=3)))
def test_a_pod_gets_every_argument_unchanged(text: str, variables: dict[str, str]) -> None:
    assert expand(literal(text), variables) == text
