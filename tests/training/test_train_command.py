"""`tpu-train train` says a user's mistake in one message and exits with 2, without any framework."""

from pathlib import Path

import pytest
import yaml

from tests.processes import run_module
from training.errors import Exit

CONFIG = {
    "model": {"name": "bert-tiny"},
    "data": {"train": "data/train", "tokenizer": "tokenizer"},
    "train": {"steps": 4, "global_batch_size": 4},
    "output": "runs",
}


def tpu_train(folder: Path, *arguments: str, **environment: str) -> tuple[int, str]:
    """Exit code and everything that was printed."""
    ended = run_module("training.cli", folder, *arguments, PJRT_DEVICE="CPU", **environment)
    return ended.returncode, ended.stdout + ended.stderr


def write(folder: Path, **changes: object) -> None:
    (folder / "run.yaml").write_text(yaml.safe_dump({**CONFIG, **changes}))


def is_one_message(text: str) -> bool:
    return "Traceback" not in text and text.count("tpu-train:") == 1


@pytest.mark.parametrize(
    ("arguments", "environment", "told"),
    [
        (["train", "nowhere.yaml"], {}, "nowhere.yaml: no such file"),
        (["train", "run.yaml"], {}, "tokenizer is not a tokenizer folder"),
        (["train", "run.yaml"], {"TPU_WORKER_ID": "3", "TPU_WORKER_HOSTNAMES": "a,b"}, "worker 3, but only 2 host(s)"),
        (["checkpoint", "list", "."], {}, "no committed checkpoint below"),
    ],
)
def test_bad_input_is_one_message(tmp_path: Path, arguments: list[str], environment: dict[str, str], told: str) -> None:
    write(tmp_path)
    code, text = tpu_train(tmp_path, *arguments, **environment)
    assert (code, is_one_message(text)) == (Exit.BAD_INPUT, True), text
    assert told in text
