"""Claims about runs of any command on GKE: the real kubectl on a small cluster of containers. About 2 minutes."""

import base64
import re
import time
from collections.abc import Iterator
from typing import Any

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


def test_a_pod_that_is_evicted_and_saves_has_saved(work: Workstation, cluster: Cluster) -> None:
    running = work.begin(*run("python3", "-c", SAVING.replace("time.sleep(600)", "while True: time.sleep(0.1)")))
    running.wait_for_both("up")
    for worker in (0, 1):  # a drained node pool: every pod is asked to leave
        cluster.nodes.evict(cluster.pod(worker))
    assert running.end(60).require(75, "[1] saving").json()["outcome"] == "saved"


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
def test_missing_things_are_told(
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


def test_what_the_cluster_refuses_or_lacks_is_said_with_what_to_do(
    work: Workstation, cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        only = {"verbs": ["get", "list", "delete"]}
        role = [{**rule, **(only if "jobsets" in rule["resources"] else {})} for rule in cluster.api.role]
        patch.setattr(cluster.api, "role", role)
        ended = work.launch(*sh("true"))
    ended.require(22, "alice@example.com may not create jobsets in namespace default", "role.yaml")
    cluster.api.missing.add("jobsets")
    monkeypatch.setitem(work.environment, "KUBECACHEDIR", str(work.folder / "without-jobset"))
    work.launch(*sh("true")).require(2, "the cluster has no JobSet", "kubectl apply --server-side -f")


def kubectl(work: Workstation, text: str, *words: str) -> shell.Result:
    command = ["kubectl", "--context", CONTEXT, *words, "--filename", "-"]
    return shell.run(command, timeout=600, input=text, env=work.environment)


def test_manifests_are_judged_strictly(work: Workstation, cluster: Cluster) -> None:
    text = work.good("manifest", *GKE[2:], "--", "true").output
    refused = kubectl(work, text.replace("parallelism:", "paralelism:"), "create", "--validate=strict")
    assert ("paralelism" in refused.stderr, refused.ok) == (True, False)
    for kind in ("configmaps", "secrets"):  # were made before the JobSet was refused
        cluster.store.remove(kind, "two")


FELT_FIRST = '[ "$TPU_LAUNCH_ATTEMPT" = 1 ] || { [ "$TPU_WORKER_ID" = 0 ] && exit 76; sleep 1; exit 1; }'


@pytest.mark.parametrize(
    ("script", "state", "restarts", "counted"),
    [
        ("exit 2", "Failed", 0, 0),
        ("exit 1", "Failed", 1, 1),
        ('[ "$TPU_LAUNCH_ATTEMPT" -ge 3 ] || exit 75', "Completed", 3, 0),
        (FELT_FIRST, "Completed", 1, 1),
    ],
    ids=["refused", "failed", "saved three times", "a failure that others felt first"],
)
def test_a_manifest_is_all_that_the_cluster_needs_to_know_what_to_restart(
    work: Workstation, cluster: Cluster, script: str, state: str, restarts: int, counted: int
) -> None:
    """Given to kubectl by a user who has k8s/role.yaml."""
    text = work.good("manifest", *GKE[2:], "--set", "gke.restarts=1", "--", "sh", "-c", script).output
    applied = kubectl(work, text, "apply")
    assert applied.ok, applied.stderr

    def status() -> Any:
        return cluster.store.all("jobsets")[0].get("status", {})

    wait_until(lambda: status().get("terminalState"), 60, status)
    cluster.store.remove("secrets", "two")  # which no JobSet owns
    found = [status()[key] for key in ("terminalState", "restarts", "restartsCountTowardsMax")]
    assert found == [state, restarts, counted]
