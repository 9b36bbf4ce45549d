"""`tpu-launch plan` lists what the provider's own code would run, in order, and leaves no trace; `run` reaches the ssh
command that starts containers through few frames of few files; tools/ say what is missing."""

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from launcher.cli.main import cli
from launcher.plan import list_commands
from tests.launcher.run_files import SLICE, load_text
from tests.launcher.script_host import write_program

FILE = f"""\
{SLICE}image: {{reference: 'r/i@sha256:{"0" * 64}'}}
run: {{command: [train], secrets: [TOKEN]}}
"""
DESCRIBE, CREATE, SSH = "up: tpu-vm describe", "up: tpu-vm create", "up: tpu-vm ssh"
RUN = ["run: tpu-vm ssh"] * 2 + ["stop: tpu-vm ssh", "down: tpu-vm ssh"]
DOWN = ["down: queued-resources describe", "down: tpu-vm delete"]  # after the stop of a run that is detached
QUEUED = [DESCRIBE, "up: queued-resources describe", "up: queued-resources create", SSH, SSH]


@pytest.mark.parametrize(
    ("overrides", "commands"),
    [
        ([], [DESCRIBE, CREATE, SSH, SSH, *RUN, *DOWN]),
        (["slice.accelerator_type=v4-8"], [DESCRIBE, CREATE, SSH, SSH, *RUN, *DOWN]),
        (["run.transport=gcloud"], [DESCRIBE, CREATE, SSH, *RUN, *DOWN]),
        (["slice.iap=true"], [DESCRIBE, CREATE, SSH, *RUN, *DOWN]),
        (["slice.max_cost_per_hour=0.01"], [DESCRIBE, CREATE, SSH, SSH, *RUN, *DOWN]),
        (["slice.queued={valid_until_hours: 1}"], [*QUEUED, *RUN, "down: queued-resources delete"]),
    ],
)
def test_a_plan_is_what_the_provider_would_run(tmp_path: Path, overrides: list[str], commands: list[str]) -> None:
    shown = []
    for step in list_commands(load_text(tmp_path, FILE, overrides)):
        group, verb = step.command[step.command.index("tpus") + 1 :][:2]
        shown.append(f"{step.verb}: {group} {verb}")
    assert shown == commands
    assert not (tmp_path / "home").exists()


def test_all_zones_are_asked_for_the_slice(tmp_path: Path) -> None:
    overrides = ["slice.accelerator_type=v5litepod-8", "zone=us-central1-a", "slice.zones=[us-west4-a]"]
    created = [step for step in list_commands(load_text(tmp_path, FILE, overrides)) if "create" in step.command]
    assert [next(word for word in step.command if "--zone" in word) for step in created] == [
        "--zone=us-central1-a",
        "--zone=us-west4-a",
    ]
    assert created[1].what.endswith("if the zones before have no capacity")


MOST_FRAMES, MOST_FILES = 8, 8
LAUNCHER = Path(__file__).resolve().parents[2] / "launcher"
ONE_HOST = f"""\
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
    (tmp_path / "run.yaml").write_text(ONE_HOST)
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


HOUSE = Path(__file__).resolve().parents[2]


def test_missing_gcloud_is_named_with_what_to_install(tmp_path: Path) -> None:
    for program in ("bash", "dirname", "id"):
        (tmp_path / program).symlink_to(shutil.which(program) or "")
    said = subprocess.run(
        [HOUSE / "tools" / "need.sh", "gcloud"], env={"PATH": str(tmp_path)}, capture_output=True, text=True, timeout=30
    )
    assert said.returncode == 2
    assert "gcloud, the Google Cloud CLI (https://" in said.stderr


@pytest.mark.parametrize(
    ("environment", "code"),
    [({}, 0), ({"CI": "true"}, 1), ({"TPU_LAUNCH_NO_SKIPS": "1"}, 1), ({"TPU_LAUNCH_NO_SKIPS": "0"}, 0)],
)
def test_test_that_did_not_run_fails_the_run_in_ci(tmp_path: Path, environment: dict[str, str], code: int) -> None:
    shutil.copy(HOUSE / "tests" / "conftest.py", tmp_path)
    source = "import pytest\ndef test_runs(): pass\n@pytest.mark.xfail\ndef test_left_out(): assert False\n"
    (tmp_path / "test_it.py").write_text(source)
    clean = {key: value for key, value in os.environ.items() if key not in ("CI", "TPU_LAUNCH_NO_SKIPS")}
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(tmp_path)]
    said = subprocess.run(command, cwd=tmp_path, env=clean | environment, capture_output=True, text=True, timeout=60)
    assert said.returncode == code
    assert ("test_it.py::test_left_out" in said.stdout) == bool(code)
