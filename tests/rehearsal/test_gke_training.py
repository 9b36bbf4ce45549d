"""Claims about training on GKE: a manifest given to kubectl, restarted by the cluster, gives the same bits.

Real trainers in the pods of rendered manifests, on the small cluster of tests/kubernetes/cluster, with the emulated
bucket. What a cluster restarts: test_gke_runs.py.
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

from launcher.emulator.bucket import Buckets
from launcher.emulator.storage import answer
from launcher.images.build import ensure_image
from launcher.images.specification import default_spec
from tests.container import small_runs
from tests.kubernetes.cluster.cluster import CONTEXT, Cluster
from tests.kubernetes.golden import IMAGE
from tests.processes import wait_until
from tests.rehearsal.test_gke_runs import kubectl
from tests.rehearsal.workstation import Workstation, environment_for
from tests.servers import LoopbackServer
from tests.xla_flags import COMPILE_FAST
from training import storage

pytestmark = [pytest.mark.alone, pytest.mark.nightly, pytest.mark.timeout(900)]

STEPS = 300  # long enough on any machine: what happens in the middle must not come after the end


@dataclass
class Room:
    work: Workstation
    cluster: Cluster

    def begin(self, name: str) -> None:
        """tpu-launch manifest ... | kubectl apply -f -"""
        applied = kubectl(self.work, self.work.good("manifest", "-f", "run.yaml", "--name", name).output, "apply")
        assert applied.ok, applied.stderr

    def status(self, name: str) -> dict[str, Any]:
        return dict((self.cluster.store.get("jobsets", name) or {}).get("status", {}))

    def end(self, name: str) -> dict[str, Any]:
        """Waits until the JobSet has completed, and removes it. Returns its status."""
        self.wait(lambda: "terminalState" in self.status(name), f"{name} has ended", 600)
        status = self.status(name)
        assert status["terminalState"] == "Completed", self.cluster.log(0)
        store = self.cluster.store
        for kind in ("configmaps", "secrets"):
            store.remove(kind, name)
        for kind, objects in (("jobsets", [store.get("jobsets", name)]), ("pods", self.cluster.pods())):
            for each in objects:
                each["metadata"]["deletionTimestamp"] = "now"
                store.put(kind, each)
        self.wait(lambda: not self.cluster.pods(), "pods are gone")
        return status

    def wait(self, true: Callable[[], Any], what: str, seconds: float = 300) -> None:
        told = (self.cluster.pods, lambda: self.cluster.log(0), lambda: self.cluster.log(1))
        wait_until(true, seconds, lambda: "\n".join([what, *(str(each()) for each in told)]))


@pytest.fixture
def room(tmp_path: Path) -> Iterator[Room]:
    image = ensure_image(default_spec("torch-xla"), print).reference
    with Cluster(images={IMAGE: image}) as cluster, pytest.MonkeyPatch.context() as patch:
        buckets = Buckets(tmp_path / "buckets")
        buckets.ensure("data")
        server = LoopbackServer(partial(answer, buckets), cluster.nodes.gateway)
        cluster.nodes.environment["STORAGE_EMULATOR_HOST"] = server.url
        for name in [key for key in os.environ if key.lower().endswith("_proxy")]:
            patch.delenv(name)
        patch.setenv("STORAGE_EMULATOR_HOST", server.url)
        for path in small_runs.prepare(tmp_path / "data").rglob("*"):
            if path.is_file():
                storage.write(f"gs://data/{path.relative_to(tmp_path / 'data')}", path.read_bytes())
        config = cluster.kubeconfig(tmp_path / "kubeconfig")
        kubectl = {"KUBECONFIG": str(config), "KUBECACHEDIR": str(tmp_path / "cache")}
        work = Workstation(tmp_path, environment_for(tmp_path, **kubectl))
        work.file("run.yaml", yaml.safe_dump(document(tmp_path / "data")))
        yield Room(work, cluster)
        server.close()
        assert cluster.mistakes == []


def document(folder: Path) -> dict[str, Any]:
    told = small_runs.document(folder, train__steps=STEPS, train__log_every=5, checkpoint__every_steps=50)
    text = json.dumps(told).replace(str(folder), "gs://data")
    spot = {"name": "trained", "accelerator_type": "v4-16", "capacity": "spot"}
    where = {"project": "p", "zone": "us-central2-b", "slice": spot, "gke": {"context": CONTEXT, "restarts": 1}}
    speed = {"environment": {"XLA_FLAGS": COMPILE_FAST}}
    return {**where, "image": {"reference": IMAGE}, "run": speed, **json.loads(text)}


def test_a_jobset_goes_on_with_the_same_bits_on_new_spot_nodes(room: Room) -> None:
    """As one to which nothing happens, in a cluster without faults: there, hosts find each other by name."""
    cluster = room.cluster
    cluster.add_pool("quiet", "v4-16", spot=True)
    cluster.webhook = False
    room.begin("plain")
    room.end("plain")
    cluster.webhook = True
    cluster.nodes.preempt("quiet")

    cluster.add_pool("first", "v4-16", spot=True)
    room.begin("restarted")
    room.wait(lambda: re.search(r"\bstep +[1-9][05]\b", cluster.log(0)), "the JobSet trains")
    cluster.nodes.preempt("first")
    room.wait(lambda: room.status("restarted")["restarts"] == 1, "the JobSet is restarted")
    cluster.add_pool("second", "v4-16", spot=True)
    room.wait(lambda: "terminalState" in room.status("restarted"), "the JobSet has ended", 600)
    log = cluster.log(0)
    assert room.end("restarted")["restartsCountTowardsMax"] == 0, "to save and leave is no failure"
    assert "attempt 1" in log
    assert "going on from gs://data/runs/restarted/checkpoints" in log
    cluster.nodes.preempt("second")
    runs = [json.loads(storage.read(f"gs://data/runs/{name}/summary.json")) for name in ("restarted", "plain")]
    small_runs.require_same_bits(*runs, "committed_step", "steps")
