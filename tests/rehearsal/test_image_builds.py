"""Real builds: what is built again and what isn't, what reaches a registry, and what must never be in a layer.

Starts small builds from debian:bookworm-slim and a registry on loopback, and reads the whole torch-xla image once,
layer by layer.
"""

import dataclasses
import json
import os
import re
import secrets
import subprocess
import tarfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from launcher.emulator.tls import CA_FILE, tls_context
from launcher.errors import BadInput, Exit, LaunchError
from launcher.images import engine
from launcher.images.build import ensure_image, list_commands, make_plan
from launcher.images.specification import ImageSpec, default_spec, folder_spec
from tests.processes import wait_until
from tests.rehearsal.workstation import docker
from tests.servers import RegistryServer

pytestmark = pytest.mark.alone

SECRET = "a line that only the CA bundle holds"


@pytest.fixture(autouse=True)
def own_state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TPU_LAUNCH_HOME", str(tmp_path / "home"))


@pytest.fixture
def spec(tmp_path: Path) -> Iterator[ImageSpec]:
    """An image with a slow layer that depends on nothing, and code on top. Its tags are removed at the end."""
    folder = tmp_path / "context"
    folder.mkdir()
    (folder / "Dockerfile").write_text(
        "FROM debian:bookworm-slim\n"
        "ARG GREETING=hello\n"
        "RUN --mount=type=secret,id=ca --mount=type=cache,target=/root/.cache/x test -s "
        "/run/secrets/ca && cat /run/secrets/ca > /root/.cache/x/ca"
        ' && echo "$GREETING" > /greeting\n'
        "COPY code.py /code.py\n"
        'CMD ["cat", "/greeting", "/code.py"]\n'
    )
    (folder / "code.py").write_text("print(1)\n")
    bundle = tmp_path / CA_FILE
    tls_context(tmp_path, ("example.com",))  # writes it
    bundle.write_text(f"{SECRET}\n{bundle.read_text()}")
    name = f"tpu-launch-test/{secrets.token_hex(4)}"
    yield folder_spec(name, folder, ca_bundle=bundle)
    for repository in (name, "localhost:*/project/name"):
        for each in docker("images", "--format", "{{.Repository}}:{{.Tag}}", repository).split():
            docker("image", "rm", "--force", each)


def again(spec: ImageSpec) -> ImageSpec:
    """The same spec, read anew from its folder."""
    again = folder_spec(spec.name, spec.dockerfile.parent, ca_bundle=spec.ca_bundle)
    return dataclasses.replace(again, repository=spec.repository)


def run(reference: str, *command: str) -> str:
    return docker("run", "--rm", "--network=none", reference, *command)


def inspect(reference: str, value: str) -> Any:
    return json.loads(docker("image", "inspect", "--format", f"{{{{json .{value}}}}}", reference))


File = tuple[str, Callable[[], bytes]]  # its path in the image, and what reads it


def files(reference: str) -> Iterator[File]:
    """Every file with content of every layer of an image, also of what a later layer hides."""
    data = inspect(reference, "GraphDriver.Data") or {}
    places = [data.get(key, "").split(":") for key in ("LowerDir", "UpperDir")]
    folders = [Path(folder) for each in places for folder in each if folder]
    # Where the engine's own folders can be read, they are: to save 9 GB takes a minute.
    readable = folders and all(os.access(folder, os.R_OK | os.X_OK) for folder in folders)
    found = 0
    for each in _in_folders(folders) if readable else _saved(reference):
        found += 1
        yield each
    assert found > 1000, "the layers were not found"


def _in_folders(folders: Sequence[Path]) -> Iterator[File]:
    for folder in folders:
        for below, _, names in os.walk(folder):
            for name in names:
                path = Path(below, name)
                if path.is_file() and not path.is_symlink() and path.stat().st_size:
                    yield str(path.relative_to(folder)), path.read_bytes


def _saved(reference: str) -> Iterator[File]:
    process = subprocess.Popen([engine.client(), "save", reference], stdout=subprocess.PIPE)
    with tarfile.open(fileobj=process.stdout, mode="r|") as image:
        for member in image:
            stream = image.extractfile(member)
            if stream is not None and not member.name.endswith(".json"):
                try:
                    layer = tarfile.open(fileobj=stream, mode="r|*")  # noqa: SIM115  its entries are read by the caller
                except tarfile.ReadError:
                    continue  # a JSON file of the image's own
                for entry in layer:
                    if entry.isfile() and entry.size:
                        yield entry.name, layer.extractfile(entry).read
    assert process.wait(60) == 0


def test_nothing_is_built_again_but_the_code_layer_where_code_has_changed(spec: ImageSpec) -> None:
    said: list[str] = []
    first = ensure_image(spec, said.append)
    assert any("building" in line for line in said)
    assert first.reference == first.digest
    assert first.digest.startswith("sha256:")
    assert run(first.reference) == "hello\nprint(1)\n"
    said.clear()
    assert ensure_image(again(spec), said.append) == first
    assert said == []
    assert list_commands(again(spec)) == []

    (spec.dockerfile.parent / "code.py").write_text("print(2)\n")
    after = ensure_image(again(spec), print)
    assert run(after.reference) == "hello\nprint(2)\n"
    layers = [inspect(image.reference, "RootFS.Layers") for image in (first, after)]
    assert layers[0][:-1] == layers[1][:-1]
    assert layers[0][-1] != layers[1][-1]


