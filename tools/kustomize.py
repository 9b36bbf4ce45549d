"""Writes k8s/: the output of `tpu-launch manifest` as a kustomize base with overlays, for users of kubectl alone.

An overlay is the effect of other values in examples/gke.yaml: a JSON patch (RFC 6902) between both
manifests. A test checks that k8s/ is up to date and that kubectl builds it. To write it again:
.venv/bin/python -m tools.kustomize
"""

from __future__ import annotations

import textwrap
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from launcher.config import load
from launcher.gke.manifest import SECRET_KEY, documents, standalone_workload
from launcher.gke.templates import dump, fill
from launcher.gke.workload import node_selector

ROOT = Path(__file__).resolve().parent.parent
FOLDER = ROOT / "k8s"
EXAMPLE = ROOT / "examples" / "gke.yaml"
HEADING = "Made by tools/kustomize.py; its source is launcher/gke/jobset.yaml with examples/gke.yaml."
IMAGE = "us-central2-docker.pkg.dev/my-project/tpu-launch/torch-xla"
NO_DIGEST = "sha256:" + "0" * 64  # stands for the user's own
SECRET_FILE = "host-secret"  # in base/, created by the user
QUEUE = "tpu-queue"
TENSORFLOW = (
    "backend=tensorflow",
    "image={repository: us-central2-docker.pkg.dev/my-project/tpu-launch/tensorflow, build_args: {REQUIREMENTS: "
    "requirements-tpu.txt}}",
)
BASE = f"""\
resources:
  - config.yaml
  - jobset.yaml
secretGenerator:
  # Shared by the hosts, which let in no others. Create it first: openssl rand -hex 32 >k8s/base/{SECRET_FILE}
  - name: $name
    namespace: $namespace
    files:
      - {SECRET_KEY}={SECRET_FILE}
    options:
      disableNameSuffixHash: true
      labels: $labels
"""
KUEUE = """\
# The nodes.
apiVersion: kueue.x-k8s.io/v1beta1
kind: ResourceFlavor
metadata:
  name: $flavor
spec:
  nodeLabels: $nodes
---
apiVersion: kueue.x-k8s.io/v1beta1
kind: ClusterQueue
metadata:
  name: tpu
spec:
  namespaceSelector: {}
  resourceGroups:
    - coveredResources:
        - google.com/tpu
      flavors:
        - name: $flavor
          resources:
            - name: google.com/tpu
              # Chips that may be in use at once: those of one slice.
              nominalQuota: $chips
---
# What gke.queue names.
apiVersion: kueue.x-k8s.io/v1beta1
kind: LocalQueue
metadata:
  name: $queue
  namespace: $namespace
spec:
  clusterQueue: tpu
"""


@dataclass(frozen=True)
class Overlay:
    """One overlay of the base."""

    about: str
    """The comment at its top."""

    changes: tuple[str, ...] = ()
    """Keys of examples/gke.yaml with other values."""

    more: str = ""
    """More fields of the kustomization, as YAML."""


OVERLAYS: dict[str, Overlay] = {
    "v3": Overlay("A v3-32: 4 hosts, 32 devices.", ("slice.accelerator_type=v3-32",)),
    "v4": Overlay("A v4-32: 4 hosts, 16 devices.", ("slice.accelerator_type=v4-32",)),
    "v5e": Overlay("A v5litepod-16: 4 hosts, 16 devices.", ("slice.accelerator_type=v5litepod-16",)),
    "spot": Overlay(
        "Spot nodes: cheaper, preempted 30 s after a notice; the trainer has 25 s of them to save.",
        ("slice.capacity=spot",),
    ),
    "kueue": Overlay(
        "Waits in a Kueue queue until all hosts can start together. An administrator applies queue.yaml once.",
        (f"gke.queue={QUEUE}",),
    ),
    "tensorflow": Overlay("TensorFlow, and its image for TPUs.", TENSORFLOW),
    "torch-xla": Overlay(
        "The PyTorch/XLA image of your own repository.",
        more=f"""\
images:
  - name: {IMAGE}
    # Yours.
    newName: us-central2-docker.pkg.dev/MY-PROJECT/MY-REPOSITORY/torch-xla
    digest: {NO_DIGEST}
""",
    ),
}


