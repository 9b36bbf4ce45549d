"""Claims about the wheel: built and installed into an empty environment, it is a complete `tpu-launch`. About 30 s; at
night on the newer versions of Python too, and by every command that README names."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.pythons import HERE, find_python

ROOT = Path(__file__).resolve().parents[2]
SOURCES = ("launcher", "training", "images", "examples", "pyproject.toml", "setup.py", "README.md", "LICENSE")
README = (ROOT / "README.md").read_text()
REPOSITORY = "us-central2-docker.pkg.dev/my-project/images/bert"
SMALL = ("init", "-f", "run.yaml", "--project", "my-project", "--accelerator-type", "v4-16")
INIT = (*SMALL, "--bucket", "my-bucket", "--repository", REPOSITORY)


# The interpreter of these tests, and at night the others that pyproject.toml names.
VERSIONS = [
    pytest.param(version, marks=[] if version == HERE else pytest.mark.nightly)
    for version in dict.fromkeys(
        (HERE, *re.findall(r'"[\w :]+ Python :: (3\.\d+)"', (ROOT / "pyproject.toml").read_text()))
    )
]


def run(*command: str | Path, folder: Path, code: int = 0, seconds: float = 240, **environment: str) -> str:
    """Runs a command with nothing of this checkout in its environment, and returns what it printed."""
    ours = ("PYTHON", "TPU_LAUNCH_HOME", "VIRTUAL_ENV")
    variables = {key: value for key, value in os.environ.items() if not key.startswith(ours)} | environment
    words = [str(word) for word in command]
    result = subprocess.run(
        words, cwd=folder, env=variables, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=seconds
    )
    assert result.returncode == code, f"{words}: {result.stdout}"
    return result.stdout


def uv() -> str:
    program = shutil.which("uv", path=f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}")
    assert program is not None
    return program


def copy_sources(folder: Path) -> None:
    for name in SOURCES:
        source = ROOT / name
        if source.is_dir():
            shutil.copytree(source, folder / name, ignore=shutil.ignore_patterns("__pycache__", "commit.txt"))
        else:
            shutil.copy(source, folder / name)


@pytest.fixture(scope="module")
def checkout(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A committed copy of what a wheel is built from."""
    folder = tmp_path_factory.mktemp("checkout")
    copy_sources(folder)
    (folder / ".gitignore").write_text("*.egg-info/\nbuild/\n")
    git = ("git", "-c", "user.name=test", "-c", "user.email=test@localhost")
    run("git", "init", "--quiet", folder=folder)
    run("git", "add", "--all", folder=folder)
    run(*git, "commit", "--quiet", "--message", "a commit", folder=folder)
    return folder


