"""`tpu-launch plan` lists what the provider would run, in order, and leaves no trace; what commands look like; `run`
starts containers through few frames of few files; tools/ say what is missing."""

import os
import shutil
import signal
import subprocess
import sys
import time
import traceback
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from launcher.cli.main import cli
from launcher.config import Config
from launcher.plan import list_commands
from launcher.tpu_vm import commands
from tests.launcher.run_files import SLICE, load_text
from tests.launcher.script_host import write_program
from tests.processes import ROOT, wait_until

FILE = f"""\
{SLICE}image: {{reference: 'r/i@sha256:{"0" * 64}'}}
run: {{command: [train], secrets: [TOKEN]}}
"""
BEGIN, END = ["up describe", "up create", "up ssh"], ["run ssh"] * 2 + ["stop ssh", "down ssh"]
DOWN = [*END, "down queued describe", "down delete"]  # the request's and the slice's, after the stop of a detached run


@pytest.mark.parametrize(
    ("overrides", "commands"),
    [
        ([], [*BEGIN, "up ssh", *DOWN]),
        (["slice.accelerator_type=v4-8"], [*BEGIN, "up ssh", *DOWN]),
        (["run.transport=gcloud"], [*BEGIN, *DOWN]),
        (["slice.iap=true"], [*BEGIN, *DOWN]),
        (["slice.max_cost_per_hour=0.01"], [*BEGIN, "up ssh", *DOWN]),
        (["slice.queued={valid_until_hours: 1}"],
         ["up describe", "up queued describe", "up queued create", "up ssh", "up ssh", *END, "down queued delete"]),
    ],
)  # fmt: skip
def test_a_plan_is_what_the_provider_would_run(tmp_path: Path, overrides: list[str], commands: list[str]) -> None:
    shown = []
    for step in list_commands(load_text(tmp_path, FILE, overrides)):
        group, verb = step.command[step.command.index("tpus") + 1 :][:2]
        shown.append(f"{step.verb} {'queued ' * (group == 'queued-resources')}{verb}")
    assert shown == commands
    assert not (tmp_path / "home").exists()


def test_all_zones_are_asked_for_the_slice(tmp_path: Path) -> None:
    overrides = ["slice.accelerator_type=v5litepod-8", "zone=us-central1-a", "slice.zones=[us-west4-a]"]
    created = [step for step in list_commands(load_text(tmp_path, FILE, overrides)) if "create" in step.command]
    zones = [word for step in created for word in step.command if word.startswith("--zone")]
    assert zones == ["--zone=us-central1-a", "--zone=us-west4-a"]
    assert created[1].what.endswith("if the zones before have no capacity")
    two = load_text(tmp_path, FILE, ["slice.candidates=[{capacity: spot}]"])
    assert [step.command[5] for step in list_commands(two) if "create" in step.command] == ["demo", "demo-2"]


MOST_FRAMES, MOST_FILES = 8, 5
LAUNCHER = ROOT / "launcher"
ONE_HOST = FILE.replace("v4-16", "v4-8").replace("secrets: [TOKEN]", "transport: gcloud")
# Answers as the scripts of one host do.
GCLOUD = """
case "$*" in
  *" describe "*) echo '{"name": "demo", "state": "READY", "networkEndpoints": [{"ipAddress": "10.0.0.2"}]}' ;;
  *'docker start'*) echo "tpu-launch 0 started sha256:ab $(date +%s)" ;;
  *'logs --timestamps'*) echo '{"state": {"Status": "exited"}, "created_on": "b", "boot": "b", "booted": 1}' ;;
  *) echo "tpu-launch 0 stopped" ;;
esac
"""


def our_frames() -> list[tuple[str, str]]:
    """File and function of the launcher's frames on this thread's stack, from `run` on."""
    frames = [(Path(frame.f_code.co_filename), frame.f_code.co_name) for frame, _ in traceback.walk_stack(None)]
    ours = [(str(path.relative_to(LAUNCHER)), name) for path, name in frames if path.is_relative_to(LAUNCHER)]
    return ours[ours.index(("cli/run.py", "run")) :: -1]


def test_run_starts_containers_in_eight_frames_of_five_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_program(tmp_path, "gcloud", GCLOUD)
    write_program(tmp_path, "ssh")
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    (tmp_path / "run.yaml").write_text(ONE_HOST)
    starts: list[list[tuple[str, str]]] = []
    original = subprocess.Popen

    def record(argv: list[str], **options: Any) -> subprocess.Popen[bytes]:
        if any("docker start" in word for word in argv):
            starts.append(our_frames())
        return original(argv, **options)

    monkeypatch.setattr(subprocess, "Popen", record)
    ended = CliRunner().invoke(cli, ["run", "-f", str(tmp_path / "run.yaml")], catch_exceptions=False)
    assert ended.exit_code == 0, ended.output
    (road,) = starts
    files = {file for file, _ in road}
    print(f"{len(road)} frames, {len(files)} files:", *(f"{file}: {function}" for file, function in road), sep="\n  ")
    assert len(road) <= MOST_FRAMES
    assert len(files) <= MOST_FILES


def test_missing_gcloud_is_named_with_what_to_install(tmp_path: Path) -> None:
    for program in ("bash", "dirname", "id"):
        (tmp_path / program).symlink_to(shutil.which(program) or "")
    said = subprocess.run(
        [ROOT / "tools" / "need.sh", "gcloud"], env={"PATH": str(tmp_path)}, capture_output=True, text=True, timeout=30
    )
    assert said.returncode == 2
    assert "gcloud, the Google Cloud CLI (https://" in said.stderr


