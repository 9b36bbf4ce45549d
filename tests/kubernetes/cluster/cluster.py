"""The running cluster, and the kubeconfig with which kubectl reaches it."""

from __future__ import annotations

import secrets
import threading
import traceback
from pathlib import Path

import yaml

from launcher.images.engine import client
from tests.kubernetes.cluster import controllers
from tests.kubernetes.cluster.api import Api, serve
from tests.kubernetes.cluster.nodes import Nodes
from tests.kubernetes.cluster.store import Object, Store
from training.accelerators import accelerator, gke_nodes

CONTEXT = "gke_test"
ROLE = Path(__file__).resolve().parents[3] / "k8s" / "role.yaml"


class Cluster:
    """A cluster whose one user has the role of k8s/role.yaml. Its `with` statement removes everything at its end."""

    def __init__(self, *, images: dict[str, str]) -> None:
        self.store = Store()
        self.nodes = Nodes(self.store, client(), secrets.token_hex(4), images)
        self.api = Api(self.store, self.nodes, yaml.safe_load(ROLE.read_text())["rules"])
        self.server = serve(self.api)
        self.mistakes: list[str] = []
        self.webhook = True  # GKE's
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._go_on, daemon=True)

    def __enter__(self) -> Cluster:
        self._thread.start()
        return self

    def __exit__(self, *_error: object) -> None:
        self._over.set()
        self._thread.join(30)
        self.server.shutdown()
        self.server.server_close()
        self.nodes.close()

    def kubeconfig(self, path: Path) -> Path:
        """Writes a kubeconfig whose current context is another cluster, which does not answer."""
        servers = {CONTEXT: f"http://127.0.0.1:{self.server.server_port}", "dead": "http://127.0.0.1:9"}
        clusters = [{"name": name, "cluster": {"server": url}} for name, url in servers.items()]
        contexts = [{"name": name, "context": {"cluster": name, "user": "u"}} for name in servers]
        reached = {"clusters": clusters, "contexts": contexts, "current-context": "dead", "users": [{"name": "u"}]}
        path.write_text(yaml.safe_dump({"apiVersion": "v1", "kind": "Config", **reached}))
        return path

    def add_pool(self, name: str, accelerator_type: str, *, spot: bool = False) -> None:
        """The node pool of a slice."""
        slice_ = accelerator(accelerator_type)
        labels = {
            "cloud.google.com/gke-tpu-accelerator": gke_nodes(slice_).accelerator,
            "cloud.google.com/gke-tpu-topology": slice_.topology_name,
            **({"cloud.google.com/gke-spot": "true"} if spot else {}),
        }
        self.nodes.add_pool(name, slice_.hosts, slice_.chips_per_host, labels)

    def log(self, worker: int) -> str:
        """Returns what a host's newest container has printed, or "". Names end at random: they tell no order."""
        pods = [pod for pod in self.pods() if pod["metadata"]["annotations"][controllers.INDEX] == str(worker)]
        newest = max(pods, key=lambda pod: str(pod["metadata"]["creationTimestamp"]), default=None)
        name = self.nodes.container_of(newest) if newest else ""
        return self.nodes.engine("logs", name, check=False) if name else ""

    def pods(self) -> list[Object]:
        return self.store.all("pods")

    def pod(self, worker: int) -> Object:
        return next(pod for pod in self.pods() if pod["metadata"]["annotations"][controllers.INDEX] == str(worker))

    def _go_on(self) -> None:
        while not self._over.wait(0.1):
            try:
                controllers.reconcile(self.store, webhook=self.webhook)
                self.nodes.reconcile()
            except Exception:
                self.mistakes.append(traceback.format_exc())
