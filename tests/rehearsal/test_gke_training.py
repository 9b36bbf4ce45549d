"""Claims about training on GKE: a manifest given to kubectl, restarted by the cluster, and a run watched by tpu-launch
give the same bits.

Real trainers in the pods of rendered manifests, on the small cluster of tests/kubernetes/cluster, with the emulated
bucket. About 3 minutes.
"""

import json
import os
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import yaml

from launcher import shell
from launcher.emulator.bucket import Buckets
from launcher.emulator.storage import answer
from launcher.images.build import ensure_image
from launcher.images.specification import default_spec
from tests.container import small_runs
from tests.kubernetes.cluster.cluster import CONTEXT, Cluster
from tests.kubernetes.cluster.store import Object
from tests.kubernetes.golden import IMAGE
from tests.processes import wait_until
from tests.rehearsal.workstation import Workstation, environment_for
from tests.servers import LoopbackServer
from tests.xla_flags import COMPILE_FAST
from training import storage

pytestmark = [pytest.mark.alone, pytest.mark.timeout(900)]

STEPS = 300  # long enough on any machine: what happens in the middle must not come after the end


@dataclass
class Room:
    work: Workstation
    cluster: Cluster
    kubectl: list[str]

    def apply(self, *options: str) -> None:
        """tpu-launch manifest ... | kubectl apply -f -"""
        text = self.work.good("manifest", "-f", "run.yaml", *options).output
        apply = [*self.kubectl, "apply", "--filename", "-"]
        applied = shell.run(apply, timeout=600, input=text, env=self.work.environment)
        assert applied.ok, applied.stderr

    def end_of(self, name: str, seconds: float = 600) -> Object:
        """The JobSet or Job, once it has ended."""
        get = self.cluster.store.get

        def has_ended() -> bool:
            conditions = (get("jobsets", name) or get("jobs", name) or {}).get("status", {}).get("conditions", [])
            return any(each["type"] in ("Completed", "Complete", "Failed") for each in conditions)

        self.wait(has_ended, f"{name} has ended", seconds)
        return get("jobsets", name) or get("jobs", name) or {}

    def wait(self, true: Callable[[], Any], what: str, seconds: float = 300) -> None:
        told = (self.cluster.pods, lambda: self.cluster.log(0), lambda: self.cluster.log(1))
        wait_until(true, seconds, lambda: "\n".join([what, *(str(each()) for each in told)]))

    def remove(self, kind: str, name: str) -> None:
        self.cluster.store.remove("configmaps", name)
        self.cluster.store.remove("secrets", name)
        found = self.cluster.store.get(kind, name)
        assert found
        found["metadata"]["deletionTimestamp"] = "now"
        self.cluster.store.put(kind, found)
        for pod in self.cluster.pods():
            pod["metadata"]["deletionTimestamp"] = "now"
            self.cluster.store.put("pods", pod)
        self.wait(lambda: not self.cluster.pods(), "pods are gone")

    def summary(self, run_id: str) -> dict[str, Any]:
        return json.loads(storage.read(f"gs://data/runs/{run_id}/summary.json"))


@pytest.fixture(scope="module")
def room(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Room]:
    folder = tmp_path_factory.mktemp("gke-training")
    image = ensure_image(default_spec("torch-xla"), print).reference
    with Cluster(images={IMAGE: image}) as cluster, pytest.MonkeyPatch.context() as patch:
        buckets = Buckets(folder / "buckets")
        buckets.ensure("data")
        server = LoopbackServer(partial(answer, buckets), cluster.nodes.gateway)
        cluster.nodes.environment["STORAGE_EMULATOR_HOST"] = server.url
        for name in [key for key in os.environ if key.lower().endswith("_proxy")]:
            patch.delenv(name)
        patch.setenv("STORAGE_EMULATOR_HOST", server.url)
        write_data(folder / "data")
        config = cluster.kubeconfig(folder / "kubeconfig")
        kubectl = {"KUBECONFIG": str(config), "KUBECACHEDIR": str(folder / "cache")}
        work = Workstation(folder, environment_for(folder, **kubectl))
        work.file("run.yaml", yaml.safe_dump(document(folder / "data")))
        yield Room(work, cluster, ["kubectl", "--context", CONTEXT])
        server.close()
        assert cluster.mistakes == []


