"""Starting, stopping and asking an emulator when things are not as they should be. No engine is needed; none answers
here."""

from __future__ import annotations

import socket
from pathlib import Path

import pytest
from click.testing import CliRunner

from launcher.cli import emulator as commands
from launcher.emulator import control
from launcher.errors import BadInput, Exit


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("TPU_LAUNCH_HOME", str(tmp_path / ".tpu-launch"))
    monkeypatch.setenv("DOCKER_HOST", f"unix://{tmp_path}/no-engine.sock")
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    return control.default_home()


def test_without_an_engine_nothing_starts_and_the_message_says_what_to_do(home: Path) -> None:
    with pytest.raises(BadInput, match=r"no container engine answers at .*no-engine\.sock.*start it"):
        control.start(home)
    assert not (home / "state.json").exists()


def test_an_engine_on_another_machine_is_refused(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DOCKER_HOST", "tcp://example.com:2375")
    with pytest.raises(BadInput, match="needs an engine on this machine"):
        control.start(home)


def test_an_emulators_own_view_is_not_taken_for_the_workstations_engine(
    home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DOCKER_HOST", "unix:///somewhere/engine.sock")
    assert control._engine_path(None) == "/var/run/docker.sock"


def test_commands_against_no_emulator_say_how_to_start_one(home: Path) -> None:
    for ask in (lambda: control.environment(home), lambda: control.inject(home, {"fault": "clear"})):
        with pytest.raises(BadInput, match="isn't running: start it with `tpu-launch emulator start`"):
            ask()
    assert control.status(home)["running"] is False
    result = CliRunner().invoke(commands.emulator, ["inject", "preempt", "pod"])
    assert (result.exit_code, "error: the emulator of" in result.output) == (Exit.BAD_INPUT, True)


def test_stopping_what_does_not_run_is_fine(home: Path) -> None:
    control.stop(home)
    control.stop(home)
    assert not home.exists()


def test_a_broken_state_file_is_named_and_stop_removes_it(home: Path) -> None:
    home.mkdir(parents=True)
    (home / "state.json").write_text("{")
    with pytest.raises(BadInput, match=r"state\.json: .*`tpu-launch emulator stop` removes it"):
        control.status(home)
    control.stop(home)
    assert not home.exists()


def test_data_can_be_kept(home: Path) -> None:
    (home / "buckets" / "b").mkdir(parents=True)
    (home / "state.json").write_text("{")
    control.stop(home, keep_data=True)
    assert [path.name for path in home.iterdir()] == ["buckets"]


def test_a_taken_port_is_named(home: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(BadInput, match=rf"port {port} of 127\.0\.0\.1 can't be used.*choose another --port"):
            control._free_port(port, 0)
        assert control._free_port(None, port) != port


def test_sockets_are_never_put_where_others_could_reach_them(home: Path, tmp_path: Path) -> None:
    folder = control._make_socket_folder(home)
    assert folder.stat().st_mode & 0o777 == 0o700
    folder.parent.chmod(0o755)
    with pytest.raises(BadInput, match="must be a folder that only you can enter"):
        control._make_socket_folder(home)
