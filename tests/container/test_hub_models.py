"""A run starts from a model on the Hub: a local server that answers as the Hub does to downloads."""

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.container import small_runs
from tests.container.hub_downloads import DownloadHub, serve_downloads


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return small_runs.prepare(tmp_path)


@pytest.fixture
def hub() -> Iterator[DownloadHub]:
    with serve_downloads("org/model") as running:
        yield running


@pytest.mark.nightly
def test_a_run_starts_from_a_name_on_the_hub(folder: Path, hub: DownloadHub) -> None:
    environment = {"HF_ENDPOINT": hub.url, "HF_HOME": str(folder / "cache")}
    first = small_runs.document(folder, train__steps=8, checkpoint__every_steps=None)
    before = small_runs.trained(folder, "first", first)
    hub.files = {file.name: file.read_bytes() for file in (folder / "runs" / "first" / "model").iterdir()}
    second = {**first, "model": {"path": "org/model"}, "data": {**first["data"], "tokenizer": "org/model"}}
    after = small_runs.trained(folder, "second", second, **environment)
    assert after["first_loss"] < before["first_loss"] - 0.3, "it goes on from the trained weights"
    assert {file.name for file in (folder / "runs" / "second" / "model").iterdir()} == hub.files.keys()


def test_a_model_that_the_hub_does_not_give_is_named_with_what_to_do(folder: Path, hub: DownloadHub) -> None:
    program = (
        "import sys; from training import errors\nfrom training.storage import hub as hub_names\n"
        "try: hub_names.model_folder(sys.argv[1])\nexcept errors.BadInput as error: print(error)"
    )
    for endpoint in (hub.url, "http://127.0.0.1:9"):  # not there; no Hub there
        environment = {"PYTHONPATH": ":".join(sys.path), "HF_ENDPOINT": endpoint, "HF_HOME": str(folder / "cache")}
        command = [sys.executable, "-c", program, "org/other"]
        ended = subprocess.run(command, env={"PATH": "", **environment}, capture_output=True, text=True, timeout=600)
        assert ended.stdout.startswith(
            "model.path org/other: there is no such folder, and the Hub did not give a model of that name: "
        ), ended.stderr
        assert "give its folder (local or gs://)" in ended.stdout
