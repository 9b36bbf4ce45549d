"""Claims about docs/reference/: its pages are what the code says, and everything in them has a text."""

import inspect

import click
import pytest

import launcher.errors
import training.errors
from launcher.cli.main import cli
from tools import reference
from training.cli.main import tpu_train

COMMANDS = [*reference.all_commands("tpu-launch", cli), *reference.all_commands("tpu-train", tpu_train)]
KEYS = dict(reference.all_keys())


def test_pages_are_what_the_code_says() -> None:
    assert reference.stale() == [], "run `make reference` and commit what it writes"


@pytest.mark.parametrize("path", KEYS)
def test_every_key_has_a_meaning(path: str) -> None:
    assert KEYS[path].meaning


def test_every_section_says_what_it_is() -> None:
    for path, key in KEYS.items():
        if key.section is not None:
            assert inspect.cleandoc(key.section.__doc__ or ""), path


@pytest.mark.parametrize(("name", "command"), COMMANDS, ids=[name for name, _ in COMMANDS])
def test_every_command_and_option_has_a_help_text(name: str, command: click.Command) -> None:
    assert command.help, name
    for item in reference.parameters(command):
        if isinstance(item, click.Option):
            assert item.help, f"{name} {item.opts[0]}"


@pytest.mark.parametrize("codes", [launcher.errors.Exit, training.errors.Exit])
def test_every_exit_code_has_a_meaning(codes: type[launcher.errors.Exit] | type[training.errors.Exit]) -> None:
    meanings = reference.member_texts(codes)
    assert [code.name for code in codes if not meanings.get(code.name)] == []


def test_names_of_subcommands_are_complete() -> None:
    assert {"tpu-launch emulator inject preempt", "tpu-train checkpoint verify"} <= {name for name, _ in COMMANDS}