@pytest.fixture(scope="module")
def wheel(checkout: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("wheel")
    run(sys.executable, "-m", "build", "--no-isolation", "--outdir", folder, folder=checkout)
    (path,) = folder.glob("*.whl")
    return path


@pytest.fixture(scope="module", params=VERSIONS)
def installed(wheel: Path, tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> Path:
    """The programs' folder of an environment that holds the wheel and its dependencies, and nothing else."""
    folder = tmp_path_factory.mktemp("installed")
    python = folder / "venv" / "bin" / "python"
    run(uv(), "venv", "--quiet", "--python", find_python(request.param), folder / "venv", folder=folder)
    # the versions that the lock file pins, so that a new release of a dependency can't fail this test
    pins = constraints(folder)
    run(uv(), "pip", "install", "--quiet", "--python", python, "--constraint", pins, wheel, folder=folder)
    return folder / "venv" / "bin"


def constraints(folder: Path) -> Path:
    """The pins of requirements-dev.txt, without hashes."""
    pins = re.findall(r"^[A-Za-z0-9_.-]+==[^\\\n]+", (ROOT / "requirements-dev.txt").read_text(), re.MULTILINE)
    path = folder / "constraints.txt"
    path.write_text("\n".join(pins) + "\n")
    return path


def test_first_file_is_written_and_planned(installed: Path, tmp_path: Path) -> None:
    """`plan` needs the Dockerfiles and the trainer's source, which the wheel brings."""
    run(installed / "tpu-launch", *INIT, folder=tmp_path)
    plan = run(installed / "tpu-launch", "plan", "-f", "run.yaml", folder=tmp_path)
    assert "gcloud compute tpus tpu-vm create" in plan
    assert re.search(rf"docker push {REPOSITORY}:\w+", plan)


def test_doctor_says_what_an_empty_machine_lacks(installed: Path, tmp_path: Path) -> None:
    """Where nothing else is installed: no gcloud, no docker, no ssh."""
    run(installed / "tpu-launch", *SMALL, folder=tmp_path)
    machine = {"PATH": str(installed), "HOME": str(tmp_path)}
    report = run(installed / "tpu-launch", "doctor", "-f", "run.yaml", folder=tmp_path, code=2, **machine)
    assert "FAIL  gcloud: gcloud was not found on PATH: install the Google Cloud CLI" in report
    assert "docker was not found on PATH" in report
    assert "or give image.repository, where the image is then made without an engine" in report
    assert f"PASS  folder: {tmp_path}/.tpu-launch" in report
    assert "Traceback" not in report


def test_package_data_is_complete(installed: Path) -> None:
    """Every file of a package that is not Python, every Dockerfile's folder, and every example."""
    environment = installed.parent
    (packages,) = (environment / "lib").glob("python*/site-packages")
    for name in ("launcher", "training"):
        for path in (ROOT / name).rglob("*"):
            if path.is_file() and "__pycache__" not in path.parts:
                assert (packages / path.relative_to(ROOT)).is_file(), path
    share = environment / "share" / "tpu-launch"
    for pattern in ("images/*/*", "examples/*.yaml"):
        for path in ROOT.glob(pattern):
            assert (share / path.relative_to(ROOT)).is_file(), path


def test_completion_prints_a_script_and_names_commands(installed: Path, tmp_path: Path) -> None:
    for shell in ("bash", "zsh", "fish"):
        script = run(installed / "tpu-launch", "completion", shell, folder=tmp_path)
        assert f"_TPU_LAUNCH_COMPLETE={shell}_complete" in script
    words = {"_TPU_LAUNCH_COMPLETE": "bash_complete", "COMP_WORDS": "tpu-launch prefl", "COMP_CWORD": "1"}
    assert run(installed / "tpu-launch", folder=tmp_path, **words) == "plain,preflight\n"


def shown_installations() -> list[str]:
    """The commands of README's "Install" that install."""
    section = README.split("## Install\n")[1].split("\n## ")[0]
    return [line.split(" # ")[0].strip() for line in re.findall(r"^\$ (.* install .*)$", section, re.MULTILINE)]


@pytest.mark.nightly
@pytest.mark.parametrize("command", shown_installations())
def test_installing_as_the_readme_says(checkout: Path, tmp_path: Path, command: str) -> None:
    """Typed in a checkout, in an empty environment with pip, pipx and uv; the repository is the checkout."""
    run(uv(), "venv", "--quiet", "--seed", "--python", sys.executable, tmp_path / "venv", folder=tmp_path)
    programs = tmp_path / "venv" / "bin"
    run(programs / "pip", "install", "--quiet", "pipx", "uv", folder=tmp_path)
    machine = {
        "HOME": str(tmp_path),
        "PATH": f"{programs}{os.pathsep}{os.environ['PATH']}",
        "PIPX_HOME": str(tmp_path / "pipx"),
        "PIPX_BIN_DIR": str(tmp_path / "bin"),
        "UV_TOOL_DIR": str(tmp_path / "uv"),
        "UV_TOOL_BIN_DIR": str(tmp_path / "bin"),
    }
    words = command.replace("https://HOST/PATH/tpu-launch.git", f"file://{checkout}").split()
    run(*words, folder=checkout, **machine)
    folder = programs if words[0] == "pip" else tmp_path / "bin"
    commit = run("git", "rev-parse", "--short=12", "HEAD", folder=checkout).strip()
    assert f"(commit {commit})" in run(folder / "tpu-launch", "--version", folder=tmp_path)
    run(folder / "tpu-launch", *INIT, folder=tmp_path)
    assert "docker push" in run(folder / "tpu-launch", "plan", "-f", "run.yaml", folder=tmp_path)


def test_rehearsal_and_trainer_help_need_no_checkout_and_no_framework(installed: Path, tmp_path: Path) -> None:
    script = "from launcher.installation import example; print(example('rehearsal.yaml'))"
    path = Path(run(installed / "python", "-c", script, folder=tmp_path).strip())
    assert path.is_relative_to(installed.parent)
    assert path.read_text() == (ROOT / "examples" / "rehearsal.yaml").read_text()
    assert "checkpoint" in run(installed / "tpu-train", "--help", folder=tmp_path)


def test_dockerfiles_are_found_wherever_an_installer_puts_them(wheel: Path, installed: Path, tmp_path: Path) -> None:
    """With --target, data files are not below the prefix of the Python that runs."""
    target = tmp_path / "target"
    run(uv(), "pip", "install", "--quiet", "--no-deps", "--target", target, wheel, folder=tmp_path)
    script = "from launcher.installation import shared_folder; print(shared_folder('images') / 'host' / 'Dockerfile')"
    path = Path(run(installed / "python", "-c", script, folder=tmp_path, PYTHONPATH=str(target)).strip())
    assert path.is_relative_to(target.resolve())
    assert path.is_file()
