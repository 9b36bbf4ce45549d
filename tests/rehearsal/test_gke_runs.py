"""Claims about runs of any command on GKE: the real kubectl on a small cluster of containers. About 2 minutes."""

import base64
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from launcher import shell
from tests.kubernetes.cluster.cluster import CONTEXT, Cluster
from tests.kubernetes.golden import IMAGE
from tests.processes import wait_until
from tests.rehearsal.workstation import Workstation, environment_for, on_this_machine, settings

FILE = f"""\
project: my-project
zone: us-central2-b
slice: {{name: two, accelerator_type: v4-16}}
image: {{reference: "{IMAGE}"}}
run: {{start_minutes: 2}}
gke: {{context: {CONTEXT}}}
"""
SAVING = (
    "import signal,sys,time\nsignal.signal(signal.SIGTERM,lambda "
    "*_:(print('saving',flush=True),sys.exit(75)))\nprint('up',flush=True)\ntime.sleep(600)"
)


@pytest.fixture(scope="module")
def image() -> str:
    """Any image with a shell and Python will do: the newest of ours."""
    from launcher.images.build import ensure_image
    from launcher.images.specification import default_spec

    return ensure_image(default_spec("torch-xla"), print).reference


@pytest.fixture(scope="module")
def cluster(image: str) -> Iterator[Cluster]:
    with Cluster(images={IMAGE: image}) as made:
        made.add_pool("two", "v4-16")
        yield made
        assert made.mistakes == []


@pytest.fixture(scope="module")
def work(cluster: Cluster, tmp_path_factory: pytest.TempPathFactory) -> Workstation:
    folder = tmp_path_factory.mktemp("gke")
    kubectl = {"KUBECONFIG": str(cluster.kubeconfig(folder / "kubeconfig")), "KUBECACHEDIR": str(folder / "cache")}
    made = Workstation(folder, environment_for(folder, "STORAGE_EMULATOR_HOST", **kubectl))
    made.file("two.yaml", FILE)
    return made


@pytest.fixture(autouse=True)
def nothing_is_left(cluster: Cluster, work: Workstation) -> Iterator[None]:
    """Every run removes its objects when it has been watched to its end."""
    yield
    cluster.api.missing.clear()
    work.good("down", *GKE)
    assert cluster.pods() == []
    assert cluster.store.all("configmaps") == []


GKE = ("--provider", "gke", "-f", "two.yaml")


def run(*command: str) -> list[str]:
    return ["run", *GKE, "--new", "--json", "--", *command]


def sh(script: str) -> list[str]:
    return run("sh", "-c", script)


def test_a_command_runs_on_every_host_and_hosts_reach_each_other(work: Workstation) -> None:
    script = (
        "import os, socket, sys, time\n"
        "me, names = int(os.environ['TPU_WORKER_ID']), os.environ['TPU_WORKER_HOSTNAMES'].split(',')\n"
        "server = socket.create_server(('', 8490)); server.settimeout(30)\n"
        "for _ in range(100):\n  try:\n    link = socket.create_connection((names[1 - me], 8490), "
        "1); break\n  except OSError: time.sleep(0.2)\n"
        "peer, _ = server.accept(); link.sendall(b'hello from %d' % me); print(peer.recv(12).decode())\n"
        "print(os.environ['TPU_ACCELERATOR_TYPE'], os.environ['TPU_LAUNCH_ATTEMPT'], "
        "os.listdir('/etc/tpu-launch'), os.getuid())\n"
        "print(sys.argv[1:])"
    )
    numbers = ["1e-4", "0o17", "1_000", "+.5", "0x1p3", "12:30"]  # of which YAML 1.1 and 1.2 think differently
    ended = work.good(*run("python3", "-c", script, *numbers))
    ended.require(0, f"\n[1] {numbers}\n", "[0] hello from 1", "[1] hello from 0")
    assert re.search(r"^\[1\] v4-16 0 \[.*'config.yaml'.*\] 0$", ended.output, re.MULTILINE)
    assert ended.json()["outcome"] == "finished"