@pytest.mark.parametrize(
    ("environment", "code"),
    [({}, 0), ({"CI": "true"}, 1), ({"TPU_LAUNCH_NO_SKIPS": "1"}, 1), ({"TPU_LAUNCH_NO_SKIPS": "0"}, 0)],
)
def test_test_that_did_not_run_fails_the_run_in_ci(tmp_path: Path, environment: dict[str, str], code: int) -> None:
    shutil.copy(ROOT / "tests" / "conftest.py", tmp_path)
    left_out = {"failing": "xfail(reason='x')", "passing": "xfail(reason='x')", "skipped": "skip"}
    tests = [f"@pytest.mark.{mark}\ndef test_{name}(): assert '{name}' == 'passing'" for name, mark in left_out.items()]
    (tmp_path / "test_it.py").write_text("\n".join(["import pytest", "def test_runs(): pass", *tests]))
    (tmp_path / "test_other.py").write_text("import pytest\npytest.importorskip('no_such_module')\n")
    clean = {key: value for key, value in os.environ.items() if key not in ("CI", "TPU_LAUNCH_NO_SKIPS")}
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(tmp_path)]
    said = subprocess.run(command, cwd=tmp_path, env=clean | environment, capture_output=True, text=True, timeout=60)
    assert said.returncode == code
    for name in (*(f"test_it.py::test_{each}\n" for each in left_out), "test_other.py\n"):
        assert (name in said.stdout) == bool(code), said.stdout


def config(folder: Path, extra: str = "capacity: spot") -> Config:
    return load_text(folder, SLICE.replace("v4-16", f"v4-16, {extra}"), command=["true"])


def test_with_iap_ssh_goes_through_it_and_nothing_else_changes(tmp_path: Path) -> None:
    through = config(tmp_path, "iap: true")
    assert commands.ssh_command(through, "true")[:3] == ["gcloud", "alpha", "compute"]
    assert "--tunnel-through-iap" in commands.shell_command(through, 0)
    assert "alpha" not in commands.node_command(through, "describe")
    assert "alpha" not in commands.ssh_command(config(tmp_path), "true")


def test_a_timer_is_a_startup_script_that_is_only_there_when_it_is_wanted(tmp_path: Path) -> None:
    assert not [flag for flag in commands.create_command(config(tmp_path), {}) if flag.startswith("--metadata")]
    command = commands.create_command(config(tmp_path, "abandoned_hours: 2"), {})
    (flag,) = [flag for flag in command if flag.startswith("--metadata")]
    script = flag.removeprefix(f"--metadata=^{commands.METADATA_DELIMITER}^startup-script=")
    assert commands.METADATA_DELIMITER not in script
    assert "idle_seconds=7200\n" in script


def test_the_timer_waits_while_a_run_is_there_and_then_asks_for_the_deletion(tmp_path: Path) -> None:
    """The script under a real shell; its docker says what the test says, its curl writes down what is asked. The clock
    steps by a day at each look, as of a host that had no time yet."""
    asked = tmp_path / "asked"
    programs = {
        "date": f"echo >> {tmp_path}/days; echo $(($(wc -l < {tmp_path}/days) * 86400))",
        "docker": f'[ "$1" = ps ] && cat {tmp_path}/runs 2>/dev/null; exit 0',
        "curl": f'case "$*" in *worker-number*) printf 0 ;; *token*) echo \'{{"access_token": "t0ken"}}\' ;; '
        f'*) cat >> {asked}; echo "$*" >> {asked} ;; esac',
    }
    for name, text in programs.items():
        write_program(tmp_path / "bin", name, text)
    (tmp_path / "runs").write_text("4711\n")
    script = commands.idle_shutdown_script(config(tmp_path, f"abandoned_hours: {2 / 3600}"))
    script = script.replace("/var/log/", f"{tmp_path}/")
    environment = {"PATH": f"{tmp_path / 'bin'}:{os.environ['PATH']}"}
    process = subprocess.Popen(["bash", "-c", script], env=environment, start_new_session=True)
    try:
        time.sleep(5)
        assert not asked.exists(), "a slice with a run is not abandoned"
        (tmp_path / "runs").unlink()
        wait_until(lambda: asked.exists() and "nodes/demo" in asked.read_text(), 60)
    finally:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
    told = asked.read_text()
    assert "https://tpu.googleapis.com/v2/projects/p/locations/us-central2-b/queuedResources/demo?force=true" in told
    assert 'header = "Authorization: Bearer t0ken"' in told, "on standard input, not among the arguments"


@pytest.mark.parametrize(
    ("verb", "words"), [("up", "tpu-vm create demo"), ("run", "docker"), ("down", "tpu-vm delete demo")]
)
def test_a_dry_run_calls_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, verb: str, words: str) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))  # no gcloud, no docker
    (tmp_path / "run.yaml").write_text(FILE.replace(", secrets: [TOKEN]", ""))
    result = CliRunner().invoke(cli, [verb, "--dry-run", "-f", str(tmp_path / "run.yaml")])
    assert result.exit_code == 0, result.output
    assert words in result.output
    assert {line.split()[1] for line in result.output.splitlines() if line.startswith("# ")} == {f"{verb}:"}
