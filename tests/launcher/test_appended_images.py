"""Images put together in a registry, without an engine: what travels, what they hold, what a user reads if it fails."""

import gzip
import io
import json
import os
import subprocess
import sys
import tarfile
from pathlib import Path
from typing import Any

import pytest

from launcher.checks.doctor import _engine, check_base_image
from launcher.config import Config, load
from launcher.emulator.http_server import HttpRequest
from launcher.errors import BadInput
from launcher.images import appended, local, overlays, repositories
from launcher.images.layers import LARGE_BYTES, make_layers
from launcher.images.registry import Blob, ManifestDocument, Registry, sha256
from launcher.images.repositories import RegistryCredentials, find_credentials
from tests.kubernetes.golden import EXAMPLE
from tests.launcher.run_files import SLICE, load_text
from tests.launcher.script_host import write_program
from tests.servers import HOST, OTHER_HOST, TOKEN, RegistryServer

MANIFEST = "application/vnd.docker.distribution.manifest.v2+json"
REPOSITORY, MINE = f"{OTHER_HOST}/p/images/code", f"{OTHER_HOST}/p/images/mine:1"
FILE = f"""\
{SLICE}image: {{repository: {REPOSITORY}, build: registry, backend: torch-xla, code: own}}
run: {{command: [python, main.py]}}
"""


@pytest.fixture
def server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, registry: RegistryServer) -> RegistryServer:
    """A registry to which docker's settings have the login."""
    login = RegistryCredentials("oauth2accesstoken", TOKEN).basic.removeprefix("Basic ")
    (tmp_path / "docker").mkdir()
    (tmp_path / "docker" / "config.json").write_text(json.dumps({"auths": {OTHER_HOST: {"auth": login}}}))
    monkeypatch.setenv("DOCKER_CONFIG", str(tmp_path / "docker"))
    return registry


@pytest.fixture
def code(tmp_path: Path) -> Path:
    """The folder of a program of two files."""
    tool = write_program(tmp_path / "own", "tool.sh")
    tool.chmod(0o700)
    (tool.parent / "main.py").write_text("print(1)\n")
    return tool.parent


@pytest.fixture
def config(tmp_path: Path, code: Path) -> Config:
    return load_text(tmp_path, FILE)


def push_base(name: str, labels: dict[str, str] | None = None, folder: str = "/home/trainer") -> None:
    """An image of one layer with a working directory, as an engine pushes it."""
    reference = repositories.parse_reference(name)
    archive = io.BytesIO()
    with tarfile.open(fileobj=archive, mode="w") as files:
        files.addfile(tarfile.TarInfo("base-file"))
    layer = Blob(gzip.compress(archive.getvalue(), mtime=0))
    settings = {"WorkingDir": folder, "Labels": labels or {}}
    rootfs = {"type": "layers", "diff_ids": [sha256(archive.getvalue())]}
    fields = {"os": "linux", "architecture": "amd64", "config": settings, "rootfs": rootfs}
    described = Blob(json.dumps(fields).encode())
    entries = [{"digest": blob.digest, "size": len(blob.data)} for blob in (described, layer)]
    body = json.dumps({"schemaVersion": 2, "mediaType": MANIFEST, "config": entries[0], "layers": entries[1:]})
    with Registry(reference.host, find_credentials, writes=reference.path) as registry:
        for blob in (described, layer):
            registry.upload(reference.path, blob)
        registry.write_manifest(reference.path, reference.version, ManifestDocument(MANIFEST, body.encode()))


def push_our_base(config: Config) -> None:
    push_base(str(appended.base_reference(local.image_spec(config))), {"tpu-launch.framework": "torch-xla"})


def make(config: Config) -> str:
    return local.image(config, lambda line: None).reference


def read(name: str) -> tuple[dict[str, tarfile.TarInfo], Any]:
    """The entries of an image's layers, upper over lower ones, with their text in `pax_headers`; its configuration."""
    reference, entries = repositories.parse_reference(name), {}
    with Registry(reference.host, find_credentials, reads=[reference.path]) as registry:
        manifest = json.loads(registry.require_manifest(reference.path, reference.digest).body)
        blobs = [
            registry.read_blob(reference.path, entry["digest"], entry["size"])
            for entry in (manifest["config"], *manifest["layers"])
        ]
    for packed in blobs[1:]:
        with tarfile.open(fileobj=io.BytesIO(packed)) as archive:
            for entry in archive:
                content = archive.extractfile(entry)
                entry.pax_headers = {"text": content.read().decode(errors="replace") if content else ""}
                entries[entry.name] = entry
    return entries, json.loads(blobs[0])


