"""Writes k8s/: the output of `tpu-launch manifest` as a kustomize base with overlays, for users of kubectl alone.

An overlay is the effect of other values in examples/gke.yaml: a JSON patch (RFC 6902) between both
manifests. A test checks that k8s/ is up to date and that kubectl builds it. To write it again:
.venv/bin/python -m tools.kustomize
"""

from __future__ import annotations

import textwrap
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from launcher.config import load
from launcher.gke.commented_yaml import Commented, dump, dump_documents
from launcher.gke.manifest import SECRET_KEY, make_objects, standalone_workload
from launcher.gke.workload import node_selector

ROOT = Path(__file__).resolve().parent.parent
FOLDER = ROOT / "k8s"
EXAMPLE = ROOT / "examples" / "gke.yaml"
HEADING = "Made by tools/kustomize.py; its source is launcher/gke/manifest.py with examples/gke.yaml."
IMAGE = "us-central2-docker.pkg.dev/my-project/tpu-launch/torch-xla"
NO_DIGEST = "sha256:" + "0" * 64  # stands for the user's own
QUEUE = "tpu-queue"
TENSORFLOW = (
    "backend=tensorflow",
    "image={repository: us-central2-docker.pkg.dev/my-project/tpu-launch/tensorflow, build_args: {REQUIREMENTS: "
    "requirements-tpu.txt}}",
)


@dataclass(frozen=True)
class Overlay:
    """One overlay of the base."""

    about: str
    """The comment at its top."""

    changes: tuple[str, ...] = ()
    """Keys of examples/gke.yaml with other values."""

    more: dict[str, Any] = field(default_factory=dict)
    """More fields of the kustomization."""


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
        more={
            "images": [
                {
                    "name": IMAGE,
                    "newName": Commented("us-central2-docker.pkg.dev/MY-PROJECT/MY-REPOSITORY/torch-xla", "Yours."),
                    "digest": NO_DIGEST,
                }
            ]
        },
    ),
}


SECRET_FILE = "host-secret"  # in base/, created by the user


def files() -> dict[str, str]:
    """Returns path below k8s/ -> content of every generated file."""
    base = _rendered(())
    names = {"ConfigMap": "config.yaml", "JobSet": "jobset.yaml"}
    made = {f"base/{names[strip_comments(node)['kind']]}": dump_documents([node], HEADING) for node in base}
    made["base/kustomization.yaml"] = _kustomization(
        "A v4-16 (2 hosts, 8 devices), on demand.",
        {"resources": list(names.values()), "secretGenerator": [_secret(base[0]["metadata"])]},
    )
    for name, overlay in OVERLAYS.items():
        made[f"overlays/{name}/kustomization.yaml"] = _kustomization(
            overlay.about, {"resources": ["../../base"], **overlay.more, **_patches(overlay)}
        )
    made["overlays/kueue/queue.yaml"] = dump_documents(queue(), HEADING)
    return made


def _secret(metadata: dict[str, Any]) -> Any:
    """Returns the generator of the Secret that the hosts share, from a file outside the repository."""
    comment = (
        f"Shared by the hosts, which let in no others. Create it first: openssl rand -hex 32 >k8s/base/{SECRET_FILE}"
    )
    generator = {
        "name": metadata["name"],
        "namespace": metadata["namespace"],
        "files": [f"{SECRET_KEY}={SECRET_FILE}"],
        "options": {"disableNameSuffixHash": True, "labels": metadata["labels"]},
    }
    return Commented(generator, comment)


def objects_of(name: str) -> list[dict[str, Any]]:
    """Returns the objects that kubectl must build from an overlay."""
    return [strip_comments(node) for node in _rendered(OVERLAYS[name].changes)]


def strip_comments(node: Any) -> Any:
    """Returns a value without its comments."""
    if isinstance(node, Commented):
        return strip_comments(node.value)
    if isinstance(node, dict):
        return {key: strip_comments(value) for key, value in node.items()}
    if isinstance(node, list):
        return [strip_comments(value) for value in node]
    return node


def queue() -> list[Any]:
    """Returns Kueue's objects for the nodes of the base."""
    config = load(EXAMPLE)
    api = "kueue.x-k8s.io/v1beta1"
    chips = config.accelerator.chips
    quota = {
        "name": "google.com/tpu",
        "nominalQuota": Commented(chips, "Chips that may be in use at once: those of one slice."),
    }
    return [
        Commented(
            {
                "apiVersion": api,
                "kind": "ResourceFlavor",
                "metadata": {"name": config.accelerator.name},
                "spec": {"nodeLabels": node_selector(config)},
            },
            "The nodes.",
        ),
        {
            "apiVersion": api,
            "kind": "ClusterQueue",
            "metadata": {"name": "tpu"},
            "spec": {
                "namespaceSelector": {},
                "resourceGroups": [
                    {
                        "coveredResources": ["google.com/tpu"],
                        "flavors": [{"name": config.accelerator.name, "resources": [quota]}],
                    }
                ],
            },
        },
        Commented(
            {
                "apiVersion": api,
                "kind": "LocalQueue",
                "metadata": {"name": QUEUE, "namespace": config.gke.namespace},
                "spec": {"clusterQueue": "tpu"},
            },
            "What gke.queue names.",
        ),
    ]


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


def _patches(overlay: Overlay) -> dict[str, Any]:
    patches = []
    for old, new in zip(_rendered(()), _rendered(overlay.changes), strict=True):
        operations = json_patch(strip_comments(old), strip_comments(new))
        if operations:
            target = {"kind": strip_comments(old)["kind"], "name": strip_comments(old)["metadata"]["name"]}
            patches.append({"target": target, "patch": textwrap.dedent(dump(operations))})
    return {"patches": patches} if patches else {}


def _rendered(changes: tuple[str, ...]) -> list[Any]:
    config = load(EXAMPLE, changes)
    work = standalone_workload(config, config.run_name, f"{config.image.repository}@{NO_DIGEST}", secret="")
    return [each for each in make_objects(work) if each["kind"] != "Secret"]  # the user creates the Secret


def _kustomization(about: str, content: dict[str, Any]) -> str:
    node = {"apiVersion": "kustomize.config.k8s.io/v1beta1", "kind": "Kustomization", **content}
    return dump_documents([Commented(node, about)], HEADING)


if __name__ == "__main__":
    for path, text in files().items():
        (FOLDER / path).parent.mkdir(parents=True, exist_ok=True)
        (FOLDER / path).write_text(text)
