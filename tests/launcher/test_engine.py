"""Which docker client is taken, what counts as pushed, and what a user reads when there is no engine or no repository.

Docker is a script here. tests/rehearsal/test_fault_matrix.py makes a repository.
"""

import contextlib
import dataclasses
import io
from pathlib import Path

import pytest

from launcher.emulator.http_server import HttpRequest, HttpResponse
from launcher.errors import BadInput, LaunchError
from launcher.images import build_context, engine, local, repositories
from launcher.images.build import ensure_image, find_pushed, list_commands
from launcher.images.registry import ADDRESS
from launcher.images.specification import ImageSpec, folder_spec
from tests.launcher.run_files import SLICE, load_text
from tests.launcher.script_host import write_program
from tests.servers import RegistryServer


def client_script(version: str = "28.2.2", *, buildx: bool = False, else_says: str = "") -> str:
    """A client that knows its version, perhaps has buildx, and reaches no engine."""
    return f"""case "$1" in
--version) echo "Docker version {version}, build 297e128" ;;
buildx) {"echo v0.20" if buildx else "exit 1"} ;;
*) echo "{else_says}" >&2; exit 1 ;;
esac"""


def install(monkeypatch: pytest.MonkeyPatch, folder: Path, *scripts: str) -> list[Path]:
    """Makes these the docker clients on the PATH, in this order. Returns their paths."""
    found = [write_program(folder / str(number), "docker", script) for number, script in enumerate(scripts)]
    monkeypatch.setenv("PATH", ":".join(str(path.parent) for path in found))
    return found


def test_a_client_without_buildx_is_passed_over_or_bad_input(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Older ones have BuildKit built in."""
    for others in ([client_script("20.10.24+dfsg1")], [client_script(buildx=True), client_script("20.10.24")]):
        _, taken, *_ = install(monkeypatch, tmp_path / str(len(others)), client_script(), *others)
        assert engine.client() == str(taken)
    _, broken = install(monkeypatch, tmp_path / "none", client_script(), "exit 1")
    words = rf"has no buildx plug-in; {broken} does not say its version.*docker\.io"
    with pytest.raises(BadInput, match=words):
        engine.client()


def test_an_engine_that_is_down_is_told_from_one_that_refuses(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DOCKER_HOST", f"unix://{tmp_path}/none.sock")
    words = rf"no container engine answers at unix://{tmp_path}/none\.sock \(DOCKER_HOST\): start it"
    with pytest.raises(BadInput, match=words):
        engine.require_engine()
    install(monkeypatch, tmp_path, client_script("20.10.24", else_says="Got permission denied while trying to connect"))
    monkeypatch.delenv("DOCKER_HOST", raising=False)
    with pytest.raises(BadInput, match="group docker"):
        engine.require_engine()


DIGEST = "sha256:" + "d" * 64
REFERENCE = f"registry.example.com/p/n@{DIGEST}"
DOCKER = f"""
cd "$(dirname "$0")" || exit 9
echo "$*" >>calls
case "$1 $2" in
  "--version "*) echo "Docker version 20.10.24" ;;
  "version "*) echo 20.10.24 ;;
  "build "*) if [ -e failure ]; then cat failure; exit 1; fi
    [ ! -e edit ] || echo two >../context/code/train.py
    echo sha256:1 >image ;;
  "push "*)
    echo "abc: Pushing"
    [ ! -e interrupted ] || exit 1
    touch stored
    echo "x: digest: {DIGEST} size: 1" ;;
  "image inspect")
    [ ! -e hangs ] || exec sleep 9
    case "$4 $5" in
      *debian*) echo sha256:0 ;;
      *) cat image 2>/dev/null ;;
    esac ;;