def test_only_changed_layers_are_sent_with_their_manifest(server: RegistryServer, config: Config, code: Path) -> None:
    push_our_base(config)
    (code / "weights.bin").write_bytes(os.urandom(LARGE_BYTES))
    assert local.published(config) is None
    first, sent = make(config), server.bytes_received
    assert local.published(config) == first
    assert sent > LARGE_BYTES
    for path in code.iterdir():
        os.utime(path, (1, 1))
    assert (make(config), server.bytes_received) == (first, sent)
    (code / "main.py").write_text("print(2)\n")
    second = make(config)
    assert second != first
    assert server.bytes_received - sent < 4000
    for name, text in ((first, "print(1)\n"), (second, "print(2)\n")):
        assert read(name)[0]["home/trainer/main.py"].pax_headers["text"] == text
    os.truncate(code / "weights.bin", 2**42)
    for name, told in (("removed", "can't be read for"), ("weights.bin", "the files of an image's layer are more")):
        with pytest.raises(BadInput, match=f"{name}: {told}"):
            make_layers([(name, code / name)], "/app", "title")


@pytest.mark.usefixtures("server")
def test_the_image_holds_what_a_build_would_copy(config: Config, code: Path) -> None:
    (code / ".env").write_text("SECRET=1\n")
    (code / "package").mkdir()
    (code / "package" / "link.py").symlink_to("../main.py")
    push_our_base(config)
    entries, described = read(make(config))
    assert entries["base-file"]
    assert "from training" in entries["opt/tpu-launch/training/cli/__main__.py"].pax_headers["text"]
    assert entries["home/trainer/tool.sh"].mode == 0o755
    assert entries["home/trainer/main.py"].mode == 0o644
    assert entries["home/trainer/package"].isdir()
    assert entries["home/trainer/package/link.py"].linkname == "../main.py"
    assert not [path for path in entries if path.endswith((".env", ".pyc")) or path in ("home", "home/trainer")]
    assert {(entry.uid, entry.gid, entry.mtime) for entry in entries.values()} == {(0, 0, 0)}
    assert described["config"]["WorkingDir"] == "/home/trainer"
    assert len(described["rootfs"]["diff_ids"]) == 3
    history = [entry["created_by"] for entry in described["history"]]
    assert history == ["tpu-launch: the trainer", "tpu-launch: image.code"]


def test_a_users_own_base_gets_only_the_code_and_is_not_sent(server: RegistryServer, config: Config) -> None:
    push_base(MINE, folder="/srv/app")
    text = FILE.replace("build: registry", f"base: {MINE}")
    name = make(load_text(config.folder, text))
    assert name.startswith(f"{REPOSITORY}@sha256:")
    assert set(read(name)[0]) == {"base-file", "srv/app/main.py", "srv/app/tool.sh"}
    assert not [line for line in server.asked if line.startswith("GET") and "/mine/blobs/" in line][1:]
    with pytest.raises(BadInput, match="nothing to append"):
        make(load_text(config.folder, text.replace(", code: own", "")))


def test_sync_goes_where_the_base_has_code_and_sees_edits(server: RegistryServer, tmp_path: Path, code: Path) -> None:
    push_base(MINE, folder="/srv/app")
    config, home = load_text(tmp_path, FILE.replace("build: registry", f"base: {MINE}")), tmp_path / "home"
    (code / "link.py").symlink_to("main.py")
    (code / "token.json").write_text("{}")
    with pytest.raises(BadInput, match=r"where is that folder in your image"):
        overlays.find_changes(str(code), config, home, None)

    def edit(request: HttpRequest) -> None:
        if request.method == "PUT" and "/manifests/" in request.path:
            (code / "main.py").write_text("print(2)\n")

    server.before = edit
    said: list[str] = []
    made = local.image(config, said.append)
    assert sum("left out as credentials: token.json;" in line for line in said) == 1
    for image in (made, local.image(config, lambda line: None)):
        overlays.record_code(home, image)
    changes = overlays.find_changes(str(code), config, home, made.reference)
    assert (changes.changed, changes.overlay.target) == (("main.py",), "/srv/app")
    assert image.code != made.code
    assert overlays.find_changes(str(code), config, home, image.reference).changed == ()


