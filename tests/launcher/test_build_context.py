"""What counts in an image's build context, and what doesn't."""

import os
import tempfile
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from launcher.errors import BadInput
from launcher.images import build_context
from launcher.images.specification import folder_spec

texts = st.text("abcXYZ09._- ü", min_size=1, max_size=6)
names = texts.filter(lambda name: name not in (".", "..") and name == name.strip())
contexts = st.dictionaries(names, st.tuples(st.binary(max_size=40), st.booleans()), min_size=1, max_size=5)
Context = dict[str, tuple[bytes, bool]]


def write(folder: Path, context: Context) -> None:
    for name, (content, executable) in context.items():
        (folder / name).write_bytes(content)
        (folder / name).chmod(0o755 if executable else 0o644)


def digest_of(context: Context) -> bytes:
    with tempfile.TemporaryDirectory() as folder:
        write(Path(folder), context)
        return build_context.digest(build_context.tree(Path(folder)))[0]


@given(contexts, contexts)
def test_any_difference_in_names_contents_or_the_executable_bit_changes_the_hash(one: Context, other: Context) -> None:
    assert (digest_of(one) == digest_of(other)) == (one == other)


@given(contexts, st.randoms(), st.integers(0, 2**31))
def test_neither_times_nor_umask_nor_order_change_the_hash(context: Context, shuffler: object, seconds: int) -> None:
    with tempfile.TemporaryDirectory() as folder:
        write(Path(folder), context)
        before = build_context.digest(build_context.tree(Path(folder)))[0]
        for path in Path(folder).iterdir():
            os.utime(path, (seconds, seconds))
            path.chmod(path.stat().st_mode & 0o700)
        entries = list(build_context.tree(Path(folder)))
        shuffler.shuffle(entries)  # type: ignore[attr-defined]
        assert build_context.digest(entries)[0] == before


@given(contexts)
def test_assembled_copy_has_the_same_hash(context: Context) -> None:
    with tempfile.TemporaryDirectory() as folder:
        source, copy = Path(folder, "source"), Path(folder, "copy")
        source.mkdir()
        write(source, context)
        (source / "link to nowhere").symlink_to("missing")
        entries = build_context.tree(source)
        build_context.assemble(entries, copy)
        assert build_context.digest(build_context.tree(copy))[0] == build_context.digest(entries)[0]


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
    make_folder(tmp_path, *FILES.split())
    (tmp_path / ".dockerignore").write_text("\n".join(lines))
    assert [path for path, _ in build_context.folder(tmp_path)] == left.split()


def test_missing_folder_is_named(tmp_path: Path) -> None:
    with pytest.raises(BadInput, match="none: there is no such folder"):
        build_context.folder(tmp_path / "none")


def make_folder(root: Path, *names: str) -> None:
    for name in names:
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(name)


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
    sent = [path for path, _ in build_context.folder(tmp_path)]
    assert sent == [".github/ci.yaml", "environment.py", "tokenizer.json", "train.py"]


@pytest.mark.parametrize(
    "content", [PEM, "CERTIFICATE\r\n" + PEM.replace("\n", "\r\n"), '{"type": "x", "private_key": "0123456789abcdef"}']
)
def test_files_that_hold_a_private_key_are_left_out_and_named_once(tmp_path: Path, content: str) -> None:
    make_folder(tmp_path, "train.py", "sub/.env", ".git/config")
    (tmp_path / "ca.pem").write_text("-----BEGIN CERTIFICATE-----\n" + "MIIEowIBAAKCAQEA" * 4)
    (tmp_path / "find.py").write_text('if "-----BEGIN PRIVATE KEY-----" in text or "private_key" in keys: print()\n')
    (tmp_path / "account").write_text(content)
    (tmp_path / "link").symlink_to("account")
    assert [path for path, _ in build_context.folder(tmp_path)] == ["ca.pem", "find.py", "train.py"]
    said: list[str] = []
    build_context.report_credentials(tmp_path, None, said.append)
    assert [line.partition(" credentials: ")[2].partition(";")[0] for line in said] == ["account, link, sub/.env"]
    (tmp_path / ".dockerignore").write_text("sub\nlink\n!account\n")
    assert [path for path, _ in build_context.folder(tmp_path)] == ["account", "ca.pem", "find.py", "train.py"]
    build_context.report_credentials(tmp_path, None, said.append)
    assert len(said) == 1, "the user has said what to do with each"


@pytest.mark.parametrize("name", ["state", "st[a]te*"])
def test_the_launchers_own_folder_is_left_out_whatever_its_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    make_folder(tmp_path, "train.py", "states/a", f"sub/{name}/runs/r/run.json")
    monkeypatch.setenv("TPU_LAUNCH_HOME", str(tmp_path / "sub" / name))
    assert [path for path, _ in build_context.folder(tmp_path)] == ["states/a", "train.py"]


def test_the_folders_dockerignore_can_let_a_private_file_in(tmp_path: Path) -> None:
    make_folder(tmp_path, "train.py", ".env", "sub/.env")
    (tmp_path / ".dockerignore").write_text("!sub/.env\n")
    assert [path for path, _ in build_context.folder(tmp_path)] == ["sub/.env", "train.py"]


def test_the_ignore_file_of_the_dockerfile_counts_instead_of_the_folders(tmp_path: Path) -> None:
    make_folder(tmp_path, "a.py", "b.py", "docker/tpu.Dockerfile")
    (tmp_path / ".dockerignore").write_text("a.py\n")
    dockerfile = tmp_path / "docker" / "tpu.Dockerfile"
    dockerfile.with_name("tpu.Dockerfile.dockerignore").write_text("b.py\ndocker\n")
    assert [path for path, _ in build_context.folder(tmp_path, dockerfile)] == ["a.py"]
    assert [path for path, _ in folder_spec("test", tmp_path, dockerfile=dockerfile).context] == ["a.py"]


@pytest.mark.parametrize("content", [b"\xff\xfe\x00", b"[z-a]x\n"])
def test_an_ignore_file_that_can_not_be_used_is_named(tmp_path: Path, content: bytes) -> None:
    make_folder(tmp_path, "train.py")
    (tmp_path / ".dockerignore").write_bytes(content)
    with pytest.raises(BadInput, match=r"\.dockerignore: can't be used: "):
        build_context.folder(tmp_path)
