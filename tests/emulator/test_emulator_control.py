"""Starting, stopping and asking an emulator when things are not as they should be. No engine answers here."""

import socket
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import requests
from click.testing import CliRunner
from google.api_core.exceptions import Forbidden
from google.cloud.storage import Client

from launcher import home as launcher_home
from launcher.cli import emulator as commands
from launcher.emulator import control
from launcher.emulator.http_server import accept_in_thread, serve_http
from launcher.emulator.server import Server, open_listener
from launcher.emulator.state import EmulatorState, emulator_id, to_json
from launcher.errors import BadInput
from launcher.images.build_context import left_out_of
from tests.emulator.conftest import use_storage


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("TPU_LAUNCH_HOME", str(tmp_path / ".tpu-launch"))
    monkeypatch.setenv("DOCKER_HOST", f"unix://{tmp_path}/no-engine.sock")
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    control.default_home().mkdir(parents=True)
    return control.default_home()


@pytest.mark.parametrize(
    ("engine", "words"),
    [
        ("unix:///no-engine.sock", r"no container engine answers at .*no-engine\.sock.*start it"),
        ("tcp://example.com:2375", "needs an engine on this machine"),
    ],
)
def test_without_an_engine_here_nothing_starts(home: Path, monkeypatch: Any, engine: str, words: str) -> None:
    monkeypatch.setenv("DOCKER_HOST", engine)
    with pytest.raises(BadInput, match=words):
        control.start(home)
    assert not (home / "state.json").exists()


