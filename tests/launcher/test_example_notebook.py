"""Claims about examples/banking77.ipynb: its cells are valid, it fetches what it says, and on a plain machine, without
our images, it runs from its first cell to its last (at night: that installs PyTorch/XLA, 8 GB)."""

import ast
import functools
import http.server
import json
import re
import shutil
import threading
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.launcher.test_wheel import copy_sources, uv
from tests.launcher.test_wheel import run as run_outside
from tests.pythons import find_python

ROOT = Path(__file__).resolve().parents[2]
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


def cells(tag: str | None = None) -> list[dict[str, Any]]:
    """The cells of code; those with this tag."""
    notebook = json.loads(NOTEBOOK.read_text(encoding="utf-8"))
    code = [cell for cell in notebook["cells"] if cell["cell_type"] == "code"]
    return [cell for cell in code if tag is None or tag in cell["metadata"].get("tags", ())]


def source(cell: dict[str, Any]) -> str:
    return "".join(cell["source"])


def parameters() -> dict[str, Any]:
    [cell] = cells("parameters")
    values: dict[str, Any] = {}
    exec(source(cell), values)
    return values


@pytest.fixture
def website(tmp_path: Path) -> Iterator[str]:
    """The address of a web server with texts in the layout of BANKING77's."""
    folder = tmp_path / "website"
    folder.mkdir()
    for name, rows in (("train", 64), ("test", 20)):
        texts = [("where is my card", "card") if number % 2 else ("send some money", "money") for number in range(rows)]
        table = "".join(f"{text} number {number},{label}\n" for number, (text, label) in enumerate(texts))
        (folder / f"{name}.csv").write_text("text,category\n" + table)
    (folder / "categories.json").write_text(json.dumps(["card", "money"]))
    handler = functools.partial(http.server.SimpleHTTPRequestHandler, directory=str(folder))
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()


def test_cells_are_python_and_carry_no_output() -> None:
    for cell in cells():
        ast.parse(re.sub(r"^%pip .*", "", source(cell), flags=re.MULTILINE))
        assert (cell["outputs"], cell["execution_count"]) == ([], None)


def test_the_first_cell_of_code_installs_an_extra_that_the_package_has() -> None:
    [install] = cells("install")
    assert install == cells()[0]
    assert all(line.startswith("%pip install ") for line in source(install).splitlines())
    folder, extra = re.findall(r'"(\S+)\[(\S+)\]"', source(install))[0]
    project = tomllib.loads((NOTEBOOK.parent / folder / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    assert extra in project["optional-dependencies"]
    opening = json.loads(NOTEBOOK.read_text(encoding="utf-8"))["cells"][0]
    for version in re.findall(r"3\.\d+", source(opening)):
        assert f"Programming Language :: Python :: {version}" in project["classifiers"]


@pytest.fixture
def environment(tmp_path: Path) -> Iterator[Path]:
    """Where a virtual environment may be made; 8 GB, which are not kept."""
    folder = tmp_path / "environment"
    yield folder
    shutil.rmtree(folder, ignore_errors=True)


@pytest.mark.nightly
@pytest.mark.timeout(INSTALL_SECONDS + 600)
@pytest.mark.parametrize("version", ["3.11", "3.12"])
def test_every_cell_runs_on_a_plain_machine(version: str, website: str, environment: Path, tmp_path: Path) -> None:
    checkout = tmp_path / "checkout"
    checkout.mkdir()
    copy_sources(checkout)
    run = functools.partial(run_outside, folder=checkout / "examples", seconds=INSTALL_SECONDS)
    run(uv(), "venv", "--quiet", "--seed", "--python", find_python(version), environment)
    run(environment / "bin" / "python", "-m", "pip", "install", "--quiet", *PACKAGES)
    changes = [
        f"source = {website!r}",
        'settings = ["train.steps=12", "train.warmup_steps=2", "evaluation.every=12"]',
        'query = "where is my card"',
    ]
    printed = run(environment / "bin" / "python", "-c", EXECUTE, "\n".join(changes))
    assert "64 records of 16 tokens" in printed, printed
    assert re.search(r"after step 12: weighted F1 \d\.\d{4}", printed), printed
    assert re.findall(r"^ ?\d\.\d{4}  (\w+)$", printed, re.MULTILINE)[0] == "card", printed
