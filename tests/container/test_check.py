"""`tpu-train check` names the line of a user's module that breaks one of XLA's rules."""

import json
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from training.cli.main import tpu_train
from training.errors import BadInput, Exit

# A line of a module, the rule that it breaks, and words of the message.
BREAKS = {
    "masked": ("y = y[y > 0]", "data-dependent shape", "index with a mask"),
    "unique": ("y = y * torch.unique(x.argmax(-1)).float().sum()", "data-dependent shape", "_unique2"),
    "branch": ("y = y * 2 if y.abs().sum() > 0 else y", "value on the host", "a tensor's value is asked for"),
    "item": ("y = y / y.detach().abs().max().item()", "value on the host", "a tensor's value is asked for"),
    "copied": ("y = y + y.detach().cpu().sum().to(y.device)", "value on the host", "copied to the host"),
    "printed": ("print('largest', y.max())", "value on the host", "a tensor is printed"),
    "number": ("y = torch.roll(y, self.calls, dims=1)", "another program", "roll([4, 8], 2, 1) after ([4, 8], 1, 1)"),
    "host": ("y = torch.fft.fft(y).real", "operation on the host", "_fft_r2c has no XLA form"),
}
TYPO = "y = y @ torch.ones(3, 3, device=y.device)"
LINES = {"clean": "pass", "typo": TYPO, **{name: line for name, (line, _, _) in BREAKS.items()}}
MODEL = f"""
import torch
from helpers import scale

class Net(torch.nn.Module):
    def __init__(self, how):
        super().__init__()
        self.dense, self.how, self.calls = torch.nn.Linear(8, 8), how, 0

    def forward(self, x):
        y = scale(self.dense(x))
        self.calls += 1
{"".join(f"        if self.how == '{name}':{chr(10)}            {line}{chr(10)}" for name, line in LINES.items())}
        return torch.nn.functional.dropout(y, 0.1).square()

def batches():
    return [torch.randn(4, 8) for _ in range(4)]

def ragged():
    return [{{"x": torch.randn(4 + number // 2, 8)}} for number in range(4)]

def nothing():
    return []
{"".join(f"{chr(10)}def {name}():{chr(10)}    return Net('{name}'){chr(10)}" for name in LINES)}
"""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("users") / "my_model.py"
    path.write_text(MODEL)
    (path.parent / "helpers.py").write_text("def scale(x):\n    return x * 2\n")
    return path


def check(model: Path, name: str, inputs: str = "batches", *more: str) -> tuple[int, list[dict[str, Any]]]:
    words = ["check", "--module", f"{model}:{name}", "--inputs", f"{model}:{inputs}", "--json", *more]
    ended = CliRunner().invoke(tpu_train, words, catch_exceptions=False)
    return ended.exit_code, json.loads(ended.stdout)


def place_of(model: Path, line: str) -> str:
    return f"{model}:{MODEL[: MODEL.index(line)].count(chr(10)) + 1}"


def test_a_clean_model_is_clean(model: Path) -> None:
    assert check(model, "clean") == (0, [])


@pytest.mark.parametrize("name", BREAKS)
def test_what_breaks_a_rule_is_named_with_its_line(model: Path, name: str) -> None:
    line, rule, words = BREAKS[name]
    code, findings = check(model, name)
    assert code == Exit.FAILED
    assert {finding["rule"] for finding in findings} == {rule}
    assert {finding["place"].removesuffix(" (backward)") for finding in findings} == {place_of(model, line)}
    assert words in findings[0]["message"]


def test_a_new_shape_is_named_unless_it_was_announced(model: Path) -> None:
    code, [finding] = check(model, "clean", "ragged")
    assert (code, finding["rule"]) == (Exit.FAILED, "another program")
    assert "step 2 has a new shape: x [5, 8], after x [4, 8]" in finding["message"]
    assert finding["place"].startswith(str(model))
    assert check(model, "clean", "ragged", "--shapes", "2") == (0, [])


@pytest.mark.parametrize(
    ("name", "inputs", "message"),
    [
        ("typo", "batches", "RuntimeError"),
        ("clean", "nothing", "gave no batch"),
        ("absent", "batches", "has no function absent"),
        ("batches", "batches", r"must give a torch\.nn\.Module, not list"),
    ],
)
def test_a_module_that_fails_is_one_message(model: Path, name: str, inputs: str, message: str) -> None:
    place = f"{place_of(model, TYPO)}: " if name == "typo" else ""
    with pytest.raises(BadInput, match=place + message):
        check(model, name, inputs)