def test_a_missing_base_is_told_by_doctor_too_with_how_to_make_it(server: RegistryServer, config: Config) -> None:
    how = r"base-[0-9a-f]{16} is not in the registry.*tpu-launch image base -f \S*run\.yaml"
    with pytest.raises(BadInput, match=how):
        make(config)
    missing = check_base_image(config)
    assert (missing.severity, "tpu-launch image base" in missing.fix) == ("FAIL", True)
    push_our_base(config)
    assert check_base_image(config).severity == "PASS"
    (config.folder / "docker" / "config.json").write_text("{}")
    refused = check_base_image(config)
    assert (refused.severity, "refuses these credentials" in refused.message) == ("FAIL", True)
    own = load_text(config.folder, FILE.replace("build: registry", "base: elsewhere.example.com/a/b:1"))
    for use in make, local.check:
        with pytest.raises(BadInput, match=r"is in another registry than image\.repository"):
            use(own)
    assert check_base_image(own).fix.startswith("correct the section image")


def test_without_engine_the_registry_is_taken(config: Config, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))  # no docker, and nothing else
    auto = FILE.replace("build: registry, ", "")
    assert not local.needs_engine(load_text(tmp_path, auto))
    for old, new in ((f"repository: {REPOSITORY}, ", ""), ("code: own", "dockerfile: own/Dockerfile")):
        changed = load_text(tmp_path, auto.replace(old, new))
        assert local.needs_engine(changed)
        with pytest.raises(BadInput):
            local.check(changed)
        assert ("; or give image.repository" in _engine(changed).fix) == (new == "")
    assert local.needs_engine(load_text(tmp_path, FILE.replace("registry,", "engine,")))
    assert not local.needs_engine(config)
    local.check(config)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ("registry, dockerfile: D", "code comes into our image"),
        ("registry, target: test", "build: registry runs no Dockerfile"),
        ("engine, base: gcr.io/p/i:1", "base is appended to in the registry"),
        ("somewhere", "build"),
    ],
)
def test_contradicting_keys_are_refused(config: Config, change: str, message: str) -> None:
    with pytest.raises(BadInput, match=message):
        load_text(config.folder, FILE.replace("build: registry", f"build: {change}"))


def test_cloud_build_makes_the_same_base(config: Config, tmp_path: Path) -> None:
    spec = local.image_spec(config)
    write_program(tmp_path / "bin", "gcloud", 'echo "$@"')
    environment = {**os.environ, "PATH": f"{tmp_path / 'bin'}:{os.environ['PATH']}"}
    command = ["sh", "-euc", appended.cloud_build_commands(spec, "p")]
    words = subprocess.check_output(command, cwd=tmp_path, env=environment, text=True).split()
    assert words[:2] == ["builds", "submit"]
    folder = tmp_path / words[2]
    assert not [path for path in folder.iterdir() if path.is_symlink()], "Cloud Build gets no other folder"
    assert f" AS {appended.BASE_TARGET}\n" in (folder / "Dockerfile").read_text()
    build = json.loads((tmp_path / "cloudbuild.json").read_text())
    assert build["images"] == [str(appended.base_reference(spec))]
    assert build["steps"][0]["args"][:3] == ["build", "--target", appended.BASE_TARGET]


def test_googles_registries_get_gclouds_token(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "token").write_text(TOKEN)
    monkeypatch.setenv("CLOUDSDK_CONFIG", str(tmp_path / "gcloud"))
    monkeypatch.setenv("CLOUDSDK_AUTH_ACCESS_TOKEN_FILE", str(tmp_path / "token"))
    assert find_credentials(HOST) == RegistryCredentials("oauth2accesstoken", TOKEN)


def test_making_an_image_in_the_registry_needs_no_module_of_linux_alone() -> None:
    hidden = "import sys; sys.modules.update(dict.fromkeys(['fcntl', 'grp', 'resource', 'termios'])); "
    program = hidden + "import launcher.images.local, launcher.images.appended"
    subprocess.run([sys.executable, "-c", program], check=True, timeout=60)


@pytest.mark.parametrize("backend", ["torch-xla", "tensorflow"])
def test_trackers_bring_their_packages_into_our_image_and_change_no_other_pin(backend: str, tmp_path: Path) -> None:
    overrides = (f"backend={backend}", "telemetry.trackers=[wandb]")
    for command in ((), ("tpu-train", "shards")):
        spec = local.image_spec(load(EXAMPLE, overrides, command=command))
        assert ("EXTRA", "requirements-trackers.txt") in spec.build_args
    lock = dict(spec.context)

    def pins(name: str) -> dict[str, str]:
        lines = (line.split(" ")[0].partition("==") for line in lock[name].read_text().splitlines() if "==" in line)
        return {package: version for package, _, version in lines}

    extra, own = pins("requirements-trackers.txt"), pins("requirements.txt")
    assert {"wandb", "mlflow-skinny"} <= set(extra)
    both = extra.keys() & own.keys()
    assert {name: extra[name] for name in both} == {name: own[name] for name in both}
