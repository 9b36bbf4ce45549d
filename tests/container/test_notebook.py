"""examples/banking77.ipynb runs whole, on some made-up texts, and gives what `tpu-train` gives. Half a minute."""

import json
import random
import shutil
from pathlib import Path
from typing import Any

import nbformat
import pytest
import yaml
from nbclient import NotebookClient

from tests.container import small_runs
from tests.container.notebook_process import PLACES
from tests.processes import run_python
from training.telemetry.metrics import read_history

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
SETTINGS = [
    "model={name: bert-tiny, hidden_size: 32, layers: 1, heads: 2, max_positions: 96}", "train.steps=12",
    "train.warmup_steps=2", "train.global_batch_size=8", "train.learning_rate=0.01", "evaluation.batch_size=8",
]  # fmt: skip


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What the notebook expects beside it: texts, labels, a tokenizer."""
    place = tmp_path_factory.mktemp("notebook")
    for name in ("banking77.ipynb", "banking77.yaml"):
        shutil.copyfile(EXAMPLES / name, place / name)
    small_runs.write_tokenizer(place / "minilm")
    (place / "banking77").mkdir()
    (place / "banking77" / "categories.json").write_text(json.dumps(["calm", "wild"]))
    chance = random.Random(1)
    for name, count in (("train", 64), ("test", 20)):
        texts = [" ".join(f"w{chance.randrange(90) + 100 * (n % 2)}" for _ in range(6)) for n in range(count)]
        rows = [{"text": text, "category": ("calm", "wild")[n % 2]} for n, text in enumerate(texts)]
        small_runs.write_csv(place / "banking77" / f"{name}.csv", rows)
    return place


def test_every_cell_runs_and_the_command_gives_the_same_bits(folder: Path) -> None:
    notebook = nbformat.read(folder / "banking77.ipynb", as_version=4)
    cells = [(cell, cell.metadata.get("tags", ())) for cell in notebook.cells]
    notebook.cells = [cell for cell, tags in cells if "install" not in tags]  # the image has it all
    [parameters] = [cell for cell, tags in cells if "parameters" in tags]
    parameters.source += f"\nsettings = {SETTINGS!r}\nquery = 'w110 w120 w130 w140'"
    place = {"metadata": {"path": str(folder)}}
    NotebookClient(notebook, timeout=600, kernel_name="python3", resources=place).execute()
    outputs = [cell.outputs for cell in notebook.cells if cell.cell_type == "code"]
    printed = ["".join(output.get("text", "") for output in each) for each in outputs]
    assert "64 records of 16 tokens" in printed[2], printed[2]
    assert "weighted F1" in printed[-2], printed[-2]
    assert printed[-1].split()[1] in ("calm", "wild"), printed[-1]

    settings = [word for each in SETTINGS for word in ("--set", each)]
    run_python("-m", "training.cli", "train", "banking77.yaml", "--run-id", "command", *settings, folder=folder)
    summary = small_runs.summary(folder, "command")
    assert f"weights: {summary['final_weights_crc32c']}" in printed[-2]
    assert read_history(str(folder / "runs" / "notebook"))[-1]["eval_weighted_f1"] == summary["eval_weighted_f1"]


def run_process(folder: Path, case: str) -> Any:
    small_runs.prepare(folder)
    (folder / "run.yaml").write_text(yaml.safe_dump(small_runs.document(folder, train__steps=8, evaluation__every=4)))
    run_python("-m", "tests.container.notebook_process", str(folder), case)
    return json.loads((folder / f"{case}.json").read_text())


def test_a_notebook_s_process_is_as_before_after_our_functions_have_run(tmp_path: Path) -> None:
    used, fresh = (run_process(tmp_path / case, case) for case in ("used", "fresh"))
    assert used["after"] == used["before"]
    seeded = {"random": fresh["after"][1]["random"]}  # by the import
    assert fresh["after"] == [fresh["before"][0], used["before"][1] | seeded], "where they import the libraries, too"
    assert (used["steps"], fresh["steps"]) == (3, 3)


def test_an_interrupted_cell_leaves_a_kernel_that_trains_again(tmp_path: Path) -> None:
    """In tracing, compiling, a step, waiting for its result, a save, an evaluation, and the end."""
    checksums = run_process(tmp_path, "interrupted")
    assert list(checksums) == ["", *(name for _, name, _ in PLACES)]
    assert len(set(checksums.values())) == 1, "the same bits as a run that was not interrupted"