def write_data(folder: Path) -> None:
    small_runs.prepare(folder)
    for path in folder.rglob("*"):
        if path.is_file():
            storage.write(f"gs://data/{path.relative_to(folder)}", path.read_bytes())


def document(folder: Path) -> dict[str, Any]:
    told = small_runs.document(folder, train__steps=STEPS, train__log_every=5, checkpoint__every_steps=50)
    text = json.dumps(told).replace(str(folder), "gs://data")
    spot = {"name": "trained", "accelerator_type": "v4-16", "capacity": "spot"}
    where = {"project": "p", "zone": "us-central2-b", "slice": spot, "gke": {"context": CONTEXT, "restarts": 1}}
    speed = {"environment": {"XLA_FLAGS": COMPILE_FAST}}
    return {**where, "image": {"reference": IMAGE}, "run": speed, **json.loads(text)}


def at_step(room: Room, pattern: str) -> Callable[[], Any]:
    return lambda: re.search(rf"\bstep +{pattern}\b", room.cluster.log(0))


def same_bits(room: Room, run_id: str, undisturbed: dict[str, Any]) -> None:
    small_runs.require_same_bits(room.summary(run_id), undisturbed, "committed_step", "steps")


@pytest.fixture(scope="module")
def undisturbed(room: Room) -> dict[str, Any]:
    """The summary of a JobSet that nothing happened to, in a cluster without faults: hosts find each other by name."""
    cluster = room.cluster
    cluster.add_pool("quiet", "v4-16", spot=True)
    cluster.webhook = False
    room.apply("--name", "plain")
    jobset = room.end_of("plain")
    cluster.webhook = True
    assert jobset["status"]["terminalState"] == "Completed", cluster.log(0)
    room.remove("jobsets", "plain")
    cluster.nodes.preempt("quiet")
    return room.summary("plain")


@pytest.mark.nightly
def test_a_jobset_goes_on_with_the_same_bits_on_new_spot_nodes(room: Room, undisturbed: dict[str, Any]) -> None:
    cluster = room.cluster
    cluster.add_pool("first", "v4-16", spot=True)
    room.apply("--name", "restarted")
    room.wait(at_step(room, "[1-9][05]"), "the JobSet trains")
    cluster.nodes.preempt("first")
    store = cluster.store
    room.wait(lambda: (store.get("jobsets", "restarted") or {})["status"]["restarts"] == 1, "the JobSet is restarted")
    cluster.add_pool("second", "v4-16", spot=True)
    jobset = room.end_of("restarted")
    assert jobset["status"]["terminalState"] == "Completed", cluster.log(0)
    assert jobset["status"]["restartsCountTowardsMax"] == 0, "to save and leave is no failure"
    assert "attempt 1" in cluster.log(0)
    assert "going on from gs://data/runs/restarted/checkpoints" in cluster.log(0)
    room.remove("jobsets", "restarted")
    cluster.nodes.preempt("second")
    same_bits(room, "restarted", undisturbed)


@pytest.mark.nightly
def test_a_watched_run_goes_on_with_the_same_bits_on_new_spot_nodes(room: Room, undisturbed: dict[str, Any]) -> None:
    cluster = room.cluster
    cluster.add_pool("first", "v4-16", spot=True)
    retries = ("--set", "run.preemption_retries=1")
    running = room.work.begin("run", "--provider", "gke", "-f", "run.yaml", "--json", *retries)
    running.wait_for(r"^\[0\].*\bstep +[1-9][05]\b", 120)
    cluster.nodes.preempt("first")
    running.wait_for(r"starting again", 60)
    cluster.add_pool("second", "v4-16", spot=True)
    ended = running.end(600)
    assert ended.require(0, "going on from gs://data/runs/").json()["attempt"] == 1
    assert cluster.pods() == []
    cluster.nodes.preempt("second")
    same_bits(room, ended.json()["run"], undisturbed)


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
def test_the_cluster_knows_what_to_restart(room: Room, script: str, state: str, restarts: int, counted: int) -> None:
    room.cluster.add_pool("rules", "v4-16", spot=True)
    try:
        room.apply("--name", "rules", "--", "sh", "-c", script)
        status = room.end_of("rules", 60)["status"]
        found = [status[key] for key in ("terminalState", "restarts", "restartsCountTowardsMax")]
        assert found == [state, restarts, counted]
        room.remove("jobsets", "rules")
    finally:
        room.cluster.nodes.preempt("rules")
