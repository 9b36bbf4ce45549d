"""Claims about the wheel and the example's notebook: installed into an empty environment, the wheel is a complete
`tpu-launch` (about 30 s; at night on newer versions of Python, and by every command that README names); the notebook's
cells are valid, and it runs on a plain machine, without our images (at night: that installs PyTorch/XLA, 8 GB)."""

import ast
import functools
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from launcher.emulator.http_server import HttpResponse
from tests.servers import LoopbackServer

HERE = f"{sys.version_info.major}.{sys.version_info.minor}"
ROOT = Path(__file__).resolve().parents[2]
SOURCES = ("launcher", "training", "images", "examples", "pyproject.toml", "setup.py", "README.md", "LICENSE")
README = (ROOT / "README.md").read_text()
REPOSITORY = "us-central2-docker.pkg.dev/my-project/images/bert"
SMALL = ("init", "-f", "run.yaml", "--project", "my-project", "--accelerator-type", "v4-16")
INIT = (*SMALL, "--bucket", "my-bucket", "--repository", REPOSITORY)
WITH_ENGINE = ("--set", "image.build=engine")  # also where none answers


# The interpreter of these tests, and at night the others that pyproject.toml names.
VERSIONS = [
    pytest.param(version, marks=[] if version == HERE else pytest.mark.nightly)
    for version in sorted({HERE, *re.findall(r'"[\w :]+ Python :: (3\.\d+)"', (ROOT / "pyproject.toml").read_text())})
]


def find_python(version: str) -> str:
    """Returns what `uv venv --python` takes: a program on the PATH or of pyenv, or the version to download."""
    if version == HERE:
        return sys.executable
    pyenv = Path(os.environ.get("PYENV_ROOT") or Path.home() / ".pyenv")
    installed = sorted(pyenv.glob(f"versions/{version}.*/bin/python{version}"))
    for candidate in (shutil.which(f"python{version}"), *map(str, installed)):
        # One of pyenv's shims may be there for a version that is not switched on.
        if candidate and subprocess.run([candidate, "--version"], capture_output=True, check=False).returncode == 0:
            return candidate
    return version


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
    plan = run(installed / "tpu-launch", "plan", "-f", "run.yaml", *WITH_ENGINE, folder=tmp_path)
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
    """Every file of a package, every Dockerfile's folder, and every example."""
    (packages,) = (installed.parent / "lib").glob("python*/site-packages")
    share = installed.parent / "share" / "tpu-launch"
    places = {"launcher/**/*": packages, "training/**/*": packages, "images/*/*": share, "examples/*.yaml": share}
    for pattern, place in places.items():
        for path in ROOT.glob(pattern):
            if path.is_file() and "__pycache__" not in path.parts:
                assert (place / path.relative_to(ROOT)).is_file(), path


def test_completion_prints_a_script_and_names_commands(installed: Path, tmp_path: Path) -> None:
    for shell in ("bash", "zsh", "fish"):
        script = run(installed / "tpu-launch", "completion", shell, folder=tmp_path)
        assert f"_TPU_LAUNCH_COMPLETE={shell}_complete" in script
    words = {"_TPU_LAUNCH_COMPLETE": "bash_complete", "COMP_WORDS": "tpu-launch prefl", "COMP_CWORD": "1"}
    assert run(installed / "tpu-launch", folder=tmp_path, **words) == "plain,preflight\n"


INSTALLATION = README.split("## Install\n")[1].split("\n## ")[0]


@pytest.mark.nightly
@pytest.mark.parametrize("command", re.findall(r"^\$ (.* install .*?)\s*(?: # .*)?$", INSTALLATION, re.MULTILINE))
def test_installing_as_the_readme_says(checkout: Path, tmp_path: Path, command: str) -> None:
    """Typed in a checkout, in an empty environment with pip, pipx and uv; the repository is the checkout."""
    run(uv(), "venv", "--quiet", "--seed", "--python", sys.executable, tmp_path / "venv", folder=tmp_path)
    programs = tmp_path / "venv" / "bin"
    run(programs / "pip", "install", "--quiet", "pipx", "uv", folder=tmp_path)
    places = {"PIPX_HOME": "pipx", "PIPX_BIN_DIR": "bin", "UV_TOOL_DIR": "uv", "UV_TOOL_BIN_DIR": "bin", "HOME": ""}
    machine = {name: str(tmp_path / place) for name, place in places.items()}
    machine["PATH"] = f"{programs}{os.pathsep}{os.environ['PATH']}"
    words = command.replace("https://HOST/PATH/tpu-launch.git", f"file://{checkout}").split()
    run(*words, folder=checkout, **machine)
    folder = programs if words[0] == "pip" else tmp_path / "bin"
    commit = run("git", "rev-parse", "--short=12", "HEAD", folder=checkout).strip()
    assert f"(commit {commit})" in run(folder / "tpu-launch", "--version", folder=tmp_path)
    run(folder / "tpu-launch", *INIT, folder=tmp_path)
    assert "docker push" in run(folder / "tpu-launch", "plan", "-f", "run.yaml", *WITH_ENGINE, folder=tmp_path)


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


