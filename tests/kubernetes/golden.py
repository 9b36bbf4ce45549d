"""Golden manifests: a review shows what a change does to them. `python -m tests.kubernetes.golden` makes them."""

from pathlib import Path

from launcher.config import load
from launcher.gke import manifest
from tools import kustomize

FOLDER = Path(__file__).resolve().parent / "golden"
EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "gke.yaml"
SECRET = "0123456789abcdef" * 4
DIGEST = "sha256:" + "0123456789abcdef" * 4
IMAGE = f"{kustomize.IMAGE}@{DIGEST}"

# name: changes to examples/gke.yaml
CASES: dict[str, tuple[str, ...]] = {
    "jobset-v4-16": (),
    "jobset-v4-16-tensorflow": kustomize.TENSORFLOW,
    "jobset-v5litepod-8": ("slice.accelerator_type=v5litepod-8",),
    "jobset-v3-32-everything": (
        "slice.accelerator_type=v3-32",
        "slice.capacity=spot",
        "gke.queue=tpu-queue",
        "gke.namespace=research",
        "gke.restarts=3",
        "gke.cpu='40'",
        "gke.memory=300Gi",
        "gke.secrets={HF_TOKEN: huggingface/token}",
        "gke.node_cache=/var/lib/tpu-launch",
        "gke.gcsfuse={bucket: my-bucket, folder: /bucket, read_only: true}",
        "gke.node_selector={cloud.google.com/gke-nodepool: v3-32}",
        "run.environment={WANDB_MODE: offline, GREETING: 'a b: c # d'}",
        "run.user='1000:1000'",
        "run.shm_size=64g",
    ),
}


def render(name: str) -> str:
    config = load(EXAMPLE, CASES[name])
    return manifest.render(config, image=f"{config.image.repository}@{DIGEST}", secret=SECRET)


if __name__ == "__main__":
    for each in CASES:
        (FOLDER / f"{each}.yaml").write_text(render(each))
