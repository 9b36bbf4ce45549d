"""A lazy command is imported when it is called, and by nothing else."""

import subprocess
import sys

import click
import pytest
from click.shell_completion import ShellComplete
from click.testing import CliRunner

from tests.processes import run_python
from training.cli.main import tpu_train
from training.lazy_command import LazyCommand


def make_group() -> click.Group:
    commands = {"absent": "Is never imported here.", "report": "Prints."}
    return click.Group(commands=[LazyCommand(name, "no.such.module:command", text) for name, text in commands.items()])


def test_help_lists_all_commands_without_importing_any() -> None:
    result = CliRunner().invoke(make_group(), ["--help"])
    assert result.exit_code == 0, result.output
    lines = [line.strip() for line in result.output.partition("Commands:\n")[2].splitlines()]
    assert lines == ["absent  Is never imported here.", "report  Prints."]


def test_a_mistyped_name_of_a_lazy_command_gets_a_suggestion() -> None:
    result = CliRunner().invoke(make_group(), ["abssent"])
    assert result.exit_code == 2
    assert "absent" in result.output


def test_completion_imports_no_command() -> None:
    completions = ShellComplete(make_group(), {}, "group", "_COMPLETE").get_completions([], "")
    shown = [(item.value, item.help) for item in completions]
    assert shown == [("absent", "Is never imported here."), ("report", "Prints.")]


def test_every_command_of_tpu_train_can_be_imported() -> None:
    for command in tpu_train.commands.values():
        assert isinstance(command, LazyCommand)
        assert command.load().name == command.name


def test_help_of_tpu_train_imports_neither_data_nor_configuration() -> None:
    heavy = ("numpy", "google.cloud.storage", "pydantic", "training.config", "training.data")
    script = (
        "import sys; from training.cli.main import main\n"
        f"try: main()\nfinally: assert not [name for name in {heavy} if name in sys.modules]"
    )
    run_python("-c", script, "--help")


def test_the_commands_of_checkpoint_import_neither_configuration_nor_rendezvous() -> None:
    heavy = ("pydantic", "training.config", "training.distributed")
    code = f"import sys, training.checkpoint.admin; print([name for name in {heavy} if name in sys.modules])"
    assert run_python("-c", code) == "[]\n"


@pytest.mark.parametrize("end", ["raise EndAtOnce(3)", "raise DoesNotFit"])
def test_a_crash_in_an_orderly_end_does_not_change_the_exit_code(end: str) -> None:
    script = f"""import atexit, os, click; from training.cli.main import EndAtOnce, main, tpu_train
from training.preflight.compiler import DataDependentProgram as DoesNotFit
def ends(): print("report", end=""); {end}
tpu_train.add_command(click.Command("ends", callback=ends)); atexit.register(os.abort); main()"""
    ended = subprocess.run([sys.executable, "-c", script, "ends"], capture_output=True, text=True, timeout=60)
    assert (ended.returncode, ended.stdout) == (3, "report"), ended.stderr