NOTEBOOK = ROOT / "examples" / "banking77.ipynb"
PACKAGES = ("ipykernel", "nbclient", "nbformat")  # what a notebook service has
INSTALL_SECONDS = 3600
# Executes the notebook of the working directory with the parameters of its argument, and prints what its cells print.
EXECUTE = """
import json, sys
import nbformat
from nbclient import NotebookClient

notebook = nbformat.read("banking77.ipynb", as_version=4)
nbformat.validate(notebook)
for cell in notebook.cells:
    if "parameters" in cell.metadata.get("tags", ()):
        cell.source += "\\n" + sys.argv[1]
NotebookClient(notebook, timeout=3600, kernel_name="python3").execute()
print(*(output.get("text", "") for cell in notebook.cells for output in cell.get("outputs", ())))
"""


def cells(kind: str = "code") -> list[tuple[str, dict[str, Any]]]:
    """The source of each cell of a kind, and the cell."""
    notebook = json.loads(NOTEBOOK.read_text(encoding="utf-8"))
    return [("".join(cell["source"]), cell) for cell in notebook["cells"] if cell["cell_type"] == kind]


@pytest.fixture
def website() -> Iterator[str]:
    """The address of a web server with texts in the layout of BANKING77's."""
    files = {"/categories.json": b'["card", "money"]'}
    for name, rows in (("train", 64), ("test", 20)):
        texts = ("send some money number {},money\n", "where is my card number {},card\n")
        table = "".join(texts[number % 2].format(number) for number in range(rows))
        files[f"/{name}.csv"] = f"text,category\n{table}".encode()
    server = LoopbackServer(lambda request: HttpResponse(200, files[request.path]))
    yield server.url
    server.close()


def test_cells_are_python_and_carry_no_output() -> None:
    for source, cell in cells():
        ast.parse(re.sub(r"^%pip .*", "", source, flags=re.MULTILINE))
        assert (cell["outputs"], cell["execution_count"]) == ([], None)


def test_the_first_cell_of_code_installs_an_extra_that_the_package_has() -> None:
    install, cell = cells()[0]
    assert "install" in cell["metadata"]["tags"]
    assert all(line.startswith("%pip install ") for line in install.splitlines())
    folder, extra = re.findall(r'"(\S+)\[(\S+)\]"', install)[0]
    project = tomllib.loads((NOTEBOOK.parent / folder / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    assert extra in project["optional-dependencies"]
    for version in re.findall(r"3\.\d+", cells("markdown")[0][0]):
        assert f"Programming Language :: Python :: {version}" in project["classifiers"]


@pytest.mark.nightly
@pytest.mark.timeout(INSTALL_SECONDS + 600)
@pytest.mark.parametrize("version", ["3.11", "3.12"])
def test_every_cell_runs_on_a_plain_machine(version: str, website: str, tmp_path: Path) -> None:
    checkout = tmp_path / "checkout"
    checkout.mkdir()
    copy_sources(checkout)
    run_here = functools.partial(run, folder=checkout / "examples", seconds=INSTALL_SECONDS)
    changes = [
        f"source = {website!r}",
        'settings = ["train.steps=12", "train.warmup_steps=2", "evaluation.every=12"]',
        'query = "where is my card"',
    ]
    with tempfile.TemporaryDirectory(dir=tmp_path) as environment:  # 8 GB, which are not kept
        run_here(uv(), "venv", "--quiet", "--seed", "--python", find_python(version), environment)
        python = Path(environment, "bin", "python")
        run_here(python, "-m", "pip", "install", "--quiet", *PACKAGES)
        printed = run_here(python, "-c", EXECUTE, "\n".join(changes))
    assert "64 records of 16 tokens" in printed, printed
    assert re.search(r"after step 12: weighted F1 \d\.\d{4}", printed), printed
    assert re.findall(r"^ ?\d\.\d{4}  (\w+)$", printed, re.MULTILINE)[0] == "card", printed
