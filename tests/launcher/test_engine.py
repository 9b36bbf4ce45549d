"""Which docker client is taken, and what a user reads when there is none or no engine answers."""

from pathlib import Path

import pytest

from launcher.errors import BadInput, Exit
from launcher.images import engine
from tests.launcher.script_host import write_program


def client_script(version: str, *, buildx: bool = False, else_says: str = "") -> str:
    """A client that knows its version, perhaps has buildx, and reaches no engine."""
    return f"""case "$1" in
--version) echo "Docker version {version}, build 297e128" ;;
buildx) {"echo v0.20" if buildx else "exit 1"} ;;
*) echo "{else_says}" >&2; exit 1 ;;
esac"""


OLD = client_script("20.10.24+dfsg1")
NEW_WITHOUT_BUILDX = client_script("28.2.2")
NEW_WITH_BUILDX = client_script("28.2.2", buildx=True)


def install(folder: Path, script: str) -> Path:
    return write_program(folder, "docker", script)


def search(monkeypatch: pytest.MonkeyPatch, *folders: Path) -> None:
    monkeypatch.setenv("PATH", ":".join(map(str, folders)))


def test_client_without_buildx_is_passed_over_for_an_older_one_with_buildkit_built_in(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    install(tmp_path / "a", NEW_WITHOUT_BUILDX)
    old = install(tmp_path / "b", OLD)
    new = install(tmp_path / "c", NEW_WITH_BUILDX)
    search(monkeypatch, tmp_path / "a", tmp_path / "b", tmp_path / "c")
    assert engine.client() == str(old)
    search(monkeypatch, tmp_path / "a", tmp_path / "c", tmp_path / "b")
    assert engine.client() == str(new)


def test_only_a_client_without_buildx_is_bad_input_and_says_what_to_install(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    install(tmp_path / "a", NEW_WITHOUT_BUILDX)
    broken = install(tmp_path / "b", "exit 1")
    search(monkeypatch, tmp_path / "a", tmp_path / "b")
    words = rf"has no buildx plug-in; {broken} does not say its version.*docker\.io"
    with pytest.raises(BadInput, match=words) as caught:
        engine.client()
    assert caught.value.exit_code == Exit.BAD_INPUT


def test_engine_that_does_not_run_is_named_by_docker_host(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DOCKER_HOST", f"unix://{tmp_path}/none.sock")
    words = rf"no container engine answers at unix://{tmp_path}/none\.sock \(DOCKER_HOST\)"
    with pytest.raises(BadInput, match=words) as caught:
        engine.require_engine()
    assert caught.value.exit_code == Exit.BAD_INPUT
    assert "start it" in str(caught.value)


def test_engine_that_refuses_is_told_from_one_that_does_not_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    install(tmp_path / "a", client_script("20.10.24", else_says="Got permission denied while trying to connect"))
    search(monkeypatch, tmp_path / "a")
    monkeypatch.delenv("DOCKER_HOST", raising=False)
    with pytest.raises(BadInput, match="group docker"):
        engine.require_engine()