esac
"""


@pytest.fixture
def docker(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, registry: RegistryServer) -> Path:
    """The folder of the script, its state and its calls, with a registry that has an image once it was pushed."""
    folder = write_program(tmp_path / "bin", "docker", DOCKER).parent
    monkeypatch.setenv("PATH", f"{folder}:/usr/bin:/bin")
    monkeypatch.delenv("DOCKER_HOST", raising=False)

    def answer(request: HttpRequest) -> HttpResponse:
        return HttpResponse(200 if (folder / "stored").exists() else 404, b"", {"Docker-Content-Digest": DIGEST})

    registry.before = answer
    return folder


@pytest.fixture
def spec(tmp_path: Path) -> ImageSpec:
    context = tmp_path / "context"
    context.mkdir()
    (context / "Dockerfile").write_text("FROM debian:bookworm-slim\n")
    return dataclasses.replace(folder_spec("test/image", context), repository="registry.example.com/p/n")


def push(spec: ImageSpec) -> None:
    assert ensure_image(spec, print).reference == REFERENCE


def count_pushes(docker: Path) -> int:
    return (docker / "calls").read_text().count("\npush ")


def test_an_edit_during_the_build_is_not_taken_for_the_images(docker: Path, spec: ImageSpec, tmp_path: Path) -> None:
    own = tmp_path / "context" / "code" / "train.py"
    own.parent.mkdir()
    own.write_text("one\n")
    (docker / "edit").touch()
    made = ensure_image(folder_spec("test/image", tmp_path / "context"), print)
    assert own.read_text() == "two\n"
    assert made.code == {"train.py": build_context.hash_file(b"file", io.BytesIO(b"one\n"))}


@pytest.mark.usefixtures("docker")
def test_a_copy_of_edited_files_is_deleted(spec: ImageSpec, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for parents in (True, False):  # False: as if a file were missing
        monkeypatch.setattr(build_context, "assemble", lambda _, to, all=parents: (to / "edited").mkdir(parents=all))
        with pytest.raises(BadInput, match="changed while they were copied"):
            ensure_image(spec, print)
    assert [path.suffix for path in (tmp_path / "home" / "images").iterdir()] == [".log"]


def test_an_interrupted_push_is_done_again(docker: Path, spec: ImageSpec) -> None:
    (docker / "interrupted").touch()
    with pytest.raises(LaunchError, match="could not be pushed"):
        ensure_image(spec, print)
    assert [command[1] for command in list_commands(spec)] == ["tag", "push"]
    (docker / "interrupted").unlink()
    push(spec)
    assert count_pushes(docker) == 2


def test_preflight_takes_the_named_image_or_one_not_pushed(docker: Path, spec: ImageSpec, tmp_path: Path) -> None:
    build = f"repository: {spec.repository}, build: engine, dockerfile: context/Dockerfile"
    for image, name in ((f"reference: '{REFERENCE}'", REFERENCE), (build, "sha256:1")):
        config = load_text(tmp_path, f"{SLICE}image: {{{image}}}\nrun: {{command: [train]}}\n")
        assert local.unpublished(config, print) == name
    assert count_pushes(docker) == 0


def test_what_the_registry_has_under_the_tag_is_not_built_and_pushed_again(
    docker: Path, spec: ImageSpec, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not after a damaged record, nor after the image was removed, and built again: other bytes, the same sources."""
    push(spec)
    push(spec)
    assert list_commands(spec) == []
    assert find_pushed(spec) == REFERENCE
    (docker / "image").unlink()
    assert list_commands(spec) == []
    unpushed = dataclasses.replace(spec, repository=None)
    assert [command[3] for command in list_commands(unpushed)] == ["build"]
    for record in (tmp_path / "home" / "images").glob("*.pushed"):
        record.write_text("registry.example.com")
    push(spec)
    assert count_pushes(docker) == 1
    monkeypatch.setattr(engine, "SECONDS", 0.3)
    (docker / "hangs").touch()
    assert list_commands(unpushed)[0][1] == "pull", "an engine that hangs is none"


@pytest.mark.parametrize("headers", [{"Content-Type": "text/html; charset=utf-8"}, {}])
def test_a_proxys_page_is_not_taken_for_a_pushed_image(
    docker: Path, spec: ImageSpec, registry: RegistryServer, headers: dict[str, str]
) -> None:
    registry.before = lambda request: HttpResponse(200, b"", headers)
    assert find_pushed(spec) is None
    assert ensure_image(spec, print).reference == REFERENCE
    asked = [request.partition(" ")[0] for request in registry.asked]
    assert asked == ["HEAD", "GET"] * 2  # once for each: a registry that never answers takes a minute for one


@pytest.mark.parametrize("lost", ["deleted", "unreachable"])
def test_a_doubtful_push_is_repeated(docker: Path, spec: ImageSpec, monkeypatch: pytest.MonkeyPatch, lost: str) -> None:
    ensure_image(spec, print)
    (docker / "stored").unlink()
    if lost == "unreachable":
        monkeypatch.setenv(ADDRESS, "127.0.0.1:9")
    (docker / "interrupted").touch()
    said: list[str] = []
    with contextlib.nullcontext() if lost == "unreachable" else pytest.raises(LaunchError, match="could not be pushed"):
        assert ensure_image(spec, said.append).reference == REFERENCE
        assert "it was pushed before" in said[-1]
    (docker / "interrupted").unlink()
    assert find_pushed(spec) == (REFERENCE if lost == "unreachable" else None)
    ensure_image(spec, print)
    ensure_image(spec, print)
    assert count_pushes(docker) == (3 if lost == "deleted" else 4)


@pytest.mark.parametrize(
    ("output", "code"),
    [
        ("#7 0.1 mkdir: can't create directory '/x': Permission denied\nprocess did not complete: exit code: 1", 2),
        ("ERROR: pull access denied, repository does not exist or may require authorization", 22),
        ("ERROR: failed to fetch oauth token: unexpected status: 403 Forbidden", 22),
    ],
)
def test_a_build_tells_of_a_registrys_refusal_only(docker: Path, spec: ImageSpec, output: str, code: int) -> None:
    (docker / "failure").write_text(output + "\n")
    with pytest.raises(LaunchError, match="could not be built") as bad:
        ensure_image(spec, print)
    assert bad.value.exit_code == code
    assert ("configure-docker" in str(bad.value)) == (code == 22)


@pytest.mark.parametrize(
    "image", ["repository/image", "repository/deeper/image:tag", "repository/image@sha256:00", "repository"]
)
def test_a_missing_repository_of_googles_is_created_privately_by_the_advised_command(image: str) -> None:
    name = f"us-central2-docker.pkg.dev/my-project/{image}"
    found = repositories.parse_repository(name)
    assert found == repositories.ArtifactRepository("us-central2", "my-project", "repository")
    command = " ".join(found.create_command)
    assert command.startswith("gcloud artifacts repositories create repository --project=my-project --location=us-cen")
    assert "--quiet --repository-format=docker" in command
    assert "allUsers" not in command
    assert "gcloud artifacts repositories create repository" in repositories.advise_creation(name)


@pytest.mark.parametrize(
    "name",
    ["gcr.io/p/image", "docker.io/library/debian", "us-docker.pkg.dev.evil.example/p/r/i", "us-docker.pkg.dev/p"],
)
def test_other_registries_are_left_alone(name: str) -> None:
    assert repositories.parse_repository(name) is None
    assert "create it in that registry" in repositories.advise_creation(name)
