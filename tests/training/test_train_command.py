"""`tpu-train train` says a user's mistake in one message and exits with 2, before any framework is imported: there is
none here."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from training.errors import Exit

HOUSE = Path(__file__).resolve().parents[2]
CONFIG = {
    "model": {"name": "bert-tiny"},
    "data": {"train": "data/train", "tokenizer": "tokenizer"},
    "train": {"steps": 4, "global_batch_size": 4},
    "output": "runs",
}


def tpu_train(folder: Path, *arguments: str, **environment: str) -> tuple[int, str]:
    """Exit code and everything that was printed."""
    ended = subprocess.run(
        [sys.executable, "-m", "training.cli", *arguments],
        cwd=folder,
        env={"PATH": "/usr/bin:/bin", "PYTHONPATH": str(HOUSE), "PJRT_DEVICE": "CPU", **environment},
        capture_output=True,
        text=True,
        timeout=60,
    )
    return ended.returncode, ended.stdout + ended.stderr


def write(folder: Path, **changes: object) -> str:
    (folder / "run.yaml").write_text(yaml.safe_dump({**CONFIG, **changes}))
    return "run.yaml"


def is_one_message(text: str) -> bool:
    return "Traceback" not in text and text.count("tpu-train:") == 1


def test_a_missing_file(tmp_path: Path) -> None:
    code, text = tpu_train(tmp_path, "train", "nowhere.yaml")
    assert (code, is_one_message(text)) == (Exit.BAD_INPUT, True), text
    assert "nowhere.yaml: no such file" in text


def test_mistakes_are_named_with_their_lines(tmp_path: Path) -> None:
    code, text = tpu_train(
        tmp_path, "train", write(tmp_path, train={"steps": "many", "global_batch_size": 4, "learnig_rate": 1.0})
    )
    assert (code, is_one_message(text)) == (Exit.BAD_INPUT, True), text
    assert "train.steps: should be a valid integer, not 'many'" in text
    assert "unknown key 'train.learnig_rate'; did you mean 'learning_rate'?" in text
    assert all(line.startswith("run.yaml:") for line in text.splitlines()[1:])


def test_a_missing_tokenizer(tmp_path: Path) -> None:
    code, text = tpu_train(tmp_path, "train", write(tmp_path))
    assert (code, is_one_message(text)) == (Exit.BAD_INPUT, True), text
    assert "tokenizer is not a tokenizer folder" in text


def test_a_worker_beyond_the_hosts(tmp_path: Path) -> None:
    code, text = tpu_train(tmp_path, "train", write(tmp_path), TPU_WORKER_ID="3", TPU_WORKER_HOSTNAMES="a,b")
    assert (code, is_one_message(text)) == (Exit.BAD_INPUT, True), text
    assert "worker 3, but only 2 host(s)" in text


def test_an_unknown_command_is_bad_input(tmp_path: Path) -> None:
    code, text = tpu_train(tmp_path, "trian")
    assert code == Exit.BAD_INPUT
    assert "Did you mean 'train'?" in text


@pytest.mark.parametrize("command", [["--help"], ["train", "--help"], ["checkpoint", "--help"]])
def test_help_needs_no_framework(tmp_path: Path, command: list[str]) -> None:
    code, text = tpu_train(tmp_path, *command)
    assert (code, "Usage: tpu-train" in text) == (0, True)


def test_checkpoints_of_an_empty_folder(tmp_path: Path) -> None:
    code, text = tpu_train(tmp_path, "checkpoint", "list", str(tmp_path))
    assert (code, is_one_message(text)) == (Exit.BAD_INPUT, True), text
    assert "no committed checkpoint below" in text