def test_the_first_host_that_fails_ends_the_run_and_is_named(work: Workstation) -> None:
    script = 'if [ "$TPU_WORKER_ID" = 1 ]; then echo about to fail; exit 3; fi; echo waiting; exec sleep 600'
    running = work.begin(*sh(script))
    running.wait_for(r"^\[1\] about to fail")
    begun = time.monotonic()
    ended = running.end(120)
    assert time.monotonic() - begun < on_this_machine(10), "the other hosts must be stopped within 10 s"
    cause = ended.require(10).json()["cause"]
    assert (cause["worker"], cause["exit_code"]) == (1, 3)


def test_stop_from_another_terminal_saves_and_no_last_line_is_lost(work: Workstation) -> None:
    running = work.begin(*run("python3", "-c", SAVING))
    running.wait_for_both("up")
    shown = work.good("status", *GKE, "--json").json()
    assert [host["container"] for host in shown["hosts"]] == ["running", "running"]
    assert shown["hosts"][1]["address"].endswith("-w-0-1." + shown["hosts"][1]["address"].partition("-w-0-1.")[2])
    work.good("stop", *GKE)
    assert running.end(30).require(75, "[0] saving", "[1] saving").json()["outcome"] == "saved"


@pytest.mark.nightly
def test_another_run_on_the_slice_is_not_touched(work: Workstation, cluster: Cluster) -> None:
    running = work.begin(*sh("echo mine; exec sleep 60"))
    running.wait_for(r"^\[1\] mine")
    before = [pod["metadata"]["uid"] for pod in cluster.pods()]
    work.launch(*sh("echo other")).require(23, "in use")
    assert [pod["metadata"]["uid"] for pod in cluster.pods()] == before
    work.good("stop", *GKE, "--grace", "1", "--run", running.run_id())
    assert running.end(60).code == 14


def test_a_pod_that_is_evicted_and_saves_has_saved(work: Workstation, cluster: Cluster) -> None:
    running = work.begin(*run("python3", "-c", SAVING.replace("time.sleep(600)", "while True: time.sleep(0.1)")))
    running.wait_for_both("up")
    for worker in (0, 1):  # a drained node pool: every pod is asked to leave
        cluster.nodes.evict(cluster.pod(worker))
    assert running.end(60).require(75, "[1] saving").json()["outcome"] == "saved"


@pytest.mark.nightly
def test_a_pod_that_is_taken_away_is_the_cause_and_its_peers_end_a_symptom(work: Workstation, cluster: Cluster) -> None:
    script = (
        'echo up; if [ "$TPU_WORKER_ID" = 1 ]; then exec sleep 600; fi; while getent hosts '
        '"${TPU_WORKER_HOSTNAMES#*,}"; do sleep 0.2; done; exit 76'
    )
    running = work.begin(*sh(script))
    running.wait_for(r"^\[1\] up")
    cluster.nodes.out_of_memory(cluster.pod(1))
    told = running.end(60).require(11).json()
    assert (told["outcome"], told["cause"]["worker"]) == ("host lost", 1)
    assert "low on resource: memory" in told["cause"]["what"]


NODES = (
    "didn't match Pod's node affinity/selector",
    "--machine-type ct4p-hightpu-4t --tpu-topology 2x2x4 --num-nodes 4",
)


@pytest.mark.parametrize(
    ("changes", "code", "words"),
    [
        (("run.start_minutes=0.05", "slice.create_minutes=0.05", "slice.accelerator_type=v4-32"), 20, NODES),
        ((f"image.reference={IMAGE.replace('torch-xla@', 'other@')}",), 2, ("can't pull", "was it pushed")),
        (("gke.context=elsewhere",), 2, ("no context elsewhere", "get-contexts")),
        (("gke.context=dead",), 24, ("does not answer",)),
    ],
    ids=["no node for a pod", "no image", "no cluster", "a dead cluster"],
)
def test_what_is_missing_is_told_at_once(
    work: Workstation, changes: tuple[str, ...], code: int, words: tuple[str, ...]
) -> None:
    work.launch("run", *GKE, *settings(*changes), "--new", "--", "true", seconds=60).require(code, *words)


