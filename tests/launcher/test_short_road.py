"""`tpu-launch run` reaches the ssh command that starts containers through few frames of few files."""

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from launcher.cli.main import cli
from tests.launcher.run_files import SLICE
from tests.launcher.script_host import write_program

MOST_FRAMES, MOST_FILES = 8, 8
LAUNCHER = Path(__file__).resolve().parents[2] / "launcher"
FILE = f"""\
{SLICE.replace("v4-16", "v4-8")}image: {{reference: 'r/i@sha256:{"0" * 64}'}}
run: {{command: [train], transport: gcloud}}
"""
# Answers as the scripts of one host do.
GCLOUD = """
case "$*" in
  *" describe "*) echo '{"name": "demo", "state": "READY", "networkEndpoints": [{"ipAddress": "10.0.0.2"}]}' ;;
  *'docker start'*) echo "tpu-launch 0 started sha256:ab $(date +%s)" ;;
  *'logs --timestamps'*)
    echo '{"state": {"Status": "exited"}, "created_on": "b", "boot": "b", "booted": 1}'
    ;;
  *) echo "tpu-launch 0 stopped" ;;
esac
"""


def our_frames() -> Iterator[tuple[str, str]]:
    """Yields file and function of the launcher's frames on this thread's stack, innermost first, up to `run`."""
    frame: Any = sys._getframe(1)
    while frame is not None:
        path = Path(frame.f_code.co_filename)
        if path.is_relative_to(LAUNCHER):
            yield str(path.relative_to(LAUNCHER)), frame.f_code.co_name
            if (path.name, frame.f_code.co_name) == ("run.py", "run"):
                return
        frame = frame.f_back


def test_run_starts_containers_in_eight_frames_of_eight_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_program(tmp_path, "gcloud", GCLOUD)
    write_program(tmp_path, "ssh")
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    (tmp_path / "run.yaml").write_text(FILE)
    starts: list[list[tuple[str, str]]] = []
    original = subprocess.Popen

    def record(argv: list[str], **options: Any) -> subprocess.Popen[bytes]:
        if any("docker start" in word for word in argv):
            starts.append(list(our_frames())[::-1])
        return original(argv, **options)

    monkeypatch.setattr(subprocess, "Popen", record)
    ended = CliRunner().invoke(cli, ["run", "-f", str(tmp_path / "run.yaml")], catch_exceptions=False)
    assert ended.exit_code == 0, ended.output
    (road,) = starts
    files = {file for file, _ in road}
    print(f"{len(road)} frames, {len(files)} files:", *(f"{file}: {function}" for file, function in road), sep="\n  ")
    assert road[0] == ("cli/run.py", "run")
    assert len(road) <= MOST_FRAMES
    assert len(files) <= MOST_FILES
