"""Claims about README.md: its file is valid, and its tables name every command and every exit code."""

import re
from pathlib import Path

import click
import pytest

from launcher.cli.main import cli
from launcher.config import load
from launcher.errors import Exit
from training.errors import Exit as TrainerExit

README = (Path(__file__).resolve().parents[2] / "README.md").read_text()


def table(heading: str) -> str:
    return README.split(f"## {heading}")[1].split("\n## ")[0]


def test_the_file_of_the_readme_is_valid(tmp_path: Path) -> None:
    (block,) = re.findall(r"```yaml\n(.*?)```", README, re.DOTALL)
    path = tmp_path / "run.yaml"
    path.write_text(block)
    config = load(path)
    assert config.trainer is not None


@pytest.mark.parametrize("name", cli.list_commands(click.Context(cli)))
def test_every_command_is_in_the_table(name: str) -> None:
    assert re.search(rf"`{name}[ `]", table("Commands")), f"README's table of commands lacks {name}"


def test_every_exit_code_is_in_the_tables() -> None:
    codes = table("Exit codes")
    ours, trainers = codes.split("| code | of `tpu-train` |")
    for code in Exit:
        assert re.search(rf"\b{int(code)}\b", ours), f"README's exit codes lack {int(code)} ({code.name})"
    for each in TrainerExit:
        assert re.search(rf"\b{int(each)}\b|other", trainers), f"README's exit codes of tpu-train lack {int(each)}"