def test_secrets_reach_the_command_and_nothing_else(work: Workstation, cluster: Cluster) -> None:
    cluster.store.create("secrets", {"metadata": {"name": "huggingface"}, "data": {"token": "aGZfdmVyeXNlY3JldA=="}})
    right = '[ "$HF_TOKEN" = "hf_very""secret" ] && [ ${#TPU_LAUNCH_SECRET} = 64 ]'
    check = f'{right} && [ "$$" -gt 0 ] && echo right'  # $$: as a shell has it
    secrets = ("--set", "gke.secrets={HF_TOKEN: huggingface/token}", "--set", "run.secrets=[HF_TOKEN]")
    ended = work.good("run", *GKE, *secrets, "--new", "--", "sh", "-c", check)
    assert "[1] right" in ended.output
    cluster.store.remove("secrets", "huggingface")
    # By which the hosts know each other: it belongs to the JobSet, as the ConfigMap does, and goes with it.
    jobsets = {event.object["metadata"]["uid"] for event in cluster.store.after(0, "jobsets")}
    for kind in ("secrets", "configmaps"):
        changed = [event.object for event in cluster.store.after(0, kind) if event.type == "MODIFIED"]
        *_, file = [each for each in changed if each["metadata"].get("ownerReferences")]
        [owner] = file["metadata"]["ownerReferences"]
        assert owner["uid"] in jobsets
        if kind == "secrets":
            value = base64.b64decode(file["data"]["secret"])
    assert len(value) == 64
    assert value.decode() not in ended.output
    assert cluster.store.all("secrets") == []
    files = [path for path in work.home.rglob("*") if path.is_file()]
    assert [path for path in files if b"hf_verysecret" in path.read_bytes() or value in path.read_bytes()] == []


@contextmanager
def without_verbs(cluster: Cluster, resource: str) -> Iterator[None]:
    """Lets alice only get, list and delete objects of one kind."""
    role = cluster.api.role
    cluster.api.role = [
        rule if resource not in rule["resources"] else {**rule, "verbs": ["get", "list", "delete"]} for rule in role
    ]
    try:
        yield
    finally:
        cluster.api.role = role


def test_without_permission_it_says_who_may_not_do_what(work: Workstation, cluster: Cluster) -> None:
    with without_verbs(cluster, "jobsets"):
        ended = work.launch(*sh("true"))
    ended.require(22, "alice@example.com may not create jobsets in namespace default", "role.yaml")


@pytest.mark.nightly
def test_who_may_list_pods_but_not_watch_them_is_told_so(work: Workstation, cluster: Cluster) -> None:
    with without_verbs(cluster, "pods"):
        ended = work.launch("run", *GKE, "--set", "run.stop_seconds=1", "--new", "--", "sleep", "30")
    ended.require(22, "may not watch pods")
    assert cluster.store.all("jobsets") == []


def test_without_jobset_it_says_how_to_install_it(work: Workstation, cluster: Cluster) -> None:
    cluster.api.missing.add("jobsets")
    shutil.rmtree(work.environment["KUBECACHEDIR"], ignore_errors=True)
    ended = work.launch(*sh("true"))
    cluster.api.missing.clear()
    shutil.rmtree(work.environment["KUBECACHEDIR"], ignore_errors=True)
    ended.require(2, "the cluster has no JobSet", "kubectl apply --server-side -f")


def test_the_role_has_what_is_asked_for_and_manifests_are_judged_strictly(work: Workstation, cluster: Cluster) -> None:
    manifest = [sys.executable, "-m", "launcher.cli", "manifest", *GKE[2:], "--", "true"]
    ran = subprocess.run(manifest, cwd=work.folder, env=work.environment, capture_output=True, text=True, timeout=600)
    text = ran.stdout
    kubectl = ["kubectl", "--context", CONTEXT]
    wrong = text.replace("parallelism:", "paralelism:")
    create = [*kubectl, "create", "--validate=strict", "--filename", "-"]
    refused = shell.run(create, timeout=600, input=wrong, env=work.environment)
    assert "paralelism" in refused.stderr
    assert not refused.ok
    for kind in ("configmaps", "secrets"):  # were made before the JobSet was refused
        cluster.store.remove(kind, "two")
    assert shell.run([*kubectl, "apply", "--filename", "-"], timeout=600, input=text, env=work.environment).ok
    wait_until(lambda: cluster.store.all("jobsets")[0].get("status", {}).get("terminalState"), 30)
    assert cluster.store.all("jobsets")[0]["status"]["terminalState"] == "Completed"