def test_an_emulators_view_is_not_taken_for_a_workstations_engine(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DOCKER_HOST", "unix:///somewhere/engine.sock")
    assert control._engine_path(None) == "/var/run/docker.sock"


def test_commands_against_no_emulator_say_how_to_start_one(home: Path) -> None:
    inject, enter_stock = partial(control.inject, fault={"fault": "clear"}), partial(control.enter_stock, path=None)
    for ask in (control.environment, inject, enter_stock):
        with pytest.raises(BadInput, match="isn't running: start it with `tpu-launch emulator start`"):
            ask(home)
    assert control.status(home) == {"running": False, "home": str(home), "crashed": False}
    assert isinstance(CliRunner().invoke(commands.emulator, ["inject", "preempt", "pod"]).exception, BadInput)
    (home / "state.json").write_text(to_json(EmulatorState(emulator_id(home), 1, str(home), "/nowhere", 0, 0)))
    assert control.status(home) == {"running": False, "home": str(home), "crashed": True}


def test_a_shell_can_take_the_environment_of_any_home(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, answer in {"start": None, "environment": {"HOME": "/my home"}}.items():
        monkeypatch.setattr(control, name, Mock(return_value=answer))
    ended = CliRunner().invoke(commands.emulator, ["start", "--environment"])
    assert ended.output == "export HOME='/my home'\n"


def test_stopping_what_does_not_run_is_fine(home: Path) -> None:
    control.stop(home)
    control.stop(home)
    assert not home.exists()


def test_a_home_is_private_and_one_that_can_not_be_made_is_named(home: Path) -> None:
    (home / "file").touch()
    assert not control.status(home / "file" / "emulator")["running"]
    with pytest.raises(BadInput, match="file/emulator: can't be created: Not a directory; set TPU_LAUNCH_HOME"):
        control.stop(home / "file" / "emulator")
    control.stop(home / "new" / "emulator")
    assert (home / "new").stat().st_mode & 0o777 == 0o700


def test_a_broken_state_file_is_named_and_stop_removes_it(home: Path) -> None:
    (home / "state.json").write_text("{")
    with pytest.raises(BadInput, match=r"state\.json: .*`tpu-launch emulator stop` removes it"):
        control.status(home)
    control.stop(home)
    assert not home.exists()


def test_api_and_buckets_answer_only_tools_of_this_user(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
        state, other = (EmulatorState(emulator_id(home), port, str(home), "/nowhere", 0, 0) for _ in range(2))
        (home / "state.json").write_text(to_json(state))
        server = Server(home, "image", "volume")
        end = accept_in_thread(listener, lambda connection: serve_http(connection, server.google))
        use_storage(state.storage, monkeypatch)
        own = {"Authorization": f"Bearer {state.token}"}

        def status(headers: dict[str, str]) -> int:
            url = f"http://127.0.0.1:{port}/v2/projects/p/locations/us-central2-b/nodes?nodeId=pod"
            return requests.post(url, json={"runtimeVersion": "none"}, headers=headers, timeout=10).status_code

        wrong = [{}, *({"Authorization": text} for text in (f"Bearer {other.token}", "Basic ==", "Basic"))]
        web = [{**own, "Origin": "https://example.com"}, {**own, "Host": f"example.com:{port}"}]
        assert [status(headers) for headers in (*wrong, *web)] == [403] * 6
        assert status(own) == 400, "the API read the request"
        bucket = Client(project="p").create_bucket("bucket")
        for name, chunk in (("whole", None), ("resumable", 256 << 10)):
            bucket.blob(name, chunk_size=chunk).upload_from_string(b"x" * (300 << 10))
            assert len(bucket.get_blob(name).download_as_bytes()) == 300 << 10, "by the mediaLink of the server"
        monkeypatch.setenv("STORAGE_EMULATOR_HOST", other.storage)
        with pytest.raises(Forbidden, match="has its own token"):
            Client(project="p").get_bucket("bucket")
        end.close()


def test_data_can_be_kept(home: Path) -> None:
    (home / "buckets" / "b").mkdir(parents=True)
    (home / "state.json").write_text("{")
    (home / "lock").touch()  # of a server that has ended
    control.stop(home, keep_data=True)
    assert [path.name for path in home.iterdir()] == ["buckets"]


def test_emulated_and_real_runs_of_the_same_file_never_meet(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (home / "state.json").write_text(to_json(EmulatorState(emulator_id(home), 1, str(home), "/nowhere", 1.0, 1.0)))
    monkeypatch.setattr(control, "_answers", lambda state: True)
    monkeypatch.setattr(control, "status", lambda home: {"running": True})
    paths = (launcher_home.where, lambda: launcher_home.of_slice("p", "demo", "asked"))
    real = [path() for path in paths]
    with control.emulated(print):
        for path, other in zip(paths, real, strict=True):
            assert path() == home.parent / "emulated" / other.relative_to(home.parent)
        assert control.default_home() == home, "`emulator inject` in a shell with these variables finds the emulator"
        monkeypatch.setenv("TPU_LAUNCH_HOME", str(home.parent.parent / "state"))
        assert "/state" in left_out_of(home.parent.parent), "real and emulated state never enter an image"
    assert [path() for path in paths] == real


def test_the_last_command_stops_an_emulator_that_answers_and_has_no_slices(home: Path, monkeypatch: Any) -> None:
    (home / control._STARTED_BY_COMMAND).touch()
    for name, fake in (("environment", lambda home: {}), ("start", Mock()), ("stop", stop := Mock())):
        monkeypatch.setattr(control, name, fake)
    for report in ({"running": False, "crashed": True}, {"running": True, "nodes": ["pod"]}, {"running": True}):
        monkeypatch.setattr(control, "status", Mock(return_value=report))
        with control.emulated(print), control.emulated(print):  # two commands
            pass
    stop.assert_called_once_with(home, keep_data=True)


def test_a_start_that_waited_for_a_stop_locks_a_file_that_others_see(home: Path, monkeypatch: Any) -> None:
    stops = iter([True])
    monkeypatch.setattr(control, "lock", lambda file, path: (next(stops, False) and path.unlink()) or True)
    with control._starting(home):
        assert (home / "starting").exists()


def test_a_taken_port_is_named(home: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(BadInput, match=rf"port {port} of 127\.0\.0\.1 can't be used.*choose another --port"):
            control._require_free(port)
        with open_listener(port) as other:
            assert other.getsockname()[1] != port


def test_sockets_are_never_put_where_others_could_reach_them(home: Path, tmp_path: Path) -> None:
    folder = control._make_socket_folder(home)
    assert folder.stat().st_mode & 0o777 == 0o700
    folder.parent.chmod(0o755)
    with pytest.raises(BadInput, match="must be a folder that only you can enter"):
        control._make_socket_folder(home)