def test_ca_bundle_reaches_the_build_and_no_layer(spec: ImageSpec) -> None:
    image = ensure_image(spec, print)
    history = docker("history", "--no-trunc", image.reference)
    assert "/run/secrets/ca" in history
    assert SECRET not in history
    for name, read in files(image.reference):
        if not name.startswith(("usr/", "var/lib/dpkg/")):
            assert SECRET.encode() not in read(), name


def test_failed_build_shows_the_last_lines_and_the_log_and_leaves_no_tag(spec: ImageSpec) -> None:
    with spec.dockerfile.open("a") as file:
        file.write("RUN echo the reason is here && exit 7\n")
    with pytest.raises(LaunchError, match="could not be built") as caught:
        ensure_image(again(spec), print)
    assert caught.value.exit_code == Exit.BAD_INPUT
    message = str(caught.value)
    assert "the reason is here" in message
    log = re.search(r"all of it: (\S+)", message)
    assert log
    assert "the reason is here" in Path(log[1]).read_text()
    assert make_plan(again(spec)).image_id is None


def test_a_missing_base_image_is_named(spec: ImageSpec) -> None:
    spec.dockerfile.write_text("FROM localhost:1/no/such:image\n")
    with pytest.raises(
        BadInput, match=r"the base image localhost:1/no/such:image is not in the engine's store and can't be pulled"
    ):
        ensure_image(again(spec), print)


@pytest.fixture
def server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[RegistryServer]:
    """An empty registry that demands no login, over TLS: without it, docker pushes but does not read its manifests."""
    served = RegistryServer(tmp_path / "registry", token="")
    monkeypatch.setenv("SSL_CERT_FILE", str(served.ca))
    yield served
    served.close()


@pytest.fixture
def registry(server: RegistryServer) -> str:
    """Its address."""
    return f"localhost:{server.address.rpartition(':')[2]}"


def held(server: RegistryServer, tag: str) -> str | None:
    """The digest that the registry has under a tag of project/name."""
    found = server.api.manifest("localhost/project/name", tag)
    return found[0] if found else None


def test_with_a_repository_hosts_run_by_its_digest(spec: ImageSpec, registry: str, server: RegistryServer) -> None:
    ensure_image(spec, print)
    wanted = dataclasses.replace(spec, repository=f"{registry}/project/name")
    said: list[str] = []
    image = ensure_image(wanted, said.append)
    tag = make_plan(wanted).tag
    assert image.reference == f"{registry}/project/name@{image.digest}"
    assert held(server, tag) == image.digest
    assert [line.split()[0] for line in said] == ["pushing"], "it was built before"
    said.clear()
    assert ensure_image(wanted, said.append) == image
    assert said == []


@pytest.fixture(scope="module")
def torch_xla() -> str:
    return ensure_image(default_spec("torch-xla"), print).reference


def test_trainer_gets_the_signal_of_docker_stop(torch_xla: str) -> None:
    program = (
        "import signal, sys, time; signal.signal(signal.SIGTERM, lambda *_: sys.exit(75)); "
        "print('ready', flush=True); time.sleep(60)"
    )
    # As `tpu-train` does it: a shell that replaces itself by Python.
    options = ("--detach", "--network=none", "--label=tpu-launch.tests=stop")
    container = docker("run", *options, torch_xla, "sh", "-c", 'exec python -c "$0"', program).strip()
    try:
        wait_until(lambda: "ready" in docker("logs", container), 30)
        begin = time.monotonic()
        docker("stop", "--time", "30", container)
        assert time.monotonic() - begin < 10
        assert docker("inspect", "--format", "{{.State.ExitCode}}", container).strip() == "75"
    finally:
        docker("rm", "--force", container)


def test_entry_point_replaces_its_shell_and_runs_as_an_ordinary_user(torch_xla: str) -> None:
    assert run(torch_xla, "id", "-u").strip() == "1000"
    script = run(torch_xla, "cat", "/usr/local/bin/tpu-train")
    assert script.splitlines()[1].startswith("exec python -m training.cli ")
    assert inspect(torch_xla, "Config.Cmd") == ["tpu-train", "--help"]  # a list: no shell between


def _certificates(text: str) -> set[str]:
    """The bodies of all certificates of a PEM file."""
    return {
        "".join(body.split())
        for body in re.findall(r"-----BEGIN CERTIFICATE-----(.*?)-----END CERTIFICATE-----", text, re.DOTALL)
    }


def test_no_layer_holds_a_secret_or_a_cache(torch_xla: str) -> None:
    public = run(torch_xla, "sh", "-c", "cat /usr/share/ca-certificates/*/*")
    bundle = default_spec("torch-xla").ca_bundle
    private = _certificates(bundle.read_text()) - _certificates(public) if bundle else set()
    history = docker("history", "--no-trunc", torch_xla)
    assert not [body for body in private if body in history]
    wrong = []
    for name, read in files(torch_xla):
        if re.match(r"(root/\.cache|run/secrets|tmp|opt/installer|var/lib/apt/lists|var/cache/apt/archives)/", name):
            wrong.append(name)
        # Wheels bring public bundles of their own, pinned by their hashes.
        elif (
            name.endswith((".pem", ".crt"))
            and "/site-packages/" not in name
            and _certificates(read().decode(errors="replace")) & private
        ):
            wrong.append(f"{name} holds a certificate of {bundle}")
    assert wrong == []