def files() -> dict[str, str]:
    """Returns path below k8s/ -> content of every generated file."""
    config, jobset = _rendered(())
    made = {"base/config.yaml": config, "base/jobset.yaml": jobset}
    metadata = yaml.safe_load(config)["metadata"]
    about = "A v4-16 (2 hosts, 8 devices), on demand."
    made["base/kustomization.yaml"] = _kustomization(about, fill(BASE, metadata))
    for name, overlay in OVERLAYS.items():
        content = dump({"resources": ["../../base"]}) + overlay.more + _patches(overlay)
        made[f"overlays/{name}/kustomization.yaml"] = _kustomization(overlay.about, content)
    example = load(EXAMPLE)
    values = {
        "flavor": example.accelerator.name,
        "nodes": node_selector(example),
        "chips": example.accelerator.chips,
        "queue": QUEUE,
        "namespace": example.gke.namespace,
    }
    made["overlays/kueue/queue.yaml"] = "---\n".join(fill(each, values) for each in KUEUE.split("---\n"))
    return {path: f"# {HEADING}\n{text}" for path, text in made.items()}


def objects_of(name: str) -> list[dict[str, Any]]:
    """Returns the objects that kubectl must build from an overlay."""
    return [yaml.safe_load(text) for text in _rendered(OVERLAYS[name].changes)]


def json_patch(old: Any, new: Any, path: str = "") -> list[dict[str, Any]]:
    """Returns the operations (RFC 6902) that turn `old` into `new`."""
    if isinstance(old, dict) and isinstance(new, dict):
        operations = [{"op": "remove", "path": f"{path}/{_escape(key)}"} for key in old if key not in new]
        for key, value in new.items():
            below = f"{path}/{_escape(key)}"
            operations += (
                json_patch(old[key], value, below) if key in old else [{"op": "add", "path": below, "value": value}]
            )
        return operations
    if isinstance(old, list) and isinstance(new, list) and len(new) >= len(old):
        operations = [
            operation
            for index, value in enumerate(old)
            for operation in json_patch(value, new[index], f"{path}/{index}")
        ]
        return operations + [{"op": "add", "path": f"{path}/-", "value": value} for value in new[len(old) :]]
    return [] if old == new else [{"op": "replace", "path": path, "value": new}]


def _escape(key: str) -> str:
    return key.replace("~", "~0").replace("/", "~1")


def _patches(overlay: Overlay) -> str:
    patches = []
    for old, new in zip(*(map(yaml.safe_load, _rendered(changes)) for changes in ((), overlay.changes)), strict=True):
        if operations := json_patch(old, new):
            target = {"kind": old["kind"], "name": old["metadata"]["name"]}
            patches.append({"target": target, "patch": textwrap.dedent(dump(operations))})
    return dump({"patches": patches}) if patches else ""


def _rendered(changes: tuple[str, ...]) -> list[str]:
    """Returns the YAML of the ConfigMap and the JobSet; the user creates the Secret."""
    config = load(EXAMPLE, changes)
    work = standalone_workload(config, config.run_name, f"{config.image.repository}@{NO_DIGEST}", secret="")
    config_map, *_, jobset = documents(work)
    return [config_map, jobset]


def _kustomization(about: str, content: str) -> str:
    return f"# {about}\napiVersion: kustomize.config.k8s.io/v1beta1\nkind: Kustomization\n{content}"


if __name__ == "__main__":
    for path, text in files().items():
        (FOLDER / path).parent.mkdir(parents=True, exist_ok=True)
        (FOLDER / path).write_text(text)
