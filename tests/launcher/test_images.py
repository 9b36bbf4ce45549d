"""Checks what decides an image's tag, and what a user reads if none can be made. Real builds: tests/rehearsal."""

import dataclasses
import os
from pathlib import Path
from typing import get_args
from unittest.mock import Mock

import pytest

from launcher import shell
from launcher.errors import BadInput
from launcher.images import engine, local
from launcher.images.build import show_steps
from launcher.images.plan import list_commands
from launcher.images.specification import ImageSpec, compute_tag, default_spec, folder_spec, parse_bases
from tests.launcher.run_files import SLICE, load_text
from training.registry import BackendName

BASE = {"debian:bookworm-slim": "sha256:0123"}


@pytest.fixture
def spec(tmp_path: Path) -> ImageSpec:
    (tmp_path / "Dockerfile").write_text("FROM debian:bookworm-slim\n")
    (tmp_path / "code.py").write_text("print(1)\n")
    return folder_spec("test/image", tmp_path)


def test_tag_changes_with_file_dockerfile_argument_target_and_base(spec: ImageSpec, tmp_path: Path) -> None:
    other_dockerfile = tmp_path / "other"
    other_dockerfile.write_text("FROM debian:bookworm-slim\n\n")
    tags = [
        compute_tag(spec, BASE),
        compute_tag(dataclasses.replace(spec, context=spec.context[1:]), BASE),
        compute_tag(dataclasses.replace(spec, dockerfile=other_dockerfile), BASE),
        compute_tag(dataclasses.replace(spec, build_args=(("A", "1"),)), BASE),
        compute_tag(dataclasses.replace(spec, target="test"), BASE),
        compute_tag(spec, {"debian:bookworm-slim": "sha256:4567"}),
    ]
    elsewhere = dataclasses.replace(spec, repository="host/project/name", ca_bundle=Path("/some/ca.pem"))
    assert compute_tag(elsewhere, BASE) == tags[0], "neither decides what the image holds"
    assert len(set(tags)) == len(tags)
    assert all(len(tag) == 16 for tag in tags)


@pytest.mark.parametrize("backend", get_args(BackendName))
def test_default_image_holds_the_trainer_but_no_leftovers_of_running_it(backend: str) -> None:
    paths = [path for path, _ in default_spec(backend).context]
    assert "training/errors.py" in paths
    assert "requirements.txt" in paths
    assert "Dockerfile" not in paths
    assert not [path for path in paths if "__pycache__" in path or path.endswith((".pyc", ".in"))]


@pytest.mark.parametrize("backend", get_args(BackendName))
def test_own_code_is_part_of_the_image_and_of_its_tag(backend: str, tmp_path: Path) -> None:
    (tmp_path / "lib").mkdir()
    (tmp_path / "train.py").write_text("1")
    (tmp_path / "lib" / "data.bin").write_text("2")
    (tmp_path / ".dockerignore").write_text("lib")
    bare, own = default_spec(backend), default_spec(backend, code=tmp_path)
    assert [path for path, _ in own.context if path.startswith("code/")] == ["code/train.py"]
    before = compute_tag(own, BASE)
    assert before != compute_tag(bare, BASE)
    (tmp_path / "train.py").write_text("3")
    assert compute_tag(default_spec(backend, code=tmp_path), BASE) != before


def test_what_an_image_can_not_be_made_of_is_named(tmp_path: Path) -> None:
    (tmp_path / ".env").write_text("TOKEN=1")
    with pytest.raises(BadInput, match=r"image\.code: .* has no files for an image"):
        default_spec("torch-xla", code=tmp_path)
    with pytest.raises(BadInput, match=r"no image for backend 'jax'; there are: .*torch-xla"):
        default_spec("jax")
    with pytest.raises(BadInput, match=r"nowhere: there is no such Dockerfile"):
        folder_spec("test/image", tmp_path, dockerfile=tmp_path / "nowhere")


def test_ca_bundle_comes_from_the_environment_and_must_exist(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    bundle = tmp_path / "ca.pem"
    monkeypatch.setenv("TPU_LAUNCH_CA_BUNDLE", str(bundle))
    with pytest.raises(BadInput, match=r"ca\.pem: there is no such CA bundle \(from TPU_LAUNCH_CA_BUNDLE\)"):
        default_spec("torch-xla")
    bundle.write_text("certificates")
    assert default_spec("torch-xla").ca_bundle == bundle


@pytest.mark.parametrize(
    ("dockerfile", "found"),
    [
        ("FROM debian:bookworm-slim\n", ("debian:bookworm-slim",)),
        ("from debian:bookworm-slim as a\nFROM a\n", ("debian:bookworm-slim",)),
        ("FROM --platform=linux/amd64 x AS b\nFROM y\nFROM b\nFROM x\n", ("x", "y")),
        ("ARG VERSION=12\nFROM debian:${VERSION}\n", ("debian:12",)),
        ("ARG BASE\nFROM ${BASE:-debian:12}\nFROM scratch\n", ("debian:12",)),
        ("ARG BASE=a\nFROM \\\n  $BASE AS c\nARG BASE=other\n", ("a",)),
        ("# FROM nothing\n", ()),
        ("ARG OVERRIDDEN=a\nFROM $OVERRIDDEN\n", ("mine",)),
    ],
)
def test_base_images_are_read_from_the_dockerfile(dockerfile: str, found: tuple[str, ...]) -> None:
    assert parse_bases(dockerfile, {"OVERRIDDEN": "mine"}) == found


def test_commands_are_shown_without_an_engine_and_touch_nothing(
    spec: ImageSpec, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DOCKER_HOST", f"unix://{tmp_path}/none.sock")
    bundle = tmp_path / "ca.pem"
    bundle.write_text("certificates")
    changes = {"repository": "r.example/p/n", "build_args": (("A", "b c"),), "target": "t", "ca_bundle": bundle}
    pull, build, tag, push = list_commands(dataclasses.replace(spec, **changes))
    assert pull[1:] == ["pull", "--quiet", "debian:bookworm-slim"]
    assert build[1] == "build"
    words = " ".join(build)
    for option in (f"--secret id=ca,src={bundle}", "--build-arg A=b c", "--target t", "--platform linux/amd64"):
        assert option in words
    assert tag[1:] == ["tag", "test/image:TAG", "r.example/p/n:TAG"]
    assert push[1:] == ["push", "r.example/p/n:TAG"]
    assert not os.path.exists(tmp_path / "home")


def test_only_steps_that_really_run_are_shown() -> None:
    shown: list[str] = []
    show = show_steps(shown.append)
    output = """\
#1 [internal] load build definition from Dockerfile
#1 DONE 0.0s
#5 [base 1/2] RUN apt-get   update
#5 sha256:0123
#5 CACHED
#6 [base 2/2] RUN pip
#6 0.524 Collecting
#6 DONE 1.2s"""
    for line in output.splitlines():
        show(line)
    assert shown == ["  [base 2/2] RUN pip"]


def test_a_command_whose_image_can_not_be_made_starts_and_removes_no_container(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The removal could take a minute and replace the error that says what to do."""
    calls: list[object] = []
    monkeypatch.setattr(engine, "require_engine", lambda: "docker")
    monkeypatch.setattr(local, "image", Mock(side_effect=BadInput("no Dockerfile")))
    monkeypatch.setattr(shell, "run", lambda argv, **_: calls.append(argv))
    with pytest.raises(BadInput, match="no Dockerfile"):
        local.run(load_text(tmp_path, SLICE + "run: {command: [train]}\n"), ["true"], print)
    assert calls == []
