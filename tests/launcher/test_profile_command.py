"""Claims about `tpu-launch profile --open`: the profiles are copied from the bucket, a TensorBoard with the plugin
shows them, and what is missing is told before any step is profiled. A script is in TensorBoard's place."""

import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from launcher.cli import live
from launcher.cli.main import cli
from launcher.errors import BadInput, LaunchError
from launcher.provider import CommandReport
from launcher.run import execution
from tests.bucket_server import BucketServer
from tests.launcher.run_files import SLICE
from tests.launcher.script_host import write_program
from training import storage

URL = "gs://bucket/runs/demo/profiles/now/plugins/profile/now/host-{}.xplane.pb"


@pytest.fixture
def bucket(server: BucketServer) -> None:
    """A bucket with the profiles of two hosts."""
    for host in range(2):
        storage.write(URL.format(host), b"profile of host %d" % host)


@pytest.fixture
def path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The one folder of programs, beside the system's, that this process finds."""
    folder = tmp_path / "bin"
    folder.mkdir()
    monkeypatch.setenv("PATH", f"{folder}{os.pathsep}/bin")
    return folder


def lines(*hosts: int) -> list[str]:
    return ["a warning of the framework", *(f"steps 19 to 23: {URL.format(host)}" for host in hosts)]


def test_tensorboard_with_its_plugin_is_found_through_a_link(path: Path, tmp_path: Path) -> None:
    """As pipx installs it: the program's folder has a link to TensorBoard alone."""
    environment = tmp_path / "environment"
    environment.mkdir()
    write_program(environment, "tensorboard")
    (path / "tensorboard").symlink_to(environment / "tensorboard")
    with pytest.raises(BadInput, match=r"tensorboard has no profile plugin: `pip install tensorboard xprof`"):
        live.find_tensorboard()
    write_program(environment, "xprof")
    assert live.find_tensorboard() == str(path / "tensorboard")


@pytest.mark.usefixtures("bucket")
def test_a_profile_that_is_not_in_the_bucket_is_told(tmp_path: Path) -> None:
    with pytest.raises(LaunchError, match=r"can't be copied here: gs://.*host-7.xplane.pb does not exist"):
        live.copy_profiles(lines(7), tmp_path / "log")
    with pytest.raises(LaunchError, match="is on the host"):
        live.copy_profiles([line.replace("gs://bucket", "/tmp") for line in lines(0)], tmp_path / "log")


def invoke(folder: Path, monkeypatch: pytest.MonkeyPatch, asked: list[str]) -> Any:
    """`tpu-launch profile --open`; two hosts answer."""

    def execute(*_arguments: Any, on_line: Callable[[str], None], **_options: Any) -> list[CommandReport]:
        asked.append("profile")
        for line in lines(0, 1):
            on_line(line)
        return [CommandReport(host, 0, 0.0) for host in range(2)]

    monkeypatch.chdir(folder)
    monkeypatch.setattr(execution, "execute", execute)
    (folder / "run.yaml").write_text(SLICE)
    return CliRunner().invoke(cli, ["profile", "-f", "run.yaml", "--host", "all", "--open"])


@pytest.mark.usefixtures("bucket")
def test_tensorboard_shows_the_copies_until_ctrl_c(path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_program(path, "xprof")
    shows = '(echo "$*"; ls "$2/plugins/profile/now") >"$0.shown"; sleep 0.2; kill -INT $PPID; sleep 20'
    write_program(path, "tensorboard", shows)
    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell in the background ignores it
    try:
        result = invoke(tmp_path, monkeypatch, [])
    finally:
        signal.signal(signal.SIGINT, before)
    assert result.exit_code == 0, result.output
    arguments, *files = (path / "tensorboard.shown").read_text().splitlines()
    assert arguments.startswith(f"--logdir {tmp_path}/home/profiles/")
    assert files == ["host-0.xplane.pb", "host-1.xplane.pb"]


@pytest.mark.usefixtures("bucket")
def test_a_tensorboard_that_ends_early_is_an_error(path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_program(path, "xprof")
    write_program(path, "tensorboard", "echo no module named tensorboard; exit 3")
    result = invoke(tmp_path, monkeypatch, [])
    assert isinstance(result.exception, LaunchError), result.output
    assert "TensorBoard ended by itself with 3" in str(result.exception)


def test_without_tensorboard_no_step_is_profiled(path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []
    result = invoke(tmp_path, monkeypatch, asked)
    assert isinstance(result.exception, BadInput), result.output
    assert "--open: tensorboard is not on this machine's PATH" in str(result.exception)
    assert asked == []
