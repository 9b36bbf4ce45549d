"""Claims about an image's tag, which its build context and its specification decide. Real builds: tests/rehearsal."""

import dataclasses
import io
import os
import re
import tempfile
from pathlib import Path
from random import Random
from typing import Any, get_args
from unittest.mock import Mock

import pytest
from hypothesis import given
from hypothesis import strategies as st

from launcher import shell
from launcher.errors import BadInput
from launcher.images import build_context, engine, local
from launcher.images.build import list_commands, show_steps
from launcher.images.specification import ImageSpec, compute_tag, default_spec, folder_spec, parse_bases
from tests.launcher.run_files import SLICE, load_text
from training.registry import BackendName

BASE = {"debian:bookworm-slim": "sha256:0123"}


def make_folder(root: Path, *names: str, ignore: str = "") -> None:
    for name in names:
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(name)
    (root / ".dockerignore").write_text(ignore)


def sent(folder: Path, dockerfile: Path | None = None) -> list[str]:
    return [path for path, _ in build_context.folder(folder, dockerfile)]


@pytest.fixture
def spec(tmp_path: Path) -> ImageSpec:
    (tmp_path / "Dockerfile").write_text("FROM debian:bookworm-slim\n")
    (tmp_path / "code.py").write_text("print(1)\n")
    return folder_spec("test/image", tmp_path)


def test_tag_changes_with_file_dockerfile_argument_target_and_base(spec: ImageSpec, tmp_path: Path) -> None:
    other = tmp_path / "other"
    other.write_text("FROM debian:bookworm-slim\n\n")
    changes: list[dict[str, Any]] = [
        {}, {"context": spec.context[1:]}, {"dockerfile": other}, {"build_args": (("A", "1"),)}, {"target": "test"},
    ]  # fmt: skip
    tags = {compute_tag(dataclasses.replace(spec, **change), BASE) for change in changes}
    tags.add(compute_tag(spec, {"debian:bookworm-slim": "sha256:4567"}))
    assert [len(tag) for tag in tags] == [16] * 6
    elsewhere = dataclasses.replace(spec, repository="host/project/name", ca_bundle=Path("/some/ca.pem"))
    assert compute_tag(elsewhere, BASE) == compute_tag(spec, BASE), "neither decides what the image holds"


@pytest.mark.parametrize("backend", get_args(BackendName))
def test_an_image_and_its_tag_hold_the_trainer_and_own_code_but_no_leftovers(backend: str, tmp_path: Path) -> None:
    make_folder(tmp_path, "train.py", "lib/data.bin", ignore="lib")
    bare, own = default_spec(backend), default_spec(backend, code=tmp_path)
    paths = [path for path, _ in bare.context]
    assert {"training/errors.py", "requirements.txt"} <= set(paths)
    assert not [path for path in paths if re.search(r"^Dockerfile$|__pycache__|\.(pyc|in)$", path)]
    assert [path for path, _ in own.context if path.startswith("code/")] == ["code/train.py"]
    tags = {compute_tag(bare, BASE), compute_tag(own, BASE)}
    (tmp_path / "train.py").write_text("3")
    assert len({*tags, compute_tag(default_spec(backend, code=tmp_path), BASE)}) == 3


def test_what_an_image_can_not_be_made_of_is_named(tmp_path: Path) -> None:
    (tmp_path / ".env").write_text("TOKEN=1")
    with pytest.raises(BadInput, match=r"image\.code: .* has no files for an image"):
        default_spec("torch-xla", code=tmp_path)
    with pytest.raises(BadInput, match=r"no image for backend 'jax'; there are: .*torch-xla"):
        default_spec("jax")
    with pytest.raises(BadInput, match="none: there is no such folder"):
        build_context.folder(tmp_path / "none")
    with pytest.raises(BadInput, match=r"nowhere: there is no such Dockerfile"):
        folder_spec("test/image", tmp_path, dockerfile=tmp_path / "nowhere")
    for content in (b"\xff\xfe\x00", b"[z-a]x\n"):
        (tmp_path / ".dockerignore").write_bytes(content)
        with pytest.raises(BadInput, match=r"\.dockerignore: can't be used: "):
            build_context.folder(tmp_path)


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
        ("ARG BASE=a\nFROM \\\n # as b\n  $BASE AS c\nARG BASE=other\n", ("a",)),
        ("# FROM nothing \\\nFROM x\nRUN true\n", ("x",)),
        ("FROM x\nRUN python3 - <<'EOF'\nfrom os import path\nEOF\nFROM y\n", ("x", "y")),
        ("FROM x AS Build\nFROM build\nFROM\n", ("x",)),
        ("ARG A=1 B=2\nARG C=y:$B\nFROM x:$A\nFROM ${C}\n", ("x:1", "y:2")),
        ("ARG OVERRIDDEN=a\nFROM $OVERRIDDEN\n", ("mine",)),
    ],
)
def test_base_images_are_read_from_the_dockerfile(dockerfile: str, found: tuple[str, ...]) -> None:
    assert parse_bases(dockerfile, {"OVERRIDDEN": "mine"}) == found


