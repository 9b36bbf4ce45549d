"""The launcher's image, as a cluster would start it, reaches an emulated v4-16 with its own gcloud and ssh."""

import subprocess
from pathlib import Path

import pytest

from launcher import installation
from launcher.emulator import control
from launcher.images import engine
from launcher.images.build import ensure_image
from launcher.images.specification import launcher_spec
from tests.rehearsal.workstation import ROOT, EmulatedSlice, Workstation

pytestmark = pytest.mark.timeout(1200)  # the image may have to be built
# As in the Deployment: another user than root, no capabilities, nothing to write but its home and /tmp.
CONFINED = ("--read-only", "--cap-drop=ALL", "--tmpfs=/home/launcher:uid=1000", "--tmpfs=/tmp", "--network=host")


@pytest.fixture(scope="module")
def image() -> str:
    subprocess.run([ROOT / "tools" / "gcloud-image.sh"], check=True, timeout=700)
    return ensure_image(launcher_spec(), print).reference


def argv_of(image: str, *command: str, options: tuple[str, ...] = ()) -> list[str]:
    """Returns the command line that runs a command of the image."""
    return [engine.client(), "run", "--rm", *CONFINED, *options, image, *command]


def emulated_options(work: Workstation, folder: Path) -> tuple[str, ...]:
    """Returns the engine's options with which a container reaches the emulator: its variables and its token."""
    variables = control.environment(work.emulator)
    names = [name for name in variables if name.startswith(("CLOUDSDK_API", "CLOUDSDK_CORE", "STORAGE", "TPU_LAUNCH"))]
    token = folder / "token"  # a copy that the image's user may read
    token.write_text(Path(variables["CLOUDSDK_AUTH_ACCESS_TOKEN_FILE"]).read_text())
    given = (*(f"--env={name}={variables[name]}" for name in names), "--env=CLOUDSDK_AUTH_ACCESS_TOKEN_FILE=/token")
    return (*given, f"--volume={token}:/token:ro")


def start(image: str, *command: str, options: tuple[str, ...] = ()) -> tuple[int, str]:
    """Runs a command of the image to its end; returns its exit code and its output."""
    argv = argv_of(image, *command, options=options)
    done = subprocess.run(argv, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=600)
    return done.returncode, done.stdout


def test_its_command_is_tpu_launch_of_this_version(image: str) -> None:
    code, output = start(image, "--version")
    assert (code, output.split()[:3]) == (0, ["tpu-launch,", "version", installation.version().split()[0]]), output
    code, output = start(image, "-c", "id -u; gcloud version", options=("--entrypoint=sh",))
    assert (code, output.splitlines()[:2]) == (0, ["1000", "Google Cloud SDK 528.0.0"]), output


def test_doctor_finds_gcloud_and_says_what_is_missing(image: str, tmp_path: Path) -> None:
    (tmp_path / "run.yaml").write_text("project: p\nzone: us-central2-b\nslice: {name: a, accelerator_type: v4-8}\n")
    options = (f"--volume={tmp_path}/run.yaml:/run.yaml:ro", "--env=CLOUDSDK_CORE_CHECK_GCE_METADATA=false")
    code, output = start(image, "doctor", "-f", "/run.yaml", options=options)
    assert (code, "Traceback" in output) == (2, False), output
    assert "PASS  gcloud: 528" in output


def test_it_enters_a_host_of_a_slice(image: str, two_hosts: EmulatedSlice, tmp_path: Path) -> None:
    options = (*emulated_options(two_hosts, tmp_path), f"--volume={two_hosts.folder / two_hosts.run_file}:/run.yaml:ro")
    code, output = start(image, "ssh", "-f", "/run.yaml", "--host", "1", "--", "hostname", options=options)
    assert code == 0, output
    entered = two_hosts.good_on_slice("ssh", "--host", "1", "--", "hostname")
    assert output.splitlines()[-1] == entered.output.splitlines()[-1]
