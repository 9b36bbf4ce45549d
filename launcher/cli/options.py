"""The options that every verb of `tpu-launch` has, and what comes of them: the file as `config`, and the emulator's
endpoints with `--emulated`."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar, cast

import click

from launcher.cli import terminal
from launcher.errors import BadInput

DEFAULT_FILE = Path("tpu-launch.yaml")
_GKE_VERBS = ("up", "run", "status", "logs", "stop", "down", "manifest")

Function = TypeVar("Function", bound=Callable[..., Any])


def configured(function: Function, *, file_flags: tuple[str, ...] = ("-f", "--file")) -> Function:
    """Adds the options that every verb has, loads the file, and hands it over as `config`."""

    def wrapped(
        context: click.Context, /, path: Path, overrides: tuple[str, ...], provider: str, emulated: bool, **options: Any
    ) -> Any:
        from launcher.config import load

        path = options.pop("named", None) or path
        if not path.exists():
            raise BadInput(
                f"{path}: no such file: name the run's YAML file with {file_flags[0]}, or write a first one with `tpu-launch init`"
            )
        emulated = emulated or bool(context.find_root().obj)
        if provider == "gke" and function.__name__ not in _GKE_VERBS:
            raise BadInput(
                f"tpu-launch {function.__name__} is for TPU VMs; with --provider gke there are {', '.join(_GKE_VERBS)}"
            )
        if provider == "gke" and emulated:
            raise BadInput("--emulated is a slice of TPU VMs; a cluster is not emulated")
        config = replace(load(path, overrides, command=options.get("command", ())), provider=provider)
        if not emulated:
            return function(config, **options)
        from launcher.emulator import session

        with session.emulated(terminal.say):
            return function(config, **options)

    functools.update_wrapper(wrapped, function)
    decorated: Any = click.pass_context(wrapped)
    for option in (
        click.option(
            "--emulated", is_flag=True, help="Use the emulated slice of this machine instead of Google Cloud."
        ),
        click.option(
            "--provider",
            type=click.Choice(["tpu-vm", "gke"]),
            default="tpu-vm",
            show_default=True,
            help="Where the hosts are.",
        ),
        click.option(
            "--set",
            "overrides",
            multiple=True,
            metavar="KEY=VALUE",
            help="Change a key of the file: --set train.steps=100.",
        ),
        click.option(
            *file_flags,
            "path",
            type=click.Path(path_type=Path),
            default=DEFAULT_FILE,
            show_default=True,
            help="The run's YAML file.",
        ),
    ):
        decorated = option(decorated)
    return cast(Function, decorated)
