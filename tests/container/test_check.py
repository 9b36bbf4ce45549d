"""`tpu-train check` names the line of a user's module that breaks one of XLA's rules."""

import json
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from training.cli.main import tpu_train
from training.errors import BadInput, Exit

MODEL = """
import torch
from helpers import scale

class Net(torch.nn.Module):
    def __init__(self, how):
        super().__init__()
        self.dense, self.how, self.calls = torch.nn.Linear(8, 8), how, 0

    def forward(self, x):
        y = scale(self.dense(x))
        self.calls += 1
        if self.how == "masked":
            y = y[y > 0]  # line:masked
        if self.how == "unique":
            y = y * torch.unique(x.argmax(-1)).float().sum()  # line:unique
        if self.how == "branch" and y.abs().sum() > 0:  # line:branch
            y = y * 2
        if self.how == "item":
            y = y / y.detach().abs().max().item()  # line:item
        if self.how == "copied":
            y = y + y.detach().cpu().sum().to(y.device)  # line:copied
        if self.how == "printed":
            print("largest", y.max())  # line:printed
        if self.how == "number":
            y = torch.roll(y, self.calls, dims=1)  # line:number
        if self.how == "host":
            y = torch.fft.fft(y).real  # line:host
        if self.how == "typo":
            y = y @ torch.ones(3, 3, device=y.device)  # line:typo
        return torch.nn.functional.dropout(y, 0.1).square()

def batches():
    return [torch.randn(4, 8) for _ in range(4)]

def ragged():
    return [{"x": torch.randn(4 + number // 2, 8)} for number in range(4)]

def nothing():
    return []
"""
NAMES = ("clean", "masked", "unique", "branch", "item", "copied", "printed", "number", "host", "typo")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("users") / "my_model.py"
    path.write_text(MODEL + "".join(f"\ndef {name}():\n    return Net('{name}')\n" for name in NAMES))
    (path.parent / "helpers.py").write_text("def scale(x):\n    return x * 2\n")
    return path


def check(model: Path, name: str, inputs: str = "batches", *more: str) -> tuple[int, list[dict[str, Any]]]:
    ended = CliRunner().invoke(
        tpu_train, ["check", "--module", f"{model}:{name}", "--inputs", f"{model}:{inputs}", "--json", *more]
    )
    if isinstance(ended.exception, BadInput):
        raise ended.exception
    return ended.exit_code, json.loads(ended.stdout)


def line(model: Path, name: str) -> str:
    [number] = [
        number for number, text in enumerate(model.read_text().splitlines(), 1) if text.endswith(f"# line:{name}")
    ]
    return f"{model}:{number}"


def test_a_clean_model_is_clean(model: Path) -> None:
    assert check(model, "clean") == (0, [])


@pytest.mark.parametrize(
    ("name", "rule", "words"),
    [
        ("masked", "data-dependent shape", "index with a mask"),
        ("unique", "data-dependent shape", "_unique2"),
        ("branch", "value on the host", "a tensor's value is asked for"),
        ("item", "value on the host", "a tensor's value is asked for"),
        ("copied", "value on the host", "copied to the host"),
        ("printed", "value on the host", "a tensor is printed"),
        ("number", "another program", "roll([4, 8], 2, 1) after ([4, 8], 1, 1)"),
        ("host", "operation on the host", "_fft_r2c has no XLA form"),
    ],
)
def test_what_breaks_a_rule_is_named_with_its_line(model: Path, name: str, rule: str, words: str) -> None:
    code, findings = check(model, name)
    assert code == Exit.FAILED
    assert {finding["rule"] for finding in findings} == {rule}
    assert {finding["place"].removesuffix(" (backward)") for finding in findings} == {line(model, name)}
    assert words in findings[0]["message"]


def test_a_new_shape_is_named_unless_it_was_announced(model: Path) -> None:
    code, [finding] = check(model, "clean", "ragged")
    assert (code, finding["rule"]) == (Exit.FAILED, "another program")
    assert "step 2 has a new shape: x [5, 8], after x [4, 8]" in finding["message"]
    assert finding["place"].startswith(str(model))
    assert check(model, "clean", "ragged", "--shapes", "2") == (0, [])


def test_a_module_that_fails_is_one_message(model: Path) -> None:
    with pytest.raises(BadInput, match=rf"{line(model, 'typo')}: RuntimeError"):
        check(model, "typo")
    with pytest.raises(BadInput, match="gave no batch"):
        check(model, "clean", "nothing")
    with pytest.raises(BadInput, match="has no function absent"):
        check(model, "absent")
    with pytest.raises(BadInput, match=r"must give a torch\.nn\.Module, not list"):
        check(model, "batches")
