"""k8s/ is what the code renders, and kubectl builds from it what tpu-launch would apply."""

import base64
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from launcher.shell import find
from tests.kubernetes import schemas
from tools import kustomize
from training.accelerators import ACCELERATORS, gke_nodes

K8S = kustomize.FOLDER


@pytest.fixture
def written(tmp_path: Path) -> Path:
    """Returns a copy of k8s/ with the file that its user creates."""
    folder = tmp_path / "k8s"
    shutil.copytree(K8S, folder)
    (folder / "base" / kustomize.SECRET_FILE).write_text("0123456789abcdef0123456789abcdef\n")
    return folder


def built(folder: Path) -> list[dict[str, Any]]:
    text = subprocess.check_output([find("kubectl"), "kustomize", str(folder)], text=True, timeout=60)
    return list(yaml.safe_load_all(text))


def test_every_file_is_what_the_code_renders() -> None:
    for path, text in kustomize.files().items():
        assert (K8S / path).read_text() == text, "if intended: python -m tools.kustomize, and review the difference"
    kept = [path for folder in ("base", "overlays") for path in (K8S / folder).rglob("*") if path.is_file()]
    assert {str(path.relative_to(K8S)) for path in kept} == set(kustomize.files())


@pytest.mark.parametrize("name", kustomize.OVERLAYS)
def test_kubectl_builds_from_an_overlay_what_tpu_launch_renders(written: Path, name: str) -> None:
    found = {each["kind"]: each for each in built(written / "overlays" / name)}
    for wanted in kustomize.objects_of(name):
        assert schemas.mistakes(found[wanted["kind"]]) == []
        if name == "torch-xla":  # differs by the reader's own repository alone
            text = yaml.safe_dump(found[wanted["kind"]]).replace("MY-PROJECT/MY-REPOSITORY", "my-project/tpu-launch")
            found[wanted["kind"]] = yaml.safe_load(text)
        for each in (found[wanted["kind"]], wanted):
            if "data" in each:  # kustomize takes the last line's end from a patch
                each["data"] = {key: text.rstrip("\n") for key, text in each["data"].items()}
        assert found[wanted["kind"]] == wanted
    secret = found["Secret"]
    assert schemas.mistakes(secret) == []
    assert secret["metadata"] == found["ConfigMap"]["metadata"], "one name, namespace and labels"
    assert base64.b64decode(secret["data"]["secret"]) == b"0123456789abcdef0123456789abcdef\n"
    assert len(found) == 3


def test_the_base_is_valid(written: Path) -> None:
    assert [schemas.mistakes(each) for each in built(written / "base")] == [[], [], []]


def test_without_the_secret_kubectl_builds_nothing_and_names_its_file() -> None:
    command = [find("kubectl"), "kustomize", str(K8S / "base")]
    refused = subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)
    assert refused.returncode != 0
    assert f"base/{kustomize.SECRET_FILE}" in refused.stderr


def test_the_queue_and_the_role_are_valid() -> None:
    for path in ("overlays/kueue/queue.yaml", "role.yaml"):
        for document in yaml.safe_load_all((K8S / path).read_text()):
            assert schemas.mistakes(document) == []


def test_the_guide_names_every_machine_type() -> None:
    guide = (K8S.parent / "docs" / "guide" / "gke.md").read_text()
    for slice_ in ACCELERATORS.values():
        if slice_.generation.name != "v2":
            assert f"`{gke_nodes(slice_).machine_type}`" in guide
