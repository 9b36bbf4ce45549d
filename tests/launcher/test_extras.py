"""Claims about what the command line adds to a run: overlays, env files, dry runs, IAP and the dead-man timer."""

import io
import os
import re
import signal
import subprocess
import tarfile
import time
from pathlib import Path

import pytest
from click.testing import CliRunner

from launcher.checks.doctor import check_quota
from launcher.cli.main import cli
from launcher.config import Config
from launcher.errors import BadInput
from launcher.images import overlays
from launcher.run.specification import read_env_file
from launcher.tpu_vm import commands
from tests.launcher.run_files import SLICE, load_text
from tests.launcher.script_host import write_program
from tests.processes import wait_until


def config(folder: Path, extra: str = "capacity: spot") -> Config:
    return load_text(folder, SLICE.replace("v4-16", f"v4-16, {extra}"), command=["true"])


def test_the_same_files_are_the_same_overlay_and_others_another(tmp_path: Path) -> None:
    for name in ("a", "b"):
        folder = tmp_path / name / "training"
        (folder / "__pycache__").mkdir(parents=True)
        (folder / "loop.py").write_text("x = 1\n")
        (folder / "__pycache__" / "loop.pyc").write_text(name)
    one, two = (overlays.pack(f"{tmp_path / name / 'training'}=/opt/tpu-launch/training") for name in ("a", "b"))
    assert one.digest == two.digest
    (tmp_path / "b" / "training" / "loop.py").write_text("x = 2\n")
    assert overlays.pack(f"{tmp_path / 'b' / 'training'}=/opt/tpu-launch/training").digest != one.digest


def test_an_overlay_holds_no_secrets_of_the_folder(tmp_path: Path) -> None:
    for name in ("train.py", ".env", "sub/id_rsa", ".git/config", "account"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text('{"private_key": "0123456789abcdef"}' if name == "account" else name)
    with tarfile.open(fileobj=io.BytesIO(overlays.pack(f"{tmp_path}=/app").archive)) as archive:
        assert archive.getnames() == ["train.py"]


@pytest.mark.parametrize(
    ("wanted", "words"), [("x", "FOLDER=TARGET"), (".=relative", "FOLDER=TARGET"), ("/no/such=/opt", "is not a folder")]
)
def test_a_wrong_overlay_is_refused(wanted: str, words: str) -> None:
    with pytest.raises(BadInput, match=words):
        overlays.pack(wanted)


def test_an_env_file_is_read_as_people_write_it(tmp_path: Path) -> None:
    path = tmp_path / ".env"
    path.write_text("# comment\n\nA=1\nexport B='two words'\nC=\"$HOME\"\nD=a=b\nE=\n")
    assert read_env_file(path) == {"A": "1", "B": "two words", "C": "$HOME", "D": "a=b", "E": ""}
    path.write_bytes(b"\xef\xbb\xbfA=1\r\nB=2\r\n")  # as an editor on Windows writes it
    assert read_env_file(path) == {"A": "1", "B": "2"}
    path.write_text("A=secret\0value\n")
    with pytest.raises(BadInput, match="the value of A holds a NUL byte"):
        read_env_file(path)
    path.write_text("A=1\nnot a variable: secret-value\n")
    with pytest.raises(BadInput, match=r"\.env:2: must be NAME=VALUE") as refused:
        read_env_file(path)
    assert "secret-value" not in str(refused.value)


def test_with_iap_ssh_goes_through_it_and_nothing_else_changes(tmp_path: Path) -> None:
    through = config(tmp_path, "iap: true")
    assert commands.ssh_command(through, "true")[:3] == ["gcloud", "alpha", "compute"]
    assert "--tunnel-through-iap" in commands.shell_command(through, 0)
    assert "alpha" not in commands.node_command(through, "describe")
    assert "alpha" not in commands.ssh_command(config(tmp_path), "true")


def test_a_timer_is_a_startup_script_that_is_valid_and_only_there_when_it_is_wanted(tmp_path: Path) -> None:
    assert not [flag for flag in commands.create_command(config(tmp_path), {}) if flag.startswith("--metadata")]
    command = commands.create_command(config(tmp_path, "abandoned_hours: 2"), {})
    (flag,) = [flag for flag in command if flag.startswith("--metadata")]
    script = flag.removeprefix(f"--metadata=^{commands.METADATA_DELIMITER}^startup-script=")
    assert commands.METADATA_DELIMITER not in script
    assert "idle_seconds=7200\n" in script
    assert subprocess.run(["bash", "-n"], input=script, text=True, check=False).returncode == 0


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


def test_the_quota_that_a_slice_needs_is_named(tmp_path: Path) -> None:
    row = check_quota(config(tmp_path))
    assert row.severity == "WARN"
    assert "TPUV4... for the zone us-central2-b and the region us-central2" in row.message
    pattern = re.search(r"quotaId~(\S+)'", row.fix)
    # Names that users quote: marin #1612 and skypilot's failover handler have them of zones, regions and pods.
    for name in ("TPUV4sPreemptiblePodPerProjectPerRegionForTPUAPI", "TPUV4PreemptiblePerProjectPerZoneForTPUAPI"):
        assert re.search(pattern[1], name)
    assert not re.search(pattern[1], "TPUV4PerProjectPerZoneForTPUAPI"), "on demand"


@pytest.mark.parametrize(
    ("verb", "words"), [("up", "tpu-vm create demo"), ("run", "docker"), ("down", "tpu-vm delete demo")]
)
def test_a_dry_run_calls_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, verb: str, words: str) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))  # no gcloud, no docker
    image = f"image: {{reference: 'r/i@sha256:{'0' * 64}'}}\n"
    (tmp_path / "run.yaml").write_text(f"{SLICE}run: {{command: [train]}}\n{image}")
    result = CliRunner().invoke(cli, [verb, "--dry-run", "-f", str(tmp_path / "run.yaml")])
    assert result.exit_code == 0, result.output
    assert words in result.output
    assert {line.split()[1] for line in result.output.splitlines() if line.startswith("# ")} == {f"{verb}:"}
