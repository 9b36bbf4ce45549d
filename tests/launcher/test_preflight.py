"""Checks what `up` and `run` make of an earlier answer of preflight, without a TPU compiler or an engine."""

import json
from pathlib import Path
from typing import Any

import pytest

from launcher.checks import preflight
from launcher.config import Config, load
from launcher.errors import BadInput, Exit, LaunchError
from launcher.run import specification
from launcher.run.specification import make_attempt
from tests.launcher.run_files import launch

FILE = """\
project: my-project
zone: us-central2-b
slice: {name: demo, accelerator_type: v4-16}
model: {name: bert-base}
data: {train: data/train, tokenizer: data/tokenizer}
train: {steps: 10, global_batch_size: 64}
output: runs
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return write_inputs(tmp_path, FILE)


def write_inputs(tmp_path: Path, text: str) -> Path:
    (tmp_path / "run.yaml").write_text(text)
    for name in ("train/dataset.json", "tokenizer/tokenizer.json"):
        path = tmp_path / "data" / name
        path.parent.mkdir(parents=True)
        path.write_text("{}")
    return tmp_path


def keep(config: Config, name: str = "v4-16", *, fits: bool, **graph: Any) -> Path:
    """Writes an answer where preflight keeps that for a configuration and type, in `home`. Returns its path."""
    verdict = {"fits": fits, "reason": None if fits else "it needs 51.92 GiB of HBM a device, and 30.75 GiB are there"}
    one = {"graph": "training, 64 x 128", "hash": "0123456789abcdef", **verdict, **graph}
    answer = {"accelerator": name, "fits": fits, "graphs": [one], "max_batch": None, "lines": []}
    path = preflight._path(config, Path("home").resolve(), name)
    preflight.keep(path, answer)
    return path


@pytest.mark.parametrize(
    ("before", "after", "still_known"),
    [
        ("steps: 10", "steps: 20", True),
        ("output: runs", "output: elsewhere", True),
        ("global_batch_size: 64", "global_batch_size: 128", False),
        ("bert-base", "bert-large", False),
        ("v4-16", "v4-32", False),
        ("output: runs", "output: runs\nimage: {repository: eu.gcr.io/p/r, base: 'eu.gcr.io/p/b:1'}", False),
    ],
)
def test_an_answer_is_for_what_shapes_the_step(folder: Path, before: str, after: str, still_known: bool) -> None:
    keep(load("run.yaml"), fits=True)
    (folder / "run.yaml").write_text(FILE.replace(before, after))
    assert (preflight.known(load("run.yaml"), folder / "home") is not None) == still_known
    dataset = folder / "data" / "train" / "dataset.json"
    dataset.write_text('{"sequence_length": 64}')
    assert preflight.known(load("run.yaml"), folder / "home") is None, "other data is another question"
    dataset.unlink()
    assert preflight.known(load("run.yaml"), folder / "home") is None


def test_containers_are_told_what_was_checked(folder: Path) -> None:
    messages: list[str] = []
    config = load("run.yaml")
    assert preflight.leave_out_unfit(config, folder / "home", messages.append) == (config, ())
    keep(load("run.yaml"), fits=True)
    _, hashes = preflight.leave_out_unfit(config, folder / "home", messages.append)
    spec = specification.describe(config, "demo-1", preflight=hashes)
    assert spec.preflight == ["0123456789abcdef"], "what the run's folder keeps"
    assert make_attempt(spec, config, 0, "image").environment == {"TPU_LAUNCH_PREFLIGHT": "0123456789abcdef"}
    assert messages == ["preflight: the step fits on v4-16, as compiled before"]


@pytest.mark.parametrize(
    "text", ["[]", "1", '{"format": 1}', '{"format": 1, "result": {"fits": true}}', '{"format": 1, "resu', "\xff"]
)
def test_a_file_of_something_else_or_that_was_cut_is_no_answer(folder: Path, text: str) -> None:
    keep(load("run.yaml"), fits=False).write_bytes(text.encode("latin-1"))
    assert preflight.known(load("run.yaml"), folder / "home") is None
    assert preflight.leave_out_unfit(load("run.yaml"), folder / "home", print)[1] == ()


def test_a_command_of_ones_own_is_not_checked(folder: Path) -> None:
    with pytest.raises(BadInput, match="only the trainer can be checked"):
        preflight.check(load("run.yaml", command=["true"]), folder / "home", [], max_batch=False, more=[], say=print)


def test_a_step_that_is_known_not_to_fit_is_not_compiled_again_and_no_slice_is_created_for_it(folder: Path) -> None:
    keep(load("run.yaml"), fits=False)
    ended = launch(folder, "preflight", "-f", "run.yaml", "--json")
    assert ended.returncode == Exit.DOES_NOT_FIT
    assert json.loads(ended.stdout)["accelerators"][0]["accelerator"] == "v4-16"
    ended = launch(folder, "up", "-f", "run.yaml")
    assert ended.returncode == Exit.DOES_NOT_FIT
    for words in ("run.yaml does not fit on v4-16", "it needs 51.92 GiB of HBM a device", "--no-preflight"):
        assert words in ended.stderr
    assert "Traceback" not in ended.stderr
    with pytest.raises(LaunchError, match="nothing was created or started"):
        preflight.leave_out_unfit(load("run.yaml"), folder / "home", print)


def test_a_result_is_not_kept_for_files_that_changed_meanwhile(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    change = (folder / "data" / "train" / "dataset.json").write_text
    result = {"accelerator": "v4-16", "fits": True, "graphs": [], "max_batch": None}
    monkeypatch.setattr(preflight, "_compile", lambda *_, **__: change('{"sequence_length": 64}') and [result])
    preflight.check(load("run.yaml"), folder / "home", [], max_batch=False, more=[], say=print)
    assert preflight.known(load("run.yaml"), folder / "home") is None


def test_an_unknown_accelerator_is_named(folder: Path) -> None:
    ended = launch(folder, "preflight", "-f", "run.yaml", "--accelerator", "v3-16")
    assert ended.returncode == Exit.BAD_INPUT
    assert "accelerator type 'v3-16' does not exist; v3 has v3-8" in ended.stderr


@pytest.mark.parametrize(
    ("code", "said"),
    [(137, "memory ran out"), (139, "the TPU compiler crashed"), (134, "gave up"), (77, "exit code 77")],
)
def test_a_compiler_that_does_not_end_by_itself_is_told(code: int, said: str) -> None:
    error = preflight._no_answer(code)
    assert said in str(error)
    assert error.exit_code == Exit.APPLICATION_FAILED