def test_commands_are_shown_without_an_engine(spec: ImageSpec, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DOCKER_HOST", f"unix://{tmp_path}/none.sock")
    bundle = tmp_path / "ca.pem"
    bundle.write_text("certificates")
    changes = {"repository": "r.example/p/n", "build_args": (("A", "b c"),), "target": "t", "ca_bundle": bundle}
    pull, build, tag, push = list_commands(dataclasses.replace(spec, **changes))
    assert pull[1:] == ["pull", "--quiet", "debian:bookworm-slim"]
    assert build[3] == "build"
    words = " ".join(build)
    for option in (f"--secret id=ca,src={bundle}", "--build-arg A=b c", "--target t", "--platform linux/amd64"):
        assert option in words
    assert tag[1:] == ["tag", "test/image:TAG", "r.example/p/n:TAG"]
    assert push[1:] == ["push", "r.example/p/n:TAG"]
    assert not os.path.exists(tmp_path / "home")


def test_only_steps_that_really_run_are_shown() -> None:
    shown: list[str] = []
    show = show_steps(shown.append)
    for line in (
        "#1 [internal] load build definition from Dockerfile", "#1 DONE 0.0s",
        "#5 [base 1/2] RUN apt-get   update", "#5 sha256:0123", "#5 CACHED",
        "#6 [base 2/2] RUN pip", "#6 0.524 Collecting", "#6 DONE 1.2s",
    ):  # fmt: skip
        show(line)
    assert shown == ["  [base 2/2] RUN pip"]


def test_a_command_without_an_image_touches_no_container(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The removal could take a minute and replace the error that says what to do."""
    monkeypatch.setattr(engine, "require_engine", lambda: "docker")
    monkeypatch.setattr(local, "image", Mock(side_effect=BadInput("no Dockerfile")))
    monkeypatch.setattr(shell, "run", calls := Mock())
    with pytest.raises(BadInput, match="no Dockerfile"):
        local.run(load_text(tmp_path, SLICE + "run: {command: [train]}\n"), ["true"], print)
    assert not calls.mock_calls


def test_a_local_command_gets_the_users_google_credentials(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine, "require_engine", lambda: "docker")
    for name in ("run", "stream"):
        monkeypatch.setattr(shell, name, calls := Mock())
    monkeypatch.setenv("CLOUDSDK_CONFIG", str(tmp_path))
    for file in ("application_default_credentials.json", "key.json"):
        (tmp_path / file).touch()
        local.run(load_text(tmp_path, SLICE), ["true"], print, reference="i")
        assert f"{tmp_path / file}:/etc/google-credentials.json:ro" in calls.call_args.args[0]
        monkeypatch.setenv("GOOGLE_APPLICATION_CREDENTIALS", str(tmp_path / "key.json"))


names = st.text("abcXYZ09._- ü", min_size=1, max_size=6).filter(lambda n: n not in (".", "..") and n == n.strip())
contexts = st.dictionaries(names, st.tuples(st.binary(max_size=40), st.booleans()), min_size=1, max_size=5)
Context = dict[str, tuple[bytes, bool]]


def write(folder: Path, context: Context) -> None:
    for name, (content, executable) in context.items():
        (folder / name).write_bytes(content)
        (folder / name).chmod(0o755 if executable else 0o644)


@given(contexts, contexts)
def test_any_difference_in_names_contents_or_the_executable_bit_changes_the_hash(one: Context, other: Context) -> None:
    hashes = []
    for context in (one, other):
        with tempfile.TemporaryDirectory() as folder:
            write(Path(folder), context)
            hashes.append(build_context.hash_files(build_context.tree(Path(folder))))
    assert (hashes[0] == hashes[1]) == (one == other)


@given(contexts, st.randoms(use_true_random=False), st.integers(0, 2**31))
def test_a_copy_times_umask_and_order_do_not_change_the_hash(context: Context, shuffler: Random, seconds: int) -> None:
    with tempfile.TemporaryDirectory() as folder:
        source, copy = Path(folder, "source"), Path(folder, "copy")
        source.mkdir()
        write(source, context)
        (source / "link to nowhere").symlink_to("missing")
        before = build_context.hash_files(build_context.tree(source))
        build_context.assemble(build_context.tree(source), copy)
        assert build_context.hash_files(build_context.tree(copy)) == before
        for name in context:
            os.utime(source / name, (seconds, seconds))
            (source / name).chmod((source / name).stat().st_mode & 0o700)
        entries = list(build_context.tree(source))
        shuffler.shuffle(entries)
        assert build_context.hash_files(entries) == before


FILES = "Dockerfile a.py data/big.bin data/keep.txt deep/x/_cache/a.bin deep/x/b.py log.txt"


@pytest.mark.parametrize(
    ("lines", "left"),
    [
        ([], FILES),
        (["data"], "Dockerfile a.py deep/x/_cache/a.bin deep/x/b.py log.txt"),
        (["/data/", "# a comment", "", "*.txt"], "Dockerfile a.py deep/x/_cache/a.bin deep/x/b.py"),
        (["**/_cache", "**/*.txt"], "Dockerfile a.py data/big.bin deep/x/b.py"),
        (["data/*", "!data/keep.txt"], "Dockerfile a.py data/keep.txt deep/x/_cache/a.bin deep/x/b.py log.txt"),
        (["*", "!*.py"], "a.py"),
        (["**", "!deep/**/b.py"], "deep/x/b.py"),
        (["de?p", "[a-d]*"], "Dockerfile log.txt"),
        (["big.bin"], FILES),
    ],
)
def test_dockerignore_leaves_out_what_docker_leaves_out(tmp_path: Path, lines: list[str], left: str) -> None:
    make_folder(tmp_path, *FILES.split(), ignore="\n".join(lines))
    assert sent(tmp_path) == left.split()


def test_a_file_is_not_read_at_once(spec: ImageSpec, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Path, "read_bytes", Mock(side_effect=MemoryError))
    assert spec.hashes["code.py"] == build_context.hash_file(b"file", io.BytesIO(b"print(1)\n"))


def test_a_folder_that_cannot_be_listed_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make_folder(tmp_path, "a.py", "data/b.py")
    monkeypatch.setattr(os, "scandir", lambda path, scan=os.scandir: scan(str(path).replace("/data", "/a.py")))
    with pytest.raises(BadInput, match=r"a\.py: can't be read"):
        sent(tmp_path)


PRIVATE = (
    *(".env", "deploy/.env", "prod.env", ".env.local", ".git/config", "sub/.git/HEAD", ".tpu-launch/runs/r/run.json"),
    *(".venv/bin/python", "node_modules/a.js", "a/__pycache__/b.pyc", ".mypy_cache/x", ".netrc", ".ssh/config"),
    *("keys/id_ed25519", "server.key", ".aws/credentials", ".kube/config", ".docker/config.json", ".git-credentials"),
    *(".config/gcloud/credentials.db", "application_default_credentials.json", "my-service-account.json"),
    *("my-project-0123456789ab.json", "sa-key.json", "tls/privkey.pem", "client_secret_1-a.json", "token.json"),
    *("kubeconfig", "prod.kubeconfig", "venv/bin/python"),
)
PEM = "-----BEGIN RSA PRIVATE KEY-----\n" + "MIIEowIBAAKCAQEA" * 4


def test_secrets_and_state_of_this_machine_are_not_sent(tmp_path: Path) -> None:
    make_folder(tmp_path, "train.py", "environment.py", "tokenizer.json", ".github/ci.yaml", *PRIVATE)
    os.mkfifo(tmp_path / "pipe")
    code = [".github/ci.yaml", "environment.py", "tokenizer.json", "train.py"]
    assert sent(tmp_path) == code
    (tmp_path / ".dockerignore").write_text("!deploy/.env\n")
    assert sent(tmp_path) == sorted([*code, "deploy/.env"]), "wanted"


@pytest.mark.parametrize(
    "content", [PEM, "CERTIFICATE\r\n" + PEM.replace("\n", "\r\n"), '{"type": "x", "private_key": "0123456789abcdef"}']
)
def test_files_that_hold_a_private_key_are_left_out_and_named_once(tmp_path: Path, content: str) -> None:
    make_folder(tmp_path, "train.py", "sub/.env", ".git/config")
    (tmp_path / "ca.pem").write_text("-----BEGIN CERTIFICATE-----\n" + "MIIEowIBAAKCAQEA" * 4)
    (tmp_path / "find.py").write_text('if "-----BEGIN PRIVATE KEY-----" in text or "private_key" in keys: print()\n')
    (tmp_path / "account").write_text(content)
    (tmp_path / "link").symlink_to("account")
    assert sent(tmp_path) == ["ca.pem", "find.py", "train.py"]
    said: list[str] = []
    build_context.report_credentials(tmp_path, None, said.append)
    assert [line.partition(" credentials: ")[2].partition(";")[0] for line in said] == ["account, link, sub/.env"]
    (tmp_path / ".dockerignore").write_text("sub\nlink\n!account\n")
    assert sent(tmp_path) == ["account", "ca.pem", "find.py", "train.py"]
    build_context.report_credentials(tmp_path, None, said.append)
    assert len(said) == 1, "the user has said what to do with each"


@pytest.mark.parametrize("name", ["state", "st[a]te*"])
def test_the_launchers_own_folder_is_left_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    make_folder(tmp_path, "train.py", "states/a", f"sub/{name}/runs/r/run.json")
    monkeypatch.setenv("TPU_LAUNCH_HOME", str(tmp_path / "sub" / name))
    assert sent(tmp_path) == ["states/a", "train.py"]


def test_the_ignore_file_of_the_dockerfile_counts_instead_of_the_folders(tmp_path: Path) -> None:
    make_folder(tmp_path, "a.py", "b.py", "docker/tpu.Dockerfile", ignore="a.py\n")
    dockerfile = tmp_path / "docker" / "tpu.Dockerfile"
    dockerfile.with_name("tpu.Dockerfile.dockerignore").write_text("b.py\ndocker\n")
    assert sent(tmp_path, dockerfile) == ["a.py"]
    assert [path for path, _ in folder_spec("test", tmp_path, dockerfile=dockerfile).context] == ["a.py"]
